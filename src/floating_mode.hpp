// The floating-point mode inside a call: round to nearest, no traps, and numbers below the normal range are zero, for they cost a hundred cycles
// each.
#ifndef TERCET_SRC_FLOATING_MODE_HPP_
#define TERCET_SRC_FLOATING_MODE_HPP_

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <cstdint>

namespace tercet {

// Sets the mode for this thread, and puts the caller's back.
class FloatingMode {
 public:
  FloatingMode() {
#if defined(__SSE2__)
    before_ = _mm_getcsr();
    _mm_setcsr(0x9FC0);  // all exceptions masked (0x1F80), flush to zero (0x8000), denormals are zero (0x40)
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    const uint64_t flush = uint64_t{1} << 24;
    __asm__ volatile("msr fpcr, %0" : : "r"(flush));
#endif
  }
  ~FloatingMode() {
#if defined(__SSE2__)
    _mm_setcsr(before_);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before_));
#endif
  }
  FloatingMode(const FloatingMode&) = delete;
  FloatingMode& operator=(const FloatingMode&) = delete;

 private:
#if defined(__SSE2__)
  unsigned before_;
#elif defined(__aarch64__)
  uint64_t before_;
#endif
};

}  // namespace tercet

#endif  // TERCET_SRC_FLOATING_MODE_HPP_
