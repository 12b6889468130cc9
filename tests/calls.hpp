// Small calls in f64 whose gradients are asked for along a direction, and what the direction says of them by dual numbers, which know no formula of
// any gradient: the reference recurrence runs on inputs that carry their direction with them.
#ifndef TERCET_TESTS_CALLS_HPP_
#define TERCET_TESTS_CALLS_HPP_

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "src/proof/gradient.hpp"
#include "src/reference/dual.hpp"
#include "tests/support.hpp"

namespace tercet::test {

// What a head is given and the gradients to it, in one order.
template <class T>
std::array<std::vector<T>*, 10> Parts(reference::Head<T>& h) {
  return {&h.q, &h.k, &h.v, &h.D, &h.beta, &h.remove, &h.write, &h.bonus, &h.S0, &h.z0};
}
inline constexpr int kD = 3;

// Of two heads, one of values and one of directions. The direction of D is one of log D here if `logarithms` is set.
template <class T>
reference::Head<reference::Dual<T>> Zip(reference::Head<T> values, reference::Head<T> directions, bool logarithms) {
  reference::Head<reference::Dual<T>> h;
  h.update = values.update;
  h.normalize = values.normalize;
  h.n = values.n;
  h.K = values.K;
  h.V = values.V;
  h.G = values.G;
  h.scale = reference::Dual<T>(values.scale, directions.scale);
  for (size_t part = 0; part < Parts(h).size(); ++part) {
    const std::vector<T>&x = *Parts(values)[part], &y = *Parts(directions)[part];
    for (size_t i = 0; i < x.size(); ++i) Parts(h)[part]->push_back(reference::Dual<T>(x[i], part == kD && logarithms ? x[i] * y[i] : y[i]));
  }
  return h;
}

struct Call {
  RandomSpec spec;
  Options options;
  OwnedInputs inputs;
  Owned d_out, d_state, d_key_sum;

