// The recurrent engine, once for each target.
#include "src/targets/selection.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/targets/recurrent.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/forms/passes-inl.h"
#include "src/targets/engine-inl.h"
#include "src/targets/targets.hpp"

namespace tercet::targets {

template <>
const forms::Engine& RecurrentEngine<HWY_TARGET>() {
  static const forms::Engine engine = HWY_NAMESPACE::MakeEngine<HWY_NAMESPACE::Passes>();
  return engine;
}

}  // namespace tercet::targets
