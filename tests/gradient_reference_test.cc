// The gradients of the reference: against dual numbers, which know no formula of theirs, exactly in the field and in double through a whole call;
// against central differences; against cases worked by hand; and where numbers are at their edges.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "src/reference/degree.hpp"
#include "src/reference/field.hpp"
#include "tests/calls.hpp"

namespace tercet::test {
namespace {

using proof::GradientsOf;
using proof::InputGradients;
using reference::Answer;
using reference::Degree;
using reference::Dual;
using reference::Field;
using reference::Gradient;
using reference::GradientOf;
using reference::Head;
using test::Dot;
using test::Parts;

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

// ---- Dual numbers -------------------------------------------------------------------------------------------------------------------------

constexpr bool Is(const Dual<double>& x, double value, double derivative) { return x.value() == value && x.derivative() == derivative; }

// x = 3 + 2t and y = 4 - t at t = 0.
constexpr Dual<double> kX(3.0, 2.0), kY(4.0, -1.0);
static_assert(Is(Dual<double>(), 0, 0) && Is(Dual<double>(5), 5, 0) && Is(kX + kY, 7, 1) && Is(kX - kY, -1, 3));
static_assert(Is(kX * kY, 12, 2 * 4 - 3) && Is(kX / kY, 0.75, (2 * 4 + 3) / 16.0));
static_assert(kX == Dual<double>(3) && kX <= kY && !(kY <= kX));

TEST(Dual, KnowsExpAndSqrt) {
  EXPECT_TRUE(Is(exp(kX), std::exp(3.0), 2 * std::exp(3.0)));
  EXPECT_TRUE(Is(sqrt(kY), 2, -0.25));
  EXPECT_TRUE(Is(exp(Dual<double>(-kInfinity, 7.0)), 0, 0));
}

// ---- Heads, exactly -----------------------------------------------------------------------------------------------------------------------

template <class T>
std::array<std::vector<T>*, 10> Parts(Gradient<T>& d) {
  return {&d.q, &d.k, &d.v, &d.log_decay, &d.beta, &d.remove, &d.write, &d.bonus, &d.S0, &d.z0};
}

struct Size {
  Update update;
  bool normalize;
  int64_t n, K, V, G;
};
template <class Body>
void ForEachSize(Body body) {
  for (const Update update : {Update::kAdd, Update::kAddReadBefore, Update::kDelta, Update::kRankOne})
    for (const bool normalize : {false, true})
      for (const auto& [n, K, V, G] : std::vector<std::array<int64_t, 4>>{{0, 2, 3, 1}, {1, 1, 1, 1}, {1, 3, 2, 2}, {2, 2, 2, 1}, {9, 3, 4, 2}}) {
        if (normalize && update != Update::kAdd && update != Update::kAddReadBefore) continue;
        SCOPED_TRACE("update " + std::to_string(static_cast<int>(update)) + " n " + std::to_string(n) + (normalize ? " normalised" : ""));
        body(Size{update, normalize, n, K, V, G});
      }
}

template <class T, class Draw>
Head<T> DrawHead(const Size& size, Draw draw) {
  const auto [update, normalize, n, K, V, G] = size;
  const auto drawn = [&](bool taken, int64_t count) {
    std::vector<T> numbers(taken ? count : 0);
    for (T& x : numbers) x = draw();
    return numbers;
  };
  Head<T> h;
  h.update = update;
  h.normalize = normalize;
  h.n = n;
  h.K = K;
  h.V = V;
  h.G = G;
  h.scale = normalize ? T(1) : draw();
  h.q = drawn(true, G * n * K);
  h.k = drawn(true, n * K);
  h.v = drawn(true, n * V);
  h.D = drawn(true, n * K);
  h.beta = drawn(update == Update::kDelta, n);
  h.remove = drawn(update == Update::kRankOne, n * K);
  h.write = drawn(update == Update::kRankOne, n * K);
  h.bonus = drawn(update == Update::kAddReadBefore, K);
  h.S0 = drawn(true, K * V);
  h.z0 = drawn(normalize, K);
  return h;
}
template <class T, class Draw>
Answer<T> DrawGradient(const Size& size, Draw draw) {
  Answer<T> d;
  d.out.resize(size.G * size.n * size.V);
  d.state.resize(size.K * size.V);
  d.z.resize(size.normalize ? size.K : 0);
  for (std::vector<T>* part : {&d.out, &d.state, &d.z})
    for (T& x : *part) x = draw();
  return d;
}

template <class T>
T Dot(Gradient<T> d, Head<T> direction) {
  T sum = d.scale * direction.scale;
  for (size_t part = 0; part < Parts(d).size(); ++part) {
    const std::vector<T>&x = *Parts(d)[part], &y = *Parts(direction)[part];
    EXPECT_EQ(x.size(), y.size()) << "part " << part;
    for (size_t i = 0; i < x.size(); ++i) sum = sum + x[i] * y[i];
  }
  return sum;
}

// In the field nothing is rounded: a formula that is wrong anywhere passes with a chance of about 2^-57.
TEST(HeadGradient, IsTheDerivativeInTheField) {
  std::mt19937_64 words(1);
  const auto draw = [&] { return Field::Random(words); };
  ForEachSize([&](const Size& size) {
    const Head<Field> h = DrawHead<Field>(size, draw), direction = DrawHead<Field>(size, draw);
    const Answer<Field> d = DrawGradient<Field>(size, draw);
    const Answer<Dual<Field>> answer = Recurrent(Zip(h, direction, true));
    Field derivative;
    const auto add = [&](const std::vector<Dual<Field>>& x, const std::vector<Field>& weights) {
      ASSERT_EQ(x.size(), weights.size());
      for (size_t i = 0; i < x.size(); ++i) derivative = derivative + weights[i] * x[i].derivative();
    };
    add(answer.out, d.out);
    add(answer.state, d.state);
    add(answer.z, d.z);
    EXPECT_TRUE(Dot(GradientOf(h, d), direction) == derivative);
  });
}

// The gradient runs on dual numbers too, where its derivative is a row of second derivatives: along a and then b as along b and then a.
TEST(HeadGradient, HasSymmetricDerivativesInTheField) {
  std::mt19937_64 words(2);
  const auto draw = [&] { return Field::Random(words); };
  ForEachSize([&](const Size& size) {
    const Head<Field> h = DrawHead<Field>(size, draw), a = DrawHead<Field>(size, draw), b = DrawHead<Field>(size, draw);
    const Answer<Field> d = DrawGradient<Field>(size, draw);
    Answer<Dual<Field>> weights;
    for (const Field x : d.out) weights.out.push_back(Dual<Field>(x, Field(0)));
    for (const Field x : d.state) weights.state.push_back(Dual<Field>(x, Field(0)));
    for (const Field x : d.z) weights.z.push_back(Dual<Field>(x, Field(0)));
    const auto along = [&](const Head<Field>& first, Head<Field> then) {
      Gradient<Dual<Field>> gradient = GradientOf(Zip(h, first, true), weights);
      Field sum = gradient.scale.derivative() * then.scale;
      for (size_t part = 0; part < Parts(then).size(); ++part)
        for (size_t i = 0; i < Parts(then)[part]->size(); ++i) sum = sum + (*Parts(gradient)[part])[i].derivative() * (*Parts(then)[part])[i];
      return sum;
    };
    EXPECT_TRUE(along(a, b) == along(b, a));
    EXPECT_TRUE(size.n < 2 || !(along(a, b) == Field(0)));
  });
}

// Without the normaliser a gradient is a polynomial too. To v of the first of n tokens that forget: weight, scale, q, n - 1 decays and k.
TEST(HeadGradient, IsAPolynomial) {
  const auto variable = [] { return Degree::Variable(); };
  const Size size{Update::kAdd, false, 5, 2, 2, 1};
  const Gradient<Degree> d = GradientOf(DrawHead<Degree>(size, variable), DrawGradient<Degree>(size, variable));
  EXPECT_EQ(d.v[0].value(), 1 + 1 + 1 + 4 + 1);
}

// ---- Whole calls --------------------------------------------------------------------------------------------------------------------------

template <class T = double>
InputGradients<T> Differentiate(const Call& call) {
  InputGradients<T> gradients;
  const Status status = GradientsOf(call.options, call.inputs.view(), call.given(), &gradients);
  EXPECT_TRUE(status.ok()) << status.message;
  return gradients;
}

class EveryRule : public testing::TestWithParam<Rule> {};
INSTANTIATE_TEST_SUITE_P(CallGradient, EveryRule, testing::ValuesIn([] {
                           std::vector<Rule> rules;
                           for (const RuleInfo& one : Rules()) rules.push_back(one.rule);
                           return rules;
                         }()),
                         [](const auto& instance) { return std::string(Name(instance.param)); });

TEST_P(EveryRule, IsTheDerivativeOfDualNumbers) {
  ForEachCall(GetParam(), [](Call& call) {
    InputGradients<double> gradients = Differentiate(call);
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
  });
}

TEST_P(EveryRule, IsNearCentralDifferences) {
  ForEachCall(GetParam(), [](Call& call) {
    constexpr double kStep = 1e-5;
    // Features of either sign may have a denominator near zero, where a difference over any step says little.
    if (call.options.normalize && (call.options.feature_map == FeatureMap::kIdentity || call.options.feature_map == FeatureMap::kL2Norm))
      for (Owned* features : {&call.inputs.q, &call.inputs.k})
        for (int64_t i = 0; i < features->size(); ++i) features->Set(i, 0.1 + std::abs(features->Get(i)));
    InputGradients<double> gradients = Differentiate(call);
    for (size_t part = 0; part < Parts(call.inputs).size(); ++part) {
      if (Parts(call.inputs)[part].second->size() == 0) continue;
      OwnedInputs direction = Nowhere(call.inputs);
      Fill(Parts(direction)[part].second, 10 + part);
      const auto moved = [&](double step) {
        OwnedInputs inputs = call.inputs;
        Owned* x = Parts(inputs)[part].second;
        for (int64_t i = 0; i < x->size(); ++i) x->Set(i, x->Get(i) + step * Parts(direction)[part].second->Get(i));
        return Weighted(call, Oracle<double>(call.options, inputs.view()));
      };
      const Sums sums = Dot(&gradients, &direction, part);
      EXPECT_NEAR(sums.sum, (moved(kStep) - moved(-kStep)) / (2 * kStep), 1e-6 * sums.magnitudes) << Parts(direction)[part].first;
    }
    if (call.options.normalize) return;
    const auto scaled = [&](double scale) {
      Options options = call.options;
      options.scale = scale;
      return Weighted(call, Oracle<double>(options, call.inputs.view()));
    };
    EXPECT_NEAR(gradients.scale, (scaled(0.7 + kStep) - scaled(0.7 - kStep)) / (2 * kStep), 1e-6 * std::abs(gradients.scale));
  });
}

// What is not valid has no gradient, and what reaches it is not looked at; a sequence of no tokens hands its final gradient on.
TEST_P(EveryRule, LeavesOutTokensThatAreNotValid) {
  ForEachCall(GetParam(), [](Call& call) {
    if (call.spec.offsets.empty()) return;
    const InputGradients<double> gradients = Differentiate(call);
    Call spoilt = call;
    int64_t masked = 0;
    for (int64_t t = 0; t < 13; ++t) {
      if (call.inputs.valid.Get(t) != 0) continue;
      ++masked;
      const auto rows = [&](const auto& body) {
        for (const auto& [tensor, gradient] : {std::pair{&spoilt.inputs.q, &gradients.q},
                                               {&spoilt.inputs.k, &gradients.k},
                                               {&spoilt.inputs.v, &gradients.v},
                                               {&spoilt.inputs.beta, &gradients.beta},
                                               {&spoilt.inputs.remove, &gradients.remove},
                                               {&spoilt.inputs.write, &gradients.write},
                                               {&spoilt.inputs.log_decay, &gradients.log_decay}}) {
          if (tensor->shape.size() < 3) continue;
          const int64_t row = tensor->size() / 13;
          for (int64_t i = t * row; i < (t + 1) * row; ++i) body(tensor, gradient, i);
        }
      };
      rows([](Owned* tensor, const std::vector<double>* gradient, int64_t i) {
        tensor->Set(i, kNan);
        EXPECT_EQ((*gradient)[i], 0);
      });
      for (int64_t i = 0; i < spoilt.d_out.size() / 13; ++i) spoilt.d_out.Set(t * (spoilt.d_out.size() / 13) + i, kNan);
    }
    EXPECT_GT(masked, 0);
    InputGradients<double> same = Differentiate(spoilt), first = gradients;
    for (size_t part = 0; part < Parts(same).size(); ++part) EXPECT_EQ(*Parts(same)[part], *Parts(first)[part]) << part;
    const int64_t state = 4 * 3 * 4;
    for (int64_t i = state; i < 2 * state; ++i) EXPECT_EQ(gradients.initial_state[i], call.d_state.Get(i));
  });
}

// Each sequence of a pack has the gradients that it has alone, and what is asked of one is nothing to the other.
TEST_P(EveryRule, DoesNotLeakFromSequenceToSequence) {
  Call call;
  call.options.rule = GetParam();
  call.options.normalize = Info(GetParam()).can_normalize;
  call.options.feature_map = FeatureMap::kEluPlusOne;
  call.spec.dtype = Dtype::kF64;
  call.spec.tokens = 9;
  call.spec.key_dim = 3;
  call.spec.value_dim = 2;
  call.spec.offsets = {0, 4, 9};
  Draw(&call);
  const InputGradients<double> both = Differentiate(call);
  for (const int64_t number : {0, 1}) {
    SCOPED_TRACE(number);
    const int64_t begin = number == 0 ? 0 : 4, end = number == 0 ? 4 : 9;
    Call one = call;
    const auto clear = [&](Owned* tensor, int64_t from, int64_t to) {
      const int64_t row = tensor->size() / (tensor == &one.d_out ? 9 : 2);
      for (int64_t i = from * row; i < to * row; ++i) tensor->Set(i, 0);
    };
    if (number == 1) clear(&one.d_out, 0, 4);
    if (number == 0) clear(&one.d_out, 4, 9);
    clear(&one.d_state, 1 - number, 2 - number);
    if (call.options.normalize) clear(&one.d_key_sum, 1 - number, 2 - number);
    InputGradients<double> gradients = Differentiate(one), expected = both;
    for (size_t part = 0; part < Parts(gradients).size(); ++part) {
      const std::vector<double>&x = *Parts(gradients)[part], &y = *Parts(expected)[part];
      const Owned& input = *Parts(call.inputs)[part].second;
      if (x.empty() || (input.shape[0] == 2 && input.shape.size() < 3)) continue;  // [H] and [H, K] are shared by both
      const bool of_state = input.shape[0] == 2;
      const auto row = static_cast<int64_t>(x.size()) / (of_state ? 2 : 9);
      for (int64_t i = 0; i < static_cast<int64_t>(x.size()); ++i) {
        const bool inside = of_state ? i / row == number : i / row >= begin && i / row < end;
        EXPECT_EQ(x[i], inside ? y[i] : 0) << Parts(call.inputs)[part].first << " " << i;
        EXPECT_EQ(x[i] != 0, inside) << Parts(call.inputs)[part].first << " " << i;
      }
    }
    // Whatever lies in the other sequence.
    for (const auto& [name, part] : Parts(one.inputs))
      if (part->shape.size() >= 3) {
        const int64_t sequences = part->shape[0] == 2 ? 2 : 9, row = part->size() / sequences;
        const int64_t from = sequences == 2 ? 1 - number : number == 0 ? 4 : 0, to = sequences == 2 ? 2 - number : number == 0 ? 9 : 4;
        for (int64_t i = from * row; i < to * row; ++i) part->Set(i, part->Get(i) / 2 - 0.125);
      }
    InputGradients<double> other = Differentiate(one);
    for (size_t part = 0; part < Parts(gradients).size(); ++part) EXPECT_EQ(*Parts(other)[part], *Parts(gradients)[part]);
  }
}

// Inputs of any dtype in any memory are what they show, and so are the gradients of the outputs; one that is not given is zeros.
TEST_P(EveryRule, ReadsWhatViewsShow) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
    Call call;
    call.options.rule = GetParam();
    call.options.normalize = Info(GetParam()).can_normalize;
    call.options.feature_map = FeatureMap::kEluPlusOne;
    call.spec.dtype = dtype;
    if (dtype == Dtype::kBF16) call.spec.gate_dtype = Dtype::kF32;
    call.spec.batch = 2;
    call.spec.tokens = 5;
    call.spec.key_dim = 3;
    call.spec.value_dim = 2;
    Draw(&call);
    // The elements backwards, every second one, and their view.
    std::vector<Owned> memory;
    memory.reserve(20);
    const auto scattered = [&](const Owned& tensor) {
      ConstTensor view = tensor.view();
      if (!view.given()) return view;
      memory.push_back(Owned::Zeros(tensor.dtype, {2 * tensor.size()}));
      for (int64_t i = 0; i < tensor.size(); ++i) memory.back().Set(2 * (tensor.size() - 1 - i), tensor.Get(i));
      view.data = memory.back().bytes.data() + 2 * (tensor.size() - 1) * contract::SizeOf(tensor.dtype);
      for (int axis = 0; axis < view.rank; ++axis) view.strides[axis] *= -2;
      return view;
    };
    const auto wide = [](const Owned& tensor) {
      Owned copy = tensor.shape.empty() ? Owned() : Owned::Zeros(Dtype::kF64, tensor.shape);
      for (int64_t i = 0; i < copy.size(); ++i) copy.Set(i, tensor.Get(i));
      return copy;
    };
    Call in_double = call;
    Inputs inputs = call.inputs.view();
    ConstTensor* views[] = {&inputs.q,      &inputs.k,     &inputs.v,     &inputs.log_decay,     &inputs.beta,
                            &inputs.remove, &inputs.write, &inputs.bonus, &inputs.initial_state, &inputs.initial_key_sum};
    for (size_t part = 0; part < Parts(call.inputs).size(); ++part) {
      *views[part] = scattered(*Parts(call.inputs)[part].second);
      *Parts(in_double.inputs)[part].second = wide(*Parts(call.inputs)[part].second);
    }
    in_double.d_out = wide(call.d_out);
    in_double.d_state = wide(call.d_state);
    in_double.d_key_sum = wide(call.d_key_sum);
    OutputGradients given = {scattered(call.d_out), scattered(call.d_state), scattered(call.d_key_sum)};
    for (int not_given = 0; not_given < 4; ++not_given) {
      SCOPED_TRACE(std::string(Name(dtype)) + " without " + std::to_string(not_given));
      OutputGradients some = given;
      Call zeroed = in_double;
      ConstTensor* outputs[] = {&some.out, &some.final_state, &some.final_key_sum};
      Owned* zeros[] = {&zeroed.d_out, &zeroed.d_state, &zeroed.d_key_sum};
      if (not_given < 3) {
        *outputs[not_given] = {};
        for (int64_t i = 0; i < zeros[not_given]->size(); ++i) zeros[not_given]->Set(i, 0);
      }
      InputGradients<double> gradients, expected = Differentiate(zeroed);
      const Status status = GradientsOf(call.options, inputs, some, &gradients);
      ASSERT_TRUE(status.ok()) << status.message;
      for (size_t part = 0; part < Parts(gradients).size(); ++part) EXPECT_EQ(*Parts(gradients)[part], *Parts(expected)[part]) << part;
      EXPECT_EQ(gradients.scale, expected.scale);
    }
  }
}

