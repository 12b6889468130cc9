// S = D_t S_{t-1}; S_t = S + beta_t k_t (v_t - S' k_t)'; o_t = scale S_t' q_t
// Known as: Gated DeltaNet (arXiv 2412.06464), Qwen3-Next.
#ifndef TERCET_SRC_RULES_GATED_DELTA_HPP_
#define TERCET_SRC_RULES_GATED_DELTA_HPP_

#include <string_view>

#include "src/rules/axes.hpp"
#include "tercet/tercet.hpp"

namespace tercet::rules {

struct GatedDelta {
  static constexpr Rule kRule = Rule::kGatedDelta;
  static constexpr std::string_view kName = "gated_delta";
  static constexpr Decay kDecay = Decay::kPerStep;
  static constexpr Update kUpdate = Update::kDelta;
  static constexpr bool kDefaultScaleIsOne = false;
  static constexpr std::string_view kEquation = "S = D_t S_{t-1}; S_t = S + beta_t k_t (v_t - S' k_t)'; o_t = scale S_t' q_t";
  static constexpr std::string_view kAlsoKnownAs = "Gated DeltaNet (arXiv 2412.06464), Qwen3-Next";
};

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_GATED_DELTA_HPP_
