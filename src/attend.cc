// The public calls: validate, plan, run. Exceptions end here.
#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/executor.hpp"
#include "src/floating_mode.hpp"
#include "src/plan/gradient.hpp"
#include "src/plan/plan.hpp"
#include "src/targets/targets.hpp"
#include "tercet/tercet.hpp"
#include "tercet_version.hpp"

namespace tercet {

namespace {

constexpr std::align_val_t kLine{forms::Arena::kAlignment};

// Memory of the library's own. A thread keeps what its last call used, up to kKept bytes, so that a stream of calls asks the system for none: fresh
// pages cost a fault each. A call inside a call (an executor may run one) finds it taken, and takes its own.
class OwnMemory {
 public:
  explicit OwnMemory(int64_t bytes) {
    if (kept_.bytes >= bytes) {
      std::swap(memory_, static_cast<Memory&>(kept_));
    } else {
      memory_ = {static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), kLine, std::nothrow)), bytes};
    }
  }
  ~OwnMemory() {
    if (memory_.data == nullptr) return;
    if (memory_.bytes <= kKept && memory_.bytes > kept_.bytes) std::swap(memory_, static_cast<Memory&>(kept_));
    ::operator delete(memory_.data, kLine);
  }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  std::byte* data() const { return memory_.data; }

 private:
  static constexpr int64_t kKept = int64_t{8} << 20;
  struct Memory {
    std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  struct Kept : Memory {
    ~Kept() { ::operator delete(this->data, kLine); }
  };
  static thread_local Kept kept_;
  Memory memory_;
};
thread_local OwnMemory::Kept OwnMemory::kept_;

// What a caller's workspace must have: that its data may begin anywhere costs the rest of a line.
int64_t BytesOf(int64_t memory) { return memory > 0 ? memory + (forms::Arena::kAlignment - 1) : 0; }

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

// Runs a plan's jobs. `run` does one, on the memory of its worker; `finish` is shown all the memory in the end; `query` says how much it is.
template <class Layer, class Plan, class Job, class Finish>
Status Run(const Options& options, const Layer& layer, Executor& executor, const Plan& plan, const char* query, void (*run)(const Job&),
           const Finish& finish) {
  if (plan.jobs == 0) {  // and so no memory
    finish(nullptr);
    return {};
  }
  // All memory before the first write: a call that is refused has changed nothing.
  const int64_t bytes = plan.Memory();
  std::byte* memory = nullptr;
  std::optional<OwnMemory> own;
  if (void* data = options.workspace.data; data != nullptr) {
    if (options.workspace.bytes < BytesOf(bytes))
      return {StatusCode::kInvalidOption, "workspace has " + std::to_string(options.workspace.bytes) + " bytes and must have at least " +
                                              std::to_string(BytesOf(bytes)) + ", which " + query + " says of this call"};
    auto room = static_cast<size_t>(options.workspace.bytes);
    memory = static_cast<std::byte*>(std::align(forms::Arena::kAlignment, 1, data, room));
  } else {
    own.emplace(bytes);
    memory = own->data();
  }
  if (memory == nullptr)
    return {StatusCode::kOutOfMemory,
            "the call needs " + std::to_string(bytes) + " bytes to work in and they could not be had; a smaller chunk or fewer threads need less"};

  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t worker) {
    const FloatingMode mode;
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < plan.jobs; i = next.fetch_add(1, std::memory_order_relaxed))
      run(plan.JobAt(layer, i, memory, worker));
  };
  try {
    if (plan.workers == 1)
      work(0);
    else
      executor.ParallelFor(plan.workers, std::ref(work));  // a reference: a function that holds this much would ask for memory
  } catch (...) {
    return Say(StatusCode::kInternal, "the executor threw an exception, so the outputs are not complete");
  }
  if (next.load() < plan.jobs)
    return {StatusCode::kInternal, "the executor returned before it had run every piece of the call, so the outputs are not complete"};
  finish(memory);
  return {};
}

