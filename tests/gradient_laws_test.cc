// What must hold of the gradients whatever the numbers are: cases worked by hand, the derivatives of Attend itself, forms, chunks, pieces, threads,
// views and dtypes that agree, numbers at their edges, and the memory that is asked for.
#include <sys/mman.h>

#include <cstring>
#include <limits>

#include "tests/calls.hpp"
#include "tests/gradients.hpp"

namespace tercet::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kKeys = 20, kValues = 37;
constexpr int64_t kDims = kKeys + kValues;

RandomSpec Spec(Rule rule, int64_t tokens = 50) {
  RandomSpec spec;
  spec.rule = rule;
  spec.tokens = tokens;
  spec.key_dim = kKeys;
  spec.value_dim = kValues;
  spec.heads = 2;
  spec.seed = 11;
  return spec;
}

// A denominator is a sum of positive numbers: where it may cancel, the quotient magnifies rounding without bound.
OwnedInputs Draw(const RandomSpec& spec) {
  OwnedInputs inputs = RandomInputs(spec);
  for (int64_t i = 0; spec.normalize && i < inputs.bonus.size(); ++i) inputs.bonus.Set(i, std::abs(inputs.bonus.Get(i)));
  return inputs;
}

// The recurrent form, and the chunkwise form with each of these chunks.
std::vector<Options> Forms(Rule rule, const std::vector<int64_t>& chunks = {16}) {
  Options options;
  options.rule = rule;
  options.form = Form::kRecurrent;
  std::vector<Options> all = {options};
  options.form = Form::kChunkwise;
  for (const int64_t chunk : chunks) {
    options.chunk = chunk;
    all.push_back(options);
  }
  return all;
}
std::string TextOf(const Options& options) {
  return std::string(Name(options.rule)) + " " + std::string(Name(options.form)) + " " + std::to_string(options.chunk) + " " +
         std::string(options.target);
}

// Calls body with the options for every target of this machine, the forms, and chunks of which one has a short last one.
template <class Body>
void ForEachTargetAndForm(const Options& options, Body body) {
  for (const std::string& target : Targets())
    for (Options with : Forms(options.rule, {4, 5, 0})) {
      with.target = target;
      with.scale = options.scale;
      with.feature_map = options.feature_map;
      with.normalize = options.normalize;
      SCOPED_TRACE(TextOf(with));
      body(with);
    }
}

void Set(Owned* tensor, double x) {
  for (int64_t i = 0; i < tensor->size(); ++i) tensor->Set(i, x);
}

void ExpectSame(OwnedGradients got, OwnedGradients want) {
  for (size_t part = 0; part < got.All().size(); ++part)
    EXPECT_TRUE(SameBits(*got.All()[part].second, *want.All()[part].second)) << got.All()[part].first;
  EXPECT_EQ(got.scale, want.scale);
}

proof::InputGradients<double> AsNumbers(OwnedGradients gradients) {
  proof::InputGradients<double> numbers;
  for (size_t part = 0; part < gradients.All().size(); ++part) *Parts(numbers)[part] = Numbers(*gradients.All()[part].second);
  numbers.scale = gradients.scale;
  return numbers;
}

// Every number is one.
void ExpectFinite(OwnedGradients gradients) {
  for (const auto& [name, tensor] : gradients.All())
    for (int64_t i = 0; i < tensor->size(); ++i) ASSERT_TRUE(std::isfinite(tensor->Get(i))) << name << " element " << i;
  EXPECT_TRUE(std::isfinite(gradients.scale));
}

class EveryRule : public testing::TestWithParam<Rule> {
 protected:
  Rule rule() const { return GetParam(); }
  bool normalizes() const { return Info(GetParam()).can_normalize; }
  bool decays() const { return !Info(GetParam()).log_decay_layout.empty(); }
};
INSTANTIATE_TEST_SUITE_P(GradientLaws, EveryRule, testing::ValuesIn([] {
                           std::vector<Rule> rules;
                           for (const RuleInfo& one : Rules()) rules.push_back(one.rule);
                           return rules;
                         }()),
                         [](const auto& instance) { return std::string(Name(instance.param)); });

// ---- By hand ------------------------------------------------------------------------------------------------------------------------------------

// K = V = 1, q = k = v = 1, decay a at each of T tokens, state h0 before them, L = the sum of out: S_t = a S_{t-1} + 1.
struct Gate {
  int64_t tokens;
  double a, h0;

  double Before(int64_t t) const { return h0 * std::pow(a, t) + (1 - std::pow(a, t)) / (1 - a); }
  double dS(int64_t t) const { return (1 - std::pow(a, tokens - t)) / (1 - a); }
  double dLogDecay(int64_t t) const { return dS(t) * (a * (1 - std::pow(a, t)) / (1 - a) + h0 * std::pow(a, t + 1)); }
  double dInitial() const { return a * dS(0); }
};

OwnedInputs Ones(Rule rule, Dtype dtype, int64_t tokens, const std::vector<int64_t>& offsets = {}) {
  RandomSpec spec = Spec(rule, tokens);
  spec.dtype = dtype;
  spec.heads = spec.key_dim = spec.value_dim = 1;
  spec.offsets = offsets;
  OwnedInputs inputs = RandomInputs(spec);
  for (Owned* ones : {&inputs.q, &inputs.k, &inputs.v}) Set(ones, 1);
  return inputs;
}

TEST(GradientByHand, OfAScalarGate) {
  constexpr int64_t kTokens = 37;
  for (const Rule rule : {Rule::kSimpleGla, Rule::kGla, Rule::kRetention})
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64}) {
      OwnedInputs inputs = Ones(rule, dtype, kTokens);
      Set(&inputs.log_decay, std::log(0.8));
      Set(&inputs.initial_state, 1.5);
      const Gate gate{kTokens, std::exp(inputs.log_decay.Get(0)), 1.5};
      Options one;
      one.rule = rule;
      one.scale = 1;
      OwnedGiven given = DrawGiven(one, inputs.view(), 1);
      Set(&given.out, 1);
      Set(&given.final_state, 0);
      ForEachTargetAndForm(one, [&](const Options& options) {
        const OwnedGradients d = ComputeGradients(options, inputs, given);
        const double tolerance = Tolerance(dtype, kTokens, 1);
        const auto expect = [&](double got, double want) { EXPECT_NEAR(got, want, tolerance * std::abs(want)); };
        double all = 0, scale = 0;
        for (int64_t t = 0; t < kTokens; ++t) {
          all += gate.dLogDecay(t);
          scale += gate.a * gate.Before(t) + 1;
          if (rule != Rule::kRetention) expect(d.log_decay.Get(t), gate.dLogDecay(t));
          expect(d.k.Get(t), gate.dS(t));
          expect(d.v.Get(t), gate.dS(t));
          expect(d.q.Get(t), gate.a * gate.Before(t) + 1);
        }
        if (rule == Rule::kRetention) expect(d.log_decay.Get(0), all);
        expect(d.initial_state.Get(0), gate.dInitial());
        expect(d.scale, scale);
      });
    }
}

