// The chunkwise form: parallel inside a span of n tokens, the state S0 handed from span to span. The parallel form is this with one span.
//
// With x_i = D_i q_i (q_i where the read comes first) and Fx(i, j) the product of D_l over j < l < i, a token reads
//
//   o_i = (x_i Fx(i, 0)) S0 + sum over j < i of [sum_c x_ic k_jc Fx(i, j)_c] u_j + (own term of token i)
//
// and with r = D k (delta) or remove (rank one) in the place of x, so does the update: there the sum over j < i is unit triangular and is solved by
// forward substitution. At the end S <- F(n, 0) S0 + (K Fn)' U. Every F is a product of factors in [0, 1] anchored at an earlier token: no
// logarithms, no division, nothing from the future.
//
// One table of n x n is held at a time.
#include <cmath>
#include <cstdint>

#include "src/forms/job.hpp"
#include "src/forms/span-inl.h"
#include "src/forms/tiles-inl.h"

#if defined(TERCET_SRC_FORMS_CHUNKWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERCET_SRC_FORMS_CHUNKWISE_INL_H_
#undef TERCET_SRC_FORMS_CHUNKWISE_INL_H_
#else
#define TERCET_SRC_FORMS_CHUNKWISE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet {
namespace HWY_NAMESPACE {

template <class R, class T>
class Chunkwise {
 public:
  static constexpr int64_t kPanel = kPanelVectors * hn::MaxLanes(Tag<T>());
  static int64_t Bytes(const Job& job) {
    Arena arena(nullptr);
    const Chunkwise form(job, arena);
    return arena.used();
  }

  static void Run(const Job& job) {
    Job one = job;
    one.heads = 1;
    for (; one.head < job.head + job.heads; ++one.head) {
      Arena arena(job.workspace);
      Chunkwise(one, arena).Walk();
    }
  }

 private:
  using S = Span<R, T>;
  // Tokens of a block whose mutual scores are taken token by token where every channel decays on its own.
  static constexpr int64_t kBlock = 16;

  Chunkwise(const Job& job, Arena& arena) : span_(job, arena, false), walk_(job), panel_(Panel<T>()), panels_((job.columns + panel_ - 1) / panel_) {
    const int64_t n = span_.capacity, row = span_.row, columns = RoundUp(n, panel_);
    table_row_ = columns;
    v_ = arena.Take<T>(panels_ * n * panel_);
    r_ = arena.Take<T>(S::kDelta && R::kDecay != Decay::kNone ? n * row : 0);
    table_ = arena.Take<T>(n * table_row_);
    x_ = arena.Take<T>(n * row);
    faded_rows_ = arena.Take<T>(R::kDecay == Decay::kNone ? 0 : n * row);
    q_ = arena.Take<T>(n * row);
    k_columns_ = arena.Take<T>(columns * span_.K);
    w_columns_ = arena.Take<T>(S::kRankOne ? columns * span_.K : 0);
    faded_ = arena.Take<T>(S::kPerChannel ? columns * span_.K : 0);
    block_ = arena.Take<T>(S::kPerChannel ? kBlock * row : 0);
    fade_ = arena.Take<T>(S::kPerChannel ? row : 0);
    diagonal_ = arena.Take<T>(S::kPerChannel ? RoundUp(kBlock, Lanes<T>()) * span_.K : 0);
    factor_ = arena.Take<T>(S::kPerToken ? 2 * columns : 0);
    state_ = arena.Take<T>(panels_ * span_.K * panel_);
    p_ = arena.Take<T>(S::kRankOne ? panels_ * n * panel_ : 0);
    out_ = arena.Take<T>(panels_ * n * panel_);
    key_sum_ = arena.Take<T>(span_.layer.normalize ? row : 0);
    denominators_ = arena.Take<T>(span_.layer.normalize ? n : 0);
  }

