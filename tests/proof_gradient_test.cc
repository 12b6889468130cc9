// The verdict on gradients: no false alarm, every planted error seen in each half alone, and what it refuses.
#include <gtest/gtest.h>

#include <string>

#include "src/proof/rounded.hpp"
#include "src/proof/verify_gradient.hpp"
#include "tests/support.hpp"

namespace tercet::test {
namespace {

using proof::GradientVerdict;
using proof::Judgement;
using proof::Plant;
using proof::Rounded;
using proof::Rounding;
using proof::VerifyOptions;

struct Case {
  RandomSpec spec;
  VerifyOptions options;
};

GradientVerdict VerdictOn(Case one) {
  one.spec.rule = one.options.attend.rule;
  one.spec.feature_map = one.options.attend.feature_map;
  one.spec.normalize = one.options.attend.normalize;
  if (one.options.attend.executor == nullptr) one.options.attend.executor = UsualExecutor();
  const OwnedInputs inputs = RandomInputs(one.spec);
  GradientVerdict verdict;
  const Status status = proof::VerifyGradient(one.options, inputs.view(), &verdict);
  EXPECT_TRUE(status.ok()) << status.message;
  return verdict;
}

std::string Text(const GradientVerdict& verdict) {
  std::string text = verdict.algebra.same ? "" : "algebra differs;";
  for (const Judgement& judgement : verdict.judgements)
    if (!judgement.same) text += " " + judgement.form + " " + judgement.tensor + " " + std::to_string(judgement.ratio);
  return text;
}

Case Small(Rule rule) {
  Case one;
  one.options.attend.rule = rule;
  one.options.attend.scale = 0.5;
  one.spec.tokens = 21;
  one.spec.key_dim = 5;
  one.spec.value_dim = 3;
  return one;
}

TEST(Rounded, GivesTheTwoNeighboursOfEveryResult) {
  Rounding rounding(1);
  const Rounded<float> one(1), three(3);
  int up = 0;
  for (int i = 0; i < 3000; ++i) {
    const float third = (one / three).value();
    const float low = std::nextafter(1.0f / 3, 0.0f), nearest = 1.0f / 3;  // which is above 1 / 3, by half of what low is below
    ASSERT_TRUE(third == low || third == nearest) << third;
    up += third == nearest;
  }
  EXPECT_NEAR(up / 3000.0, 2.0 / 3, 0.05);
  EXPECT_EQ((three + one).value(), 4.0f);
  EXPECT_EQ((three * three - one).value(), 8.0f);
  EXPECT_EQ(sqrt(Rounded<float>(9)).value(), 3.0f);
}

TEST(Rounded, TakesOneExponentialOfOneNumber) {
  int differ = 0;
  float last = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Rounding rounding(seed);
    const float x = exp(Rounded<float>(-0.3f)).value();
    EXPECT_EQ(exp(Rounded<float>(-0.3f)).value(), x);
    EXPECT_NEAR(x, std::exp(-0.3f), 2 * 0x1p-24);
    differ += x != last;
    last = x;
  }
  EXPECT_GT(differ, 1);
  Rounding rounding(1);
  EXPECT_EQ(exp(Rounded<double>(0)).value(), 1.0);
}

TEST(VerifyGradient, RaisesNoFalseAlarm) {
  for (const RuleInfo& info : Rules())
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16})
      for (const int64_t tokens : {1, 21, 70}) {
        SCOPED_TRACE(std::string(info.name) + " " + std::string(Name(dtype)) + " " + std::to_string(tokens));
        Case one = Small(info.rule);
        one.spec.dtype = dtype;
        one.spec.tokens = tokens;
        const GradientVerdict verdict = VerdictOn(one);
        EXPECT_TRUE(verdict.same()) << Text(verdict);
      }
}

