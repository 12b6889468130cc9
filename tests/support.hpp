// What the tests of the layer share: outputs that own their memory, and the oracle's answer in the same layout.
#ifndef TERCET_TESTS_SUPPORT_HPP_
#define TERCET_TESTS_SUPPORT_HPP_

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "src/contract/layer.hpp"
#include "src/proof/heads.hpp"
#include "src/proof/inputs.hpp"
#include "src/reference/recurrent.hpp"
#include "tercet/tercet.hpp"

namespace tercet::test {

using proof::Owned;
using proof::OwnedInputs;
using proof::RandomInputs;
using proof::RandomSpec;

// Threads of the standard library. oneTBB as Debian builds it hides its locks from ThreadSanitizer, so there every call goes through this one.
class ThreadExecutor : public Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads) {}
  int Concurrency() const override { return threads_; }
  void ParallelFor(int64_t count, const std::function<void(int64_t)>& body) override {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      for (int64_t i = next++; i < count; i = next++) body(i);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads_; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
  }

 private:
  int threads_;
};

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
#else
inline constexpr bool kThreadSanitizer = false;
#endif

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif
#else
inline constexpr bool kAddressSanitizer = false;
#endif

// What a call without an executor of its own is given: the library's (nullptr), but for ThreadSanitizer.
inline Executor* UsualExecutor() {
  static ThreadExecutor threads(2);
  return kThreadSanitizer ? &threads : nullptr;
}

struct Results {
  Owned out, final_state, final_key_sum;
  Outputs view() {
    Outputs outputs;
    outputs.out = out.mutable_view();
    outputs.final_state = final_state.mutable_view();
    if (!final_key_sum.shape.empty()) outputs.final_key_sum = final_key_sum.mutable_view();
    return outputs;
  }
};

// A dense tensor's elements where they lie otherwise, and what lies between them, which nobody may touch.
class Scattered {
 public:
  enum Layout {
    kReversed,  // the axes in reverse order, every second one backwards, three elements apart and at an odd address
    kTurned,    // states [N, H, K, V] with the channels of a value column side by side, and a gap behind every column
  };

  explicit Scattered(const ConstTensor& dense, Layout layout = kReversed) : dense_(dense), view_(dense), size_(contract::SizeOf(dense.dtype)) {
    if (!dense.given()) return;
    int64_t elements = 3;
    if (layout == kReversed) {
      for (int axis = 0; axis < dense.rank; ++axis) {
        view_.strides[axis] = axis % 2 == 0 ? -elements : elements;
        elements *= std::max<int64_t>(dense.shape[axis], 1);
      }
    } else {
      const int64_t column = dense.shape[2] + 3, head = dense.shape[3] * column;
      view_.strides = {dense.shape[1] * head, head, 1, column};
      elements = dense.shape[0] * dense.shape[1] * head;
    }
    memory_.assign(static_cast<size_t>(elements * size_ + 1), kUntouched);
    std::byte* base = memory_.data() + (layout == kReversed);
    for (int axis = 0; axis < dense.rank; ++axis)
      if (view_.strides[axis] < 0) base -= (dense.shape[axis] - 1) * view_.strides[axis] * size_;
    view_.data = base;
    ForEachElement([&](std::byte* here, std::byte* there) { std::memcpy(there, here, static_cast<size_t>(size_)); });
  }
  ConstTensor view() const { return view_; }
  Tensor mutable_view() const { return {const_cast<void*>(view_.data), view_.dtype, view_.rank, view_.shape, view_.strides}; }

  // Brings the elements back to where they came from; nothing between them has changed.
  void Gather() {
    ForEachElement([&](std::byte* here, std::byte* there) {
      std::memcpy(here, there, static_cast<size_t>(size_));
      std::fill(there, there + size_, kUntouched);
    });
    for (const std::byte byte : memory_) ASSERT_EQ(byte, kUntouched);
  }

 private:
  static constexpr std::byte kUntouched{0x5A};