  void Walk() {
    const bool normalize = span_.layer.normalize;
    span_.PackHead();
    if constexpr (R::kDecay == Decay::kPerHead) PackPowers();
    LoadState();
    if (normalize) span_.LoadKeySum(key_sum_);
    const forms::Saved& saved = *span_.job.saved;
    for (int64_t done = 0; span_.Next(walk_); done += span_.n) {
      if (saved.tokens > 0 && done % saved.tokens == 0) {
        const int64_t place = saved.PlaceOf(span_.layer, span_.job.sequence, done);
        StoreState(saved.state, place);
        if (normalize) span_.StoreKeySum(saved.key_sum, place, key_sum_);
      }
      PackValues();
      Transpose(span_.n, span_.K, span_.k_room, span_.row, k_columns_);
      if constexpr (S::kRankOne) Transpose(span_.n, span_.K, span_.w_room, span_.row, w_columns_);
      if constexpr (S::kDelta) SolveDelta();
      if constexpr (S::kRankOne) SolveRankOne();
      for (int64_t g = 0; g < span_.queries; ++g) Read(g);
      Advance();
    }
    StoreState(span_.layer.out.final_state, span_.job.sequence);
    if (normalize) span_.StoreKeySum(span_.layer.out.final_key_sum, span_.job.sequence, key_sum_);
  }

  T* Values(int64_t p) const { return v_ + p * span_.capacity * panel_; }
  T* Removed(int64_t p) const { return p_ + p * span_.capacity * panel_; }
  T* Outputs(int64_t p) const { return out_ + p * span_.capacity * panel_; }
  T* State(int64_t p) const { return state_ + p * span_.K * panel_; }
  Left<T> Table() const { return {table_, table_row_, 1}; }

  // ---- The steps of a span ----------------------------------------------------------------------------------------------------------------

  // U = (1 + A)^-1 beta (V - (R Fx0) S0), A_ij = beta_i score(r_i, k_j): U takes the place of V.
  void SolveDelta() {
    const T* r = span_.k_room;
    if constexpr (R::kDecay != Decay::kNone) {
      for (int64_t i = 0; i < span_.n; ++i) span_.Decayed(span_.k_room + i * span_.row, i, r_ + i * span_.row);
      r = r_;
    }
    Scores(r, k_columns_);
    for (int64_t i = 0; i < span_.n; ++i) ScaleRow(RoundUp(i, Lanes<T>()), -span_.beta[i], table_ + i * table_row_);
    Fade(r);
    for (int64_t p = 0; p < panels_; ++p) {
      const int vectors = Vectors(p);
      T *u = Values(p), *seen = Outputs(p);
      ReadState(p, seen);
      const Tag<T> d;
      for (int64_t i = 0; i < span_.n; ++i) {
        for (int64_t x = i * panel_; x < i * panel_ + vectors * Lanes<T>(); x += Lanes<T>())
          hn::Store(hn::Mul(hn::Set(d, span_.beta[i]), hn::Sub(hn::Load(d, u + x), hn::Load(d, seen + x))), d, u + x);
      }
      MultiplyAddLower(vectors, span_.n, false, table_, table_row_, u, u);
    }
  }

  // P = (1 - M)^-1 ((R Fx0) S0 + N V), N_ij = score(r_i, k_j), M_ij = score(r_i, w_j).
  void SolveRankOne() {
    Fade(span_.r_room);
    Scores(span_.r_room, k_columns_);
    for (int64_t p = 0; p < panels_; ++p) {
      ReadState(p, Removed(p));
      MultiplyAddLower(Vectors(p), span_.n, false, table_, table_row_, Values(p), Removed(p));
    }
    Scores(span_.r_room, w_columns_);
    for (int64_t p = 0; p < panels_; ++p) MultiplyAddLower(Vectors(p), span_.n, false, table_, table_row_, Removed(p), Removed(p));
  }

