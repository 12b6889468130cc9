// A span: the tokens an engine takes at once, packed. Features are mapped here, logarithms become factors here, and the scale goes into q; behind it
// there are only dense rows of T.
#include <cmath>
#include <cstdint>

#include "src/forms/dtypes-inl.h"
#include "src/forms/job.hpp"
#include "src/forms/tiles-inl.h"
#include "src/rules/axes.hpp"

#if defined(TERCET_SRC_FORMS_SPAN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERCET_SRC_FORMS_SPAN_INL_H_
#undef TERCET_SRC_FORMS_SPAN_INL_H_
#else
#define TERCET_SRC_FORMS_SPAN_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet {
namespace HWY_NAMESPACE {

using forms::Arena;
using forms::HeadOf;
using forms::Job;

// R is a point on the axes: R::kDecay and R::kUpdate.
template <class R, class T>
struct Span {
  static constexpr bool kPerToken = R::kDecay == Decay::kPerHead || R::kDecay == Decay::kPerStep;  // one factor a token
  static constexpr bool kPerChannel = R::kDecay == Decay::kPerChannel;
  static constexpr bool kReadBefore = R::kUpdate == Update::kAddReadBefore;
  static constexpr bool kReads = R::kUpdate == Update::kDelta || R::kUpdate == Update::kRankOne;  // the update reads the state, with r

  const Job& job;
  const contract::Layer& layer;
  const int64_t capacity;  // tokens
  const int64_t K, row;    // channels, and from a token's row to the next: K in whole vectors
  const int64_t queries;   // output heads that read this state
  const int64_t panels;    // of value columns
  int64_t n = 0;           // tokens held now

  int64_t* tokens;
  T* k;      // [n][row]
  T* v;      // [panels][capacity][Panel]
  T* D;      // kPerToken [n], kPerChannel [n][row]
  T* beta;   // kDelta [n]
  T* r;      // kReads [n][row]: D k, or remove
  T* w;      // kRankOne [n][row]
  T* bonus;  // kReadBefore [row]

  Span(const Job& j, Arena& arena)
      : job(j),
        layer(*j.layer),
        capacity(j.span),
        K(layer.key_dim),
        row(RoundUp(K, Lanes<T>())),
        queries(layer.queries_per_state()),
        panels((j.columns + Panel<T>() - 1) / Panel<T>()) {
    tokens = arena.Take<int64_t>(capacity);
    k = arena.Take<T>(capacity * row);
    v = arena.Take<T>(panels * capacity * Panel<T>());
    D = arena.Take<T>(kPerChannel ? capacity * row : kPerToken ? RoundUp(capacity, Lanes<T>()) : 0);
    beta = arena.Take<T>(R::kUpdate == Update::kDelta ? capacity : 0);
    r = R::kUpdate == Update::kDelta && R::kDecay == Decay::kNone ? k : arena.Take<T>(kReads ? capacity * row : 0);
    w = arena.Take<T>(R::kUpdate == Update::kRankOne ? capacity * row : 0);
    bonus = arena.Take<T>(kReadBefore ? row : 0);
  }

  // Columns of panel p that exist, and the vectors that hold them.
  int64_t Width(int64_t p) const { return p + 1 < panels ? Panel<T>() : job.columns - p * Panel<T>(); }
  int Vectors(int64_t p) const { return static_cast<int>(RoundUp(Width(p), Lanes<T>()) / Lanes<T>()); }

  // What does not change from token to token. A constant decay's factor comes from f64, rounded once.
  void PackHead() const {
    if constexpr (kReadBefore) {
      const ConstTensor& t = layer.in.bonus;
      LoadRow(t, contract::Offset(t, HeadOf(t, 0, job.head, layer.state_heads)), t.strides[1], K, bonus);
      ClearPad(bonus);
    }
    if constexpr (R::kDecay == Decay::kPerHead) Fill(capacity, static_cast<T>(std::exp(LogDecay())), D);
  }

  // The constant log decay of this head.
  double LogDecay() const {
    const ConstTensor& t = layer.in.log_decay;
    return static_cast<double>(LoadOne<T>(t, contract::Offset(t, HeadOf(t, 0, job.head, layer.state_heads))));
  }

  // Packs the next valid tokens but for their queries. False at the end of the sequence.
  bool Next(forms::Tokens<T>& walk) {
    n = walk.Next(capacity, tokens);
    if (n == 0) return false;
    const int64_t batch = walk.batch();
    const Inputs& in = layer.in;
    PackRows(in.k, batch, HeadOf(in.k, 2, job.head, layer.state_heads), k);
    for (int64_t i = 0; i < n; ++i) MapFeatures(k + i * row);
    PackValues(batch);
    if constexpr (R::kDecay == Decay::kPerStep) {
      PackNumbers(in.log_decay, batch, D);
      ExpRow(n, D);
    }
    if constexpr (kPerChannel) {
      PackRows(in.log_decay, batch, HeadOf(in.log_decay, 2, job.head, layer.state_heads), D);
      ExpRow(n * row, D);
    }
    if constexpr (R::kUpdate == Update::kDelta) {
      PackNumbers(in.beta, batch, beta);
      if constexpr (R::kDecay != Decay::kNone)
        for (int64_t i = 0; i < n; ++i) Decayed(k + i * row, i, r + i * row);
    }
    if constexpr (R::kUpdate == Update::kRankOne) {
      PackRows(in.remove, batch, HeadOf(in.remove, 2, job.head, layer.state_heads), r);
      PackRows(in.write, batch, HeadOf(in.write, 2, job.head, layer.state_heads), w);
    }
    return true;
  }

