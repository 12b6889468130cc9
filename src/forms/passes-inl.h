// The recurrent form, and chunks of a few tokens: blocks of n tokens, and one pass over the state a block.
//
// With F(i, j) the product of D_l over j < l <= i, and Fx without D_i, the formulas of the chunkwise form on a block that begins at state S0:
//
//   add       u_i = v_i                                       o_i = (x_i)' S0 + sum over j <= i of a_ij u_j
//   delta     u = (1 + beta B)^-1 beta (v - (r)' S0)          x_i = q_i F(i, 0), r_i = k_i F(i, 0); q_i Fx(i, 0) where the read comes first
//   rank one  p_i = r_i' S0 + sum over j < i of (b_ij v_j + bw_ij p_j), and w beside k in the sums      r_i = remove_i Fx(i, 0)
//   state     S <- F(n, 0) S0 + sum of F(n, j) k_j u_j' [+ F(n, j) w_j p_j']
//
// n is 1 for the recurrent form. The pass that writes a block into the state also reads it for the next block, so that a state row is loaded and
// stored once a block whatever the rule; what is prepared for a pass lies in the order in which the pass reads it. For n tokens an element of the
// state costs one multiplication by its decay, n multiply-adds of the update and n of every read.
#include <cmath>
#include <cstdint>

#include "src/forms/job.hpp"
#include "src/forms/span-inl.h"
#include "src/forms/tiles-inl.h"

#if defined(TERCET_SRC_FORMS_PASSES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERCET_SRC_FORMS_PASSES_INL_H_
#undef TERCET_SRC_FORMS_PASSES_INL_H_
#else
#define TERCET_SRC_FORMS_PASSES_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet {
namespace HWY_NAMESPACE {

template <class R, class T>
class Passes {
  using S = Span<R, T>;
  static constexpr int64_t kLanes = hn::MaxLanes(Tag<T>());

 public:
  // Tokens of a block, and vectors of value columns in a pass: what u, p and the sums of x and r leave of the registers. Four tokens pay where they
  // save stores, that is where nothing but the update and one read is done.
  static constexpr int kTokens = S::kReads || S::kPerChannel ? 2 : 4;
#if HWY_ARCH_ARM_A64 || (HWY_ARCH_X86 && HWY_MAX_BYTES == 64)
  static constexpr int kVectors = kTokens == 4 || S::kRankOne ? 2 : 4;
#else
  static constexpr int kVectors = kTokens == 4 || S::kRankOne ? 1 : 2;
#endif
  // Vectors side by side where a state is left where it lies. Where it is read first, two strips have to fit the registers and the first cache.
  static constexpr int kWide = S::kReads && !HWY_ARCH_ARM_A64 ? 2 : 4;
  static constexpr int64_t kPanel = 2 * hn::MaxLanes(Tag<T>());

  static int64_t Bytes(const Job& job) {
    Arena arena(nullptr);
    const Room room(job, arena);
    for (int64_t h = 0; h < job.heads; ++h) const Passes counted(job, h, room, arena);
    return arena.used();
  }

  // The heads of a job go side by side, span by span: their rows lie next to each other, many heads a page, and a page's address is looked up once.
  static void Run(const Job& job) {
    Arena arena(job.workspace);
    const Room room(job, arena);
    room.pending->vectors = 0;
    for (int64_t h = 0; h < job.heads; ++h) new (room.heads + h) Passes(job, h, room, arena);
    for (int64_t h = 0; h < job.heads; ++h) room.heads[h].Begin();
    for (bool more = true; more;) {
      for (int64_t h = 0; h < job.heads; ++h) more = room.heads[h].TakeSpan();
    }
    room.heads[0].FinishWrite();
    for (int64_t h = 0; h < job.heads; ++h) room.heads[h].End();
  }

 private:
  // A block's rows as a pass reads them: for every `lanes` channels the rows below, a vector each.
  template <int C>
  struct Coefs {
    static constexpr int kK = 0;                                                  // F(n, j) k_j
    static constexpr int kW = C;                                                  // F(n, j) w_j
    static constexpr int kX = kW + (S::kRankOne ? C : 0);                         // x_i
    static constexpr bool kKeysAreRead = S::kDelta && R::kDecay == Decay::kNone;  // r_i is k_i
    static constexpr int kR = kKeysAreRead ? kK : kX + C;
    static constexpr int kD = kX + C + (S::kReads && !kKeysAreRead ? C : 0);  // F(n, 0)
    static constexpr int kRows = kD + (S::kPerChannel ? 1 : 0);
  };
  // A block's numbers. Those of the other query heads use a and aw alone.
  struct Numbers {
    T a[kTokens][kTokens];   // x_i k_j, j <= i
    T aw[kTokens][kTokens];  // x_i w_j
    T b[kTokens][kTokens];   // delta: (1 + beta B)^-1 beta; rank one: r_i k_j, j < i
    T bw[kTokens][kTokens];  // r_i w_j
    T factor;                // F(n, 0) where there is one a token
  };
  // Some value columns: `vectors` of them from vector `first` on, their part of the state, and the state that is passed over after it.
  struct Strip {
    int64_t first;
    int vectors;
    T* state;
    const T* next;
  };

  // The output rows of a query head.
  struct OutRows {
    T* at;
    int64_t step;
    const int64_t* tokens;
    T* operator[](int64_t i) const { return at + (tokens != nullptr ? tokens[i] : i) * step; }
  };

  // A strip of a state in place that was read and is not yet written: S <- D S + k u' [+ w p'].
  struct Pending {
    T u[kWide * kLanes], p[S::kRankOne ? kWide * kLanes : 1];
    const T *k, *w, *decay;  // a number a channel
    T factor;
    const T* from;
    T* to;
    int64_t from_row, to_row;
    int vectors;  // 0: there is none
  };

  struct Ahead;
  static constexpr int64_t kTurn = kLanes < 4 ? kLanes : 4;  // channels
  static constexpr int64_t kMostLines = 256;                 // of a step
  static constexpr int64_t kLine = 64;                       // bytes
  // What the heads of a job use one after another.
  struct Room {
    int64_t head_count;
    Passes* heads;
    Ahead* ahead;
    Pending* pending;
    T *q, *v, *out;     // [queries][capacity][row], [capacity][width], [queries][capacity][width]
    T* coefs;           // [blocks][row / lanes][kRows][lanes]
    T* flat;            // [2][kRows][row]: those of a token whose state is in place, of a head and the one before it
    T* other_coefs;     // [queries - 1][blocks][row / lanes][kTokens][lanes]
    Numbers* numbers;   // [queries][blocks]
    T* sums;            // [2 kTokens][columns of a strip]
    Rows<T>* q_rows;    // [queries]
    OutRows* out_rows;  // [queries]
    T* denominators;    // [queries][capacity]

