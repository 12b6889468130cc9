#include "src/proof/algebra.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "src/reference/chunkwise.hpp"
#include "src/reference/degree.hpp"
#include "src/reference/field.hpp"
#include "src/reference/parallel.hpp"
#include "src/reference/recurrent.hpp"

namespace tercet::proof {

namespace {

using reference::Answer;
using reference::Degree;
using reference::Field;
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

}  // namespace tercet::proof
