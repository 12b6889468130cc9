// The proof: it raises no false alarm, it sees every planted error, and what it rests on is what it says.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/proof/algebra.hpp"
#include "src/proof/heads.hpp"
#include "src/proof/inputs.hpp"
#include "src/proof/judge.hpp"
#include "src/proof/monte_carlo.hpp"
#include "src/proof/verify.hpp"
#include "src/proof/workers.hpp"
#include "src/reference/chunkwise.hpp"
#include "src/reference/recurrent.hpp"
#include "src/rules/all.hpp"

namespace tercet::proof {
namespace {

// ---- Monte Carlo arithmetic ---------------------------------------------------------------------------------------------------------------

template <class W>
class MonteCarloTest : public testing::Test {};
using WorkingTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(MonteCarloTest, WorkingTypes);

// Rounds x many times by `round(x, n, y)` and expects only its two neighbours, in proportions that make x the mean.
template <class W, class Round>
void ExpectNeighboursAndMean(Wider<W> x, Round round) {
  constexpr int64_t kRuns = 4096;
  const std::vector<Wider<W>> given(kRuns, x);
  std::vector<W> rounded(kRuns);
  round(given.data(), kRuns, rounded.data());
  W low = static_cast<W>(x);
  if (low > x) low = std::nextafter(low, -std::numeric_limits<W>::infinity());
  const W high = static_cast<Wider<W>>(low) == x ? low : std::nextafter(low, std::numeric_limits<W>::infinity());
  int64_t ups = 0;
  for (const W y : rounded) {
    ASSERT_TRUE(y == low || y == high) << static_cast<double>(x) << " gave " << y;
    ups += y == high;
  }
  if (low == high) return;
  const double p = static_cast<double>((x - low) / (static_cast<Wider<W>>(high) - low));
  // Five standard deviations of a binomial, and one run for a p that is nearly 0 or 1.
  EXPECT_NEAR(static_cast<double>(ups), p * kRuns, 5 * std::sqrt(kRuns * p * (1 - p)) + 1) << static_cast<double>(x);
}

TYPED_TEST(MonteCarloTest, GivesOnlyTheTwoNeighboursAndTheRightMean) {
  using W = TypeParam;
  using Wide = Wider<W>;
  if (std::numeric_limits<Wide>::digits <= std::numeric_limits<W>::digits) GTEST_SKIP() << "no wider type";
  MonteCarlo<W> rounding(1);
  std::vector<Wide> values = {0,
                              1,
                              -1,
                              Wide(1) / 3,
                              Wide(-2) / 3,
                              2 - std::numeric_limits<Wide>::epsilon(),
                              1 + std::numeric_limits<Wide>::epsilon(),
                              -4 + 2 * std::numeric_limits<Wide>::epsilon(),
                              std::numeric_limits<W>::max(),
                              std::numeric_limits<W>::min()};
  RandomWords words(2);
  for (int i = 0; i < 100; ++i) {
    const uint32_t* word = words.Row(3);
    values.push_back(std::ldexp(Wide(word[0]) + Wide(word[1]) * Wide(0x1p-32), static_cast<int>(word[2] % 64) - 64) * (word[2] >> 31 ? 1 : -1));
  }
  for (const Wide x : values) {
    ExpectNeighboursAndMean<W>(x, [&](const Wide* from, int64_t n, W* to) { rounding.Round(from, n, to); });
    ExpectNeighboursAndMean<W>(x, [&](const Wide* from, int64_t n, W* to) {
      const uint32_t* row = words.Row(n);
      for (int64_t i = 0; i < n; ++i) to[i] = RoundAtRandom<W>(from[i], row[i]);
    });
    ExpectNeighboursAndMean<W>(x, [&](const Wide* from, int64_t n, W* to) {
      std::vector<Wide> sums(from, from + n);
      rounding.Partial(sums.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        to[i] = static_cast<W>(sums[i]);
        ASSERT_EQ(static_cast<Wide>(to[i]), sums[i]);  // rounded already
      }
    });
  }
}

TYPED_TEST(MonteCarloTest, FlushesWhatIsTooSmallAndKeepsWhatIsNotFinite) {
  using W = TypeParam;
  using Wide = Wider<W>;
  if (std::numeric_limits<Wide>::digits <= std::numeric_limits<W>::digits) GTEST_SKIP() << "no wider type";
  const Wide infinity = std::numeric_limits<Wide>::infinity(), small = std::numeric_limits<W>::min();
  const std::vector<Wide> x = {infinity,
                               -infinity,
                               std::numeric_limits<Wide>::quiet_NaN(),
                               small / 3,
                               -small / 1024,
                               small * Wide(0x1p-100),
                               -0.0,
                               Wide(std::numeric_limits<W>::max()) * 4};
  std::vector<W> y(x.size());
  MonteCarlo<W> rounding(1);
  rounding.Round(x.data(), static_cast<int64_t>(x.size()), y.data());
  EXPECT_EQ(y[0], infinity);
  EXPECT_EQ(y[1], -infinity);
  EXPECT_TRUE(std::isnan(y[2]));
  for (size_t i = 3; i < 7; ++i) EXPECT_EQ(y[i], 0) << i;
  EXPECT_EQ(y[7], infinity);
}

TYPED_TEST(MonteCarloTest, FactorsLieWithinHalfAUnit) {
  using W = TypeParam;
  using Wide = Wider<W>;
  const Wide half = std::ldexp(Wide(1), -std::numeric_limits<W>::digits);
  std::vector<W> x(4096, W(1.25));
  x[0] = std::numeric_limits<W>::infinity();
  std::vector<Wide> y(x.size());
  MonteCarlo<W> rounding(3);
  rounding.Factors(x.data(), static_cast<int64_t>(x.size()), y.data());
  EXPECT_EQ(y[0], std::numeric_limits<Wide>::infinity());
  double sum = 0, squares = 0;
  for (size_t i = 1; i < y.size(); ++i) {
    const auto error = static_cast<double>((y[i] / Wide(1.25) - 1) / half);
    ASSERT_LE(std::abs(error), 1 + 1e-6);
    sum += error;
    squares += error * error;
  }
  EXPECT_NEAR(sum / 4095, 0, 5 * std::sqrt(1.0 / 3 / 4095));
  EXPECT_NEAR(squares / 4095, 1.0 / 3, 0.03);
}

// Between the neighbours of 16 bits, in the right proportion; what f16 has below its normal range is rounded to multiples of 2^-24.
TEST(RoundAtRandom, GivesTheNeighboursOfSixteenBits) {
  const auto expect = [](const Narrower& to, float x, float low, float high) {
    int64_t ups = 0;
    constexpr int64_t kRuns = 4096;
    for (int64_t i = 0; i < kRuns; ++i) {
      const float y = RoundAtRandom(to, x, static_cast<uint32_t>(i << 20));
      ASSERT_TRUE(y == low || y == high) << x << " gave " << y;
      ups += y == high;
    }
    const double p = static_cast<double>(x - low) / static_cast<double>(high - low);
    EXPECT_NEAR(static_cast<double>(ups) / kRuns, std::isfinite(p) ? p : 0, 1.0 / kRuns) << x;
  };
  for (const float sign : {1.0f, -1.0f}) {
    expect(kBF16, sign * (1 + 0x1p-9f), sign, sign * (1 + 0x1p-7f));
    expect(kBF16, sign * (2 - 0x1p-10f), sign * (2 - 0x1p-7f), sign * 2);
    expect(kF16, sign * (1 + 0x1p-11f), sign, sign * (1 + 0x1p-10f));
    expect(kF16, sign * 0x1.8p-24f, sign * 0x1p-24f, sign * 0x1p-23f);
    expect(kF16, sign * 0x1p-26f, 0, sign * 0x1p-24f);
  }
  for (const float exact : {0.0f, 1.0f, -0x1.02p5f, 0x1p-126f}) EXPECT_EQ(RoundAtRandom(kBF16, exact, 0), exact);
  for (const float exact : {0x1p-24f, -0x1.004p5f, 65504.0f}) EXPECT_EQ(RoundAtRandom(kF16, exact, 0), exact);
  EXPECT_EQ(RoundAtRandom(kF16, 65530.0f, 0), INFINITY);
  EXPECT_TRUE(std::isnan(RoundAtRandom(kF16, NAN, 0)));
}

// ---- Random inputs ------------------------------------------------------------------------------------------------------------------------

TEST(RandomInputs, AreTheSameOnEveryMachine) {
  RandomSpec spec;
  spec.rule = Rule::kKda;
  spec.dtype = Dtype::kF64;
  spec.seed = 42;
  const OwnedInputs in = RandomInputs(spec);
  // Written down once; std::mt19937_64 and std::seed_seq are specified to the bit, and the rest is exact or correctly rounded.
  EXPECT_EQ(in.q.Get(0), -0x1.2357e69b319c3p+1);
  EXPECT_EQ(in.k.Get(7), -0x1.0b60d866e8382p-3);
  EXPECT_EQ(in.log_decay.Get(3), -0x1.33a3daf6a6ca6p-2);
  EXPECT_EQ(in.beta.Get(5), 0x1.4b8c4b155b843p-1);
}

TEST(RandomInputs, KeepTheirPromises) {
  rules::All::ForEach([&](auto rule) {
    RandomSpec spec;
    spec.rule = rule.kRule;
    spec.tokens = 400;
    spec.key_dim = 8;
    spec.value_dim = 4;
    const OwnedInputs in = RandomInputs(spec);
    for (int64_t i = 0; i < in.log_decay.size(); ++i) {
      EXPECT_LE(in.log_decay.Get(i), -0x1p-10);
      EXPECT_GE(in.log_decay.Get(i), -1);
    }
    for (int64_t i = 0; i < in.beta.size(); ++i) EXPECT_TRUE(in.beta.Get(i) >= 0 && in.beta.Get(i) <= 1);
    double mean = 0, square = 0;
    for (int64_t i = 0; i < in.q.size(); ++i) {
      mean += in.q.Get(i) / static_cast<double>(in.q.size());
      square += in.q.Get(i) * in.q.Get(i) / static_cast<double>(in.q.size());
    }
    EXPECT_NEAR(mean, 0, 0.07);
    EXPECT_NEAR(square, 1, 0.1);
    // No state grows: a sum of 400 writes of size 1 without decay is a random walk of length 20, and a key lies mostly within 3 / sqrt(K).
    contract::Layer layer;
    Options options;
    options.rule = spec.rule;
    const Inputs inputs = in.view();
    ASSERT_TRUE(contract::Validate(options, inputs, nullptr, &layer).ok());
    const auto answer = reference::Recurrent(HeadOf<double>(layer, 0, ValidTokens(layer, contract::SequenceAt(layer, 0)), 1));
    for (const double x : answer.state) EXPECT_LT(std::abs(x), 60) << rule.kName;
  });
}

TEST(RandomInputs, SuitTheFeatureMapOfADeltaRule) {
  RandomSpec spec;
  spec.rule = Rule::kDelta;
  spec.tokens = 300;
  spec.feature_map = FeatureMap::kEluPlusOne;
  const OwnedInputs in = RandomInputs(spec);
  contract::Layer layer;
  Options options;
  options.rule = spec.rule;
  options.feature_map = spec.feature_map;
  const Inputs inputs = in.view();
  ASSERT_TRUE(contract::Validate(options, inputs, nullptr, &layer).ok());
  const auto head = HeadOf<double>(layer, 0, ValidTokens(layer, contract::SequenceAt(layer, 0)), 0);
  for (int64_t t = 0; t < head.n; ++t) {
    double square = 0;
    for (int64_t c = 0; c < head.K; ++c) square += head.k[t * head.K + c] * head.k[t * head.K + c];
    EXPECT_LT(head.beta[t] * square, 1);
  }
}

// ---- A call's inputs and verdict ----------------------------------------------------------------------------------------------------------

struct Case {
  RandomSpec spec;
  VerifyOptions options;
  OwnedInputs inputs;
  Expected expected;
  Verdict verdict;

