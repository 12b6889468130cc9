// The tile verbs: what the engines say to the machine. All work on dense aligned tiles of T (float or double).
//
// A panel is a tile of Panel<T>() columns, kPanelVectors vectors: as many as the registers hold beside a few rows of accumulators. Value columns and
// key tables are stored panel by panel, [panel][row][Panel<T>()], so that walking down a panel's rows never meets the cache-set conflicts of a wide
// row stride. Columns of a panel never mix; only columns that exist are computed, in whole vectors.
//
// Sums over channels or tokens run in the order of the index, in blocks of kDepth that are summed on their own. The order depends on the element's
// own row and column alone, never on how many rows or columns there are, so that later tokens change no bit of earlier ones.
#include <cmath>
#include <cstdint>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

#if defined(TERCET_SRC_FORMS_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERCET_SRC_FORMS_TILES_INL_H_
#undef TERCET_SRC_FORMS_TILES_INL_H_
#else
#define TERCET_SRC_FORMS_TILES_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
using Tag = hn::ScalableTag<T>;
template <class T>
using Vector = hn::Vec<Tag<T>>;

// 32 vector registers hold 6 rows of 4 vectors, 16 hold 6 rows of 2.
#if HWY_ARCH_ARM_A64 || (HWY_ARCH_X86 && HWY_MAX_BYTES == 64)
constexpr int kPanelVectors = 4;
#else
constexpr int kPanelVectors = 2;
#endif
constexpr int64_t kTileRows = 6;
constexpr int64_t kDepth = 64;

template <class T>
HWY_INLINE int64_t Lanes() {
  return static_cast<int64_t>(hn::Lanes(Tag<T>()));
}
template <class T>
HWY_INLINE int64_t Panel() {
  return kPanelVectors * Lanes<T>();
}
HWY_INLINE int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// ---- Rows of any length: buffers have room up to a whole vector -----------------------------------------------------------------------------

template <class T>
HWY_INLINE void Fill(int64_t n, T value, T* to) {
  const Tag<T> d;
  for (int64_t i = 0; i < n; i += Lanes<T>()) hn::Store(hn::Set(d, value), d, to + i);
}
template <class T>
HWY_INLINE void Copy(int64_t n, const T* from, T* to) {
  const Tag<T> d;
  for (int64_t i = 0; i < n; i += Lanes<T>()) hn::Store(hn::Load(d, from + i), d, to + i);
}
template <class T>
HWY_INLINE void ScaleRow(int64_t n, T factor, T* row) {
  const Tag<T> d;
  for (int64_t i = 0; i < n; i += Lanes<T>()) hn::Store(hn::Mul(hn::Load(d, row + i), hn::Set(d, factor)), d, row + i);
}
// to = a b. `a` may be unaligned.
template <class T>
HWY_INLINE void MultiplyRows(int64_t n, const T* a, const T* b, T* to) {
  const Tag<T> d;
  for (int64_t i = 0; i < n; i += Lanes<T>()) hn::Store(hn::Mul(hn::LoadU(d, a + i), hn::Load(d, b + i)), d, to + i);
}
template <class T>
HWY_INLINE void AddRow(int64_t n, const T* a, T* to) {
  const Tag<T> d;
  for (int64_t i = 0; i < n; i += Lanes<T>()) hn::Store(hn::Add(hn::Load(d, to + i), hn::Load(d, a + i)), d, to + i);
}
// row / by, and zeros where `by` is zero.
template <class T>
HWY_INLINE void DivideRow(int64_t n, T by, T* row) {
  const Tag<T> d;
  for (int64_t i = 0; i < n; i += Lanes<T>()) hn::Store(by == 0 ? hn::Zero(d) : hn::Div(hn::Load(d, row + i), hn::Set(d, by)), d, row + i);
}
// The sum of value(i), a vector, over the lanes i of n elements. Lanes past n count nothing, whatever they hold.
template <class T, class Value>
HWY_INLINE T SumLanes(int64_t n, Value value) {
  const Tag<T> d;
  auto even = hn::Zero(d), odd = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * Lanes<T>() <= n; i += 2 * Lanes<T>()) {
    even = hn::Add(even, value(i));
    odd = hn::Add(odd, value(i + Lanes<T>()));
  }
  for (; i < n; i += Lanes<T>()) even = hn::Add(even, hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(n - i)), value(i)));
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
}
template <class T>
HWY_INLINE T Dot(int64_t n, const T* a, const T* b) {
  const Tag<T> d;
  return SumLanes<T>(n, [=](int64_t i) HWY_ATTR { return hn::Mul(hn::Load(d, a + i), hn::Load(d, b + i)); });
}
template <class T>
HWY_INLINE T Sum(int64_t n, const T* a) {
  const Tag<T> d;
  return SumLanes<T>(n, [=](int64_t i) HWY_ATTR { return hn::Load(d, a + i); });
}

