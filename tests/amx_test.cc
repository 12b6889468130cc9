// What runs on the tiles of Intel AMX: the verbs, the emulated registers against loops written from the manual, and the engine against the oracle and
// its laws, on the emulation and, where the machine has AMX, on the real tiles; the gradients likewise.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "src/contract/half.hpp"
#include "src/floating_mode.hpp"
#include "src/proof/verify.hpp"
#include "src/proof/verify_gradient.hpp"
#include "tests/amx_emulation.hpp"
#include "tests/gradients.hpp"
#include "tests/support.hpp"

#if defined(__x86_64__)
#include "src/forms/products_amx-inl.h"
#include "tests/amx_emulation-inl.h"

TERCET_BEFORE_AMX
namespace tercet::test {
namespace amx_checks {

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// A number whose exponent is anything, or near that of 1.
float Any(std::mt19937& random, bool wild) {
  const auto bits = static_cast<uint32_t>(random());
  const uint32_t exponent = wild ? bits >> 23 & 0xFF : 120 + (bits >> 23 & 15);
  const uint32_t all = (bits & 0x807FFFFFu) | exponent << 23;
  float x;
  std::memcpy(&x, &all, sizeof(x));
  return x;
}

void Narrow() {
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    alignas(64) float numbers[32];
    alignas(64) uint16_t words[32];
    for (float& x : numbers) x = Any(random, true);
    _mm512_store_si512(words, EmulatedTiles::Narrow(_mm512_load_ps(numbers), _mm512_load_ps(numbers + 16)));
    for (int j = 0; j < 32; ++j) {
      const bool denormal = std::fpclassify(numbers[j]) == FP_SUBNORMAL;
      const uint32_t want = denormal ? Bits(numbers[j]) >> 16 & 0x8000 : contract::Narrow<BFloat16>(numbers[j]).bits;
      if (std::isnan(numbers[j]))
        ASSERT_TRUE((words[j] & 0x7F80) == 0x7F80 && (words[j] & 0x40) != 0);
      else
        ASSERT_EQ(words[j], want) << numbers[j];
    }
    _mm512_store_si512(words, amx::NarrowPairs<EmulatedTiles>(_mm512_load_ps(numbers), _mm512_load_ps(numbers + 16)));
    alignas(64) uint16_t in_order[32];
    _mm512_store_si512(in_order, EmulatedTiles::Narrow(_mm512_load_ps(numbers), _mm512_load_ps(numbers + 16)));
    for (int j = 0; j < 16; ++j) ASSERT_TRUE(words[2 * j] == in_order[j] && words[2 * j + 1] == in_order[16 + j]);
  }
}

// As the manual has it, with the mode set from outside: plain multiplications and sums in the order of the manual.
void Product() {
  const FloatingMode mode;
  std::mt19937 random(2);
  for (const bool wild : {false, true}) {
    for (int round = 0; round < 20; ++round) {
      amx::Tile a, b;
      amx::Sums c;
      for (amx::Tile* tile : {&a, &b})
        for (auto& row : tile->row)
          for (uint32_t& pair : row) pair = Bits(Any(random, wild)) >> 16 | (Bits(Any(random, wild)) & 0xFFFF0000u);
      EmulatedTiles::Configure();
      EmulatedTiles::Load<4>(&a);
      EmulatedTiles::Load<5>(&b);
      EmulatedTiles::Zero<0>();
      EmulatedTiles::MultiplyAdd<0, 4, 5>();
      EmulatedTiles::MultiplyAdd<0, 5, 4>();
      EmulatedTiles::Store<0>(&c);
      EmulatedTiles::Release();
      const auto half = [](uint32_t pair, int which) { return contract::Widen(BFloat16{static_cast<uint16_t>(pair >> 16 * which)}); };
      // Denormals are zero, before and after.
      const auto flushed = [](float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; };
      for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
          float want = 0;
          for (const auto& [left, right] : {std::pair(&a, &b), std::pair(&b, &a)}) {
            float sums[2] = {0, 0};
            for (int k = 0; k < 16; ++k)
              for (int i = 0; i < 2; ++i) sums[i] = flushed(std::fma(flushed(half(left->row[m][k], i)), flushed(half(right->row[k][n], i)), sums[i]));
            want = flushed(want + flushed(sums[0] + sums[1]));
          }
          if (std::isnan(want))
            ASSERT_TRUE(std::isnan(c.row[m][n]));
          else
            ASSERT_EQ(Bits(c.row[m][n]), Bits(want)) << c.row[m][n] << " and not " << want;
        }
    }
  }
}

