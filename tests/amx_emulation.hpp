// The tile registers of Intel AMX in plain code, so that what runs on them is tested on machines without: the target AMX_EMULATED, for tests alone.
#ifndef TERCET_TESTS_AMX_EMULATION_HPP_
#define TERCET_TESTS_AMX_EMULATION_HPP_

#include "src/targets/targets.hpp"

namespace tercet::test {

// The target, or nothing where the machine has no AVX-512.
const targets::Target* EmulatedAmxTarget();

// Offers it, once. To be called before anything asks for the targets.
void OfferEmulatedAmx();

// How often tiles were used that were not configured.
int EmulatedAmxFaults();

}  // namespace tercet::test

#endif  // TERCET_TESTS_AMX_EMULATION_HPP_
