// Products of matrices whose operands are rounded to bf16, as a gradient's engine asks for them where a target has tile registers. Nothing here is
// SIMD.
#ifndef TERCET_SRC_FORMS_PRODUCTS_HPP_
#define TERCET_SRC_FORMS_PRODUCTS_HPP_

#include <cstddef>
#include <cstdint>

namespace tercet::forms {

// A matrix in panels of kColumns columns: element (i, c) is at[c / kColumns panel + i row + c % kColumns]. Rows in one piece are panels kColumns
// apart.
template <class T>
struct Matrix {
  static constexpr int64_t kColumns = 64;
  T* at;
  int64_t row, panel = kColumns;
};

// to [rows][columns] = a b, or with `add` += a b, summed in f32 over `depth`. Turned, an operand's element (i, j) is its matrix's (j, i). `to` is
// written up to a whole vector of 16 columns, with zeros, or nothing added, past the last.
struct Product {
  int64_t rows, columns, depth;
  Matrix<const float> a;
  bool turn_a;
  Matrix<const float> b;
  bool turn_b;
  Matrix<float> to;
  bool add;
  // Of a's matrix only what lies below the diagonal, or on it too, is taken, whatever else it holds.
  enum class Part { kAll, kBelow, kLower } part = Part::kAll;
  std::byte* room = nullptr;  // aligned to a line, of RoomFor bytes or more
};

// Columns that are packed at once, in tiles, and the bytes of a tile.
inline constexpr int64_t kProductGroup = 4, kTileBytes = 1024;
inline int64_t RoomFor(int64_t rows, int64_t depth) {
  const int64_t deep = (depth + 31) / 32;
  return kTileBytes * ((rows + 15) / 16 * deep + kProductGroup * (deep + 1));
}

// What a target with tile registers offers. Between configure and release a thread computes products.
struct Products {
  void (*configure)();
  void (*release)();
  void (*multiply)(const Product& product);
};

}  // namespace tercet::forms

#endif  // TERCET_SRC_FORMS_PRODUCTS_HPP_