  // The outputs of query head g.
  void Read(int64_t g) {
    const int64_t n = span_.n, row = span_.row;
    span_.Queries(walk_.batch(), g, q_);
    const T* x = q_;
    if constexpr (!S::kReadBefore && R::kDecay != Decay::kNone) {
      for (int64_t i = 0; i < n; ++i) span_.Decayed(q_ + i * row, i, x_ + i * row);
      x = x_;
    }
    Fade(x);
    Scores(x, k_columns_);
    OwnTerms(span_.k_room);
    if (span_.layer.normalize) Denominators();
    for (int64_t p = 0; p < panels_; ++p) {
      ReadState(p, Outputs(p));
      MultiplyAddLower(Vectors(p), n, true, table_, table_row_, Values(p), Outputs(p));
    }
    if constexpr (S::kRankOne) {
      Scores(x, w_columns_);
      OwnTerms(span_.w_room);
      for (int64_t p = 0; p < panels_; ++p) MultiplyAddLower(Vectors(p), n, true, table_, table_row_, Removed(p), Outputs(p));
    }
    for (int64_t p = 0; p < panels_; ++p) StoreOut(g, p);
  }

  // S <- F(n, 0) S0 + (K Fn)' U [+ (W Fn)' P], and z likewise. The rows of k and w are scaled where they lie.
  void Advance() {
    const int64_t n = span_.n, row = span_.row;
    if constexpr (S::kRankOne) FadeToEnd(span_.w_room);
    const T whole = FadeToEnd(span_.k_room);
    for (int64_t p = 0; p < panels_; ++p) {
      const int vectors = Vectors(p);
      T* state = State(p);
      if constexpr (R::kDecay != Decay::kNone)
        for (int64_t c = 0; c < span_.K; ++c) ScaleRow(vectors * Lanes<T>(), S::kPerChannel ? fade_[c] : whole, state + c * panel_);
      MultiplyAdd(vectors, span_.K, n, Left<T>{span_.k_room, 1, row}, Values(p), state, panel_);
      if constexpr (S::kRankOne) MultiplyAdd(vectors, span_.K, n, Left<T>{span_.w_room, 1, row}, Removed(p), state, panel_);
    }
    if (span_.layer.normalize) {
      if constexpr (S::kPerChannel) MultiplyRows(row, fade_, key_sum_, key_sum_);
      if constexpr (S::kPerToken) ScaleRow(row, whole, key_sum_);
      for (int64_t i = 0; i < n; ++i) AddRow(row, span_.k_room + i * row, key_sum_);
    }
  }

  // to = (x Fx0) S0 for panel p, x as last given to Fade.
  void ReadState(int64_t p, T* to) const {
    const int vectors = Vectors(p);
    for (int64_t i = 0; i < span_.n; ++i) Fill(vectors * Lanes<T>(), T{0}, to + i * panel_);
    MultiplyAdd(vectors, span_.n, span_.K, Left<T>{x_state_, span_.row, 1}, State(p), to, panel_);
  }

  // table_ii: what token i reads of its own write y_i: q_i y_i, or through the bonus.
  void OwnTerms(const T* y) const {
    const Tag<T> d;
    for (int64_t i = 0; i < span_.n; ++i) {
      const T *q = q_ + i * span_.row, *at = y + i * span_.row, *bonus = span_.bonus;
      table_[i * table_row_ + i] = SumLanes<T>(span_.K, [=](int64_t c) HWY_ATTR {
        auto x = hn::Load(d, q + c);
        if constexpr (S::kReadBefore) x = hn::Mul(x, hn::Load(d, bonus + c));
        return hn::Mul(x, hn::Load(d, at + c));
      });
    }
  }

  // z' q of every token: what is left of the key sum before the span, and the row of the table.
  void Denominators() const {
    for (int64_t i = 0; i < span_.n; ++i) denominators_[i] = Dot(span_.K, x_state_ + i * span_.row, key_sum_) + Sum(i + 1, table_ + i * table_row_);
  }

  // ---- Value columns, panel by panel --------------------------------------------------------------------------------------------------------

  // Columns of panel p that exist, and the vectors that hold them.
  int64_t Width(int64_t p) const { return p + 1 < panels_ ? panel_ : span_.job.columns - p * panel_; }
  int Vectors(int64_t p) const { return static_cast<int>(RoundUp(Width(p), Lanes<T>()) / Lanes<T>()); }