// Two gates in a pack. Each has the gradients that it has alone, and where nothing is asked of one there is exactly nothing.
TEST(GradientByHand, OfAPackedPairStaysOnItsSideOfTheBorder) {
  const Gate gates[] = {{6, 0.75, 1.5}, {9, 0.5, -0.25}};  // no decay and no number here is rounded but by the logarithm
  for (const Rule rule : {Rule::kSimpleGla, Rule::kGla}) {
    OwnedInputs inputs = Ones(rule, Dtype::kF64, 15, {0, 6, 15});
    for (int64_t t = 0; t < 15; ++t) inputs.log_decay.Set(t, std::log(gates[t < 6 ? 0 : 1].a));
    for (int64_t n = 0; n < 2; ++n) inputs.initial_state.Set(n, gates[n].h0);
    Options one;
    one.rule = rule;
    one.scale = 1;
    OwnedGiven given = DrawGiven(one, inputs.view(), 1);
    Set(&given.final_state, 0);
    ForEachTargetAndForm(one, [&](const Options& options) {
      for (const auto& [first, second] : {std::pair{1, 1}, {1, 0}, {0, 1}, {0, 0}}) {
        SCOPED_TRACE(std::to_string(first) + " " + std::to_string(second));
        for (int64_t t = 0; t < 15; ++t) given.out.Set(t, t < 6 ? first : second);
        const OwnedGradients d = ComputeGradients(options, inputs, given);
        for (int64_t n = 0; n < 2; ++n) {
          const Gate& gate = gates[n];
          const double asked = n == 0 ? first : second;
          const auto expect = [&](double got, double want) { EXPECT_NEAR(got, asked * want, 1e-13 * asked * std::abs(want)); };
          for (int64_t t = 0; t < gate.tokens; ++t) {
            const int64_t at = n * 6 + t;
            expect(d.log_decay.Get(at), gate.dLogDecay(t));
            expect(d.k.Get(at), gate.dS(t));
            expect(d.v.Get(at), gate.dS(t));
            expect(d.q.Get(at), gate.a * gate.Before(t) + 1);
          }
          expect(d.initial_state.Get(n), gate.dInitial());
        }
      }
    });
  }
}

// Two tokens, K = 2, V = 1, normalised, with a decay that keeps all; worked out beside the reference's test of the same name. All numbers are sums of
// powers of two, so that nothing is rounded.
TEST(GradientByHand, OfTwoNormalisedTokens) {
  for (const Rule rule : {Rule::kLinear, Rule::kSimpleGla, Rule::kGla})
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16}) {
      RandomSpec spec = Spec(rule, 2);
      spec.dtype = dtype;
      spec.heads = spec.value_dim = 1;
      spec.key_dim = 2;
      spec.normalize = true;
      OwnedInputs inputs = RandomInputs(spec);
      const auto fill = [](Owned* tensor, const std::vector<double>& numbers) {
        for (size_t i = 0; i < numbers.size(); ++i) tensor->Set(static_cast<int64_t>(i), numbers[i]);
      };
      fill(&inputs.q, {1, 1, 1, 2});
      fill(&inputs.k, {1, 0, 1, 1});
      fill(&inputs.v, {2, 4});
      fill(&inputs.initial_state, {0, 1});
      fill(&inputs.initial_key_sum, {2, 1});
      Set(&inputs.log_decay, 0);
      Options one;
      one.rule = rule;
      one.normalize = true;
      OwnedGiven given = DrawGiven(one, inputs.view(), 1);
      Set(&given.out, 1);
      Set(&given.final_state, 0);
      Set(&given.final_key_sum, 0);
      ForEachTargetAndForm(one, [&](const Options& options) {
        const OwnedGradients d = ComputeGradients(options, inputs, given);
        using List = std::vector<double>;
        EXPECT_EQ(Numbers(d.q), (List{-1. / 16, 1. / 16, -1. / 4, 1. / 8}));
        EXPECT_EQ(Numbers(d.k), (List{5. / 16, 5. / 16, 1. / 4, 1. / 2}));
        EXPECT_EQ(Numbers(d.v), (List{3. / 8, 3. / 8}));
        if (rule == Rule::kSimpleGla) {
          EXPECT_EQ(Numbers(d.log_decay), (List{-17. / 16, -3. / 4}));
        }
        if (rule == Rule::kGla) {
          EXPECT_EQ(Numbers(d.log_decay), (List{-7. / 8, -3. / 16, -1. / 2, -1. / 4}));
        }
        EXPECT_EQ(Numbers(d.initial_state), (List{3. / 8, 1. / 2}));
        EXPECT_EQ(Numbers(d.initial_key_sum), (List{-7. / 16, -11. / 16}));
        EXPECT_EQ(d.scale, 0);
      });
    }
}

// ---- Derivatives --------------------------------------------------------------------------------------------------------------------------------

proof::InputGradients<double> Differentiate(const Options& form, const Call& call) {
  Options options = call.options;
  options.form = form.form;
  options.chunk = form.chunk;
  return AsNumbers(ComputeGradients(options, call.inputs, {call.d_out, call.d_state, call.d_key_sum}));
}

TEST_P(EveryRule, AreTheDerivativesOfDualNumbers) {
  ForEachCall(rule(), [](Call& call) {
    for (const Options& form : Forms(call.options.rule, {3, 0})) {
      SCOPED_TRACE(TextOf(form));
      proof::InputGradients<double> gradients = Differentiate(form, call);
      OwnedInputs direction = Nowhere(call.inputs);
      Sums all;
      for (size_t part = 0; part < Parts(direction).size(); ++part) {
        const auto [name, tensor] = Parts(direction)[part];
        if (tensor->size() == 0) continue;
        OwnedInputs alone = Nowhere(call.inputs);
        Fill(tensor, part);
        Fill(Parts(alone)[part].second, part);
        const Sums sums = Dot(&gradients, &alone, part);
        EXPECT_NEAR(sums.sum, Derivative(call, alone, 0), 1e-12 * sums.magnitudes) << name;
        EXPECT_GT(sums.magnitudes, 0) << name;
        all.sum += sums.sum;
        all.magnitudes += sums.magnitudes;
      }
      const double along_scale = Derivative(call, Nowhere(call.inputs), 1);
      EXPECT_NEAR(gradients.scale, along_scale, 1e-12 * std::abs(along_scale));
      EXPECT_EQ(gradients.scale == 0, call.options.normalize);
      EXPECT_NEAR(all.sum - 0.3 * gradients.scale, Derivative(call, direction, -0.3), 1e-12 * all.magnitudes);
    }
  });
}

