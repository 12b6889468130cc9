// The gradients of the rules whose update only adds, once for each target.
#include "src/targets/selection.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/targets/gradient_adding.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/forms/gradient-inl.h"
#include "src/targets/engine-inl.h"
#include "src/targets/targets.hpp"

namespace tercet::targets {

template <>
void AddGradientAdding<HWY_TARGET>(forms::GradientEngine& engine) {
  HWY_NAMESPACE::AddTo<HWY_NAMESPACE::Gradient, rules::Adding>(engine);
}

}  // namespace tercet::targets