  Case(Rule rule, Dtype dtype, int64_t tokens, int64_t key_dim, int64_t value_dim, uint64_t seed = 1) {
    spec.rule = rule;
    spec.dtype = dtype;
    spec.tokens = tokens;
    spec.key_dim = key_dim;
    spec.value_dim = value_dim;
    spec.seed = seed;
    options.seed = seed;
    options.attend.rule = rule;
  }

  Status Verify() {
    options.attend.normalize = spec.normalize;
    options.attend.feature_map = spec.feature_map;
    inputs = RandomInputs(spec);
    return proof::Verify(options, inputs.view(), expected, &verdict);
  }

  std::string Text() const {
    std::string text = std::string(Name(spec.rule)) + " " + std::string(Name(spec.dtype)) + " T" + std::to_string(spec.tokens) + " K" +
                       std::to_string(spec.key_dim) + " V" + std::to_string(spec.value_dim) + " chunk " + std::to_string(verdict.chunk) + " seed " +
                       std::to_string(spec.seed);
    for (const Judgement& j : verdict.judgements)
      text +=
          "\n  " + j.form + " " + j.tensor + ": " + std::to_string(j.distance) + " / " + std::to_string(j.noise) + " = " + std::to_string(j.ratio);
    return text;
  }
};

constexpr int64_t kSizes[][3] = {{0, 3, 2}, {1, 1, 1}, {1, 5, 3}, {2, 2, 1}, {5, 1, 2}, {17, 33, 5}, {64, 16, 8}, {65, 4, 1}, {96, 20, 12}};

template <class Body>
void ForEachRule(Body body) {
  for (const RuleInfo& info : Rules()) body(info);
}

TEST(Verify, RaisesNoFalseAlarm) {
  ForEachRule([](const RuleInfo& info) {
    for (const auto& [tokens, key_dim, value_dim] : kSizes)
      for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16})
        for (const uint64_t seed : {1, 2}) {
          Case c(info.rule, dtype, tokens, key_dim, value_dim, seed);
          const Status status = c.Verify();
          ASSERT_TRUE(status.ok()) << status.message;
          EXPECT_TRUE(c.verdict.same()) << c.Text();
          ASSERT_EQ(c.verdict.judgements.size(), 3u);
          EXPECT_EQ(c.verdict.judgements[0].form, "parallel");
          EXPECT_EQ(c.verdict.judgements[1].form, "recurrent");
          EXPECT_EQ(c.verdict.judgements[2].form, "chunkwise");
        }
  });
}