  OutputGradients given() const { return {d_out.view(), d_state.view(), d_key_sum.view()}; }
  std::string Text() const {
    return std::string(Name(options.rule)) + " " + std::string(Name(options.feature_map)) + (options.normalize ? " normalised" : "") +
           (spec.offsets.empty() ? " batch" : " packed");
  }
};

inline void Fill(Owned* tensor, uint64_t seed) {
  std::mt19937_64 words(seed);
  for (int64_t i = 0; i < tensor->size(); ++i) tensor->Set(i, static_cast<double>(words() >> 11) * 0x1p-52 - 1);
}

// Fills in inputs, scale and gradients of the outputs.
inline void Draw(Call* call) {
  call->spec.rule = call->options.rule;
  call->spec.feature_map = call->options.feature_map;
  call->spec.normalize = call->options.normalize;
  call->options.check_values = false;  // a log_decay may be moved above 0
  call->inputs = RandomInputs(call->spec);
  const Results room = Room(call->options, call->inputs.view());
  call->d_out = room.out;
  call->d_state = room.final_state;
  call->d_key_sum = room.final_key_sum;
  Fill(&call->d_out, 101);
  Fill(&call->d_state, 102);
  if (call->options.normalize) Fill(&call->d_key_sum, 103);
}

// Every map and, where it can be, the normaliser, with two output heads a state head and shared keys and gates in a batch of two, and with shared
// queries and values, packed sequences of which one is empty, and tokens that are not valid.
template <class Body>
void ForEachCall(Rule rule, Body body) {
  for (const FeatureMap map : {FeatureMap::kIdentity, FeatureMap::kEluPlusOne, FeatureMap::kRelu, FeatureMap::kL2Norm})
    for (const bool normalize : {false, true})
      for (const bool packed : {false, true}) {
        if (normalize && !Info(rule).can_normalize) continue;
        Call call;
        call.options.rule = rule;
        call.options.feature_map = map;
        call.options.normalize = normalize;
        call.options.eps = 0.01;
        if (!normalize) call.options.scale = 0.7;
        call.spec.dtype = Dtype::kF64;
        call.spec.key_dim = 3;
        call.spec.value_dim = 4;
        call.spec.seed = 5;
        if (packed) {
          call.spec.tokens = 13;
          call.spec.offsets = {0, 4, 4, 13};
          call.spec.valid_fraction = 0.7;
          call.spec.q_heads = 2;
          call.spec.k_heads = 4;
          call.spec.v_heads = 2;
          call.spec.gate_heads = 2;
        } else {
          call.spec.batch = 2;
          call.spec.tokens = 6;
          call.spec.q_heads = 4;
          call.spec.k_heads = 1;
          call.spec.v_heads = 2;
          call.spec.gate_heads = 1;
        }
        Draw(&call);
        SCOPED_TRACE(call.Text());
        body(call);
      }
}

// The inputs that have gradients, by name, and these, in one order.
inline std::vector<std::pair<std::string, Owned*>> Parts(OwnedInputs& in) {
  return {{"q", &in.q},
          {"k", &in.k},
          {"v", &in.v},
          {"log_decay", &in.log_decay},
          {"beta", &in.beta},
          {"remove", &in.remove},
          {"write", &in.write},
          {"bonus", &in.bonus},
          {"initial_state", &in.initial_state},
          {"initial_key_sum", &in.initial_key_sum}};
}
template <class T>
std::array<std::vector<T>*, 10> Parts(proof::InputGradients<T>& d) {
  return {&d.q, &d.k, &d.v, &d.log_decay, &d.beta, &d.remove, &d.write, &d.bonus, &d.initial_state, &d.initial_key_sum};
}

// The sum of all numbers of the outputs times their weights, those of invalid tokens too.
inline double Weighted(const Call& call, const Answers& answers) {
  double sum = 0;
  const auto add = [&](const Owned& weights, const std::vector<double>& x) {
    ASSERT_EQ(weights.size(), static_cast<int64_t>(x.size()));
    for (int64_t i = 0; i < weights.size(); ++i) sum += weights.Get(i) * x[i];
  };
  add(call.d_out, answers.out);
  add(call.d_state, answers.final_state);
  add(call.d_key_sum, answers.final_key_sum);
  return sum;
}

// The derivative of sum(d_out out) + sum(d_state state) + sum(d_key_sum key_sum) along a direction, by the reference form on dual numbers.
inline double Derivative(const Call& call, const OwnedInputs& directions, double scale_direction) {
  contract::Layer layer;
  const Inputs inputs = call.inputs.view();
  const Status status = contract::Validate(call.options, inputs, nullptr, &layer);
  EXPECT_TRUE(status.ok()) << status.message;
  contract::Layer along = layer;
  along.in = directions.view();
  along.in.offsets = inputs.offsets;
  along.scale = scale_direction;
  const int64_t V = layer.value_dim, G = layer.queries_per_state();
  double sum = 0;
  for (int64_t number = 0; number < layer.sequences; ++number) {
    const contract::Sequence at = contract::SequenceAt(layer, number);
    const std::vector<int64_t> tokens = proof::ValidTokens(layer, at);
    for (int64_t s = 0; s < layer.state_heads; ++s) {
      reference::Head<reference::Dual<double>> h =
          Zip(proof::GivenHead<double>(layer, number, tokens, s), proof::GivenHead<double>(along, number, tokens, s), false);
      proof::MapHead(layer, &h);
      const reference::Answer<reference::Dual<double>> answer = Recurrent(h);
      for (int64_t g = 0; g < G; ++g)
        for (int64_t i = 0; i < h.n; ++i)
          for (int64_t e = 0; e < V; ++e)
            sum += call.d_out.Get(((at.batch * layer.tokens + tokens[i]) * layer.out_heads + s * G + g) * V + e) *
                   answer.out[(g * h.n + i) * V + e].derivative();
      const int64_t state = number * layer.state_heads + s;
      for (int64_t i = 0; i < h.K * V; ++i) sum += call.d_state.Get(state * h.K * V + i) * answer.state[i].derivative();
      for (int64_t c = 0; h.normalize && c < h.K; ++c) sum += call.d_key_sum.Get(state * h.K + c) * answer.z[c].derivative();
    }
  }
  return sum;
}

inline OwnedInputs Nowhere(OwnedInputs in) {
  for (const auto& [name, part] : Parts(in))
    for (int64_t i = 0; i < part->size(); ++i) part->Set(i, 0);
  return in;
}

struct Sums {
  double sum = 0, magnitudes = 0;  // of gradient times direction, and of what is summed
};
inline Sums Dot(proof::InputGradients<double>* gradients, OwnedInputs* direction, size_t part) {
  Sums sums;
  const Owned& y = *Parts(*direction)[part].second;
  const std::vector<double>& x = *Parts(*gradients)[part];
  EXPECT_TRUE(y.size() == 0 || y.size() == static_cast<int64_t>(x.size()));
  for (int64_t i = 0; i < y.size(); ++i) {
    sums.sum += x[i] * y.Get(i);
    sums.magnitudes += std::abs(x[i] * y.Get(i));
  }
  return sums;
}

}  // namespace tercet::test

#endif  // TERCET_TESTS_CALLS_HPP_
