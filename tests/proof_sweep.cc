// The sweep of docs/proof.md, printed as its two tables: the largest ratio of a right form, and the smallest of a form with a planted error. Not a
// test of its own, for it takes minutes: build the target proof_sweep and run it; `proof_sweep bf16` (or f16) sweeps that dtype in the place of f32.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "src/proof/inputs.hpp"
#include "src/proof/verify.hpp"

namespace tercet::proof {
namespace {

struct Grid {
  std::vector<int64_t> tokens, key_dims, value_dims;
  int seeds = 1;
  Dtype dtype = Dtype::kF32;
  FeatureMap feature_map = FeatureMap::kIdentity;
  bool normalize = false, initial_state = true;
  int64_t chunk = 0;
  std::string target = {};
};

const std::vector<int64_t> kShort = {1, 2, 5, 17, 65}, kFew = {1, 5, 33, 128};

const std::vector<Grid> kRight = {
    {{1, 2, 5, 17, 64, 65}, {1, 2, 5, 33, 257}, {1, 3, 20}, 6},
    {{1, 2, 3}, {1, 33, 257, 512}, {1, 2, 9}, 8},
    {kShort, {1, 2, 5, 33, 257}, {1, 3, 20}, 3, Dtype::kF64},
    {{200, 600}, {1, 2, 16, 64}, {1, 16}, 4},
    {{200, 600}, {1, 2, 16, 64}, {1, 16}, 2, Dtype::kF32, FeatureMap::kIdentity, false, true, 128},
    {{4096}, {1, 16}, {1, 16}, 1},
    {kShort, kFew, {1, 20}, 3, Dtype::kF32, FeatureMap::kIdentity, false, true, 1},
    {kShort, kFew, {1, 20}, 4, Dtype::kF32, FeatureMap::kEluPlusOne},
    {kShort, kFew, {1, 20}, 4, Dtype::kF32, FeatureMap::kRelu, false, false},
    {kShort, kFew, {1, 20}, 8, Dtype::kF32, FeatureMap::kL2Norm},
    {kShort, {1, 2, 5, 33, 257}, {1, 3, 20}, 6, Dtype::kF32, FeatureMap::kIdentity, true},
    {{5, 17, 65}, {2, 5, 33, 128}, {20}, 20, Dtype::kF32, FeatureMap::kIdentity, true, false},
    {kShort, kFew, {1, 20}, 4, Dtype::kF32, FeatureMap::kEluPlusOne, true},
    {kShort, kFew, {1, 20}, 4, Dtype::kF32, FeatureMap::kRelu, true, false},
};
const std::vector<Grid> kPlanted = {
    {kShort, {1, 2, 5, 33, 128}, {1, 3, 20}, 2},
    {kShort, {1, 2, 5, 33}, {1, 3, 20}, 1, Dtype::kF64},
    {{600}, {16, 64}, {16}, 1},
};

// Calls body(case's verdict) for every layer of the grid that is not refused.
template <class Body>
void Walk(Rule rule, const Grid& grid, Plant plant, Body body) {
  for (const int64_t tokens : grid.tokens)
    for (const int64_t key_dim : grid.key_dims)
      for (const int64_t value_dim : grid.value_dims)
        for (int seed = 1; seed <= grid.seeds; ++seed) {
          RandomSpec spec;
          spec.rule = rule;
          spec.dtype = grid.dtype;
          spec.tokens = tokens;
          spec.key_dim = key_dim;
          spec.value_dim = value_dim;
          spec.feature_map = grid.feature_map;
          spec.normalize = grid.normalize;
          spec.initial_state = grid.initial_state;
          spec.seed = static_cast<uint64_t>(seed);
          VerifyOptions options;
          options.attend.rule = rule;
          options.attend.feature_map = grid.feature_map;
          options.attend.normalize = grid.normalize;
          options.attend.chunk = grid.chunk;
          options.attend.target = grid.target;
          options.seed = spec.seed;
          options.plant = plant;
          if (plant == Plant::kScale && key_dim == 1) options.attend.scale = 0.5;  // the default would be 1
          const OwnedInputs inputs = RandomInputs(spec);
          Verdict verdict;
          const Status status = Verify(options, inputs.view(), {}, &verdict);
          if (status.ok()) body(verdict);
        }
}

// The grids with `dtype` in the place of f32, and then without those of f64.
std::vector<Grid> Of(Dtype dtype, std::vector<Grid> grids) {
  if (dtype != Dtype::kF32) std::erase_if(grids, [](const Grid& grid) { return grid.dtype == Dtype::kF64; });
  for (Grid& grid : grids)
    if (grid.dtype == Dtype::kF32) grid.dtype = dtype;
  return grids;
}

int Run(Dtype dtype) {
  int64_t layers = 0, wrong = 0;
  std::printf("| rule | layers | parallel | recurrent | chunkwise |\n|---|---|---|---|---|\n");
  for (const RuleInfo& info : Rules()) {
    int64_t of_rule = 0;
    std::array<double, 3> worst{};
    std::vector<Grid> grids = Of(dtype, kRight);
    for (const std::string& target : Targets()) {
      Grid grid{kShort, kFew, {1, 20}, 2, dtype};
      grid.target = target;
      grids.push_back(grid);
    }
    for (const Grid& grid : grids) {
      if (grid.normalize && !info.can_normalize) continue;
      Walk(info.rule, grid, Plant::kNone, [&](const Verdict& verdict) {
        ++of_rule;
        wrong += !verdict.same();
        for (size_t form = 0; form < 3; ++form) worst[form] = std::max(worst[form], verdict.judgements[form].ratio);
      });
    }
    std::printf("| %s | %lld | %.2f | %.2f | %.2f |\n", std::string(info.name).c_str(), static_cast<long long>(of_rule), worst[0], worst[1],
                worst[2]);
    std::fflush(stdout);
    layers += of_rule;
  }
  std::printf("%lld layers, %lld of them said not to be the same\n\n", static_cast<long long>(layers), static_cast<long long>(wrong));

  int64_t planted = 0, missed = 0;
  std::printf("| rule | decay | scale | mask |\n|---|---|---|---|\n");
  for (const RuleInfo& info : Rules()) {
    std::printf("| %s |", std::string(info.name).c_str());
    for (const Plant plant : {Plant::kDecay, Plant::kScale, Plant::kMask}) {
      double least = std::numeric_limits<double>::infinity();
      for (const Grid& grid : Of(dtype, kPlanted))
        Walk(info.rule, grid, plant, [&](const Verdict& verdict) {
          ++planted;
          missed += verdict.algebra.same() || verdict.judgements[2].same;
          least = std::min(least, verdict.judgements[2].ratio);
        });
      std::printf(least < std::numeric_limits<double>::infinity() ? " %.1e |" : " - |", least);
      std::fflush(stdout);
    }
    std::printf("\n");
  }
  std::printf("%lld planted errors, %lld of them not seen in one half or the other\n", static_cast<long long>(planted),
              static_cast<long long>(missed));
  return wrong == 0 && missed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tercet::proof

int main(int count, char** arguments) {
  for (const tercet::Dtype dtype : {tercet::Dtype::kF32, tercet::Dtype::kBF16, tercet::Dtype::kF16})
    if (count < 2 || tercet::Name(dtype) == arguments[1]) return tercet::proof::Run(dtype);
  std::fprintf(stderr, "proof_sweep takes nothing, bf16 or f16\n");
  return 2;
}