// The sums of the lanes of a, b, c and e. Every sum adds the same lanes in the same order.
template <class T>
HWY_INLINE void SumFour(Vector<T> a, Vector<T> b, Vector<T> c, Vector<T> e, T* HWY_RESTRICT to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = hn::GetLane(a), to[1] = hn::GetLane(b), to[2] = hn::GetLane(c), to[3] = hn::GetLane(e);
#else
  const Tag<T> d;
  const auto fold = [](auto self, auto tag, auto v) HWY_ATTR {
    if constexpr (hn::MaxLanes(decltype(tag)()) * sizeof(T) > 16) {
      const hn::Half<decltype(tag)> half;
      return self(self, half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
    } else {
      return v;
    }
  };
  const auto ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const auto ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const hn::FixedTag<T, 16 / sizeof(T)> block;
  if constexpr (sizeof(T) == 8) {
    hn::StoreU(fold(fold, d, ab), block, to);
    hn::StoreU(fold(fold, d, ce), block, to + 2);
  } else {  // ab is a0+a2 b0+b2 a1+a3 b1+b3
    const hn::Repartition<double, Tag<T>> pairs;
    const auto low = hn::BitCast(d, hn::InterleaveLower(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce)));
    const auto high = hn::BitCast(d, hn::InterleaveUpper(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, ce)));
    hn::StoreU(fold(fold, d, hn::Add(low, high)), block, to);
  }
#endif
}

// Rows of a table of dot products, to[r][l] = a_r b_l over `n` numbers in whole vectors: kDotRows rows of a and 4 of b at once.
#if HWY_ARCH_ARM_A64 || (HWY_ARCH_X86 && HWY_MAX_BYTES == 64)
constexpr int kDotRows = 4;
#else
constexpr int kDotRows = 2;
#endif
template <int kRows, class T>
HWY_INLINE void DotTile(int64_t n, const T* a, int64_t a_row, const T* b, int64_t b_row, T* to, int64_t to_row) {
  const Tag<T> d;
  Vector<T> sum[kRows][4];
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (int l = 0; l < 4; ++l) sum[r][l] = hn::Zero(d);
  }
  for (int64_t i = 0; i < n; i += Lanes<T>()) {
    Vector<T> right[4];
    HWY_UNROLL(4)
    for (int l = 0; l < 4; ++l) right[l] = hn::Load(d, b + l * b_row + i);
    HWY_UNROLL(4)
    for (int r = 0; r < kRows; ++r) {
      const auto left = hn::Load(d, a + r * a_row + i);
      HWY_UNROLL(4)
      for (int l = 0; l < 4; ++l) sum[r][l] = hn::MulAdd(left, right[l], sum[r][l]);
    }
  }
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) SumFour<T>(sum[r][0], sum[r][1], sum[r][2], sum[r][3], to + r * to_row);
}
// The same for any number of rows of a and a multiple of 4 rows of b.
template <class T>
HWY_NOINLINE void DotRows(int64_t n, int64_t a_rows, const T* a, int64_t a_row, int64_t b_rows, const T* b, int64_t b_row, T* to, int64_t to_row) {
  for (int64_t l = 0; l < b_rows; l += 4) {
    int64_t r = 0;
    for (; r + kDotRows <= a_rows; r += kDotRows) DotTile<kDotRows>(n, a + r * a_row, a_row, b + l * b_row, b_row, to + r * to_row + l, to_row);
    for (; r < a_rows; ++r) DotTile<1>(n, a + r * a_row, a_row, b + l * b_row, b_row, to + r * to_row + l, to_row);
  }
}