// Beside f64 the reference may be wider, and the two are near.
TEST_P(EveryRule, IsNearTheWiderReference) {
  ForEachCall(GetParam(), [](Call& call) {
    InputGradients<double> gradients = Differentiate(call);
    InputGradients<long double> wider = Differentiate<long double>(call);
    for (size_t part = 0; part < Parts(gradients).size(); ++part) {
      const std::vector<double>& x = *Parts(gradients)[part];
      const std::vector<long double>& y = *Parts(wider)[part];
      ASSERT_EQ(x.size(), y.size());
      double largest = 0;
      for (const double value : x) largest = std::max(largest, std::abs(value));
      for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], static_cast<double>(y[i]), 1e-12 * largest) << part;
    }
  });
}

TEST(CallGradient, IsThereForAnInitialStateThatWasNotGiven) {
  Call call;
  call.options.normalize = true;
  call.options.feature_map = FeatureMap::kEluPlusOne;
  call.spec.dtype = Dtype::kF64;
  call.spec.tokens = 4;
  call.spec.key_dim = 3;
  call.spec.value_dim = 2;
  Draw(&call);
  for (Owned* zeros : {&call.inputs.initial_state, &call.inputs.initial_key_sum})
    for (int64_t i = 0; i < zeros->size(); ++i) zeros->Set(i, 0);
  const InputGradients<double> given = Differentiate(call);
  call.inputs.initial_state = call.inputs.initial_key_sum = {};
  const InputGradients<double> not_given = Differentiate(call);
  EXPECT_EQ(not_given.initial_state, given.initial_state);
  EXPECT_EQ(not_given.initial_key_sum, given.initial_key_sum);
  EXPECT_EQ(not_given.initial_state.size(), 2u * 3 * 2);
  EXPECT_EQ(not_given.q, given.q);
}

