// The problems of the conformance grids: odd shapes, and from shape to shape features, the normaliser, the chunk, head groups, packed sequences and
// valid tokens change, so that each meets every rule, form and target.
#ifndef TERCET_TESTS_GRID_HPP_
#define TERCET_TESTS_GRID_HPP_

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/support.hpp"

namespace tercet::test {

struct Shape {
  int64_t tokens, key_dim, value_dim, number;
};

inline std::vector<Shape> Shapes() {
  const int64_t dims[] = {1, 5, 33, 96, 128, 257}, all_tokens[] = {0, 1, 15, 16, 17, 63, 64, 65, 200};
  std::vector<Shape> shapes;
  int64_t number = 0;
  for (const int64_t tokens : all_tokens)
    for (int i = 0; i < 6; ++i)
      for (const int shift : {0, 1 + i % 5}) shapes.push_back({tokens, dims[i], dims[(i + shift) % 6], number++});
  return shapes;
}

struct Problem {
  Rule rule;
  Dtype dtype;
  Shape shape;
};

struct Drawn {
  Options options;
  OwnedInputs inputs;
};

inline Drawn Draw(const Problem& problem) {
  const Shape& shape = problem.shape;
  Drawn drawn;
  RandomSpec spec;
  spec.rule = problem.rule;
  spec.dtype = problem.dtype;
  spec.tokens = shape.tokens;
  spec.key_dim = shape.key_dim;
  spec.value_dim = shape.value_dim;
  spec.seed = 1 + static_cast<uint64_t>(shape.number);
  drawn.options.rule = problem.rule;
  const int64_t n = shape.number;
  spec.heads = 1 + n % 2;
  if (n % 5 == 1) spec.q_heads = 2 * spec.heads;                         // several queries a state
  if (n % 5 == 2) spec.q_heads = spec.k_heads = 1, spec.gate_heads = 1;  // more values than keys
  if (n % 5 == 3) spec.batch = 2;
  if (n % 5 == 4 && shape.tokens > 0) spec.offsets = {0, shape.tokens / 3, shape.tokens / 3, shape.tokens};
  if (n % 4 == 3) spec.valid_fraction = 0.7;
  if (n % 3 == 1) drawn.options.feature_map = FeatureMap::kEluPlusOne;
  if (n % 3 == 1 && Info(problem.rule).can_normalize) drawn.options.normalize = spec.normalize = true;
  if (n % 3 == 2) drawn.options.feature_map = n % 2 == 0 ? FeatureMap::kL2Norm : FeatureMap::kRelu;
  if (n % 3 != 0 && !Info(problem.rule).can_normalize)
    drawn.options.feature_map = FeatureMap::kL2Norm;  // keys of a delta rule stay within the unit ball
  spec.initial_state = n % 6 != 0;
  if (contract::SizeOf(problem.dtype) == 2 && n % 2 == 0) spec.gate_dtype = Dtype::kF32;
  drawn.inputs = RandomInputs(spec);
  // A denominator is a sum of positive numbers: where it may cancel, the quotient magnifies rounding without bound, and no tolerance holds.
  Owned& bonus = drawn.inputs.bonus;
  for (int64_t i = 0; drawn.options.normalize && !bonus.shape.empty() && i < bonus.size(); ++i) bonus.Set(i, std::abs(bonus.Get(i)));
  return drawn;
}

// The chunk that a shape's chunkwise form has.
inline int64_t ChunkOf(const Shape& shape) {
  const int64_t chunks[] = {16, 1, 64, 7, 33, 200};
  return chunks[shape.number % 6];
}

// "AVX2_kda_chunkwise_f32_T33_K16_V31".
inline std::string NameOf(const std::string& target, const Problem& problem, Form form) {
  const Shape& shape = problem.shape;
  return target + "_" + std::string(Name(problem.rule)) + "_" + std::string(Name(form)) + "_" + std::string(Name(problem.dtype)) + "_T" +
         std::to_string(shape.tokens) + "_K" + std::to_string(shape.key_dim) + "_V" + std::to_string(shape.value_dim);
}

}  // namespace tercet::test

#endif  // TERCET_TESTS_GRID_HPP_
