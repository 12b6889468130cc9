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
  using std::exp, std::sqrt;
  T norm = static_cast<T>(eps);
  for (int64_t c = 0; map == FeatureMap::kL2Norm && c < K; ++c) norm = norm + x[c] * x[c];
  if (map == FeatureMap::kL2Norm) norm = sqrt(norm);
  for (int64_t c = 0; c < K; ++c) {
    switch (map) {
      case FeatureMap::kIdentity:
        break;
      case FeatureMap::kEluPlusOne:
        x[c] = x[c] <= T(0) ? exp(x[c]) : x[c] + T(1);
        break;
      case FeatureMap::kRelu:
        x[c] = x[c] <= T(0) ? T(0) : x[c];
        break;
      case FeatureMap::kL2Norm:
        x[c] = norm == T(0) ? T(0) : x[c] / norm;
        break;
    }
  }
}

// From d, the gradient to the K mapped features of x, the gradient to x, in its place. With y = phi(x):
//
//   elu_plus_one  d min(1, exp(x))     relu  d where x > 0, else 0     l2_norm  (d - y (y'd)) / sqrt(sum x^2 + eps), and 0 where that root is 0
template <class T>
void MapGradient(FeatureMap map, double eps, int64_t K, const T* x, T* d) {
  using std::exp, std::sqrt;
  T norm = static_cast<T>(eps), along = T(0);
  if (map == FeatureMap::kL2Norm) {
    for (int64_t c = 0; c < K; ++c) norm = norm + x[c] * x[c];
    norm = sqrt(norm);
    for (int64_t c = 0; !(norm == T(0)) && c < K; ++c) along = along + x[c] / norm * d[c];
  }
  for (int64_t c = 0; c < K; ++c) {
    switch (map) {
      case FeatureMap::kIdentity:
        break;
      case FeatureMap::kEluPlusOne:
        if (x[c] <= T(0)) d[c] = d[c] * exp(x[c]);
        break;
      case FeatureMap::kRelu:
        if (x[c] <= T(0)) d[c] = T(0);
        break;
      case FeatureMap::kL2Norm:
        d[c] = norm == T(0) ? T(0) : (d[c] - x[c] / norm * along) / norm;
        break;
    }
  }
}

// State head s of sequence number `number`, whose valid tokens are `tokens`, as given: q and k before the feature map, and in the place of decay
// factors their logarithms, 0 where the rule has no decay.
template <class T>
reference::Head<T> GivenHead(const contract::Layer& layer, int64_t number, const std::vector<int64_t>& tokens, int64_t s) {
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
  // Appends the `size` channels of one head of [B, T, H, channels] (or of [B, T, H]: one, as often) for each token.
  const auto append = [&](const ConstTensor& t, int64_t at_head, int64_t size, std::vector<T>* to) {
    for (const int64_t token : tokens)
      for (int64_t c = 0; c < size; ++c)
        to->push_back(static_cast<T>(contract::ReadDouble(t, contract::Offset(t, sequence.batch, token, at_head, t.rank > 3 ? c : 0))));
  };

  h.q.reserve(h.G * h.n * K);
  for (int64_t g = 0; g < h.G; ++g) append(in.q, contract::GroupedHead(s * h.G + g, layer.q_heads, layer.out_heads), K, &h.q);
  append(in.k, head(in.k, 2), K, &h.k);
  append(in.v, head(in.v, 2), V, &h.v);
  if (layer.axes.decay == Decay::kNone) {
    h.D.assign(h.n * K, T(0));
  } else if (layer.axes.decay == Decay::kPerHead) {
    h.D.assign(h.n * K, static_cast<T>(contract::ReadDouble(in.log_decay, contract::Offset(in.log_decay, head(in.log_decay, 0)))));
  } else {
    append(in.log_decay, head(in.log_decay, 2), K, &h.D);
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

// A head as given, made what the reference forms take: features mapped, and logarithms made factors, in T.
template <class T>
void MapHead(const contract::Layer& layer, reference::Head<T>* h) {
  using std::exp;
  for (std::vector<T>* features : {&h->q, &h->k})
    for (size_t row = 0; row < features->size(); row += h->K) MapFeatures(layer.feature_map, layer.eps, h->K, features->data() + row);
  for (T& D : h->D) D = exp(D);
}

// The same head for the reference forms. Inputs are taken as given; features and decay factors are computed in T.
template <class T>
reference::Head<T> HeadOf(const contract::Layer& layer, int64_t number, const std::vector<int64_t>& tokens, int64_t s) {
  reference::Head<T> h = GivenHead<T>(layer, number, tokens, s);
  MapHead(layer, &h);
  return h;
}

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_HEADS_HPP_