  void PackValues() const {
    const ConstTensor& t = span_.layer.in.v;
    const int64_t head = HeadOf(t, 2, span_.job.head, span_.layer.state_heads);
    for (int64_t p = 0; p < panels_; ++p) {
      const int64_t padded = Vectors(p) * Lanes<T>();
      for (int64_t i = 0; i < span_.n; ++i) {
        T* to = Values(p) + i * panel_;
        LoadRow(t, contract::Offset(t, walk_.batch(), span_.tokens[i], head, span_.job.column + p * panel_), t.strides[3], Width(p), to);
        for (int64_t x = Width(p); x < padded; ++x) to[x] = 0;
      }
    }
  }
  void LoadState() const {
    const ConstTensor& t = span_.layer.in.initial_state;
    const Job& job = span_.job;
    for (int64_t p = 0; p < panels_; ++p) {
      Fill(span_.K * panel_, T{0}, State(p));
      if (t.given()) LoadColumns(t, job.sequence, job.head, job.column + p * panel_, span_.K, Width(p), State(p), panel_);
    }
  }
  void StoreState(const Tensor& t, int64_t number) const {
    const Job& job = span_.job;
    for (int64_t p = 0; t.given() && p < panels_; ++p)
      StoreColumns(t, number, job.head, job.column + p * panel_, span_.K, Width(p), State(p), panel_);
  }
  // Writes panel p to output head g, divided by the denominators if there are any.
  void StoreOut(int64_t g, int64_t p) const {
    const Tensor& t = span_.layer.out.out;
    const Job& job = span_.job;
    for (int64_t i = 0; i < span_.n; ++i) {
      T* at = Outputs(p) + i * panel_;
      if (span_.layer.normalize) DivideRow(Width(p), denominators_[i], at);
      StoreRow(t, contract::Offset(t, walk_.batch(), span_.tokens[i], job.head * span_.queries + g, job.column + p * panel_), t.strides[3], Width(p),
               at);
    }
  }

  // ---- Factors: one a token -----------------------------------------------------------------------------------------------------------------

  // The powers of a constant decay, from f64 and rounded once: factor_[m] = D^(capacity - m), so that those of a table's row lie in order.
  void PackPowers() const {
    const double log_decay = span_.LogDecay();
    for (int64_t m = 0; m <= span_.capacity; ++m) {
      const int64_t power = span_.capacity - m;
      factor_[m] = power == 0 ? T{1} : static_cast<T>(std::exp(log_decay * static_cast<double>(power)));
    }
  }
  T Power(int64_t exponent) const { return factor_[span_.capacity - exponent]; }

  // x_state_ = x Fx0: every row by the factors of the tokens of the span before it.
  void Fade(const T* x) {
    const int64_t n = span_.n, row = span_.row;
    x_state_ = R::kDecay == Decay::kNone ? x : faded_rows_;
    if constexpr (S::kPerChannel) {
      Fill(row, T{1}, fade_);
      for (int64_t i = 0; i < n; ++i) {
        MultiplyRows(row, x + i * row, fade_, faded_rows_ + i * row);
        MultiplyRows(row, span_.D + i * row, fade_, fade_);
      }
    } else if constexpr (S::kPerToken) {
      Copy(n * row, x, faded_rows_);
      T factor = 1;
      for (int64_t i = 0; i < n; ++i) {
        if constexpr (R::kDecay == Decay::kPerHead) factor = Power(i);
        ScaleRow(row, factor, faded_rows_ + i * row);
        if constexpr (R::kDecay == Decay::kPerStep) factor *= span_.D[i];
      }
    }
  }

  // y_j times the factors of the tokens after j, in place. Leaves F(n, 0), all the span's factors: in fade_, or returned where there is one a token.
  T FadeToEnd(T* y) const {
    const int64_t n = span_.n, row = span_.row;
    T factor = 1;
    if constexpr (S::kPerChannel) {
      Fill(row, T{1}, fade_);
      for (int64_t j = n - 1; j >= 0; --j) {
        MultiplyRows(row, fade_, y + j * row, y + j * row);
        MultiplyRows(row, span_.D + j * row, fade_, fade_);
      }
    } else if constexpr (S::kPerToken) {
      for (int64_t j = n - 1; j >= 0; --j) {
        if constexpr (R::kDecay == Decay::kPerHead) factor = Power(n - 1 - j);
        ScaleRow(row, factor, y + j * row);
        if constexpr (R::kDecay == Decay::kPerStep) factor *= span_.D[j];
      }
      if constexpr (R::kDecay == Decay::kPerHead) factor = Power(n);
    }
    return factor;
  }

