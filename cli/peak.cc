#include "cli/peak.hpp"

#include <algorithm>
#include <chrono>

#include "src/targets/selection.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cli/peak.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "hwy/targets.h"

#ifndef TERCET_CLI_PEAK_DECLARED
#define TERCET_CLI_PEAK_DECLARED
namespace tercet::cli {

struct Peak::Loops {
  double (*multiply_adds_f32)(float* sink);
  double (*multiply_adds_f64)(double* sink);
  void (*copy)(const float* from, float* to, int64_t n);
  void (*read_multiply_write)(float* data, int64_t n, float factor);
};

template <int64_t kTarget>
const Peak::Loops* LoopsOn();

}  // namespace tercet::cli
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet::cli {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Twelve chains hide the latency of two multiply-adds a cycle. Returns how many operations it did.
template <class T>
static HWY_NOINLINE double MultiplyAdds(T* sink) {
  constexpr int kChains = 12, kRounds = 200000;
  const hn::ScalableTag<T> d;
  hn::Vec<decltype(d)> chain[kChains];
  HWY_UNROLL(12)
  for (int i = 0; i < kChains; ++i) chain[i] = hn::Set(d, static_cast<T>(i) + sink[0]);
  const auto x = hn::Set(d, static_cast<T>(.999)), y = hn::Set(d, static_cast<T>(.001));
  for (int round = 0; round < kRounds; ++round) {
    HWY_UNROLL(12)
    for (int i = 0; i < kChains; ++i) chain[i] = hn::MulAdd(chain[i], x, y);
  }
  for (int i = 1; i < kChains; ++i) chain[0] = hn::Add(chain[0], chain[i]);
  sink[0] = hn::GetLane(chain[0]);
  return 2.0 * kChains * kRounds * static_cast<double>(hn::Lanes(d));
}

// Four vectors a turn, and what is left one number at a time.
template <class Each, class One>
static HWY_INLINE void Sweep(int64_t n, const Each& each, const One& one) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    HWY_UNROLL(4)
    for (int j = 0; j < 4; ++j) each(d, i + j * lanes);
  }
  for (; i < n; ++i) one(i);
}

static HWY_NOINLINE void Copy(const float* from, float* to, int64_t n) {
  Sweep(
      n, [&](auto d, int64_t i) HWY_ATTR { hn::StoreU(hn::LoadU(d, from + i), d, to + i); }, [&](int64_t i) { to[i] = from[i]; });
}

static HWY_NOINLINE void ReadMultiplyWrite(float* data, int64_t n, float factor) {
  Sweep(
      n, [&](auto d, int64_t i) HWY_ATTR { hn::StoreU(hn::Mul(hn::LoadU(d, data + i), hn::Set(d, factor)), d, data + i); },
      [&](int64_t i) { data[i] *= factor; });
}

}  // namespace HWY_NAMESPACE
}  // namespace tercet::cli
HWY_AFTER_NAMESPACE();

namespace tercet::cli {

template <>
const Peak::Loops* LoopsOn<HWY_TARGET>() {
  static constexpr Peak::Loops kLoops = {HWY_NAMESPACE::MultiplyAdds<float>, HWY_NAMESPACE::MultiplyAdds<double>, HWY_NAMESPACE::Copy,
                                         HWY_NAMESPACE::ReadMultiplyWrite};
  return &kLoops;
}

}  // namespace tercet::cli

#if HWY_ONCE

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tercet::cli {
namespace {

using Clock = std::chrono::steady_clock;

double NanosecondsSince(Clock::time_point start) { return std::chrono::duration<double, std::nano>(Clock::now() - start).count(); }

// The loops of the target of that name, or with no name of the best that the machine has.
template <int kBit = 0>
const Peak::Loops* Find(const std::string* target) {
  if constexpr (kBit < 63) {
    constexpr int64_t kTarget = int64_t{1} << kBit;
    if constexpr ((HWY_TARGETS & kTarget) != 0) {
      const bool found = target != nullptr ? *target == hwy::TargetName(kTarget) : (hwy::SupportedTargets() & kTarget) != 0;
      if (found) return LoopsOn<kTarget>();
    }
    return Find<kBit + 1>(target);
  } else {
    return target != nullptr ? Find<0>(nullptr) : LoopsOn<HWY_STATIC_TARGET>();
  }
}

}  // namespace

Peak::Peak(const std::string& target) : loops_(Find<0>(&target)) {}

double Peak::MultiplyAdds(bool f64) const {
  static volatile float kept_f32 = 0;
  static volatile double kept_f64 = 0;
  float one = kept_f32;
  double two = kept_f64;
  const Clock::time_point start = Clock::now();
  const double operations = f64 ? loops_->multiply_adds_f64(&two) : loops_->multiply_adds_f32(&one);
  const double nanoseconds = NanosecondsSince(start);
  kept_f32 = one;
  kept_f64 = two;
  return operations / nanoseconds;
}

void Peak::Copy(const float* from, float* to, int64_t n) const { loops_->copy(from, to, n); }

void Peak::ReadMultiplyWrite(float* data, int64_t n) const {
  static volatile float one = 1;  // which the compiler does not know
  loops_->read_multiply_write(data, n, one);
}

#if defined(__x86_64__) && defined(__linux__)

namespace {

struct alignas(64) TileShapes {
  uint8_t palette, first_row, reserved[14];
  uint16_t bytes_a_row[16];
  uint8_t rows[16];
};
// Eight tiles of 16 rows of 64 bytes. Not on the stack: GCC 12 believes that loading the shapes reads 8 bytes, and drops stores to the others.
constexpr TileShapes kTileShapes = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

__attribute__((target("xsave"))) uint64_t StatesTheKernelSaves() { return _xgetbv(0); }

// Four accumulators hide the latency of a product; a and b are shared as in a product of 2 x 2 tiles.
__attribute__((target("amx-tile,amx-bf16"), noinline)) void MultiplyTiles(int rounds) {
  asm volatile("" ::"r"(&kTileShapes) : "memory");
  _tile_loadconfig(&kTileShapes);
  for (int i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

}  // namespace

bool HasTiles(std::string* why) {
  constexpr unsigned kXsaveInUse = 1u << 27, kBf16Tiles = 1u << 22, kTiles = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool saves = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & kXsaveInUse) != 0;
  *why = "this CPU has none";
  if (!saves || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16Tiles) == 0 || (d & kTiles) == 0) return false;
  *why = "the kernel refuses it";
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, which older headers lack
  constexpr int kTileData = 18;
  constexpr uint64_t kTileStates = uint64_t{3} << 17;
  return (StatesTheKernelSaves() & kTileStates) == kTileStates && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

double TileProducts() {
  constexpr int kRounds = 20000;
  const Clock::time_point start = Clock::now();
  MultiplyTiles(kRounds);
  return 4.0 * kRounds * (2 * 16 * 16 * 32) / NanosecondsSince(start);
}

#else

bool HasTiles(std::string* why) {
  *why = "this CPU has none";
  return false;
}
double TileProducts() { return 0; }

#endif

}  // namespace tercet::cli
#endif  // HWY_ONCE
