// The chunkwise engine, once for each target.
#include "src/targets/selection.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/targets/chunkwise.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/forms/chunkwise-inl.h"
#include "src/targets/engine-inl.h"
#include "src/targets/targets.hpp"

namespace tercet::targets {

template <>
const forms::Engine& ChunkwiseEngine<HWY_TARGET>() {
  static const forms::Engine engine = [] {
    forms::Engine all;
    HWY_NAMESPACE::AddTo<HWY_NAMESPACE::Chunkwise, rules::All>(all);
    return all;
  }();
  return engine;
}

}  // namespace tercet::targets