  // ---- Scores: table_ij = sum_c x_ic y_jc Fx(i, j)_c for j < i --------------------------------------------------------------------------------

  void Scores(const T* x, const T* y_columns) const {
    if constexpr (S::kPerChannel) {
      ScoresPerChannel(x, y_columns);
    } else {
      for (int64_t begin = 0; begin < span_.n; begin += kTileRows) {
        const int64_t end = begin + kTileRows < span_.n ? begin + kTileRows : span_.n;
        Products(x + begin * span_.row, begin, end, end - 1, y_columns);
      }
      if constexpr (R::kDecay == Decay::kPerHead) {
        for (int64_t i = 1; i < span_.n; ++i) MultiplyRows(i, factor_ + span_.capacity - (i - 1), table_ + i * table_row_, table_ + i * table_row_);
      }
      if constexpr (R::kDecay == Decay::kPerStep) {  // row i of Fx from row i - 1
        T* f = factor_;
        for (int64_t i = 0; i < span_.n; ++i) {
          MultiplyRows(i, f, table_ + i * table_row_, table_ + i * table_row_);
          ScaleRow(i, span_.D[i], f);
          f[i] = 1;
        }
      }
    }
  }

  // table rows begin .. end - 1 = x y for the columns before `columns` (in whole vectors). x's first row is token begin.
  void Products(const T* x, int64_t begin, int64_t end, int64_t columns, const T* y_columns) const {
    for (int64_t left = 0; left < columns; left += panel_) {
      const int64_t width = RoundUp(columns - left < panel_ ? columns - left : panel_, Lanes<T>());
      T* to = table_ + begin * table_row_ + left;
      for (int64_t i = 0; i < end - begin; ++i) Fill(width, T{0}, to + i * table_row_);
      MultiplyAdd(static_cast<int>(width / Lanes<T>()), end - begin, span_.K, Left<T>{x, span_.row, 1}, y_columns + left * span_.K, to, table_row_);
    }
  }

  // Where every channel decays on its own a score is no product of a row and a column, but between blocks of tokens it is one: with the block's first
  // token b as anchor, x_i times the factors from b to before i, and y_j times those from after j to before b.
  void ScoresPerChannel(const T* x, const T* y_columns) const {
    const int64_t n = span_.n, row = span_.row, K = span_.K;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = begin + kBlock < n ? begin + kBlock : n;
      if (begin > 0) {
        Fill(row, T{1}, fade_);
        for (int64_t i = begin; i < end; ++i) {
          MultiplyRows(row, x + i * row, fade_, block_ + (i - begin) * row);
          MultiplyRows(row, span_.D + i * row, fade_, fade_);
        }
        for (int64_t tile = begin; tile < end; tile += kTileRows)
          Products(block_ + (tile - begin) * row, tile, tile + kTileRows < end ? tile + kTileRows : end, begin, faded_);
      } else {
        Fill(row, T{1}, fade_);
        for (int64_t i = begin; i < end; ++i) MultiplyRows(row, span_.D + i * row, fade_, fade_);
      }
      ScoresInBlock(begin, end, x, y_columns);
      if (end < n) {  // the anchor moves on: fade_ holds the block's factors
        for (int64_t left = 0; left < begin; left += panel_) {
          const int64_t width = RoundUp(begin - left < panel_ ? begin - left : panel_, Lanes<T>());
          for (int64_t c = 0; c < K; ++c) ScaleRow(width, fade_[c], faded_ + left * K + c * panel_);
        }
      }
    }
  }

