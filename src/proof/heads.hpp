// From a checked call to what the reference forms take: one state head of one sequence, with dtypes, strides, head groups, feature maps and
// logarithms resolved and the tokens that are not valid left out.
#ifndef TERCET_SRC_PROOF_HEADS_HPP_
#define TERCET_SRC_PROOF_HEADS_HPP_

#include <cmath>
#include <cstdint>
#include <vector>

#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/reference/head.hpp"

namespace tercet::proof {

// The valid tokens of a sequence, in order.
inline std::vector<int64_t> ValidTokens(const contract::Layer& layer, const contract::Sequence& sequence) {
  const ConstTensor& valid = layer.in.valid;
  std::vector<int64_t> tokens;
  for (int64_t t = sequence.begin; t < sequence.end; ++t)
    if (!valid.given() || contract::ReadInteger(valid, contract::Offset(valid, sequence.batch, t)) != 0) tokens.push_back(t);
  return tokens;
}

// Maps K features in place. What is not a number stays none.
template <class T>
void MapFeatures(FeatureMap map, double eps, int64_t K, T* x) {
  T squares = static_cast<T>(eps);
  if (map == FeatureMap::kL2Norm)
    for (int64_t c = 0; c < K; ++c) squares += x[c] * x[c];
  const T norm = std::sqrt(squares);
  for (int64_t c = 0; c < K; ++c) {
    switch (map) {
      case FeatureMap::kIdentity:
        break;
      case FeatureMap::kEluPlusOne:
        x[c] = x[c] > 0 ? x[c] + 1 : std::exp(x[c]);
        break;
      case FeatureMap::kRelu:
        x[c] = x[c] < 0 ? 0 : x[c];
        break;
      case FeatureMap::kL2Norm:
        x[c] /= norm;
        break;
    }
  }
}

// State head s of sequence number `number`, whose valid tokens are `tokens`. Inputs are taken as given; features and decay factors are computed in T.
template <class T>
reference::Head<T> HeadOf(const contract::Layer& layer, int64_t number, const std::vector<int64_t>& tokens, int64_t s) {
  const contract::Sequence sequence = contract::SequenceAt(layer, number);
  const Inputs& in = layer.in;
  reference::Head<T> h;
  h.update = layer.axes.update;
  h.normalize = layer.normalize;
  h.n = static_cast<int64_t>(tokens.size());
  h.K = layer.key_dim;
  h.V = layer.value_dim;
  h.G = layer.queries_per_state();
  h.scale = static_cast<T>(layer.scale);
  const int64_t K = h.K, V = h.V;
  const auto head = [&](const ConstTensor& t, int axis) { return contract::GroupedHead(s, t.shape[axis], layer.state_heads); };
  // Appends the `size` channels of one head of [B, T, H, channels] (or of [B, T, H]: one) for each token.
  const auto append = [&](const ConstTensor& t, int64_t at_head, int64_t size, std::vector<T>* to) {
    for (const int64_t token : tokens)
      for (int64_t c = 0; c < size; ++c)
        to->push_back(static_cast<T>(contract::ReadDouble(t, contract::Offset(t, sequence.batch, token, at_head, t.rank > 3 ? c : 0))));
  };

  h.q.reserve(h.G * h.n * K);
  for (int64_t g = 0; g < h.G; ++g) append(in.q, contract::GroupedHead(s * h.G + g, layer.q_heads, layer.out_heads), K, &h.q);
  append(in.k, head(in.k, 2), K, &h.k);
  append(in.v, head(in.v, 2), V, &h.v);
  for (std::vector<T>* features : {&h.q, &h.k})
    for (size_t row = 0; row < features->size(); row += K) MapFeatures(layer.feature_map, layer.eps, K, features->data() + row);

  if (layer.axes.decay == Decay::kPerHead) {
    const T D = std::exp(static_cast<T>(contract::ReadDouble(in.log_decay, contract::Offset(in.log_decay, head(in.log_decay, 0)))));
    h.D.assign(h.n * K, D);
  } else if (layer.axes.decay == Decay::kPerStep) {
    std::vector<T> logs;
    append(in.log_decay, head(in.log_decay, 2), 1, &logs);
    for (const T log : logs) h.D.insert(h.D.end(), K, std::exp(log));
  } else if (layer.axes.decay == Decay::kPerChannel) {
    append(in.log_decay, head(in.log_decay, 2), K, &h.D);
    for (T& D : h.D) D = std::exp(D);
  } else {
    h.D.assign(h.n * K, T(1));
  }

  if (in.beta.given()) append(in.beta, head(in.beta, 2), 1, &h.beta);
  if (in.remove.given()) append(in.remove, head(in.remove, 2), K, &h.remove);
  if (in.write.given()) append(in.write, head(in.write, 2), K, &h.write);
  for (int64_t c = 0; in.bonus.given() && c < K; ++c)
    h.bonus.push_back(static_cast<T>(contract::ReadDouble(in.bonus, contract::Offset(in.bonus, head(in.bonus, 0), c))));
  h.S0.assign(K * V, T(0));
  for (int64_t i = 0; in.initial_state.given() && i < K * V; ++i)
    h.S0[i] = static_cast<T>(contract::ReadDouble(in.initial_state, contract::Offset(in.initial_state, number, s, i / V, i % V)));
  if (layer.normalize) h.z0.assign(K, T(0));
  for (int64_t c = 0; in.initial_key_sum.given() && c < K; ++c)
    h.z0[c] = static_cast<T>(contract::ReadDouble(in.initial_key_sum, contract::Offset(in.initial_key_sum, number, s, c)));
  return h;
}

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_HEADS_HPP_
