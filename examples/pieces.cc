// A sequence that does not fit, or is not there yet, in pieces: each call starts from the state that the call before has left.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <tercet/tercet.hpp>

namespace {

constexpr int64_t kTokens = 300, kKeyDim = 16, kValueDim = 8;

struct Sequence {
  std::vector<double> q, k, v, log_decay;
};

// Tokens begin ... end - 1 of the sequence, one head, through a rule with one decay a token. `state` is read and then written.
tercet::Status Piece(const Sequence& sequence, int64_t begin, int64_t end, std::vector<double>& state, std::vector<double>& out) {
  const int64_t n = end - begin;
  tercet::Options options;
  options.rule = tercet::Rule::kSimpleGla;
  tercet::Inputs inputs;
  inputs.q = tercet::View(sequence.q.data() + begin * kKeyDim, {1, n, 1, kKeyDim});
  inputs.k = tercet::View(sequence.k.data() + begin * kKeyDim, {1, n, 1, kKeyDim});
  inputs.v = tercet::View(sequence.v.data() + begin * kValueDim, {1, n, 1, kValueDim});
  inputs.log_decay = tercet::View(sequence.log_decay.data() + begin, {1, n, 1});
  tercet::Outputs outputs;
  outputs.out = tercet::View(out.data() + begin * kValueDim, {1, n, 1, kValueDim});
  outputs.final_state = tercet::View(state.data(), {1, 1, kKeyDim, kValueDim});
  inputs.initial_state = outputs.final_state;  // the same memory: updated in place
  return tercet::Attend(options, inputs, outputs);
}

}  // namespace

int main() {
  Sequence sequence;
  for (int64_t i = 0; i < kTokens * kKeyDim; ++i) sequence.q.push_back(std::sin(0.7 * static_cast<double>(i)));
  for (int64_t i = 0; i < kTokens * kKeyDim; ++i) sequence.k.push_back(std::cos(1.3 * static_cast<double>(i)));
  for (int64_t i = 0; i < kTokens * kValueDim; ++i) sequence.v.push_back(std::sin(2.1 * static_cast<double>(i)));
  for (int64_t i = 0; i < kTokens; ++i) sequence.log_decay.push_back(-0.02 * static_cast<double>(1 + i % 5));

  std::vector<double> whole(kTokens * kValueDim), pieces(whole.size());
  std::vector<double> state(kKeyDim * kValueDim, 0.0);
  tercet::Status status = Piece(sequence, 0, kTokens, state, whole);
  std::fill(state.begin(), state.end(), 0.0);
  for (int64_t begin = 0; status.ok() && begin < kTokens; begin += 77) {
    status = Piece(sequence, begin, std::min<int64_t>(begin + 77, kTokens), state, pieces);
  }
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message.c_str());
    return 1;
  }

  double largest = 0;
  for (size_t i = 0; i < whole.size(); ++i) largest = std::max(largest, std::abs(whole[i] - pieces[i]));
  std::printf("largest difference between one call and pieces of 77 tokens: %g\n", largest);
  return largest < 1e-12 ? 0 : 1;
}