    Room(const Job& job, Arena& arena) {
      const contract::Layer& layer = *job.layer;
      const int64_t tokens = job.span, row = RoundUp(layer.key_dim, kLanes), width = RoundUp(job.columns, kLanes);
      const int64_t queries = layer.queries_per_state(),
                    blocks = tokens / job.block + job.block - 1;  // the most that so many tokens or fewer can make
      head_count = job.heads;
      heads = arena.Take<Passes>(job.heads);
      ahead = arena.Take<Ahead>(1);
      pending = arena.Take<Pending>(1);
      q = arena.Take<T>(queries * tokens * row);
      v = arena.Take<T>(tokens * width);
      out = arena.Take<T>(queries * tokens * width);
      coefs = arena.Take<T>(blocks * Coefs<kTokens>::kRows * row);
      flat = arena.Take<T>(2 * Coefs<1>::kRows * row);
      other_coefs = arena.Take<T>((queries - 1) * blocks * kTokens * row);
      numbers = arena.Take<Numbers>(queries * blocks);
      sums = arena.Take<T>(kVectors * kLanes * 2 * kTokens);
      q_rows = arena.Take<Rows<T>>(queries);
      out_rows = arena.Take<OutRows>(queries);
      denominators = arena.Take<T>(layer.normalize ? queries * tokens : 0);
    }
  };

  Passes(const Job& job, int64_t head, const Room& room, Arena& arena)
      : job_(OneHead(job, head)),
        room_(room),
        span_(job_, arena, true),
        walk_(job_),
        vectors_((job.columns + kLanes - 1) / kLanes),
        width_(vectors_ * kLanes) {
    state_ = arena.Take<T>(span_.K * width_);
    key_sum_ = arena.Take<T>(span_.layer.normalize ? span_.row : 0);
  }
  static Job OneHead(Job job, int64_t head) {
    job.head += head;
    job.heads = 1;
    return job;
  }

  int64_t Place() const { return this - room_.heads; }
  int64_t BlocksOf(int64_t tokens) const { return tokens / job_.block + tokens % job_.block; }
  int64_t CoefsSize() const { return Coefs<kTokens>::kRows * span_.row; }

  void Begin() {
    span_.PackHead();
    if constexpr (R::kDecay == Decay::kPerHead) power_ = static_cast<T>(std::exp(kTokens * span_.LogDecay()));
    if (span_.layer.normalize) span_.LoadKeySum(key_sum_);
    state_in_place_ = OneToken();
    if (!state_in_place_) {
      FindStreams();
      LoadState();
    }
  }
  void End() const {
    if (!state_in_place_) StoreState(span_.layer.out.final_state, job_.sequence);
    if (span_.layer.normalize) span_.StoreKeySum(span_.layer.out.final_key_sum, job_.sequence, key_sum_);
  }

  // One span of tokens. False where no tokens are left.
  bool TakeSpan() {
    if (!span_.Next(walk_)) return false;
    Save();
    TakeQueries();
    TakeValues();
    TakeOutputs();
    blocks_ = BlocksOf(span_.n);
    for (int64_t b = 0; b < blocks_; ++b) {
      for (int64_t g = 0; g < span_.queries; ++g) Full(b) ? Prepare<kTokens>(g, b) : Prepare<1>(g, b);
      if (span_.layer.normalize) Full(b) ? Normalise<kTokens>(b) : Normalise<1>(b);
    }
    if (state_in_place_) {
      PassInPlace();
    } else {
      StartAhead();
      AllPasses(room_.heads[(Place() + 1) % room_.head_count].state_);
    }
    StoreOutputs();
    return true;
  }

  // Keeps the state before the span for the gradients, where it is the turn of one.
  void Save() {
    const forms::Saved& saved = *job_.saved;
    if (saved.tokens > 0 && done_ % saved.tokens == 0) {
      const int64_t place = saved.PlaceOf(span_.layer, job_.sequence, done_);
      StoreState(saved.state, place);
      if (span_.layer.normalize) span_.StoreKeySum(saved.key_sum, place, key_sum_);
    }
    done_ += span_.n;
  }

  // ---- Blocks: full ones, then what is left of the span one token each ---------------------------------------------------------------------------

  int64_t FullBlocks() const { return job_.block == 1 ? 0 : span_.n / kTokens; }
  bool Full(int64_t b) const { return b < FullBlocks(); }
  int64_t FirstToken(int64_t b) const { return b <= FullBlocks() ? b * kTokens : FullBlocks() * kTokens + (b - FullBlocks()); }
  T* CoefsAt(int64_t g, int64_t b) const {
    return g == 0 ? room_.coefs + b * CoefsSize() : room_.other_coefs + ((g - 1) * blocks_ + b) * kTokens * span_.row;
  }
  Numbers& NumbersAt(int64_t g, int64_t b) const { return room_.numbers[g * blocks_ + b]; }

  // ---- What comes in and goes out -----------------------------------------------------------------------------------------------------------------

  void TakeQueries() {
    for (int64_t g = 0; g < span_.queries; ++g) room_.q_rows[g] = span_.Queries(walk_.batch(), g, room_.q + g * span_.capacity * span_.row);
  }

  void TakeValues() {
    const ConstTensor& t = span_.layer.in.v;
    const Job& job = span_.job;
    const int64_t head = HeadOf(t, 2, job.head, span_.layer.state_heads);
    if (LiesReady<T>(t, job.columns)) {
      v_ = RowsInPlace<T>(t, walk_.batch(), head, job.column, span_.tokens);
      return;
    }
    for (int64_t i = 0; i < span_.n; ++i) {
      T* to = room_.v + i * width_;
      LoadRow(t, contract::Offset(t, walk_.batch(), span_.tokens[i], head, job.column), t.strides[3], job.columns, to);
      for (int64_t x = job.columns; x < width_; ++x) to[x] = 0;
    }
    v_ = {room_.v, width_, nullptr};
  }

  bool OutputsInPlace() const { return !span_.layer.normalize && LiesReady<T>(span_.layer.out.out, span_.job.columns); }
  void TakeOutputs() {
    const Tensor& t = span_.layer.out.out;
    for (int64_t g = 0; g < span_.queries; ++g) {
      room_.out_rows[g] = {room_.out + g * span_.capacity * width_, width_, nullptr};
      if (OutputsInPlace())
        room_.out_rows[g] = {static_cast<T*>(t.data) + contract::Offset(t, walk_.batch(), 0, span_.job.head * span_.queries + g, span_.job.column),
                             t.strides[1], span_.tokens};
    }
  }
  void StoreOutputs() const {
    if (OutputsInPlace()) return;
    const Tensor& t = span_.layer.out.out;
    const Job& job = span_.job;
    for (int64_t g = 0; g < span_.queries; ++g) {
      for (int64_t i = 0; i < span_.n; ++i) {
        if (span_.layer.normalize) DivideRow(width_, room_.denominators[g * span_.capacity + i], room_.out_rows[g][i]);
        StoreRow(t, contract::Offset(t, walk_.batch(), span_.tokens[i], job.head * span_.queries + g, job.column), t.strides[3], job.columns,
                 room_.out_rows[g][i]);
      }
    }
  }

