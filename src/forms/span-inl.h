// A span: the tokens an engine takes at once. Features are mapped here and logarithms become factors here; behind it there are only rows of T, packed
// or, where an engine can use them so, in the caller's memory. An engine that takes rows in place scales the queries itself.
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

// Row i of what a span holds: packed, or where it lies in the caller's memory.
template <class T>
struct Rows {
  const T* at = nullptr;
  int64_t step = 0;
  const int64_t* tokens = nullptr;  // the token of row i, for rows that lie in the caller's memory

  const T* operator[](int64_t i) const { return at + (tokens != nullptr ? tokens[i] : i) * step; }
};

// Whether rows of n numbers can be read, or written, in whole vectors where they lie.
template <class T>
HWY_INLINE bool LiesReady(const ConstTensor& t, int64_t n) {
  return t.dtype == DtypeOf<T>() && t.strides[3] == 1 && n % Lanes<T>() == 0 && reinterpret_cast<uintptr_t>(t.data) % alignof(T) == 0;
}
// Rows of head `head` in batch `batch`, from column `column` on, where they lie.
template <class T>
HWY_INLINE Rows<T> RowsInPlace(const ConstTensor& t, int64_t batch, int64_t head, int64_t column, const int64_t* tokens) {
  return {static_cast<const T*>(t.data) + contract::Offset(t, batch, 0, head, column), t.strides[1], tokens};
}

// Some columns of the state of head `head` in place `number`, as K rows to_row apart, and back. One that lies turned, the channels of a column side
// by side, is turned in registers; its rows have room for whole vectors, which are then zero past the columns.
template <class T>
HWY_INLINE bool LiesTurned(const ConstTensor& t) {
  return t.dtype == DtypeOf<T>() && t.strides[2] == 1 && t.strides[3] != 1 && reinterpret_cast<uintptr_t>(t.data) % alignof(T) == 0;
}
template <class T>
HWY_INLINE void LoadColumns(const ConstTensor& t, int64_t number, int64_t head, int64_t column, int64_t K, int64_t columns, T* to, int64_t to_row) {
  const int64_t offset = contract::Offset(t, number, head, 0, column);
  if (LiesTurned<T>(t)) return TransposeTile(columns, K, static_cast<const T*>(t.data) + offset, t.strides[3], to, to_row);
  for (int64_t c = 0; c < K; ++c) LoadRow(t, offset + c * t.strides[2], t.strides[3], columns, to + c * to_row);
}
template <class T>
HWY_INLINE void StoreColumns(const Tensor& t, int64_t number, int64_t head, int64_t column, int64_t K, int64_t columns, const T* from,
                             int64_t from_row) {
  const int64_t offset = contract::Offset(t, number, head, 0, column);
  if (LiesTurned<T>(t)) return TransposeTile(K, columns, from, from_row, static_cast<T*>(t.data) + offset, t.strides[3], false);
  for (int64_t c = 0; c < K; ++c) StoreRow(t, offset + c * t.strides[2], t.strides[3], columns, from + c * from_row);
}

// R is a point on the axes: R::kDecay and R::kUpdate.
template <class R, class T>
struct Span {
  static constexpr bool kPerToken = R::kDecay == Decay::kPerHead || R::kDecay == Decay::kPerStep;  // one factor a token
  static constexpr bool kPerChannel = R::kDecay == Decay::kPerChannel;
  static constexpr bool kReadBefore = R::kUpdate == Update::kAddReadBefore;
  static constexpr bool kDelta = R::kUpdate == Update::kDelta;
  static constexpr bool kRankOne = R::kUpdate == Update::kRankOne;
  static constexpr bool kReads = kDelta || kRankOne;  // the update reads the state

  const Job& job;
  const contract::Layer& layer;
  const bool in_place;     // rows that lie ready are not packed
  const int64_t capacity;  // tokens
  const int64_t K, row;    // channels, and from a packed row to the next: K in whole vectors
  const int64_t queries;   // output heads that read this state
  int64_t n = 0;           // tokens held now

  int64_t* tokens;
  T* k_room;  // [n][row], as the rows below where they are packed
  T* r_room;
  T* w_room;
  T* D;             // kPerToken [n], kPerChannel [n][row]
  T* beta;          // kDelta [n]
  T* bonus;         // kReadBefore [row]
  Rows<T> k, r, w;  // keys with features mapped; kRankOne: remove and write