// Validates with validate(&layer), plans, and goes on with then(layer, target, executor, plan).
template <class Layer, class Plan, class Validate, class Then>
Status Planned(const Options& options, const Validate& validate, const Then& then) {
  try {
    Executor& executor = options.executor != nullptr ? *options.executor : DefaultExecutor();
    const int concurrency = executor.Concurrency();
    Layer layer;
    Plan plan;
    const targets::Target* target = nullptr;
    {
      // What is computed here must not depend on the caller's mode either, nor spring its traps. The executor runs outside: its threads might keep
      // it.
      const FloatingMode mode;
      if (Status status = validate(&layer); !status.ok()) return status;
      if (Status status = targets::Choose(options.target, &target); !status.ok()) return status;
      if (Status status = plan::Make(options, layer, *target, concurrency, &plan); !status.ok()) return status;
    }
    return then(layer, *target, executor, plan);
  } catch (const std::bad_alloc&) {
    return Say(StatusCode::kOutOfMemory, "the call ran out of memory before it computed anything; a smaller chunk or fewer threads need less");
  } catch (...) {
    return Say(StatusCode::kInternal, "an unknown exception ended the call before it computed anything");
  }
}

template <class Then>
Status PlannedForward(const Options& options, const Inputs& inputs, const Outputs& outputs, const Then& then) {
  return Planned<contract::Layer, plan::Plan>(
      options, [&](contract::Layer* layer) { return contract::Validate(options, inputs, &outputs, layer); }, then);
}
template <class Then>
Status PlannedGradient(const Options& options, const Inputs& inputs, const OutputGradients& given, const Gradients& wanted, const Then& then) {
  return Planned<contract::GradientLayer, plan::GradientPlan>(
      options, [&](contract::GradientLayer* layer) { return contract::ValidateGradient(options, inputs, given, wanted, layer); }, then);
}

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

Status Attend(const Options& options, const Inputs& inputs, const Outputs& outputs) {
  return PlannedForward(options, inputs, outputs,
                        [&](const contract::Layer& layer, const targets::Target&, Executor& executor, const plan::Plan& plan) -> Status {
                          const auto finish = [&](const std::byte*) {
                            if (plan.saved.tokens > 0) plan::MarkSaved(options, layer, outputs.saved);
                          };
                          if (plan.jobs == 0) {
                            finish(nullptr);
                            return {};
                          }
                          const forms::Engine::Run run = plan.engine->run[layer.f64()][static_cast<size_t>(layer.rule)];
                          return Run(options, layer, executor, plan, "WorkspaceBytes", run, finish);
                        });
}

Status WorkspaceBytes(const Options& options, const Inputs& inputs, const Outputs& outputs, int64_t* bytes) {
  Options without = options;
  without.workspace = {};
  return PlannedForward(without, inputs, outputs, [&](const contract::Layer&, const targets::Target&, Executor&, const plan::Plan& plan) {
    *bytes = BytesOf(plan.Memory());
    return Status();
  });
}

Status SavedBytes(const Options& options, const Inputs& inputs, int64_t* bytes) {
  try {
    const FloatingMode mode;
    contract::Layer layer;
    if (Status status = contract::Validate(options, inputs, nullptr, &layer); !status.ok()) return status;
    return plan::SavedBytes(options, layer, bytes);
  } catch (...) {
    return Say(StatusCode::kOutOfMemory, "the call ran out of memory");
  }
}

Status AttendGradient(const Options& options, const Inputs& inputs, const OutputGradients& given, const Gradients& wanted) {
  return PlannedGradient(
      options, inputs, given, wanted,
      [&](const contract::GradientLayer& layer, const targets::Target& target, Executor& executor, const plan::GradientPlan& plan) -> Status {
        const forms::GradientEngine::Run run = target.gradient->run[layer.f64()][static_cast<size_t>(layer.rule)];
        return Run(options, layer, executor, plan, "GradientWorkspaceBytes", run,
                   [&](const std::byte* memory) { StoreSums(layer, plan.SumsIn(memory)); });
      });
}

Status GradientWorkspaceBytes(const Options& options, const Inputs& inputs, const OutputGradients& given, const Gradients& wanted, int64_t* bytes) {
  Options without = options;
  without.workspace = {};
  return PlannedGradient(without, inputs, given, wanted,
                         [&](const contract::GradientLayer&, const targets::Target&, Executor&, const plan::GradientPlan& plan) {
                           *bytes = BytesOf(plan.Memory());
                           return Status();
                         });
}

std::string_view Version() { return TERCET_VERSION; }

}  // namespace tercet