  template <class Each>
  void ForEachElement(Each each) const {
    if (!dense_.given()) return;
    const auto size = [&](int axis) { return axis < dense_.rank ? dense_.shape[axis] : 1; };
    const auto at = [&](const ConstTensor& t, int64_t i, int64_t j, int64_t k, int64_t l) {
      return static_cast<std::byte*>(const_cast<void*>(t.data)) + contract::Offset(t, i, j, k, l) * size_;
    };
    for (int64_t i = 0; i < size(0); ++i)
      for (int64_t j = 0; j < size(1); ++j)
        for (int64_t k = 0; k < size(2); ++k)
          for (int64_t l = 0; l < size(3); ++l) each(at(dense_, i, j, k, l), at(view_, i, j, k, l));
  }

  ConstTensor dense_, view_;
  int64_t size_;
  std::vector<std::byte> memory_;
};

inline int64_t StateHeads(const Inputs& in) { return std::max(in.k.shape[2], in.v.shape[2]); }
inline int64_t Sequences(const Inputs& in) { return in.offsets.given() ? in.offsets.shape[0] - 1 : in.q.shape[0]; }

// Outputs of the right shapes, filled with something that no layer computes.
inline Results Room(const Options& options, const Inputs& in) {
  const int64_t heads = StateHeads(in), K = in.q.shape[3], V = in.v.shape[3];
  Results results;
  results.out = Owned::Zeros(in.q.dtype, {in.q.shape[0], in.q.shape[1], std::max(in.q.shape[2], heads), V});
  results.final_state = Owned::Zeros(contract::StateDtype(in.q.dtype), {Sequences(in), heads, K, V});
  if (options.normalize) results.final_key_sum = Owned::Zeros(contract::StateDtype(in.q.dtype), {Sequences(in), heads, K});
  for (Owned* owned : {&results.out, &results.final_state, &results.final_key_sum})
    for (int64_t i = 0; !owned->shape.empty() && i < owned->size(); ++i) owned->Set(i, 12345.0);
  return results;
}

inline Results Compute(const Options& options, const Inputs& in) {
  Results results = Room(options, in);
  Options with = options;
  if (with.executor == nullptr) with.executor = UsualExecutor();
  const Status status = Attend(with, in, results.view());
  EXPECT_TRUE(status.ok()) << status.message;
  return results;
}

// The reference recurrence in Wide, one state head at a time, in the layout of the results.
struct Answers {
  std::vector<double> out, final_state, final_key_sum;
};
template <class Wide>
Answers Oracle(const Options& options, const Inputs& in) {
  contract::Layer layer;
  const Status status = contract::Validate(options, in, nullptr, &layer);
  EXPECT_TRUE(status.ok()) << status.message;
  const int64_t V = layer.value_dim, G = layer.queries_per_state();
  Answers answers;
  answers.out.assign(layer.batch * layer.tokens * layer.out_heads * V, 0.0);
  for (int64_t number = 0; number < layer.sequences; ++number) {
    const contract::Sequence at = contract::SequenceAt(layer, number);
    const std::vector<int64_t> tokens = proof::ValidTokens(layer, at);
    for (int64_t s = 0; s < layer.state_heads; ++s) {
      const auto answer = reference::Recurrent(proof::HeadOf<Wide>(layer, number, tokens, s));
      const int64_t n = static_cast<int64_t>(tokens.size());
      for (int64_t g = 0; g < G; ++g)
        for (int64_t i = 0; i < n; ++i)
          for (int64_t x = 0; x < V; ++x)
            answers.out[((at.batch * layer.tokens + tokens[i]) * layer.out_heads + s * G + g) * V + x] =
                static_cast<double>(answer.out[(g * n + i) * V + x]);
      for (const Wide x : answer.state) answers.final_state.push_back(static_cast<double>(x));
      for (const Wide x : answer.z) answers.final_key_sum.push_back(static_cast<double>(x));
    }
  }
  return answers;
}