void Tiles() {
  std::mt19937 random(3);
  for (int64_t columns = 1; columns <= 4; ++columns) {
    constexpr int64_t kDepth = 3;
    std::vector<amx::Tile> a(4 * kDepth), b(4 * kDepth);
    for (std::vector<amx::Tile>* tiles : {&a, &b})
      for (amx::Tile& tile : *tiles)
        for (auto& row : tile.row)
          for (uint32_t& pair : row) pair = Bits(Any(random, false)) >> 16 | (Bits(Any(random, false)) & 0xFFFF0000u);
    const auto want = [&](const amx::Tile* left, const amx::Tile* right, int64_t step, int m, int n) {
      double sum = 0;
      for (int64_t d = 0; d < kDepth; ++d)
        for (int k = 0; k < 16; ++k)
          for (int i = 0; i < 2; ++i)
            sum += static_cast<double>(contract::Widen(BFloat16{static_cast<uint16_t>(left[d].row[m][k] >> 16 * i)})) *
                   static_cast<double>(contract::Widen(BFloat16{static_cast<uint16_t>(right[d * step].row[k][n] >> 16 * i)}));
      return sum;
    };
    std::vector<amx::Sums> shared(4), each(4);
    EmulatedTiles::Configure();
    amx::Clear<EmulatedTiles>();
    amx::MultiplyAdd<EmulatedTiles>(columns, kDepth, a.data(), b.data(), columns);
    amx::Store<EmulatedTiles>(columns, shared.data());
    amx::Clear<EmulatedTiles>();
    amx::MultiplyAddEach<EmulatedTiles>(columns, kDepth, a.data(), b.data());
    amx::Store<EmulatedTiles>(columns, each.data());
    EmulatedTiles::Release();
    for (int64_t c = 0; c < columns; ++c)
      for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
          ASSERT_NEAR(static_cast<double>(shared[c].row[m][n]), want(a.data(), b.data() + c, columns, m, n), 0.1);
          ASSERT_NEAR(static_cast<double>(each[c].row[m][n]), want(a.data() + c * kDepth, b.data() + c * kDepth, 1, m, n), 0.1);
        }
    ASSERT_EQ(EmulatedTiles::faults, 0);
  }
  amx::Sums unused;
  EmulatedTiles::Store<0>(&unused);  // of a tile that is not configured
  ASSERT_GT(EmulatedTiles::faults, 0);
  EmulatedTiles::faults = 0;
}

// Every way to lie, to be turned and to be cut, against sums over the operands as they are rounded; rows and columns around stay as they were.
void Products() {
  using forms::Matrix;
  using Part = forms::Product::Part;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const auto bf16 = [](float x) { return static_cast<double>(contract::Widen(contract::Narrow<BFloat16>(x))); };
  const int64_t sizes[] = {1, 5, 16, 17, 32, 33, 64, 70, 130};
  for (int n = 0; n < 300; ++n) {
    const auto any = [&] { return sizes[random() % 9]; };
    forms::Product product{any(), any(), any(), {}, n % 2 == 0, {}, n / 2 % 2 == 0, {}, n / 4 % 2 == 0};
    product.part = std::array{Part::kAll, Part::kBelow, Part::kLower}[n % 3];
    const int64_t rows = product.rows, columns = product.columns, depth = product.depth;
    // A matrix of rows of 160 numbers or, by turns, of panels; `columns` of its rows are numbers, all others are not.
    const auto fill = [&](auto* matrix, std::vector<float>& numbers, int64_t count, int64_t width, bool panels) {
      numbers.assign(static_cast<size_t>(3 * 160 * (count + 1)), std::numeric_limits<float>::quiet_NaN());
      matrix->at = numbers.data();
      matrix->row = panels ? 64 : 160;
      matrix->panel = panels ? 64 * count + 32 : 64;
      for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < width; ++c) numbers[static_cast<size_t>(c / 64 * matrix->panel + i * matrix->row + c % 64)] = normal(random);
    };
    const auto at = [](const auto& matrix, int64_t i, int64_t c) { return c / 64 * matrix.panel + i * matrix.row + c % 64; };
    std::vector<float> a, b, to;
    fill(&product.a, a, product.turn_a ? depth : rows, product.turn_a ? rows : depth, n / 8 % 2 == 0);
    fill(&product.b, b, product.turn_b ? columns : depth, product.turn_b ? depth : columns, n / 16 % 2 == 0);
    fill(&product.to, to, rows, (columns + 15) / 16 * 16, n / 32 % 2 == 0);
    const bool tainted = product.part != Part::kAll && n % 5 == 0;
    // Of the last token: whoever leaves it out stays as it is.
    if (tainted) b[static_cast<size_t>(product.turn_b ? at(product.b, 0, depth - 1) : at(product.b, depth - 1, 0))] = INFINITY;
    const std::vector<float> before = to;
    std::vector<std::byte> room(static_cast<size_t>(forms::RoomFor(rows, depth)) + 128);
    product.room = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64);
    EmulatedTiles::Configure();
    amx::ProductsOn<EmulatedTiles>::Multiply(product);
    EmulatedTiles::Release();
    SCOPED_TRACE(testing::Message() << n << ": " << rows << " x " << columns << " over " << depth);
    std::vector<bool> written(to.size());
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t c = 0; c < (columns + 15) / 16 * 16; ++c) {
        double sum = 0, size = 0;
        bool infinite = false;
        for (int64_t d = 0; c < columns && d < depth; ++d) {
          const int64_t row = product.turn_a ? d : i, column = product.turn_a ? i : d;
          if (product.part == Part::kBelow && column >= row) continue;
          if (product.part == Part::kLower && column > row) continue;
          const float right = b[static_cast<size_t>(product.turn_b ? at(product.b, c, d) : at(product.b, d, c))];
          infinite = infinite || std::isinf(right);
          sum += bf16(a[static_cast<size_t>(at(product.a, row, column))]) * bf16(right);
          size += std::abs(bf16(a[static_cast<size_t>(at(product.a, row, column))]) * bf16(right));
        }
        const auto place = static_cast<size_t>(at(product.to, i, c));
        written[place] = true;
        const double want = sum + (product.add ? static_cast<double>(before[place]) : 0);
        if (infinite)
          ASSERT_FALSE(std::isfinite(to[place])) << i << " " << c;
        else  // where one is not finite, a group of columns is summed of numbers that are not rounded
          ASSERT_NEAR(static_cast<double>(to[place]), want, size * (tainted ? 0x1p-7 : 1e-5) + 1e-6) << i << " " << c;
      }
    for (size_t i = 0; i < to.size(); ++i) ASSERT_TRUE(written[i] || Bits(to[i]) == Bits(before[i])) << i;
  }
  ASSERT_EQ(EmulatedTiles::faults, 0);
}