  // Scores among the tokens of a block, token by token: diagonal_ holds y_j times the factors from after j to before i, for every channel a row of
  // 16 tokens j. At the end they go on as the block's columns of faded_.
  void ScoresInBlock(int64_t begin, int64_t end, const T* x, const T* y_columns) const {
    const Tag<T> d;
    const int64_t lanes = Lanes<T>(), K = span_.K, count = end - begin;
    const int64_t width = RoundUp(count, lanes), stride = RoundUp(kBlock, lanes);
    for (int64_t left = 0; left < width; left += lanes) {
      const T* from = y_columns + ColumnOffset(begin + left);
      for (int64_t c = 0; c < K; ++c) Copy(lanes, from + c * panel_, diagonal_ + c * stride + left);
    }
    for (int64_t i = 1; i <= count; ++i) {
      const T* HWY_RESTRICT decay = span_.D + (begin + i - 1) * span_.row;  // of the token before i, on the tokens before that
      const T* HWY_RESTRICT xi = x + (begin + i) * span_.row;
      const bool scores = i < count;  // the last round only carries the columns to the block's end
      for (int64_t left = 0; left < width && left < i; left += lanes) {
        const auto older = hn::FirstN(d, static_cast<size_t>(i - 1 > left ? i - 1 - left : 0));
        const auto one = hn::Set(d, T{1});
        Vector<T> sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
        T* HWY_RESTRICT y = diagonal_ + left;
        const auto channel = [&](int64_t c, Vector<T>& into) HWY_ATTR {
          const auto faded = hn::Mul(hn::Load(d, y + c * stride), hn::IfThenElse(older, hn::Set(d, decay[c]), one));
          hn::Store(faded, d, y + c * stride);
          if (scores) into = hn::MulAdd(hn::Set(d, xi[c]), faded, into);
        };
        int64_t c = 0;
        for (; c + 4 <= K; c += 4) {
          channel(c, sum[0]);
          channel(c + 1, sum[1]);
          channel(c + 2, sum[2]);
          channel(c + 3, sum[3]);
        }
        for (; c < K; ++c) channel(c, sum[0]);
        // Whole vectors: what is stored from column i on is not read.
        if (scores) hn::Store(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3])), d, table_ + (begin + i) * table_row_ + begin + left);
      }
    }
    if (end == span_.n) return;
    for (int64_t left = 0; left < width; left += lanes) {
      T* to = faded_ + ColumnOffset(begin + left);
      for (int64_t c = 0; c < K; ++c) Copy(lanes, diagonal_ + c * stride + left, to + c * panel_);
    }
  }

  // Where token j's column begins in [columns / Panel][K][Panel].
  int64_t ColumnOffset(int64_t j) const { return j / panel_ * panel_ * span_.K + j % panel_; }

  S span_;
  forms::Tokens walk_;
  const int64_t panel_, panels_;  // value columns side by side, and how many such panels
  int64_t table_row_;
  T* v_;                        // [panels][n][Panel]: values, then what is written
  T* r_;                        // [n][row]: kDelta with a decay, D k
  T* table_;                    // [n][table_row]: below the diagonal, and the diagonal where it is read
  T* x_;                        // [n][row]: D q
  T* faded_rows_;               // [n][row]
  const T* x_state_ = nullptr;  // [n][row]: x Fx0, faded_rows_ or x itself
  T* q_;                        // [n][row]
  T* k_columns_;                // [columns / Panel][K][Panel]
  T* w_columns_;                // likewise
  T* faded_;                    // likewise: keys times the factors up to the block at hand
  T* block_;                    // [kBlock][row]
  T* fade_;                     // [row]: a running product of factors
  T* diagonal_;                 // [K][kBlock]
  T* factor_;                   // one decay a token: the powers, or a row of Fx
  T* state_;                    // [panels][K][Panel]
  T* p_;                        // [panels][n][Panel]
  T* out_;                      // [panels][n][Panel]
  T* key_sum_;                  // [row]
  T* denominators_;             // [n]
};

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

#endif  // TERCET_SRC_FORMS_CHUNKWISE_INL_H_
