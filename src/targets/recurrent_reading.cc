// The recurrent engine of the rules whose update reads the state, once for each target.
#include "src/targets/selection.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/targets/recurrent_reading.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/forms/passes-inl.h"
#include "src/targets/engine-inl.h"
#include "src/targets/targets.hpp"

namespace tercet::targets {

template <>
void AddRecurrentReading<HWY_TARGET>(forms::Engine& engine) {
  HWY_NAMESPACE::AddTo<HWY_NAMESPACE::Passes, rules::Reading>(engine);
}

}  // namespace tercet::targets