  template <class Each>
  void ForEachStrip(Each&& each) const {
    for (int64_t first = 0; first < vectors_;) {
      const int vectors = first + kVectors <= vectors_ ? kVectors : 1;
      each(Strip{first, vectors, state_ + span_.K * first * kLanes, nullptr});
      first += vectors;
    }
  }
  // Rows that lie ready are copied by whole vectors: a call for every row of a strip, as LoadColumns makes, takes longer than the copy.
  void LoadState() const {
    const ConstTensor& t = span_.layer.in.initial_state;
    const Job& job = span_.job;
    const bool ready = t.given() && LiesReady<T>(t, job.columns);
    if (!ready) Fill(span_.K * width_, T{0}, state_);
    if (!t.given()) return;
    ForEachStrip([&](const Strip& strip) HWY_ATTR {
      const Tag<T> d;
      const int64_t column = job.column + strip.first * kLanes, width = strip.vectors * kLanes;
      if (!ready) return LoadColumns(t, job.sequence, job.head, column, span_.K, ColumnsOf(strip), strip.state, width);
      const T* from = static_cast<const T*>(t.data) + contract::Offset(t, job.sequence, job.head, 0, column);
      for (int64_t c = 0; c < span_.K; ++c, from += t.strides[2])
        for (int64_t x = 0; x < width; x += kLanes) hn::Store(hn::LoadU(d, from + x), d, strip.state + c * width + x);
    });
  }
  void StoreState(const Tensor& t, int64_t number) const {
    const Job& job = span_.job;
    if (!t.given()) return;
    const bool ready = LiesReady<T>(t, job.columns);
    ForEachStrip([&](const Strip& strip) HWY_ATTR {
      const Tag<T> d;
      const int64_t column = job.column + strip.first * kLanes, width = strip.vectors * kLanes;
      if (!ready) return StoreColumns(t, number, job.head, column, span_.K, ColumnsOf(strip), strip.state, width);
      T* to = static_cast<T*>(t.data) + contract::Offset(t, number, job.head, 0, column);
      for (int64_t c = 0; c < span_.K; ++c, to += t.strides[2])
        for (int64_t x = 0; x < width; x += kLanes) hn::StoreU(hn::Load(d, strip.state + c * width + x), d, to + x);
    });
  }
  // Those that exist.
  int64_t ColumnsOf(const Strip& strip) const { return std::min(strip.vectors * kLanes, span_.job.columns - strip.first * kLanes); }

  // ---- What comes next from memory ---------------------------------------------------------------------------------------------------------------
  //
  // The rows of a token lie a row of all heads apart, often a page: no prefetcher of the hardware follows them. So while a span is passed over, the
  // rows of the next few heads are asked for, or of the first few in the next span: a share in every step. A few at once, because rows of a token
  // that lie side by side come faster together: of them every head of the few before asks for some tokens.

  // Rows of a token of one tensor, side by side in memory, of one head or a few.
  struct Stream {
    const void* tensor;
    const std::byte* at;
    int64_t step, bytes;
  };

  // Heads are taken by the few whose rows of k come to a KiB, or one by one where a row is half of it.
  int64_t Few() const {
    const int64_t bytes = span_.K * contract::SizeOf(span_.layer.in.k.dtype);
    return bytes < 512 ? 1024 / bytes : 1;
  }
  int64_t FirstOfFew() const { return Place() / Few() * Few(); }

  // Adds this head's rows to the streams of the few that it belongs to.
  void FindStreams() {
    const contract::Layer& layer = span_.layer;
    const Job& job = span_.job;
    Passes& first = room_.heads[FirstOfFew()];
    const auto add = [&](const ConstTensor& t, int64_t head, int64_t column, int64_t n) {
      const int64_t size = contract::SizeOf(t.dtype);
      if (t.strides[3] != 1) return;
      const Stream stream{t.data, static_cast<const std::byte*>(t.data) + contract::Offset(t, walk_.batch(), 0, head, column) * size,
                          t.strides[1] * size, n * size};
      for (int64_t x = 0; x < first.stream_count_; ++x) {
        Stream& before = first.streams_[x];
        if (before.tensor == stream.tensor && stream.at >= before.at && stream.at <= before.at + before.bytes) {
          before.bytes = std::max(before.bytes, stream.at + stream.bytes - before.at);
          return;
        }
      }
      if (first.stream_count_ < kMostStreams) first.streams_[first.stream_count_++] = stream;
    };
    const auto add_keys = [&](const ConstTensor& t) {
      if (t.rank == 4) add(t, HeadOf(t, 2, job.head, layer.state_heads), 0, span_.K);
    };
    add_keys(layer.in.k);
    add(layer.in.v, HeadOf(layer.in.v, 2, job.head, layer.state_heads), job.column, job.columns);
    if constexpr (S::kPerChannel) add_keys(layer.in.log_decay);
    if constexpr (S::kRankOne) add_keys(layer.in.remove), add_keys(layer.in.write);
    for (int64_t g = 0; g < span_.queries && g < kMostQueries; ++g) {
      const int64_t head = job.head * span_.queries + g;
      add(layer.in.q, contract::GroupedHead(head, layer.q_heads, layer.out_heads), 0, span_.K);
      add(layer.out.out, head, job.column, job.columns);
    }
  }

  // Where the walk over the next heads' rows is. Every step is given its share of lines as a list, and a pass asks for `a_turn` of them every kTurn
  // channels: evenly, for a core waits for a dozen lines at a time and no more.
  struct Ahead {
    const Passes* heads;
    int64_t first_token, last_token, token, tokens_ahead, a_step, a_turn, stream;
    const std::byte *line, *row_end;
    const std::byte* list[kMostLines];
  };

