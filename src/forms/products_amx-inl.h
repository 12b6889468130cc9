// The products of products.hpp on the tiles of amx-inl.h. The left operand is packed whole, the right one kProductGroup tiles of columns at a time.
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
  static_assert(kGroup == forms::kProductGroup && sizeof(Tile) == forms::kTileBytes && sizeof(Sums) == forms::kTileBytes);

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
      for (int64_t d = 0; d < deep_; ++d) {
        Tile* to = a_ + m * deep_ + d;
        p_.turn_a ? Pack<false, false>(p_.a, p_.part, m, p_.rows, d, to) : Pack<true, false>(p_.a, p_.part, m, p_.rows, d, to);
      }
    for (int64_t group = 0; group < columns_; group += kGroup) {
      const int64_t width = std::min(kGroup, columns_ - group);
      for (int64_t d = 0; d < deep_; ++d)
        for (int64_t x = 0; x < width; ++x) {
          Tile* to = b_ + d * width + x;
          p_.turn_b ? Pack<true, true>(p_.b, Part::kAll, group + x, p_.columns, d, to)
                    : Pack<false, true>(p_.b, Part::kAll, group + x, p_.columns, d, to);
        }
      // What is not finite would reach, as zero times it, rows that leave it out.
      if (p_.part != Part::kAll && NotFinite(width)) {
        for (int64_t m = 0; m < p_.rows; ++m) Singly(m, 16 * group, std::min(p_.columns, 16 * (group + width)));
        continue;
      }
      for (int64_t m = 0; m < blocks_; ++m) Block(m, group, width);
    }
  }

  // 16 rows of a group of columns. Sums of fewer rows go through memory of their own.
  void Block(int64_t m, int64_t group, int64_t width) {
    float* to = At(p_.to, 16 * m, 16 * group);
    const int64_t rows = std::min<int64_t>(16, p_.rows - 16 * m), step = p_.to.row;
    // A group of columns is one panel's.
    static_assert(16 * kGroup == Matrix<float>::kColumns);
    if (p_.add && rows == 16)
      LoadRows<Tiles>(width, to, step);
    else
      Clear<Tiles>();
    MultiplyAdd<Tiles>(width, deep_, a_ + m * deep_, b_, width);
    if (rows == 16) return StoreRows<Tiles>(width, to, step);
    Store<Tiles>(width, sums_);
    for (int64_t i = 0; i < rows; ++i, to += step) {
      for (int64_t x = 0; x < width; ++x) {
        const __m512 sum = _mm512_load_ps(sums_[x].row[i]);
        _mm512_storeu_ps(to + 16 * x, p_.add ? _mm512_add_ps(_mm512_loadu_ps(to + 16 * x), sum) : sum);
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

  // The tile of 16 `lines`, from 16 line on, and 32 of depth, numbers d and d + 16 in a pair. Lines and depth are a matrix's rows and columns for a
  // left operand as it lies and for a right one that is turned (kAcross), else its columns and rows; a left operand's tile has a row a line.
  template <bool kAcross, bool kRight>
  void Pack(const Matrix<const float>& from, Part part, int64_t line, int64_t lines, int64_t deep, Tile* to) const {
    Tile room;
    Tile* packed = kAcross == kRight ? &room : to;
    const int64_t i = kAcross ? 16 * line : 32 * deep, c = kAcross ? 32 * deep : 16 * line;
    const int64_t rows = (kAcross ? lines : p_.depth) - i, columns = (kAcross ? p_.depth : lines) - c;
    const float *low = At(from, i, c), *high = kAcross ? low + 16 : low + 16 * from.row;
    if (part == Part::kAll && rows >= (kAcross ? 16 : 32) && columns >= (kAcross ? 32 : 16)) {
      for (int64_t n = 0; n < 16; ++n, low += from.row, high += from.row)
        _mm512_store_si512(packed->row[n], NarrowPairs<Tiles>(_mm512_loadu_ps(low), _mm512_loadu_ps(high)));
    } else {
      // Zeros where nothing is taken, and nothing is read there.
      const auto load = [&](int64_t row, int64_t column) TERCET_AMX_ATTR {
        if (row >= rows) return _mm512_setzero_ps();
        return _mm512_maskz_loadu_ps(Lanes(Taken(part, i + row, c + columns) - c - column), low + row * from.row + column);
      };
      for (int64_t n = 0; n < 16; ++n) _mm512_store_si512(packed->row[n], NarrowPairs<Tiles>(load(n, 0), kAcross ? load(n, 16) : load(16 + n, 0)));
    }
    if (packed != to) Turn(room, to);
  }
  // Whether the right operand's group holds what is not: twice a word, without its sign, is at least 0xFF00 where the exponent has all its bits.
  bool NotFinite(int64_t width) const {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t x = 0; x < deep_ * width; ++x) {
      for (int n = 0; n < 16; ++n) {
        const __m512i pair = _mm512_load_si512(b_[x].row[n]);
        largest = _mm512_max_epu16(largest, _mm512_add_epi16(pair, pair));
      }
    }
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(static_cast<int16_t>(0xFF00))) != 0;
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
  Sums* sums_;                             // [kGroup]
};

}  // namespace tercet::amx
TERCET_AFTER_AMX

#endif  // TERCET_SRC_FORMS_PRODUCTS_AMX_INL_H_
