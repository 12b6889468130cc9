// The caller's own threads instead of oneTBB's, memory of the caller's to work in, and the same bits from one thread and from four.
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

#include <tercet/tercet.hpp>

class Threads : public tercet::Executor {
 public:
  explicit Threads(int count) : count_(count) {}
  int Concurrency() const override { return count_; }
  void ParallelFor(int64_t count, const std::function<void(int64_t)>& body) override {
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < count_; ++i) {
      threads.emplace_back([&] {
        for (int64_t piece = next++; piece < count; piece = next++) body(piece);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int count_;
};

int main() {
  const int64_t tokens = 200, heads = 6, dim = 24;
  std::vector<float> qkv;
  for (int64_t i = 0; i < tokens * 3 * heads * dim; ++i) qkv.push_back(static_cast<float>(std::sin(0.37 * static_cast<double>(i))));

  // q, k and v as views into one buffer of [tokens, 3, heads, dim].
  tercet::Inputs inputs;
  inputs.q = tercet::View(qkv.data(), {1, tokens, heads, dim});
  inputs.q.strides = {0, 3 * heads * dim, dim, 1};
  inputs.k = inputs.v = inputs.q;
  inputs.k.data = qkv.data() + heads * dim;
  inputs.v.data = qkv.data() + 2 * heads * dim;

  std::vector<float> outs[2];
  for (int i = 0; i < 2; ++i) {
    Threads threads(i == 0 ? 1 : 4);
    tercet::Options options;
    options.rule = tercet::Rule::kLinear;
    options.executor = &threads;
    outs[i].resize(tokens * heads * dim);
    tercet::Outputs outputs;
    outputs.out = tercet::View(outs[i].data(), {1, tokens, heads, dim});
    int64_t bytes = 0;
    tercet::Status status = tercet::WorkspaceBytes(options, inputs, outputs, &bytes);
    std::vector<std::byte> memory(bytes);
    options.workspace = {memory.data(), bytes};
    if (status.ok()) status = tercet::Attend(options, inputs, outputs);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.message.c_str());
      return 1;
    }
  }
  const bool same = outs[0] == outs[1];
  std::printf("one thread and four give %s\n", same ? "the same bits" : "different numbers");
  return same ? 0 : 1;
}