TEST(CallGradient, RefusesWhatAttendWould) {
  Call call;
  call.options.rule = Rule::kDelta;
  Draw(&call);
  call.inputs.beta = {};
  InputGradients<double> gradients;
  EXPECT_EQ(GradientsOf(call.options, call.inputs.view(), call.given(), &gradients).code, StatusCode::kMissingInput);
  EXPECT_TRUE(gradients.q.empty());
}

// ---- By hand ------------------------------------------------------------------------------------------------------------------------------

// K = V = 1, q = k = v = 1, decay a at each of T tokens, L = the sum of out. Then S_t = a S_{t-1} + 1, so before token t (from 0) the state is
// S = h0 a^t + (1 - a^t) / (1 - a), L grows with S_t by dS = 1 + a + ... + a^(T-1-t) = (1 - a^(T-t)) / (1 - a), and S_t with log a by a S: together
// (1 - a^(T-t)) / (1 - a) (a (1 - a^t) / (1 - a) + h0 a^(t+1)).
TEST(GradientByHand, OfAScalarGate) {
  constexpr int64_t kTokens = 12;
  constexpr double a = 0.8, h0 = 1.5;
  for (const Rule rule : {Rule::kSimpleGla, Rule::kGla, Rule::kRetention}) {
    SCOPED_TRACE(Name(rule));
    Call call;
    call.options.rule = rule;
    call.options.scale = 1;
    call.spec.dtype = Dtype::kF64;
    call.spec.tokens = kTokens;
    call.spec.heads = call.spec.key_dim = call.spec.value_dim = 1;
    Draw(&call);
    const auto set = [](Owned* tensor, double x) {
      for (int64_t i = 0; i < tensor->size(); ++i) tensor->Set(i, x);
    };
    for (Owned* ones : {&call.inputs.q, &call.inputs.k, &call.inputs.v, &call.d_out}) set(ones, 1);
    set(&call.inputs.log_decay, std::log(a));
    set(&call.inputs.initial_state, h0);
    set(&call.d_state, 0);
    const InputGradients<double> gradients = Differentiate(call);
    double all = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      const double dS = (1 - std::pow(a, kTokens - t)) / (1 - a), before = h0 * std::pow(a, t) + (1 - std::pow(a, t)) / (1 - a);
      const double expected = dS * (a * (1 - std::pow(a, t)) / (1 - a) + h0 * std::pow(a, t + 1));
      all += expected;
      if (rule != Rule::kRetention) {
        EXPECT_NEAR(gradients.log_decay[t], expected, 1e-13 * expected) << t;
      }
      EXPECT_NEAR(gradients.k[t], dS, 1e-13 * dS);
      EXPECT_NEAR(gradients.v[t], dS, 1e-13 * dS);
      EXPECT_NEAR(gradients.q[t], a * before + 1, 1e-13 * before);
    }
    if (rule == Rule::kRetention) {
      EXPECT_NEAR(gradients.log_decay[0], all, 1e-13 * all);
    }
    EXPECT_NEAR(gradients.initial_state[0], a * (1 - std::pow(a, kTokens)) / (1 - a), 1e-13);
  }
}

