// The public call: validate, plan, run. Exceptions end here.
#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "src/contract/layer.hpp"
#include "src/executor.hpp"
#include "src/floating_mode.hpp"
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
int64_t BytesOf(const plan::Plan& plan) {
  const int64_t memory = plan.Memory();
  return memory > 0 ? memory + forms::Arena::kAlignment - 1 : 0;
}

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
  std::byte* memory = nullptr;
  std::optional<OwnMemory> own;
  if (void* data = options.workspace.data; data != nullptr) {
    if (options.workspace.bytes < BytesOf(plan))
      return {StatusCode::kInvalidOption, "workspace has " + std::to_string(options.workspace.bytes) + " bytes and must have at least " +
                                              std::to_string(BytesOf(plan)) + ", which WorkspaceBytes says of this call"};
    auto room = static_cast<size_t>(options.workspace.bytes);
    memory = static_cast<std::byte*>(std::align(forms::Arena::kAlignment, 1, data, room));
  } else {
    own.emplace(plan.Memory());
    memory = own->data();
  }
  if (memory == nullptr)
    return {StatusCode::kOutOfMemory, "the call needs " + std::to_string(plan.Memory()) +
                                          " bytes to work in and they could not be had; a smaller chunk or fewer threads need less"};

  const forms::Engine::Run run = plan.engine->run[layer.f64()][static_cast<size_t>(options.rule)];
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t worker) {
    const FloatingMode mode;
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < plan.jobs; i = next.fetch_add(1, std::memory_order_relaxed)) {
      forms::Job job = plan.JobAt(layer, i);
      job.workspace = memory + worker * plan.bytes;
      run(job);
    }
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
  return {};
}

// Validates, plans and goes on with then(layer, executor, plan).
template <class Then>
Status Planned(const Options& options, const Inputs& inputs, const Outputs& outputs, const Then& then) {
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
    return then(layer, executor, plan);
  } catch (const std::bad_alloc&) {
    return Say(StatusCode::kOutOfMemory, "the call ran out of memory before it computed anything; a smaller chunk or fewer threads need less");
  } catch (...) {
    return Say(StatusCode::kInternal, "an unknown exception ended the call before it computed anything");
  }
}

}  // namespace

Status Attend(const Options& options, const Inputs& inputs, const Outputs& outputs) {
  return Planned(options, inputs, outputs, [&](const contract::Layer& layer, Executor& executor, const plan::Plan& plan) {
    return plan.jobs == 0 ? Status() : Run(options, layer, executor, plan);
  });
}

Status WorkspaceBytes(const Options& options, const Inputs& inputs, const Outputs& outputs, int64_t* bytes) {
  Options without = options;
  without.workspace = {};
  return Planned(without, inputs, outputs, [&](const contract::Layer&, Executor&, const plan::Plan& plan) {
    *bytes = BytesOf(plan);
    return Status();
  });
}

std::string_view Version() { return TERCET_VERSION; }

}  // namespace tercet