  void StartAhead() const {
    Ahead& ahead = *room_.ahead;
    const int64_t first = FirstOfFew(), few = std::min(Few(), room_.head_count - first), next = (first + few) % room_.head_count;
    ahead.heads = room_.heads + next;
    ahead.tokens_ahead = next == 0 ? span_.capacity : 0;
    ahead.first_token = (Place() - first) * span_.n / few;
    ahead.last_token = (Place() - first + 1) * span_.n / few;
    int64_t lines = 0;
    for (int64_t x = 0; x < ahead.heads->stream_count_; ++x)
      lines += (ahead.last_token - ahead.first_token) * ((ahead.heads->streams_[x].bytes + kLine - 1) / kLine);
    const int64_t steps = (vectors_ + kVectors - 1) / kVectors * blocks_, turns = span_.row / kTurn;
    ahead.a_turn = std::min((lines + steps * turns - 1) / (steps * turns), kMostLines / turns);
    ahead.a_step = ahead.a_turn * turns;
    ahead.stream = 0;
    ahead.token = ahead.first_token - 1;
    NextRow();
  }
  void NextRow() const {
    Ahead& ahead = *room_.ahead;
    const auto comes = [&](int64_t token) { return token < ahead.last_token && span_.tokens[token] + ahead.tokens_ahead < walk_.end(); };
    if (!comes(++ahead.token)) {
      ahead.token = ahead.first_token;
      ++ahead.stream;
    }
    if (ahead.stream >= ahead.heads->stream_count_ || !comes(ahead.token)) {
      ahead.a_turn = ahead.a_step = 0;
      return;
    }
    const Stream& stream = ahead.heads->streams_[ahead.stream];
    ahead.line = stream.at + (span_.tokens[ahead.token] + ahead.tokens_ahead) * stream.step;
    ahead.row_end = ahead.line + stream.bytes + kLine - 1;  // a row need not begin with a line
  }
  void ListLines() const {
    Ahead& ahead = *room_.ahead;
    const int64_t n = ahead.a_step;
    for (int64_t i = 0; i < n; ++i) {
      ahead.list[i] = ahead.line;
      ahead.line += kLine;
      if (ahead.line >= ahead.row_end) NextRow();
    }
  }

  // ---- Before the passes: a block's rows and numbers ---------------------------------------------------------------------------------------------

  template <int C>
  HWY_NOINLINE void Prepare(int64_t g, int64_t b) const {
    if (g == 0)
      PrepareRows<C, true>(0, b);
    else
      PrepareRows<C, false>(g, b);
  }

  // All of a block's rows and numbers, or for another query head those of its queries.
  template <int C, bool kFirst>
  HWY_INLINE void PrepareRows(int64_t g, int64_t b) const {
    using At = Coefs<C>;
    constexpr int kRows = kFirst ? At::kRows : C;
    constexpr int kX = kFirst ? At::kX : 0;
    constexpr bool kUpdates = kFirst;
    const Tag<T> d;
    const int64_t first = FirstToken(b), row = span_.row;
    const T *q[C], *k[C], *r[C], *w[C], *D[C];
    for (int i = 0; i < C; ++i) {
      q[i] = room_.q_rows[g][first + i];
      k[i] = span_.k[first + i];
      if constexpr (S::kRankOne) r[i] = span_.r[first + i], w[i] = span_.w[first + i];
      if constexpr (S::kPerChannel) D[i] = span_.D + (first + i) * row;
    }
    Vector<T> a[C][C], aw[C][C], bs[C][C], bw[C][C];
    HWY_UNROLL(4)
    for (int i = 0; i < C; ++i) {
      HWY_UNROLL(4)
      for (int j = 0; j <= i; ++j) a[i][j] = aw[i][j] = bs[i][j] = bw[i][j] = hn::Zero(d);
    }
    const auto scale = hn::Set(d, static_cast<T>(span_.layer.scale));
    T* HWY_RESTRICT to = CoefsAt(g, b);
    for (int64_t c = 0; c < row; c += kLanes, to += kRows * kLanes) {
      Vector<T> prefix = hn::Zero(d), keys[C], writes[C];
      HWY_UNROLL(4)
      for (int i = 0; i < C; ++i) {
        const auto qi = hn::Mul(hn::LoadU(d, q[i] + c), scale), ki = hn::LoadU(d, k[i] + c);
        Vector<T> ri = ki, wi = ki;
        if constexpr (S::kRankOne) ri = hn::LoadU(d, r[i] + c), wi = hn::LoadU(d, w[i] + c);
        const auto scores = [&](Vector<T> x, Vector<T>* onto_keys, Vector<T>* onto_writes) HWY_ATTR {
          HWY_UNROLL(4)
          for (int j = 0; j < i; ++j) {
            onto_keys[j] = hn::MulAdd(x, keys[j], onto_keys[j]);
            if constexpr (S::kRankOne) onto_writes[j] = hn::MulAdd(x, writes[j], onto_writes[j]);
          }
        };
        const auto faded = [&](Vector<T> x, bool any) HWY_ATTR { return R::kDecay != Decay::kNone && any ? hn::Mul(x, prefix) : x; };
        // Reads of the state before this token's decay.
        if constexpr (S::kReadBefore) {
          hn::Store(faded(qi, i > 0), d, to + (kX + i) * kLanes);
          scores(qi, a[i], aw[i]);
        }
        if constexpr (S::kRankOne && kUpdates) {
          hn::Store(faded(ri, i > 0), d, to + (At::kR + i) * kLanes);
          scores(ri, bs[i], bw[i]);
        }
        if constexpr (R::kDecay != Decay::kNone) {
          Vector<T> decay;
          if constexpr (S::kPerChannel)
            decay = hn::Load(d, D[i] + c);
          else
            decay = hn::Set(d, span_.D[first + i]);
          prefix = i == 0 ? decay : hn::Mul(prefix, decay);
          HWY_UNROLL(4)
          for (int j = 0; j < i; ++j) {
            keys[j] = hn::Mul(keys[j], decay);
            if constexpr (S::kRankOne) writes[j] = hn::Mul(writes[j], decay);
          }
        }
        // And after it.
        if constexpr (!S::kReadBefore) {
          hn::Store(faded(qi, true), d, to + (kX + i) * kLanes);
          scores(qi, a[i], aw[i]);
        }
        if constexpr (S::kDelta && kUpdates) {
          if constexpr (!At::kKeysAreRead) hn::Store(faded(ki, true), d, to + (At::kR + i) * kLanes);
          scores(ki, bs[i], bw[i]);
        }
        // What the token reads of its own write.
        keys[i] = ki;
        if constexpr (S::kReadBefore)
          a[i][i] = hn::MulAdd(hn::Mul(qi, hn::Load(d, span_.bonus + c)), ki, a[i][i]);
        else
          a[i][i] = hn::MulAdd(qi, ki, a[i][i]);
        if constexpr (S::kRankOne) {
          writes[i] = wi;
          aw[i][i] = hn::MulAdd(qi, wi, aw[i][i]);
        }
      }
      if constexpr (kUpdates) {
        HWY_UNROLL(4)
        for (int j = 0; j < C; ++j) {
          hn::Store(keys[j], d, to + (At::kK + j) * kLanes);
          if constexpr (S::kRankOne) hn::Store(writes[j], d, to + (At::kW + j) * kLanes);
        }
        if constexpr (S::kPerChannel) hn::Store(prefix, d, to + At::kD * kLanes);
      }
    }
    Numbers& numbers = NumbersAt(g, b);
    SumScores<C>(1, a, numbers.a);
    if constexpr (S::kRankOne) SumScores<C>(1, aw, numbers.aw);
    if constexpr (S::kReads && kUpdates) SumScores<C>(0, bs, numbers.b);
    if constexpr (S::kRankOne && kUpdates) SumScores<C>(0, bw, numbers.bw);
    if constexpr (S::kPerToken && kUpdates) {
      if constexpr (R::kDecay == Decay::kPerHead) {  // the power from f64, rounded once
        numbers.factor = C == 1 ? span_.D[0] : power_;
      } else {
        numbers.factor = span_.D[first];
        for (int i = 1; i < C; ++i) numbers.factor *= span_.D[first + i];
      }
    }
    if constexpr (S::kDelta && kUpdates) Invert<C>(span_.beta + first, numbers);
  }

