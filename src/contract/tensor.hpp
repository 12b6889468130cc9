// Reading one element or finding one row of a strided tensor. Offsets are 64 bits everywhere.
#ifndef TERCET_SRC_CONTRACT_TENSOR_HPP_
#define TERCET_SRC_CONTRACT_TENSOR_HPP_

#include <cstdint>
#include <string>

#include "tercet/tercet.hpp"

namespace tercet::contract {

// Bytes of an element.
constexpr int64_t SizeOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
    case Dtype::kI32:
      return 4;
    case Dtype::kF64:
    case Dtype::kI64:
      return 8;
    case Dtype::kBF16:
    case Dtype::kF16:
      return 2;
    case Dtype::kBool:
      return 1;
  }
  return 0;
}

// Elements from data to [i, j, ...]. Missing indices are 0.
inline int64_t Offset(const ConstTensor& t, int64_t i = 0, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  return i * t.strides[0] + j * t.strides[1] + k * t.strides[2] + l * t.strides[3];
}

// Element `offset` as a double (bool: 0 or 1) and as an integer.
double ReadDouble(const ConstTensor& t, int64_t offset);
int64_t ReadInteger(const ConstTensor& t, int64_t offset);
// Element `offset` of a floating tensor = x, rounded to nearest even; bf16 and f16 by way of f32.
void WriteDouble(const Tensor& t, int64_t offset, double x);

// The number of elements, or -1 if that does not fit in 63 bits.
int64_t Count(const ConstTensor& t);

// "[2, 6, 1, 4]"
std::string ShapeText(const ConstTensor& t);

// Whether an element of `a` may share memory with one of `b`. False is certain; true can be wrong only where strides don't nest: where a step of one
// view is shorter than what either has inside it.
bool MayOverlap(const ConstTensor& a, const ConstTensor& b);
// Whether two elements of `t` may share memory, likewise.
bool MayOverlapItself(const ConstTensor& t);

}  // namespace tercet::contract

#endif  // TERCET_SRC_CONTRACT_TENSOR_HPP_
