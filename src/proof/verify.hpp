// The verdict: are the parallel, the recurrent and the chunkwise form the same function? Two halves, and neither is a hand-picked tolerance.
// docs/proof.md says why each is sound.
#ifndef TERCET_SRC_PROOF_VERIFY_HPP_
#define TERCET_SRC_PROOF_VERIFY_HPP_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/proof/inputs.hpp"
#include "src/reference/plant.hpp"
#include "tercet/tercet.hpp"

namespace tercet::proof {

// An error put into the chunkwise form on purpose, to see that the proof sees it.
using Plant = reference::Plant;

// To what the operands of products of matrices are rounded before they are multiplied, where that is less than the precision of all else: on Intel
// AMX, and on the tensor cores of GPUs, whose sums are f32.
enum class Operands { kNotRounded, kInBF16, kInF16, kInTF32 };
int DigitsOf(Operands operands);           // of their significands: bf16 8, f16 and tf32 11; 0 where they are not rounded
std::string_view Name(Operands operands);  // "bf16", "f16", "tf32"; "" where they are not rounded
bool Find(std::string_view name, Operands* operands);

struct VerifyOptions {
  Options attend;       // rule, scale, feature map, normalise, chunk (0: the library's choice), executor, target; `form` is ignored
  uint64_t seed = 1;    // of the field elements and of the random roundings
  int field_draws = 3;  // random points of the prime field
  int noise_draws = 8;  // randomly rounded runs of the reference recurrence
  Plant plant = Plant::kNone;
  bool plant_in_algebra = true;
  bool plant_in_floating_point = true;
  double tolerance = 0;  // how exactly the expected answers were written down: relative to each answer's largest magnitude
  Operands expected_operands = Operands::kNotRounded;  // of the products, over chunks of `attend.chunk` tokens, that the expected answers come from
  std::function<void(double fraction, std::string_view doing)> progress;  // may be empty; called from the calling thread, fraction from 0 to 1
};

// Somebody's answers, judged like a fourth form. Each optional.
struct Expected {
  ConstTensor out, final_state, final_key_sum;
};

// The first half: the reference forms on random elements of the field of 2^61 - 1.
struct Algebra {
  int64_t tokens = 0, key_dim = 0, value_dim = 0, chunk = 0;  // the size it ran at: the layer's own, or less where that would take long
  bool whole = true;                                          // the size is the layer's own
  int draws = 0;
  int64_t degree = 0;       // of the polynomials whose identity is tested, at most
  double log2_failure = 0;  // log2 of the probability that forms which differ pass: draws * log2(degree / 2^61)
  int64_t compared = 0;     // elements of out, state and key sum that were compared, a pair of forms
  bool recurrent_is_parallel = false, chunkwise_is_recurrent = false, chunkwise_is_parallel = false;
  bool same() const { return recurrent_is_parallel && chunkwise_is_recurrent && chunkwise_is_parallel; }
};

// The second half: one answer (a form's, or the expected one) against the higher-precision reference.
struct Judgement {
  std::string form;                           // "parallel", "recurrent", "chunkwise", "expected"
  std::string tensor;                         // "out", "final_state", "final_key_sum": where the ratio is worst
  double distance = 0;                        // from the reference, root mean square over the worst group (a head of a sequence)
  double noise = 0;                           // of rounding alone, over the same group
  double ratio = 0;                           // distance / noise
  double largest = 0;                         // largest absolute difference from the reference over all elements of all tensors
  Operands operands = Operands::kNotRounded;  // of its products, which the noise knows of
  bool same = false;                          // ratio <= the limit, and what is not finite is so in both
};

struct Verdict {
  Algebra algebra;
  std::vector<Judgement> judgements;  // parallel, recurrent, chunkwise [, expected]
  double limit = 0;                   // the multiple of the noise within which a form is the same function
  std::string target;
  int64_t chunk = 0;  // of the chunkwise form
  // Largest absolute differences between the forms' outputs and states, for the reader; the verdict does not rest on them.
  double parallel_recurrent = 0, chunkwise_recurrent = 0, chunkwise_parallel = 0;
  // What the forms computed, for the reader.
  Owned out, final_state, final_key_sum;  // of the recurrent form
  bool same() const;                      // both halves, every form, and the expected answers if given
};

// Computes the layer in all three forms and judges them. Refuses what Attend would refuse, and a plant that can change nothing here (no decay in the
// rule, a scale that is 1 or cancels), with the sentence why.
Status Verify(const VerifyOptions& options, const Inputs& inputs, const Expected& expected, Verdict* verdict);

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_VERIFY_HPP_