  // Numbers [i][j] for j < i + diagonal from the lanes of their sums.
  template <int C>
  static HWY_INLINE void SumScores(int diagonal, const Vector<T> (&lanes)[C][C], T (&to)[kTokens][kTokens]) {
    const Tag<T> d;
    constexpr int kMost = C * (C + 1) / 2 + 3;
    Vector<T> flat[kMost];
    T sums[kMost];
    int n = 0;
    HWY_UNROLL(4)
    for (int i = 0; i < C; ++i) {
      HWY_UNROLL(4)
      for (int j = 0; j < i + diagonal; ++j) flat[n++] = lanes[i][j];
    }
    for (int more = 0; more < 3; ++more) flat[n + more] = hn::Zero(d);
    for (int at = 0; at < n; at += 4) SumFour<T>(flat[at], flat[at + 1], flat[at + 2], flat[at + 3], sums + at);
    n = 0;
    HWY_UNROLL(4)
    for (int i = 0; i < C; ++i) {
      HWY_UNROLL(4)
      for (int j = 0; j < i + diagonal; ++j) to[i][j] = sums[n++];
    }
  }

  // b = (1 + beta B)^-1 beta for the scores B below the diagonal.
  template <int C>
  static HWY_INLINE void Invert(const T* beta, Numbers& numbers) {
    T inverse[C][C];
    for (int i = 0; i < C; ++i) {
      for (int j = 0; j < i; ++j) {
        T sum = numbers.b[i][j];
        for (int l = j + 1; l < i; ++l) sum += numbers.b[i][l] * inverse[l][j];
        inverse[i][j] = -beta[i] * sum;
      }
    }
    for (int i = 0; i < C; ++i) {
      for (int j = 0; j < i; ++j) numbers.b[i][j] = inverse[i][j] * beta[j];
      numbers.b[i][i] = beta[i];
    }
  }

  // The denominators of a block's tokens, z' x and the row of scores, and z after it.
  template <int C>
  void Normalise(int64_t b) const {
    using At = Coefs<C>;
    const Tag<T> d;
    const int64_t first = FirstToken(b);
    for (int64_t g = 0; g < span_.queries; ++g) {
      const int rows = g == 0 ? At::kRows : C, at = g == 0 ? At::kX : 0;
      for (int i = 0; i < C; ++i) {
        const T* x = CoefsAt(g, b) + (at + i) * kLanes;
        T sum = SumLanes<T>(span_.K, [&](int64_t c) HWY_ATTR { return hn::Mul(hn::Load(d, key_sum_ + c), hn::Load(d, x + c * rows)); });
        for (int j = 0; j <= i; ++j) sum += NumbersAt(g, b).a[i][j];
        room_.denominators[g * span_.capacity + first + i] = sum;
      }
    }
    const T* coefs = CoefsAt(0, b);
    for (int64_t c = 0; c < span_.row; c += kLanes, coefs += At::kRows * kLanes) {
      auto z = hn::Load(d, key_sum_ + c);
      if constexpr (S::kPerChannel) z = hn::Mul(z, hn::Load(d, coefs + At::kD * kLanes));
      if constexpr (S::kPerToken) z = hn::Mul(z, hn::Set(d, NumbersAt(0, b).factor));
      for (int j = 0; j < C; ++j) z = hn::Add(z, hn::Load(d, coefs + (At::kK + j) * kLanes));
      hn::Store(z, d, key_sum_ + c);
    }
  }

  // ---- The passes ---------------------------------------------------------------------------------------------------------------------------------

  void AllPasses(const T* next_state) const {
    ForEachStrip([&](Strip strip) HWY_ATTR {
      const T* after = strip.state + span_.K * strip.vectors * kLanes;
      strip.next = after < state_ + span_.K * width_ ? after : next_state;
      if (strip.vectors == kVectors) return StripPasses<kVectors>(strip);
      StripPasses<1>(strip);
    });
  }

  template <int m>
  void StripPasses(const Strip& strip) const {
    int64_t b = 0;
    const int64_t full = FullBlocks();
    if (full > 0) {
      Pass<0, kTokens, m>(strip, 0, 0);
      for (; b + 1 < full; ++b) Step<kTokens, true, m>(strip, b);
      Step<kTokens, false, m>(strip, b++);
    }
    if (b < blocks_) {
      Pass<0, 1, m>(strip, b, b);
      for (; b + 1 < blocks_; ++b) Step<1, true, m>(strip, b);
      Step<1, false, m>(strip, b);
    }
  }

