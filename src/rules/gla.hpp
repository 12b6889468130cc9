// S_t = diag(D_t) S_{t-1} + k_t v_t'; o_t = scale S_t' q_t
// Known as: gated linear attention (arXiv 2312.06635), HGRN2.
#ifndef TERCET_SRC_RULES_GLA_HPP_
#define TERCET_SRC_RULES_GLA_HPP_

#include <string_view>

#include "src/rules/axes.hpp"
#include "tercet/tercet.hpp"

namespace tercet::rules {

struct Gla {
  static constexpr Rule kRule = Rule::kGla;
  static constexpr std::string_view kName = "gla";
  static constexpr Decay kDecay = Decay::kPerChannel;
  static constexpr Update kUpdate = Update::kAdd;
  static constexpr bool kDefaultScaleIsOne = false;
  static constexpr std::string_view kEquation = "S_t = diag(D_t) S_{t-1} + k_t v_t'; o_t = scale S_t' q_t";
  static constexpr std::string_view kAlsoKnownAs = "gated linear attention (arXiv 2312.06635), HGRN2";
};

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_GLA_HPP_
