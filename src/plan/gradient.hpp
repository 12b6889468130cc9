// How a call for gradients is carried out. The cut into jobs changes no bit of the result.
#ifndef TERCET_SRC_PLAN_GRADIENT_HPP_
#define TERCET_SRC_PLAN_GRADIENT_HPP_

#include <cstdint>

#include "src/contract/layer.hpp"
#include "src/forms/job.hpp"
#include "src/targets/targets.hpp"

namespace tercet::plan {

struct GradientPlan {
  int64_t chunk = 1;
  int64_t heads = 1;    // of a job: those that share a head of an input are in one
  int64_t longest = 0;  // tokens of the longest sequence
  int64_t jobs = 0;     // sequences * state heads / heads
  int64_t workers = 1;  // jobs at once, each with a workspace of its own
  int64_t bytes = 0;    // of a workspace
  int64_t sums = 0;     // numbers of f64 that all jobs write to, beside the workspaces

  forms::GradientJob JobAt(const contract::GradientLayer& layer, int64_t i) const;
};

// Refuses what needs more memory than there can be.
Status Make(const Options& options, const contract::GradientLayer& layer, const targets::Target& target, int concurrency, GradientPlan* plan);

}  // namespace tercet::plan

#endif  // TERCET_SRC_PLAN_GRADIENT_HPP_