  // Block b, whose reads of the state are in the room's sums: its u, its outputs, and the pass that writes it, and reads for the next block if kNext.
  template <int C, bool kNext, int m>
  HWY_NOINLINE void Step(const Strip& strip, int64_t b) const {
    const Tag<T> d;
    const int64_t first = FirstToken(b), column = strip.first * kLanes;
    const Numbers& numbers = NumbersAt(0, b);
    ListLines();
    Vector<T> u[C][m], p[C][m];
    HWY_UNROLL(4)
    for (int i = 0; i < C; ++i) {
      HWY_UNROLL(4)
      for (int n = 0; n < m; ++n) {
        u[i][n] = hn::LoadU(d, v_[first + i] + column + n * kLanes);
        if constexpr (S::kDelta) u[i][n] = hn::Sub(u[i][n], hn::Load(d, Sum(C + i, n, m)));
      }
    }
    if constexpr (S::kDelta) {
      HWY_UNROLL(4)
      for (int i = C - 1; i >= 0; --i) {  // from the last row up, so that the rows above are still what they were
        HWY_UNROLL(4)
        for (int n = 0; n < m; ++n) {
          auto sum = hn::Mul(hn::Set(d, numbers.b[i][i]), u[i][n]);
          HWY_UNROLL(4)
          for (int j = 0; j < i; ++j) sum = hn::MulAdd(hn::Set(d, numbers.b[i][j]), u[j][n], sum);
          u[i][n] = sum;
        }
      }
    }
    if constexpr (S::kRankOne) {
      HWY_UNROLL(4)
      for (int i = 0; i < C; ++i) {
        HWY_UNROLL(4)
        for (int n = 0; n < m; ++n) {
          p[i][n] = hn::Load(d, Sum(C + i, n, m));
          HWY_UNROLL(4)
          for (int j = 0; j < i; ++j) {
            p[i][n] = hn::MulAdd(hn::Set(d, numbers.b[i][j]), u[j][n], p[i][n]);
            p[i][n] = hn::MulAdd(hn::Set(d, numbers.bw[i][j]), p[j][n], p[i][n]);
          }
        }
      }
    }
    WriteOut<C, m>(0, b, column, u, p);
    for (int64_t g = 1; g < span_.queries; ++g) {
      ReadOther<C, m>(strip, g, b);
      WriteOut<C, m>(g, b, column, u, p);
    }
    Pass<C, kNext ? C : 0, m>(strip, b, b + 1, u, p);
  }

  // What a pass leaves for the next block: sums of x (0 .. C - 1), then of r.
  T* Sum(int i, int n, int m) const { return room_.sums + (i * m + n) * kLanes; }

  template <int C, int m>
  HWY_INLINE void WriteOut(int64_t g, int64_t b, int64_t column, const Vector<T> (&u)[C][m], const Vector<T> (&p)[C][m]) const {
    const Tag<T> d;
    const Numbers& numbers = NumbersAt(g, b);
    const int64_t first = FirstToken(b);
    HWY_UNROLL(4)
    for (int i = 0; i < C; ++i) {
      T* to = room_.out_rows[g][first + i] + column;
      HWY_UNROLL(4)
      for (int n = 0; n < m; ++n) {
        auto sum = hn::Load(d, Sum(i, n, m));
        HWY_UNROLL(4)
        for (int j = 0; j <= i; ++j) {
          sum = hn::MulAdd(hn::Set(d, numbers.a[i][j]), u[j][n], sum);
          if constexpr (S::kRankOne) sum = hn::MulAdd(hn::Set(d, numbers.aw[i][j]), p[j][n], sum);
        }
        hn::StoreU(sum, d, to + n * kLanes);
      }
    }
  }

  // Writes kU tokens, u and p of block b, into the state of a strip, and reads it for the kR tokens of block `next`. Sums over channels run in order.
  template <int kU, int kR, int m>
  HWY_INLINE void Pass(const Strip& strip, int64_t b, int64_t next, const Vector<T> (*u)[m] = nullptr, const Vector<T> (*p)[m] = nullptr) const {
    using Write = Coefs<kU == 0 ? 1 : kU>;
    using Read = Coefs<kR == 0 ? 1 : kR>;
    const Tag<T> d;
    const int64_t K = span_.K;
    T* HWY_RESTRICT state = strip.state;
    const T* HWY_RESTRICT up = CoefsAt(0, b);
    const T* HWY_RESTRICT rd = kR > 0 ? CoefsAt(0, next) : up;
    const std::byte* const* HWY_RESTRICT lines = room_.ahead->list;
    const int64_t a_turn = room_.ahead->a_turn;
    const auto factor = hn::Set(d, S::kPerToken && kU > 0 ? NumbersAt(0, b).factor : T{1});
    Vector<T> x_sum[kR + 1][m], r_sum[kR + 1][m];
    HWY_UNROLL(4)
    for (int i = 0; i < kR; ++i) {
      HWY_UNROLL(4)
      for (int n = 0; n < m; ++n) x_sum[i][n] = r_sum[i][n] = hn::Zero(d);
    }
    for (int64_t c = 0; c < K; c += kLanes, up += Write::kRows * kLanes, rd += Read::kRows * kLanes) {
      const int64_t count = K - c < kLanes ? K - c : kLanes;
      for (int64_t l = 0; l < count; ++l, state += m * kLanes) {
        if constexpr (kU > 0) {
          if (l % kTurn == 0)
            for (int64_t i = 0; i < a_turn; ++i) __builtin_prefetch(*lines++, 0, 2);
        }
        Vector<T> s[m];
        HWY_UNROLL(4)
        for (int n = 0; n < m; ++n) s[n] = hn::Load(d, state + n * kLanes);
        if constexpr (kU > 0) {
          if constexpr (kR == 0) {  // the last pass of a strip
            HWY_UNROLL(4)
            for (int n = 0; n < m; ++n) __builtin_prefetch(strip.next + (state - strip.state) + n * kLanes, 0, 3);
          }
          if constexpr (S::kPerChannel) {
            const auto decay = hn::Set(d, up[Write::kD * kLanes + l]);
            HWY_UNROLL(4)
            for (int n = 0; n < m; ++n) s[n] = hn::Mul(s[n], decay);
          }
          if constexpr (S::kPerToken) {
            HWY_UNROLL(4)
            for (int n = 0; n < m; ++n) s[n] = hn::Mul(s[n], factor);
          }
          HWY_UNROLL(4)
          for (int j = 0; j < kU; ++j) {
            const auto k = hn::Set(d, up[(Write::kK + j) * kLanes + l]);
            HWY_UNROLL(4)
            for (int n = 0; n < m; ++n) s[n] = hn::MulAdd(k, u[j][n], s[n]);
            if constexpr (S::kRankOne) {
              const auto w = hn::Set(d, up[(Write::kW + j) * kLanes + l]);
              HWY_UNROLL(4)
              for (int n = 0; n < m; ++n) s[n] = hn::MulAdd(w, p[j][n], s[n]);
            }
          }
          HWY_UNROLL(4)
          for (int n = 0; n < m; ++n) hn::Store(s[n], d, state + n * kLanes);
        }
        HWY_UNROLL(4)
        for (int i = 0; i < kR; ++i) {
          const auto x = hn::Set(d, rd[(Read::kX + i) * kLanes + l]);
          HWY_UNROLL(4)
          for (int n = 0; n < m; ++n) x_sum[i][n] = hn::MulAdd(x, s[n], x_sum[i][n]);
          if constexpr (S::kReads) {
            const auto r = hn::Set(d, rd[(Read::kR + i) * kLanes + l]);
            HWY_UNROLL(4)
            for (int n = 0; n < m; ++n) r_sum[i][n] = hn::MulAdd(r, s[n], r_sum[i][n]);
          }
        }
      }
    }
    HWY_UNROLL(4)
    for (int i = 0; i < kR; ++i) {
      HWY_UNROLL(4)
      for (int n = 0; n < m; ++n) {
        hn::Store(x_sum[i][n], d, Sum(i, n, m));
        if constexpr (S::kReads) hn::Store(r_sum[i][n], d, Sum(kR + i, n, m));
      }
    }
  }

