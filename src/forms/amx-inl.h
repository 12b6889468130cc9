// The tile verbs of Intel AMX, beside those of tiles-inl.h: eight tile registers of 16 rows of 64 bytes, and one product, C [16][16] f32 += A
// [16][32] bf16 times B [32][16] bf16, where a row of B holds a pair of channels (or tokens) for each of 16 columns.
//
// A policy is the registers: `HardwareTiles` the real ones, and in the tests a plain emulation. Operands lie in memory as whole tiles, 1 KiB each,
// padded with zeros, so that every load has a stride of 64 bytes and no odd shape is ever configured.
//
// The source must be compiled for x86-64; the caller looks whether the machine has AVX-512 and AMX.
#ifndef TERCET_SRC_FORMS_AMX_INL_H_
#define TERCET_SRC_FORMS_AMX_INL_H_

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 finds that its own intrinsics use what they don't initialize.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cstdint>

// Function attributes for all that follows, and no compiler flags for whole files. A lambda has to say so itself.
#define TERCET_AMX_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16"
#define TERCET_AMX_ATTR __attribute__((target(TERCET_AMX_TARGET)))
#define TERCET_AMX_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TERCET_BEFORE_AMX TERCET_AMX_PRAGMA(clang attribute push(TERCET_AMX_ATTR, apply_to = function))
#define TERCET_AFTER_AMX TERCET_AMX_PRAGMA(clang attribute pop)
#define TERCET_UNROLL TERCET_AMX_PRAGMA(clang loop unroll(full))
#else
#define TERCET_BEFORE_AMX \
  TERCET_AMX_PRAGMA(GCC push_options) TERCET_AMX_PRAGMA(GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16"))
#define TERCET_AFTER_AMX TERCET_AMX_PRAGMA(GCC pop_options)
#define TERCET_UNROLL TERCET_AMX_PRAGMA(GCC unroll 16)
#endif

TERCET_BEFORE_AMX
namespace tercet::amx {

// What a tile register holds, in memory: operands as pairs of bf16, the lower half the one of lower index; sums as f32.
struct alignas(64) Tile {
  uint32_t row[16][16];
};
struct alignas(64) Sums {
  float row[16][16];
};

// The configuration of all eight tiles, 16 rows of 64 bytes each.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline constexpr TileConfig kAllTiles{};

// Instructions in assembly: GCC 12's intrinsics don't say that loads and stores of tiles touch memory, nor that the configuration is 64 bytes.
struct HardwareTiles {
  static void Configure() { asm volatile("ldtilecfg %0" : : "m"(kAllTiles)); }
  static void Release() { asm volatile("tilerelease"); }
  template <int kTile>
  static void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile, class T>
  static void Load(const T* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(int64_t{64}), "i"(kTile), "m"(*from));
  }
  template <int kTile>
  static void Store(Sums* to) {
    asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(*to) : "r"(to), "r"(int64_t{64}), "i"(kTile));
  }
  // 16 rows of 16 numbers, `step` numbers apart.
  template <int kTile>
  static void LoadRows(const float* from, int64_t step) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(4 * step), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void StoreRows(float* to, int64_t step) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(4 * step), "i"(kTile) : "memory");
  }
  // sums += left right
  template <int kSums, int kLeft, int kRight>
  static void MultiplyAdd() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
  }
  // 16 numbers of each rounded to bf16, to nearest even, those of `low` first.
  static __m512i Narrow(__m512 low, __m512 high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }
};

// ---- Products ---------------------------------------------------------------------------------------------------------------------------------

// Tiles 0 .. 3 are sums, side by side; 4 holds a left operand, which up to four right ones share, and 5 .. 7 those.
constexpr int64_t kGroup = 4;

template <class Tiles>
inline void Clear() {
  Tiles::template Zero<0>();
  Tiles::template Zero<1>();
  Tiles::template Zero<2>();
  Tiles::template Zero<3>();
}

// What the sums start from, where that is not zero.
template <class Tiles>
inline void Load(int64_t columns, const Sums* from) {
  Tiles::template Load<0>(from);
  if (columns > 1) Tiles::template Load<1>(from + 1);
  if (columns > 2) Tiles::template Load<2>(from + 2);
  if (columns > 3) Tiles::template Load<3>(from + 3);
}

// sum c += a[0 .. depth - 1] times b[.][c], for `columns` of them. b's rows are `b_row` tiles apart.
template <class Tiles>
inline void MultiplyAdd(int64_t columns, int64_t depth, const Tile* a, const Tile* b, int64_t b_row) {
  for (; depth > 0; --depth, ++a, b += b_row) {
    Tiles::template Load<4>(a);
    Tiles::template Load<5>(b);
    Tiles::template MultiplyAdd<0, 4, 5>();
    if (columns > 1) {
      Tiles::template Load<6>(b + 1);
      Tiles::template MultiplyAdd<1, 4, 6>();
    }
    if (columns > 2) {
      Tiles::template Load<7>(b + 2);
      Tiles::template MultiplyAdd<2, 4, 7>();
    }
    if (columns > 3) {
      Tiles::template Load<5>(b + 3);
      Tiles::template MultiplyAdd<3, 4, 5>();
    }
  }
}

