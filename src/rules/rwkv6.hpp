// o_t = scale (S_{t-1} + diag(bonus) k_t v_t')' q_t; S_t = diag(D_t) S_{t-1} + k_t v_t'
// Known as: RWKV-6 Finch (arXiv 2404.05892); RWKV-5 with a constant decay.
#ifndef TERCET_SRC_RULES_RWKV6_HPP_
#define TERCET_SRC_RULES_RWKV6_HPP_

#include <string_view>

#include "src/rules/axes.hpp"
#include "tercet/tercet.hpp"

namespace tercet::rules {

struct Rwkv6 {
  static constexpr Rule kRule = Rule::kRwkv6;
  static constexpr std::string_view kName = "rwkv6";
  static constexpr Decay kDecay = Decay::kPerChannel;
  static constexpr Update kUpdate = Update::kAddReadBefore;
  static constexpr bool kDefaultScaleIsOne = false;
  static constexpr std::string_view kEquation = "o_t = scale (S_{t-1} + diag(bonus) k_t v_t')' q_t; S_t = diag(D_t) S_{t-1} + k_t v_t'";
  static constexpr std::string_view kAlsoKnownAs = "RWKV-6 Finch (arXiv 2404.05892); RWKV-5 with a constant decay";
};

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_RWKV6_HPP_