// exp(x) for x <= 0, within 0.65 units of the last place, and 0 where the result would be below the normal range. NaN stays NaN.
//
// 2^n e^r with n = round(x / ln 2): n is read off the last bits of x / ln 2 + 1.5 * 2^23, and added to the exponent of e^r. e^r is 1 + r + r^2 q(r),
// q of degree 4 with the least largest relative error over |r| <= ln 2 / 2 (3e-9, found by reweighted least squares).
HWY_INLINE Vector<float> ExpOfNonPositive(Vector<float> x) {
  const Tag<float> d;
  const hn::RebindToUnsigned<Tag<float>> du;
  const auto magic = hn::Set(d, 12582912.0f);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
  const auto n = hn::Sub(shifted, magic);
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);  // ln 2 in two parts: the first times n is exact
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  auto p = hn::MulAdd(hn::Set(d, 1.38145394e-3f), r, hn::Set(d, 8.36874545e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.16683890e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.66665211e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.99999940e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto scaled = hn::BitCast(d, hn::Add(hn::BitCast(du, p), hn::ShiftLeft<23>(hn::BitCast(du, shifted))));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.33654f)), scaled);
}
// The same in f64, by Highway: it is 0 from -1000 on, and converts x to an integer, which has no place for NaN and -inf.
HWY_INLINE Vector<double> ExpOfNonPositive(Vector<double> x) {
  const Tag<double> d;
  const auto nan = hn::IsNaN(x);
  const auto within = hn::Max(hn::IfThenZeroElse(nan, x), hn::Set(d, -1024.0));
  return hn::IfThenElse(nan, x, hn::Exp(d, within));
}

template <class T>
HWY_INLINE void ExpRow(int64_t n, T* row) {
  const Tag<T> d;
  for (int64_t i = 0; i < n; i += Lanes<T>()) hn::Store(ExpOfNonPositive(hn::Load(d, row + i)), d, row + i);
}

// x -> elu(x) + 1, which is exp(x) up to 0 and x + 1 above.
template <class T>
HWY_INLINE void EluPlusOneRow(int64_t n, T* row) {
  const Tag<T> d;
  const auto zero = hn::Zero(d);
  for (int64_t i = 0; i < n; i += Lanes<T>()) {
    const auto x = hn::Load(d, row + i);
    const auto above = hn::Add(x, hn::Set(d, T{1}));
    hn::Store(hn::IfThenElse(hn::Le(x, zero), ExpOfNonPositive(hn::Min(x, zero)), above), d, row + i);
  }
}

// x -> max(x, 0), NaN kept.
template <class T>
HWY_INLINE void ReluRow(int64_t n, T* row) {
  const Tag<T> d;
  for (int64_t i = 0; i < n; i += Lanes<T>()) {
    const auto x = hn::Load(d, row + i);
    hn::Store(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x), d, row + i);
  }
}

// x -> x / sqrt(sum x^2 + eps), and zeros where that root is zero.
template <class T>
HWY_INLINE void L2NormRow(int64_t n, T eps, T* row) {
  DivideRow(n, std::sqrt(Dot(n, row, row) + eps), row);
}

// ---- Products -----------------------------------------------------------------------------------------------------------------------------

// A left operand read one number at a time: element (i, j) is at[i row + j step].
template <class T>
struct Left {
  const T* at;
  int64_t row, step;
};

