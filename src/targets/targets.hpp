// Which instruction sets there is code for, and each one's engines. The files beside this one compile the engines once a target; no arithmetic here.
#ifndef TERCET_SRC_TARGETS_TARGETS_HPP_
#define TERCET_SRC_TARGETS_TARGETS_HPP_

#include <cstdint>
#include <string>
#include <string_view>

#include "src/forms/job.hpp"
#include "tercet/tercet.hpp"

namespace tercet::targets {

// One for each target in HWY_TARGETS, named by its bit.
template <int64_t kTarget>
const forms::Engine& ChunkwiseEngine();
template <int64_t kTarget>
void AddRecurrentAdding(forms::Engine& engine);
template <int64_t kTarget>
void AddRecurrentReading(forms::Engine& engine);
template <int64_t kTarget>
void AddGradientAdding(forms::GradientEngine& engine);
template <int64_t kTarget>
void AddGradientReading(forms::GradientEngine& engine);
template <int64_t kTarget>
const forms::GradientEngine& GradientEngineOf() {
  static const forms::GradientEngine engine = [] {
    forms::GradientEngine both;
    AddGradientAdding<kTarget>(both);
    AddGradientReading<kTarget>(both);
    return both;
  }();
  return engine;
}
template <int64_t kTarget>
const forms::Engine& RecurrentEngine() {
  static const forms::Engine engine = [] {
    forms::Engine both;
    AddRecurrentAdding<kTarget>(both);
    AddRecurrentReading<kTarget>(both);
    return both;
  }();
  return engine;
}

struct Target {
  std::string_view name;
  const forms::Engine* recurrent;
  const forms::Engine* chunkwise;  // the parallel form too
  const forms::GradientEngine* gradient;
};

// The best one of all, or nothing where this build, machine or kernel has none.
const Target* AmxTarget();

// One more target, the last of the list, for the tests. To be called before anything asks for the list.
void Offer(const Target& target);

// The target of that name, in any case; empty: $TERCET_TARGET, else the best that this machine runs.
Status Choose(std::string_view name, const Target** target);

}  // namespace tercet::targets

#endif  // TERCET_SRC_TARGETS_TARGETS_HPP_
