#include "bench/peak.hpp"

#include <algorithm>
#include <chrono>

#include "src/targets/selection.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/peak.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "hwy/targets.h"

#ifndef TERCET_BENCH_PEAK_DECLARED
#define TERCET_BENCH_PEAK_DECLARED
namespace tercet::bench {
template <int64_t kTarget>
double MultiplyAddsOn(Dtype dtype);
}  // namespace tercet::bench
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet::bench {
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

}  // namespace HWY_NAMESPACE
}  // namespace tercet::bench
HWY_AFTER_NAMESPACE();

namespace tercet::bench {

template <>
double MultiplyAddsOn<HWY_TARGET>(Dtype dtype) {
  static volatile float kept_f32 = 0;
  static volatile double kept_f64 = 0;
  float f32 = kept_f32;
  double f64 = kept_f64;
  const double operations = dtype == Dtype::kF64 ? HWY_NAMESPACE::MultiplyAdds(&f64) : HWY_NAMESPACE::MultiplyAdds(&f32);
  kept_f32 = f32;
  kept_f64 = f64;
  return operations;
}

}  // namespace tercet::bench

#if HWY_ONCE
namespace tercet::bench {
namespace {

template <int kBit>
double On(Dtype dtype, const std::string& target) {
  if constexpr (kBit < 63) {
    constexpr int64_t kTarget = int64_t{1} << kBit;
    if constexpr ((HWY_TARGETS & kTarget) != 0) {
      if (target == hwy::TargetName(kTarget)) return MultiplyAddsOn<kTarget>(dtype);
    }
    return On<kBit + 1>(dtype, target);
  } else {
    return 0;
  }
}

}  // namespace

double PeakGflops(Dtype dtype, const std::string& target) {
  using Clock = std::chrono::steady_clock;
  double best = 0;
  for (int i = 0; i < 25; ++i) {
    const Clock::time_point start = Clock::now();
    const double operations = On<0>(dtype, target);
    best = std::max(best, operations / std::chrono::duration<double, std::nano>(Clock::now() - start).count());
  }
  return best;
}

}  // namespace tercet::bench
#endif  // HWY_ONCE
