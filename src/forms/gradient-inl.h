// The gradients of the chunkwise form; with chunks of one token, of the recurrent form.
//
// A chunk of n tokens begins at state S0 and ends at S. In the letters of the chunkwise form it has readers, rows x_i that see the state and what
// tokens before i wrote, each with the gradient y_i of what it read; and writers, rows s_j that carry z_j into the state:
//
//   readers   D q (q where the read comes first) with y = dO; delta: D k with y = -beta dU; rank one: remove with y = dP
//   writers   k with z = V (delta: U = beta (V - P)); rank one: also write with z = P
//
// With Fx(i, j) the product of D_l over j < l < i, the score P_ij = sum_c x_ic s_jc Fx(i, j)_c and G_ij = y_i z_j for j < i,
//
//   dz_j = sum over i of P_ij y_i + (s_j F(n, j)) dS          dx_i = Fx(i, 0) (S0 y_i) + sum over j of G_ij Fx(i, j) s_j
//   dS0  = F(n, 0) dS + sum over i of (x_i Fx(i, 0)) y_i'     ds_j = F(n, j) (dS z_j) + sum over i of G_ij Fx(i, j) x_i
//
// so dU and dP are a triangular system solved from the last token back. What token i reads of its own write is added apart.
//
// The pairs (i, j) are taken by halves: a block of 2h tokens is the pairs between its halves, and two blocks of h. Between the halves every factor
// is anchored at the middle, Fx(i, j) = Fx(i, middle) F(middle, j), products of factors in [0, 1], and the sums are products of matrices.
//
// The gradient of token t's log decay is the sum of x_ic s_jc Fx(i, j)_c G_ij over all j < t < i, S0 and dS among them as a writer before the chunk
// and a reader behind it. Of the pairs between two halves those with t in the first are all i and the j < t, and those with t in the second all j and
// the i > t: running sums of s_j ds_j and of x_i dx_i over the pairs of that block. Nothing is subtracted, so that a decay of next to nothing has the
// gradient of next to nothing which it should have; the difference of the running sums of q dq and k dk, which is shorter, leaves their rounding.
//
// Where a target has tile registers, products of 16 tokens and more run on them: operands rounded to bf16, sums in f32, and all else as it is.
//
// Forward over the chunks keeps the states of segments, which are a chunk or more, then backward from the last.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "src/forms/job.hpp"
#include "src/forms/products.hpp"
#include "src/forms/span-inl.h"
#include "src/forms/tiles-inl.h"

#if defined(TERCET_SRC_FORMS_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERCET_SRC_FORMS_GRADIENT_INL_H_
#undef TERCET_SRC_FORMS_GRADIENT_INL_H_
#else
#define TERCET_SRC_FORMS_GRADIENT_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet {
namespace HWY_NAMESPACE {

using forms::GradientJob;

// Forward substitution, c_i += sum over j < i of table(i, j) b_j, with b_i = factor_i c_i as soon as c_i is there; without factors b is c.
template <class T>
HWY_NOINLINE void SolveLower(int vectors, int64_t rows, const T* table, int64_t table_row, const T* factor, T* c, T* b) {
  const Tag<T> d;
  const int64_t lanes = Lanes<T>(), panel = Panel<T>();
  for (int64_t begin = 0; begin < rows; begin += kTileRows) {
    const int64_t end = begin + kTileRows < rows ? begin + kTileRows : rows;
    MultiplyAdd(vectors, end - begin, begin, Left<T>{table + begin * table_row, table_row, 1}, b, c + begin * panel, panel);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t at = 0; at < vectors * lanes; at += lanes) {
        auto sum = hn::Load(d, c + i * panel + at);
        for (int64_t j = begin; j < i; ++j) sum = hn::MulAdd(hn::Set(d, table[i * table_row + j]), hn::Load(d, b + j * panel + at), sum);
        hn::Store(sum, d, c + i * panel + at);
        if (factor != nullptr) hn::Store(hn::Mul(sum, hn::Set(d, factor[i])), d, b + i * panel + at);
      }
    }
  }
}

// The same from the last row back, c_j += sum over i > j (i >= j with the diagonal) of table(i, j) b_i: with b = c or factors, back substitution.
template <class T>
HWY_NOINLINE void SolveUpper(int vectors, int64_t rows, bool diagonal, const T* table, int64_t table_row, const T* factor, T* c, T* b) {
  const Tag<T> d;
  const int64_t lanes = Lanes<T>(), panel = Panel<T>();
  for (int64_t end = rows; end > 0; end -= end < kTileRows ? end : kTileRows) {
    const int64_t begin = end < kTileRows ? 0 : end - kTileRows;
    MultiplyAdd(vectors, end - begin, rows - end, Left<T>{table + end * table_row + begin, 1, table_row}, b + end * panel, c + begin * panel, panel);
    for (int64_t j = end - 1; j >= begin; --j) {
      for (int64_t at = 0; at < vectors * lanes; at += lanes) {
        auto sum = hn::Load(d, c + j * panel + at);
        for (int64_t i = j + (diagonal ? 0 : 1); i < end; ++i)
          sum = hn::MulAdd(hn::Set(d, table[i * table_row + j]), hn::Load(d, b + i * panel + at), sum);
        hn::Store(sum, d, c + j * panel + at);
        if (factor != nullptr) hn::Store(hn::Mul(sum, hn::Set(d, factor[j])), d, b + j * panel + at);
      }
    }
  }
}

template <class R, class T>
class Gradient {
  using S = Span<R, T>;
  static constexpr bool kDecays = R::kDecay != Decay::kNone;
  // Whether a score is no product of rows but where these are faded. Else a factor for each pair of tokens is enough.
  static constexpr bool kFadesHalves = S::kPerChannel;
  static constexpr int kWriters = S::kRankOne ? 2 : 1;
  using Part = forms::Product::Part;
  // Blocks of up to this many tokens are taken pair by pair.
  static constexpr int kPairs = 4;
  // Rows of a tile register.
  static constexpr int64_t kBlock = 16;

 public:
  static int64_t Bytes(const GradientJob& job) {
    Arena arena(nullptr);
    const Gradient counted(job, arena);
    return arena.used();
  }
  static void Run(const GradientJob& job) {
    Arena arena(job.workspace);
    Gradient gradient(job, arena);
    if (gradient.OnTiles()) job.products->configure();
    gradient.Walk();
    if (gradient.OnTiles()) job.products->release();
  }

 private:
  Gradient(const GradientJob& job, Arena& arena)
      : verbs_(job.span >= kBlock ? job.products : nullptr),
        given_(job.gradient->given),
        wanted_(job.gradient->wanted),
        sums_(job.sums),
        first_head_(job.head),
        heads_(job.heads),
        job_(OneHead(job)),
        span_(job_, arena, false),
        walk_(job_),
        n_(job.span),
        row_(span_.row),
        panel_(Panel<T>()),
        panels_((span_.layer.value_dim + panel_ - 1) / panel_),
        table_row_(RoundUp(n_, panel_) + Lanes<T>()),
        levels_(kFadesHalves ? Levels(n_) : 0),
        chunks_a_segment_(job.segment),
        segments_((job.longest + n_ * chunks_a_segment_ - 1) / (n_ * chunks_a_segment_)),
        state_size_(panels_ * span_.K * panel_),
        kept_size_(state_size_ + row_) {
    const int64_t rows = n_ * row_, values = panels_ * n_ * panel_, columns = RoundUp(n_, panel_) * span_.layer.value_dim;
    kept_ = arena.Take<T>(heads_ * (segments_ > 0 && !Saved() ? segments_ : 1) * kept_size_);
    history_ = arena.Take<T>(chunks_a_segment_ > 1 ? heads_ * chunks_a_segment_ * kept_size_ : 0);
    work_ = arena.Take<T>(chunks_a_segment_ > 1 ? kept_size_ : 0);
    d_state_ = arena.Take<T>(heads_ * kept_size_);
    starts_ = arena.Take<int64_t>((job.longest + n_ - 1) / n_ + 1);
    whole_ = arena.Take<T>(row_);
    q_ = arena.Take<T>(rows);
    x_ = arena.Take<T>(rows);
    r_ = arena.Take<T>(S::kReads ? rows : 0);
    fades_ = arena.Take<T>(kDecays ? (levels_ + 2) * n_ * FactorRow() : 0);
    faded_readers_ = arena.Take<T>(kDecays ? (levels_ + 1) * rows : 0);
    factors_ = arena.Take<T>(S::kPerToken ? n_ * table_row_ : 0);
    d_logs_ = arena.Take<T>(S::kPerToken ? RoundUp(n_, Lanes<T>()) : 0);
    d_x_ = arena.Take<T>(rows);
    d_faded_ = arena.Take<T>(kDecays ? rows : 0);
    d_log_ = arena.Take<T>(S::kPerChannel ? rows : 0);
    for (int b = 0; b < kWriters; ++b) {
      faded_writers_[b] = arena.Take<T>(kDecays ? (levels_ + 1) * rows : 0);
      d_writers_[b] = arena.Take<T>(rows);
      z_[b] = arena.Take<T>(values);
      d_z_[b] = arena.Take<T>(values);
      z_columns_[b] = arena.Take<T>(columns);
      solve_[b] = arena.Take<T>(S::kReads ? n_ * table_row_ : 0);
      scores_[b] = arena.Take<T>(n_ * table_row_);
      products_[b] = arena.Take<T>(n_ * table_row_);
    }
    y_ = arena.Take<T>(values);
    y_columns_ = arena.Take<T>(columns);
    residue_ = arena.Take<T>(S::kDelta ? values : 0);
    out_ = arena.Take<T>(span_.layer.normalize ? values : 0);
    d_denominators_ = arena.Take<T>(span_.layer.normalize ? n_ : 0);
    turned_ = arena.Take<T>(span_.K * panel_);
    beta_sums_ = arena.Take<T>(RoundUp(n_, Lanes<T>()));
    one_row_ = arena.Take<T>(RoundUp(span_.K > span_.layer.value_dim ? span_.K : span_.layer.value_dim, Lanes<T>()));
    if (OnTiles()) {
      const int64_t most = span_.K > n_ ? span_.K : n_, deep = most > span_.layer.value_dim ? most : span_.layer.value_dim;
      tiles_ = arena.Take<std::byte>(std::max(forms::RoomFor(n_, deep), forms::RoomFor(most, n_)));
    }
    const Inputs& in = span_.layer.in;
    const auto room = [&](const ConstTensor& t, int64_t readers, int64_t size) {
      return arena.Take<T>(t.given() && t.rank > 2 && t.shape[2] != readers ? size : 0);
    };
    shared_q_ = room(in.q, span_.layer.out_heads, rows);
    shared_k_ = room(in.k, span_.layer.state_heads, rows);
    shared_v_ = room(in.v, span_.layer.state_heads, values);
    shared_log_ = room(in.log_decay, span_.layer.state_heads, rows);
    shared_beta_ = room(in.beta, span_.layer.state_heads, RoundUp(n_, Lanes<T>()));
    shared_remove_ = room(in.remove, span_.layer.state_heads, rows);
    shared_write_ = room(in.write, span_.layer.state_heads, rows);
  }
  static Job OneHead(Job job) {
    job.heads = 1;
    return job;
  }