TEST(Verify, RaisesNoFalseAlarmWhateverTheLayerHas) {
  ForEachRule([](const RuleInfo& info) {
    const auto expect_same = [&](const char* what, auto change) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
        Case c(info.rule, dtype, 50, 12, 7);
        change(&c);
        const Status status = c.Verify();
        ASSERT_TRUE(status.ok()) << what << ": " << status.message;
        EXPECT_TRUE(c.verdict.same()) << what << ": " << c.Text();
      }
    };
    expect_same("gates of f32", [](Case* c) { c->spec.gate_dtype = Dtype::kF32; });
    expect_same("no initial state", [](Case* c) { c->spec.initial_state = false; });
    expect_same("grouped heads", [](Case* c) {
      c->spec.heads = 4;
      c->spec.k_heads = 2;
      c->spec.gate_heads = 1;
      c->spec.q_heads = 8;
    });
    expect_same("packed sequences, one of them empty", [](Case* c) { c->spec.offsets = {0, 20, 20, 21, 50}; });
    expect_same("tokens that are not valid", [](Case* c) {
      c->spec.batch = 2;
      c->spec.valid_fraction = 0.7;
    });
    for (const FeatureMap map : {FeatureMap::kEluPlusOne, FeatureMap::kRelu, FeatureMap::kL2Norm})
      expect_same("a feature map", [&](Case* c) { c->spec.feature_map = map; });
    for (const int64_t chunk : {1, 7, 50, 1000}) expect_same("a chunk", [&](Case* c) { c->options.attend.chunk = chunk; });
    for (const FeatureMap map : {FeatureMap::kIdentity, FeatureMap::kEluPlusOne})
      if (info.can_normalize)
        expect_same("the normaliser", [&](Case* c) {
          c->spec.normalize = true;
          c->spec.feature_map = map;
        });
  });
}