// c[r][..] += (= where nothing is to be added to) sum over j of a(r, j) b[j][..] for kRows rows and kVectors vectors, j in blocks of kDepth. b's rows
// are b_row apart.
template <int kRows, int kVectors, class T>
HWY_INLINE void TileMultiplyAdd(int64_t depth, const Left<T>& a, const T* HWY_RESTRICT b, int64_t b_row, T* HWY_RESTRICT c, int64_t c_row, bool add) {
  const Tag<T> d;
  const int64_t lanes = Lanes<T>();
  for (int64_t begin = 0; begin < depth; begin += kDepth) {
    const int64_t end = begin + kDepth < depth ? begin + kDepth : depth;
    Vector<T> sum[kRows][kVectors];
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      HWY_UNROLL(8)
      for (int n = 0; n < kVectors; ++n) sum[r][n] = hn::Zero(d);
    }
    const T* at = a.at + begin * a.step;
    for (int64_t j = begin; j < end; ++j, at += a.step) {
      Vector<T> right[kVectors];
      HWY_UNROLL(8)
      for (int n = 0; n < kVectors; ++n) right[n] = hn::Load(d, b + j * b_row + n * lanes);
      HWY_UNROLL(8)
      for (int r = 0; r < kRows; ++r) {
        const auto left = hn::Set(d, at[r * a.row]);
        HWY_UNROLL(8)
        for (int n = 0; n < kVectors; ++n) sum[r][n] = hn::MulAdd(left, right[n], sum[r][n]);
      }
    }
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      HWY_UNROLL(8)
      for (int n = 0; n < kVectors; ++n) {
        T* to = c + r * c_row + n * lanes;
        hn::Store(add || begin > 0 ? hn::Add(hn::Load(d, to), sum[r][n]) : sum[r][n], d, to);
      }
    }
  }
}

template <int kVectors, class T>
HWY_NOINLINE void RowsMultiplyAdd(int64_t rows, int64_t depth, const Left<T>& left, const T* b, int64_t b_row, T* c, int64_t c_row, bool add) {
  Left<T> a = left;  // by value it would be stored in pieces and loaded whole, which waits for the stores
  for (; rows >= 6; rows -= 6, a.at += 6 * a.row, c += 6 * c_row) TileMultiplyAdd<6, kVectors>(depth, a, b, b_row, c, c_row, add);
  for (; rows >= 2; rows -= 2, a.at += 2 * a.row, c += 2 * c_row) TileMultiplyAdd<2, kVectors>(depth, a, b, b_row, c, c_row, add);
  for (; rows >= 1; rows -= 1, a.at += a.row, c += c_row) TileMultiplyAdd<1, kVectors>(depth, a, b, b_row, c, c_row, add);
}

// c += a b for one panel b [depth][Panel<T>()], or rows b_row apart, of which `vectors` vectors are wanted.
template <class T>
HWY_INLINE void MultiplyAdd(int vectors, int64_t rows, int64_t depth, const Left<T>& a, const T* b, T* c, int64_t c_row, int64_t b_row = Panel<T>(),
                            bool add = true) {
  if (vectors == 1) return RowsMultiplyAdd<1>(rows, depth, a, b, b_row, c, c_row, add);
  if constexpr (kPanelVectors == 4) {
    if (vectors == 3) return RowsMultiplyAdd<3>(rows, depth, a, b, b_row, c, c_row, add);
    if (vectors == 4) return RowsMultiplyAdd<4>(rows, depth, a, b, b_row, c, c_row, add);
  }
  return RowsMultiplyAdd<2>(rows, depth, a, b, b_row, c, c_row, add);
}
// c += a b (c = a b; depth is then at least 1) for `columns` columns, whole vectors, of rows b_row and c_row apart.
template <class T>
HWY_INLINE void MultiplyAddWide(int64_t columns, int64_t rows, int64_t depth, const Left<T>& a, const T* b, int64_t b_row, T* c, int64_t c_row,
                                bool add) {
  for (int64_t left = 0; left < columns; left += Panel<T>()) {
    const int64_t width = columns - left < Panel<T>() ? columns - left : Panel<T>();
    MultiplyAdd(static_cast<int>(width / Lanes<T>()), rows, depth, a, b + left, c + left, c_row, b_row, add);
  }
}