  // ---- The walk -----------------------------------------------------------------------------------------------------------------------------------

  void Walk() {
    const int64_t begin = walk_.begin();
    ClearWhatIsNotValid(begin);
    for (int64_t h = 0; h < heads_; ++h) {
      TakeHead(h);
      for (int64_t i = 0; i < forms::SumsOf(span_.layer); ++i) Sums()[i] = 0;
      Forward(h, begin);
      LoadState(given_.final_state, given_.final_key_sum, job_.sequence, DState(h));
    }
    for (int64_t segment = (chunks_ + chunks_a_segment_ - 1) / chunks_a_segment_ - 1; segment >= 0; --segment) {
      const int64_t first = segment * chunks_a_segment_;
      const int64_t last = first + chunks_a_segment_ < chunks_ ? first + chunks_a_segment_ : chunks_;
      for (int64_t h = 0; h < heads_ && chunks_a_segment_ > 1; ++h) {
        TakeHead(h);
        Bring(h, segment);
        Copy(kept_size_, Kept(h, segment), History(h, 0));
        for (int64_t c = first; c + 1 < last; ++c) {
          TakeChunk(c);
          Solve(History(h, c - first));
          Advance(History(h, c - first), History(h, c - first + 1));
        }
      }
      for (int64_t c = last - 1; c >= first; --c) {
        for (int64_t h = 0; h < heads_; ++h) {
          TakeHead(h);
          TakeChunk(c);
          if (chunks_a_segment_ == 1) Bring(h, segment);
          Backward(chunks_a_segment_ > 1 ? History(h, c - first) : Kept(h, segment), DState(h));
        }
      }
    }
    for (int64_t h = 0; h < heads_; ++h) {
      TakeHead(h);
      StoreState(DState(h));
    }
  }

  bool Saved() const { return job_.saved->tokens > 0; }
  // The state before a segment; a saved one is brought first.
  T* Kept(int64_t h, int64_t segment) const { return kept_ + (h * (Saved() ? 1 : segments_) + (Saved() ? 0 : segment)) * kept_size_; }
  void Bring(int64_t h, int64_t segment) const {
    if (!Saved()) return;
    const forms::Saved& saved = *job_.saved;
    LoadState(saved.state, saved.key_sum, saved.PlaceOf(span_.layer, job_.sequence, segment * saved.tokens), Kept(h, segment));
  }
  T* History(int64_t h, int64_t c) const { return history_ + (h * chunks_a_segment_ + c) * kept_size_; }
  T* DState(int64_t h) const { return d_state_ + h * kept_size_; }
  double* Sums() const { return sums_ + (job_.sequence * span_.layer.state_heads + job_.head) * forms::SumsOf(span_.layer); }

  // The states of a head, where none were saved, and where its chunks begin.
  void Forward(int64_t h, int64_t begin) {
    const Inputs& in = span_.layer.in;
    walk_.Seek(begin);
    if (!Saved()) LoadState(in.initial_state, in.initial_key_sum, job_.sequence, Kept(h, 0));
    const T* from = Kept(h, 0);
    for (chunks_ = 0;; ++chunks_) {
      starts_[chunks_] = walk_.begin();
      if (Saved()) {
        if (walk_.Next(n_, span_.tokens) == 0) return;
        continue;
      }
      if (!TakeNext()) return;
      if (walk_.length() == 0) {
        ++chunks_;
        return;
      }
      const int64_t after = chunks_ + 1;
      T* to = after % chunks_a_segment_ == 0 ? Kept(h, after / chunks_a_segment_) : work_;
      Solve(from);
      Advance(from, to);
      from = to;
    }
  }

  void TakeHead(int64_t h) {
    if (job_.head == first_head_ + h && packed_) return;
    job_.head = first_head_ + h;
    span_.PackHead();
    packed_ = true;
  }
  void TakeChunk(int64_t c) {
    walk_.Seek(starts_[c]);
    TakeNext();
  }
  // The next tokens: keys and gates by the span, values in panels.
  bool TakeNext() {
    if (!span_.Next(walk_)) return false;
    const ConstTensor& v = span_.layer.in.v;
    PackPanels(v, HeadOf(v, 2, job_.head, span_.layer.state_heads), z_[0]);
    SetFades();
    FadeWriters();
    SetFactors();
    return true;
  }