// Two tokens, K = 2, V = 1, linear and normalised, dO = (1, 1) and nothing asked of S2 and z2; columns are written as rows.
//
//   k1 = (1, 0)  k2 = (1, 1)  v1 = 2  v2 = 4  q1 = (1, 1)  q2 = (1, 2)  S0 = (0, 1)  z0 = (2, 1)
//   S1 = (2, 1)  z1 = (3, 1)  m1 = S1'q1 = 3   d1 = z1'q1 = 4  o1 = 3/4
//   S2 = (6, 5)  z2 = (4, 2)  m2 = S2'q2 = 16  d2 = z2'q2 = 8  o2 = 2
//
//   token 2   dm = 1/8  dd = -o2/8 = -1/4            dq2 = S2/8 - z2/4 = (-1/4, 1/8)
//             dS = q2/8 = (1/8, 1/4)                 dz = -q2/4 = (-1/4, -1/2)
//             dk2 = dS v2 + dz = (1/4, 1/2)          dv2 = dS'k2 = 3/8            dlog2 = dS'S1 + dz'z1 = 1/2 - 5/4 = -3/4
//   token 1   dm = 1/4  dd = -o1/4 = -3/16           dq1 = S1/4 - 3 z1/16 = (-1/16, 1/16)
//             dS += q1/4 = (3/8, 1/2)                dz += -3 q1/16 = (-7/16, -11/16)
//             dk1 = dS v1 + dz = (5/16, 5/16)        dv1 = dS'k1 = 3/8            dlog1 = dS'S0 + dz'z0 = 1/2 - 25/16 = -17/16
//   dS0 and dz0 are dS and dz, for nothing is forgotten.
TEST(GradientByHand, OfTwoNormalisedTokens) {
  Head<double> h;
  h.normalize = true;
  h.n = h.K = 2;
  h.q = {1, 1, 1, 2};
  h.k = {1, 0, 1, 1};
  h.v = {2, 4};
  h.D = {1, 1, 1, 1};
  h.S0 = {0, 1};
  h.z0 = {2, 1};
  const Gradient<double> d = GradientOf(h, {{1, 1}, {0, 0}, {0, 0}});
  using Numbers = std::vector<double>;
  EXPECT_EQ(d.q, (Numbers{-1. / 16, 1. / 16, -1. / 4, 1. / 8}));
  EXPECT_EQ(d.k, (Numbers{5. / 16, 5. / 16, 1. / 4, 1. / 2}));
  EXPECT_EQ(d.v, (Numbers{3. / 8, 3. / 8}));
  EXPECT_EQ(d.log_decay[0] + d.log_decay[1], -17. / 16);
  EXPECT_EQ(d.log_decay[2] + d.log_decay[3], -3. / 4);
  EXPECT_EQ(d.S0, (Numbers{3. / 8, 1. / 2}));
  EXPECT_EQ(d.z0, (Numbers{-7. / 16, -11. / 16}));
  EXPECT_EQ(d.scale, 0);
}