TEST_P(EveryRule, AreNearCentralDifferencesOfAttend) {
  ForEachCall(rule(), [](Call& call) {
    constexpr double kStep = 1e-5;
    // Features of either sign may have a denominator near zero, where a difference over any step says little.
    if (call.options.normalize && (call.options.feature_map == FeatureMap::kIdentity || call.options.feature_map == FeatureMap::kL2Norm))
      for (Owned* features : {&call.inputs.q, &call.inputs.k})
        for (int64_t i = 0; i < features->size(); ++i) features->Set(i, 0.1 + std::abs(features->Get(i)));
    for (const Options& form : Forms(call.options.rule, {4})) {
      SCOPED_TRACE(TextOf(form));
      Options forward = call.options;
      forward.form = form.form;
      forward.chunk = form.chunk;
      proof::InputGradients<double> gradients = Differentiate(form, call);
      for (size_t part = 0; part < Parts(call.inputs).size(); ++part) {
        if (Parts(call.inputs)[part].second->size() == 0) continue;
        OwnedInputs direction = Nowhere(call.inputs);
        Fill(Parts(direction)[part].second, 10 + part);
        const auto moved = [&](double step) {
          OwnedInputs inputs = call.inputs;
          Owned* x = Parts(inputs)[part].second;
          for (int64_t i = 0; i < x->size(); ++i) x->Set(i, x->Get(i) + step * Parts(direction)[part].second->Get(i));
          return Weighted(call, AsAnswers(Compute(forward, inputs.view())));
        };
        const Sums sums = Dot(&gradients, &direction, part);
        EXPECT_NEAR(sums.sum, (moved(kStep) - moved(-kStep)) / (2 * kStep), 1e-6 * sums.magnitudes) << Parts(direction)[part].first;
      }
      if (call.options.normalize) continue;
      const auto scaled = [&](double scale) {
        Options options = forward;
        options.scale = scale;
        return Weighted(call, AsAnswers(Compute(options, call.inputs.view())));
      };
      EXPECT_NEAR(gradients.scale, (scaled(0.7 + kStep) - scaled(0.7 - kStep)) / (2 * kStep), 1e-6 * std::abs(gradients.scale));
    }
  });
}

// ---- Forms, pieces and threads ------------------------------------------------------------------------------------------------------------------

TEST_P(EveryRule, FormsAndChunkSizesAgree) {
  for (const bool normalize : {false, true}) {
    if (normalize && !normalizes()) continue;
    RandomSpec spec = Spec(rule(), 130);
    spec.normalize = normalize;
    const OwnedInputs inputs = Draw(spec);
    Options options;
    options.rule = rule();
    options.normalize = normalize;
    if (normalize) options.feature_map = FeatureMap::kEluPlusOne;
    const OwnedGiven given = DrawGiven(options, inputs.view(), 3);
    options.form = Form::kRecurrent;
    const OwnedGradients recurrent = ComputeGradients(options, inputs, given);
    const auto expect = [&] {
      OwnedGradients got = ComputeGradients(options, inputs, given);
      ExpectNearGradients(got, AsNumbers(recurrent), GradientTolerance(Dtype::kF32, 130, kDims));
    };
    options.form = Form::kAutomatic;
    expect();
    options.form = Form::kChunkwise;
    for (const int64_t chunk : {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 129, 130, 131, 1000000}) {
      SCOPED_TRACE(chunk);
      options.chunk = chunk;
      expect();
    }
    options.chunk = 1;
    ExpectSame(ComputeGradients(options, inputs, given), recurrent);
  }
}

// Tokens begin .. end - 1 of a tensor [B, T, ...], B = 1; one that all tokens share as it is.
Owned TokensOf(const Owned& from, int64_t begin, int64_t end) {
  if (from.shape.size() < 3) return from;
  Owned to = from;
  to.shape[1] = end - begin;
  const auto row = static_cast<int64_t>(from.bytes.size()) / from.shape[1];
  to.bytes.assign(from.bytes.begin() + begin * row, from.bytes.begin() + end * row);
  return to;
}
OwnedInputs TokensOf(const OwnedInputs& from, int64_t begin, int64_t end) {
  OwnedInputs to = from;
  for (Owned OwnedInputs::*t :
       {&OwnedInputs::q, &OwnedInputs::k, &OwnedInputs::v, &OwnedInputs::log_decay, &OwnedInputs::beta, &OwnedInputs::remove, &OwnedInputs::write})
    to.*t = TokensOf(from.*t, begin, end);
  return to;
}

// Two calls, the state handed from the first to the second and its gradient back: their gradients are those of one call over all tokens.
TEST_P(EveryRule, PiecesMakeTheWhole) {
  for (const bool normalize : {false, true}) {
    if (normalize && !normalizes()) continue;
    RandomSpec spec = Spec(rule(), 70);
    spec.normalize = normalize;
    const OwnedInputs inputs = Draw(spec);
    for (Options options : Forms(rule(), {16, 0})) {
      options.normalize = normalize;
      if (normalize) options.feature_map = FeatureMap::kEluPlusOne;
      const OwnedGiven given = DrawGiven(options, inputs.view(), 4);
      OwnedGradients whole = ComputeGradients(options, inputs, given);
      for (const int64_t cut : {0, 1, 16, 33, 69, 70}) {
        SCOPED_TRACE(TextOf(options) + " cut " + std::to_string(cut));
        const OwnedInputs first = TokensOf(inputs, 0, cut);
        OwnedInputs second = TokensOf(inputs, cut, 70);
        const Results between = Compute(options, first.view());
        second.initial_state = between.final_state;
        second.initial_key_sum = between.final_key_sum;
        OwnedGradients d_second = ComputeGradients(options, second, {TokensOf(given.out, cut, 70), given.final_state, given.final_key_sum});
        OwnedGradients d_first = ComputeGradients(options, first, {TokensOf(given.out, 0, cut), d_second.initial_state, d_second.initial_key_sum});
        OwnedGradients both = whole;
        both.initial_state = d_first.initial_state;
        both.initial_key_sum = d_first.initial_key_sum;
        both.scale = d_first.scale + d_second.scale;
        for (size_t part = 0; part < 8; ++part) {
          Owned *to = both.All()[part].second, *a = d_first.All()[part].second, *b = d_second.All()[part].second;
          if (to->shape.empty()) continue;
          if (to->shape.size() < 3) {
            for (int64_t i = 0; i < to->size(); ++i) to->Set(i, a->Get(i) + b->Get(i));
          } else {
            std::copy(b->bytes.begin(), b->bytes.end(), std::copy(a->bytes.begin(), a->bytes.end(), to->bytes.begin()));
          }
        }
        ExpectNearGradients(both, AsNumbers(whole), GradientTolerance(Dtype::kF32, 70, kDims));
      }
    }
  }
}

