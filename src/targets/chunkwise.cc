// The chunkwise engine, once for each target, rule and accumulator type.
#include "src/targets/selection.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/targets/chunkwise.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/forms/chunkwise-inl.h"
#include "src/rules/all.hpp"
#include "src/targets/targets.hpp"

HWY_BEFORE_NAMESPACE();
namespace tercet {
namespace HWY_NAMESPACE {

static forms::Engine MakeChunkwise() {
  forms::Engine engine;
  rules::All::ForEach([&]<class R>(R) {
    constexpr auto kRule = static_cast<size_t>(R::kRule);
    engine.run[0][kRule] = &Chunkwise<R, float>::Run;
    engine.run[1][kRule] = &Chunkwise<R, double>::Run;
    engine.bytes[0][kRule] = &Chunkwise<R, float>::Bytes;
    engine.bytes[1][kRule] = &Chunkwise<R, double>::Bytes;
  });
  engine.panel[0] = Panel<float>();
  engine.panel[1] = Panel<double>();
  return engine;
}

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

namespace tercet::targets {

template <>
const forms::Engine& ChunkwiseEngine<HWY_TARGET>() {
  static const forms::Engine engine = HWY_NAMESPACE::MakeChunkwise();
  return engine;
}

}  // namespace tercet::targets