TEST(GradientByHand, OfTheFeatureMaps) {
  using Numbers = std::vector<double>;
  const auto gradient = [](FeatureMap map, double eps, const Numbers& x, Numbers d) {
    proof::MapGradient(map, eps, static_cast<int64_t>(x.size()), x.data(), d.data());
    return d;
  };
  EXPECT_EQ(gradient(FeatureMap::kIdentity, 0, {-1, 0, 2}, {5, 6, 7}), (Numbers{5, 6, 7}));
  EXPECT_EQ(gradient(FeatureMap::kEluPlusOne, 0, {-1, 0, 2}, {5, 6, 7}), (Numbers{5 * std::exp(-1.0), 6, 7}));
  EXPECT_EQ(gradient(FeatureMap::kRelu, 0, {-1, 0, 2}, {5, 6, 7}), (Numbers{0, 0, 7}));
  Numbers elu = {-1, 0, 2}, relu = {-1, 0, 2}, unit_vector = {3, 4};
  proof::MapFeatures(FeatureMap::kEluPlusOne, 0, 3, elu.data());
  proof::MapFeatures(FeatureMap::kRelu, 0, 3, relu.data());
  proof::MapFeatures(FeatureMap::kL2Norm, 0, 2, unit_vector.data());
  EXPECT_EQ(elu, (Numbers{std::exp(-1.0), 1, 3}));
  EXPECT_EQ(relu, (Numbers{0, 0, 2}));
  EXPECT_EQ(unit_vector, (Numbers{3. / 5, 4. / 5}));
  // x = (1.5, 2) with a norm of 2.5, y = (.6, .8), d = (1, 0), y'd = .6: (.64, -.48) / 2.5
  const Numbers unit = gradient(FeatureMap::kL2Norm, 0, {1.5, 2}, {1, 0});
  EXPECT_NEAR(unit[0], 0.256, 1e-15);
  EXPECT_NEAR(unit[1], -0.192, 1e-15);
  // x = (1, 1) and eps 2, so that the root is 2 and y = (.5, .5), d = (1, 0), y'd = .5: (.75, -.25) / 2
  EXPECT_EQ(gradient(FeatureMap::kL2Norm, 2, {1, 1}, {1, 0}), (Numbers{0.375, -0.125}));
  EXPECT_EQ(gradient(FeatureMap::kL2Norm, 0.25, {0, 0}, {1, -3}), (Numbers{2, -6}));
  EXPECT_EQ(gradient(FeatureMap::kL2Norm, 0, {0, 0}, {1, -3}), (Numbers{0, 0}));
  // And those of dual numbers at once, the kinks among them.
  for (const FeatureMap map : {FeatureMap::kIdentity, FeatureMap::kEluPlusOne, FeatureMap::kRelu, FeatureMap::kL2Norm}) {
    const Numbers x = {-2, 0, 0.5, 3}, direction = {1, 2, -3, 0.5}, d = {0.25, -1, 2, 1.5};
    std::vector<Dual<double>> y;
    for (size_t i = 0; i < x.size(); ++i) y.push_back(Dual<double>(x[i], direction[i]));
    proof::MapFeatures(map, 0.1, 4, y.data());
    const Numbers back = gradient(map, 0.1, x, d);
    double forwards = 0, backwards = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      forwards += d[i] * y[i].derivative();
      backwards += back[i] * direction[i];
    }
    EXPECT_NEAR(forwards, backwards, 1e-15 * 10) << Name(map);
  }
}