TEST_P(EveryRule, PackedSequencesAreSeparateCalls) {
  RandomSpec spec = Spec(rule(), 60);
  spec.offsets = {0, 0, 17, 18, 60, 60};
  const OwnedInputs inputs = RandomInputs(spec);
  for (const Options& options : Forms(rule(), {7, 16, 0})) {
    SCOPED_TRACE(TextOf(options));
    const OwnedGiven given = DrawGiven(options, inputs.view(), 5);
    OwnedGradients packed = ComputeGradients(options, inputs, given);
    std::vector<double> sums;  // of what the sequences share
    double scale = 0;
    for (int64_t n = 0; n < 5; ++n) {
      const int64_t begin = spec.offsets[n], end = spec.offsets[n + 1], state = 2 * kKeys * kValues * 4;
      OwnedInputs one = TokensOf(inputs, begin, end);
      one.offsets = {};
      const auto state_of = [&](const Owned& states) {
        Owned alone = Owned::Zeros(Dtype::kF32, {1, 2, kKeys, kValues});
        std::memcpy(alone.bytes.data(), states.bytes.data() + n * state, static_cast<size_t>(state));
        return alone;
      };
      one.initial_state = state_of(inputs.initial_state);
      OwnedGradients alone = ComputeGradients(options, one, {TokensOf(given.out, begin, end), state_of(given.final_state), {}});
      for (size_t part = 0; part < 8; ++part) {
        const Owned &a = *alone.All()[part].second, &p = *packed.All()[part].second;
        if (a.shape.size() > 2) {
          EXPECT_TRUE(SameBits(TokensOf(p, begin, end), a)) << alone.All()[part].first << " of sequence " << n;
        }
        if (a.shape.size() == 1 || a.shape.size() == 2) {
          sums.resize(static_cast<size_t>(a.size()));
          for (int64_t i = 0; i < a.size(); ++i) sums[static_cast<size_t>(i)] += a.Get(i);
        }
      }
      EXPECT_TRUE(SameBits(state_of(packed.initial_state), alone.initial_state));
      scale += alone.scale;
    }
    // Added up in f64, and rounded here once a sequence.
    EXPECT_NEAR(packed.scale, scale, 1e-12 * std::abs(scale));
    for (const Owned* shared : {&packed.log_decay, &packed.bonus}) {
      if (shared->shape.empty() || shared->shape.size() > 2) continue;
      double largest = 0;
      for (const double x : sums) largest = std::max(largest, std::abs(x));
      for (int64_t i = 0; i < shared->size(); ++i) EXPECT_NEAR(shared->Get(i), sums[static_cast<size_t>(i)], 1e-6 * largest);
    }
  }
}

TEST_P(EveryRule, AnyNumberOfThreadsGivesTheSameBits) {
  struct Heads {
    int64_t q, k, v, gates;
  };
  for (const Heads heads : {Heads{1, 1, 1, 1}, Heads{3, 3, 3, 3}, Heads{8, 4, 4, 2}, Heads{2, 1, 4, 1}}) {
    RandomSpec spec = Spec(rule(), 45);
    spec.q_heads = heads.q, spec.k_heads = heads.k, spec.v_heads = heads.v, spec.gate_heads = heads.gates;
    spec.batch = 3;
    const OwnedInputs inputs = RandomInputs(spec);
    for (Options options : Forms(rule())) {
      SCOPED_TRACE(TextOf(options) + ", " + std::to_string(heads.q) + " heads of queries");
      const OwnedGiven given = DrawGiven(options, inputs.view(), 6);
      ThreadExecutor one(1);
      options.executor = &one;
      const OwnedGradients alone = ComputeGradients(options, inputs, given);
      for (const int threads : {2, 3, 8}) {
        ThreadExecutor many(threads);
        options.executor = &many;
        ExpectSame(ComputeGradients(options, inputs, given), alone);
      }
      options.executor = UsualExecutor();
      options.threads = 2;
      ExpectSame(ComputeGradients(options, inputs, given), alone);
    }
  }
}

// ---- What is wanted, where it lies, and what is valid -------------------------------------------------------------------------------------------

// With everything that a call may have: groups of heads, a normaliser where there is one and it is wanted, tokens that are not valid.
struct Full {
  Options options;
  OwnedInputs inputs;
  OwnedGiven given;
};
Full Everything(const Options& form, Dtype dtype = Dtype::kF32, bool normalize = true) {
  RandomSpec spec = Spec(form.rule, 33);
  spec.dtype = dtype;
  spec.batch = 2;
  spec.q_heads = 4;
  spec.k_heads = 1;
  spec.gate_heads = 1;
  spec.valid_fraction = 0.8;
  spec.normalize = normalize && Info(form.rule).can_normalize;
  Full full{form, {}, {}};
  full.options.normalize = spec.normalize;
  full.options.feature_map = spec.feature_map = spec.normalize ? FeatureMap::kEluPlusOne : FeatureMap::kL2Norm;
  full.inputs = Draw(spec);
  full.given = DrawGiven(full.options, full.inputs.view(), 7);
  return full;
}

TEST_P(EveryRule, AnySubsetHasTheBitsOfAll) {
  for (const auto& [chunk, normalize] : {std::pair{int64_t{0}, false}, {0, true}, {16, false}, {16, true}}) {
    if (normalize && !normalizes()) continue;  // without it the scale has a gradient
    const Full full = Everything(chunk == 0 ? Forms(rule())[0] : Forms(rule())[1], Dtype::kF32, normalize);
    SCOPED_TRACE(TextOf(full.options));
    OwnedGradients all = ComputeGradients(full.options, full.inputs, full.given);
    Options options = full.options;
    options.executor = UsualExecutor();
    constexpr size_t kCount = 11;  // ten tensors and the scale
    std::vector<unsigned> subsets = {0, 0x155, 0x2AA};
    for (size_t one = 0; one < kCount; ++one) {
      subsets.push_back(1u << one);
      subsets.push_back(~(1u << one));
    }
    for (const unsigned subset : subsets) {
      SCOPED_TRACE(subset);
      OwnedGradients some = RoomForGradients(full.options, full.inputs);
      Gradients wanted = some.view();
      Tensor* tensors[] = {&wanted.q,      &wanted.k,     &wanted.v,     &wanted.log_decay,     &wanted.beta,
                           &wanted.remove, &wanted.write, &wanted.bonus, &wanted.initial_state, &wanted.initial_key_sum};
      OwnedGradients expected = RoomForGradients(full.options, full.inputs);
      for (size_t one = 0; one + 1 < kCount; ++one) {
        if ((subset >> one & 1) != 0)
          *expected.All()[one].second = *all.All()[one].second;
        else
          *tensors[one] = {};
      }
      if ((subset >> (kCount - 1) & 1) != 0)
        expected.scale = all.scale;
      else
        wanted.scale = nullptr;
      const Status status = AttendGradient(options, full.inputs.view(), full.given.view(), wanted);
      ASSERT_TRUE(status.ok()) << status.message;
      ExpectSame(some, expected);
    }
  }
}

// What is not given counts as zeros, to the bit.
TEST_P(EveryRule, GivenGradientsThatAreMissingAreZeros) {
  for (const Options& form : Forms(rule())) {
    SCOPED_TRACE(TextOf(form));
    const Full full = Everything(form);
    Options options = full.options;
    options.executor = UsualExecutor();
    for (int missing = 0; missing < 8; ++missing) {
      OwnedGiven zeroed = full.given;
      OutputGradients some = full.given.view();
      if ((missing & 1) != 0) Set(&zeroed.out, 0), some.out = {};
      if ((missing & 2) != 0) Set(&zeroed.final_state, 0), some.final_state = {};
      if ((missing & 4) != 0) Set(&zeroed.final_key_sum, 0), some.final_key_sum = {};
      OwnedGradients got = RoomForGradients(full.options, full.inputs);
      const Status status = AttendGradient(options, full.inputs.view(), some, got.view());
      ASSERT_TRUE(status.ok()) << status.message;
      const OwnedGradients want = ComputeGradients(full.options, full.inputs, zeroed);
      OwnedGradients a = got, b = want;
      for (size_t part = 0; part < a.All().size(); ++part) EXPECT_EQ(Numbers(*a.All()[part].second), Numbers(*b.All()[part].second));
      EXPECT_EQ(got.scale, want.scale);
    }
  }
}

