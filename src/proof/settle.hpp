// What a verdict is about, once its options and inputs have been checked.
#ifndef TERCET_SRC_PROOF_SETTLE_HPP_
#define TERCET_SRC_PROOF_SETTLE_HPP_

#include <string>

#include "src/contract/layer.hpp"
#include "src/proof/verify.hpp"

namespace tercet::proof {

struct Settled {
  contract::Layer layer;
  Options attend;                             // with the chunk chosen
  std::string target;                         // that the forms are computed on
  Operands operands = Operands::kNotRounded;  // of its products over spans of tokens
};

// Refuses what Attend would refuse, and what there would be nothing to see of or no means to judge.
Status Settle(const VerifyOptions& options, const Inputs& inputs, Settled* settled);

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_SETTLE_HPP_
