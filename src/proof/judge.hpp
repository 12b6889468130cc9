// The second half of the proof: answers in floating point, each held against a more precise reference and against what rounding alone does to it.
#ifndef TERCET_SRC_PROOF_JUDGE_HPP_
#define TERCET_SRC_PROOF_JUDGE_HPP_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "src/contract/layer.hpp"
#include "src/proof/verify.hpp"
#include "src/proof/workers.hpp"

namespace tercet::proof {

// The multiple of the noise within which an answer is that of the same function. docs/proof.md has the sweep it comes from.
inline constexpr double kLimit = 6;

// One form's answers, or somebody else's. Each tensor may be missing.
struct Candidate {
  std::string form;
  ConstTensor out, final_state, final_key_sum;
  int64_t span = 1;                           // tokens whose writes the form sums up before it looks at the state again
  double tolerance = 0;                       // beside rounding, relative to the largest number of each tensor
  Operands operands = Operands::kNotRounded;  // of its products
};

// Fills in a judgement a candidate. `draws` is the least number of noisy runs: a small layer, whose noise is that of few numbers, gets more, up to
// 64, as long as they cost nothing. `progress` gets fractions from 0 to 1.
Status JudgeCandidates(const contract::Layer& layer, const std::vector<Candidate>& candidates, int draws, uint64_t seed, const Workers& workers,
                       const std::function<void(double)>& progress, std::vector<Judgement>* judgements);

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_JUDGE_HPP_
