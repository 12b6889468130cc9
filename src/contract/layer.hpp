// What a call may be. `Validate` looks at everything a caller can get wrong and says it in a sentence; behind it nothing is checked again.
#ifndef TERCET_SRC_CONTRACT_LAYER_HPP_
#define TERCET_SRC_CONTRACT_LAYER_HPP_

#include <cstdint>

#include "src/rules/all.hpp"
#include "tercet/tercet.hpp"

namespace tercet::contract {

// The dtype of accumulators, states and key sums beside a q of that dtype.
constexpr Dtype StateDtype(Dtype dtype) { return dtype == Dtype::kF64 ? Dtype::kF64 : Dtype::kF32; }

// A call that has been checked: its sizes, and its options with every default filled in.
struct Layer {
  Rule rule = Rule::kLinear;
  rules::Axes axes;
  FeatureMap feature_map = FeatureMap::kIdentity;
  double scale = 1;  // 1 under normalize, where it cancels
  double eps = 0;
  bool normalize = false;
  Dtype dtype = Dtype::kF32;  // of q, k, v and out
  int64_t batch = 0, tokens = 0, key_dim = 0, value_dim = 0;
  int64_t q_heads = 0, k_heads = 0, v_heads = 0;
  int64_t state_heads = 0;  // max(k_heads, v_heads)
  int64_t out_heads = 0;    // max(q_heads, state_heads)
  int64_t sequences = 0;    // batch, or the number of packed sequences
  Inputs in;
  Outputs out;

  // Whether accumulators are f64; else they are f32.
  bool f64() const { return dtype == Dtype::kF64; }
  Dtype state_dtype() const { return StateDtype(dtype); }
  // Output heads that read one state head.
  int64_t queries_per_state() const { return out_heads / state_heads; }
};

// The tokens begin .. end - 1 of row `batch`.
struct Sequence {
  int64_t batch, begin, end;
};
Sequence SequenceAt(const Layer& layer, int64_t n);
// Its tokens; 0 where there is no sequence.
int64_t LongestSequence(const Layer& layer);

// The head of a tensor that has `heads` of them which a state head (of `state_heads`) reads; likewise q's for an output head.
inline int64_t GroupedHead(int64_t head, int64_t heads, int64_t state_heads) { return head / (state_heads / heads); }

// Fills `layer`, or says what is wrong. `outputs` may be null: then only the inputs are looked at.
Status Validate(const Options& options, const Inputs& inputs, const Outputs* outputs, Layer* layer);

// A call for gradients that has been checked. Its `out` is empty: the outputs themselves are neither given nor wanted.
struct GradientLayer : Layer {
  OutputGradients given;
  Gradients wanted;
};

// Fills `layer`, or says what is wrong.
Status ValidateGradient(const Options& options, const Inputs& inputs, const OutputGradients& given, const Gradients& wanted, GradientLayer* layer);

}  // namespace tercet::contract

#endif  // TERCET_SRC_CONTRACT_LAYER_HPP_
