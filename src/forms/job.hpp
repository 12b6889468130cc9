// What an engine is handed: some state heads of one sequence and some of their value columns, and the memory to work in. Nothing here is SIMD.
#ifndef TERCET_SRC_FORMS_JOB_HPP_
#define TERCET_SRC_FORMS_JOB_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/forms/products.hpp"

namespace tercet::forms {

// States that are kept for the gradients, in the caller's memory: the one before the first of every `tokens` valid tokens of a sequence.
struct Saved {
  int64_t tokens = 0;  // 0: none are kept
  Tensor state;        // [places, state heads, K, V]
  Tensor key_sum;      // [places, state heads, K]

  // The place of the state before valid token t. Sequences have room for all their tokens, and one state more.
  int64_t PlaceOf(const contract::Layer& layer, int64_t sequence, int64_t t) const {
    const int64_t before = layer.in.offsets.given() ? contract::SequenceAt(layer, sequence).begin / tokens + sequence
                                                    : sequence * ((layer.tokens + tokens - 1) / tokens);
    return before + t / tokens;
  }
};

inline constexpr Saved kNothingSaved;

// A workspace is sized for `span` tokens and `columns` value columns; a job may use less.
struct Job {
  const contract::Layer* layer = nullptr;
  int64_t span = 1;   // tokens taken at once: the chunk, for the parallel form the longest sequence, some for passes
  int64_t block = 1;  // passes: tokens a pass, 1 or the engine's tokens_a_pass
  int64_t sequence = 0;
  int64_t head = 0, heads = 1;          // state heads head .. head + heads - 1
  int64_t column = 0, columns = 0;      // value columns column .. column + columns - 1
  std::byte* workspace = nullptr;       // aligned to kAlignment
  const Saved* saved = &kNothingSaved;  // states to keep, or for gradients those kept. `span` divides its tokens
};

// One engine for one target: `run[accumulators are f64][rule]` does a job, `bytes` says what workspace it needs (job.workspace is not looked at).
struct Engine {
  static constexpr int kMaxRules = 16;
  using Run = void (*)(const Job&);
  using Bytes = int64_t (*)(const Job&);
  Run run[2][kMaxRules] = {};
  Bytes bytes[2][kMaxRules] = {};
  int64_t tokens_a_pass[kMaxRules] = {};  // of passes: the longest chunk they take, the only one beside 1
  int64_t bf16_chunk = 0;                 // the chunk at which bf16 is computed faster than by passes; 0: none
  int64_t panel[2] = {};                  // value columns that are worked on side by side: jobs are cut at multiples of it
};

// What a gradient's engine is handed: heads that share no head of any input with another job's, and all their value columns. `span` is the chunk.
struct GradientJob : Job {
  const contract::GradientLayer* gradient = nullptr;  // `layer` is the same
  int64_t longest = 0;                                // tokens of the longest sequence
  int64_t segment = 1;                                // chunks from one state that is kept to the next
  // What is summed over tokens: [sequences][state heads][SumsOf(layer)], the gradient of the scale, then of log_decay [H] or of the bonus. A job
  // writes those of its heads.
  double* sums = nullptr;
  const Products* products = nullptr;  // on tiles, where the target has them and the tensors are bf16
};
inline int64_t SumsOf(const contract::Layer& layer) { return 2 + (layer.in.bonus.given() ? layer.key_dim : 0); }

// Tokens, as many as are whole chunks, between two states that are kept where chunks are shorter.
constexpr int64_t kSegment = 16;

struct GradientEngine {
  using Run = void (*)(const GradientJob&);
  using Bytes = int64_t (*)(const GradientJob&);
  Run run[2][Engine::kMaxRules] = {};
  Bytes bytes[2][Engine::kMaxRules] = {};
};

// Hands out pieces of a workspace. Without one it only counts, so that the same code says how much is needed.
class Arena {
 public:
  static constexpr int64_t kAlignment = 64;

  explicit Arena(std::byte* base) : base_(base) {}

  template <class T>
  T* Take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    // One line more than asked: pieces of equal power-of-two sizes would begin in the same cache set.
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 2 * kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

// The head of `t`, whose axis 2 (or 0 for [H] and [H, K]) counts heads, that a state head reads.
inline int64_t HeadOf(const ConstTensor& t, int axis, int64_t head, int64_t state_heads) {
  return contract::GroupedHead(head, t.shape[axis], state_heads);
}

// Walks the valid tokens of a job's sequence in order. Rows of `out`, where there is one, that belong to tokens passed over are set to zero on the
// way.
class Tokens {
 public:
  explicit Tokens(const Job& job) : job_(job), at_(contract::SequenceAt(*job.layer, job.sequence)) {}

  int64_t batch() const { return at_.batch; }
  int64_t begin() const { return at_.begin; }  // of the tokens left
  int64_t end() const { return at_.end; }
  int64_t length() const { return at_.end - at_.begin; }  // tokens left
  // Goes on, or back, to a token of the sequence.
  void Seek(int64_t token) { at_.begin = token; }
  // Whether the next token is valid.
  bool Valid() const {
    const ConstTensor& valid = job_.layer->in.valid;
    return !valid.given() || contract::ReadInteger(valid, contract::Offset(valid, at_.batch, at_.begin)) != 0;
  }

  // The next valid tokens, at most `most`, and how many they are: 0 at the end.
  int64_t Next(int64_t most, int64_t* tokens) {
    int64_t n = 0;
    for (; at_.begin < at_.end && n < most; ++at_.begin) {
      if (Valid())
        tokens[n++] = at_.begin;
      else
        ClearRow(at_.begin);
    }
    return n;
  }

 private:
  void ClearRow(int64_t token) {
    const Tensor& out = job_.layer->out.out;
    if (!out.given()) return;
    const int64_t queries = job_.layer->queries_per_state(), size = contract::SizeOf(out.dtype);
    for (int64_t g = 0; g < queries; ++g)
      for (int64_t c = 0; c < job_.columns; ++c)
        std::memset(static_cast<std::byte*>(out.data) + size * contract::Offset(out, at_.batch, token, job_.head * queries + g, job_.column + c), 0,
                    static_cast<size_t>(size));
  }

  const Job& job_;
  contract::Sequence at_;
};

}  // namespace tercet::forms

#endif  // TERCET_SRC_FORMS_JOB_HPP_