// What is not a number in the inputs is so in every form's answer, and in the same places.
TEST(Verify, AgreesOnNanAndInf) {
  ForEachRule([](const RuleInfo& info) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
      Case c(info.rule, dtype, 40, 6, 5);
      c.inputs = RandomInputs(c.spec);
      c.inputs.v.Set(2 * 5 * 20 + 3, NAN);
      c.inputs.v.Set(2 * 5 * 30 + 1, INFINITY);
      c.inputs.k.Set(2 * 6 * 35 + 8, NAN);
      const Status status = Verify(c.options, c.inputs.view(), {}, &c.verdict);
      ASSERT_TRUE(status.ok()) << status.message;
      EXPECT_TRUE(c.verdict.same()) << c.Text();
      for (const Judgement& judgement : c.verdict.judgements) {
        EXPECT_TRUE(std::isfinite(judgement.largest));
        EXPECT_GT(judgement.ratio, 0);  // the numbers before and beside them are judged all the same
      }
    }
  });
}

// f16 ends at 65504. What is beyond it is inf in out, and a number in the state.
TEST(Verify, KnowsWhereF16Ends) {
  Case c(Rule::kLinear, Dtype::kF16, 30, 6, 5);
  c.inputs = RandomInputs(c.spec);
  for (int64_t i = 0; i < c.inputs.v.size(); ++i) c.inputs.v.Set(i, c.inputs.v.Get(i) * 12000);
  c.options.attend.scale = 2;
  Status status = Verify(c.options, c.inputs.view(), {}, &c.verdict);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_TRUE(c.verdict.same()) << c.Text();
  Owned wrong = c.verdict.out;
  int64_t beyond = -1, within = -1;
  for (int64_t i = 0; i < wrong.size(); ++i) {
    ASSERT_FALSE(std::isnan(wrong.Get(i)));
    (std::isinf(wrong.Get(i)) ? beyond : within) = i;
  }
  ASSERT_TRUE(beyond >= 0 && within >= 0);
  for (const int64_t i : {beyond, within}) {
    wrong = c.verdict.out;
    wrong.Set(i, i == beyond ? 65504 : INFINITY);
    c.expected.out = wrong.view();
    Verdict verdict;
    status = Verify(c.options, c.inputs.view(), c.expected, &verdict);
    ASSERT_TRUE(status.ok()) << status.message;
    EXPECT_FALSE(verdict.judgements[3].same);
  }
}

// An out whose every number is one unit in the last place off is not the same function's: the noise of one rounding hides no second one.
TEST(Judge, SeesOneUnitInTheLastPlaceOfSixteenBits) {
  for (const Dtype dtype : {Dtype::kBF16, Dtype::kF16}) {
    Case c(Rule::kGla, dtype, 60, 12, 20);
    ASSERT_TRUE(c.Verify().ok());
    ASSERT_TRUE(c.verdict.same());
    for (const int units : {1, 8}) {
      Owned off = c.verdict.out;
      for (int64_t i = 0; i < off.size(); ++i) {
        uint16_t bits;
        std::memcpy(&bits, off.bytes.data() + 2 * i, 2);
        bits = static_cast<uint16_t>(bits + units);
        std::memcpy(off.bytes.data() + 2 * i, &bits, 2);
      }
      c.expected.out = off.view();
      ASSERT_TRUE(c.Verify().ok());
      // One unit is what a second rounding may cost, and within the limit of any dtype; eight are beyond it.
      EXPECT_EQ(c.verdict.judgements[3].same, units == 1) << c.Text();
      EXPECT_GT(c.verdict.judgements[3].ratio, c.verdict.judgements[0].ratio);
    }
  }
}

// Decays that underflow, forget all and keep all: products below the normal range are zero in the library and in the noise.
TEST(Verify, RaisesNoFalseAlarmUnderStrongDecay) {
  ForEachRule([](const RuleInfo& info) {
    if (info.log_decay_layout.empty()) return;
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16})
      for (const int64_t chunk : {1, 16, 64, 70})
        for (const bool keeps : {false, true}) {
          Case c(info.rule, dtype, 70, 6, 5);
          c.inputs = RandomInputs(c.spec);
          const int64_t size = c.inputs.log_decay.size();
          for (int64_t i = 0; i < size; ++i) c.inputs.log_decay.Set(i, keeps ? 0 : i % 3 == 0 ? -30 : -0.1);
          if (size > 300) c.inputs.log_decay.Set(size / 2, -INFINITY);
          c.options.attend.chunk = chunk;
          const Status status = Verify(c.options, c.inputs.view(), {}, &c.verdict);
          ASSERT_TRUE(status.ok()) << status.message;
          EXPECT_TRUE(c.verdict.same()) << c.Text();
          EXPECT_TRUE(std::isfinite(c.verdict.out.Get(0)));
        }
  });
}

// Gates that are the same at every token: exp of them errs the same way every time, and the error of the product grows with the tokens, not their
// root.
TEST(Verify, RaisesNoFalseAlarmUnderAConstantGate) {
  ForEachRule([](const RuleInfo& info) {
    if (info.log_decay_layout.empty()) return;
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16})
      for (const double log_decay : {-1e-4, -3.3e-4, -2e-3}) {
        Case c(info.rule, dtype, 1000, 4, 3);
        c.inputs = RandomInputs(c.spec);
        for (int64_t i = 0; i < c.inputs.log_decay.size(); ++i) c.inputs.log_decay.Set(i, log_decay);
        const Status status = Verify(c.options, c.inputs.view(), {}, &c.verdict);
        ASSERT_TRUE(status.ok()) << status.message;
        EXPECT_TRUE(c.verdict.same()) << log_decay << ": " << c.Text();
      }
  });
}

