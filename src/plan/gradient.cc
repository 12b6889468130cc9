#include "src/plan/gradient.hpp"

#include <algorithm>
#include <numeric>
#include <string>

namespace tercet::plan {

namespace {

// Tokens whose rows, factors and tables lie in L2 beside two states. Measured against 16, 64 and 128 (docs/performance.md).
constexpr int64_t kChunk = 32;
constexpr int64_t kLine = forms::Arena::kAlignment;

}  // namespace

int64_t GradientPlan::Memory() const {
  int64_t all = 0;
  const bool much = __builtin_mul_overflow(bytes, workers, &all) || __builtin_add_overflow(all, (sums * 8 + kLine - 1) / kLine * kLine, &all);
  return much ? INT64_MAX / kLine * kLine : all;
}

forms::GradientJob GradientPlan::JobAt(const contract::GradientLayer& layer, int64_t i, std::byte* memory, int64_t worker) const {
  forms::GradientJob job;
  if (memory != nullptr) {
    job.workspace = memory + worker * bytes;
    job.sums = reinterpret_cast<double*>(memory + workers * bytes);
  }
  job.layer = &layer;
  job.gradient = &layer;
  job.span = chunk;
  job.longest = longest;
  job.columns = layer.value_dim;
  const int64_t groups = layer.state_heads / heads;
  job.head = i % groups * heads;
  job.heads = heads;
  job.sequence = i / groups;
  return job;
}

Status Make(const Options& options, const contract::GradientLayer& layer, const targets::Target& target, int concurrency, GradientPlan* plan) {
  plan->longest = contract::LongestSequence(layer);
  const int64_t chunk = options.form == Form::kRecurrent ? 1 : options.chunk > 0 ? options.chunk : kChunk;
  plan->chunk = std::clamp<int64_t>(chunk, 1, std::max<int64_t>(plan->longest, 1));

  // Heads of every input are groups of state heads that follow each other; what no group of any input straddles can be cut.
  int64_t cuts = layer.state_heads;
  const Inputs& in = layer.in;
  for (const ConstTensor* t : {&in.q, &in.k, &in.v, &in.log_decay, &in.beta, &in.remove, &in.write})
    if (t->given() && t->rank > 2) cuts = std::gcd(cuts, t->shape[2]);
  plan->heads = layer.state_heads / cuts;
  plan->jobs = layer.sequences * cuts;
  plan->workers = options.threads > 0 ? std::min(concurrency, options.threads) : concurrency;
  plan->workers = std::clamp<int64_t>(plan->workers, 1, std::max<int64_t>(plan->jobs, 1));
  plan->sums = layer.sequences * layer.state_heads * forms::SumsOf(layer);

  // Kept states and a chunk's rows and tables; counting exactly past 2^50 numbers, which no machine has, could overflow.
  const auto n = static_cast<double>(plan->chunk), K = static_cast<double>(layer.key_dim), V = static_cast<double>(layer.value_dim);
  const double states = static_cast<double>(plan->heads) * (static_cast<double>(plan->longest) / std::max(n, 1.0) + 64);
  const double numbers = states * (K + 64) * (V + 64) + (n + 64) * (n + 64) + (n + 64) * (K + V + 128);
  if (numbers > 0x1p50)
    return {StatusCode::kOutOfMemory, "the gradients take " + std::to_string(plan->chunk) + " tokens at a time with key_dim " +
                                          std::to_string(layer.key_dim) + " and value_dim " + std::to_string(layer.value_dim) +
                                          " over sequences of " + std::to_string(plan->longest) +
                                          " tokens, and these must be so small that a state a chunk and the tables of one are at most 2^50 numbers"};
  if (plan->jobs > 0) {
    const int64_t bytes = target.gradient->bytes[layer.f64()][static_cast<size_t>(layer.rule)](plan->JobAt(layer, 0));
    plan->bytes = (bytes + kLine - 1) / kLine * kLine + kLine;
  }
  return {};
}

}  // namespace tercet::plan
