#include <cstdint>
#include <cstdio>
#include <vector>

#include <tercet/tercet.hpp>

int main() {
  const int64_t batch = 1, tokens = 1000, heads = 4, key_dim = 64, value_dim = 32;
  const std::vector<float> q(batch * tokens * heads * key_dim, 0.1f), k(q.size(), 0.05f);
  const std::vector<float> v(batch * tokens * heads * value_dim, 1.0f);
  const std::vector<float> log_decay(batch * tokens * heads, -0.01f), beta(log_decay.size(), 0.5f);
  std::vector<float> out(v.size()), state(batch * heads * key_dim * value_dim);

  tercet::Options options;
  options.rule = tercet::Rule::kGatedDelta;
  tercet::Inputs inputs;
  inputs.q = tercet::View(q.data(), {batch, tokens, heads, key_dim});
  inputs.k = tercet::View(k.data(), {batch, tokens, heads, key_dim});
  inputs.v = tercet::View(v.data(), {batch, tokens, heads, value_dim});
  inputs.log_decay = tercet::View(log_decay.data(), {batch, tokens, heads});
  inputs.beta = tercet::View(beta.data(), {batch, tokens, heads});
  tercet::Outputs outputs;
  outputs.out = tercet::View(out.data(), {batch, tokens, heads, value_dim});
  outputs.final_state = tercet::View(state.data(), {batch, heads, key_dim, value_dim});

  const tercet::Status status = tercet::Attend(options, inputs, outputs);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message.c_str());
    return 1;
  }
  std::printf("the last token's first value: %g\n", static_cast<double>(out[(tokens - 1) * heads * value_dim]));
}