TEST(VerifyGradient, RaisesNoFalseAlarmWhateverTheLayerHas) {
  for (const RuleInfo& info : Rules())
    for (const FeatureMap map : {FeatureMap::kIdentity, FeatureMap::kEluPlusOne, FeatureMap::kRelu, FeatureMap::kL2Norm})
      for (const bool normalize : {false, true}) {
        if (normalize && !info.can_normalize) continue;
        SCOPED_TRACE(std::string(info.name) + " " + std::string(Name(map)) + (normalize ? " normalised" : ""));
        Case one = Small(info.rule);
        one.options.attend.feature_map = map;
        one.options.attend.normalize = normalize;
        one.spec.offsets = {0, 8, 8, 21};
        one.spec.valid_fraction = 0.8;
        one.spec.q_heads = 4;
        one.spec.k_heads = 1;
        one.spec.v_heads = 2;
        one.spec.gate_heads = 1;
        one.spec.initial_state = map != FeatureMap::kRelu;
        const GradientVerdict verdict = VerdictOn(one);
        EXPECT_TRUE(verdict.same()) << Text(verdict);
      }
}

// Of one channel the normalised output does not depend on q: its gradient is what rounding leaves of two numbers that cancel.
TEST(VerifyGradient, RaisesNoFalseAlarmAtOneNormalisedChannel) {
  for (const Rule rule : {Rule::kLinear, Rule::kRetention, Rule::kSimpleGla, Rule::kGla, Rule::kRwkv6})
    for (const FeatureMap map : {FeatureMap::kIdentity, FeatureMap::kL2Norm})
      for (const Dtype dtype : {Dtype::kF32, Dtype::kF64})
        for (const int64_t tokens : {1, 33})
          for (uint64_t seed = 1; seed <= 3; ++seed) {
            SCOPED_TRACE(std::string(Name(rule)) + " " + std::string(Name(map)) + " " + std::string(Name(dtype)) + " " + std::to_string(tokens) +
                         " " + std::to_string(seed));
            Case one = Small(rule);
            one.options.attend.feature_map = map;
            one.options.attend.normalize = true;
            one.options.seed = one.spec.seed = seed;
            one.spec.dtype = dtype;
            one.spec.tokens = tokens;
            one.spec.key_dim = 1;
            const GradientVerdict verdict = VerdictOn(one);
            EXPECT_TRUE(verdict.same()) << Text(verdict);
          }
}

TEST(VerifyGradient, JudgesEveryGradientOfEachForm) {
  const auto names = [](const GradientVerdict& verdict) {
    std::string text;
    for (const Judgement& judgement : verdict.judgements) text += judgement.form.substr(0, 1) + ":" + judgement.tensor + " ";
    return text;
  };
  Case one = Small(Rule::kRwkv6);
  one.options.attend.normalize = true;
  EXPECT_EQ(names(VerdictOn(one)),
            "r:q r:k r:v r:log_decay r:bonus r:initial_state r:initial_key_sum r:scale "
            "c:q c:k c:v c:log_decay c:bonus c:initial_state c:initial_key_sum c:scale ");
  one = Small(Rule::kRwkv7);
  one.options.attend.form = Form::kChunkwise;
  EXPECT_EQ(names(VerdictOn(one)), "c:q c:k c:v c:log_decay c:remove c:write c:initial_state c:scale ");
  one = Small(Rule::kKda);
  one.options.attend.form = Form::kRecurrent;
  EXPECT_EQ(names(VerdictOn(one)), "r:q r:k r:v r:log_decay r:beta r:initial_state r:scale ");
}

