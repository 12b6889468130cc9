// What the tests of the gradients share: given and wanted gradients that own their memory, and the oracle's in the same layout.
#ifndef TERCET_TESTS_GRADIENTS_HPP_
#define TERCET_TESTS_GRADIENTS_HPP_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "src/proof/gradient.hpp"
#include "tests/support.hpp"

namespace tercet::test {

struct OwnedGiven {
  Owned out, final_state, final_key_sum;
  std::vector<std::byte> saved;
  OutputGradients view() const {
    OutputGradients given{out.view(), final_state.view(), {}, {}};
    // Only read.
    if (!saved.empty()) given.saved = {const_cast<std::byte*>(saved.data()), static_cast<int64_t>(saved.size())};
    if (!final_key_sum.shape.empty()) given.final_key_sum = final_key_sum.view();
    return given;
  }
};

// Normal numbers in the shapes of the outputs.
inline OwnedGiven DrawGiven(const Options& options, const Inputs& in, uint64_t seed) {
  Results room = Room(options, in);
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (Owned* owned : {&room.out, &room.final_state, &room.final_key_sum})
    for (int64_t i = 0; !owned->shape.empty() && i < owned->size(); ++i) owned->Set(i, normal(random));
  return {room.out, room.final_state, room.final_key_sum, {}};
}

// What the forward call keeps.
inline std::vector<std::byte> Save(const Options& options, const Inputs& in) {
  Results room = Room(options, in);
  Outputs outputs = room.view();
  Options with = options;
  if (with.executor == nullptr) with.executor = UsualExecutor();
  int64_t bytes = 0;
  Status status = SavedBytes(with, in, &bytes);
  EXPECT_TRUE(status.ok()) << status.message;
  std::vector<std::byte> saved(static_cast<size_t>(bytes));
  outputs.saved = {saved.data(), bytes};
  status = Attend(with, in, outputs);
  EXPECT_TRUE(status.ok()) << status.message;
  return saved;
}

struct OwnedGradients {
  Owned q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum;
  double scale = 12345;

  std::vector<std::pair<const char*, Owned*>> All() {
    return {{"q", &q},           {"k", &k},         {"v", &v},         {"log_decay", &log_decay},         {"beta", &beta},
            {"remove", &remove}, {"write", &write}, {"bonus", &bonus}, {"initial_state", &initial_state}, {"initial_key_sum", &initial_key_sum}};
  }
  Gradients view() {
    const auto tensor = [](Owned& owned) { return owned.shape.empty() ? Tensor() : owned.mutable_view(); };
    return {tensor(q),      tensor(k),     tensor(v),     tensor(log_decay),     tensor(beta),
            tensor(remove), tensor(write), tensor(bonus), tensor(initial_state), tensor(initial_key_sum),
            &scale};
  }
};

inline OwnedGradients RoomForGradients(const Options& options, const OwnedInputs& in) {
  const Results room = Room(options, in.view());
  OwnedGradients gradients{in.q, in.k, in.v, in.log_decay, in.beta, in.remove, in.write, in.bonus, room.final_state, room.final_key_sum, 12345};
  for (auto& [name, owned] : gradients.All())
    for (int64_t i = 0; !owned->shape.empty() && i < owned->size(); ++i) owned->Set(i, 12345.0);
  return gradients;
}

inline OwnedGradients ComputeGradients(const Options& options, const OwnedInputs& in, const OwnedGiven& given) {
  OwnedGradients gradients = RoomForGradients(options, in);
  Options with = options;
  if (with.executor == nullptr) with.executor = UsualExecutor();
  const Status status = AttendGradient(with, in.view(), given.view(), gradients.view());
  EXPECT_TRUE(status.ok()) << status.message;
  return gradients;
}

template <class T>
proof::InputGradients<double> OracleGradients(const Options& options, const Inputs& in, const OutputGradients& given) {
  proof::InputGradients<T> wide;
  const Status status = proof::GradientsOf(options, in, given, &wide);
  EXPECT_TRUE(status.ok()) << status.message;
  const auto narrow = [](const std::vector<T>& x) { return std::vector<double>(x.begin(), x.end()); };
  return {narrow(wide.q),
          narrow(wide.k),
          narrow(wide.v),
          narrow(wide.log_decay),
          narrow(wide.beta),
          narrow(wide.remove),
          narrow(wide.write),
          narrow(wide.bonus),
          narrow(wide.initial_state),
          narrow(wide.initial_key_sum),
          static_cast<double>(wide.scale)};
}

// A number of a gradient is a sum over a walk forward and one back. `dims` is the sum of key_dim and value_dim.
inline double GradientTolerance(Dtype dtype, int64_t tokens, int64_t dims) { return 4 * Tolerance(dtype, tokens, dims); }

// Relative to the largest of a tensor; but where little is left of a sum by nature, relative to the largest of all, of which it is a sum: a row of
// one channel has next to no gradient behind l2_norm and none under the normaliser, a state of one channel is forgotten by a delta rule, and one
// number for all channels of a token or a head can be anything.
inline void ExpectNearGradients(OwnedGradients& got, const proof::InputGradients<double>& want, double tolerance) {
  const std::vector<double>* wants[] = {&want.q,      &want.k,     &want.v,     &want.log_decay,     &want.beta,
                                        &want.remove, &want.write, &want.bonus, &want.initial_state, &want.initial_key_sum};
  double largest_of_all = 1;  // which is what the given gradients are
  for (const std::vector<double>* one : wants)
    for (const double x : *one) largest_of_all = std::max(largest_of_all, std::abs(x));
  int at = 0;
  for (auto& [name, owned] : got.All()) {
    const std::vector<double>& one = *wants[at++];
    if (owned->shape.empty()) continue;
    double largest = 0, worst = 0;
    for (const double x : one) largest = std::max(largest, std::abs(x));
    ASSERT_EQ(owned->size(), static_cast<int64_t>(one.size())) << name;
    for (int64_t i = 0; i < owned->size(); ++i) {
      const double gap = std::abs(owned->Get(i) - one[i]);
      ASSERT_FALSE(std::isnan(gap)) << name << " element " << i << " is " << owned->Get(i) << " and the oracle says " << one[i];
      worst = std::max(worst, gap);
    }
    const bool cancels = got.q.shape[3] == 1 || owned->shape.size() < 4;
    const double bound = tolerance * (cancels ? largest_of_all : largest) + RoundingOf(owned->dtype) * largest;
    EXPECT_LE(worst, bound) << name << ", whose largest is " << largest;
  }
  // One sum over everything: as exact as the gradient of q that it is made of.
  double size = 0;
  for (const double x : want.q) size += std::abs(x);
  EXPECT_LE(std::abs(got.scale - want.scale), tolerance * (size + std::abs(want.scale))) << "scale is " << got.scale << ", not " << want.scale;
}

}  // namespace tercet::test

#endif  // TERCET_TESTS_GRADIENTS_HPP_
