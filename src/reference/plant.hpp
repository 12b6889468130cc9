// Errors put into the chunkwise reference form on purpose, to see that a proof sees them.
#ifndef TERCET_SRC_REFERENCE_PLANT_HPP_
#define TERCET_SRC_REFERENCE_PLANT_HPP_

namespace tercet::reference {

enum class Plant {
  kNone,
  kDecay,  // a token's own decay is applied to what it has just written: F(i, j) holds D_j too
  kScale,  // the scale is left out
  kMask,   // the causal mask is off by one: a token does not see itself (rwkv6: sees its own write beside the bonus)
};

}  // namespace tercet::reference

#endif  // TERCET_SRC_REFERENCE_PLANT_HPP_
