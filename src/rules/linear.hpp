// S_t = S_{t-1} + k_t v_t'; o_t = scale S_t' q_t
// Known as: linear attention (Katharopoulos 2020, arXiv 2006.16236).
#ifndef TERCET_SRC_RULES_LINEAR_HPP_
#define TERCET_SRC_RULES_LINEAR_HPP_

#include <string_view>

#include "src/rules/axes.hpp"
#include "tercet/tercet.hpp"

namespace tercet::rules {

struct Linear {
  static constexpr Rule kRule = Rule::kLinear;
  static constexpr std::string_view kName = "linear";
  static constexpr Decay kDecay = Decay::kNone;
  static constexpr Update kUpdate = Update::kAdd;
  static constexpr bool kDefaultScaleIsOne = false;
  static constexpr std::string_view kEquation = "S_t = S_{t-1} + k_t v_t'; o_t = scale S_t' q_t";
  static constexpr std::string_view kAlsoKnownAs = "linear attention (Katharopoulos 2020, arXiv 2006.16236)";
};

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_LINEAR_HPP_
