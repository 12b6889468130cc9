// The reference forms: against cases worked by hand, the golden six tokens, and each other in exact algebra.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "src/io/arrays.hpp"
#include "src/reference/chunkwise.hpp"
#include "src/reference/degree.hpp"
#include "src/reference/field.hpp"
#include "src/reference/parallel.hpp"
#include "src/reference/recurrent.hpp"
#include "src/rules/all.hpp"

namespace tercet::reference {
namespace {

struct NamedRule {
  std::string name;
  Decay decay;
  Update update;
};

std::vector<NamedRule> AllRules() {
  std::vector<NamedRule> list;
  rules::All::ForEach([&](auto rule) { list.push_back({std::string(rule.kName), rule.kDecay, rule.kUpdate}); });
  return list;
}

bool CanNormalize(const NamedRule& rule) { return rule.update == Update::kAdd || rule.update == Update::kAddReadBefore; }

// A head whose numbers come from draw(), its decay on the axes of the rule.
template <class T, class Draw>
Head<T> DrawHead(const NamedRule& rule, int64_t n, int64_t K, int64_t V, int64_t G, bool normalize, Draw draw) {
  const auto tensor = [&](bool taken, int64_t size) {
    std::vector<T> numbers(taken ? size : 0);
    for (T& x : numbers) x = draw();
    return numbers;
  };
  Head<T> h;
  h.update = rule.update;
  h.normalize = normalize;
  h.n = n;
  h.K = K;
  h.V = V;
  h.G = G;
  h.scale = draw();
  h.q = tensor(true, G * n * K);
  h.k = tensor(true, n * K);
  h.v = tensor(true, n * V);
  h.D = tensor(true, n * K);
  const T constant = draw();
  for (int64_t t = 0; t < n; ++t)
    for (int64_t c = 0; c < K; ++c) {
      T& D = h.D[t * K + c];
      if (rule.decay == Decay::kNone) D = T(1);
      if (rule.decay == Decay::kPerHead) D = constant;
      if (rule.decay == Decay::kPerStep) D = h.D[t * K];
    }
  h.beta = tensor(rule.update == Update::kDelta, n);
  h.remove = tensor(rule.update == Update::kRankOne, n * K);
  h.write = tensor(rule.update == Update::kRankOne, n * K);
  h.bonus = tensor(rule.update == Update::kAddReadBefore, K);
  h.S0 = tensor(true, K * V);
  h.z0 = tensor(normalize, K);
  return h;
}

Head<Field> FieldHead(const NamedRule& rule, int64_t n, int64_t K, int64_t V, int64_t G, bool normalize, uint64_t seed) {
  std::mt19937_64 words(seed);
  return DrawHead<Field>(rule, n, K, V, G, normalize, [&] { return Field::Random(words); });
}

template <class T>
bool Same(const Answer<T>& a, const Answer<T>& b) {
  return a.out == b.out && a.state == b.state && a.z == b.z;
}

// ---- The scalars --------------------------------------------------------------------------------------------------------------------------

constexpr int64_t kP = static_cast<int64_t>(Field::kPrime);
static_assert(Field(0) == Field(kP) && Field(-1) == Field(kP - 1) && Field(5).value() == 5);
static_assert(Field(kP - 1) + Field(2) == Field(1) && Field(3) - Field(5) == Field(-2) && Field(0) - Field(0) == Field(0));
static_assert(Field(-1) * Field(-1) == Field(1) && Field(int64_t{1} << 60) * Field(2) == Field(1));
static_assert(Field(-3) * Field(int64_t{1} << 40) == Field(-3 * (int64_t{1} << 40)));
static_assert(Field(6) / Field(3) == Field(2) && (Field(1) / Field(7)) * Field(7) == Field(1) && Field(1) / Field(-1) == Field(-1));
static_assert(Degree::Variable().value() == 1 && Degree(3).value() == 0 && Degree(0) * Degree::Variable() == Degree(0));
static_assert((Degree::Variable() * Degree::Variable() + Degree(1)).value() == 2 && (Degree::Variable() / Degree::Variable()).value() == 2);

TEST(Field, KeepsTheLawsOfAField) {
  std::mt19937_64 words(1);
  for (int i = 0; i < 1000; ++i) {
    const Field a = Field::Random(words), b = Field::Random(words), c = Field::Random(words);
    EXPECT_TRUE((a + b) * c == a * c + b * c);
    EXPECT_TRUE(a * (b * c) == (a * b) * c);
    EXPECT_TRUE((a - b) + b == a);
    EXPECT_TRUE(b == Field(0) || a / b * b == a);
  }
}

// ---- Two tokens by hand -------------------------------------------------------------------------------------------------------------------

struct Worked {
  std::string rule;
  std::vector<double> D;    // [2, 2]
  std::vector<double> out;  // [2, 2] with scale 1
  std::vector<double> state;
};

// K = V = 2, n = 2:  k1 = (1, 0)  k2 = (1, 1)   v1 = (2, 4)  v2 = (4, 2)   q1 = (1, 1)  q2 = (1, 2)   S0 = [2 0; 0 2], rows separated by ;
// beta = 1/2   bonus = (2, 3)   r1 = (-1, 1)  w1 = (1/2, 1)  r2 = (0, -1)  w2 = (1, 1/2)
Head<double> WorkedHead() {
  Head<double> h;
  h.n = h.K = h.V = 2;
  h.q = {1, 1, 1, 2};
  h.k = {1, 0, 1, 1};
  h.v = {2, 4, 4, 2};
  h.D = {1, 1, 1, 1};
  h.beta = {0.5, 0.5};
  h.remove = {-1, 1, 0, -1};
  h.write = {0.5, 1, 1, 0.5};
  h.bonus = {2, 3};
  h.S0 = {2, 0, 0, 2};
  return h;
}

const std::vector<Worked> kWorked = {
    // S1 = S0 + [2 4; 0 0] = [4 4; 0 2]                           o1 = (4 + 0, 4 + 2)
    // S2 = S1 + [4 2; 4 2] = [8 6; 4 4]                           o2 = (8 + 2*4, 6 + 2*4)
    {"linear", {1, 1, 1, 1}, {4, 6, 16, 14}, {8, 6, 4, 4}},
    // S1 = [1 0; 0 1] + [2 4; 0 0] = [3 4; 0 1]                   o1 = (3, 5)
    // S2 = [1.5 2; 0 .5] + [4 2; 4 2] = [5.5 4; 4 2.5]            o2 = (5.5 + 8, 4 + 5)
    {"retention", {.5, .5, .5, .5}, {3, 5, 13.5, 9}, {5.5, 4, 4, 2.5}},
    // S1 = [3 4; 0 1] as before                                   o1 = (3, 5)
    // S2 = [.75 1; 0 .25] + [4 2; 4 2] = [4.75 3; 4 2.25]         o2 = (4.75 + 8, 3 + 4.5)
    {"simple_gla", {.5, .5, .25, .25}, {3, 5, 12.75, 7.5}, {4.75, 3, 4, 2.25}},
    // S1 = [1 0; 0 2] + [2 4; 0 0] = [3 4; 0 2]                   o1 = (3, 6)
    // S2 = [.75 1; 0 1] + [4 2; 4 2] = [4.75 3; 4 3]              o2 = (4.75 + 8, 3 + 6)
    {"gla", {.5, 1, .25, .5}, {3, 6, 12.75, 9}, {4.75, 3, 4, 3}},
    // S0 + diag(2, 3) [2 4; 0 0] = [6 8; 0 2]                     o1 = (6, 10);   S1 and S2 are gla's
    // S1 + diag(2, 3) [4 2; 4 2] = [11 8; 12 8]                   o2 = (11 + 24, 8 + 16)
    {"rwkv6", {.5, 1, .25, .5}, {6, 10, 35, 24}, {4.75, 3, 4, 3}},
    // S0'k1 = (2, 0)    beta (v1 - .) = (0, 2)    S1 = S0 + [0 2; 0 0] = [2 2; 0 2]        o1 = (2, 4)
    // S1'k2 = (2, 4)    beta (v2 - .) = (1, -1)   S2 = S1 + [1 -1; 1 -1] = [3 1; 1 1]      o2 = (3 + 2, 1 + 2)
    {"delta", {1, 1, 1, 1}, {2, 4, 5, 3}, {3, 1, 1, 1}},
    // S = [1 0; 0 1]           S'k1 = (1, 0)        beta (v1 - .) = (.5, 2)          S1 = [1.5 2; 0 1]                  o1 = (1.5, 3)
    // S = [.375 .5; 0 .25]     S'k2 = (.375, .75)   beta (v2 - .) = (1.8125, .625)   S2 = [2.1875 1.125; 1.8125 .875]
    // o2 = (2.1875 + 3.625, 1.125 + 1.75)
    {"gated_delta", {.5, .5, .25, .25}, {1.5, 3, 5.8125, 2.875}, {2.1875, 1.125, 1.8125, .875}},
    // S = [1 0; 0 2]           S'k1 = (1, 0)        beta (v1 - .) = (.5, 2)          S1 = [1.5 2; 0 2]                  o1 = (1.5, 4)
    // S = [.375 .5; 0 1]       S'k2 = (.375, 1.5)   beta (v2 - .) = (1.8125, .25)    S2 = [2.1875 .75; 1.8125 1.25]
    // o2 = (2.1875 + 3.625, .75 + 2.5)
    {"kda", {.5, 1, .25, .5}, {1.5, 4, 5.8125, 3.25}, {2.1875, .75, 1.8125, 1.25}},
    // S0'r1 = (-2, 2)   S1 = [1 0; 0 2] + [-1 1; -2 2] + [2 4; 0 0] = [2 5; -2 4]                      o1 = (0, 9)
    // S1'r2 = (2, -4)   S2 = [.5 1.25; -1 2] + [2 -4; 1 -2] + [4 2; 4 2] = [6.5 -.75; 4 2]             o2 = (6.5 + 8, -.75 + 4)
    {"rwkv7", {.5, 1, .25, .5}, {0, 9, 14.5, 3.25}, {6.5, -.75, 4, 2}},
};

TEST(Reference, GivesWhatWasWorkedByHand) {
  ASSERT_EQ(kWorked.size(), AllRules().size());
  for (size_t i = 0; i < kWorked.size(); ++i) {
    const Worked& worked = kWorked[i];
    ASSERT_EQ(worked.rule, AllRules()[i].name);
    SCOPED_TRACE(worked.rule);
    Head<double> h = WorkedHead();
    h.update = AllRules()[i].update;
    h.D = worked.D;
    for (const double scale : {1.0, 0.25}) {
      h.scale = scale;
      std::vector<double> out = worked.out;
      for (double& x : out) x *= scale;
      for (const Answer<double>& answer : {Recurrent(h), Parallel(h), Chunkwise(h, 1), Chunkwise(h, 2), Chunkwise(h, 3)}) {
        EXPECT_EQ(answer.out, out);
        EXPECT_EQ(answer.state, worked.state);
      }
    }
  }
}

TEST(Reference, DividesByTheKeySumAsWorkedByHand) {
  Head<double> h = WorkedHead();
  h.normalize = true;
  h.scale = 100;  // cancels, so it must not be looked at
  // linear, z0 = (2, 1):  z1 = (3, 1), z1'q1 = 4, o1 = (4, 6) / 4    z2 = (4, 2), z2'q2 = 8, o2 = (16, 14) / 8
  h.z0 = {2, 1};
  for (const Answer<double>& answer : {Recurrent(h), Parallel(h), Chunkwise(h, 1), Chunkwise(h, 2)}) {
    EXPECT_EQ(answer.out, (std::vector<double>{1, 1.5, 2, 1.75}));
    EXPECT_EQ(answer.z, (std::vector<double>{4, 2}));
    EXPECT_EQ(answer.state, (std::vector<double>{8, 6, 4, 4}));
  }
  // rwkv6, z0 = (1, 1):  (z0 + bonus k1)'q1 = (3, 1)'(1, 1) = 4, o1 = (6, 10) / 4    z1 = (.5, 1) + (1, 0) = (1.5, 1)
  // (z1 + bonus k2)'q2 = (3.5, 4)'(1, 2) = 11.5, o2 = (35, 24) / 11.5                z2 = (.375, .5) + (1, 1)
  h.update = Update::kAddReadBefore;
  h.D = {.5, 1, .25, .5};
  h.z0 = {1, 1};
  for (const Answer<double>& answer : {Recurrent(h), Parallel(h), Chunkwise(h, 1), Chunkwise(h, 2)}) {
    EXPECT_EQ(answer.out, (std::vector<double>{1.5, 2.5, 35 / 11.5, 24 / 11.5}));
    EXPECT_EQ(answer.z, (std::vector<double>{1.375, 1.5}));
  }
  // A query that no key has met: z1'q1 = 0, a row of zeros.
  h = WorkedHead();
  h.normalize = true;
  h.z0 = {0, 0};
  h.q = {0, 1, 1, 2};
  for (const Answer<double>& answer : {Recurrent(h), Parallel(h), Chunkwise(h, 1), Chunkwise(h, 2)}) {
    EXPECT_EQ(answer.out[0], 0);
    EXPECT_EQ(answer.out[1], 0);
    EXPECT_NE(answer.out[2], 0);
  }
}

TEST(Reference, GivesTheGoldenSixTokens) {
  io::File file;
  const Status status = io::Read(TERCET_TEST_DATA "/golden/six_tokens/six_tokens.safetensors", &file);
  ASSERT_TRUE(status.ok()) << status.message;
  const auto numbers = [&](const char* name) {
    const io::Array& array = file.arrays.at(name);
    std::vector<double> values(array.data.size() / sizeof(double));
    std::memcpy(values.data(), array.data.data(), array.data.size());
    return values;
  };
  Head<double> h;
  h.normalize = true;
  h.n = 6;
  h.K = 4;
  h.V = 5;
  h.q = numbers("q");
  h.k = numbers("k");
  h.v = numbers("v");
  for (std::vector<double>* features : {&h.q, &h.k})
    for (double& x : *features) x = x > 0 ? x + 1 : std::exp(x);
  h.D.assign(24, 1);
  h.S0.assign(20, 0);
  h.z0.assign(4, 0);
  const auto near = [](const std::vector<double>& values, const std::vector<double>& expected) {
    ASSERT_EQ(values.size(), expected.size());
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-13);
  };
  for (const Answer<double>& answer : {Recurrent(h), Parallel(h), Chunkwise(h, 4), Chunkwise(h, 6)}) {
    near(answer.out, numbers("expected.out"));
    near(answer.state, numbers("expected.final_state"));
    near(answer.z, numbers("expected.final_key_sum"));
  }
}

// ---- The forms against each other, without rounding ---------------------------------------------------------------------------------------

constexpr int64_t kTokens[] = {0, 1, 2, 5, 16, 17, 40};
constexpr int64_t kDims[] = {1, 2, 5};

// Calls body(rule, n, K, V, G, normalize) for every size.
template <class Body>
void ForEachSize(Body body) {
  for (const NamedRule& rule : AllRules())
    for (const int64_t n : kTokens)
      for (const int64_t K : kDims)
        for (const int64_t V : kDims)
          for (const int64_t G : {1, 2})
            for (const bool normalize : {false, true})
              if (!normalize || CanNormalize(rule)) body(rule, n, K, V, G, normalize);
}

std::string Size(const NamedRule& rule, int64_t n, int64_t K, int64_t V, int64_t G, bool normalize, int64_t chunk) {
  return rule.name + " n " + std::to_string(n) + " K " + std::to_string(K) + " V " + std::to_string(V) + " G " + std::to_string(G) + " chunk " +
         std::to_string(chunk) + (normalize ? " normalised" : "");
}

TEST(Reference, FormsAreEqualInTheField) {
  uint64_t seed = 1;
  ForEachSize([&](const NamedRule& rule, int64_t n, int64_t K, int64_t V, int64_t G, bool normalize) {
    const Head<Field> h = FieldHead(rule, n, K, V, G, normalize, ++seed);
    const Answer<Field> recurrent = Recurrent(h);
    EXPECT_EQ(static_cast<int64_t>(recurrent.out.size()), G * n * V);
    EXPECT_TRUE(Same(Parallel(h), recurrent)) << Size(rule, n, K, V, G, normalize, n);
    for (const int64_t chunk : {int64_t{1}, int64_t{2}, int64_t{4}, int64_t{16}, std::max<int64_t>(n, 1)})
      EXPECT_TRUE(Same(Chunkwise(h, chunk), recurrent)) << Size(rule, n, K, V, G, normalize, chunk);
  });
}

TEST(Reference, EveryPlantedErrorDiffersInTheField) {
  uint64_t seed = 1;
  ForEachSize([&](const NamedRule& rule, int64_t n, int64_t K, int64_t V, int64_t G, bool normalize) {
    if (n == 0) return;  // no token, so nothing to get wrong
    const Head<Field> h = FieldHead(rule, n, K, V, G, normalize, ++seed);
    const Answer<Field> recurrent = Recurrent(h);
    for (const int64_t chunk : {int64_t{1}, int64_t{4}, n}) {
      // Where there is no decay, or the scale cancels, there is nothing to plant.
      EXPECT_EQ(Same(Chunkwise(h, chunk, Plant::kDecay), recurrent), rule.decay == Decay::kNone) << Size(rule, n, K, V, G, normalize, chunk);
      EXPECT_EQ(Same(Chunkwise(h, chunk, Plant::kScale), recurrent), normalize) << Size(rule, n, K, V, G, normalize, chunk);
      EXPECT_FALSE(Same(Chunkwise(h, chunk, Plant::kMask), recurrent)) << Size(rule, n, K, V, G, normalize, chunk);
    }
  });
}

// Along a line x = a + t b through the space of inputs an answer is a polynomial in t of the same degree d at most. Then its differences of order
// d + 1 are zero, and those of order d almost never are if d is the degree itself.
TEST(Degree, IsThatOfThePolynomial) {
  for (const NamedRule& rule : AllRules())
    for (const int form : {0, 1, 2}) {
      SCOPED_TRACE(rule.name + " form " + std::to_string(form));
      const auto run = [&](const auto& h) { return form == 0 ? Recurrent(h) : form == 1 ? Parallel(h) : Chunkwise(h, 2); };
      const Answer<Degree> degrees = run(DrawHead<Degree>(rule, 3, 2, 1, 1, false, [] { return Degree::Variable(); }));
      int64_t most = 0;
      for (const Degree& d : degrees.out) most = std::max(most, d.value());
      std::vector<std::vector<Field>> points;
      for (int64_t t = 0; t <= most + 1; ++t) {
        std::mt19937_64 words(7);
        points.push_back(run(DrawHead<Field>(rule, 3, 2, 1, 1, false, [&] {
                           const Field a = Field::Random(words), b = Field::Random(words);
                           return a + Field(t) * b;
                         })).out);
      }
      for (size_t i = 0; i < degrees.out.size(); ++i) {
        const auto difference = [&](int64_t order) {
          std::vector<Field> row;
          for (const auto& point : points) row.push_back(point[i]);
          for (int64_t o = 0; o < order; ++o)
            for (size_t j = 0; j + 1 < row.size(); ++j) row[j] = row[j + 1] - row[j];
          return row[0];
        };
        EXPECT_TRUE(difference(degrees.out[i].value() + 1) == Field(0)) << "token " << i;
        EXPECT_FALSE(difference(degrees.out[i].value()) == Field(0)) << "token " << i;
      }
    }
}

// ---- In floating point --------------------------------------------------------------------------------------------------------------------

template <class T>
Head<T> FloatingHead(const NamedRule& rule, int64_t n, int64_t K, int64_t V, uint64_t seed) {
  std::mt19937_64 words(seed);
  const auto uniform = [&] { return static_cast<T>(static_cast<double>(words() >> 11) * 0x1p-53); };
  Head<T> h = DrawHead<T>(rule, n, K, V, 1, false, uniform);
  // Small enough that no rule's state grows: the products of remove and write, of k and k, sum to less than one.
  for (std::vector<T>* x : {&h.k, &h.remove, &h.write})
    for (T& y : *x) y /= static_cast<T>(K);
  return h;
}

TEST(Reference, FormsAgreeInDouble) {
  for (const NamedRule& rule : AllRules())
    for (const int64_t n : {1, 33, 200}) {
      const Head<double> h = FloatingHead<double>(rule, n, 16, 9, 3);
      const Answer<double> recurrent = Recurrent(h);
      // Every number here is positive but for what delta takes away; each of n + K roundings adds at most half a unit of the largest.
      double largest = 0;
      for (const double x : recurrent.state) largest = std::max(largest, std::abs(x));
      for (const double x : recurrent.out) largest = std::max(largest, std::abs(x));
      const double bound = static_cast<double>(n + 16) * 0x1p-53 * 8 * largest;
      for (const Answer<double>& answer : {Parallel(h), Chunkwise(h, 16), Chunkwise(h, 64)}) {
        for (size_t i = 0; i < answer.out.size(); ++i) ASSERT_NEAR(answer.out[i], recurrent.out[i], bound) << rule.name;
        for (size_t i = 0; i < answer.state.size(); ++i) ASSERT_NEAR(answer.state[i], recurrent.state[i], bound) << rule.name;
      }
    }
}

// A token that is not a number reaches itself and the later ones, and never an earlier one.
TEST(Reference, NanDoesNotFlowBackwards) {
  for (const NamedRule& rule : AllRules()) {
    SCOPED_TRACE(rule.name);
    Head<double> h = FloatingHead<double>(rule, 9, 4, 3, 5);
    const Answer<double> clean = Recurrent(h);
    h.v[4 * 3 + 1] = NAN;
    h.k[6 * 4 + 2] = INFINITY;
    for (const Answer<double>& answer : {Recurrent(h), Parallel(h), Chunkwise(h, 1), Chunkwise(h, 4), Chunkwise(h, 9)})
      for (int64_t t = 0; t < 9; ++t)
        for (int64_t e = 0; e < 3; ++e) {
          const double x = answer.out[t * 3 + e];
          if (t < 4 || (t < 6 && e != 1))
            EXPECT_NEAR(x, clean.out[t * 3 + e], 1e-12) << t << " " << e;
          else
            EXPECT_FALSE(std::isfinite(x)) << t << " " << e;
        }
  }
}

// Forgetting all is the factor zero, and needs no special case.
TEST(Reference, ForgetsAllWithTheFactorZero) {
  for (const NamedRule& rule : AllRules()) {
    if (rule.decay == Decay::kNone || rule.decay == Decay::kPerHead) continue;
    SCOPED_TRACE(rule.name);
    Head<double> h = FloatingHead<double>(rule, 20, 4, 3, 5);
    for (int64_t c = 0; c < 4; ++c) h.D[11 * 4 + c] = 0;
    const Answer<double> recurrent = Recurrent(h);
    for (const Answer<double>& answer : {Parallel(h), Chunkwise(h, 8)})
      for (size_t i = 0; i < answer.out.size(); ++i) EXPECT_NEAR(answer.out[i], recurrent.out[i], 1e-12);
  }
}

}  // namespace
}  // namespace tercet::reference
