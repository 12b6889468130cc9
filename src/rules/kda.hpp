// S = diag(D_t) S_{t-1}; S_t = S + beta_t k_t (v_t - S' k_t)'; o_t = scale S_t' q_t
// Known as: Kimi Delta Attention (arXiv 2510.26692).
#ifndef TERCET_SRC_RULES_KDA_HPP_
#define TERCET_SRC_RULES_KDA_HPP_

#include <string_view>

#include "src/rules/axes.hpp"
#include "tercet/tercet.hpp"

namespace tercet::rules {

struct Kda {
  static constexpr Rule kRule = Rule::kKda;
  static constexpr std::string_view kName = "kda";
  static constexpr Decay kDecay = Decay::kPerChannel;
  static constexpr Update kUpdate = Update::kDelta;
  static constexpr bool kDefaultScaleIsOne = false;
  static constexpr std::string_view kEquation = "S = diag(D_t) S_{t-1}; S_t = S + beta_t k_t (v_t - S' k_t)'; o_t = scale S_t' q_t";
  static constexpr std::string_view kAlsoKnownAs = "Kimi Delta Attention (arXiv 2510.26692)";
};

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_KDA_HPP_
