#include "src/executor.hpp"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

namespace tercet {

namespace {

class TbbExecutor : public Executor {
 public:
  int Concurrency() const override { return tbb::this_task_arena::max_concurrency(); }

  void ParallelFor(int64_t count, const std::function<void(int64_t)>& body) override {
    tbb::parallel_for(
        int64_t{0}, count, [&](int64_t i) { body(i); }, tbb::simple_partitioner());
  }
};

}  // namespace

Executor& DefaultExecutor() {
  static TbbExecutor executor;
  return executor;
}

int DefaultConcurrency() { return DefaultExecutor().Concurrency(); }

}  // namespace tercet
