// bf16 and f16, one number at a time, in integers: the caller's floating-point mode changes nothing. src/forms/dtypes-inl.h does rows.
#ifndef TERCET_SRC_CONTRACT_HALF_HPP_
#define TERCET_SRC_CONTRACT_HALF_HPP_

#include <bit>
#include <cstdint>

#include "tercet/tercet.hpp"

namespace tercet::contract {

// Exact. NaN stays NaN: bf16 keeps all its bits, f16 becomes quiet, as CPUs widen it.
constexpr float Widen(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
constexpr float Widen(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31u, fraction = x.bits & 0x3FFu;
  uint32_t wide = (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31) {
    wide = 0x7F800000u | fraction << 13 | (fraction != 0 ? 0x400000u : 0u);
  } else if (exponent == 0) {  // fraction 2^-24; its highest bit p becomes the hidden one
    const int p = 31 - std::countl_zero(fraction);
    wide = fraction == 0 ? 0 : (static_cast<uint32_t>(p + 102) << 23) + (fraction << (23 - p));
  }
  return std::bit_cast<float>(sign | wide);
}

// To nearest, ties to even; what is too large becomes inf, and NaN a quiet NaN with its upper bits.
template <class T>
constexpr T Narrow(float x) = delete;
template <>
constexpr BFloat16 Narrow<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}
template <>
constexpr Float16 Narrow<Float16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
  uint32_t narrow = 0x7C00u;
  if (size > 0x7F800000u) {
    narrow = 0x7E00u | (size >> 13 & 0x3FFu);
  } else if (size < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
    const uint32_t shift = 126 - (size >> 23), whole = (size & 0x7FFFFFu) | 0x800000u;
    narrow = shift > 24 ? 0 : (whole + (1u << (shift - 1)) - 1 + (whole >> shift & 1u)) >> shift;
  } else if (size < 0x47800000u) {  // below 2^16; from 65520 on this carries into inf
    narrow = (size - (112u << 23) + 0xFFFu + (size >> 13 & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | narrow)};
}

}  // namespace tercet::contract

#endif  // TERCET_SRC_CONTRACT_HALF_HPP_
