#include "tests/amx_emulation.hpp"

#include "src/targets/selection.hpp"
// After the selection.
#include "hwy/highway.h"
#include "hwy/targets.h"

#if defined(__x86_64__) && (HWY_TARGETS & HWY_AVX3)
#include "src/targets/engine_amx-inl.h"
#include "tests/amx_emulation-inl.h"

namespace tercet::test {

const targets::Target* EmulatedAmxTarget() {
  static const forms::Engine engine = targets::MakeEngineOnTiles<EmulatedTiles, HWY_AVX3>();
  static const forms::GradientEngine gradient = targets::MakeGradientEngineOnTiles<EmulatedTiles, HWY_AVX3>();
  static const targets::Target target{"AMX_EMULATED", &targets::RecurrentEngine<HWY_AVX3>(), &engine, &gradient};
  return (hwy::SupportedTargets() & HWY_AVX3) != 0 ? &target : nullptr;
}

int EmulatedAmxFaults() { return EmulatedTiles::faults; }

}  // namespace tercet::test

#else

namespace tercet::test {

const targets::Target* EmulatedAmxTarget() { return nullptr; }
int EmulatedAmxFaults() { return 0; }

}  // namespace tercet::test

#endif

namespace tercet::test {

void OfferEmulatedAmx() {
  static const bool offered = [] {
    if (EmulatedAmxTarget() != nullptr) targets::Offer(*EmulatedAmxTarget());
    return true;
  }();
  static_cast<void>(offered);
}

}  // namespace tercet::test
