// Which of Highway's targets are built. Included before any header of Highway.
#ifndef TERCET_SRC_TARGETS_SELECTION_HPP_
#define TERCET_SRC_TARGETS_SELECTION_HPP_

#if defined(__x86_64__)
// Bits of Highway's x86 targets that add nothing to f32 and f64 arithmetic: 12 is SSSE3 (SSE4 is as old to us), 3 to 7 are AVX3_DL and what came
// after.
#define HWY_DISABLED_TARGETS ((1LL << 12) | (31LL << 3))
#elif defined(__aarch64__)
// Bits 15 to 27: SVE's vectors have no size at compile time, and registers in arrays need one. Newer versions of Highway have NEON_BF16 there too,
// whose products of bf16 are not used.
#define HWY_DISABLED_TARGETS (0x1FFFLL << 15)
#endif

#endif  // TERCET_SRC_TARGETS_SELECTION_HPP_
