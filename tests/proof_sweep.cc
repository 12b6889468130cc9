// The sweep of docs/proof.md, printed as its two tables: the largest ratio of a right form, and the smallest of a form with a planted error. Not a
// test of its own, for it takes minutes: build the target proof_sweep and run it; `proof_sweep bf16` (or f16) sweeps that dtype in the place of f32.
// `proof_sweep gradient [LAYERS [RULE]]` draws so many layers a rule (or of one) and sweeps their gradients. With `tiles` before these all is bf16 on
// Intel AMX, or where there is none on its emulation; nothing is planted there, for that is put into the reference.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "src/proof/inputs.hpp"
#include "src/proof/verify.hpp"
#include "src/proof/verify_gradient.hpp"
#include "tests/amx_emulation.hpp"

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

// The target of the sweep on tiles; else empty.
std::string on_tiles;

int Run(Dtype dtype) {
  int64_t layers = 0, wrong = 0;
  std::printf("| rule | layers | parallel | recurrent | chunkwise |\n|---|---|---|---|---|\n");
  for (const RuleInfo& info : Rules()) {
    int64_t of_rule = 0;
    std::array<double, 3> worst{};
    std::vector<Grid> grids = Of(dtype, kRight);
    for (Grid& grid : grids) grid.target = on_tiles;
    for (const std::string& target : on_tiles.empty() ? Targets() : std::vector<std::string>()) {
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
        for (const Judgement& judgement : verdict.judgements)
          if (judgement.ratio > 3)
            std::fprintf(stderr, "%s T %lld K %lld V %lld chunk %lld map %s%s: %s %s %.3g\n", std::string(info.name).c_str(),
                         static_cast<long long>(verdict.out.shape[1]), static_cast<long long>(verdict.final_state.shape[2]),
                         static_cast<long long>(verdict.out.shape[3]), static_cast<long long>(verdict.chunk),
                         std::string(Name(grid.feature_map)).c_str(), grid.normalize ? " normalised" : "", judgement.form.c_str(),
                         judgement.tensor.c_str(), judgement.ratio);
      });
    }
    std::printf("| %s | %lld | %.2f | %.2f | %.2f |\n", std::string(info.name).c_str(), static_cast<long long>(of_rule), worst[0], worst[1],
                worst[2]);
    std::fflush(stdout);
    layers += of_rule;
  }
  std::printf("%lld layers, %lld of them said not to be the same\n\n", static_cast<long long>(layers), static_cast<long long>(wrong));

  if (!on_tiles.empty()) return wrong == 0 ? 0 : 1;
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

// Layers of every size, dtype, feature map, head count and chunk that a rule may have.
RandomSpec DrawLayer(const RuleInfo& info, std::mt19937_64& words, Options* attend) {
  const auto one_of = [&](const auto& list) { return list[words() % std::size(list)]; };
  const auto between = [&](int64_t least, int64_t most) { return least + static_cast<int64_t>(words() % static_cast<uint64_t>(most - least + 1)); };
  const Dtype dtypes[] = {Dtype::kF32, Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16};
  const FeatureMap maps[] = {FeatureMap::kIdentity, FeatureMap::kIdentity, FeatureMap::kEluPlusOne, FeatureMap::kRelu, FeatureMap::kL2Norm};
  const int64_t dims[] = {1, 2, 3, 5, 8, 16, 17, 33, 64};
  const int64_t chunks[] = {0, 0, 1, 7, 16, 32, 64, 200};
  RandomSpec spec;
  spec.rule = info.rule;
  spec.dtype = one_of(dtypes);
  spec.tokens = words() % 3 == 0 ? between(1, 9) : between(10, 200);
  spec.key_dim = one_of(dims);
  spec.value_dim = one_of(dims);
  spec.feature_map = one_of(maps);
  spec.normalize = info.can_normalize && words() % 4 == 0;
  spec.initial_state = words() % 3 != 0;
  if (words() % 4 == 0) spec.valid_fraction = 0.8;
  if (words() % 4 == 0) spec.offsets = {0, spec.tokens / 3, spec.tokens / 3, spec.tokens};
  spec.heads = between(1, 2);
  if (words() % 4 == 0) spec.q_heads = 4, spec.k_heads = 1, spec.v_heads = 2, spec.gate_heads = 1;
  spec.seed = words();
  attend->rule = info.rule;
  attend->feature_map = spec.feature_map;
  attend->normalize = spec.normalize;
  attend->chunk = one_of(chunks);
  return spec;
}