  // ---- One token: the state where it lies ---------------------------------------------------------------------------------------------------------
  //
  // Then it is not copied, but read and written row after row as it lies in memory: in one pass, or where the update reads it in two. The second of
  // these goes together with the first of the next strip, be it another head's: one waits for memory while the other computes. Meanwhile the strip
  // of the next head is asked for. Sums over channels run in order; writes run from the strip's end, which is still in the first cache.

  bool OneToken() const {
    const ConstTensor& from = span_.layer.in.initial_state;
    const ConstTensor to = span_.layer.out.final_state;
    return job_.saved->tokens == 0 && walk_.length() == 1 && walk_.Valid() && from.given() && to.given() && LiesReady<T>(from, span_.job.columns) &&
           LiesReady<T>(to, span_.job.columns);
  }

  // The state in place from a vector of value columns on, before the token and after it.
  const T* StateBefore(int64_t first) const {
    const ConstTensor& t = span_.layer.in.initial_state;
    return static_cast<const T*>(t.data) + contract::Offset(t, job_.sequence, job_.head, 0, job_.column + first * kLanes);
  }
  T* StateAfter(int64_t first) const {
    const Tensor& t = span_.layer.out.final_state;
    return static_cast<T*>(t.data) + contract::Offset(t, job_.sequence, job_.head, 0, job_.column + first * kLanes);
  }

  // Row `which` of Coefs<1>, a number a channel.
  T* FlatAt(int which) const { return room_.flat + (job_.head % 2 * Coefs<1>::kRows + which) * span_.row; }
  void FlattenCoefs() const {
    const Tag<T> d;
    const T* HWY_RESTRICT from = CoefsAt(0, 0);
    T* HWY_RESTRICT to = FlatAt(0);
    const int64_t row = span_.row;
    for (int64_t c = 0; c < row; c += kLanes) {
      for (int which = 0; which < Coefs<1>::kRows; ++which, from += kLanes) hn::Store(hn::Load(d, from), d, to + which * row + c);
    }
  }

  void PassInPlace() const {
    FlattenCoefs();
    for (int64_t first = 0; first < vectors_;) {
      const bool wide = first + kWide <= vectors_;
      wide ? StripInPlace<kWide>(first) : StripInPlace<1>(first);
      first += wide ? kWide : 1;
    }
  }

  template <int m>
  HWY_NOINLINE void StripInPlace(int64_t first) const {
    const Tag<T> d;
    const int64_t column = first * kLanes;
    const T* from = StateBefore(first);
    const bool more = job_.head + 1 < span_.layer.state_heads;
    const T* ahead = from + (more ? span_.layer.in.initial_state.strides[1] : 0);
    const T* to_ahead = StateAfter(first) + (more ? span_.layer.out.final_state.strides[1] : 0);
    const int64_t from_row = span_.layer.in.initial_state.strides[2];
    // The reads of the other query heads come before the write.
    for (int64_t g = 1; g < span_.queries; ++g) {
      const T* x = CoefsAt(g, 0);
      Vector<T> sum[m];
      HWY_UNROLL(8)
      for (int n = 0; n < m; ++n) sum[n] = hn::Zero(d);
      for (int64_t c = 0; c < span_.K; ++c) {
        HWY_UNROLL(8)
        for (int n = 0; n < m; ++n) sum[n] = hn::MulAdd(hn::Set(d, x[c]), hn::LoadU(d, from + c * from_row + n * kLanes), sum[n]);
      }
      HWY_UNROLL(8)
      for (int n = 0; n < m; ++n) hn::StoreU(sum[n], d, OutOf(g) + column + n * kLanes);
    }
    Pending& write = *room_.pending;
    if constexpr (S::kReads) {
      if (write.vectors == m) {
        WriteAndRead<m, true, true>(from, ahead, to_ahead);
      } else {
        FinishWrite();
        WriteAndRead<m, false, true>(from, ahead, to_ahead);
      }
    }
    write.vectors = m;
    write.from = from;
    write.to = StateAfter(first);
    write.from_row = from_row;
    write.to_row = span_.layer.out.final_state.strides[2];
    write.k = FlatAt(Coefs<1>::kK);
    write.w = FlatAt(Coefs<1>::kW);
    write.decay = FlatAt(S::kPerChannel ? Coefs<1>::kD : 0);
    write.factor = S::kPerToken ? NumbersAt(0, 0).factor : T{1};
    Vector<T> u[m], p[m];
    HWY_UNROLL(8)
    for (int n = 0; n < m; ++n) {
      u[n] = hn::LoadU(d, v_[0] + column + n * kLanes);
      p[n] = hn::Zero(d);
      if constexpr (S::kDelta) u[n] = hn::Mul(hn::Set(d, NumbersAt(0, 0).b[0][0]), hn::Sub(u[n], hn::Load(d, Sum(1, n, m))));
      if constexpr (S::kRankOne) p[n] = hn::Load(d, Sum(1, n, m)), hn::Store(p[n], d, write.p + n * kLanes);
      hn::Store(u[n], d, write.u + n * kLanes);
    }
    if constexpr (!S::kReads) {
      WriteAndRead<m, true, true>(from, ahead, to_ahead);
      write.vectors = 0;
    }
    for (int64_t g = 0; g < span_.queries; ++g) {
      const Numbers& numbers = NumbersAt(g, 0);
      HWY_UNROLL(8)
      for (int n = 0; n < m; ++n) {
        T* o = OutOf(g) + column + n * kLanes;
        auto sum = hn::MulAdd(hn::Set(d, numbers.a[0][0]), u[n], g == 0 ? hn::Load(d, Sum(0, n, m)) : hn::LoadU(d, o));
        if constexpr (S::kRankOne) sum = hn::MulAdd(hn::Set(d, numbers.aw[0][0]), p[n], sum);
        hn::StoreU(sum, d, o);
      }
    }
  }

  void FinishWrite() const {
    const int vectors = room_.pending->vectors;
    room_.pending->vectors = 0;
    if (vectors == kWide) WriteAndRead<kWide, true, false>(nullptr, nullptr, nullptr);
    if (vectors == 1) WriteAndRead<1, true, false>(nullptr, nullptr, nullptr);
  }