  // Packs the queries of output head `head * queries + g`: features mapped, then scaled.
  void PackQueries(int64_t batch, int64_t g, T* q) const {
    PackRows(layer.in.q, batch, contract::GroupedHead(job.head * queries + g, layer.q_heads, layer.out_heads), q);
    for (int64_t i = 0; i < n; ++i) {
      MapFeatures(q + i * row);
      if (layer.scale != 1.0) ScaleRow(row, static_cast<T>(layer.scale), q + i * row);
    }
  }

  // to = D_i x, one row.
  void Decayed(const T* x, int64_t i, T* to) const {
    if constexpr (kPerChannel) {
      MultiplyRows(row, x, D + i * row, to);
    } else {
      if (to != x) Copy(row, x, to);
      if constexpr (kPerToken) ScaleRow(row, D[i], to);
    }
  }

  // ---- The state: [panels][K][Panel], read before and written after all tokens ----

  void LoadState(T* state) const {
    const ConstTensor& t = layer.in.initial_state;
    for (int64_t p = 0; p < panels; ++p) {
      for (int64_t c = 0; c < K; ++c) {
        T* to = state + (p * K + c) * Panel<T>();
        Fill(Panel<T>(), T{0}, to);
        if (t.given()) LoadRow(t, contract::Offset(t, job.sequence, job.head, c, job.column + p * Panel<T>()), t.strides[3], Width(p), to);
      }
    }
  }
  void StoreState(const T* state) const {
    const Tensor& t = layer.out.final_state;
    if (!t.given()) return;
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t c = 0; c < K; ++c)
        StoreRow(t, contract::Offset(t, job.sequence, job.head, c, job.column + p * Panel<T>()), t.strides[3], Width(p),
                 state + (p * K + c) * Panel<T>());
  }
  void LoadKeySum(T* z) const {
    const ConstTensor& t = layer.in.initial_key_sum;
    Fill(row, T{0}, z);
    if (t.given()) LoadRow(t, contract::Offset(t, job.sequence, job.head), t.strides[2], K, z);
  }
  // Every job of a head has the same key sum; the one with the first columns writes it.
  void StoreKeySum(const T* z) const {
    const Tensor& t = layer.out.final_key_sum;
    if (t.given() && job.column == 0) StoreRow(t, contract::Offset(t, job.sequence, job.head), t.strides[2], K, z);
  }

  // Writes rows [n][Panel] of panel p to output head g, divided by the denominators if there are any; a zero denominator gives a zero row.
  void StoreOut(int64_t batch, int64_t g, int64_t p, T* rows, const T* denominators) const {
    const Tensor& t = layer.out.out;
    for (int64_t i = 0; i < n; ++i) {
      T* at = rows + i * Panel<T>();
      if (denominators != nullptr) {
        if (denominators[i] == 0) {
          Fill(Panel<T>(), T{0}, at);
        } else {
          const Tag<T> d;
          for (int64_t x = 0; x < Width(p); x += Lanes<T>()) hn::Store(hn::Div(hn::Load(d, at + x), hn::Set(d, denominators[i])), d, at + x);
        }
      }
      StoreRow(t, contract::Offset(t, batch, tokens[i], job.head * queries + g, job.column + p * Panel<T>()), t.strides[3], Width(p), at);
    }
  }

 private:
  void ClearPad(T* at) const {
    for (int64_t c = K; c < row; ++c) at[c] = 0;
  }

  // [n][row] from [B, T, H, K].
  void PackRows(const ConstTensor& t, int64_t batch, int64_t head, T* to) const {
    for (int64_t i = 0; i < n; ++i, to += row) {
      LoadRow(t, contract::Offset(t, batch, tokens[i], head), t.strides[3], K, to);
      ClearPad(to);
    }
  }

  // [n] from [B, T, H].
  void PackNumbers(const ConstTensor& t, int64_t batch, T* to) const {
    const int64_t head = HeadOf(t, 2, job.head, layer.state_heads);
    for (int64_t i = 0; i < n; ++i) to[i] = LoadOne<T>(t, contract::Offset(t, batch, tokens[i], head));
    for (int64_t i = n; i < RoundUp(n, Lanes<T>()) && i < capacity; ++i) to[i] = 0;
  }

  void PackValues(int64_t batch) const {
    const ConstTensor& t = layer.in.v;
    const int64_t head = HeadOf(t, 2, job.head, layer.state_heads);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t padded = Vectors(p) * Lanes<T>();
      for (int64_t i = 0; i < n; ++i) {
        T* to = v + (p * capacity + i) * Panel<T>();
        LoadRow(t, contract::Offset(t, batch, tokens[i], head, job.column + p * Panel<T>()), t.strides[3], Width(p), to);
        for (int64_t x = Width(p); x < padded; ++x) to[x] = 0;
      }
    }
  }

  void MapFeatures(T* x) const {
    switch (layer.feature_map) {
      case FeatureMap::kIdentity:
        return;
      case FeatureMap::kEluPlusOne:
        EluPlusOneRow(row, x);
        break;
      case FeatureMap::kRelu:
        ReluRow(row, x);
        break;
      case FeatureMap::kL2Norm:
        L2NormRow(K, static_cast<T>(layer.eps), x);
        break;
    }
    ClearPad(x);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

#endif  // TERCET_SRC_FORMS_SPAN_INL_H_