// c_i += sum over j < i (j <= i with the diagonal) of table(i, j) b_j, for the rows i of one panel. c may be b itself where the diagonal is left
// out: rows are done in order, so that is forward substitution for (1 - table) x = c.
template <class T>
HWY_INLINE void MultiplyAddLower(int vectors, int64_t rows, bool diagonal, const T* table, int64_t table_row, const T* b, T* c) {
  const Tag<T> d;
  const int64_t lanes = Lanes<T>(), panel = Panel<T>();
  for (int64_t begin = 0; begin < rows; begin += kTileRows) {
    const int64_t end = begin + kTileRows < rows ? begin + kTileRows : rows;
    MultiplyAdd(vectors, end - begin, begin, Left<T>{table + begin * table_row, table_row, 1}, b, c + begin * panel, panel);
    for (int64_t i = begin; i < end; ++i) {
      for (int n = 0; n < vectors; ++n) {
        auto sum = hn::Load(d, c + i * panel + n * lanes);
        for (int64_t j = begin; j < i + diagonal; ++j)
          sum = hn::MulAdd(hn::Set(d, table[i * table_row + j]), hn::Load(d, b + j * panel + n * lanes), sum);
        hn::Store(sum, d, c + i * panel + n * lanes);
      }
    }
  }
}

// to[c][r] = from[r][c], rows from_row and to_row apart. With `pad`, columns of `to` past `rows`, up to a whole vector, are zero.
template <class T>
HWY_NOINLINE void TransposeTile(int64_t rows, int64_t columns, const T* from, int64_t from_row, T* to, int64_t to_row, bool pad = true) {
  int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  // Blocks of 16 bytes are turned in registers, kSide rows of a vector at once, and stored one by one.
  constexpr int kSide = 16 / sizeof(T);
  const Tag<T> d;
  const hn::FixedTag<T, kSide> block;
  const int64_t lanes = Lanes<T>(), whole = columns / lanes * lanes;
  HWY_ALIGN T turned[kSide][hn::MaxLanes(Tag<T>())];
  for (; r + kSide <= rows; r += kSide) {
    const T* at = from + r * from_row;
    for (int64_t c = 0; c < whole; c += lanes) {
      if constexpr (kSide == 4) {
        const hn::Repartition<double, Tag<T>> pairs;
        const auto v0 = hn::LoadU(d, at + c), v1 = hn::LoadU(d, at + from_row + c);
        const auto v2 = hn::LoadU(d, at + 2 * from_row + c), v3 = hn::LoadU(d, at + 3 * from_row + c);
        const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, v0, v1)), high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, v0, v1));
        const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, v2, v3)), high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, v2, v3));
        hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, turned[0]);
        hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, turned[1]);
        hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, turned[2]);
        hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, turned[3]);
      } else {
        const auto v0 = hn::LoadU(d, at + c), v1 = hn::LoadU(d, at + from_row + c);
        hn::Store(hn::InterleaveLower(d, v0, v1), d, turned[0]);
        hn::Store(hn::InterleaveUpper(d, v0, v1), d, turned[1]);
      }
      for (int64_t b = 0; b < lanes; b += kSide) {
        for (int64_t m = 0; m < kSide; ++m) hn::StoreU(hn::LoadU(block, turned[m] + b), block, to + (c + b + m) * to_row + r);
      }
    }
    for (int64_t c = whole; c < columns; ++c)
      for (int64_t m = 0; m < kSide; ++m) to[c * to_row + r + m] = at[m * from_row + c];
  }
#endif
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t x = r; x < rows; ++x) to[c * to_row + x] = from[x * from_row + c];
    for (int64_t x = rows; pad && x < RoundUp(rows, Lanes<T>()); ++x) to[c * to_row + x] = 0;
  }
}

// Rows [n][channels] (row_stride apart) turned into panels of columns: token j in panel j / Panel<T>(), each [channels][Panel<T>()] and
// `panel_step` after the one before. Columns of the last vector past n are zero.
template <class T>
HWY_INLINE void Transpose(int64_t n, int64_t channels, const T* rows, int64_t row_stride, T* to, int64_t panel_step) {
  for (int64_t begin = 0; begin < n; begin += Panel<T>(), to += panel_step)
    TransposeTile(n - begin < Panel<T>() ? n - begin : Panel<T>(), channels, rows + begin * row_stride, row_stride, to, Panel<T>());
}
template <class T>
HWY_INLINE void Transpose(int64_t n, int64_t channels, const T* rows, int64_t row_stride, T* to) {
  Transpose(n, channels, rows, row_stride, to, channels * Panel<T>());
}

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

#endif  // TERCET_SRC_FORMS_TILES_INL_H_