// A delta rule whose keys stretch the state until f32 has no number for it. What is beyond the range must not make the noise of the rest so large
// that anything would pass.
TEST(Verify, KeepsItsNoiseWhereAStateOverflows) {
  Case c(Rule::kDelta, Dtype::kF32, 96, 32, 8);
  c.inputs = RandomInputs(c.spec);
  c.options.attend.feature_map = FeatureMap::kEluPlusOne;
  const Status status = Verify(c.options, c.inputs.view(), {}, &c.verdict);
  ASSERT_TRUE(status.ok()) << status.message;
  ASSERT_FALSE(std::isfinite(c.verdict.final_state.Get(0)));
  for (const Judgement& judgement : c.verdict.judgements) EXPECT_GT(judgement.ratio, 0.01) << c.Text();
}

TEST(Verify, SeesEveryPlantedErrorInEachHalfAlone) {
  for (const Plant plant : {Plant::kDecay, Plant::kScale, Plant::kMask})
    ForEachRule([&](const RuleInfo& info) {
      for (const auto& [tokens, key_dim, value_dim] : kSizes)
        for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16}) {
          Case c(info.rule, dtype, tokens, key_dim, value_dim);
          c.options.plant = plant;
          c.options.attend.scale = 0.3;
          for (const bool in_algebra : {true, false}) {
            c.options.plant_in_algebra = in_algebra;
            c.options.plant_in_floating_point = !in_algebra;
            const Status status = c.Verify();
            if (plant == Plant::kDecay && info.log_decay_layout.empty()) {
              EXPECT_EQ(status.code, StatusCode::kInvalidOption);
              continue;
            }
            if (tokens == 0) {  // nothing is written or read, so there is nothing to get wrong
              EXPECT_EQ(status.code, StatusCode::kInvalidOption) << c.Text();
              continue;
            }
            ASSERT_TRUE(status.ok()) << status.message;
            EXPECT_FALSE(c.verdict.same()) << c.Text();
            const Algebra& algebra = c.verdict.algebra;
            EXPECT_TRUE(algebra.recurrent_is_parallel);
            EXPECT_EQ(algebra.chunkwise_is_parallel, !in_algebra) << c.Text();
            EXPECT_EQ(algebra.chunkwise_is_recurrent, !in_algebra) << c.Text();
            EXPECT_TRUE(c.verdict.judgements[0].same && c.verdict.judgements[1].same) << c.Text();
            EXPECT_EQ(c.verdict.judgements[2].same, in_algebra) << c.Text();
          }
        }
    });
}

TEST(Verify, RefusesAPlantThatCanChangeNothing) {
  const auto refused = [](Case* c, Plant plant, const std::string& part) {
    c->options.plant = plant;
    const Status status = c->Verify();
    EXPECT_EQ(status.code, StatusCode::kInvalidOption);
    EXPECT_NE(status.message.find(part), std::string::npos) << status.message;
  };
  Case linear(Rule::kLinear, Dtype::kF32, 9, 4, 4);
  refused(&linear, Plant::kDecay, "linear has no decay");
  Case rwkv7(Rule::kRwkv7, Dtype::kF32, 9, 4, 4);
  refused(&rwkv7, Plant::kScale, "the scale is 1");
  Case normalised(Rule::kGla, Dtype::kF32, 9, 4, 4);
  normalised.spec.normalize = true;
  refused(&normalised, Plant::kScale, "cancels");
  Case first(Rule::kRwkv6, Dtype::kF32, 1, 4, 4);
  first.spec.normalize = true;
  first.spec.initial_state = false;
  refused(&first, Plant::kMask, "a first token");
  Case empty(Rule::kGla, Dtype::kF32, 0, 4, 4);
  refused(&empty, Plant::kMask, "no token");
  // A decay that keeps all is there, but no factor differs from 1.
  Case keeps(Rule::kRetention, Dtype::kF32, 9, 4, 4);
  keeps.options.plant = Plant::kDecay;
  keeps.inputs = RandomInputs(keeps.spec);
  for (int64_t i = 0; i < keeps.inputs.log_decay.size(); ++i) keeps.inputs.log_decay.Set(i, 0);
  EXPECT_EQ(Verify(keeps.options, keeps.inputs.view(), {}, &keeps.verdict).code, StatusCode::kInvalidOption);
}

// ---- The algebra half ---------------------------------------------------------------------------------------------------------------------

TEST(Algebra, BoundsTheChanceOfBeingWrong) {
  ForEachRule([](const RuleInfo& info) {
    Case c(info.rule, Dtype::kF32, 40, 6, 5);
    c.options.field_draws = 2;
    c.options.noise_draws = 1;
    ASSERT_TRUE(c.Verify().ok());
    const Algebra& algebra = c.verdict.algebra;
    EXPECT_TRUE(algebra.whole);
    EXPECT_EQ(algebra.tokens, 40);
    EXPECT_EQ(algebra.compared, 40 * 5 + 6 * 5);
    EXPECT_EQ(algebra.draws, 2);
    EXPECT_GE(algebra.degree, 4);
    EXPECT_NEAR(algebra.log2_failure, 2 * (std::log2(static_cast<double>(algebra.degree)) - 61), 1e-9);
    EXPECT_LT(algebra.log2_failure, -90);
  });
  // scale q' (D^n S0 + ...): the output of the last of n tokens under a constant decay has degree 1 + 1 + n + 1.
  Case c(Rule::kRetention, Dtype::kF32, 40, 6, 5);
  ASSERT_TRUE(c.Verify().ok());
  EXPECT_EQ(c.verdict.algebra.degree, 43);
}