int RunGradients(int layers, const std::string& rule) {
  int64_t judged = 0, wrong = 0, planted = 0, missed = 0;
  std::printf("| rule | layers | recurrent | chunkwise | decay | scale | mask |\n|---|---|---|---|---|---|---|\n");
  for (const RuleInfo& info : Rules()) {
    if (!rule.empty() && rule != info.name) continue;
    std::mt19937_64 words(1);
    double worst[2] = {};
    std::array<double, 4> least;
    least.fill(std::numeric_limits<double>::infinity());
    for (int layer = 0; layer < layers; ++layer) {
      VerifyOptions options;
      RandomSpec spec = DrawLayer(info, words, &options.attend);
      if (!on_tiles.empty()) spec.dtype = Dtype::kBF16;
      options.attend.target = on_tiles;
      options.seed = spec.seed;
      options.plant = layer % 4 == 0 && on_tiles.empty() ? static_cast<Plant>(1 + layer / 4 % 3) : Plant::kNone;
      const OwnedInputs inputs = RandomInputs(spec);
      GradientVerdict verdict;
      if (!VerifyGradient(options, inputs.view(), &verdict).ok()) continue;
      double ratios[2] = {};
      for (const Judgement& judgement : verdict.judgements) {
        double& ratio = ratios[judgement.form != "recurrent"];
        ratio = std::max(ratio, judgement.ratio);
        const bool of_plant = options.plant != Plant::kNone && judgement.form != "recurrent";
        if (!of_plant && judgement.ratio > 3)
          std::fprintf(stderr, "%s %s %s T %lld K %lld V %lld chunk %lld map %s%s: %s %s %.3g\n", std::string(info.name).c_str(),
                       std::string(Name(spec.dtype)).c_str(), spec.offsets.empty() ? "" : "packed", static_cast<long long>(spec.tokens),
                       static_cast<long long>(spec.key_dim), static_cast<long long>(spec.value_dim), static_cast<long long>(verdict.chunk),
                       std::string(Name(spec.feature_map)).c_str(), spec.normalize ? " normalised" : "", judgement.form.c_str(),
                       judgement.tensor.c_str(), judgement.ratio);
        judged += !of_plant;
        wrong += !of_plant && !judgement.same;
      }
      worst[0] = std::max(worst[0], ratios[0]);
      if (options.plant == Plant::kNone) {
        worst[1] = std::max(worst[1], ratios[1]);
        wrong += !verdict.algebra.same;
      } else {
        double& smallest = least[static_cast<size_t>(options.plant)];
        smallest = std::min(smallest, ratios[1]);
        ++planted;
        missed += verdict.algebra.same || verdict.same() || ratios[1] <= verdict.limit;
      }
    }
    std::printf("| %s | %d | %.2f | %.2f |", std::string(info.name).c_str(), layers, worst[0], worst[1]);
    for (size_t plant = 1; plant < least.size(); ++plant)
      std::printf(least[plant] < std::numeric_limits<double>::infinity() ? " %.1e |" : " - |", least[plant]);
    std::printf("\n");
    std::fflush(stdout);
  }
  std::printf("%lld gradients, %lld of them said not to be the layer's; %lld planted errors, %lld of them not seen in one half or the other\n",
              static_cast<long long>(judged), static_cast<long long>(wrong), static_cast<long long>(planted), static_cast<long long>(missed));
  return wrong == 0 && missed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tercet::proof

int main(int count, char** arguments) {
  if (count > 1 && std::string(arguments[1]) == "tiles") {
    tercet::test::OfferEmulatedAmx();
    for (const std::string& target : tercet::Targets())
      if (target.rfind("AMX", 0) == 0 && tercet::proof::on_tiles.empty()) tercet::proof::on_tiles = target;
    if (tercet::proof::on_tiles.empty()) {
      std::fprintf(stderr, "no AVX-512 here\n");
      return 2;
    }
    --count, ++arguments;
    if (count < 2) return tercet::proof::Run(tercet::Dtype::kBF16);
  }
  if (count > 1 && std::string(arguments[1]) == "gradient")
    return tercet::proof::RunGradients(count > 2 ? std::atoi(arguments[2]) : 100, count > 3 ? arguments[3] : "");
  for (const tercet::Dtype dtype : {tercet::Dtype::kF32, tercet::Dtype::kBF16, tercet::Dtype::kF16})
    if (count < 2 || tercet::Name(dtype) == arguments[1]) return tercet::proof::Run(dtype);
  std::fprintf(stderr, "proof_sweep takes nothing, bf16, f16 or gradient\n");
  return 2;
}
