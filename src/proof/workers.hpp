// Pieces of the proof on the caller's threads, with progress told from the calling one.
#ifndef TERCET_SRC_PROOF_WORKERS_HPP_
#define TERCET_SRC_PROOF_WORKERS_HPP_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <new>

#include "src/executor.hpp"
#include "tercet/tercet.hpp"

namespace tercet::proof {

class Workers {
 public:
  // As Attend understands them: nullptr is the library's own executor, 0 threads are all it has.
  Workers(Executor* executor, int threads) : executor_(executor != nullptr ? *executor : DefaultExecutor()) {
    lanes_ = std::max(1, executor_.Concurrency());
    if (threads > 0) lanes_ = std::min<int64_t>(lanes_, threads);
  }

  // Runs body(0) ... body(count - 1), `batch` pieces a thread between two calls of done(pieces so far).
  template <class Body, class Done>
  Status Run(int64_t count, int64_t batch, const Body& body, const Done& done) const {
    std::atomic<bool> out_of_memory{false};
    for (int64_t begin = 0; begin < count;) {
      const int64_t end = std::min(count, begin + lanes_ * std::max<int64_t>(batch, 1));
      std::atomic<int64_t> next{begin}, ran{0};
      executor_.ParallelFor(std::min(lanes_, end - begin), [&](int64_t) {
        for (int64_t i = next.fetch_add(1); i < end; i = next.fetch_add(1)) {
          try {
            body(i);
            ran.fetch_add(1);
          } catch (const std::bad_alloc&) {
            out_of_memory = true;
          }
        }
      });
      if (out_of_memory) return {StatusCode::kOutOfMemory, "the reference needs more memory than there is; fewer threads need less"};
      if (ran != end - begin) return {StatusCode::kInternal, "the executor returned before it had run every piece of the proof"};
      begin = end;
      done(end);
    }
    return {};
  }

 private:
  Executor& executor_;
  int64_t lanes_ = 1;
};

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_WORKERS_HPP_