TEST_P(EveryRule, StridesMayBeAnything) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16})
    for (const Options& form : Forms(rule())) {
      SCOPED_TRACE(TextOf(form) + std::string(Name(dtype)));
      const Full full = Everything(form, dtype);
      const OwnedGradients dense = ComputeGradients(full.options, full.inputs, full.given);
      OwnedGradients strange = RoomForGradients(full.options, full.inputs);
      std::vector<Scattered> memory;
      memory.reserve(32);
      const auto scatter = [&](const ConstTensor& t) -> Scattered& { return memory.emplace_back(t); };
      Inputs in = full.inputs.view();
      for (ConstTensor* t :
           {&in.q, &in.k, &in.v, &in.log_decay, &in.beta, &in.remove, &in.write, &in.bonus, &in.initial_state, &in.initial_key_sum, &in.valid})
        *t = scatter(*t).view();
      OutputGradients given = full.given.view();
      for (ConstTensor* t : {&given.out, &given.final_state, &given.final_key_sum}) *t = scatter(*t).view();
      const size_t first = memory.size();
      Gradients wanted = strange.view();
      for (Tensor* t : {&wanted.q, &wanted.k, &wanted.v, &wanted.log_decay, &wanted.beta, &wanted.remove, &wanted.write, &wanted.bonus,
                        &wanted.initial_state, &wanted.initial_key_sum})
        *t = scatter(*t).mutable_view();
      Options options = full.options;
      options.executor = UsualExecutor();
      const Status status = AttendGradient(options, in, given, wanted);
      ASSERT_TRUE(status.ok()) << status.message;
      for (size_t i = first; i < memory.size(); ++i) memory[i].Gather();
      ExpectSame(strange, dense);
    }
}

TEST_P(EveryRule, StatesMayLieTurned) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF64})
    for (const Options& form : Forms(rule())) {
      SCOPED_TRACE(TextOf(form) + std::string(Name(dtype)));
      const Full full = Everything(form, dtype);
      const OwnedGradients dense = ComputeGradients(full.options, full.inputs, full.given);
      OwnedGradients turned = RoomForGradients(full.options, full.inputs);
      const Scattered before(full.inputs.initial_state.view(), Scattered::kTurned), final_gradient(full.given.final_state.view(), Scattered::kTurned);
      Scattered initial_gradient(turned.initial_state.view(), Scattered::kTurned);
      Inputs in = full.inputs.view();
      in.initial_state = before.view();
      OutputGradients given = full.given.view();
      given.final_state = final_gradient.view();
      Gradients wanted = turned.view();
      wanted.initial_state = initial_gradient.mutable_view();
      Options options = full.options;
      options.executor = UsualExecutor();
      const Status status = AttendGradient(options, in, given, wanted);
      ASSERT_TRUE(status.ok()) << status.message;
      initial_gradient.Gather();
      ExpectSame(turned, dense);
    }
}

TEST_P(EveryRule, WithoutTokensHandTheFinalGradientOn) {
  for (const Options& form : Forms(rule(), {16, 0}))
    for (const int64_t batch : {1, 3, 0})
      for (const int64_t tokens : {0, 5}) {
        if (tokens > 0 && batch > 0) continue;
        SCOPED_TRACE(TextOf(form) + " batch " + std::to_string(batch));
        RandomSpec spec = Spec(rule(), tokens);
        spec.batch = batch;
        spec.normalize = normalizes();
        Options options = form;
        options.normalize = normalizes();
        const OwnedInputs inputs = RandomInputs(spec);
        const OwnedGiven given = DrawGiven(options, inputs.view(), 8);
        const OwnedGradients got = ComputeGradients(options, inputs, given);
        EXPECT_TRUE(SameBits(got.initial_state, given.final_state));
        EXPECT_TRUE(SameBits(got.initial_key_sum, given.final_key_sum));
        EXPECT_EQ(got.scale, 0);
        for (const Owned* shared : {&got.log_decay, &got.bonus})
          for (int64_t i = 0; i < shared->size(); ++i) EXPECT_EQ(shared->Get(i), 0);
      }
}

// A batch of nothing needs no memory, on a thread that has none yet as on any, nor a workspace that begins a line.
TEST_P(EveryRule, OfNothingNeedNoMemory) {
  RandomSpec spec = Spec(rule());
  spec.batch = 0;
  Options options;
  options.rule = rule();
  options.executor = UsualExecutor();
  const OwnedInputs inputs = RandomInputs(spec);
  const OwnedGiven given = DrawGiven(options, inputs.view(), 8);
  OwnedGradients wanted = RoomForGradients(options, inputs);
  int64_t bytes = -1;
  ASSERT_TRUE(GradientWorkspaceBytes(options, inputs.view(), given.view(), wanted.view(), &bytes).ok());
  EXPECT_EQ(bytes, 0);
  alignas(64) std::byte line[64];
  for (std::byte* workspace : {static_cast<std::byte*>(nullptr), line, line + 1}) {
    options.workspace = {workspace, 0};
    Status status;
    std::thread([&] { status = AttendGradient(options, inputs.view(), given.view(), wanted.view()); }).join();
    EXPECT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(wanted.scale, 0);
  }
}

TEST_P(EveryRule, InvalidTokensAreAsIfAbsentWhateverTheyHold) {
  RandomSpec spec = Spec(rule(), 60);
  OwnedInputs whole = RandomInputs(spec);
  whole.valid = Owned::Zeros(Dtype::kBool, {1, 60});
  std::vector<int64_t> kept;
  for (int64_t t = 0; t < 60; ++t)
    if (t % 7 < 3 || (t > 30 && t < 50)) kept.push_back(t);
  for (const int64_t t : kept) whole.valid.Set(t, 1);
  const auto count = static_cast<int64_t>(kept.size());
  const auto only_kept = [&](const Owned& from) {
    Owned to = from;
    if (from.shape.size() < 3) return to;
    to.shape[1] = count;
    const auto row = static_cast<int64_t>(from.bytes.size()) / 60;
    to.bytes.clear();
    for (const int64_t t : kept) to.bytes.insert(to.bytes.end(), from.bytes.begin() + t * row, from.bytes.begin() + (t + 1) * row);
    return to;
  };
  const auto spoil = [&](Owned* tensor) {
    if (tensor->shape.size() < 3) return;
    const int64_t row = tensor->size() / 60;
    for (int64_t i = 0; i < tensor->size(); ++i)
      if (whole.valid.Get(i / row) == 0) tensor->Set(i, i % 2 == 0 ? kNan : kInfinity);
  };
  OwnedInputs shorter = whole;
  shorter.valid = {};
  for (Owned OwnedInputs::*t :
       {&OwnedInputs::q, &OwnedInputs::k, &OwnedInputs::v, &OwnedInputs::log_decay, &OwnedInputs::beta, &OwnedInputs::remove, &OwnedInputs::write}) {
    shorter.*t = only_kept(whole.*t);
    spoil(&(whole.*t));
  }
  for (const Options& options : Forms(rule(), {16, 0})) {
    SCOPED_TRACE(TextOf(options));
    OwnedGiven given = DrawGiven(options, whole.view(), 9);
    const OwnedGiven fewer{only_kept(given.out), given.final_state, given.final_key_sum};
    spoil(&given.out);
    OwnedGradients masked = ComputeGradients(options, whole, given), absent = ComputeGradients(options, shorter, fewer);
    for (size_t part = 0; part < 8; ++part) {
      Owned& got = *masked.All()[part].second;
      EXPECT_TRUE(SameBits(only_kept(got), *absent.All()[part].second)) << masked.All()[part].first;
      if (got.shape.size() < 3) continue;
      for (int64_t i = 0; i < got.size(); ++i)
        if (whole.valid.Get(i / (got.size() / 60)) == 0) {
          ASSERT_EQ(got.Get(i), 0) << masked.All()[part].first;
        }
    }
    EXPECT_TRUE(SameBits(masked.initial_state, absent.initial_state));
    EXPECT_EQ(masked.scale, absent.scale);
  }
}

