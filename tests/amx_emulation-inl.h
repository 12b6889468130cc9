// The registers themselves, as a policy for src/forms/amx-inl.h. All tiles are configured as 16 rows of 64 bytes, the only shape that the engine
// uses.
#ifndef TERCET_TESTS_AMX_EMULATION_INL_H_
#define TERCET_TESTS_AMX_EMULATION_INL_H_

#include <atomic>

#include "src/forms/amx-inl.h"

TERCET_BEFORE_AMX
namespace tercet::test {

struct EmulatedTiles {
  struct Registers {
    amx::Tile tile[8];
    bool configured = false;
  };
  // Uses of tiles that were not configured, by any thread.
  static inline std::atomic<int> faults{0};
  static Registers& Own() {
    static thread_local Registers registers;
    return registers;
  }
  static amx::Tile& Use(int tile) {
    Registers& own = Own();
    if (!own.configured) ++faults;
    return own.tile[tile];
  }

  // Both clear all tiles.
  static void Configure() {
    for (amx::Tile& tile : Own().tile) tile = {};
    Own().configured = true;
  }
  static void Release() {
    for (amx::Tile& tile : Own().tile) tile = {};
    Own().configured = false;
  }
  template <int kTile>
  static void Zero() {
    Use(kTile) = {};
  }
  template <int kTile, class T>
  static void Load(const T* from) {
    for (int i = 0; i < 16; ++i) _mm512_store_si512(Use(kTile).row[i], _mm512_load_si512(from->row[i]));
  }
  template <int kTile>
  static void Store(amx::Sums* to) {
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to->row[i], _mm512_load_si512(Use(kTile).row[i]));
  }

  template <int kTile>
  static void LoadRows(const float* from, int64_t step) {
    for (int i = 0; i < 16; ++i) _mm512_store_si512(Use(kTile).row[i], _mm512_loadu_si512(from + i * step));
  }
  template <int kTile>
  static void StoreRows(float* to, int64_t step) {
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * step, _mm512_load_si512(Use(kTile).row[i]));
  }

  // Row by row, the first halves of the pairs and the second each in a chain of fused multiply-adds from zero, then their sum, then that and what was
  // there. To nearest even, denormals taken as zero and flushed to it, whatever the caller's mode.
  template <int kSums, int kLeft, int kRight>
  static void MultiplyAdd() {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9FC0);
    asm volatile("" : : : "memory");
    amx::Tile &sums = Use(kSums), &left = Use(kLeft), &right = Use(kRight);
    for (int m = 0; m < 16; ++m) {
      __m512 first = _mm512_setzero_ps(), second = first;
      for (int k = 0; k < 16; ++k) {
        const __m512i a = _mm512_set1_epi32(static_cast<int>(left.row[m][k])), b = _mm512_load_si512(right.row[k]);
        first = _mm512_fmadd_ps(amx::WidenLow(a), amx::WidenLow(b), first);
        second = _mm512_fmadd_ps(amx::WidenHigh(a), amx::WidenHigh(b), second);
      }
      const __m512 sum = _mm512_add_ps(_mm512_load_ps(sums.row[m]), _mm512_add_ps(first, second));
      // The compiler doesn't know that arithmetic depends on the mode: here it ends, and above it begins.
      asm volatile("" : : "v"(sum) : "memory");
      _mm512_store_ps(sums.row[m], sum);
    }
    _mm_setcsr(before);
  }

  // VCVTNE2PS2BF16 without AVX512_BF16: to nearest even, denormals are zero, NaN stays NaN and becomes quiet.
  static __m512i Narrow(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(Round(low))), _mm512_cvtepi32_epi16(Round(high)), 1);
  }
  static __m512i Round(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i y = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF))), 16);
    const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
    y = _mm512_mask_or_epi32(y, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __mmask16 denormal = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    return _mm512_mask_and_epi32(y, denormal, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x8000));
  }
};

}  // namespace tercet::test
TERCET_AFTER_AMX

#endif  // TERCET_TESTS_AMX_EMULATION_INL_H_
