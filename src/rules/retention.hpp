// S_t = D S_{t-1} + k_t v_t'; o_t = scale S_t' q_t
// Known as: RetNet (arXiv 2307.08621), lightning attention (arXiv 2401.04658).
#ifndef TERCET_SRC_RULES_RETENTION_HPP_
#define TERCET_SRC_RULES_RETENTION_HPP_

#include <string_view>

#include "src/rules/axes.hpp"
#include "tercet/tercet.hpp"

namespace tercet::rules {

struct Retention {
  static constexpr Rule kRule = Rule::kRetention;
  static constexpr std::string_view kName = "retention";
  static constexpr Decay kDecay = Decay::kPerHead;
  static constexpr Update kUpdate = Update::kAdd;
  static constexpr bool kDefaultScaleIsOne = false;
  static constexpr std::string_view kEquation = "S_t = D S_{t-1} + k_t v_t'; o_t = scale S_t' q_t";
  static constexpr std::string_view kAlsoKnownAs = "RetNet (arXiv 2307.08621), lightning attention (arXiv 2401.04658)";
};

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_RETENTION_HPP_
