// The verdict on gradients: are those that the recurrent and the chunkwise form give the gradients of the layer? Two halves again; docs/proof.md.
#ifndef TERCET_SRC_PROOF_VERIFY_GRADIENT_HPP_
#define TERCET_SRC_PROOF_VERIFY_GRADIENT_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "src/proof/verify.hpp"
#include "tercet/tercet.hpp"

namespace tercet::proof {

// The first half: reverse accumulation as the reference has it against dual numbers through the recurrent reference form, in the field of 2^61 - 1.
struct GradientAlgebra {
  int64_t tokens = 0, key_dim = 0, value_dim = 0;  // the size it ran at: the layer's own, or less where that would take long
  bool whole = true;                               // the size is the layer's own
  int draws = 0;
  int64_t degree = 0;       // of the polynomial whose being zero is tested, at most
  double log2_failure = 0;  // log2 of the probability that a wrong formula passes: draws * log2(degree / 2^61)
  int64_t compared = 0;     // numbers of gradients that a draw weighs up against one derivative
  bool same = false;
};

struct GradientVerdict {
  GradientAlgebra algebra;
  std::vector<Judgement> judgements;  // every gradient of the recurrent and then of the chunkwise form
  double limit = 0;                   // the multiple of the noise within which gradients are the same
  std::string target;
  int64_t chunk = 0;  // of the chunkwise form
  bool same() const;  // both halves, every form and gradient
};

// Computes the gradients of the layer, for random ones of its outputs, and judges them: of both forms, or of the one that options.attend.form names.
// A plant puts its error into the reference's gradients, which then stand in the place of the chunkwise form's. Refuses what AttendGradient and, of
// the rest, Verify would refuse, and an error in a form that is not judged.
Status VerifyGradient(const VerifyOptions& options, const Inputs& inputs, GradientVerdict* verdict);

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_VERIFY_GRADIENT_HPP_
