// Where dtypes and strides end: rows of a tensor become rows of the accumulator's type T, and back. bf16 and f16 are widened exactly and narrowed to
// nearest even, to the same bits on every target as src/contract/half.hpp gives.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "src/contract/half.hpp"
#include "src/contract/tensor.hpp"
#include "src/forms/tiles-inl.h"

#if defined(TERCET_SRC_FORMS_DTYPES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERCET_SRC_FORMS_DTYPES_INL_H_
#undef TERCET_SRC_FORMS_DTYPES_INL_H_
#else
#define TERCET_SRC_FORMS_DTYPES_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet {
namespace HWY_NAMESPACE {

using HalfTag = hn::Rebind<uint16_t, Tag<float>>;
using HalfVector = hn::Vec<HalfTag>;
using BitsTag = hn::Rebind<uint32_t, Tag<float>>;

// ---- A vector -----------------------------------------------------------------------------------------------------------------------------
//
// In integers, for the floating-point mode takes small numbers as zero. A float is only made where neither it nor what it is made from is below the
// normal range.

template <class Half>
HWY_INLINE Vector<float> WidenVector(HalfVector half);
template <class Half>
HWY_INLINE HalfVector NarrowVector(Vector<float> x);

template <>
HWY_INLINE Vector<float> WidenVector<BFloat16>(HalfVector half) {
  return hn::BitCast(Tag<float>(), hn::ShiftLeft<16>(hn::PromoteTo(BitsTag(), half)));
}

template <>
HWY_INLINE HalfVector NarrowVector<BFloat16>(Vector<float> x) {
  const BitsTag d;
  const auto bits = hn::BitCast(d, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d, 0x7FFF)));
  const auto quiet = hn::Or(bits, hn::Set(d, 0x400000));
  return hn::TruncateTo(HalfTag(), hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(x)), quiet, rounded)));
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)

// F16C, told to round to nearest even, in whatever mode: of f16 it knows numbers below the normal range, and f32's round to zero.
template <>
HWY_INLINE Vector<float> WidenVector<Float16>(HalfVector half) {
  return hn::PromoteTo(Tag<float>(), hn::BitCast(hn::Rebind<hwy::float16_t, Tag<float>>(), half));
}

template <>
HWY_INLINE HalfVector NarrowVector<Float16>(Vector<float> x) {
  return hn::BitCast(HalfTag(), hn::DemoteTo(hn::Rebind<hwy::float16_t, Tag<float>>(), x));
}

#else

template <>
HWY_INLINE Vector<float> WidenVector<Float16>(HalfVector half) {
  const Tag<float> d;
  const BitsTag db;
  const auto bits = hn::PromoteTo(db, half);
  const auto size = hn::ShiftLeft<13>(hn::And(bits, hn::Set(db, 0x7FFF)));
  const auto bias = hn::Set(db, 112u << 23);
  const auto normal = hn::Add(size, bias);
  // inf and NaN: from exponent 31 to 255; NaN becomes quiet.
  const auto top = hn::Set(db, 31u << 23);
  const auto quiet = hn::IfThenElseZero(hn::Gt(size, top), hn::Set(db, 0x400000));
  const auto special = hn::Or(hn::Add(normal, bias), quiet);
  // Below the normal range: 2^-14 (1 + fraction 2^-10), less 2^-14. Both and the difference are normal floats, or it is 0.
  const auto hidden = hn::Set(db, 113u << 23);
  const auto small = hn::BitCast(db, hn::Sub(hn::BitCast(d, hn::Add(size, hidden)), hn::BitCast(d, hidden)));
  const auto wide = hn::IfThenElse(hn::Lt(size, hn::Set(db, 1u << 23)), small, hn::IfThenElse(hn::Lt(size, top), normal, special));
  return hn::BitCast(d, hn::Or(wide, hn::ShiftLeft<16>(hn::And(bits, hn::Set(db, 0x8000)))));
}

template <>
HWY_INLINE HalfVector NarrowVector<Float16>(Vector<float> x) {
  const Tag<float> d;
  const BitsTag db;
  const auto bits = hn::BitCast(db, x);
  const auto size = hn::And(bits, hn::Set(db, 0x7FFFFFFF));
  const auto odd = hn::And(hn::ShiftRight<13>(size), hn::Set(db, 1));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Sub(size, hn::Set(db, 112u << 23)), hn::Add(odd, hn::Set(db, 0xFFF))));
  // Below 2^-14 a multiple of 2^-24, which is what the last bit of 1/2 + x is worth: the sum rounds it.
  const auto half = hn::Set(d, 0.5f);
  const auto small = hn::Sub(hn::BitCast(db, hn::Add(hn::BitCast(d, size), half)), hn::BitCast(db, half));
  // From 2^16 on inf, and NaN with its upper bits and the quiet one.
  const auto inf = hn::Set(db, 0x7F800000);
  const auto nan = hn::Or(hn::Set(db, 0x7E00), hn::And(hn::ShiftRight<13>(size), hn::Set(db, 0x3FF)));
  const auto special = hn::IfThenElse(hn::Gt(size, inf), nan, hn::Set(db, 0x7C00));
  const auto narrow =
      hn::IfThenElse(hn::Lt(size, hn::Set(db, 113u << 23)), small, hn::IfThenElse(hn::Lt(size, hn::Set(db, 143u << 23)), normal, special));
  return hn::TruncateTo(HalfTag(), hn::Or(narrow, hn::And(hn::ShiftRight<16>(bits), hn::Set(db, 0x8000))));
}