  // Writes the room's strip, and reads the one at `from` for this head's token into the room's sums: x, then r. Where the update reads nothing both
  // are the same strip. `ahead` is the strip to ask for, and `to_ahead` where it will be written to: a store to what is not in a cache waits for it.
  template <int m, bool kWrite, bool kRead>
  HWY_NOINLINE void WriteAndRead(const T* from, const T* ahead, const T* to_ahead) const {
    using At = Coefs<1>;
    constexpr int64_t kNumbers = kLine / sizeof(T);
    constexpr bool kTwo = S::kReads;
    static_assert((kTwo ? 2 : 1) * kWide <= 2 * kTokens * kVectors, "the room's sums are too few");
    const Tag<T> d;
    const Pending& write = *room_.pending;
    // Writes go from row `begin` on by `step` rows.
    const int64_t to_ahead_row = span_.layer.out.final_state.strides[2];
    const bool apart = to_ahead != ahead;
    const int64_t K = span_.K, from_row = span_.layer.in.initial_state.strides[2], step = kTwo ? -1 : 1, begin = kTwo ? K - 1 : 0;
    const int64_t old_row = kWrite ? write.from_row * step : 0, to_row = kWrite ? write.to_row * step : 0;
    const T* old = kWrite ? write.from + begin * write.from_row : nullptr;
    T* to = kWrite ? write.to + begin * write.to_row : nullptr;
    const T *HWY_RESTRICT x = FlatAt(At::kX), *HWY_RESTRICT r = FlatAt(kTwo ? At::kR : At::kX);
    const T* HWY_RESTRICT k = kWrite ? write.k + begin : x;
    const T* HWY_RESTRICT w = kWrite ? write.w + begin : x;
    const T* HWY_RESTRICT decay = kWrite ? write.decay + begin : x;
    const auto factor = hn::Set(d, kWrite ? write.factor : T{1});
    Vector<T> u[m], p[m], x_sum[m], r_sum[m];
    HWY_UNROLL(8)
    for (int n = 0; n < m; ++n) {
      x_sum[n] = r_sum[n] = u[n] = p[n] = hn::Zero(d);
      if constexpr (kWrite) u[n] = hn::Load(d, write.u + n * kLanes);
      if constexpr (kWrite && S::kRankOne) p[n] = hn::Load(d, write.p + n * kLanes);
    }
    for (int64_t i = 0; i < K; ++i) {
      if constexpr (kWrite) {
        const auto key = hn::Set(d, k[i * step]);
        HWY_UNROLL(8)
        for (int n = 0; n < m; ++n) {
          auto s = hn::LoadU(d, old + n * kLanes);
          if constexpr (!kTwo) x_sum[n] = hn::MulAdd(hn::Set(d, x[i]), s, x_sum[n]);
          if constexpr (S::kPerChannel) s = hn::Mul(s, hn::Set(d, decay[i * step]));
          if constexpr (S::kPerToken) s = hn::Mul(s, factor);
          s = hn::MulAdd(key, u[n], s);
          if constexpr (S::kRankOne) s = hn::MulAdd(hn::Set(d, w[i * step]), p[n], s);
          hn::StoreU(s, d, to + n * kLanes);
        }
        old += old_row;
        to += to_row;
      }
      if constexpr (kRead) {
        for (int64_t n = 0; n < m * kLanes; n += kNumbers) __builtin_prefetch(ahead + n, 0, 2);
        ahead += from_row;
        if (apart) {
          for (int64_t n = 0; n < m * kLanes; n += kNumbers) __builtin_prefetch(to_ahead + n, 0, 2);
          to_ahead += to_ahead_row;
        }
        if constexpr (kTwo) {
          HWY_UNROLL(8)
          for (int n = 0; n < m; ++n) {
            const auto s = hn::LoadU(d, from + n * kLanes);
            x_sum[n] = hn::MulAdd(hn::Set(d, x[i]), s, x_sum[n]);
            r_sum[n] = hn::MulAdd(hn::Set(d, r[i]), s, r_sum[n]);
          }
          from += from_row;
        }
      }
    }
    if constexpr (kRead) {
      HWY_UNROLL(8)
      for (int n = 0; n < m; ++n) {
        hn::Store(x_sum[n], d, Sum(0, n, m));
        if constexpr (kTwo) hn::Store(r_sum[n], d, Sum(1, n, m));
      }
    }
  }
  T* OutOf(int64_t g) const { return room_.out_rows[g][0]; }

  // The reads of query head g for block b: a pass that only reads.
  template <int C, int m>
  HWY_NOINLINE void ReadOther(const Strip& strip, int64_t g, int64_t b) const {
    const Tag<T> d;
    const T* HWY_RESTRICT state = strip.state;
    const T* HWY_RESTRICT x = CoefsAt(g, b);
    Vector<T> sum[C][m];
    HWY_UNROLL(4)
    for (int i = 0; i < C; ++i) {
      HWY_UNROLL(4)
      for (int n = 0; n < m; ++n) sum[i][n] = hn::Zero(d);
    }
    for (int64_t c = 0; c < span_.K; c += kLanes, x += C * kLanes) {
      const int64_t count = span_.K - c < kLanes ? span_.K - c : kLanes;
      for (int64_t l = 0; l < count; ++l, state += m * kLanes) {
        HWY_UNROLL(4)
        for (int i = 0; i < C; ++i) {
          HWY_UNROLL(4)
          for (int n = 0; n < m; ++n) sum[i][n] = hn::MulAdd(hn::Set(d, x[i * kLanes + l]), hn::Load(d, state + n * kLanes), sum[i][n]);
        }
      }
    }
    HWY_UNROLL(4)
    for (int i = 0; i < C; ++i) {
      HWY_UNROLL(4)
      for (int n = 0; n < m; ++n) hn::Store(sum[i][n], d, Sum(i, n, m));
    }
  }

  const Job job_;  // of this head alone
  bool state_in_place_ = false;
  T power_ = 1;  // kPerHead: F(kTokens, 0)
  const Room& room_;
  S span_;
  forms::Tokens walk_;
  const int64_t vectors_, width_;  // of value columns; width_ in numbers
  int64_t blocks_ = 0;             // of the span
  int64_t done_ = 0;               // valid tokens of the spans so far
  Rows<T> v_;
  T* state_;    // strip by strip, [K][columns of the strip]
  T* key_sum_;  // [row]
  // Query heads whose rows are asked for: those of more crowd the steps.
  static constexpr int64_t kMostQueries = 4;
  static constexpr int64_t kMostStreams = 32;
  Stream streams_[kMostStreams];
  int64_t stream_count_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

#endif  // TERCET_SRC_FORMS_PASSES_INL_H_