  Span(const Job& j, Arena& arena, bool rows_in_place)
      : job(j),
        layer(*j.layer),
        in_place(rows_in_place),
        capacity(j.span),
        K(layer.key_dim),
        row(RoundUp(K, Lanes<T>())),
        queries(layer.queries_per_state()) {
    tokens = arena.Take<int64_t>(capacity);
    k_room = arena.Take<T>(capacity * row);
    r_room = arena.Take<T>(kRankOne ? capacity * row : 0);
    w_room = arena.Take<T>(kRankOne ? capacity * row : 0);
    D = arena.Take<T>(kPerChannel ? capacity * row : kPerToken ? RoundUp(capacity, Lanes<T>()) : 0);
    beta = arena.Take<T>(kDelta ? capacity : 0);
    bonus = arena.Take<T>(kReadBefore ? row : 0);
  }

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

  // Takes the next valid tokens, but for their queries and values. False at the end of the sequence.
  bool Next(forms::Tokens& walk) {
    n = walk.Next(capacity, tokens);
    if (n == 0) return false;
    const int64_t batch = walk.batch();
    const Inputs& in = layer.in;
    k = KeyRows(in.k, batch, HeadOf(in.k, 2, job.head, layer.state_heads), 1.0, k_room);
    if constexpr (R::kDecay == Decay::kPerStep) {
      PackNumbers(in.log_decay, batch, D);
      ExpRow(n, D);
    }
    if constexpr (kPerChannel) {
      PackRows(in.log_decay, batch, HeadOf(in.log_decay, 2, job.head, layer.state_heads), D);
      ExpRow(n * row, D);
    }
    if constexpr (kDelta) PackNumbers(in.beta, batch, beta);
    if constexpr (kRankOne) {
      r = GivenRows(in.remove, batch, HeadOf(in.remove, 2, job.head, layer.state_heads), r_room);
      w = GivenRows(in.write, batch, HeadOf(in.write, 2, job.head, layer.state_heads), w_room);
    }
    return true;
  }

  // The queries of output head `head * queries + g`: features mapped, then scaled.
  Rows<T> Queries(int64_t batch, int64_t g, T* room) const {
    return KeyRows(layer.in.q, batch, contract::GroupedHead(job.head * queries + g, layer.q_heads, layer.out_heads), layer.scale, room);
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

  void LoadKeySum(T* z) const {
    const ConstTensor& t = layer.in.initial_key_sum;
    Fill(row, T{0}, z);
    if (t.given()) LoadRow(t, contract::Offset(t, job.sequence, job.head), t.strides[2], K, z);
  }
  // Every job of a head has the same key sum; the one with the first columns writes it.
  void StoreKeySum(const Tensor& t, int64_t number, const T* z) const {
    if (t.given() && job.column == 0) StoreRow(t, contract::Offset(t, number, job.head), t.strides[2], K, z);
  }

  // A row of features, in place.
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
  Rows<T> GivenRows(const ConstTensor& t, int64_t batch, int64_t head, T* room) const {
    if (in_place && LiesReady<T>(t, K)) return RowsInPlace<T>(t, batch, head, 0, tokens);
    PackRows(t, batch, head, room);
    return {room, row, nullptr};
  }
  // Where rows are read in place the scale is left to the reader, as if it were part of the features.
  Rows<T> KeyRows(const ConstTensor& t, int64_t batch, int64_t head, double scale, T* room) const {
    if (in_place && layer.feature_map == FeatureMap::kIdentity) return GivenRows(t, batch, head, room);
    PackRows(t, batch, head, room);
    for (int64_t i = 0; i < n; ++i) {
      MapFeatures(room + i * row);
      if (!in_place && scale != 1.0) ScaleRow(row, static_cast<T>(scale), room + i * row);
    }
    return {room, row, nullptr};
  }

  // [n] from [B, T, H].
  void PackNumbers(const ConstTensor& t, int64_t batch, T* to) const {
    const int64_t head = HeadOf(t, 2, job.head, layer.state_heads);
    for (int64_t i = 0; i < n; ++i) to[i] = LoadOne<T>(t, contract::Offset(t, batch, tokens[i], head));
    for (int64_t i = n; i < RoundUp(n, Lanes<T>()) && i < capacity; ++i) to[i] = 0;
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

#endif  // TERCET_SRC_FORMS_SPAN_INL_H_