void Vectors() {
  amx::Sums from, turned;
  float value = 0;
  for (auto& row : from.row)
    for (float& x : row) x = value++;
  amx::Turn(from, &turned);
  alignas(64) float sums[16];
  _mm512_store_ps(sums, amx::SumRows(from));
  for (int i = 0; i < 16; ++i) {
    for (int c = 0; c < 16; ++c) EXPECT_EQ(turned.row[c][i], from.row[i][c]);
    EXPECT_EQ(sums[i], 256.f * static_cast<float>(i) + 120);
  }
}

void Exp() {
  const FloatingMode mode;
  double worst = 0;
  for (float x = 0; x > -87; x -= 0.000973f) {
    const double want = std::exp(static_cast<double>(x)), got = static_cast<double>(_mm512_cvtss_f32(amx::ExpOfNonPositive(_mm512_set1_ps(x))));
    worst = std::max(worst, std::abs(got - want) / want);
  }
  EXPECT_LE(worst, 1.1 * 0x1p-23);
  const auto one = [](float x) TERCET_AMX_ATTR { return _mm512_cvtss_f32(amx::ExpOfNonPositive(_mm512_set1_ps(x))); };
  EXPECT_EQ(one(0), 1);
  EXPECT_EQ(one(-88), 0);
  EXPECT_EQ(one(-1e30f), 0);
  EXPECT_EQ(one(-std::numeric_limits<float>::infinity()), 0);
  EXPECT_TRUE(std::isnan(one(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace amx_checks
}  // namespace tercet::test
TERCET_AFTER_AMX
#endif

namespace tercet::test {
namespace {

std::vector<std::string> Tested() {
  OfferEmulatedAmx();
  std::vector<std::string> names;
  for (const std::string& name : Targets())
    if (name.rfind("AMX", 0) == 0) names.push_back(name);
  return names;
}

#define SKIP_WITHOUT_AVX3() \
  if (Tested().empty()) GTEST_SKIP() << "no AVX-512 here"

#if defined(__x86_64__)
TEST(Verbs, NarrowAsTheInstruction) {
  SKIP_WITHOUT_AVX3();
  amx_checks::Narrow();
}
TEST(Verbs, ProductAsTheManualHasIt) {
  SKIP_WITHOUT_AVX3();
  amx_checks::Product();
}
TEST(Verbs, ProductsOfSeveralTiles) {
  SKIP_WITHOUT_AVX3();
  amx_checks::Tiles();
}
TEST(Verbs, ProductsOfMatrices) {
  SKIP_WITHOUT_AVX3();
  amx_checks::Products();
}
TEST(Verbs, TurnAndSumRows) {
  SKIP_WITHOUT_AVX3();
  amx_checks::Vectors();
}
TEST(Verbs, ExpOfNonPositive) {
  SKIP_WITHOUT_AVX3();
  amx_checks::Exp();
}
#endif

TEST(Amx, TheEmulationIsOfferedLast) {
  SKIP_WITHOUT_AVX3();
  EXPECT_EQ(Targets().back(), "AMX_EMULATED");
  std::string name;
  EXPECT_TRUE(ChooseTarget("amx_emulated", &name).ok());
  EXPECT_EQ(name, "AMX_EMULATED");
}

Owned Cast(const Owned& from, Dtype dtype) {
  if (from.shape.empty()) return from;
  Owned to = Owned::Zeros(dtype, from.shape);
  for (int64_t i = 0; i < from.size(); ++i) to.Set(i, from.Get(i));
  return to;
}
// q, k and v rounded to bf16, the gates too if asked.
OwnedInputs Halved(const OwnedInputs& inputs, bool gates) {
  OwnedInputs halved = inputs;
  for (Owned* owned : {&halved.q, &halved.k, &halved.v}) *owned = Cast(*owned, Dtype::kBF16);
  if (gates)
    for (Owned* owned : {&halved.log_decay, &halved.beta, &halved.remove, &halved.write, &halved.bonus}) *owned = Cast(*owned, Dtype::kBF16);
  return halved;
}

double RootMeanSquare(const std::vector<double>& a, const std::vector<double>& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return a.empty() ? 0 : std::sqrt(squares / static_cast<double>(a.size()));
}

// The numbers, rounded to bf16.
std::vector<double> Rounded(const std::vector<double>& x) {
  Owned owned = Owned::Zeros(Dtype::kBF16, {static_cast<int64_t>(x.size())});
  for (size_t i = 0; i < x.size(); ++i) owned.Set(static_cast<int64_t>(i), x[i]);
  return Numbers(owned);
}

class EveryRule : public testing::TestWithParam<Rule> {
 public:
  void TearDown() override { EXPECT_EQ(EmulatedAmxFaults(), 0) << "tiles were used that were not configured"; }
  static RandomSpec Spec(int64_t tokens = 100) {
    RandomSpec spec;
    spec.rule = GetParam();
    spec.dtype = Dtype::kBF16;
    spec.gate_dtype = Dtype::kF32;
    spec.tokens = tokens;
    spec.key_dim = 40;
    spec.value_dim = 84;
    spec.heads = 2;
    spec.seed = 17;
    return spec;
  }
  static Options OnTarget(const std::string& target, int64_t chunk = 64) {
    Options options;
    options.rule = GetParam();
    options.form = Form::kChunkwise;
    options.chunk = chunk;
    options.target = target;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Amx, EveryRule, testing::ValuesIn([] {
                           std::vector<Rule> rules;
                           for (const RuleInfo& one : Rules()) rules.push_back(one.rule);
                           return rules;
                         }()),
                         [](const auto& instance) { return std::string(Name(instance.param)); });

// Against the truth on the numbers before they were rounded, the error is at most twice that of rounding inputs and outputs alone.
TEST_P(EveryRule, ErrsLittleMoreThanItsInputs) {
  for (const int64_t dim : {64, 128})
    for (const bool gates : {false, true}) {
      RandomSpec spec = Spec(200);
      spec.dtype = Dtype::kF32;
      spec.key_dim = spec.value_dim = dim;
      const OwnedInputs inputs = RandomInputs(spec), halved = Halved(inputs, gates);
      Options options;
      options.rule = GetParam();
      const Answers truth = Oracle<double>(options, inputs.view()), rounded = Oracle<double>(options, halved.view());
      const double allowed = 2 * RootMeanSquare(Rounded(rounded.out), truth.out);
      for (const std::string& target : Tested()) {
        const Results got = Compute(OnTarget(target), halved.view());
        EXPECT_LE(RootMeanSquare(Numbers(got.out), truth.out), allowed) << target << " dim " << dim;
        EXPECT_LE(RootMeanSquare(Numbers(got.final_state), truth.final_state), 2 * RootMeanSquare(rounded.final_state, truth.final_state)) << target;
      }
    }
}

// How far bf16 products may lead from the oracle's answer to the same inputs, relative to the largest number of the tensor: half a unit of bf16
// (2^-9) for each of at most six roundings on the way to a number (of a row, a key, a table's entry, a write, the state, the output), and as much
// again for what the solve makes of them.
constexpr double kTolerance = 12 * 0x1p-9;

// Case n of odd shapes, with what the engine was asked for: every length with every key_dim, and all that a call may have by turns.
struct OddCase {
  int64_t number, tokens, key_dim, value_dim;
  Options options;
  OwnedInputs inputs;
};
template <class Each>
void ForOddShapes(Rule rule, RandomSpec (*spec_of)(int64_t), const std::array<int64_t, 6>& chunks, Each&& each) {
  const int64_t dims[] = {1, 5, 33, 96, 128, 257};
  int64_t n = 0;
  for (const int64_t tokens : {0, 1, 15, 16, 17, 63, 64, 65, 200})
    for (int i = 0; i < 6; ++i, ++n) {
      RandomSpec spec = spec_of(tokens);
      spec.key_dim = dims[i];
      spec.value_dim = dims[(i + n) % 6];
      spec.seed = static_cast<uint64_t>(n);
      spec.heads = 1 + n % 2;
      Options options;
      options.rule = rule;
      options.form = Form::kChunkwise;
      options.chunk = chunks[(n + n / 6) % 6];
      if (n % 5 == 1) spec.q_heads = 2 * spec.heads;
      if (n % 5 == 2) spec.q_heads = spec.k_heads = 1, spec.gate_heads = 1;
      if (n % 5 == 3) spec.batch = 2;
      if (n % 5 == 4 && tokens > 0) spec.offsets = {0, tokens / 3, tokens / 3, tokens};
      if (n % 4 == 3) spec.valid_fraction = 0.7;
      if (n % 3 == 1) options.feature_map = FeatureMap::kEluPlusOne;
      if (n % 3 == 1 && Info(rule).can_normalize) options.normalize = spec.normalize = true;
      if (n % 3 == 2) options.feature_map = n % 2 == 0 ? FeatureMap::kL2Norm : FeatureMap::kRelu;
      if (n % 3 != 0 && !Info(rule).can_normalize) options.feature_map = FeatureMap::kL2Norm;
      if (n % 2 == 0) spec.gate_dtype = Dtype::kBF16;
      spec.initial_state = n % 6 != 0;
      OwnedInputs inputs = RandomInputs(spec);
      // A denominator is a sum of positive numbers: where it may cancel, no tolerance holds.
      for (int64_t c = 0; options.normalize && !inputs.bonus.shape.empty() && c < inputs.bonus.size(); ++c)
        inputs.bonus.Set(c, std::abs(inputs.bonus.Get(c)));
      each(OddCase{n, tokens, spec.key_dim, spec.value_dim, options, std::move(inputs)});
    }
}

TEST_P(EveryRule, ConformsOnOddShapes) {
  ForOddShapes(GetParam(), &Spec, {64, 16, 1, 33, 48, 200}, [](OddCase one) {
    const Answers want = Oracle<double>(one.options, one.inputs.view());
    for (const std::string& target : Tested()) {
      SCOPED_TRACE(target + " T" + std::to_string(one.tokens) + " K" + std::to_string(one.key_dim) + " V" + std::to_string(one.value_dim));
      one.options.target = target;
      ExpectNear(Compute(one.options, one.inputs.view()), want, kTolerance);
    }
  });
}

// A long span, or the parallel form: blocks past the first four, and anchors that many.
TEST_P(EveryRule, ConformsOnLongSpans) {
  const OwnedInputs inputs = RandomInputs(Spec(300));
  Options options;
  options.rule = GetParam();
  const Answers want = Oracle<double>(options, inputs.view());
  for (const std::string& target : Tested()) {
    for (const int64_t chunk : {96, 112, 300}) ExpectNear(Compute(OnTarget(target, chunk), inputs.view()), want, kTolerance);
    Options parallel = OnTarget(target, 0);
    parallel.form = Form::kParallel;
    ExpectNear(Compute(parallel, inputs.view()), want, kTolerance);
  }
}

TEST_P(EveryRule, StrongDecayIsForgetting) {
  if (Info(GetParam()).log_decay_layout.empty()) GTEST_SKIP() << "no decay";
  OwnedInputs inputs = RandomInputs(Spec(150));
  for (int64_t i = 0; i < inputs.log_decay.size(); ++i)
    inputs.log_decay.Set(i, i % 7 == 3 ? -std::numeric_limits<double>::infinity() : i % 3 == 0 ? -30 : i % 5 == 0 ? 0 : inputs.log_decay.Get(i));
  Options options;
  options.rule = GetParam();
  const Answers want = Oracle<double>(options, inputs.view());
  for (const std::string& target : Tested()) ExpectNear(Compute(OnTarget(target), inputs.view()), want, kTolerance);
}

TEST_P(EveryRule, TheFutureChangesNoEarlierBit) {
  const OwnedInputs inputs = RandomInputs(Spec());
  RandomSpec other = Spec();
  other.seed = 99;
  const OwnedInputs others = RandomInputs(other);
  for (const std::string& target : Tested()) {
    for (const int64_t chunk : {16, 48, 64, 100}) {
      const Results whole = Compute(OnTarget(target, chunk), inputs.view());
      for (const int64_t cut : {1, 15, 16, 17, 33, 63, 65, 99}) {
        SCOPED_TRACE(target + " chunk " + std::to_string(chunk) + " cut " + std::to_string(cut));
        OwnedInputs mixed = inputs;  // the same up to the cut, then others, then no numbers
        const std::pair<Owned*, const Owned*> tensors[] = {
            {&mixed.q, &others.q},       {&mixed.k, &others.k},           {&mixed.v, &others.v},        {&mixed.log_decay, &others.log_decay},
            {&mixed.beta, &others.beta}, {&mixed.remove, &others.remove}, {&mixed.write, &others.write}};
        for (const auto& [to, from] : tensors) {
          if (to->shape.size() < 3) continue;
          const size_t token = to->bytes.size() / static_cast<size_t>(to->shape[1]);
          std::memcpy(to->bytes.data() + cut * token, from->bytes.data() + cut * token, (100 - cut) * token);
        }
        const size_t bytes = whole.out.bytes.size() / 100 * cut;
        EXPECT_EQ(std::memcmp(whole.out.bytes.data(), Compute(OnTarget(target, chunk), mixed.view()).out.bytes.data(), bytes), 0);
        for (Owned* owned : {&mixed.q, &mixed.k, &mixed.v})
          for (int64_t i = owned->size() / 100 * cut; i < owned->size(); ++i)
            owned->Set(i, i % 3 == 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity());
        EXPECT_EQ(std::memcmp(whole.out.bytes.data(), Compute(OnTarget(target, chunk), mixed.view()).out.bytes.data(), bytes), 0) << "not finite";
      }
    }
  }
}

// A value that is no number reaches its own column from its token on, and no other.
TEST_P(EveryRule, NotANumberStaysInItsColumn) {
  const OwnedInputs inputs = RandomInputs(Spec());
  for (const std::string& target : Tested()) {
    const Results clean = Compute(OnTarget(target), inputs.view());
    for (const int64_t token : {0, 5, 16, 40, 70}) {
      OwnedInputs tainted = inputs;
      const int64_t heads = 2, V = 84, column = 19, head = 1;
      tainted.v.Set((token * heads + head) * V + column, std::numeric_limits<double>::quiet_NaN());
      const Results got = Compute(OnTarget(target), tainted.view());
      for (int64_t t = 0; t < 100; ++t)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t x = 0; x < V; ++x) {
            const int64_t at = (t * heads + h) * V + x;
            if (h == head && x == column && t >= token)
              EXPECT_TRUE(std::isnan(got.out.Get(at))) << target << " token " << t;
            else
              EXPECT_EQ(got.out.Get(at), clean.out.Get(at)) << target << " token " << t << " head " << h << " column " << x;
          }
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < 40 * V; ++i) {
          if (h == head && i % V == column)
            EXPECT_TRUE(std::isnan(got.final_state.Get(h * 40 * V + i)));
          else
            EXPECT_EQ(got.final_state.Get(h * 40 * V + i), clean.final_state.Get(h * 40 * V + i));
        }
    }
  }
}

// One head, so that threads share its value columns.
TEST_P(EveryRule, ThreadsAndColumnCutsChangeNoBit) {
  RandomSpec spec = Spec(150);
  spec.heads = 1;
  spec.value_dim = 300;
  spec.normalize = Info(GetParam()).can_normalize;
  const OwnedInputs inputs = RandomInputs(spec);
  for (const std::string& target : Tested()) {
    Options options = OnTarget(target);
    options.normalize = spec.normalize;
    if (options.normalize) options.feature_map = FeatureMap::kEluPlusOne;
    options.threads = 1;
    const Results alone = Compute(options, inputs.view());
    for (const int threads : {2, 3, 5}) {
      ThreadExecutor executor(threads);
      options.executor = &executor;
      options.threads = threads;
      ExpectSameBits(Compute(options, inputs.view()), alone);
    }
  }
}

TEST_P(EveryRule, PiecesMakeTheWhole) {
  const OwnedInputs inputs = RandomInputs(Spec(128));
  Options options;
  options.rule = GetParam();
  for (const std::string& target : Tested()) {
    const Results whole = Compute(OnTarget(target), inputs.view());
    Inputs in = inputs.view();
    Results first, second;
    for (ConstTensor* t : {&in.q, &in.k, &in.v, &in.log_decay, &in.beta, &in.remove, &in.write})
      if (t->rank > 2) t->shape[1] = 64;
    first = Compute(OnTarget(target), in);
    for (ConstTensor* t : {&in.q, &in.k, &in.v, &in.log_decay, &in.beta, &in.remove, &in.write})
      if (t->rank > 2) t->data = static_cast<const std::byte*>(t->data) + 64 * t->strides[1] * contract::SizeOf(t->dtype);
    in.initial_state = first.final_state.view();
    second = Compute(OnTarget(target), in);
    // Whole chunks: the very same bits.
    EXPECT_TRUE(SameBits(second.final_state, whole.final_state)) << target;
    EXPECT_EQ(std::memcmp(second.out.bytes.data(), whole.out.bytes.data() + first.out.bytes.size(), second.out.bytes.size()), 0) << target;
  }
}

// Channels that do not lie side by side, from addresses of any kind.
TEST_P(EveryRule, ViewsAreWhatTheyShow) {
  const OwnedInputs inputs = RandomInputs(Spec(70));
  for (const std::string& target : Tested()) {
    const Results plain = Compute(OnTarget(target), inputs.view());
    Inputs in = inputs.view();
    std::vector<std::vector<std::byte>> spread;
    spread.reserve(8);
    for (ConstTensor* t : {&in.q, &in.k, &in.v, &in.log_decay, &in.remove, &in.write}) {
      if (t->rank != 4) continue;
      const int64_t size = contract::SizeOf(t->dtype), count = contract::Count(*t);
      spread.emplace_back(3 * size * count + 1);
      std::byte* to = spread.back().data() + 1;
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + 3 * size * i, static_cast<const std::byte*>(t->data) + size * i, static_cast<size_t>(size));
      t->data = to;
      for (int64_t& stride : t->strides) stride *= 3;
    }
    Results room = Room(OnTarget(target), in);
    std::vector<std::byte> wide(2 * room.out.bytes.size() + 1);
    Outputs out = room.view();
    out.out.data = wide.data() + 1;
    for (int64_t& stride : out.out.strides) stride *= 2;
    const Status status = Attend(OnTarget(target), in, out);
    ASSERT_TRUE(status.ok()) << status.message;
    for (int64_t i = 0; i < room.out.size(); ++i) std::memcpy(room.out.bytes.data() + 2 * i, wide.data() + 1 + 4 * i, 2);
    ExpectSameBits(room, plain);
  }
}

// ---- The proof ----------------------------------------------------------------------------------------------------------------------------------

std::string Ratios(const std::vector<proof::Judgement>& judgements) {
  std::string text;
  for (const proof::Judgement& one : judgements) text += one.form + " " + one.tensor + " " + std::to_string(one.ratio) + "; ";
  return text;
}

TEST_P(EveryRule, ProvesTheSameFunction) {
  for (const std::string& target : Tested())
    for (const auto& [tokens, key_dim, value_dim] :
         {std::array<int64_t, 3>{0, 3, 2}, {1, 5, 3}, {17, 1, 5}, {21, 33, 17}, {70, 16, 20}, {200, 64, 8}})
      for (const FeatureMap map : {FeatureMap::kIdentity, FeatureMap::kEluPlusOne}) {
        RandomSpec spec = Spec(tokens);
        spec.key_dim = key_dim;
        spec.value_dim = value_dim;
        spec.feature_map = map;
        spec.normalize = map == FeatureMap::kEluPlusOne && Info(GetParam()).can_normalize;
        proof::VerifyOptions options;
        options.attend = OnTarget(target, 0);
        options.attend.feature_map = map;
        options.attend.normalize = spec.normalize;
        const OwnedInputs inputs = RandomInputs(spec);
        proof::Verdict verdict;
        const Status status = proof::Verify(options, inputs.view(), {}, &verdict);
        ASSERT_TRUE(status.ok()) << status.message;
        EXPECT_EQ(verdict.target, target);
        EXPECT_TRUE(verdict.same()) << target << " T" << tokens << " K" << key_dim << " V" << value_dim << " " << Ratios(verdict.judgements);
        const proof::Operands operands[] = {proof::Operands::kInBF16, proof::Operands::kNotRounded, proof::Operands::kInBF16};
        for (size_t form = 0; form < 3; ++form) EXPECT_EQ(verdict.judgements[form].operands, operands[form]) << verdict.judgements[form].form;
        // What is planted is computed without tiles, and seen.
        options.plant = proof::Plant::kMask;
        if (tokens < 2 || !proof::Verify(options, inputs.view(), {}, &verdict).ok()) continue;
        EXPECT_EQ(verdict.judgements[2].operands, proof::Operands::kNotRounded);
        EXPECT_FALSE(verdict.judgements[2].same) << target << " T" << tokens << " " << Ratios(verdict.judgements);
      }
}

// Somebody's answers, here those of tiles, judged where there are none.
TEST_P(EveryRule, ItsAnswersAreTheLayersOnceTheirOperandsAreSaid) {
  const OwnedInputs inputs = RandomInputs(Spec(130));
  const std::string beside = "AVX3";
  for (const std::string& target : Tested()) {
    Results answers = Room(OnTarget(target), inputs.view());
    const Status computed = Attend(OnTarget(target), inputs.view(), answers.view());
    ASSERT_TRUE(computed.ok()) << computed.message;
    proof::VerifyOptions options;
    options.attend = OnTarget(beside);
    const auto judged = [&](proof::Operands operands) {
      options.expected_operands = operands;
      proof::Verdict verdict;
      const Status status = proof::Verify(options, inputs.view(), {answers.out.view(), answers.final_state.view(), {}}, &verdict);
      EXPECT_TRUE(status.ok()) << status.message;
      EXPECT_EQ(verdict.judgements[3].operands, operands);
      EXPECT_TRUE(verdict.judgements[0].same && verdict.judgements[1].same && verdict.judgements[2].same);
      return verdict.judgements[3].ratio;
    };
    EXPECT_LE(judged(proof::Operands::kInBF16), 2) << target;
    // The products of linear's state are exact, as what is given is.
    const double unsaid = judged(proof::Operands::kNotRounded);
    EXPECT_TRUE(GetParam() == Rule::kLinear || unsaid > 6) << target << " " << unsaid;
    // Two channels of v that change places.
    for (int64_t i = 0; i < answers.out.size(); i += 84) {
      const double first = answers.out.Get(i);
      answers.out.Set(i, answers.out.Get(i + 1));
      answers.out.Set(i + 1, first);
    }
    EXPECT_GT(judged(proof::Operands::kInBF16), 6) << target;
  }
}

// ---- Gradients ----------------------------------------------------------------------------------------------------------------------------------

class EveryGradient : public EveryRule {
 public:
  static std::vector<const std::vector<double>*> Parts(const proof::InputGradients<double>& x) {
    return {&x.q, &x.k, &x.v, &x.log_decay, &x.beta, &x.remove, &x.write, &x.bonus, &x.initial_state, &x.initial_key_sum};
  }
};
INSTANTIATE_TEST_SUITE_P(Amx, EveryGradient, testing::ValuesIn([] {
                           std::vector<Rule> rules;
                           for (const RuleInfo& one : Rules()) rules.push_back(one.rule);
                           return rules;
                         }()),
                         [](const auto& instance) { return std::string(Name(instance.param)); });

// Against the truth on the numbers before they were rounded, the error is at most twice that of rounding inputs, what is given and gradients alone.
TEST_P(EveryGradient, ErrsLittleMoreThanItsInputs) {
  for (const int64_t dim : {64, 128})
    for (const bool gates : {false, true}) {
      RandomSpec spec = Spec(150);
      spec.dtype = Dtype::kF32;
      spec.key_dim = spec.value_dim = dim;
      const OwnedInputs inputs = RandomInputs(spec), halved = Halved(inputs, gates);
      Options options;
      options.rule = GetParam();
      const OwnedGiven given = DrawGiven(options, inputs.view(), 3), given_halved{Cast(given.out, Dtype::kBF16), given.final_state, {}};
      const proof::InputGradients<double> truth = OracleGradients<double>(options, inputs.view(), given.view());
      const proof::InputGradients<double> rounded = OracleGradients<double>(options, halved.view(), given_halved.view());
      for (const std::string& target : Tested())
        for (const int64_t chunk : {0, 16, 64}) {
          OwnedGradients got = ComputeGradients(OnTarget(target, chunk), halved, given_halved);
          for (size_t part = 0; part < got.All().size(); ++part) {
            const auto [name, tensor] = got.All()[part];
            if (tensor->shape.empty()) continue;
            Owned least = *tensor;
            for (int64_t i = 0; i < least.size(); ++i) least.Set(i, (*Parts(rounded)[part])[static_cast<size_t>(i)]);
            const double noise = RootMeanSquare(Numbers(least), *Parts(truth)[part]);
            ASSERT_GT(noise, 0) << name;
            EXPECT_LE(RootMeanSquare(Numbers(*tensor), *Parts(truth)[part]), 2 * noise)
                << target << " dim " << dim << " chunk " << chunk << " " << name << (gates ? ", gates of bf16" : "");
          }
        }
    }
}

// A number of a gradient has been through a walk forward and one back, twice as many roundings.
constexpr double kGradientTolerance = 2 * kTolerance;

TEST_P(EveryGradient, ConformsOnOddShapes) {
  ForOddShapes(GetParam(), &Spec, {64, 16, 0, 33, 48, 200}, [](OddCase one) {
    OwnedGiven given = DrawGiven(one.options, one.inputs.view(), static_cast<uint64_t>(one.number));
    const proof::InputGradients<double> want = OracleGradients<double>(one.options, one.inputs.view(), given.view());
    for (const std::string& target : Tested()) {
      SCOPED_TRACE(target + " T" + std::to_string(one.tokens) + " K" + std::to_string(one.key_dim) + " V" + std::to_string(one.value_dim));
      one.options.target = target;
      if (one.number % 4 == 1) given.saved = Save(one.options, one.inputs.view());
      OwnedGradients got = ComputeGradients(one.options, one.inputs, given);
      ExpectNearGradients(got, want, kGradientTolerance);
    }
  });
}

TEST_P(EveryGradient, StrongDecayIsForgetting) {
  if (Info(GetParam()).log_decay_layout.empty()) GTEST_SKIP() << "no decay";
  OwnedInputs inputs = RandomInputs(Spec(150));
  for (int64_t i = 0; i < inputs.log_decay.size(); ++i)
    inputs.log_decay.Set(i, i % 7 == 3 ? -std::numeric_limits<double>::infinity() : i % 3 == 0 ? -30 : i % 5 == 0 ? 0 : inputs.log_decay.Get(i));
  Options options;
  options.rule = GetParam();
  const OwnedGiven given = DrawGiven(options, inputs.view(), 4);
  const proof::InputGradients<double> want = OracleGradients<double>(options, inputs.view(), given.view());
  for (const std::string& target : Tested()) {
    OwnedGradients got = ComputeGradients(OnTarget(target), inputs, given);
    ExpectNearGradients(got, want, kGradientTolerance);
  }
}

// What is given of a token reaches no input of a later one but through the last state, be it a number or not.
TEST_P(EveryGradient, WhatIsGivenOfATokenChangesNoLaterBit) {
  const OwnedInputs inputs = RandomInputs(Spec());
  for (const std::string& target : Tested())
    for (const int64_t chunk : {16, 32, 64, 100}) {
      const OwnedGiven given = DrawGiven(OnTarget(target, chunk), inputs.view(), 5);
      OwnedGradients whole = ComputeGradients(OnTarget(target, chunk), inputs, given);
      for (const int64_t token : {0, 15, 16, 40, 98})
        for (const double value : {7.0, std::numeric_limits<double>::quiet_NaN()}) {
          OwnedGiven other = given;
          const int64_t row = other.out.size() / 100;
          for (int64_t i = token * row; i < (token + 1) * row; ++i) other.out.Set(i, value);
          OwnedGradients got = ComputeGradients(OnTarget(target, chunk), inputs, other);
          for (size_t part = 0; part < 7; ++part) {
            const auto [name, tensor] = got.All()[part];
            if (tensor->shape.size() < 3) continue;
            // A NaN is tried alone: its chunk's columns are summed in another way.
            const size_t a_token = tensor->bytes.size() / 100, from = a_token * static_cast<size_t>(token + 1);
            if (value == 7.0) {
              EXPECT_EQ(std::memcmp(tensor->bytes.data() + from, whole.All()[part].second->bytes.data() + from, tensor->bytes.size() - from), 0)
                  << target << " chunk " << chunk << " token " << token << " " << name;
            } else {
              for (int64_t i = tensor->size() / 100 * (token + 1); i < tensor->size(); ++i)
                ASSERT_TRUE(std::isfinite(tensor->Get(i))) << target << " chunk " << chunk << " token " << token << " " << name;
            }
          }
        }
    }
}

TEST_P(EveryGradient, ThreadsChangeNoBit) {
  const OwnedInputs inputs = RandomInputs(Spec(150));
  for (const std::string& target : Tested()) {
    Options options = OnTarget(target);
    const OwnedGiven given = DrawGiven(options, inputs.view(), 6);
    options.threads = 1;
    OwnedGradients alone = ComputeGradients(options, inputs, given);
    for (const int threads : {2, 3}) {
      ThreadExecutor executor(threads);
      options.executor = &executor;
      options.threads = threads;
      OwnedGradients got = ComputeGradients(options, inputs, given);
      for (size_t part = 0; part < got.All().size(); ++part)
        EXPECT_TRUE(got.All()[part].second->shape.empty() || SameBits(*got.All()[part].second, *alone.All()[part].second)) << got.All()[part].first;
      EXPECT_EQ(got.scale, alone.scale);
    }
  }
}

// Shorter than a tile there is nothing to gain, and the bits are those of the target beside.
TEST_P(EveryGradient, OfShortChunksAreThoseOfTheTargetBeside) {
  const OwnedInputs inputs = RandomInputs(Spec(50));
  for (const std::string& target : Tested()) {
    const OwnedGiven given = DrawGiven(OnTarget(target, 8), inputs.view(), 7);
    OwnedGradients got = ComputeGradients(OnTarget(target, 8), inputs, given), beside = ComputeGradients(OnTarget("AVX3", 8), inputs, given);
    OwnedGradients longer = ComputeGradients(OnTarget(target, 16), inputs, given), other = ComputeGradients(OnTarget("AVX3", 16), inputs, given);
    EXPECT_TRUE(SameBits(got.k, beside.k) && SameBits(got.v, beside.v)) << target;
    EXPECT_FALSE(SameBits(longer.k, other.k)) << target << " did not run on tiles";
  }
}

TEST_P(EveryGradient, ProvesTheOraclesGradients) {
  for (const std::string& target : Tested())
    for (const auto& [tokens, key_dim, value_dim] : {std::array<int64_t, 3>{1, 5, 3}, {21, 5, 3}, {70, 16, 20}, {40, 33, 7}})
      for (const bool normalize : {false, true}) {
        if (normalize && !Info(GetParam()).can_normalize) continue;
        RandomSpec spec = Spec(tokens);
        spec.key_dim = key_dim;
        spec.value_dim = value_dim;
        spec.normalize = normalize;
        spec.feature_map = normalize ? FeatureMap::kEluPlusOne : FeatureMap::kIdentity;
        proof::VerifyOptions options;
        options.attend = OnTarget(target, 0);
        options.attend.form = Form::kAutomatic;
        options.attend.normalize = normalize;
        options.attend.feature_map = spec.feature_map;
        const OwnedInputs inputs = RandomInputs(spec);
        proof::GradientVerdict verdict;
        const Status status = proof::VerifyGradient(options, inputs.view(), &verdict);
        ASSERT_TRUE(status.ok()) << status.message;
        EXPECT_TRUE(verdict.same()) << target << " T" << tokens << (normalize ? " normalised " : " ") << Ratios(verdict.judgements);
        for (const proof::Judgement& one : verdict.judgements)
          EXPECT_EQ(one.operands == proof::Operands::kInBF16, one.form == "chunkwise" && verdict.chunk >= 16) << one.form;
      }
}

}  // namespace
}  // namespace tercet::test
