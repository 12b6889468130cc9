// The products of products.hpp on the tiles of amx-inl.h. The left operand is packed whole, the right one kProductGroup tiles of columns at a time;
// while a group of sums is added to what it belongs to, the next one is computed.
#ifndef TERCET_SRC_FORMS_PRODUCTS_AMX_INL_H_
#define TERCET_SRC_FORMS_PRODUCTS_AMX_INL_H_

#include <algorithm>
#include <cstdint>

#include "src/forms/amx-inl.h"
#include "src/forms/products.hpp"

TERCET_BEFORE_AMX
namespace tercet::amx {

using forms::Matrix;
using forms::Product;

// Tiles are the registers.
template <class Tiles>
class ProductsOn {
 public:
  static void Multiply(const Product& product) { ProductsOn(product).Run(); }

  static const forms::Products& All() {
    static constexpr forms::Products all{&Tiles::Configure, &Tiles::Release, &Multiply};
    return all;
  }

 private:
  using Part = Product::Part;

  explicit ProductsOn(const Product& product)
      : p_(product),
        blocks_((p_.rows + 15) / 16),
        columns_((p_.columns + 15) / 16),
        deep_((p_.depth + 31) / 32),
        a_(reinterpret_cast<Tile*>(p_.room)),
        b_(a_ + blocks_ * deep_),
        sums_(reinterpret_cast<Sums*>(b_ + kGroup * deep_)) {}

  void Run() {
    for (int64_t m = 0; m < blocks_; ++m)
      for (int64_t d = 0; d < deep_; ++d) Pack(p_.a, !p_.turn_a, p_.part, m, p_.rows, d, a_ + m * deep_ + d);
    for (int64_t group = 0; group < columns_; group += kGroup) {
      const int64_t width = std::min(kGroup, columns_ - group);
      largest_ = _mm512_setzero_si512();
      for (int64_t d = 0; d < deep_; ++d)
        for (int64_t x = 0; x < width; ++x) Pack(p_.b, p_.turn_b, Part::kAll, group + x, p_.columns, d, b_ + d * width + x);
      // What is not finite would reach, as zero times it, rows that leave it out.
      if (p_.part != Part::kAll && NotFinite()) {
        for (int64_t m = 0; m < p_.rows; ++m) Singly(m, 16 * group, std::min(p_.columns, 16 * (group + width)));
        continue;
      }
      for (int64_t m = 0; m <= blocks_; ++m) {
        if (m < blocks_) {
          Clear<Tiles>();
          MultiplyAdd<Tiles>(width, deep_, a_ + m * deep_, b_, width);
          Store<Tiles>(width, sums_ + m % 2 * kGroup);
        }
        if (m > 0) Deliver(m - 1, group, width, sums_ + (m - 1) % 2 * kGroup);
      }
    }
  }

  static __mmask16 Lanes(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xFFFF : n <= 0 ? 0 : (1 << n) - 1); }
  template <class T>
  static T* At(const Matrix<T>& matrix, int64_t i, int64_t c) {
    return matrix.at + c / Matrix<T>::kColumns * matrix.panel + i * matrix.row + c % Matrix<T>::kColumns;
  }
  // Numbers of row i that are taken, of `columns`.
  static int64_t Taken(Part part, int64_t i, int64_t columns) {
    return part == Part::kAll ? columns : std::min(columns, i + (part == Part::kLower ? 1 : 0));
  }
  // 16 numbers of row i from column c on, zeros where they are not taken.
  static __m512 Load(const Matrix<const float>& from, Part part, int64_t i, int64_t rows, int64_t c, int64_t columns) {
    return i < rows ? _mm512_maskz_loadu_ps(Lanes(Taken(part, i, columns) - c), At(from, i, c)) : _mm512_setzero_ps();
  }

  // The tile of 16 `lines`, from 16 line on, and 32 of depth, numbers d and d + 16 in a pair. Lines and depth are a matrix's rows and columns for a
  // left operand as it lies and for a right one that is turned (`across`), else its columns and rows; a left operand's tile has a row a line.
  void Pack(const Matrix<const float>& from, bool across, Part part, int64_t line, int64_t lines, int64_t d, Tile* to) {
    const bool left = &from == &p_.a;
    Tile room;
    Tile* packed = across == left ? to : &room;
    for (int64_t i = 0; i < 16; ++i) {
      const __m512 low = across ? Load(from, part, 16 * line + i, lines, 32 * d, p_.depth) : Load(from, part, 32 * d + i, p_.depth, 16 * line, lines);
      const __m512 high =
          across ? Load(from, part, 16 * line + i, lines, 32 * d + 16, p_.depth) : Load(from, part, 32 * d + 16 + i, p_.depth, 16 * line, lines);
      const __m512i pairs = NarrowPairs<Tiles>(low, high);
      largest_ = _mm512_max_epu16(largest_, _mm512_add_epi16(pairs, pairs));
      _mm512_store_si512(packed->row[i], pairs);
    }
    if (packed != to) Turn(room, to);
  }

  // Twice a word, without its sign, is at least 0xFF00 where the exponent has all its bits.
  bool NotFinite() const { return _mm512_cmpge_epu16_mask(largest_, _mm512_set1_epi16(static_cast<int16_t>(0xFF00))) != 0; }

  void Deliver(int64_t m, int64_t group, int64_t width, const Sums* sums) const {
    const int64_t count = std::min<int64_t>(16, p_.rows - 16 * m);
    for (int64_t x = 0; x < width; ++x) {
      float* to = At(p_.to, 16 * m, 16 * (group + x));
      for (int64_t i = 0; i < count; ++i, to += p_.to.row) {
        const __m512 sum = _mm512_load_ps(sums[x].row[i]);
        _mm512_storeu_ps(to, p_.add ? _mm512_add_ps(_mm512_loadu_ps(to), sum) : sum);
      }
    }
  }

  // Row m of some columns, from numbers that are taken and nothing else.
  void Singly(int64_t m, int64_t first, int64_t end) const {
    for (int64_t c = first; c < (end + 15) / 16 * 16; ++c) {
      float sum = 0;
      for (int64_t d = 0; c < end && d < p_.depth; ++d) {
        const int64_t i = p_.turn_a ? d : m, j = p_.turn_a ? m : d;
        if (j < Taken(p_.part, i, j + 1)) sum += *At(p_.a, i, j) * (p_.turn_b ? *At(p_.b, c, d) : *At(p_.b, d, c));
      }
      float* to = At(p_.to, m, c);
      *to = p_.add ? *to + sum : sum;
    }
  }

  const Product& p_;
  const int64_t blocks_, columns_, deep_;  // tiles of rows, columns and depth
  Tile* a_;                                // [blocks][deep]
  Tile* b_;                                // [deep][columns of a group]
  Sums* sums_;                             // [2][kGroup]
  __m512i largest_ = _mm512_setzero_si512();
};

}  // namespace tercet::amx
TERCET_AFTER_AMX

#endif  // TERCET_SRC_FORMS_PRODUCTS_AMX_INL_H_