// sum c += a[c][0 .. depth - 1] times b[c][.]: every sum with a left operand of its own.
template <class Tiles>
inline void MultiplyAddEach(int64_t columns, int64_t depth, const Tile* a, const Tile* b) {
  for (int64_t d = 0; d < depth; ++d, ++a, ++b) {
    Tiles::template Load<4>(a);
    Tiles::template Load<5>(b);
    Tiles::template MultiplyAdd<0, 4, 5>();
    if (columns > 1) {
      Tiles::template Load<6>(a + depth);
      Tiles::template Load<7>(b + depth);
      Tiles::template MultiplyAdd<1, 6, 7>();
    }
    if (columns > 2) {
      Tiles::template Load<4>(a + 2 * depth);
      Tiles::template Load<5>(b + 2 * depth);
      Tiles::template MultiplyAdd<2, 4, 5>();
    }
    if (columns > 3) {
      Tiles::template Load<6>(a + 3 * depth);
      Tiles::template Load<7>(b + 3 * depth);
      Tiles::template MultiplyAdd<3, 6, 7>();
    }
  }
}

template <class Tiles>
inline void Store(int64_t columns, Sums* to) {
  Tiles::template Store<0>(to);
  if (columns > 1) Tiles::template Store<1>(to + 1);
  if (columns > 2) Tiles::template Store<2>(to + 2);
  if (columns > 3) Tiles::template Store<3>(to + 3);
}

// Sums that lie beside each other in rows `step` numbers apart.
template <class Tiles>
inline void LoadRows(int64_t columns, const float* from, int64_t step) {
  Tiles::template LoadRows<0>(from, step);
  if (columns > 1) Tiles::template LoadRows<1>(from + 16, step);
  if (columns > 2) Tiles::template LoadRows<2>(from + 32, step);
  if (columns > 3) Tiles::template LoadRows<3>(from + 48, step);
}
template <class Tiles>
inline void StoreRows(int64_t columns, float* to, int64_t step) {
  Tiles::template StoreRows<0>(to, step);
  if (columns > 1) Tiles::template StoreRows<1>(to + 16, step);
  if (columns > 2) Tiles::template StoreRows<2>(to + 32, step);
  if (columns > 3) Tiles::template StoreRows<3>(to + 48, step);
}

// ---- Vectors ----------------------------------------------------------------------------------------------------------------------------------

inline __m512 WidenLow(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 WidenHigh(__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)))); }
// 16 numbers in a row.
inline __m512 Widen(__m256i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16)); }

// Words 0 .. 15 and 16 .. 31 of x, by turns.
inline __m512i Interleave(__m512i x) {
  const __m512i first = _mm512_set_epi32(0x001F000F, 0x001E000E, 0x001D000D, 0x001C000C, 0x001B000B, 0x001A000A, 0x00190009, 0x00180008, 0x00170007,
                                         0x00160006, 0x00150005, 0x00140004, 0x00130003, 0x00120002, 0x00110001, 0x00100000);
  return _mm512_permutexvar_epi16(first, x);
}

// Pair n is (low[n], high[n]), rounded to bf16.
template <class Tiles>
inline __m512i NarrowPairs(__m512 low, __m512 high) {
  return Interleave(Tiles::Narrow(low, high));
}

// to[c][i] = from[i][c], of tiles or sums: 32 bits each.
template <class T>
inline void Turn(const T& from, T* to) {
  __m512i a[16], b[16];
  TERCET_UNROLL
  for (int i = 0; i < 16; ++i) a[i] = _mm512_load_si512(from.row[i]);
  TERCET_UNROLL
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  TERCET_UNROLL
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 g + c] holds, in its 128-bit lane l, column 4 l + c of rows 4 g .. 4 g + 3.
  TERCET_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512i even01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), odd01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xDD);
    const __m512i even23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88), odd23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xDD);
    _mm512_store_si512(to->row[c], _mm512_shuffle_i32x4(even01, even23, 0x88));
    _mm512_store_si512(to->row[4 + c], _mm512_shuffle_i32x4(odd01, odd23, 0x88));
    _mm512_store_si512(to->row[8 + c], _mm512_shuffle_i32x4(even01, even23, 0xDD));
    _mm512_store_si512(to->row[12 + c], _mm512_shuffle_i32x4(odd01, odd23, 0xDD));
  }
}

// Element i is the sum of the 16 numbers of from.row[i].
inline __m512 SumRows(const Sums& from) {
  __m512 a[16];
  TERCET_UNROLL
  for (int i = 0; i < 16; ++i) a[i] = _mm512_load_ps(from.row[i]);
  TERCET_UNROLL
  for (int i = 0; i < 8; ++i) a[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  TERCET_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    a[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  TERCET_UNROLL
  for (int i = 0; i < 2; ++i)
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88), _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88), _mm512_shuffle_f32x4(a[0], a[1], 0xDD));
}

// exp(x) for x <= 0, within 1.1 units in the last place; what would be below the normal range is 0, and NaN stays NaN.
inline __m512 ExpOfNonPositive(__m512 x) {
  // x = n log 2 + r, |r| <= log(2) / 2, with log 2 in two pieces. The order of max keeps NaN.
  x = _mm512_max_ps(_mm512_set1_ps(-127.f), x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x));
  __m512 p = _mm512_set1_ps(1.f / 5040);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 720));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(.5f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r);
  return _mm512_scalef_ps(_mm512_add_ps(p, _mm512_set1_ps(1.f)), n);
}

}  // namespace tercet::amx
TERCET_AFTER_AMX

#endif  // TERCET_SRC_FORMS_AMX_INL_H_
