// The target AMX: bf16 chunks on the tiles of Intel AMX, the rest as on AVX3.
#include "src/targets/selection.hpp"
// After the selection.
#include "hwy/highway.h"
#include "hwy/targets.h"
#include "src/targets/targets.hpp"

#if defined(__linux__) && defined(__x86_64__) && (HWY_TARGETS & HWY_AVX3)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "src/targets/engine_amx-inl.h"

namespace tercet::targets {

namespace {

// CPUID's word on what the engine uses beside AVX3: AVX512_VBMI, AMX-BF16, AMX-TILE and AVX512_BF16.
bool CpuHasTiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool vbmi = (c >> 1 & 1) != 0, tiles = (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return false;
  return vbmi && tiles && (a >> 5 & 1) != 0;
}

// The kernel keeps tile registers only for a process that has asked (ARCH_REQ_XCOMP_PERM, feature 18), and may refuse.
bool KernelGrantsTiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

}  // namespace

const Target* AmxTarget() {
  static const forms::Engine engine = MakeEngineOnTiles<amx::HardwareTiles, HWY_AVX3>();
  static const forms::GradientEngine gradient = MakeGradientEngineOnTiles<amx::HardwareTiles, HWY_AVX3>();
  static const Target target{"AMX", &RecurrentEngine<HWY_AVX3>(), &engine, &gradient};
  static const bool there = (hwy::SupportedTargets() & HWY_AVX3) != 0 && CpuHasTiles() && KernelGrantsTiles();
  return there ? &target : nullptr;
}

}  // namespace tercet::targets

#else

namespace tercet::targets {

const Target* AmxTarget() { return nullptr; }

}  // namespace tercet::targets

#endif
