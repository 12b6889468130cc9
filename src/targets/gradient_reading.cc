// The gradients of the rules whose update reads the state, once for each target.
#include "src/targets/selection.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/targets/gradient_reading.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/forms/gradient-inl.h"
#include "src/targets/engine-inl.h"
#include "src/targets/targets.hpp"

namespace tercet::targets {

template <>
void AddGradientReading<HWY_TARGET>(forms::GradientEngine& engine) {
  HWY_NAMESPACE::AddTo<HWY_NAMESPACE::Gradient, rules::Reading>(engine);
}

}  // namespace tercet::targets