// ---- Dtypes -------------------------------------------------------------------------------------------------------------------------------------

// Against the truth of numbers that have not been rounded: no more than twice what rounding the inputs, what is given and the gradients alone costs.
TEST_P(EveryRule, OfHalvesErrAtMostTwiceWhatRoundingCosts) {
  for (const Dtype dtype : {Dtype::kBF16, Dtype::kF16})
    for (const Dtype gate_dtype : {dtype, Dtype::kF32}) {
      RandomSpec spec = Spec(rule(), 150);
      spec.dtype = Dtype::kF64;
      spec.key_dim = 32;
      spec.value_dim = 24;
      Options one;
      one.rule = rule();
      const OwnedInputs exact = RandomInputs(spec), rounded = As(exact, dtype, gate_dtype);
      const OwnedGiven given = DrawGiven(one, exact.view(), 10), given_rounded{As(given.out, dtype), As(given.final_state, Dtype::kF32), {}};
      proof::InputGradients<double> truth = OracleGradients<double>(one, exact.view(), given.view());
      proof::InputGradients<double> reference = OracleGradients<double>(one, rounded.view(), given_rounded.view());
      for (const Options& options : Forms(rule(), {16, 0})) {
        OwnedGradients got = ComputeGradients(options, rounded, given_rounded);
        for (size_t part = 0; part < got.All().size(); ++part) {
          const auto [name, tensor] = got.All()[part];
          if (tensor->shape.empty()) continue;
          Owned least = *tensor;
          for (int64_t i = 0; i < least.size(); ++i) least.Set(i, (*Parts(reference)[part])[static_cast<size_t>(i)]);
          const double noise = RootMeanSquare(Numbers(least), *Parts(truth)[part]);
          ASSERT_GT(noise, 0) << name;
          EXPECT_LE(RootMeanSquare(Numbers(*tensor), *Parts(truth)[part]), 2 * noise) << TextOf(options) << " " << Name(dtype) << " " << name;
        }
      }
    }
}

// ---- At the edges -------------------------------------------------------------------------------------------------------------------------------

// Finite and near the oracle in every form, f32 and f64. `change` sets the inputs.
template <class Change>
void ExpectFiniteAndNear(RandomSpec spec, Options one, Change change) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF64}) {
    spec.dtype = dtype;
    one.rule = spec.rule;
    one.feature_map = spec.feature_map;
    one.normalize = spec.normalize;
    OwnedInputs inputs = RandomInputs(spec);
    change(&inputs);
    const OwnedGiven given = DrawGiven(one, inputs.view(), 12);
    const proof::InputGradients<double> want = dtype == Dtype::kF64 ? OracleGradients<long double>(one, inputs.view(), given.view())
                                                                    : OracleGradients<double>(one, inputs.view(), given.view());
    for (const Options& form : Forms(spec.rule, {5, 16, 64, 0})) {
      Options options = one;
      options.form = form.form;
      options.chunk = form.chunk;
      SCOPED_TRACE(TextOf(options) + " " + std::string(Name(dtype)));
      OwnedGradients got = ComputeGradients(options, inputs, given);
      ExpectFinite(got);
      ExpectNearGradients(got, want, GradientTolerance(dtype, spec.tokens, spec.key_dim + spec.value_dim));
    }
  }
}

TEST_P(EveryRule, AreFiniteUnderStrongNoAndTotalDecay) {
  if (!decays()) return;
  const auto expect = [&](auto log_decay) {  // of a token and a channel
    ExpectFiniteAndNear(Spec(rule(), 70), {}, [&](OwnedInputs* inputs) {
      Owned& t = inputs->log_decay;
      const int64_t channels = t.shape.size() == 4 ? kKeys : 1, per_token = t.shape.size() == 1 ? 2 : t.size() / 70;
      for (int64_t i = 0; i < t.size(); ++i) t.Set(i, log_decay(i / per_token, i % channels));
    });
  };
  expect([](int64_t, int64_t channel) { return channel == 0 ? -30.0 : -0.1; });
  expect([](int64_t, int64_t) { return -30.0; });
  expect([](int64_t, int64_t) { return 0.0; });
  expect([](int64_t, int64_t) { return -1000.0; });
  expect([](int64_t, int64_t) { return -kInfinity; });
  if (rule() == Rule::kRetention) return;
  for (const int64_t at : {0, 1, 16, 35, 69}) expect([=](int64_t token, int64_t) { return token == at ? -kInfinity : -0.05; });
}

// A decay of e^-30 has a gradient of about 1e-13 beside others of about 1, and it is right to a millionth of itself. The shorter formula, the sum of
// q dq - k dk over this and all later tokens, subtracts numbers 1e13 times larger than what is left: in f32 it is off by ten million times the
// gradient.
TEST_P(EveryRule, OfNextToNothingAreRightRelativeToThemselves) {
  if (!decays() || rule() == Rule::kRetention) return;
  constexpr int64_t kTokens = 70, kHeads = 2;
  OwnedInputs inputs = RandomInputs(Spec(rule(), kTokens));
  Owned& log_decay = inputs.log_decay;
  const int64_t channels = log_decay.shape.size() == 4 ? kKeys : 1, per_token = kHeads * channels;
  const auto strong = [](int64_t token) { return token % 9 == 4; };
  for (int64_t i = 0; i < log_decay.size(); ++i)
    if (strong(i / per_token)) log_decay.Set(i, -30);
  Options one;
  one.rule = rule();
  OwnedGiven given = DrawGiven(one, inputs.view(), 13);
  Set(&given.final_state, 0);
  const std::vector<double> want = OracleGradients<double>(one, inputs.view(), given.view()).log_decay;
  for (const Options& options : Forms(rule(), {5, 16, 64, 0})) {
    SCOPED_TRACE(TextOf(options));
    const OwnedGradients got = ComputeGradients(options, inputs, given);
    // The largest gap and the largest number of the channels of a head at a token.
    const auto worst = [&](const auto& numbers) {
      double ratio = 0;
      for (int64_t token = 0; token < kTokens; ++token)
        for (int64_t head = 0; strong(token) && head < kHeads; ++head) {
          double gap = 0, largest = 0;
          for (int64_t c = 0; c < channels; ++c) {
            const int64_t i = token * per_token + head * channels + c;
            gap = std::max(gap, std::abs(numbers(i) - want[static_cast<size_t>(i)]));
            largest = std::max(largest, std::abs(want[static_cast<size_t>(i)]));
          }
          EXPECT_GT(largest, 0);
          EXPECT_LT(largest, 1e-10);
          ratio = std::max(ratio, gap / largest);
        }
      return ratio;
    };
    const double of_engine = worst([&](int64_t i) { return got.log_decay.Get(i); });
    EXPECT_LE(of_engine, GradientTolerance(Dtype::kF32, kTokens, kDims));
    if (rule() != Rule::kSimpleGla && rule() != Rule::kGla) continue;  // of which the shorter formula is
    std::vector<float> shorter(want.size()), sum(static_cast<size_t>(per_token));
    for (int64_t token = kTokens - 1; token >= 0; --token)
      for (int64_t i = 0; i < kHeads * kKeys; ++i) {
        const int64_t at = token * kHeads * kKeys + i, to = i / (kKeys / channels);
        const auto number = [&](const Owned& t) { return static_cast<float>(t.Get(at)); };
        float& running = sum[static_cast<size_t>(to)];
        running += number(inputs.q) * number(got.q) - number(inputs.k) * number(got.k);
        shorter[static_cast<size_t>(token * per_token + to)] = running;
      }
    const double of_shorter = worst([&](int64_t i) { return static_cast<double>(shorter[static_cast<size_t>(i)]); });
    EXPECT_LE(100 * of_engine, of_shorter);
    // Where little is forgotten, it is the same formula.
    double gap = 0, largest = 0;
    for (int64_t i = 0; i < log_decay.size(); ++i) {
      gap = std::max(gap, std::abs(static_cast<double>(shorter[static_cast<size_t>(i)]) - want[static_cast<size_t>(i)]));
      largest = std::max(largest, std::abs(want[static_cast<size_t>(i)]));
    }
    EXPECT_LE(gap, 1e-4 * largest);
  }
}

