// S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}' k_t)'; o_t = scale S_t' q_t
// Known as: DeltaNet (arXiv 2406.06484).
#ifndef TERCET_SRC_RULES_DELTA_HPP_
#define TERCET_SRC_RULES_DELTA_HPP_

#include <string_view>

#include "src/rules/axes.hpp"
#include "tercet/tercet.hpp"

namespace tercet::rules {

struct Delta {
  static constexpr Rule kRule = Rule::kDelta;
  static constexpr std::string_view kName = "delta";
  static constexpr Decay kDecay = Decay::kNone;
  static constexpr Update kUpdate = Update::kDelta;
  static constexpr bool kDefaultScaleIsOne = false;
  static constexpr std::string_view kEquation = "S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}' k_t)'; o_t = scale S_t' q_t";
  static constexpr std::string_view kAlsoKnownAs = "DeltaNet (arXiv 2406.06484)";
};

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_DELTA_HPP_