  // Factors of tokens: a row each, or a number.
  const T* Decays() const { return span_.D; }
  int64_t FactorRow() const { return S::kPerChannel ? row_ : 1; }
  // Token i's of channels c and on.
  HWY_INLINE Vector<T> Factor(const T* factors, int64_t i, int64_t c) const {
    const Tag<T> d;
    if constexpr (S::kPerChannel) return hn::Load(d, factors + i * row_ + c);
    return hn::Set(d, factors[i]);
  }
  // The rows of n tokens by their factors.
  void MultiplyTokens(int64_t n, const T* rows, const T* factors, T* to) const {
    if constexpr (S::kPerChannel) return MultiplyRows(n * row_, rows, factors, to);
    const Tag<T> d;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = i * row_; c < (i + 1) * row_; c += Lanes<T>()) hn::Store(hn::Mul(hn::Load(d, rows + c), hn::Set(d, factors[i])), d, to + c);
  }
  const T* Writer(int b) const { return b == 0 ? span_.k_room : span_.w_room; }

  // ---- Forward ------------------------------------------------------------------------------------------------------------------------------------

  // What the chunk writes: delta: V becomes U, and `residue` is V - P. Rank one: P. Leaves the scores of the removing reader.
  void Solve(const T* state) {
    if constexpr (S::kReads) {
      const T* r = Removers();
      FadeReaders(r);
      Scores(r, solve_);
      const T* faded = FadedReaders(r);
      T* reads = S::kDelta ? residue_ : z_[1];
      ReadState(faded, state, reads);
      if constexpr (S::kDelta) {
        const Tag<T> d;
        for (int64_t p = 0; p < panels_; ++p) {
          T* read = PanelOf(reads, p);
          const T* v = PanelOf(z_[0], p);
          for (int64_t i = 0; i < span_.n; ++i)
            for (int64_t x = i * panel_; x < i * panel_ + Vectors(p) * Lanes<T>(); x += Lanes<T>())
              hn::Store(hn::Sub(hn::Load(d, v + x), hn::Load(d, read + x)), d, read + x);
        }
        for (int64_t i = 0; i < span_.n; ++i) ScaleRow(RoundUp(i, Lanes<T>()), T{-1}, solve_[0] + i * table_row_);
        SolveForward(solve_[0], span_.beta, residue_, z_[0]);
      } else {
        AddLower(solve_[0], false, z_[0], z_[1]);
        SolveForward(solve_[1], nullptr, z_[1], z_[1]);
      }
    }
  }

  // The rows that read what is removed.
  const T* Removers() const {
    if constexpr (S::kRankOne) return span_.r_room;
    if constexpr (!kDecays) return span_.k_room;
    MultiplyTokens(span_.n, span_.k_room, Decays(), r_);
    return r_;
  }

  // to = the state after the chunk. `from` may be `to`.
  void Advance(const T* from, T* to) {
    SetWhole();
    Fade(from, to);
    T* key_sum = to + state_size_;
    for (int b = 0; b < kWriters; ++b) {
      const T* faded = FadedWriters(b);
      WriteState(faded, z_[b], to);
      if (span_.layer.normalize)
        for (int64_t j = 0; j < span_.n; ++j) AddRow(row_, faded + j * row_, key_sum);
    }
  }

  // The chunk's factors, F(n, 0). A constant decay's power comes from f64, rounded once.
  void SetWhole() {
    if constexpr (R::kDecay == Decay::kPerHead) {
      Fill(row_, static_cast<T>(std::exp(span_.LogDecay() * static_cast<double>(span_.n))), whole_);
    } else if constexpr (S::kPerToken) {
      Fill(row_, ChunkWriters()[0] * Decays()[0], whole_);
    } else if constexpr (kDecays) {
      MultiplyRows(row_, ChunkWriters(), Decays(), whole_);
    }
  }
  // A state and its key sum times F(n, 0).
  void Fade(const T* from, T* to) const {
    if constexpr (kDecays) {
      const Tag<T> d;
      for (int64_t p = 0; p < panels_; ++p) {
        for (int64_t c = 0; c < span_.K; ++c) {
          const int64_t at = (p * span_.K + c) * panel_;
          const auto factor = hn::Set(d, whole_[c]);
          for (int64_t x = at; x < at + Vectors(p) * Lanes<T>(); x += Lanes<T>()) hn::Store(hn::Mul(hn::Load(d, from + x), factor), d, to + x);
        }
      }
      MultiplyRows(row_, from + state_size_, whole_, to + state_size_);
    } else if (from != to) {
      Copy(kept_size_, from, to);
    }
  }

  // ---- Backward -----------------------------------------------------------------------------------------------------------------------------------

  void Backward(const T* state, T* d_state) {
    Solve(state);
    const int64_t n = span_.n;
    if constexpr (S::kPerChannel) Fill(n * row_, T{0}, d_log_);
    for (int64_t i = 0; S::kPerToken && i < n; ++i) d_logs_[i] = 0;
    for (int b = 0; b < kWriters; ++b) {
      if (!OnTiles()) Columns(z_[b], z_columns_[b]);
      FromTheEnd(b, d_state);
    }
    if constexpr (kDecays) {
      SetWhole();
      FadeWhole(state, d_state);
    }
    for (int64_t g = 0; g < span_.queries; ++g) Query(g, state, d_state);
    if constexpr (S::kReads) Remove(state, d_state);
    DeliverKeys();
  }

  // What the state after the chunk passes back to writer b: dz = (s F(n)) dS and ds = F(n) (dS z).
  void FromTheEnd(int b, const T* d_state) {
    const T* faded = FadedWriters(b);
    ReadState(faded, d_state, d_z_[b]);
    T* d_rows = kDecays ? d_faded_ : d_writers_[b];
    Through(d_state, z_[b], z_columns_[b], d_rows);
    if (span_.layer.normalize)
      for (int64_t j = 0; j < span_.n; ++j) AddRow(row_, d_state + state_size_, d_rows + j * row_);
    if (kDecays) AbsorbWriters(b, 0, span_.n, faded, ChunkWriters(), d_rows, false);
  }

  // What the state before the chunk and the gradient of the one after it have in common: every token's decay lies between them. And that gradient
  // times F(n, 0).
  void FadeWhole(const T* state, T* d_state) {
    const Tag<T> d;
    T* sums = one_row_;
    Fill(row_, T{0}, sums);
    for (int64_t c = 0; c < span_.K; ++c) {
      auto sum = hn::Zero(d);
      const auto factor = hn::Set(d, whole_[c]);
      for (int64_t p = 0; p < panels_; ++p) {
        const int64_t at = (p * span_.K + c) * panel_;
        for (int64_t x = at; x < at + Vectors(p) * Lanes<T>(); x += Lanes<T>()) {
          const auto gradient = hn::Load(d, d_state + x);
          sum = hn::MulAdd(hn::Load(d, state + x), gradient, sum);
          hn::Store(hn::Mul(gradient, factor), d, d_state + x);
        }
      }
      sums[c] = hn::GetLane(hn::SumOfLanes(d, sum));
      if (span_.layer.normalize) sums[c] += state[state_size_ + c] * d_state[state_size_ + c];
    }
    MultiplyRows(row_, d_state + state_size_, whole_, d_state + state_size_);
    MultiplyRows(row_, sums, whole_, sums);
    const T all = Sum(span_.K, sums);
    for (int64_t i = 0; i < span_.n; ++i) {
      if constexpr (S::kPerToken)
        d_logs_[i] += all;
      else
        AddRow(row_, sums, d_log_ + i * row_);
    }
  }

  // Query head g of this state head.
  void Query(int64_t g, const T* state, T* d_state) {
    const int64_t n = span_.n, head = job_.head * span_.queries + g;
    const bool normalize = span_.layer.normalize;
    span_.Queries(walk_.batch(), g, q_);
    const T* x = q_;
    if constexpr (kDecays && !S::kReadBefore) {
      MultiplyTokens(n, q_, Decays(), x_);
      x = x_;
    }
    PackPanels(given_.out, head, y_);
    FadeReaders(x);
    Scores(x, scores_);
    for (int b = 0; b < kWriters; ++b) OwnTerms(Writer(b), scores_[b]);
    if (normalize) Divide(FadedReaders(x), state);
    if (!OnTiles()) Columns(y_, y_columns_);
    for (int b = 0; b < kWriters; ++b) {
      AddUpper(scores_[b], true, y_, d_z_[b]);
      Products(b);
    }
    if (normalize) {
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j <= i; ++j) products_[0][i * table_row_ + j] += d_denominators_[i];
    }
    Read(x, scores_, 1, state, d_state);
    OwnGradients(x);
    DeliverQueries(head);
  }

  // The reader that removes.
  void Remove(const T* state, T* d_state) {
    const int64_t n = span_.n;
    if constexpr (S::kDelta) {  // d_z becomes dU, y is beta dU, which is dV, and then its negative
      SolveBackward(solve_[0], span_.beta, d_z_[0], y_);
      DeliverBeta();
      DeliverValues(y_);
      for (int64_t p = 0; p < panels_; ++p)
        for (int64_t i = 0; i < n; ++i) ScaleRow(Vectors(p) * Lanes<T>(), T{-1}, PanelOf(y_, p) + i * panel_);
    }
    if constexpr (S::kRankOne) {
      SolveBackward(solve_[1], nullptr, d_z_[1], d_z_[1]);
      AddUpper(solve_[0], false, d_z_[1], d_z_[0]);
      for (int64_t p = 0; p < panels_; ++p)
        for (int64_t i = 0; i < n; ++i) Copy(Vectors(p) * Lanes<T>(), PanelOf(d_z_[1], p) + i * panel_, PanelOf(y_, p) + i * panel_);
    }
    if (!OnTiles()) Columns(y_, y_columns_);
    for (int b = 0; b < kWriters; ++b) Products(b);
    const T* r = Removers();
    FadeReaders(r);
    Read(r, solve_, S::kDelta ? -1 : 1, state, d_state);
    if constexpr (S::kDelta) {
      const Tag<T> d;
      for (int64_t i = 0; i < n; ++i) {
        auto sum = hn::Zero(d);
        for (int64_t c = 0; c < row_; c += Lanes<T>()) {
          const int64_t at = i * row_ + c;
          const auto d_r = Undecayed(i, c, hn::Load(d, r + at), hn::Load(d, d_x_ + at), sum);
          hn::Store(hn::Add(hn::Load(d, d_writers_[0] + at), d_r), d, d_writers_[0] + at);
        }
        if constexpr (S::kPerToken) d_logs_[i] += hn::GetLane(hn::SumOfLanes(d, sum));
      }
    }
  }

  // d_x of reader x, whose y is in y_columns_, products with the writers' z in products_ and scores times `sign` in the tables; its share of dS0, of
  // the writers and of the decays.
  void Read(const T* x, T* const (&tables)[kWriters], T sign, const T* state, T* d_state) {
    const int64_t n = span_.n;
    const T* faded = FadedReaders(x);
    WriteState(faded, y_, d_state);
    T* d_rows = kDecays ? d_faded_ : d_x_;
    Through(state, y_, y_columns_, d_rows);
    if (span_.layer.normalize) {
      const Tag<T> d;
      T* d_key_sum = d_state + state_size_;
      const T* key_sum = state + state_size_;
      for (int64_t i = 0; i < n; ++i) {
        const auto d_denominator = hn::Set(d, d_denominators_[i]);
        for (int64_t c = 0; c < row_; c += Lanes<T>()) {
          hn::Store(hn::MulAdd(d_denominator, hn::Load(d, faded + i * row_ + c), hn::Load(d, d_key_sum + c)), d, d_key_sum + c);
          hn::Store(hn::MulAdd(d_denominator, hn::Load(d, key_sum + c), hn::Load(d, d_rows + i * row_ + c)), d, d_rows + i * row_ + c);
        }
      }
    }
    if constexpr (S::kPerToken) {
      for (int b = 0; b < kWriters; ++b) FadePairs(tables[b], sign, products_[b]);
    }
    if (kDecays) AbsorbReaders(0, n, faded, ChunkReaders(), d_rows, false);
    if (OnTiles() && !kFadesHalves) {
      for (int b = 0; b < kWriters; ++b) {
        Multiply(n, span_.K, n, TableOf(products_[b]), false, RowsOf(Writer(b)), false, RowsOf(d_x_), true, Part::kBelow);
        Multiply(n, span_.K, n, TableOf(products_[b]), true, RowsOf(x), false, RowsOf(d_writers_[b]), true, Part::kBelow);
      }
      return;
    }
    ForHalves([&](int64_t level, int64_t begin, int64_t middle, int64_t end) HWY_ATTR {
      const int64_t first = middle - begin, second = end - middle;
      const T* xs = HalfReaders(x, level);
      T* d_xs = kFadesHalves ? d_faded_ : d_x_;
      for (int b = 0; b < kWriters; ++b) {
        const T* table = products_[b] + middle * table_row_ + begin;
        const T* writers = HalfWriters(b, level);
        T* d_writers = kFadesHalves ? d_faded_ : d_writers_[b];
        if (OnTiles() && first >= kBlock) {
          Multiply(second, span_.K, first, TableOf(table), false, RowsOf(writers + begin * row_), false, RowsOf(d_xs + middle * row_), b > 0);
          Multiply(first, span_.K, second, TableOf(table), true, RowsOf(xs + middle * row_), false, RowsOf(d_writers + begin * row_), false);
        } else {
          MultiplyAddWide(row_, second, first, Left<T>{table, table_row_, 1}, writers + begin * row_, row_, d_xs + middle * row_, row_,
                          !kFadesHalves || b > 0);
          MultiplyAddWide(row_, first, second, Left<T>{table, 1, table_row_}, xs + middle * row_, row_, d_writers + begin * row_, row_,
                          !kFadesHalves);
        }
        if (kFadesHalves) AbsorbWriters(b, begin, middle, writers, FadesOf(level), d_writers, true);
      }
      if (kFadesHalves) AbsorbReaders(middle, end, xs, FadesOf(level), d_xs, true);
    });
    for (int64_t begin = 0; begin < n; begin += kPairs) {
      for (int b = 0; b < kWriters; ++b) {
        if (n - begin >= 4)
          PairGradients<4>(begin, x, b);
        else if (n - begin == 3)
          PairGradients<3>(begin, x, b);
        else if (n - begin == 2)
          PairGradients<2>(begin, x, b);
      }
    }
  }

  // The gradient of what token i's decay was multiplied to x: D d_x, and to the decay x d_x, which `sum` collects where a token has one.
  HWY_INLINE Vector<T> Undecayed(int64_t i, int64_t c, Vector<T> x, Vector<T> d_x, Vector<T>& sum) const {
    const Tag<T> d;
    if constexpr (!kDecays) return d_x;
    if constexpr (S::kPerChannel)
      hn::Store(hn::MulAdd(x, d_x, hn::Load(d, d_log_ + i * row_ + c)), d, d_log_ + i * row_ + c);
    else
      sum = hn::MulAdd(x, d_x, sum);
    return hn::Mul(d_x, Factor(Decays(), i, c));
  }

  // What queries read of their own token's write, on the diagonals: dq = D dx and more, left in d_x_.
  void OwnGradients(const T* x) {
    const Tag<T> d;
    T* bonus_sums = one_row_;
    if constexpr (S::kReadBefore) Fill(row_, T{0}, bonus_sums);
    for (int64_t i = 0; i < span_.n; ++i) {
      auto log_sum = hn::Zero(d);
      for (int64_t c = 0; c < row_; c += Lanes<T>()) {
        const int64_t at = i * row_ + c;
        auto d_q = hn::Load(d, d_x_ + at);
        const auto q = hn::Load(d, q_ + at);
        if constexpr (!S::kReadBefore) d_q = Undecayed(i, c, hn::Load(d, x + at), d_q, log_sum);
        for (int b = 0; b < kWriters; ++b) {
          const auto product = hn::Set(d, products_[b][i * table_row_ + i]);
          auto s = hn::Load(d, Writer(b) + at), read = q;
          if constexpr (S::kReadBefore) {
            const auto bonus = hn::Load(d, span_.bonus + c);
            hn::Store(hn::MulAdd(product, hn::Mul(q, s), hn::Load(d, bonus_sums + c)), d, bonus_sums + c);
            s = hn::Mul(s, bonus);
            read = hn::Mul(q, bonus);
          }
          d_q = hn::MulAdd(product, s, d_q);
          hn::Store(hn::MulAdd(product, read, hn::Load(d, d_writers_[b] + at)), d, d_writers_[b] + at);
        }
        hn::Store(d_q, d, d_x_ + at);
      }
      if constexpr (S::kPerToken) d_logs_[i] += hn::GetLane(hn::SumOfLanes(d, log_sum));
    }
    if constexpr (S::kReadBefore)
      for (int64_t c = 0; c < span_.K; ++c) Sums()[2 + c] += static_cast<double>(bonus_sums[c]);
  }

  // What token i reads of its own write: table_ii = q_i s_i, or through the bonus.
  void OwnTerms(const T* s, T* table) const {
    const Tag<T> d;
    for (int64_t i = 0; i < span_.n; ++i) {
      const T *q = q_ + i * row_, *at = s + i * row_, *bonus = span_.bonus;
      table[i * table_row_ + i] = SumLanes<T>(span_.K, [=](int64_t c) HWY_ATTR {
        auto x = hn::Load(d, q + c);
        if constexpr (S::kReadBefore) x = hn::Mul(x, hn::Load(d, bonus + c));
        return hn::Mul(x, hn::Load(d, at + c));
      });
    }
  }

  // Normalised: y becomes the gradient of the numerator, dO over the denominator, and that of the denominator is -y O.
  void Divide(const T* faded, const T* state) {
    const Tag<T> d;
    const int64_t n = span_.n;
    ReadState(faded, state, out_);
    AddLower(scores_[0], true, z_[0], out_);
    for (int64_t i = 0; i < n; ++i) {
      const T denominator = Dot(row_, faded + i * row_, state + state_size_) + Sum(i + 1, scores_[0] + i * table_row_);
      auto sum = hn::Zero(d);
      for (int64_t p = 0; p < panels_; ++p) {
        const int64_t width = Vectors(p) * Lanes<T>();
        T *y = PanelOf(y_, p) + i * panel_, *out = PanelOf(out_, p) + i * panel_;
        DivideRow(width, denominator, y);
        DivideRow(width, denominator, out);
        for (int64_t x = 0; x < width; x += Lanes<T>()) sum = hn::MulAdd(hn::Load(d, y + x), hn::Load(d, out + x), sum);
      }
      d_denominators_[i] = -hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }

  // ---- Halves and scores --------------------------------------------------------------------------------------------------------------------------

  // Level l has blocks of two halves of kPairs 2^l tokens; the second may be short, or missing, and then there is no such pair.
  static int64_t Levels(int64_t tokens) {
    int64_t levels = 0;
    while (kPairs << levels < tokens) ++levels;
    return levels;
  }
  template <class Each>
  HWY_INLINE void ForHalves(Each&& each) const {
    for (int64_t level = 0; kPairs << level < span_.n; ++level) {
      const int64_t half = kPairs << level;
      for (int64_t begin = 0; begin + half < span_.n; begin += 2 * half)
        each(level, begin, begin + half, begin + 2 * half < span_.n ? begin + 2 * half : span_.n);
    }
  }

  // The factors of a level by which rows are multiplied: in a second half, readers, those of the tokens before them in it, and in a first half,
  // writers, those of the tokens after them. Behind the levels there are two more, for the chunk's readers and its writers.
  T* FadesOf(int64_t level) const { return fades_ + level * n_ * FactorRow(); }
  T* ChunkReaders() const { return FadesOf(levels_); }
  T* ChunkWriters() const { return FadesOf(levels_ + 1); }
  void SetFades() const {
    if constexpr (!kDecays) return;
    if constexpr (kFadesHalves) {
      ForHalves([&](int64_t level, int64_t begin, int64_t middle, int64_t end) HWY_ATTR {
        FadeRows((middle - 1) * row_, begin * row_ - 1, -row_, FadesOf(level));
        FadeRows(middle * row_, end * row_, row_, FadesOf(level));
      });
    }
    if constexpr (S::kPerToken) {
      T factor = 1;
      for (int64_t i = 0; i < span_.n; ++i) {
        ChunkReaders()[i] = factor;
        factor *= Decays()[i];
      }
      factor = 1;
      for (int64_t i = span_.n - 1; i >= 0; --i) {
        ChunkWriters()[i] = factor;
        factor *= Decays()[i];
      }
    } else {
      FadeRows(0, span_.n * row_, row_, ChunkReaders());
      FadeRows((span_.n - 1) * row_, -1, -row_, ChunkWriters());
    }
  }
  // From row `at` on, `step` apart, to before `end`: the product of the decays of the rows walked over.
  void FadeRows(int64_t at, int64_t end, int64_t step, T* HWY_RESTRICT fades) const {
    const T* HWY_RESTRICT decays = Decays();
    ForColumns([&]<int m>(int64_t c, std::integral_constant<int, m>) HWY_ATTR {
      const Tag<T> d;
      Vector<T> factor[m];
      HWY_UNROLL(4)
      for (int n = 0; n < m; ++n) factor[n] = hn::Set(d, T{1});
      for (int64_t x = at + c; step > 0 ? x < end : x > end; x += step) {
        HWY_UNROLL(4)
        for (int n = 0; n < m; ++n) {
          hn::Store(factor[n], d, fades + x + n * Lanes<T>());
          factor[n] = hn::Mul(factor[n], hn::Load(d, decays + x + n * Lanes<T>()));
        }
      }
    });
  }
  // Walks over rows column by column, kSide vectors at a time: what runs along the rows is a chain of operations, and so are several side by side.
  static constexpr int kSide = 4;
  template <class Each>
  HWY_INLINE void ForColumns(Each&& each) const {
    int64_t c = 0;
    for (; c + kSide * Lanes<T>() <= row_; c += kSide * Lanes<T>()) each(c, std::integral_constant<int, kSide>());
    for (; c < row_; c += Lanes<T>()) each(c, std::integral_constant<int, 1>());
  }

  // The rows of reader x, or of writer b, by the factors of a level, and by those of the chunk.
  const T* HalfReaders(const T* x, int64_t level) const { return kFadesHalves ? faded_readers_ + level * n_ * row_ : x; }
  const T* HalfWriters(int b, int64_t level) const { return kFadesHalves ? faded_writers_[b] + level * n_ * row_ : Writer(b); }
  const T* FadedReaders(const T* x) const { return kDecays ? faded_readers_ + levels_ * n_ * row_ : x; }
  const T* FadedWriters(int b) const { return kDecays ? faded_writers_[b] + levels_ * n_ * row_ : Writer(b); }
  void FadeReaders(const T* x) const {
    if constexpr (!kDecays) return;
    if constexpr (kFadesHalves) {
      ForHalves([&](int64_t level, int64_t, int64_t middle, int64_t end) HWY_ATTR {
        const int64_t at = middle * row_;
        MultiplyRows((end - middle) * row_, x + at, FadesOf(level) + at, faded_readers_ + level * n_ * row_ + at);
      });
    }
    MultiplyTokens(span_.n, x, ChunkReaders(), faded_readers_ + levels_ * n_ * row_);
  }
  void FadeWriters() const {
    if constexpr (!kDecays) return;
    for (int b = 0; b < kWriters; ++b) {
      if constexpr (kFadesHalves) {
        ForHalves([&](int64_t level, int64_t begin, int64_t middle, int64_t) HWY_ATTR {
          const int64_t at = begin * row_;
          MultiplyRows((middle - begin) * row_, Writer(b) + at, FadesOf(level) + at, faded_writers_[b] + level * n_ * row_ + at);
        });
      }
      MultiplyTokens(span_.n, Writer(b), ChunkWriters(), faded_writers_[b] + levels_ * n_ * row_);
    }
  }

  // One decay a token: factors_(i, j) = Fx(i, j) for j < i, row i from row i - 1, and 1 on the diagonal.
  void SetFactors() const {
    if constexpr (S::kPerToken) {
      for (int64_t i = 1; i < span_.n; ++i) {
        T* to = factors_ + i * table_row_;
        const T *from = to - table_row_, decay = span_.D[i - 1];
        const Tag<T> d;
        for (int64_t j = 0; j < i - 1; j += Lanes<T>()) hn::Store(hn::Mul(hn::Load(d, from + j), hn::Set(d, decay)), d, to + j);
        to[i - 1] = to[i] = 1;
      }
    }
  }
  // A table's numbers for j < i times these, in whole vectors: what lies above is nobody's.
  void FadeTable(T* table) const {
    for (int64_t i = 1; i < span_.n; ++i) MultiplyRows(i, table + i * table_row_, factors_ + i * table_row_, table + i * table_row_);
  }
  // To the decay of every token t the sum of scores times products over the pairs that it lies between, j < t < i; then the factors to the products.
  void FadePairs(const T* scores, T sign, T* products) const {
    const Tag<T> d;
    T* sums = beta_sums_;  // over i > t; nothing else is in them now
    Fill(span_.n, T{0}, sums);
    for (int64_t t = span_.n - 2; t > 0; --t) {
      const int64_t at = (t + 1) * table_row_;
      auto sum = hn::Zero(d);
      for (int64_t j = 0; j < t; j += Lanes<T>()) {
        const auto column = hn::MulAdd(hn::Load(d, scores + at + j), hn::Load(d, products + at + j), hn::Load(d, sums + j));
        hn::Store(column, d, sums + j);
        sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(t - j)), column));
      }
      d_logs_[t] += sign * hn::GetLane(hn::SumOfLanes(d, sum));
    }
    FadeTable(products);
  }

  // d_x = fades d_faded, or with `add` += , and to the decay of every token the sum of faded x d_faded over the rows after it.
  void AbsorbReaders(int64_t begin, int64_t end, const T* faded, const T* fades, const T* d_faded, bool add) const {
    Absorb(end - 1, begin - 1, -1, faded, fades, d_faded, d_x_, add);
  }
  // Likewise for writer b, and the rows before.
  void AbsorbWriters(int b, int64_t begin, int64_t end, const T* faded, const T* fades, const T* d_faded, bool add) const {
    Absorb(begin, end, 1, faded, fades, d_faded, d_writers_[b], add);
  }
  // From token `begin` on, `step` apart, to before `end`: to = or += fades d_faded, and d_log += the sum of faded d_faded over the rows walked over.
  // Where a token has one decay that is always the first share.
  void Absorb(int64_t begin, int64_t end, int64_t step, const T* HWY_RESTRICT faded, const T* HWY_RESTRICT fades, const T* HWY_RESTRICT d_faded,
              T* HWY_RESTRICT to, bool add) const {
    const Tag<T> d;
    if constexpr (S::kPerToken) {
      T before = 0;
      for (int64_t i = begin; i != end; i += step) {
        auto sum = hn::Zero(d);
        for (int64_t x = i * row_; x < (i + 1) * row_; x += Lanes<T>()) {
          const auto gradient = hn::Load(d, d_faded + x);
          sum = hn::MulAdd(hn::Load(d, faded + x), gradient, sum);
          hn::Store(hn::Mul(hn::Set(d, fades[i]), gradient), d, to + x);
        }
        d_logs_[i] += before;
        before += hn::GetLane(hn::SumOfLanes(d, sum));
      }
    } else if constexpr (kDecays) {
      T* HWY_RESTRICT d_log = d_log_;
      ForColumns([&]<int m>(int64_t c, std::integral_constant<int, m>) HWY_ATTR {
        Vector<T> sum[m];
        HWY_UNROLL(4)
        for (int n = 0; n < m; ++n) sum[n] = hn::Zero(d);
        for (int64_t i = begin; i != end; i += step) {
          HWY_UNROLL(4)
          for (int n = 0; n < m; ++n) {
            const int64_t x = i * row_ + c + n * Lanes<T>();
            const auto gradient = hn::Load(d, d_faded + x), faded_gradient = hn::Mul(hn::Load(d, fades + x), gradient);
            hn::Store(hn::Add(hn::Load(d, d_log + x), sum[n]), d, d_log + x);
            sum[n] = hn::MulAdd(hn::Load(d, faded + x), gradient, sum[n]);
            hn::Store(add ? hn::Add(hn::Load(d, to + x), faded_gradient) : faded_gradient, d, to + x);
          }
        }
      });
    }
  }

  // table_b(i, j) = sum_c x_ic s_jc Fx(i, j)_c for j < i, for every writer b. The readers are faded already.
  void Scores(const T* x, T* const (&tables)[kWriters]) const {
    const bool whole = OnTiles() && !kFadesHalves;
    for (int b = 0; whole && b < kWriters; ++b)
      Multiply(span_.n, span_.n, span_.K, RowsOf(x), false, RowsOf(Writer(b)), true, TableOf(tables[b]), false);
    ForHalves([&](int64_t level, int64_t begin, int64_t middle, int64_t end) HWY_ATTR {
      for (int b = 0; !whole && b < kWriters; ++b) {
        const T *readers = HalfReaders(x, level) + middle * row_, *writers = HalfWriters(b, level) + begin * row_;
        T* table = tables[b] + middle * table_row_ + begin;
        if (OnTiles() && middle - begin >= kBlock)
          Multiply(end - middle, middle - begin, span_.K, RowsOf(readers), false, RowsOf(writers), true, TableOf(table), false);
        else
          DotRows(row_, end - middle, readers, row_, middle - begin, writers, row_, table, table_row_);
      }
    });
    for (int64_t begin = 0; !whole && begin < span_.n; begin += kPairs) {
      const int64_t count = span_.n - begin;
      for (int b = 0; b < kWriters; ++b) {
        T* table = tables[b] + begin * table_row_ + begin;
        const T* s = Writer(b);
        if (count >= 4)
          PairScores<4>(begin, x, s, table);
        else if (count == 3)
          PairScores<3>(begin, x, s, table);
        else if (count == 2)
          PairScores<2>(begin, x, s, table);
      }
    }
    if constexpr (S::kPerToken) {
      for (int b = 0; b < kWriters; ++b) FadeTable(tables[b]);
    }
  }

  // The scores among C tokens from `begin` on.
  template <int C>
  HWY_NOINLINE void PairScores(int64_t begin, const T* HWY_RESTRICT x, const T* HWY_RESTRICT s, T* HWY_RESTRICT table) const {
    const Tag<T> d;
    Vector<T> sums[8];
    HWY_UNROLL(8)
    for (int n = 0; n < 8; ++n) sums[n] = hn::Zero(d);
    for (int64_t c = 0; c < row_; c += Lanes<T>()) {
      const int64_t at = begin * row_ + c;
      Vector<T> faded[C];
      HWY_UNROLL(4)
      for (int j = 0; j < C - 1; ++j) faded[j] = hn::Load(d, s + at + j * row_);
      HWY_UNROLL(4)
      for (int i = 1; i < C; ++i) {
        const auto reader = hn::Load(d, x + at + i * row_);
        HWY_UNROLL(4)
        for (int j = 0; j < i; ++j) {
          const int n = i * (i - 1) / 2 + j;
          sums[n] = hn::MulAdd(reader, faded[j], sums[n]);
        }
        if constexpr (kFadesHalves) {
          if (i + 1 < C) {
            const auto decay = hn::Load(d, Decays() + at + i * row_);
            HWY_UNROLL(4)
            for (int j = 0; j < i; ++j) faded[j] = hn::Mul(faded[j], decay);
          }
        }
      }
    }
    T numbers[8];
    SumFour<T>(sums[0], sums[1], sums[2], sums[3], numbers);
    SumFour<T>(sums[4], sums[5], sums[6], sums[7], numbers + 4);
    for (int i = 1; i < C; ++i)
      for (int j = 0; j < i; ++j) table[i * table_row_ + j] = numbers[i * (i - 1) / 2 + j];
  }

  // The gradients of C tokens from `begin` on by each other, through writer b.
  template <int C>
  HWY_NOINLINE void PairGradients(int64_t begin, const T* HWY_RESTRICT x, int b) const {
    const Tag<T> d;
    const T* HWY_RESTRICT s = Writer(b);
    const T* HWY_RESTRICT table = products_[b] + begin * table_row_ + begin;
    T *HWY_RESTRICT d_x = d_x_, *HWY_RESTRICT d_s = d_writers_[b], *HWY_RESTRICT d_log = d_log_;
    Vector<T> products[C][C];
    HWY_UNROLL(4)
    for (int i = 1; i < C; ++i) {
      HWY_UNROLL(4)
      for (int j = 0; j < i; ++j) products[i][j] = hn::Set(d, table[i * table_row_ + j]);
    }
    for (int64_t c = 0; c < row_; c += Lanes<T>()) {
      const int64_t at = begin * row_ + c;
      Vector<T> writers[C], gradients[C], decays[C], logs[C];
      HWY_UNROLL(4)
      for (int j = 0; j < C; ++j) {
        writers[j] = hn::Load(d, s + at + j * row_);
        gradients[j] = hn::Load(d, d_s + at + j * row_);
        logs[j] = hn::Zero(d);
        if constexpr (kFadesHalves) decays[j] = hn::Load(d, Decays() + at + j * row_);
      }
      HWY_UNROLL(4)
      for (int i = 1; i < C; ++i) {
        const auto reader = hn::Load(d, x + at + i * row_);
        auto sum = hn::Load(d, d_x + at + i * row_);
        auto factor = hn::Set(d, T{1});
        HWY_UNROLL(4)
        for (int j = i - 1; j >= 0; --j) {
          auto product = products[i][j];
          if constexpr (kFadesHalves) {
            if (j + 1 < i) factor = hn::Mul(factor, decays[j + 1]), product = hn::Mul(product, factor);
          }
          const auto part = hn::Mul(product, writers[j]);
          sum = hn::Add(sum, part);
          gradients[j] = hn::MulAdd(product, reader, gradients[j]);
          if constexpr (kFadesHalves) {
            HWY_UNROLL(4)
            for (int t = j + 1; t < i; ++t) logs[t] = hn::MulAdd(part, reader, logs[t]);
          }
        }
        hn::Store(sum, d, d_x + at + i * row_);
      }
      HWY_UNROLL(4)
      for (int j = 0; j < C - 1; ++j) {
        hn::Store(gradients[j], d, d_s + at + j * row_);
        if constexpr (kFadesHalves) {
          if (j > 0) hn::Store(hn::Add(hn::Load(d, d_log + at + j * row_), logs[j]), d, d_log + at + j * row_);
        }
      }
    }
  }

  // ---- Products -----------------------------------------------------------------------------------------------------------------------------------

  bool OnTiles() const { return std::is_same_v<T, float> && verbs_ != nullptr; }

  // Rows of channels, values, a state and a table as matrices.
  template <class U>
  forms::Matrix<U> RowsOf(U* at) const {
    return {at, row_};
  }
  template <class U>
  forms::Matrix<U> ValuesOf(U* at) const {
    return {at, panel_, n_ * panel_};
  }
  template <class U>
  forms::Matrix<U> StateOf(U* at) const {
    return {at, panel_, span_.K * panel_};
  }
  template <class U>
  forms::Matrix<U> TableOf(U* at) const {
    return {at, table_row_};
  }
  template <class A, class B>
  void Multiply(int64_t rows, int64_t columns, int64_t depth, const forms::Matrix<A>& a, bool turn_a, const forms::Matrix<B>& b, bool turn_b,
                const forms::Matrix<T>& to, bool add, Part part = Part::kAll) const {
    if constexpr (std::is_same_v<T, float>)
      verbs_->multiply({rows, columns, depth, {a.at, a.row, a.panel}, turn_a, {b.at, b.row, b.panel}, turn_b, to, add, part, tiles_});
  }

  // to = rows state, values from rows of channels.
  void ReadState(const T* rows, const T* state, T* to) const {
    const int64_t n = span_.n, K = span_.K;
    if (OnTiles()) return Multiply(n, span_.layer.value_dim, K, RowsOf(rows), false, StateOf(state), false, ValuesOf(to), false);
    for (int64_t p = 0; p < panels_; ++p)
      MultiplyAdd(Vectors(p), n, K, Left<T>{rows, row_, 1}, state + p * K * panel_, PanelOf(to, p), panel_, panel_, false);
  }
  // state += rows' values.
  void WriteState(const T* rows, const T* values, T* state) const {
    const int64_t n = span_.n, K = span_.K;
    if (OnTiles()) return Multiply(K, span_.layer.value_dim, n, RowsOf(rows), true, ValuesOf(values), false, StateOf(state), true);
    for (int64_t p = 0; p < panels_; ++p) MultiplyAdd(Vectors(p), K, n, Left<T>{rows, 1, row_}, PanelOf(values, p), state + p * K * panel_, panel_);
  }
  // to_i = state z_i, rows of channels from values, or from their columns.
  void Through(const T* state, const T* values, const T* columns, T* to) const {
    const int64_t n = span_.n, V = span_.layer.value_dim, K = span_.K;
    if (OnTiles()) return Multiply(n, K, V, ValuesOf(values), false, StateOf(state), true, RowsOf(to), false);
    for (int64_t left = 0; left < n; left += panel_) {
      const int64_t tokens = n - left < panel_ ? n - left : panel_;
      for (int64_t p = 0; p < panels_; ++p)
        MultiplyAdd(VectorsOf(tokens), K, Width(p), Left<T>{state + p * K * panel_, panel_, 1}, columns + left * V + p * panel_ * panel_, turned_,
                    panel_, panel_, p > 0);
      TransposeTile(K, tokens, turned_, panel_, to + left * row_, row_);
    }
  }
  // products_[b](i, j) = y_i z_j for j <= i, and some of what lies above.
  void Products(int b) const {
    const int64_t n = span_.n, V = span_.layer.value_dim;
    T* table = products_[b];
    if (OnTiles()) return Multiply(n, n, V, ValuesOf(y_), false, ValuesOf(z_[b]), true, TableOf(table), false);
    for (int64_t begin = 0; begin < n; begin += kTileRows) {
      const int64_t end = begin + kTileRows < n ? begin + kTileRows : n;
      for (int64_t left = 0; left < end; left += panel_) {
        const int vectors = VectorsOf(end - left);
        for (int64_t p = 0; p < panels_; ++p)
          MultiplyAdd(vectors, end - begin, Width(p), Left<T>{PanelOf(y_, p) + begin * panel_, panel_, 1},
                      z_columns_[b] + left * V + p * panel_ * panel_, table + begin * table_row_ + left, table_row_, panel_, p > 0);
      }
    }
  }

  // c_i += sum over j < i (j <= i with the diagonal) of table(i, j) b_j, values; and c_j += sum over i > j (i >= j) of table(i, j) b_i.
  void AddLower(const T* table, bool diagonal, const T* b, T* c) const {
    const int64_t n = span_.n;
    if (OnTiles())
      return Multiply(n, span_.layer.value_dim, n, TableOf(table), false, ValuesOf(b), false, ValuesOf(c), true,
                      diagonal ? Part::kLower : Part::kBelow);
    for (int64_t p = 0; p < panels_; ++p) MultiplyAddLower(Vectors(p), n, diagonal, table, table_row_, PanelOf(b, p), PanelOf(c, p));
  }
  void AddUpper(const T* table, bool diagonal, T* b, T* c) const {
    const int64_t n = span_.n;
    if (OnTiles())
      return Multiply(n, span_.layer.value_dim, n, TableOf(table), true, ValuesOf(b), false, ValuesOf(c), true,
                      diagonal ? Part::kLower : Part::kBelow);
    for (int64_t p = 0; p < panels_; ++p) SolveUpper<T>(Vectors(p), n, diagonal, table, table_row_, nullptr, PanelOf(c, p), PanelOf(b, p));
  }
  // Forward and back substitution as SolveLower and SolveUpper do them. On tiles these do blocks, and what is between blocks are products.
  void SolveForward(const T* table, const T* factor, T* c, T* b) const {
    const int64_t n = span_.n, step = OnTiles() ? kBlock : n;
    for (int64_t begin = 0; begin < n; begin += step) {
      const int64_t count = begin + step < n ? step : n - begin, at = begin * panel_;
      const T* rows = table + begin * table_row_;
      if (begin > 0) Multiply(count, span_.layer.value_dim, begin, TableOf(rows), false, ValuesOf(b), false, ValuesOf(c + at), true);
      for (int64_t p = 0; p < panels_; ++p)
        SolveLower(Vectors(p), count, rows + begin, table_row_, factor == nullptr ? factor : factor + begin, PanelOf(c, p) + at, PanelOf(b, p) + at);
    }
  }
  void SolveBackward(const T* table, const T* factor, T* c, T* b) const {
    const int64_t n = span_.n, step = OnTiles() ? kBlock : n;
    for (int64_t begin = (n - 1) / step * step; begin >= 0; begin -= step) {
      const int64_t end = begin + step < n ? begin + step : n, at = begin * panel_;
      const T* rows = table + begin * table_row_ + begin;
      if (end < n)
        Multiply(end - begin, span_.layer.value_dim, n - end, TableOf(table + end * table_row_ + begin), true, ValuesOf(b + end * panel_), false,
                 ValuesOf(c + at), true);
      for (int64_t p = 0; p < panels_; ++p)
        SolveUpper(Vectors(p), end - begin, false, rows, table_row_, factor == nullptr ? factor : factor + begin, PanelOf(c, p) + at,
                   PanelOf(b, p) + at);
    }
  }

  // ---- Value columns, panel by panel: [panels][n][Panel] ----------------------------------------

  int64_t Width(int64_t p) const { return p + 1 < panels_ ? panel_ : span_.layer.value_dim - p * panel_; }
  int Vectors(int64_t p) const { return VectorsOf(Width(p)); }
  // Vectors that hold so many numbers, up to a panel.
  int VectorsOf(int64_t numbers) const { return static_cast<int>(RoundUp(numbers < panel_ ? numbers : panel_, Lanes<T>()) / Lanes<T>()); }
  template <class U>
  U* PanelOf(U* values, int64_t p) const {
    return values + p * n_ * panel_;
  }

  // The rows of a head of [B, T, H, V]; zeros where it is not given.
  void PackPanels(const ConstTensor& t, int64_t head, T* to) const {
    for (int64_t p = 0; p < panels_; ++p) {
      for (int64_t i = 0; i < span_.n; ++i) {
        T* at = PanelOf(to, p) + i * panel_;
        if (!t.given() || Width(p) % Lanes<T>() != 0) Fill(Vectors(p) * Lanes<T>(), T{0}, at);
        if (t.given()) LoadRow(t, contract::Offset(t, walk_.batch(), span_.tokens[i], head, p * panel_), t.strides[3], Width(p), at);
      }
    }
  }
  // Its columns, [n / Panel][V][Panel].
  void Columns(T* values, T* to) const {
    for (int64_t p = 0; p < panels_; ++p)
      Transpose(span_.n, Width(p), PanelOf(values, p), panel_, to + p * panel_ * panel_, span_.layer.value_dim * panel_);
  }

  // ---- States: [panels][K][Panel], and a row for the key sum ----------------------------------------

  void LoadState(const ConstTensor& t, const ConstTensor& key_sum, int64_t number, T* to) const {
    Fill(kept_size_, T{0}, to);
    for (int64_t p = 0; t.given() && p < panels_; ++p)
      LoadColumns(t, number, job_.head, p * panel_, span_.K, Width(p), to + p * span_.K * panel_, panel_);
    if (key_sum.given()) LoadRow(key_sum, contract::Offset(key_sum, number, job_.head), key_sum.strides[2], span_.K, to + state_size_);
  }
  void StoreState(const T* from) const {
    const Tensor &t = wanted_.initial_state, &key_sum = wanted_.initial_key_sum;
    for (int64_t p = 0; t.given() && p < panels_; ++p)
      StoreColumns(t, job_.sequence, job_.head, p * panel_, span_.K, Width(p), from + p * span_.K * panel_, panel_);
    if (key_sum.given()) StoreRow(key_sum, contract::Offset(key_sum, job_.sequence, job_.head), key_sum.strides[2], span_.K, from + state_size_);
  }

  // ---- Gradients out ------------------------------------------------------------------------------------------------------------------------------
  //
  // Heads that share a head of an input follow each other: their rows add up in a room of the input's, and the last one stores them.

  // The head of a tensor that reader `reader` of `readers` has, and rows to store there; none while others are still to come.
  T* Collect(const ConstTensor& t, int64_t reader, int64_t readers, int64_t size, T* rows, T* room, int64_t* head) const {
    const int64_t sharing = readers / t.shape[2];
    *head = reader / sharing;
    if (sharing == 1) return rows;
    if (reader % sharing == 0)
      Copy(size, rows, room);
    else
      AddRow(size, rows, room);
    return reader % sharing == sharing - 1 ? room : nullptr;
  }
  void StoreRows(const Tensor& t, int64_t head, const T* rows) const {
    for (int64_t i = 0; i < span_.n; ++i)
      StoreRow(t, contract::Offset(t, walk_.batch(), span_.tokens[i], head), t.strides[3], span_.K, rows + i * row_);
  }
  void DeliverRows(const Tensor& wanted, const ConstTensor& input, T* rows, T* room) const {
    if (!wanted.given()) return;
    int64_t head = 0;
    rows = Collect(input, job_.head, span_.layer.state_heads, span_.n * row_, rows, room, &head);
    if (rows != nullptr) StoreRows(wanted, head, rows);
  }
  // One number a token.
  void DeliverNumbers(const Tensor& wanted, const ConstTensor& input, T* numbers, T* room) const {
    if (!wanted.given()) return;
    int64_t head = 0;
    numbers = Collect(input, job_.head, span_.layer.state_heads, span_.n, numbers, room, &head);
    for (int64_t i = 0; numbers != nullptr && i < span_.n; ++i)
      StoreRow(wanted, contract::Offset(wanted, walk_.batch(), span_.tokens[i], head), 1, 1, numbers + i);
  }

  void DeliverQueries(int64_t reader) const {
    const contract::Layer& layer = span_.layer;
    if (!wanted_.q.given() && wanted_.scale == nullptr) return;
    int64_t head = 0;
    T* rows = Collect(layer.in.q, reader, layer.out_heads, span_.n * row_, d_x_, shared_q_, &head);
    if (rows == nullptr) return;
    for (int64_t i = 0; i < span_.n; ++i) {
      T* d_q = rows + i * row_;
      LoadMapped(layer.in.q, span_.tokens[i], head);
      if (!layer.normalize) Sums()[0] += static_cast<double>(Dot(row_, one_row_, d_q));
      if (layer.scale != 1.0) ScaleRow(row_, static_cast<T>(layer.scale), d_q);
      UnmapFeatures(layer.in.q, span_.tokens[i], head, d_q);
    }
    if (wanted_.q.given()) StoreRows(wanted_.q, head, rows);
  }

  void DeliverKeys() const {
    const contract::Layer& layer = span_.layer;
    if constexpr (!S::kDelta) DeliverValues(d_z_[0]);
    if constexpr (S::kRankOne) {
      DeliverRows(wanted_.remove, layer.in.remove, d_x_, shared_remove_);
      DeliverRows(wanted_.write, layer.in.write, d_writers_[1], shared_write_);
    }
    if constexpr (kDecays) DeliverDecays();
    if (!wanted_.k.given()) return;
    int64_t head = 0;
    T* rows = Collect(layer.in.k, job_.head, layer.state_heads, span_.n * row_, d_writers_[0], shared_k_, &head);
    if (rows == nullptr) return;
    if (layer.feature_map != FeatureMap::kIdentity) {
      for (int64_t i = 0; i < span_.n; ++i) {
        LoadMapped(layer.in.k, span_.tokens[i], head);
        UnmapFeatures(layer.in.k, span_.tokens[i], head, rows + i * row_);
      }
    }
    StoreRows(wanted_.k, head, rows);
  }

  void DeliverValues(T* values) const {
    const ConstTensor& v = span_.layer.in.v;
    const Tensor& t = wanted_.v;
    if (!t.given()) return;
    int64_t head = 0;
    values = Collect(v, job_.head, span_.layer.state_heads, panels_ * n_ * panel_, values, shared_v_, &head);
    for (int64_t p = 0; values != nullptr && p < panels_; ++p)
      for (int64_t i = 0; i < span_.n; ++i)
        StoreRow(t, contract::Offset(t, walk_.batch(), span_.tokens[i], head, p * panel_), t.strides[3], Width(p), PanelOf(values, p) + i * panel_);
  }

  // dbeta = dU (V - P).
  void DeliverBeta() const {
    const Tag<T> d;
    for (int64_t i = 0; i < span_.n; ++i) {
      auto sum = hn::Zero(d);
      for (int64_t p = 0; p < panels_; ++p) {
        for (int64_t x = i * panel_; x < i * panel_ + Vectors(p) * Lanes<T>(); x += Lanes<T>())
          sum = hn::MulAdd(hn::Load(d, PanelOf(d_z_[0], p) + x), hn::Load(d, PanelOf(residue_, p) + x), sum);
      }
      beta_sums_[i] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
    DeliverNumbers(wanted_.beta, span_.layer.in.beta, beta_sums_, shared_beta_);
  }

  void DeliverDecays() const {
    const ConstTensor& in = span_.layer.in.log_decay;
    if constexpr (S::kPerChannel) {
      DeliverRows(wanted_.log_decay, in, d_log_, shared_log_);
    } else {
      if constexpr (R::kDecay == Decay::kPerStep) DeliverNumbers(wanted_.log_decay, in, d_logs_, shared_log_);
      for (int64_t i = 0; R::kDecay == Decay::kPerHead && i < span_.n; ++i) Sums()[1] += static_cast<double>(d_logs_[i]);
    }
  }

  // one_row_ = the features of a row, mapped.
  void LoadMapped(const ConstTensor& t, int64_t token, int64_t head) const {
    Fill(row_, T{0}, one_row_);
    LoadRow(t, contract::Offset(t, walk_.batch(), token, head), t.strides[3], span_.K, one_row_);
    span_.MapFeatures(one_row_);
  }
  // The gradient of features becomes that of what they were mapped from. Their mapped values are in one_row_.
  void UnmapFeatures(const ConstTensor& t, int64_t token, int64_t head, T* gradient) const {
    const Tag<T> d;
    const contract::Layer& layer = span_.layer;
    if (layer.feature_map == FeatureMap::kIdentity) return;
    T norm = 0, along = 0;
    if (layer.feature_map == FeatureMap::kL2Norm) {
      T* given = turned_;  // nothing else is in it now
      Fill(row_, T{0}, given);
      LoadRow(t, contract::Offset(t, walk_.batch(), token, head), t.strides[3], span_.K, given);
      norm = std::sqrt(Dot(row_, given, given) + static_cast<T>(layer.eps));
      if (norm == 0) return Fill(row_, T{0}, gradient);
      along = Dot(row_, one_row_, gradient);
    }
    for (int64_t c = 0; c < row_; c += Lanes<T>()) {
      const auto mapped = hn::Load(d, one_row_ + c);
      auto x = hn::Load(d, gradient + c);
      if (layer.feature_map == FeatureMap::kEluPlusOne) x = hn::Mul(x, hn::Min(mapped, hn::Set(d, T{1})));
      if (layer.feature_map == FeatureMap::kRelu) x = hn::IfThenElseZero(hn::Gt(mapped, hn::Zero(d)), x);
      if (layer.feature_map == FeatureMap::kL2Norm) x = hn::Div(hn::NegMulAdd(mapped, hn::Set(d, along), x), hn::Set(d, norm));
      hn::Store(x, d, gradient + c);
    }
  }

  // Rows of gradients that belong to tokens which are not valid.
  void ClearWhatIsNotValid(int64_t begin) {
    const contract::Layer& layer = span_.layer;
    if (!layer.in.valid.given()) return;
    Fill(RoundUp(span_.K > layer.value_dim ? span_.K : layer.value_dim, Lanes<T>()), T{0}, one_row_);
    const auto clear = [&](const Tensor& t, int64_t token, int64_t readers) {
      if (!t.given()) return;
      const int64_t readers_a_head = readers / layer.state_heads, sharing = readers / t.shape[2];
      const int64_t last = ((first_head_ + heads_) * readers_a_head - 1) / sharing;
      for (int64_t head = first_head_ * readers_a_head / sharing; head <= last; ++head)
        StoreRow(t, contract::Offset(t, walk_.batch(), token, head), t.rank > 3 ? t.strides[3] : 1, t.rank > 3 ? t.shape[3] : 1, one_row_);
    };
    for (int64_t token = begin; token < walk_.end(); ++token) {
      walk_.Seek(token);
      if (walk_.Valid()) continue;
      clear(wanted_.q, token, layer.out_heads);
      for (const Tensor* t : {&wanted_.k, &wanted_.v, &wanted_.beta, &wanted_.remove, &wanted_.write}) clear(*t, token, layer.state_heads);
      if (R::kDecay != Decay::kPerHead) clear(wanted_.log_decay, token, layer.state_heads);
    }
  }

  const forms::Products* const verbs_;  // on tiles, or none
  const OutputGradients& given_;
  const Gradients& wanted_;
  double* sums_;
  const int64_t first_head_, heads_;
  Job job_;  // of the head at hand
  bool packed_ = false;
  S span_;
  forms::Tokens walk_;
  const int64_t n_, row_, panel_, panels_, table_row_, levels_, chunks_a_segment_, segments_, state_size_, kept_size_;
  int64_t chunks_ = 0;
  T* kept_;                     // [heads][segments][kept_size]
  T* history_;                  // [heads][chunks a segment][kept_size]
  T* work_;                     // a state
  T* d_state_;                  // [heads][kept_size]
  int64_t* starts_;             // of the chunks, where the walk over the tokens stands
  T* whole_;                    // [row], F(n, 0)
  T *q_, *x_, *r_;              // [n][row]: queries, D q, D k
  T* factors_;                  // [n][table_row]
  T* d_logs_;                   // [n]: kPerToken
  T* fades_;                    // [levels + 2][n][row], or [2][n] where a token has one factor; see FadesOf
  T* faded_readers_;            // [levels + 1][n][row]
  T* d_x_;                      // likewise
  T* d_faded_;                  // likewise
  T* d_log_;                    // likewise: kPerChannel
  T* faded_writers_[kWriters];  // [levels + 1][n][row]
  T* d_writers_[kWriters];
  T* z_[kWriters];    // [panels][n][Panel]
  T* d_z_[kWriters];  // likewise
  T* z_columns_[kWriters];
  T* solve_[kWriters];     // [n][table_row]: the scores of the remover
  T* scores_[kWriters];    // likewise, of a query head
  T* products_[kWriters];  // likewise, y z
  T* y_;                   // [panels][n][Panel]
  T* y_columns_;
  T* residue_;         // [panels][n][Panel]: V - P
  T* out_;             // likewise
  T* d_denominators_;  // [n]
  T* turned_;          // [K][Panel]
  T* beta_sums_;       // [n]
  T* one_row_;         // [max(K, V)]
  std::byte* tiles_ = nullptr;
  T *shared_q_, *shared_k_, *shared_v_, *shared_log_, *shared_beta_, *shared_remove_, *shared_write_;
};

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

#endif  // TERCET_SRC_FORMS_GRADIENT_INL_H_
