// Gradients: a layer is asked to give a target, and its keys and values follow the gradient of the squared error until it does so better.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <tercet/tercet.hpp>

int main() {
  const int64_t tokens = 100, heads = 2, key_dim = 16, value_dim = 8;
  std::vector<float> q(tokens * heads * key_dim), k(q.size()), v(tokens * heads * value_dim), target(v.size());
  std::vector<float> log_decay(tokens * heads, -0.05f);
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.7f * static_cast<float>(i)), k[i] = std::cos(1.3f * static_cast<float>(i));
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sin(2.1f * static_cast<float>(i)), target[i] = std::cos(0.3f * static_cast<float>(i));
  std::vector<float> out(v.size()), d_out(v.size()), d_k(k.size()), d_v(v.size());

  tercet::Options options;
  options.rule = tercet::Rule::kSimpleGla;
  tercet::Inputs inputs;
  inputs.q = tercet::View(q.data(), {1, tokens, heads, key_dim});
  inputs.k = tercet::View(k.data(), {1, tokens, heads, key_dim});
  inputs.v = tercet::View(v.data(), {1, tokens, heads, value_dim});
  inputs.log_decay = tercet::View(log_decay.data(), {1, tokens, heads});
  tercet::Outputs outputs;
  outputs.out = tercet::View(out.data(), {1, tokens, heads, value_dim});
  tercet::OutputGradients given;
  given.out = tercet::View(d_out.data(), {1, tokens, heads, value_dim});
  tercet::Gradients wanted;
  wanted.k = tercet::View(d_k.data(), {1, tokens, heads, key_dim});
  wanted.v = tercet::View(d_v.data(), {1, tokens, heads, value_dim});

  int64_t bytes = 0;
  tercet::Status status = tercet::SavedBytes(options, inputs, &bytes);
  std::vector<std::byte> saved(static_cast<size_t>(bytes));
  outputs.saved = given.saved = {saved.data(), bytes};

  double first = 0, last = 0;
  for (int step = 0; step < 50 && status.ok(); ++step) {
    status = tercet::Attend(options, inputs, outputs);
    last = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      d_out[i] = out[i] - target[i];
      last += 0.5 * static_cast<double>(d_out[i]) * static_cast<double>(d_out[i]);
    }
    if (step == 0) first = last;
    if (status.ok()) status = tercet::AttendGradient(options, inputs, given, wanted);
    for (size_t i = 0; i < k.size(); ++i) k[i] -= 0.02f * d_k[i];
    for (size_t i = 0; i < v.size(); ++i) v[i] -= 0.02f * d_v[i];
  }
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message.c_str());
    return 1;
  }
  std::printf("half the squared error: %.1f at first, %.1f after 50 steps\n", first, last);
  return last < first / 2 ? 0 : 1;
}
