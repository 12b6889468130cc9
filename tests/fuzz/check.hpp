// What must hold of a reader's answer whatever the bytes were.
#ifndef TERCET_TESTS_FUZZ_CHECK_HPP_
#define TERCET_TESTS_FUZZ_CHECK_HPP_

#include <cstdlib>

#include "src/contract/tensor.hpp"
#include "src/io/arrays.hpp"

namespace tercet::io {

inline void Require(bool holds) {
  if (!holds) std::abort();
}

inline void CheckArray(const Array& array) {
  uint64_t size = contract::SizeOf(array.dtype);
  for (const int64_t axis : array.shape) {
    Require(axis >= 0);
    size *= static_cast<uint64_t>(axis);
  }
  Require(array.data.size() == size);
  if (array.dtype == Dtype::kBool)
    for (const std::byte value : array.data) Require(value <= std::byte{1});
}

// Arrays that are whole, or one line of printable ASCII.
inline void CheckAnswer(const Status& status, const File& file) {
  for (const auto& [name, array] : file.arrays) CheckArray(array);
  if (status.ok()) return;
  Require(file.arrays.empty() && !status.message.empty());
  Require(status.code == StatusCode::kValue || status.code == StatusCode::kShape || status.code == StatusCode::kDtype);
  for (const char c : status.message) Require(c >= 0x20 && c < 0x7f);
}

}  // namespace tercet::io

#endif  // TERCET_TESTS_FUZZ_CHECK_HPP_
