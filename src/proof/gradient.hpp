// The gradients of a whole call, by the reference: what those of the library are held against.
#ifndef TERCET_SRC_PROOF_GRADIENT_HPP_
#define TERCET_SRC_PROOF_GRADIENT_HPP_

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/proof/heads.hpp"
#include "src/reference/gradient.hpp"
#include "tercet/tercet.hpp"

namespace tercet::proof {

// What `Gradients` has, dense and row-major in T: each of the shape of its input, empty where the rule takes none. Those of the initial state and,
// with `normalize`, key sum are there whether these were given or not.
template <class T>
struct InputGradients {
  std::vector<T> q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum;
  T scale = T(0);
};

template <class T>
struct Flat {
  T* data;
  int64_t count;
};
// All of them, the last one the scale's one number.
inline constexpr int kGradients = 11;
inline constexpr const char* kGradientNames[kGradients] = {
    "q", "k", "v", "log_decay", "beta", "remove", "write", "bonus", "initial_state", "initial_key_sum", "scale"};
template <class T>
std::array<Flat<T>, kGradients> FlatOf(InputGradients<T>& a) {
  const auto of = [](std::vector<T>& x) { return Flat<T>{x.data(), static_cast<int64_t>(x.size())}; };
  return {of(a.q),
          of(a.k),
          of(a.v),
          of(a.log_decay),
          of(a.beta),
          of(a.remove),
          of(a.write),
          of(a.bonus),
          of(a.initial_state),
          of(a.initial_key_sum),
          Flat<T>{&a.scale, 1}};
}

template <class T>
InputGradients<T> ZeroGradients(const contract::Layer& layer) {
  const Inputs& in = layer.in;
  const auto zeros = [](const ConstTensor& t) { return std::vector<T>(t.given() ? contract::Count(t) : 0, T(0)); };
  const int64_t states = layer.sequences * layer.state_heads;
  InputGradients<T> a;
  a.q = zeros(in.q);
  a.k = zeros(in.k);
  a.v = zeros(in.v);
  a.log_decay = zeros(in.log_decay);
  a.beta = zeros(in.beta);
  a.remove = zeros(in.remove);
  a.write = zeros(in.write);
  a.bonus = zeros(in.bonus);
  a.initial_state.assign(states * layer.key_dim * layer.value_dim, T(0));
  a.initial_key_sum.assign(layer.normalize ? states * layer.key_dim : 0, T(0));
  return a;
}

// The gradients that reach the answer of state head s of sequence number `number`, whose valid tokens are `tokens`.
template <class T>
reference::Answer<T> GivenGradient(const contract::Layer& layer, const OutputGradients& given, int64_t number, const std::vector<int64_t>& tokens,
                                   int64_t s) {
  const int64_t batch = contract::SequenceAt(layer, number).batch, K = layer.key_dim, V = layer.value_dim, G = layer.queries_per_state();
  const auto read = [](const ConstTensor& t, int64_t i, int64_t j, int64_t k, int64_t l) {
    return t.given() ? static_cast<T>(contract::ReadDouble(t, contract::Offset(t, i, j, k, l))) : T(0);
  };
  reference::Answer<T> d;
  for (int64_t g = 0; g < G; ++g)
    for (const int64_t token : tokens)
      for (int64_t e = 0; e < V; ++e) d.out.push_back(read(given.out, batch, token, s * G + g, e));
  for (int64_t i = 0; i < K * V; ++i) d.state.push_back(read(given.final_state, number, s, i / V, i % V));
  for (int64_t c = 0; layer.normalize && c < K; ++c) d.z.push_back(read(given.final_key_sum, number, s, c, 0));
  return d;
}

// Adds what one state head of one sequence contributes, by differentiate(head, the gradients of its answer). Heads of a group write to the same
// numbers.
template <class T, class Differentiate>
void AddGradient(const contract::Layer& layer, const OutputGradients& given, int64_t number, int64_t s, const Differentiate& differentiate,
                 InputGradients<T>* sum) {
  const contract::Sequence sequence = contract::SequenceAt(layer, number);
  const std::vector<int64_t> tokens = ValidTokens(layer, sequence);
  const reference::Head<T> raw = GivenHead<T>(layer, number, tokens, s);
  reference::Head<T> h = raw;
  MapHead(layer, &h);
  reference::Gradient<T> d = differentiate(h, GivenGradient<T>(layer, given, number, tokens, s));
  const int64_t n = h.n, K = h.K, V = h.V, G = h.G;
  for (int64_t row = 0; row < G * n; ++row) MapGradient(layer.feature_map, layer.eps, K, raw.q.data() + row * K, d.q.data() + row * K);
  for (int64_t row = 0; row < n; ++row) MapGradient(layer.feature_map, layer.eps, K, raw.k.data() + row * K, d.k.data() + row * K);

  const Inputs& in = layer.in;
  const auto head = [&](const ConstTensor& t, int axis) { return contract::GroupedHead(s, t.shape[axis], layer.state_heads); };
  // Adds `size` numbers a token to a head of an input [B, T, H, channels]; of [B, T, H] they are all to one number.
  const auto add = [&](const T* from, int64_t size, const ConstTensor& t, int64_t at_head, std::vector<T>* to) {
    const int64_t channels = t.rank > 3 ? t.shape[3] : 1;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < size; ++c) {
        T& x = (*to)[((sequence.batch * layer.tokens + tokens[i]) * t.shape[2] + at_head) * channels + (channels > 1 ? c : 0)];
        x = x + from[i * size + c];
      }
  };
  for (int64_t g = 0; g < G; ++g) add(d.q.data() + g * n * K, K, in.q, contract::GroupedHead(s * G + g, layer.q_heads, layer.out_heads), &sum->q);
  add(d.k.data(), K, in.k, head(in.k, 2), &sum->k);
  add(d.v.data(), V, in.v, head(in.v, 2), &sum->v);
  if (layer.axes.decay == Decay::kPerHead)
    for (const T& x : d.log_decay) sum->log_decay[head(in.log_decay, 0)] = sum->log_decay[head(in.log_decay, 0)] + x;
  else if (layer.axes.decay != Decay::kNone)
    add(d.log_decay.data(), K, in.log_decay, head(in.log_decay, 2), &sum->log_decay);
  if (in.beta.given()) add(d.beta.data(), 1, in.beta, head(in.beta, 2), &sum->beta);
  if (in.remove.given()) add(d.remove.data(), K, in.remove, head(in.remove, 2), &sum->remove);
  if (in.write.given()) add(d.write.data(), K, in.write, head(in.write, 2), &sum->write);
  for (int64_t c = 0; in.bonus.given() && c < K; ++c) {
    T& x = sum->bonus[head(in.bonus, 0) * K + c];
    x = x + d.bonus[c];
  }
  const int64_t state = number * layer.state_heads + s;
  std::copy(d.S0.begin(), d.S0.end(), sum->initial_state.data() + state * K * V);
  if (layer.normalize) std::copy(d.z0.begin(), d.z0.end(), sum->initial_key_sum.data() + state * K);
  sum->scale = sum->scale + d.scale;
}

// The gradients of a call that has been checked. `given` has the shapes of the outputs, which nobody looks at again.
template <class T, class Differentiate>
InputGradients<T> GradientsOf(const contract::Layer& layer, const OutputGradients& given, const Differentiate& differentiate) {
  InputGradients<T> sum = ZeroGradients<T>(layer);
  for (int64_t number = 0; number < layer.sequences; ++number)
    for (int64_t s = 0; s < layer.state_heads; ++s) AddGradient(layer, given, number, s, differentiate, &sum);
  return sum;
}
template <class T>
InputGradients<T> GradientsOf(const contract::Layer& layer, const OutputGradients& given) {
  return GradientsOf<T>(layer, given, [](const reference::Head<T>& h, const reference::Answer<T>& d) { return reference::GradientOf(h, d); });
}

// The same of a call that has not. Refuses what Attend would refuse of its options and inputs.
template <class T>
Status GradientsOf(const Options& options, const Inputs& inputs, const OutputGradients& given, InputGradients<T>* gradients) {
  contract::Layer layer;
  if (Status status = contract::Validate(options, inputs, nullptr, &layer); !status.ok()) return status;
  *gradients = GradientsOf<T>(layer, given);
  return {};
}

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_GRADIENT_HPP_
