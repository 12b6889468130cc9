#include "src/proof/algebra.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "src/reference/chunkwise.hpp"
#include "src/reference/degree.hpp"
#include "src/reference/dual.hpp"
#include "src/reference/field.hpp"
#include "src/reference/gradient.hpp"
#include "src/reference/parallel.hpp"
#include "src/reference/recurrent.hpp"

namespace tercet::proof {

namespace {

using reference::Answer;
using reference::Degree;
using reference::Dual;
using reference::Field;
using reference::Gradient;
using reference::Head;

// Under these a draw of the costliest rule takes about 50 ms.
constexpr int64_t kMostTokens = 160, kMostDim = 16;

// Fills in the size: the layer's own, or a smaller one that still has several chunks and a shorter last one where the layer has them.
void ChooseSize(const contract::Layer& layer, int64_t chunk, Algebra* algebra) {
  int64_t longest = 0;
  for (int64_t n = 0; n < layer.sequences; ++n) {
    const contract::Sequence sequence = contract::SequenceAt(layer, n);
    longest = std::max(longest, sequence.end - sequence.begin);
  }
  algebra->tokens = longest;
  algebra->key_dim = std::min(layer.key_dim, kMostDim);
  algebra->value_dim = std::min(layer.value_dim, kMostDim);
  algebra->chunk = chunk;
  if (longest > kMostTokens) {
    algebra->tokens = kMostTokens;
    if (chunk < longest && chunk > kMostTokens / 3) algebra->chunk = kMostTokens / 3;
    if (chunk >= longest) algebra->chunk = kMostTokens;
    if (longest % chunk != 0 && algebra->tokens % algebra->chunk == 0) algebra->tokens -= algebra->chunk / 2;
  }
  algebra->whole = algebra->tokens == longest && algebra->key_dim == layer.key_dim && algebra->value_dim == layer.value_dim;
}

// A head whose numbers are drawn one by one; a decay that several tokens or channels share is one number.
template <class T, class Draw>
Head<T> DrawHead(const contract::Layer& layer, const Algebra& size, Draw draw) {
  const auto [decay, update] = layer.axes;
  const int64_t n = size.tokens, K = size.key_dim, V = size.value_dim;
  const auto drawn = [&](bool taken, int64_t count) {
    std::vector<T> numbers(taken ? count : 0);
    for (T& number : numbers) number = draw();
    return numbers;
  };
  Head<T> h;
  h.update = update;
  h.normalize = layer.normalize;
  h.n = n;
  h.K = K;
  h.V = V;
  h.scale = draw();
  h.q = drawn(true, n * K);
  h.k = drawn(true, n * K);
  h.v = drawn(true, n * V);
  const std::vector<T> D = drawn(decay != Decay::kNone, decay == Decay::kPerHead ? 1 : decay == Decay::kPerStep ? n : n * K);
  for (int64_t i = 0; i < n * K; ++i)
    h.D.push_back(decay == Decay::kNone ? T(1) : D[decay == Decay::kPerHead ? 0 : decay == Decay::kPerStep ? i / K : i]);
  h.beta = drawn(update == Update::kDelta, n);
  h.remove = drawn(update == Update::kRankOne, n * K);
  h.write = drawn(update == Update::kRankOne, n * K);
  h.bonus = drawn(update == Update::kAddReadBefore, K);
  h.S0 = drawn(true, K * V);
  h.z0 = drawn(layer.normalize, K);
  return h;
}

bool Same(const Answer<Field>& a, const Answer<Field>& b) { return a.out == b.out && a.state == b.state && a.z == b.z; }

// Of the polynomial that is zero where two forms agree. For quotients P1 / Q1 and P2 / Q2, each of degree deg P + deg Q here, that is
// (P1 Q2 - P2 Q1) Q1 Q2: the last two factors count a zero denominator, where the forms give a row of zeros, as agreement. Three times one's degree.
int64_t DegreeOf(const Answer<Degree>& a, bool normalize) {
  int64_t quotients = 0, polynomials = 0;
  for (const Degree& d : a.out) quotients = std::max(quotients, d.value());
  for (const Degree& d : a.state) polynomials = std::max(polynomials, d.value());
  for (const Degree& d : a.z) polynomials = std::max(polynomials, d.value());
  return std::max(normalize ? 3 * quotients : quotients, polynomials);
}

// What a head is given and the gradients to it, in one order.
template <class T>
std::array<std::vector<T>*, 10> Parts(Head<T>& h) {
  return {&h.q, &h.k, &h.v, &h.D, &h.beta, &h.remove, &h.write, &h.bonus, &h.S0, &h.z0};
}
template <class T>
std::array<std::vector<T>*, 10> Parts(Gradient<T>& d) {
  return {&d.q, &d.k, &d.v, &d.log_decay, &d.beta, &d.remove, &d.write, &d.bonus, &d.S0, &d.z0};
}

// A derivative, told twice: as a product with the gradients, and by dual numbers. Of log D, so D times the direction there.
template <class T>
struct Derivative {
  T by_gradient = T(0), by_dual = T(0);
  int64_t numbers = 0;  // of the gradients
};
template <class T, class Draw>
Derivative<T> DerivativeAlong(const contract::Layer& layer, const Algebra& size, Plant plant, Draw draw) {
  Head<T> h = DrawHead<T>(layer, size, draw), direction = DrawHead<T>(layer, size, draw);
  Answer<T> weights = Recurrent(h);
  for (std::vector<T>* part : {&weights.out, &weights.state, &weights.z})
    for (T& x : *part) x = draw();

  Derivative<T> derivative;
  Gradient<T> gradient = GradientOf(h, weights, plant);
  derivative.by_gradient = gradient.scale * direction.scale;
  Head<Dual<T>> dual;
  dual.update = h.update;
  dual.normalize = h.normalize;
  dual.n = h.n;
  dual.K = h.K;
  dual.V = h.V;
  dual.scale = Dual<T>(h.scale, direction.scale);
  for (size_t part = 0; part < Parts(h).size(); ++part) {
    const std::vector<T>&x = *Parts(h)[part], &along = *Parts(direction)[part], &to = *Parts(gradient)[part];
    for (size_t i = 0; i < x.size(); ++i) {
      Parts(dual)[part]->push_back(Dual<T>(x[i], part == 3 ? x[i] * along[i] : along[i]));
      derivative.by_gradient = derivative.by_gradient + to[i] * along[i];
    }
    derivative.numbers += static_cast<int64_t>(x.size());
  }
  derivative.numbers += h.normalize ? 0 : 1;
  const Answer<Dual<T>> answer = Recurrent(dual);
  const auto add = [&](const std::vector<Dual<T>>& x, const std::vector<T>& weight) {
    for (size_t i = 0; i < x.size(); ++i) derivative.by_dual = derivative.by_dual + weight[i] * x[i].derivative();
  };
  add(answer.out, weights.out);
  add(answer.state, weights.state);
  add(answer.z, weights.z);
  return derivative;
}

}  // namespace

Algebra ProveInAlgebra(const contract::Layer& layer, int64_t chunk, int draws, uint64_t seed, Plant plant) {
  Algebra algebra;
  ChooseSize(layer, chunk, &algebra);
  algebra.draws = draws;

  const Head<Degree> degrees = DrawHead<Degree>(layer, algebra, [] { return Degree::Variable(); });
  for (const Answer<Degree>& answer : {Recurrent(degrees), Parallel(degrees), Chunkwise(degrees, algebra.chunk, plant)})
    algebra.degree = std::max(algebra.degree, DegreeOf(answer, layer.normalize));
  algebra.log2_failure = draws * (std::log2(static_cast<double>(algebra.degree)) - std::log2(static_cast<double>(Field::kPrime)));

  std::mt19937_64 words(seed);
  algebra.recurrent_is_parallel = algebra.chunkwise_is_recurrent = algebra.chunkwise_is_parallel = true;
  for (int draw = 0; draw < draws; ++draw) {
    const Head<Field> h = DrawHead<Field>(layer, algebra, [&] { return Field::Random(words); });
    const Answer<Field> parallel = Parallel(h), recurrent = Recurrent(h), chunkwise = Chunkwise(h, algebra.chunk, plant);
    algebra.recurrent_is_parallel &= Same(recurrent, parallel);
    algebra.chunkwise_is_recurrent &= Same(chunkwise, recurrent);
    algebra.chunkwise_is_parallel &= Same(chunkwise, parallel);
    algebra.compared = static_cast<int64_t>(recurrent.out.size() + recurrent.state.size() + recurrent.z.size());
  }
  return algebra;
}

GradientAlgebra ProveGradientInAlgebra(const contract::Layer& layer, int draws, uint64_t seed, Plant plant) {
  Algebra size;
  ChooseSize(layer, std::max<int64_t>(contract::LongestSequence(layer), 1), &size);
  GradientAlgebra algebra;
  algebra.tokens = size.tokens;
  algebra.key_dim = size.key_dim;
  algebra.value_dim = size.value_dim;
  algebra.whole = size.whole;
  algebra.draws = draws;

  const auto variable = [] { return Degree::Variable(); };
  const Derivative<Degree> degrees = DerivativeAlong<Degree>(layer, size, plant, variable);
  algebra.degree = std::max(degrees.by_gradient.value(), degrees.by_dual.value());
  algebra.compared = degrees.numbers;
  if (layer.normalize) {
    // A sum of quotients by squares of the rows' denominators: multiplied by all of these it is a polynomial, and once more, for a denominator that
    // is zero, where both may agree.
    const Answer<Degree> answer = Recurrent(DrawHead<Degree>(layer, size, variable));
    int64_t denominator = 0;
    for (const Degree& d : answer.out) denominator = std::max(denominator, d.value());
    algebra.degree += 3 * size.tokens * denominator;
  }
  algebra.log2_failure = draws * (std::log2(static_cast<double>(algebra.degree)) - std::log2(static_cast<double>(Field::kPrime)));

  std::mt19937_64 words(seed);
  algebra.same = true;
  for (int draw = 0; draw < draws; ++draw) {
    const Derivative<Field> derivative = DerivativeAlong<Field>(layer, size, plant, [&] { return Field::Random(words); });
    algebra.same &= derivative.by_gradient == derivative.by_dual;
  }
  return algebra;
}

}  // namespace tercet::proof