TEST_P(EveryRule, AreFiniteAtZeroVectors) {
  for (const double eps : {1e-6, 1e-12, 0.0})
    for (const bool all : {false, true}) {
      RandomSpec spec = Spec(rule(), 40);
      spec.feature_map = FeatureMap::kL2Norm;
      Options one;
      one.eps = eps;
      SCOPED_TRACE(std::string("eps ") + std::to_string(eps) + (all ? " all" : " some"));
      ExpectFiniteAndNear(spec, one, [&](OwnedInputs* inputs) {
        for (Owned* tensor : {&inputs->q, &inputs->k})
          for (int64_t i = 0; i < tensor->size(); ++i)
            if (all || i / kKeys % 3 == 0) tensor->Set(i, 0);
      });
    }
}

// Where no key has been met, or the query is zero, the denominator is: the row passes nothing on, whatever is asked of it.
TEST_P(EveryRule, AreFiniteAtZeroDenominators) {
  if (!normalizes()) return;
  for (const FeatureMap map : {FeatureMap::kIdentity, FeatureMap::kRelu, FeatureMap::kL2Norm}) {
    SCOPED_TRACE(Name(map));
    RandomSpec spec = Spec(rule(), 40);
    spec.feature_map = map;
    spec.normalize = true;
    const auto silence = [&](OwnedInputs* inputs) {
      const int64_t row = 2 * kKeys;
      for (Owned* tensor : {&inputs->q, &inputs->k, &inputs->bonus})  // positive, or a denominator may cancel
        for (int64_t i = 0; i < tensor->size(); ++i) tensor->Set(i, 0.1 + std::abs(tensor->Get(i)));
      Set(&inputs->initial_key_sum, 0);
      for (int64_t i = 0; i < 3 * row; ++i) inputs->k.Set(i, 0);
      for (int64_t i = 20 * row; i < 21 * row; ++i) inputs->q.Set(i, 0);
    };
    ExpectFiniteAndNear(spec, {}, silence);

    OwnedInputs inputs = RandomInputs(spec);
    silence(&inputs);
    for (Options options : Forms(rule(), {5, 16, 0})) {
      SCOPED_TRACE(TextOf(options));
      options.feature_map = map;
      options.normalize = true;
      OwnedGiven given = DrawGiven(options, inputs.view(), 14);
      const OwnedGradients gradients = ComputeGradients(options, inputs, given);
      for (const int64_t t : {0, 1, 2, 20}) {
        for (int64_t i = t * 2 * kKeys; i < (t + 1) * 2 * kKeys; ++i) EXPECT_EQ(gradients.q.Get(i), 0);
        for (int64_t i = t * 2 * kValues; i < (t + 1) * 2 * kValues; ++i) given.out.Set(i, kNan);
      }
      EXPECT_NE(gradients.q.Get(3 * 2 * kKeys), 0);
      ExpectSame(ComputeGradients(options, inputs, given), gradients);
    }
  }
}

// ---- Memory -------------------------------------------------------------------------------------------------------------------------------------

TEST_P(EveryRule, AWorkspaceOfTheCallersIsEnoughToTheByte) {
  for (const Options& form : Forms(rule(), {16, 0}))
    for (const int threads : {1, 3}) {
      const Full full = Everything(form);
      const OwnedGradients usual = ComputeGradients(full.options, full.inputs, full.given);
      ThreadExecutor executor(threads);
      Options options = full.options;
      options.executor = &executor;
      OwnedGradients got = RoomForGradients(full.options, full.inputs);
      int64_t bytes = 0;
      Status status = GradientWorkspaceBytes(options, full.inputs.view(), full.given.view(), got.view(), &bytes);
      ASSERT_TRUE(status.ok()) << status.message;
      ASSERT_GT(bytes, 0);
      for (const size_t shift : {0, 1, 63}) {
        SCOPED_TRACE(TextOf(form) + ", " + std::to_string(threads) + " threads, from " + std::to_string(shift));
        constexpr std::byte kGuard{0xA7};
        std::vector<std::byte> memory(static_cast<size_t>(bytes) + 128, kGuard);
        options.workspace = {memory.data() + shift, bytes - 1};
        got = RoomForGradients(full.options, full.inputs);
        const OwnedGradients before = got;
        status = AttendGradient(options, full.inputs.view(), full.given.view(), got.view());
        EXPECT_EQ(status.code, StatusCode::kInvalidOption);
        EXPECT_EQ(status.message, "workspace has " + std::to_string(bytes - 1) + " bytes and must have at least " + std::to_string(bytes) +
                                      ", which GradientWorkspaceBytes says of this call");
        ExpectSame(got, before);
        options.workspace.bytes = bytes;
        status = AttendGradient(options, full.inputs.view(), full.given.view(), got.view());
        ASSERT_TRUE(status.ok()) << status.message;
        ExpectSame(got, usual);
        for (size_t i = 0; i < memory.size(); ++i)
          if (i < shift || i >= shift + static_cast<size_t>(bytes)) {
            ASSERT_EQ(memory[i], kGuard) << i;
          }
      }
    }
}

