// The public call for gradients: validate, plan, run, and sum what is summed over tokens and sequences.
#include <atomic>
#include <cstdlib>
#include <new>

#include "src/contract/half.hpp"
#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/executor.hpp"
#include "src/floating_mode.hpp"
#include "src/plan/gradient.hpp"
#include "src/targets/targets.hpp"
#include "tercet/tercet.hpp"

namespace tercet {

namespace {

// The gradients of the scale, and of retention's log_decay or rwkv6's bonus, from the sums of every head of every sequence, in their order.
void StoreSums(const contract::GradientLayer& layer, const double* sums) {
  const int64_t each = forms::SumsOf(layer), states = layer.state_heads;
  const auto total = [&](int64_t first, int64_t last, int64_t at) {
    double sum = 0;
    for (int64_t n = 0; n < layer.sequences; ++n)
      for (int64_t s = first; s < last; ++s) sum += sums[(n * states + s) * each + at];
    return sum;
  };
  if (layer.wanted.scale != nullptr) *layer.wanted.scale = total(0, states, 0);
  const auto store = [&](const Tensor& t, int64_t at) {
    const int64_t sharing = states / t.shape[0];
    for (int64_t h = 0; h < t.shape[0]; ++h)
      for (int64_t c = 0; c < (t.rank > 1 ? t.shape[1] : 1); ++c)
        contract::WriteDouble(t, contract::Offset(t, h, c), total(h * sharing, (h + 1) * sharing, at + c));
  };
  if (layer.wanted.log_decay.given() && layer.axes.decay == Decay::kPerHead) store(layer.wanted.log_decay, 1);
  if (layer.wanted.bonus.given()) store(layer.wanted.bonus, 2);
}

}  // namespace

Status AttendGradient(const Options& options, const Inputs& inputs, const OutputGradients& given, const Gradients& wanted) {
  Executor& executor = options.executor != nullptr ? *options.executor : DefaultExecutor();
  const int concurrency = executor.Concurrency();
  contract::GradientLayer layer;
  plan::GradientPlan plan;
  const targets::Target* target = nullptr;
  {
    const FloatingMode mode;
    if (Status status = contract::ValidateGradient(options, inputs, given, wanted, &layer); !status.ok()) return status;
    if (Status status = targets::Choose(options.target, &target); !status.ok()) return status;
    if (Status status = plan::Make(options, layer, *target, concurrency, &plan); !status.ok()) return status;
  }
  const int64_t each = (plan.bytes + 127) / 64 * 64;
  const int64_t all = each * plan.workers + plan.sums * 8 + 64;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>((all + 63) / 64 * 64)));
  if (memory == nullptr) return {StatusCode::kOutOfMemory, "no memory"};
  auto* sums = reinterpret_cast<double*>(memory + each * plan.workers);
  std::atomic<int64_t> next{0};
  const auto run = target->gradient->run[layer.f64()][static_cast<size_t>(layer.rule)];
  const auto work = [&](int64_t worker) {
    const FloatingMode mode;
    for (int64_t i = next.fetch_add(1); i < plan.jobs; i = next.fetch_add(1)) {
      forms::GradientJob job = plan.JobAt(layer, i);
      job.workspace = memory + worker * each;
      job.sums = sums;
      run(job);
    }
  };
  if (plan.workers == 1)
    work(0);
  else
    executor.ParallelFor(plan.workers, work);
  StoreSums(layer, sums);
  std::free(memory);
  return {};
}

}  // namespace tercet
