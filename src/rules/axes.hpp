// The two axes on which a rule is a point: S_t = D_t S_{t-1} + w_t (r_t' S_{t-1}) + k_t u_t'.
#ifndef TERCET_SRC_RULES_AXES_HPP_
#define TERCET_SRC_RULES_AXES_HPP_

namespace tercet {

// How far D reaches: D = 1, one number a head [H], one a token and head [B, T, H], or one a token, head and key channel [B, T, H, K].
enum class Decay { kNone, kPerHead, kPerStep, kPerChannel };

// What is written, and when the state is read.
enum class Update {
  kAdd,            // k v'
  kAddReadBefore,  // k v', after the read: o_t = scale (S_{t-1} + diag(bonus) k_t v_t')' q_t
  kDelta,          // beta k (v - S'k)' with the decayed S: r = D k, w = -beta k, u = beta v
  kRankOne,        // w (r' S)' + k v' with the state before the decay: r = remove, w = write
};

}  // namespace tercet

#endif  // TERCET_SRC_RULES_AXES_HPP_
