// The first half of the proof: the reference forms on random elements of the prime field of 2^61 - 1, where they must be equal.
#ifndef TERCET_SRC_PROOF_ALGEBRA_HPP_
#define TERCET_SRC_PROOF_ALGEBRA_HPP_

#include <cstdint>

#include "src/contract/layer.hpp"
#include "src/proof/verify.hpp"
#include "src/proof/verify_gradient.hpp"

namespace tercet::proof {

// The forms of a head of the layer's rule and size, with `chunk` tokens a chunk and `plant` in the chunkwise one, at `draws` random points.
Algebra ProveInAlgebra(const contract::Layer& layer, int64_t chunk, int draws, uint64_t seed, Plant plant);

// The reference's gradients, with `plant`, against dual numbers through the recurrent form: a random direction's derivative.
GradientAlgebra ProveGradientInAlgebra(const contract::Layer& layer, int draws, uint64_t seed, Plant plant);

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_ALGEBRA_HPP_
