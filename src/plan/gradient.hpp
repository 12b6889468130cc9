// How a call for gradients is carried out. The cut into jobs changes no bit of the result.
#ifndef TERCET_SRC_PLAN_GRADIENT_HPP_
#define TERCET_SRC_PLAN_GRADIENT_HPP_

#include <cstddef>
#include <cstdint>

#include "src/contract/layer.hpp"
#include "src/forms/job.hpp"
#include "src/targets/targets.hpp"

namespace tercet::plan {

// Tokens a chunk of the gradients, and tokens from one state that is kept for them to the next.
int64_t GradientChunk(const Options& options, const contract::Layer& layer);
int64_t SavedTokens(const Options& options, const contract::Layer& layer);
// Bytes of all such states, and a mark that says what call they are of; refused where they are more than there can be.
Status SavedBytes(const Options& options, const contract::Layer& layer, int64_t* bytes);
// Those states in a caller's memory, if it is given and large enough. `compare`: where the mark is another call's, it
// is refused. MarkSaved makes the mark.
Status FindSaved(const Options& options, const contract::Layer& layer, const Workspace& memory, bool compare, forms::Saved* saved);
void MarkSaved(const Options& options, const contract::Layer& layer, const Workspace& memory);

struct GradientPlan {
  int64_t chunk = 1;
  int64_t segment = 1;  // chunks
  int64_t heads = 1;    // of a job: those that share a head of an input are in one
  int64_t longest = 0;  // tokens of the longest sequence
  int64_t jobs = 0;     // sequences * state heads / heads
  int64_t workers = 1;  // jobs at once, each with a workspace of its own
  int64_t bytes = 0;    // of a workspace, and a line that keeps it from the next
  forms::Saved saved;
  int64_t sums = 0;  // numbers of f64 that all jobs write to, behind the workspaces

  // Of all of it: a multiple of a line, the largest there is where it is more than can be counted.
  int64_t Memory() const;
  const double* SumsIn(const std::byte* memory) const { return reinterpret_cast<const double*>(memory + workers * bytes); }
  // Job i, for a worker whose workspace is in `memory`.
  forms::GradientJob JobAt(const contract::GradientLayer& layer, int64_t i, std::byte* memory = nullptr, int64_t worker = 0) const;
};

// Refuses what needs more memory than there can be.
Status Make(const Options& options, const contract::GradientLayer& layer, const targets::Target& target, int concurrency, GradientPlan* plan);

}  // namespace tercet::plan

#endif  // TERCET_SRC_PLAN_GRADIENT_HPP_