TEST(VerifyGradient, SeesEveryPlantedErrorInEachHalfAlone) {
  for (const RuleInfo& info : Rules())
    for (const Plant plant : {Plant::kDecay, Plant::kScale, Plant::kMask})
      for (const bool in_algebra : {false, true}) {
        if (plant == Plant::kDecay && info.log_decay_layout.empty()) continue;
        SCOPED_TRACE(std::string(info.name) + " plant " + std::to_string(static_cast<int>(plant)) + (in_algebra ? " algebra" : " floating point"));
        Case one = Small(info.rule);
        one.options.plant = plant;
        one.options.plant_in_algebra = in_algebra;
        one.options.plant_in_floating_point = !in_algebra;
        const GradientVerdict verdict = VerdictOn(one);
        EXPECT_FALSE(verdict.same());
        EXPECT_NE(verdict.algebra.same, in_algebra);
        bool recurrent = true, chunkwise = true;
        for (const Judgement& judgement : verdict.judgements) (judgement.form == "recurrent" ? recurrent : chunkwise) &= judgement.same;
        EXPECT_TRUE(recurrent) << Text(verdict);
        EXPECT_EQ(chunkwise, in_algebra) << Text(verdict);
      }
}

TEST(VerifyGradient, ShowsWhereAPlantedErrorLies) {
  Case one = Small(Rule::kGla);
  one.options.plant = Plant::kScale;
  one.options.attend.form = Form::kChunkwise;
  const GradientVerdict verdict = VerdictOn(one);
  // The scale is in every gradient but its own.
  for (const Judgement& judgement : verdict.judgements) EXPECT_EQ(judgement.same, judgement.tensor == "scale") << judgement.tensor;
}

TEST(VerifyGradient, BoundsTheChanceOfAWrongFormula) {
  Case one = Small(Rule::kLinear);
  one.spec.tokens = 4;
  one.options.field_draws = 2;
  const GradientVerdict verdict = VerdictOn(one);
  // A product of a gradient and a direction: weight, scale, q, k and v, one of them replaced by its direction.
  EXPECT_EQ(verdict.algebra.degree, 5);
  EXPECT_EQ(verdict.algebra.draws, 2);
  EXPECT_NEAR(verdict.algebra.log2_failure, 2 * (std::log2(5.0) - 61), 1e-9);
  EXPECT_TRUE(verdict.algebra.whole);
  one.spec.tokens = 400;
  EXPECT_FALSE(VerdictOn(one).algebra.whole);
}

TEST(VerifyGradient, GivesTheSameNumbersForAnyNumberOfThreads) {
  Case one = Small(Rule::kGatedDelta);
  one.options.attend.threads = 1;
  const GradientVerdict first = VerdictOn(one);
  one.options.attend.threads = 0;
  const GradientVerdict second = VerdictOn(one);
  ASSERT_EQ(first.judgements.size(), second.judgements.size());
  for (size_t i = 0; i < first.judgements.size(); ++i) {
    EXPECT_EQ(first.judgements[i].ratio, second.judgements[i].ratio) << first.judgements[i].tensor;
    EXPECT_EQ(first.judgements[i].noise, second.judgements[i].noise) << first.judgements[i].tensor;
  }
}

TEST(VerifyGradient, RefusesWithASentence) {
  const auto refused = [](Case one) {
    one.spec.rule = one.options.attend.rule;
    const OwnedInputs inputs = RandomInputs(one.spec);
    GradientVerdict verdict;
    const Status status = proof::VerifyGradient(one.options, inputs.view(), &verdict);
    EXPECT_EQ(status.code, StatusCode::kInvalidOption);
    return status.message;
  };
  Case one = Small(Rule::kLinear);
  one.options.attend.form = Form::kParallel;
  EXPECT_EQ(refused(one), "form is parallel and must be automatic, recurrent or chunkwise: the parallel form has no gradients");
  one = Small(Rule::kLinear);
  one.options.plant = Plant::kDecay;
  EXPECT_EQ(refused(one), "plant is decay and linear has no decay that could be off by one: plant scale or mask");
  one.options.plant = Plant::kMask;
  one.options.attend.form = Form::kRecurrent;
  EXPECT_EQ(refused(one), "form is recurrent and must be automatic or chunkwise: an error is planted in the chunkwise form");
  one = Small(Rule::kLinear);
  one.options.noise_draws = 0;
  EXPECT_EQ(refused(one), "noise_draws is 0 and must be at least 1");
}

}  // namespace
}  // namespace tercet::test