// ---- At the edges -------------------------------------------------------------------------------------------------------------------------

// Everything finite and what dual numbers say.
void ExpectFiniteAndRight(Call* call) {
  InputGradients<double> gradients = Differentiate(*call);
  OwnedInputs direction = Nowhere(call->inputs);
  Sums all;
  for (size_t part = 0; part < Parts(direction).size(); ++part) {
    for (const double x : *Parts(gradients)[part]) ASSERT_TRUE(std::isfinite(x)) << call->Text() << " " << Parts(direction)[part].first;
    if (Parts(direction)[part].second->size() == 0) continue;
    Fill(Parts(direction)[part].second, part);
    const Sums sums = Dot(&gradients, &direction, part);
    all.sum += sums.sum;
    all.magnitudes += sums.magnitudes;
  }
  EXPECT_TRUE(std::isfinite(gradients.scale));
  EXPECT_NEAR(all.sum, Derivative(*call, direction, 0), 1e-12 * all.magnitudes) << call->Text();
}

TEST_P(EveryRule, IsFiniteUnderStrongDecay) {
  ForEachCall(GetParam(), [](Call& call) {
    Owned& log_decay = call.inputs.log_decay;
    if (log_decay.size() == 0) return;
    for (const bool forgets_all : {false, true}) {
      for (int64_t i = 0; i < log_decay.size(); ++i) log_decay.Set(i, forgets_all && i % 3 == 0 ? -kInfinity : -30);
      ExpectFiniteAndRight(&call);
      const InputGradients<double> gradients = Differentiate(call);
      for (int64_t i = 0; forgets_all && i < log_decay.size(); i += 3) EXPECT_EQ(gradients.log_decay[i], 0);
    }
  });
}

