// Six numbers a tensor through the linear rule, against an answer worked by hand: with one head and K = V = 1, o_t = q_t (k_1 v_1 + ... + k_t v_t).
#include <cstdio>

#include "tercet/tercet.hpp"

int main() {
  const float q[6] = {1, 2, 3, 4, 5, 6}, k[6] = {1, 0, 2, 1, -1, 3}, v[6] = {2, 5, 1, -3, 4, 1};
  const float expected[6] = {2, 4, 12, 4, -15, 0};
  for (const tercet::Form form : {tercet::Form::kParallel, tercet::Form::kRecurrent, tercet::Form::kChunkwise, tercet::Form::kAutomatic}) {
    float out[6] = {};
    tercet::Options options;
    options.rule = tercet::Rule::kLinear;
    options.form = form;
    options.scale = 1;
    tercet::Inputs inputs;
    inputs.q = tercet::View(q, {1, 6, 1, 1});
    inputs.k = tercet::View(k, {1, 6, 1, 1});
    inputs.v = tercet::View(v, {1, 6, 1, 1});
    tercet::Outputs outputs;
    outputs.out = tercet::View(out, {1, 6, 1, 1});
    const tercet::Status status = tercet::Attend(options, inputs, outputs);
    if (!status.ok()) {
      std::printf("refused: %s\n", status.message.c_str());
      return 1;
    }
    for (int t = 0; t < 6; ++t) {
      if (out[t] != expected[t]) {
        std::printf("token %d is %g, not %g\n", t, static_cast<double>(out[t]), static_cast<double>(expected[t]));
        return 1;
      }
    }
  }
  std::printf("tercet %s: right\n", tercet::Version().data());
  return 0;
}