// How far a right answer may lie from the oracle's, relative to the largest magnitude of the tensor: every token rounds the state once more, in the
// worst case always the same way, and a sum over K channels errs like the root of K.
inline double Tolerance(Dtype dtype, int64_t tokens, int64_t key_dim) {
  const double epsilon = dtype == Dtype::kF64 ? std::numeric_limits<double>::epsilon() : static_cast<double>(std::numeric_limits<float>::epsilon());
  return epsilon * (8 + static_cast<double>(tokens) + std::sqrt(static_cast<double>(key_dim)));
}

// What one rounding to the dtype adds to that: what is computed is f32, and a number of out is rounded once more, by up to half a unit in the last
// place of the largest.
inline double RoundingOf(Dtype dtype) { return dtype == Dtype::kBF16 ? 0x1p-8 : dtype == Dtype::kF16 ? 0x1p-11 : 0; }

inline void ExpectNear(const Owned& got, const std::vector<double>& want, double tolerance, const char* what) {
  ASSERT_EQ(got.size(), static_cast<int64_t>(want.size())) << what;
  double largest = 0, worst = 0;
  int64_t at = -1;
  for (const double x : want) largest = std::max(largest, std::abs(x));
  for (int64_t i = 0; i < got.size(); ++i) {
    const double gap = std::abs(got.Get(i) - want[i]);
    if (gap <= worst) continue;  // NaN is not
    worst = gap;
    at = i;
    if (std::isnan(gap)) break;
  }
  if (at < 0) return;
  EXPECT_LE(worst, tolerance * largest) << what << " element " << at << " is " << got.Get(at) << " and the oracle says " << want[at];
}

inline bool SameBits(const Owned& a, const Owned& b) { return a.shape == b.shape && a.bytes == b.bytes; }

inline void ExpectSameBits(const Results& a, const Results& b) {
  EXPECT_TRUE(SameBits(a.out, b.out)) << "out";
  EXPECT_TRUE(SameBits(a.final_state, b.final_state)) << "final_state";
  EXPECT_TRUE(SameBits(a.final_key_sum, b.final_key_sum)) << "final_key_sum";
}

inline void ExpectNear(const Results& got, const Answers& want, double tolerance) {
  ExpectNear(got.out, want.out, tolerance + RoundingOf(got.out.dtype), "out");
  ExpectNear(got.final_state, want.final_state, tolerance, "final_state");
  if (!got.final_key_sum.shape.empty()) ExpectNear(got.final_key_sum, want.final_key_sum, tolerance, "final_key_sum");
}

inline std::vector<double> Numbers(const Owned& owned) {
  std::vector<double> numbers;
  for (int64_t i = 0; i < owned.size(); ++i) numbers.push_back(owned.Get(i));
  return numbers;
}
inline Answers AsAnswers(const Results& results) {
  Answers answers{Numbers(results.out), Numbers(results.final_state), {}};
  if (!results.final_key_sum.shape.empty()) answers.final_key_sum = Numbers(results.final_key_sum);
  return answers;
}

// Of another dtype, every number rounded to it.
inline Owned As(const Owned& from, Dtype dtype) {
  if (from.shape.empty()) return from;
  Owned to = Owned::Zeros(dtype, from.shape);
  for (int64_t i = 0; i < to.size(); ++i) to.Set(i, from.Get(i));
  return to;
}
inline OwnedInputs As(const OwnedInputs& from, Dtype dtype, Dtype gate_dtype) {
  OwnedInputs to = from;
  for (Owned* t : {&to.q, &to.k, &to.v}) *t = As(*t, dtype);
  for (Owned* t : {&to.log_decay, &to.beta, &to.remove, &to.write, &to.bonus}) *t = As(*t, gate_dtype);
  for (Owned* t : {&to.initial_state, &to.initial_key_sum}) *t = As(*t, contract::StateDtype(dtype));
  return to;
}

inline double RootMeanSquare(const std::vector<double>& a, const std::vector<double>& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(squares / static_cast<double>(a.size()));
}

}  // namespace tercet::test

#endif  // TERCET_TESTS_SUPPORT_HPP_