TEST(Algebra, KeepsSeveralChunksAndAShorterLastOneWhenItShrinks) {
  const auto size = [](int64_t tokens, int64_t chunk) {
    Case c(Rule::kLinear, Dtype::kF32, tokens, 64, 3);
    c.inputs = RandomInputs(c.spec);
    contract::Layer layer;
    const Inputs inputs = c.inputs.view();
    EXPECT_TRUE(contract::Validate(c.options.attend, inputs, nullptr, &layer).ok());
    return ProveInAlgebra(layer, chunk, 1, 1, Plant::kNone);
  };
  for (const auto& [tokens, chunk] : std::vector<std::pair<int64_t, int64_t>>{{1000, 64}, {1000, 16}, {1001, 500}, {161, 32}, {163, 2}}) {
    const Algebra algebra = size(tokens, chunk);
    EXPECT_FALSE(algebra.whole);
    EXPECT_LE(algebra.tokens, 160);
    EXPECT_EQ(algebra.key_dim, 16);
    EXPECT_EQ(algebra.value_dim, 3);
    EXPECT_GE(algebra.tokens / algebra.chunk, 2) << tokens;
    EXPECT_NE(algebra.tokens % algebra.chunk, 0) << tokens << " " << chunk;
    EXPECT_TRUE(algebra.same());
  }
  EXPECT_EQ(size(1000, 2000).chunk, 160);
}

// ---- The floating-point half --------------------------------------------------------------------------------------------------------------

struct Answer {
  Owned out, state;
  Candidate candidate(int64_t span) const { return {"answer", out.view(), state.view(), {}, span, 0}; }
};

// The chunkwise reference form in the working precision, which a plant in floating point puts in the place of the library's.
template <class W>
Answer InWorkingPrecision(const contract::Layer& layer, int64_t chunk, Plant plant) {
  Answer answer;
  answer.out = Owned::Zeros(layer.dtype, {layer.batch, layer.tokens, layer.out_heads, layer.value_dim});
  answer.state = Owned::Zeros(layer.dtype, {layer.sequences, layer.state_heads, layer.key_dim, layer.value_dim});
  for (int64_t s = 0; s < layer.state_heads; ++s) {
    const auto head = HeadOf<W>(layer, 0, ValidTokens(layer, contract::SequenceAt(layer, 0)), s);
    const auto part = Chunkwise(head, chunk, plant);
    for (int64_t t = 0; t < head.n; ++t)
      for (int64_t e = 0; e < head.V; ++e) answer.out.Set((t * layer.out_heads + s) * head.V + e, part.out[t * head.V + e]);
    for (int64_t i = 0; i < head.K * head.V; ++i) answer.state.Set(s * head.K * head.V + i, part.state[i]);
  }
  return answer;
}

Judgement Judge(const contract::Layer& layer, const Candidate& candidate) {
  std::vector<Judgement> judgements;
  const Status status = JudgeCandidates(
      layer, {candidate}, 8, 1, Workers(nullptr, 0), [](double) {}, &judgements);
  EXPECT_TRUE(status.ok()) << status.message;
  return judgements.at(0);
}

TEST(Judge, ThePlantIsWhatMakesTheDifference) {
  ForEachRule([](const RuleInfo& info) {
    for (const auto& [tokens, key_dim, value_dim] : kSizes)
      for (const Dtype dtype : {Dtype::kF32, Dtype::kF64}) {
        Case c(info.rule, dtype, tokens, key_dim, value_dim);
        c.inputs = RandomInputs(c.spec);
        c.options.attend.scale = 0.3;
        contract::Layer layer;
        const Inputs inputs = c.inputs.view();
        ASSERT_TRUE(contract::Validate(c.options.attend, inputs, nullptr, &layer).ok());
        const auto answer = dtype == Dtype::kF32 ? InWorkingPrecision<float> : InWorkingPrecision<double>;
        const Judgement right = Judge(layer, answer(layer, 16, Plant::kNone).candidate(16));
        EXPECT_TRUE(right.same) << c.Text() << right.ratio;
        if (tokens == 0) continue;
        const Judgement wrong = Judge(layer, answer(layer, 16, Plant::kMask).candidate(16));
        EXPECT_FALSE(wrong.same) << c.Text() << wrong.ratio;
        EXPECT_GT(wrong.ratio, 1000 * right.ratio);
      }
  });
}

TEST(Judge, SeesANumberThatIsNotFinite) {
  Case c(Rule::kGatedDelta, Dtype::kF32, 20, 6, 5);
  c.spec.valid_fraction = 0.5;
  c.inputs = RandomInputs(c.spec);
  contract::Layer layer;
  const Inputs inputs = c.inputs.view();
  ASSERT_TRUE(contract::Validate(c.options.attend, inputs, nullptr, &layer).ok());
  Answer right;
  right.out = Owned::Zeros(layer.dtype, {1, 20, 2, 5});
  right.state = Owned::Zeros(layer.dtype, {1, 2, 6, 5});
  Outputs outputs;
  outputs.out = right.out.mutable_view();
  outputs.final_state = right.state.mutable_view();
  ASSERT_TRUE(Attend(c.options.attend, inputs, outputs).ok());
  EXPECT_TRUE(Judge(layer, right.candidate(16)).same);

  int64_t valid = 0, masked = 0;  // tokens
  for (int64_t t = 0; t < 20; ++t) (c.inputs.valid.Get(t) != 0 ? valid : masked) = t;
  for (const double x : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Answer wrong = right;
    wrong.out.Set(valid * 10 + 7, x);
    Judgement judgement = Judge(layer, wrong.candidate(16));
    EXPECT_FALSE(judgement.same);
    EXPECT_EQ(judgement.tensor, "out");
    EXPECT_TRUE(std::isinf(judgement.ratio) && std::isinf(judgement.largest));
    wrong = right;
    wrong.state.Set(31, x);
    judgement = Judge(layer, wrong.candidate(16));
    EXPECT_FALSE(judgement.same);
    EXPECT_EQ(judgement.tensor, "final_state");
  }
  // A token that is not valid has a row of zeros and nothing else.
  for (const double x : {1e-20, static_cast<double>(NAN)}) {
    Answer wrong = right;
    wrong.out.Set(masked * 10 + 7, x);
    EXPECT_FALSE(Judge(layer, wrong.candidate(16)).same);
  }
}

