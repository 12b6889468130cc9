// How a call is carried out: which form, which chunk, and how heads and value columns are cut into jobs. The cut changes no bit of the result.
#ifndef TERCET_SRC_PLAN_PLAN_HPP_
#define TERCET_SRC_PLAN_PLAN_HPP_

#include <cstddef>
#include <cstdint>

#include "src/contract/layer.hpp"
#include "src/forms/job.hpp"
#include "src/targets/targets.hpp"

namespace tercet::plan {

struct Plan {
  const forms::Engine* engine = nullptr;
  int64_t span = 1;     // tokens an engine takes at once
  int64_t block = 1;    // tokens of a pass
  int64_t heads = 1;    // of a job; the last of a sequence may have fewer
  int64_t columns = 1;  // value columns of a job; the last of a head may have fewer
  int64_t cuts = 1;     // jobs a head
  int64_t jobs = 0;     // sequences * groups of heads * cuts
  int64_t workers = 1;  // jobs at once, each with a workspace of its own
  forms::Saved saved;   // states to keep for the gradients
  int64_t bytes = 0;    // of a workspace, and a line that keeps it from the next

  // Of all the workspaces side by side: a multiple of a line, the largest there is where they are more than can be counted.
  int64_t Memory() const;
  // Job i, for a worker whose workspace is in `memory`.
  forms::Job JobAt(const contract::Layer& layer, int64_t i, std::byte* memory = nullptr, int64_t worker = 0) const;
};

// The chunk that Options::chunk = 0 stands for.
int64_t DefaultChunk(const contract::Layer& layer, const targets::Target& target);

// Refuses a parallel form whose table does not fit the limit.
Status Make(const Options& options, const contract::Layer& layer, const targets::Target& target, int concurrency, Plan* plan);

}  // namespace tercet::plan

#endif  // TERCET_SRC_PLAN_PLAN_HPP_
