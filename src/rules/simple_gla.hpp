// S_t = D_t S_{t-1} + k_t v_t'; o_t = scale S_t' q_t
// Known as: Mamba-2 SSD (arXiv 2405.21060): q = C, k = B, v = dt x, log_decay = dt A, scale 1.
#ifndef TERCET_SRC_RULES_SIMPLE_GLA_HPP_
#define TERCET_SRC_RULES_SIMPLE_GLA_HPP_

#include <string_view>

#include "src/rules/axes.hpp"
#include "tercet/tercet.hpp"

namespace tercet::rules {

struct SimpleGla {
  static constexpr Rule kRule = Rule::kSimpleGla;
  static constexpr std::string_view kName = "simple_gla";
  static constexpr Decay kDecay = Decay::kPerStep;
  static constexpr Update kUpdate = Update::kAdd;
  static constexpr bool kDefaultScaleIsOne = false;
  static constexpr std::string_view kEquation = "S_t = D_t S_{t-1} + k_t v_t'; o_t = scale S_t' q_t";
  static constexpr std::string_view kAlsoKnownAs = "Mamba-2 SSD (arXiv 2405.21060): q = C, k = B, v = dt x, log_decay = dt A, scale 1";
};

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_SIMPLE_GLA_HPP_
