// S_t = diag(D_t) S_{t-1} + write_t (remove_t' S_{t-1}) + k_t v_t'; o_t = scale S_t' q_t
// Known as: RWKV-7 Goose (arXiv 2503.14456), DPLR.
#ifndef TERCET_SRC_RULES_RWKV7_HPP_
#define TERCET_SRC_RULES_RWKV7_HPP_

#include <string_view>

#include "src/rules/axes.hpp"
#include "tercet/tercet.hpp"

namespace tercet::rules {

struct Rwkv7 {
  static constexpr Rule kRule = Rule::kRwkv7;
  static constexpr std::string_view kName = "rwkv7";
  static constexpr Decay kDecay = Decay::kPerChannel;
  static constexpr Update kUpdate = Update::kRankOne;
  static constexpr bool kDefaultScaleIsOne = true;
  static constexpr std::string_view kEquation = "S_t = diag(D_t) S_{t-1} + write_t (remove_t' S_{t-1}) + k_t v_t'; o_t = scale S_t' q_t";
  static constexpr std::string_view kAlsoKnownAs = "RWKV-7 Goose (arXiv 2503.14456), DPLR";
};

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_RWKV7_HPP_