#endif

// ---- Rows of any length and alignment. Nothing past n is read or written ---------------------------------------------------------------------

template <class Half>
HWY_INLINE void WidenOne(const std::byte* from, float* to) {
  Half half;
  std::memcpy(&half, from, sizeof(Half));
  *to = contract::Widen(half);
}
template <class Half>
HWY_INLINE void NarrowOne(float from, std::byte* to) {
  const Half half = contract::Narrow<Half>(from);
  std::memcpy(to, &half, sizeof(Half));
}

// The last vector may do again what the one before it has done.
template <class Half>
HWY_NOINLINE void WidenRow(int64_t n, const std::byte* from, float* to) {
  const Tag<float> d;
  const HalfTag dh;
  const int64_t lanes = Lanes<float>();
  const auto* half = reinterpret_cast<const uint16_t*>(from);
  if (n < lanes) {
    for (int64_t i = 0; i < n; ++i) WidenOne<Half>(from + 2 * i, to + i);
    return;
  }
  for (int64_t i = 0; i + lanes <= n; i += lanes) hn::StoreU(WidenVector<Half>(hn::LoadU(dh, half + i)), d, to + i);
  if (n % lanes != 0) hn::StoreU(WidenVector<Half>(hn::LoadU(dh, half + n - lanes)), d, to + n - lanes);
}
template <class Half>
HWY_NOINLINE void NarrowRow(int64_t n, const float* from, std::byte* to) {
  const Tag<float> d;
  const HalfTag dh;
  const int64_t lanes = Lanes<float>();
  auto* half = reinterpret_cast<uint16_t*>(to);
  if (n < lanes) {
    for (int64_t i = 0; i < n; ++i) NarrowOne<Half>(from[i], to + 2 * i);
    return;
  }
  for (int64_t i = 0; i + lanes <= n; i += lanes) hn::StoreU(NarrowVector<Half>(hn::LoadU(d, from + i)), dh, half + i);
  if (n % lanes != 0) hn::StoreU(NarrowVector<Half>(hn::LoadU(d, from + n - lanes)), dh, half + n - lanes);
}

// ---- Rows of a tensor: n elements, `stride` apart, from element `offset` on --------------------------------------------------------------------

template <class Half>
HWY_INLINE void LoadHalves(const ConstTensor& t, int64_t offset, int64_t stride, int64_t n, float* to) {
  const std::byte* from = static_cast<const std::byte*>(t.data) + 2 * offset;
  if (stride == 1) return WidenRow<Half>(n, from, to);
  for (int64_t i = 0; i < n; ++i) WidenOne<Half>(from + 2 * i * stride, to + i);
}
template <class Half>
HWY_INLINE void StoreHalves(const Tensor& t, int64_t offset, int64_t stride, int64_t n, const float* from) {
  std::byte* to = static_cast<std::byte*>(t.data) + 2 * offset;
  if (stride == 1) return NarrowRow<Half>(n, from, to);
  for (int64_t i = 0; i < n; ++i) NarrowOne<Half>(from[i], to + 2 * i * stride);
}

// A tensor has the dtype of T; beside f32 it may be bf16 or f16.
template <class T>
HWY_INLINE void LoadRow(const ConstTensor& t, int64_t offset, int64_t stride, int64_t n, T* to) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  if constexpr (kSize == 4) {
    if (t.dtype == Dtype::kBF16) return LoadHalves<BFloat16>(t, offset, stride, n, to);
    if (t.dtype == Dtype::kF16) return LoadHalves<Float16>(t, offset, stride, n, to);
  }
  const std::byte* from = static_cast<const std::byte*>(t.data) + offset * kSize;
  if (stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(n * kSize));
  } else {
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i, from + i * stride * kSize, sizeof(T));
  }
}

template <class T>
HWY_INLINE T LoadOne(const ConstTensor& t, int64_t offset) {
  T value;
  LoadRow(t, offset, 0, 1, &value);
  return value;
}

template <class T>
HWY_INLINE void StoreRow(const Tensor& t, int64_t offset, int64_t stride, int64_t n, const T* from) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  if constexpr (kSize == 4) {
    if (t.dtype == Dtype::kBF16) return StoreHalves<BFloat16>(t, offset, stride, n, from);
    if (t.dtype == Dtype::kF16) return StoreHalves<Float16>(t, offset, stride, n, from);
  }
  std::byte* to = static_cast<std::byte*>(t.data) + offset * kSize;
  if (stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(n * kSize));
  } else {
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * stride * kSize, from + i, sizeof(T));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

#endif  // TERCET_SRC_FORMS_DTYPES_INL_H_