// One number off by a few units in the last place of the largest is seen in a small group.
TEST(Judge, SeesASmallError) {
  Case c(Rule::kGla, Dtype::kF64, 4, 3, 1);
  ASSERT_TRUE(c.Verify().ok());
  ASSERT_TRUE(c.verdict.same());
  c.expected.out = c.verdict.out.view();
  Owned wrong = c.verdict.out;
  double largest = 0;
  for (int64_t i = 0; i < wrong.size(); ++i) largest = std::max(largest, std::abs(wrong.Get(i)));
  wrong.Set(2, wrong.Get(2) + 100 * largest * 0x1p-53);
  c.expected.out = wrong.view();
  ASSERT_TRUE(c.Verify().ok());
  EXPECT_FALSE(c.verdict.same());
  EXPECT_TRUE(c.verdict.judgements[0].same && c.verdict.judgements[1].same && c.verdict.judgements[2].same);
  EXPECT_FALSE(c.verdict.judgements[3].same);
}

class Threads : public Executor {
 public:
  explicit Threads(int count) : count_(count) {}
  int Concurrency() const override { return count_; }
  void ParallelFor(int64_t count, const std::function<void(int64_t)>& body) override {
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < count_; ++i)
      threads.emplace_back([&] {
        for (int64_t j = next++; j < count; j = next++) body(j);
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  const int count_;
};

TEST(Verify, GivesTheSameNumbersForAnyNumberOfThreads) {
  const auto run = [](int threads, int most) {
    Threads executor(threads);
    Case c(Rule::kKda, Dtype::kF32, 70, 12, 20);
    c.spec.offsets = {0, 30, 70};
    c.options.attend.executor = &executor;
    c.options.attend.threads = most;
    EXPECT_TRUE(c.Verify().ok());
    return c.verdict;
  };
  const Verdict one = run(1, 0);
  for (const Verdict& other : {run(3, 0), run(8, 0), run(8, 2)}) {
    ASSERT_EQ(other.judgements.size(), one.judgements.size());
    for (size_t i = 0; i < one.judgements.size(); ++i) {
      EXPECT_EQ(other.judgements[i].distance, one.judgements[i].distance);
      EXPECT_EQ(other.judgements[i].noise, one.judgements[i].noise);
      EXPECT_EQ(other.judgements[i].largest, one.judgements[i].largest);
    }
    EXPECT_EQ(other.out.bytes, one.out.bytes);
  }
}

TEST(Verify, TellsItsProgressFromTheCallingThread) {
  Case c(Rule::kDelta, Dtype::kF32, 64, 16, 16);
  std::vector<double> told;
  const std::thread::id caller = std::this_thread::get_id();
  c.options.progress = [&](double fraction, std::string_view doing) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_FALSE(doing.empty());
    told.push_back(fraction);
  };
  ASSERT_TRUE(c.Verify().ok());
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  EXPECT_EQ(told.front(), 0);
  EXPECT_EQ(told.back(), 1);
}

// ---- Expected answers ---------------------------------------------------------------------------------------------------------------------

TEST(Verify, JudgesExpectedAnswersLikeAFourthForm) {
  Case c(Rule::kGla, Dtype::kF64, 30, 6, 5);
  c.spec.normalize = true;
  ASSERT_TRUE(c.Verify().ok());
  Owned out = c.verdict.out, state = c.verdict.final_state, key_sum = c.verdict.final_key_sum;
  c.expected = {out.view(), state.view(), key_sum.view()};
  ASSERT_TRUE(c.Verify().ok());
  ASSERT_EQ(c.verdict.judgements.size(), 4u);
  EXPECT_EQ(c.verdict.judgements[3].form, "expected");
  EXPECT_TRUE(c.verdict.same());
  // Answers written down to four digits.
  for (Owned* tensor : {&out, &state, &key_sum})
    for (int64_t i = 0; i < tensor->size(); ++i) tensor->Set(i, std::round(tensor->Get(i) * 1e4) / 1e4);
  ASSERT_TRUE(c.Verify().ok());
  EXPECT_FALSE(c.verdict.same());
  c.options.tolerance = 1e-3;
  ASSERT_TRUE(c.Verify().ok());
  EXPECT_TRUE(c.verdict.same());
  // The tolerance is for the expected answers alone.
  c.options.plant = Plant::kMask;
  ASSERT_TRUE(c.Verify().ok());
  EXPECT_FALSE(c.verdict.judgements[2].same);
  EXPECT_TRUE(c.verdict.judgements[3].same);
  c.options.plant = Plant::kNone;
  // One alone will do, and a wrong one is seen whichever it is.
  c.expected = {};
  key_sum.Set(2, key_sum.Get(2) + 1);
  c.expected.final_key_sum = key_sum.view();
  ASSERT_TRUE(c.Verify().ok());
  EXPECT_FALSE(c.verdict.same());
  EXPECT_EQ(c.verdict.judgements[3].tensor, "final_key_sum");
}

// Answers of products whose operands were rounded are the layer's to within that, once it is said.
TEST(Verify, KnowsWhatRoundedOperandsCost) {
  const auto rounded_to = [](int digits, double x) {
    int exponent;
    std::frexp(x, &exponent);
    const double unit = std::ldexp(1.0, exponent - digits);
    return std::nearbyint(x / unit) * unit;
  };
  ForEachRule([&](const RuleInfo& info) {
    for (const auto& [name, operands] :
         {std::pair("bf16", proof::Operands::kInBF16), {"f16", proof::Operands::kInF16}, {"tf32", proof::Operands::kInTF32}}) {
      Case c(info.rule, Dtype::kF32, 70, 16, 12);
      ASSERT_TRUE(c.Verify().ok());
      EXPECT_EQ(Name(operands), name);
      proof::Operands found = proof::Operands::kNotRounded;
      EXPECT_TRUE(proof::Find(name, &found));
      EXPECT_EQ(found, operands);
      OwnedInputs inputs = c.inputs;
      for (Owned* owned : {&inputs.q, &inputs.k, &inputs.v, &inputs.remove, &inputs.write})
        for (int64_t i = 0; i < owned->size(); ++i) owned->Set(i, rounded_to(proof::DigitsOf(operands), owned->Get(i)));
      Options options = c.options.attend;
      options.form = Form::kRecurrent;
      Owned out = c.verdict.out, state = c.verdict.final_state;
      ASSERT_TRUE(Attend(options, inputs.view(), {out.mutable_view(), state.mutable_view(), {}, {}}).ok());
      c.expected = {out.view(), state.view(), {}};
      ASSERT_TRUE(c.Verify().ok());
      EXPECT_GT(c.verdict.judgements[3].ratio, 100) << c.Text();
      c.options.expected_operands = operands;
      ASSERT_TRUE(c.Verify().ok());
      EXPECT_LE(c.verdict.judgements[3].ratio, 3) << name << " " << c.Text();
      EXPECT_GT(c.verdict.judgements[3].ratio, 0.1) << name << " " << c.Text();
      EXPECT_TRUE(c.verdict.same());
      // All else is judged as before, and what is wrong by more is seen: a scale.
      for (size_t form = 0; form < 3; ++form) EXPECT_EQ(c.verdict.judgements[form].operands, proof::Operands::kNotRounded);
      options.scale = 1.1 / std::sqrt(16.0);
      if (info.default_scale_is_one) options.scale = 1.1;
      ASSERT_TRUE(Attend(options, inputs.view(), {out.mutable_view(), state.mutable_view(), {}, {}}).ok());
      ASSERT_TRUE(c.Verify().ok());
      EXPECT_FALSE(c.verdict.judgements[3].same) << name << " " << c.Text();
    }
  });
  proof::Operands none = proof::Operands::kNotRounded;
  EXPECT_FALSE(proof::Find("f8", &none) || proof::Find("", &none));
}

TEST(Verify, RefusesWithASentence) {
  const auto refused = [](Case* c, StatusCode code, const std::string& sentence) {
    const Status status = c->Verify();
    EXPECT_EQ(status.code, code);
    EXPECT_EQ(status.message, sentence);
  };
  const auto small = [] { return Case(Rule::kLinear, Dtype::kF32, 3, 2, 2); };
  Case draws = small();
  draws.options.field_draws = 0;
  refused(&draws, StatusCode::kInvalidOption, "field_draws is 0 and must be at least 1");
  draws = small();
  draws.options.noise_draws = -1;
  refused(&draws, StatusCode::kInvalidOption, "noise_draws is -1 and must be at least 1");
  Case tolerance = small();
  tolerance.options.tolerance = -1;
  refused(&tolerance, StatusCode::kInvalidOption, "tolerance is -1.000000 and must be finite and at least 0");
  Owned expected = Owned::Zeros(Dtype::kF32, {1, 3, 2, 3});
  Case shape = small();
  shape.expected.out = expected.view();
  refused(&shape, StatusCode::kShape, "expected.out has shape [1, 3, 2, 3] and must have that of the answer, [1, 3, 2, 2]");
  expected = Owned::Zeros(Dtype::kF64, {1, 3, 2, 2});
  Case dtype = small();
  dtype.expected.out = expected.view();
  refused(&dtype, StatusCode::kDtype, "expected.out is f64 and must be f32, the dtype of q");
  Case state = Case(Rule::kLinear, Dtype::kBF16, 3, 2, 2);
  Owned narrow = Owned::Zeros(Dtype::kBF16, {1, 2, 2, 2});
  state.expected.final_state = narrow.view();
  refused(&state, StatusCode::kDtype, "expected.final_state is bf16 and must be f32, the dtype of states where q is bf16");
  Case key_sum = small();
  key_sum.expected.final_key_sum = expected.view();
  refused(&key_sum, StatusCode::kUnexpectedInput, "expected.final_key_sum was given and there is a key sum only with normalize");
  expected = Owned::Zeros(Dtype::kF32, {1, 2, 2, 2});
  Case null = small();
  null.expected.final_state = expected.view();
  null.expected.final_state.data = nullptr;
  refused(&null, StatusCode::kNullData, "expected.final_state has no data and must point to its 8 elements");
  // What Attend refuses, Verify does.
  Case table = small();
  table.options.attend.table_limit = 1;
  EXPECT_EQ(table.Verify().code, StatusCode::kTableLimit);
  Case target = small();
  target.options.attend.target = "abacus";
  EXPECT_EQ(target.Verify().code, StatusCode::kInvalidOption);
  Case missing = small();
  missing.options.attend.rule = Rule::kDelta;
  EXPECT_EQ(missing.Verify().code, StatusCode::kMissingInput);
}

}  // namespace
}  // namespace tercet::proof