TEST_P(EveryRule, IsFiniteAtZeroVectors) {
  ForEachCall(GetParam(), [](Call& call) {
    for (const bool all : {false, true}) {
      for (Owned* tensor : {&call.inputs.q, &call.inputs.k})
        for (int64_t i = 0; i < tensor->size(); ++i)
          if (all || i / 3 % 2 == 0) tensor->Set(i, 0);
      for (const double eps : {1e-6, 1e-12}) {
        call.options.eps = eps;
        ExpectFiniteAndRight(&call);
      }
    }
  });
}

// Where no key has been met, or the query is zero, the denominator is: the row is zero, whatever is asked of it, and the others don't know.
TEST_P(EveryRule, IsFiniteAtZeroDenominators) {
  if (!Info(GetParam()).can_normalize) return;
  for (const FeatureMap map : {FeatureMap::kIdentity, FeatureMap::kRelu, FeatureMap::kL2Norm}) {
    Call call;
    call.options.rule = GetParam();
    call.options.normalize = true;
    call.options.feature_map = map;
    call.spec.dtype = Dtype::kF64;
    call.spec.tokens = 7;
    call.spec.heads = 1;
    call.spec.key_dim = 3;
    call.spec.value_dim = 2;
    Draw(&call);
    const auto zero = [](Owned* tensor, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) tensor->Set(i, 0);
    };
    for (int64_t i = 0; i < 7 * 3; ++i) call.inputs.q.Set(i, 0.1 + std::abs(call.inputs.q.Get(i)));
    for (int64_t i = 0; i < 7 * 3; ++i) call.inputs.k.Set(i, 0.1 + std::abs(call.inputs.k.Get(i)));
    zero(&call.inputs.initial_key_sum, 0, 3);
    zero(&call.inputs.k, 0, 2 * 3);
    zero(&call.inputs.q, 5 * 3, 6 * 3);
    ExpectFiniteAndRight(&call);
    InputGradients<double> gradients = Differentiate(call);
    for (const int64_t t : {0, 1, 5}) {
      for (int64_t c = 0; c < 3; ++c) EXPECT_EQ(gradients.q[t * 3 + c], 0);
      for (int64_t e = 0; e < 2; ++e) call.d_out.Set(t * 2 + e, kNan);
    }
    for (const int64_t t : {2, 3, 4, 6}) EXPECT_NE(gradients.q[t * 3], 0);
    InputGradients<double> unasked = Differentiate(call);
    for (size_t part = 0; part < Parts(gradients).size(); ++part) EXPECT_EQ(*Parts(unasked)[part], *Parts(gradients)[part]) << part;
  }
}

}  // namespace
}  // namespace tercet::test
