// What this core can do at most: multiply-adds in registers, for the ratios that benchmarks report.
#ifndef TERCET_BENCH_PEAK_HPP_
#define TERCET_BENCH_PEAK_HPP_

#include <string>

#include "tercet/tercet.hpp"

namespace tercet::bench {

// GFLOP/s of one core in f32 or f64 with the target of that name (one of Targets()): the best of several runs of about a millisecond.
double PeakGflops(Dtype dtype, const std::string& target);

}  // namespace tercet::bench

#endif  // TERCET_BENCH_PEAK_HPP_