// At T = 65536, H = 8, K = V = 64, f32: beside inputs and gradients a state a chunk for every head in flight, and 4 MiB a thread. Nothing is
// computed: the tensors are views of memory that nobody touches.
TEST_P(EveryRule, OverALongSequenceKeepAStateAChunk) {
  constexpr int64_t kTokens = 65536, kHeads = 8, kDim = 64, kState = kDim * kDim * 4;
  const size_t each = static_cast<size_t>(kTokens * kHeads * kDim) * 4, tensors = 30;
  void* mapping = mmap(nullptr, tensors * each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  auto* next = static_cast<std::byte*>(mapping);
  const auto take = [&](std::initializer_list<int64_t> shape) {
    Tensor t = View(reinterpret_cast<float*>(next), shape);
    next += each;
    return t;
  };
  const RuleInfo& info = Info(rule());
  const auto decay = [&] {
    return rule() == Rule::kRetention             ? take({kHeads})
           : info.log_decay_layout == "[B, T, H]" ? take({1, kTokens, kHeads})
                                                  : take({1, kTokens, kHeads, kDim});
  };
  for (const bool normalize : {false, true}) {
    if (normalize && !info.can_normalize) continue;
    next = static_cast<std::byte*>(mapping);
    const auto row = [&] { return take({1, kTokens, kHeads, kDim}); };
    const auto state = [&] { return take({1, kHeads, kDim, kDim}); };
    Inputs in;
    Gradients wanted;
    double scale = 0;
    wanted.scale = &scale;
    in.q = row(), in.k = row(), in.v = row(), wanted.q = row(), wanted.k = row(), wanted.v = row();
    if (decays()) in.log_decay = decay(), wanted.log_decay = decay();
    if (info.takes_beta) in.beta = take({1, kTokens, kHeads}), wanted.beta = take({1, kTokens, kHeads});
    if (info.takes_remove_and_write) in.remove = row(), in.write = row(), wanted.remove = row(), wanted.write = row();
    if (info.takes_bonus) in.bonus = take({kHeads, kDim}), wanted.bonus = take({kHeads, kDim});
    in.initial_state = state(), wanted.initial_state = state();
    OutputGradients given;
    given.out = row(), given.final_state = state();
    if (normalize) {
      in.initial_key_sum = take({1, kHeads, kDim}), wanted.initial_key_sum = take({1, kHeads, kDim}), given.final_key_sum = take({1, kHeads, kDim});
    }
    ASSERT_LE(next, static_cast<std::byte*>(mapping) + tensors * each);
    for (const int threads : {1, 2, 8, 64}) {
      ThreadExecutor executor(threads);
      for (Options options : Forms(rule(), {0, 16, 32, 64, 128})) {
        SCOPED_TRACE(TextOf(options) + ", " + std::to_string(threads) + " threads");
        options.normalize = normalize;
        options.check_values = false;
        options.executor = &executor;
        int64_t bytes = 0;
        const Status status = GradientWorkspaceBytes(options, in, given, wanted, &bytes);
        ASSERT_TRUE(status.ok()) << status.message;
        // Automatic chunks have 32 tokens; of shorter ones a state every 16 tokens is kept.
        const int64_t chunk = options.form == Form::kRecurrent ? 16 : options.chunk == 0 ? 32 : options.chunk;
        const int64_t in_flight = std::min<int64_t>(threads, kHeads);
        EXPECT_LE(bytes, in_flight * (kTokens / chunk * kState) + in_flight * (4 << 20));
      }
    }
  }
  munmap(mapping, tensors * each);
}

// ---- What Attend saves for AttendGradient -------------------------------------------------------------------------------------------------------

TEST(Saved, IsRefusedWhereItIsTooSmallOrOfAnotherCall) {
  RandomSpec spec;
  spec.rule = Rule::kGatedDelta;
  spec.tokens = 100;
  const OwnedInputs inputs = RandomInputs(spec);
  Options options;
  options.rule = spec.rule;
  options.executor = UsualExecutor();
  int64_t bytes = 0;
  ASSERT_TRUE(SavedBytes(options, inputs.view(), &bytes).ok());
  EXPECT_EQ(bytes, 64 + 4 * 2 * 32 * 32 * 4);  // 4 chunks of 32 tokens, 2 heads
  std::vector<std::byte> saved(static_cast<size_t>(bytes));
  Results room = Room(options, inputs.view());
  Outputs outputs = room.view();
  OwnedGiven given = DrawGiven(options, inputs.view(), 1);
  OwnedGradients gradients = RoomForGradients(options, inputs);
  OutputGradients with = given.view();
  with.saved = {saved.data(), bytes};

  Status status = AttendGradient(options, inputs.view(), with, gradients.view());
  EXPECT_EQ(status.code, StatusCode::kValue);
  EXPECT_EQ(
      status.message,
      "saved holds the states of a call of another rule, chunk, feature map, dtype or size, or none, and must be what Attend saved of this one");
  outputs.saved = {saved.data(), bytes - 1};
  status = Attend(options, inputs.view(), outputs);
  EXPECT_EQ(status.code, StatusCode::kInvalidOption);
  EXPECT_EQ(status.message, "saved has " + std::to_string(bytes - 1) + " bytes and must have at least " + std::to_string(bytes) +
                                ", which SavedBytes says of this call");
  outputs.saved = {room.out.bytes.data(), 8};
  status = Attend(options, inputs.view(), outputs);
  EXPECT_EQ(status.code, StatusCode::kOverlap);
  EXPECT_EQ(status.message, "saved shares memory with out and must be apart from it");
  EXPECT_EQ(room.out.Get(0), 12345.0) << "a refused call has written";

  outputs.saved = {saved.data(), bytes};
  ASSERT_TRUE(Attend(options, inputs.view(), outputs).ok());
  EXPECT_TRUE(AttendGradient(options, inputs.view(), with, gradients.view()).ok());
  options.chunk = 64;
  EXPECT_EQ(AttendGradient(options, inputs.view(), with, gradients.view()).code, StatusCode::kValue);
  options.chunk = 0;
  options.form = Form::kParallel;
  status = SavedBytes(options, inputs.view(), &bytes);
  EXPECT_EQ(status.code, StatusCode::kInvalidOption);
  EXPECT_EQ(status.message, "saved was asked for in the parallel form, which has no states, and must be asked for in another");
  EXPECT_EQ(Attend(options, inputs.view(), outputs).message, status.message);
}

// A walk that keeps states has the bits of one that keeps none.
TEST(Saved, ChangesNoOutput) {
  for (const RuleInfo& info : Rules()) {
    RandomSpec spec;
    spec.rule = info.rule;
    spec.tokens = 83;
    const OwnedInputs inputs = RandomInputs(spec);
    for (const int64_t chunk : {0, 1, 5, 16, 48}) {
      Options options;
      options.rule = info.rule;
      options.chunk = chunk;
      options.executor = UsualExecutor();
      int64_t bytes = 0;
      ASSERT_TRUE(SavedBytes(options, inputs.view(), &bytes).ok());
      std::vector<std::byte> saved(static_cast<size_t>(bytes) + 1);
      Results with = Room(options, inputs.view()), without = Room(options, inputs.view());
      Outputs outputs = with.view();
      outputs.saved = {saved.data() + 1, bytes};
      ASSERT_TRUE(Attend(options, inputs.view(), outputs).ok());
      ASSERT_TRUE(Attend(options, inputs.view(), without.view()).ok());
      ExpectSameBits(with, without);
    }
  }
}

}  // namespace
}  // namespace tercet::test
