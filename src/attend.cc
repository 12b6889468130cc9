// The public call: validate, plan, run. Exceptions end here.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "src/contract/layer.hpp"
#include "src/executor.hpp"
#include "src/floating_mode.hpp"
#include "src/plan/plan.hpp"
#include "src/targets/targets.hpp"
#include "tercet/tercet.hpp"
#include "tercet_version.hpp"

namespace tercet {

namespace {

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

// A status whose sentence is left out where there is no memory for it.
Status Say(StatusCode code, const char* sentence) {
  Status status;
  status.code = code;
  try {
    status.message = sentence;
  } catch (...) {
  }
  return status;
}

Status Run(const Options& options, const contract::Layer& layer, Executor& executor, const plan::Plan& plan) {
  // All memory before the first write: a call that is refused has changed nothing.
  const int64_t each = (plan.bytes + forms::Arena::kAlignment - 1) / forms::Arena::kAlignment * forms::Arena::kAlignment + forms::Arena::kAlignment;
  const std::unique_ptr<std::byte, Free> memory(
      static_cast<std::byte*>(std::aligned_alloc(forms::Arena::kAlignment, static_cast<size_t>(each * plan.workers))));
  if (memory == nullptr)
    return {StatusCode::kOutOfMemory, "the call needs " + std::to_string(each * plan.workers) +
                                          " bytes to work in and they could not be had; a smaller chunk or fewer threads need less"};

  const forms::Engine::Run run = plan.engine->run[layer.f64()][static_cast<size_t>(options.rule)];
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t worker) {
    const FloatingMode mode;
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < plan.jobs; i = next.fetch_add(1, std::memory_order_relaxed)) {
      forms::Job job = plan.JobAt(layer, i);
      job.workspace = memory.get() + worker * each;
      run(job);
    }
  };
  try {
    if (plan.workers == 1)
      work(0);
    else
      executor.ParallelFor(plan.workers, work);
  } catch (...) {
    return Say(StatusCode::kInternal, "the executor threw an exception, so the outputs are not complete");
  }
  if (next.load() < plan.jobs)
    return {StatusCode::kInternal, "the executor returned before it had run every piece of the call, so the outputs are not complete"};
  return {};
}

}  // namespace

Status Attend(const Options& options, const Inputs& inputs, const Outputs& outputs) {
  try {
    Executor& executor = options.executor != nullptr ? *options.executor : DefaultExecutor();
    const int concurrency = executor.Concurrency();
    contract::Layer layer;
    plan::Plan plan;
    {
      // What is computed here must not depend on the caller's mode either, nor spring its traps. The executor runs outside: its threads might keep
      // it.
      const FloatingMode mode;
      if (Status status = contract::Validate(options, inputs, &outputs, &layer); !status.ok()) return status;
      const targets::Target* target = nullptr;
      if (Status status = targets::Choose(options.target, &target); !status.ok()) return status;
      if (Status status = plan::Make(options, layer, *target, concurrency, &plan); !status.ok()) return status;
    }
    if (plan.jobs == 0) return {};
    return Run(options, layer, executor, plan);
  } catch (const std::bad_alloc&) {
    return Say(StatusCode::kOutOfMemory, "the call ran out of memory before it computed anything; a smaller chunk or fewer threads need less");
  } catch (...) {
    return Say(StatusCode::kInternal, "an unknown exception ended the call before it computed anything");
  }
}

std::string_view Version() { return TERCET_VERSION; }

}  // namespace tercet
