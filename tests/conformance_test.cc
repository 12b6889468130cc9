// The conformance grid: every target this machine runs x rule x form x dtype x odd shapes, against the reference recurrence. A case is a test of its
// own, AVX2_kda_chunkwise_f32_T33_K16_V31, and fails where its target did not run. Features, the normaliser, the chunk, head groups, packed sequences
// and valid tokens change from shape to shape, so that each meets every rule, form and target. bf16 and f16 take every third shape or so, by turns
// with gates of their own and in f32.
#include <memory>

#include "tests/amx_emulation.hpp"
#include "tests/support.hpp"

namespace tercet::test {
namespace {

struct Shape {
  int64_t tokens, key_dim, value_dim, number;
};

std::vector<Shape> Shapes() {
  const int64_t dims[] = {1, 5, 33, 96, 128, 257}, all_tokens[] = {0, 1, 15, 16, 17, 63, 64, 65, 200};
  std::vector<Shape> shapes;
  int64_t number = 0;
  for (const int64_t tokens : all_tokens)
    for (int i = 0; i < 6; ++i)
      for (const int shift : {0, 1 + i % 5}) shapes.push_back({tokens, dims[i], dims[(i + shift) % 6], number++});
  return shapes;
}

struct Problem {
  Rule rule;
  Dtype dtype;
  Shape shape;
};

struct Solved {
  Options options;
  OwnedInputs inputs;
  Answers answers;
};

Solved Solve(const Problem& problem) {
  const Shape& shape = problem.shape;
  Solved solved;
  RandomSpec spec;
  spec.rule = problem.rule;
  spec.dtype = problem.dtype;
  spec.tokens = shape.tokens;
  spec.key_dim = shape.key_dim;
  spec.value_dim = shape.value_dim;
  spec.seed = 1 + static_cast<uint64_t>(shape.number);
  solved.options.rule = problem.rule;
  const int64_t n = shape.number;
  spec.heads = 1 + n % 2;
  if (n % 5 == 1) spec.q_heads = 2 * spec.heads;                         // several queries a state
  if (n % 5 == 2) spec.q_heads = spec.k_heads = 1, spec.gate_heads = 1;  // more values than keys
  if (n % 5 == 3) spec.batch = 2;
  if (n % 5 == 4 && shape.tokens > 0) spec.offsets = {0, shape.tokens / 3, shape.tokens / 3, shape.tokens};
  if (n % 4 == 3) spec.valid_fraction = 0.7;
  if (n % 3 == 1) solved.options.feature_map = FeatureMap::kEluPlusOne;
  if (n % 3 == 1 && Info(problem.rule).can_normalize) solved.options.normalize = spec.normalize = true;
  if (n % 3 == 2) solved.options.feature_map = n % 2 == 0 ? FeatureMap::kL2Norm : FeatureMap::kRelu;
  if (n % 3 != 0 && !Info(problem.rule).can_normalize)
    solved.options.feature_map = FeatureMap::kL2Norm;  // keys of a delta rule stay within the unit ball
  spec.initial_state = n % 6 != 0;
  if (contract::SizeOf(problem.dtype) == 2 && n % 2 == 0) spec.gate_dtype = Dtype::kF32;
  solved.inputs = RandomInputs(spec);
  // A denominator is a sum of positive numbers: where it may cancel, the quotient magnifies rounding without bound, and no tolerance holds.
  Owned& bonus = solved.inputs.bonus;
  for (int64_t i = 0; solved.options.normalize && !bonus.shape.empty() && i < bonus.size(); ++i) bonus.Set(i, std::abs(bonus.Get(i)));
  solved.answers =
      problem.dtype == Dtype::kF64 ? Oracle<long double>(solved.options, solved.inputs.view()) : Oracle<double>(solved.options, solved.inputs.view());
  return solved;
}

// The cases of one problem follow each other, and share its answer.
const Solved& SolveOnce(const Problem& problem) {
  static std::unique_ptr<Solved> last;
  static Problem of;
  if (last == nullptr || of.rule != problem.rule || of.dtype != problem.dtype || of.shape.number != problem.shape.number) {
    last = std::make_unique<Solved>(Solve(problem));
    of = problem;
  }
  return *last;
}

class Conformance : public testing::Test {
 public:
  Conformance(std::string target, Problem problem, Form form) : target_(std::move(target)), problem_(problem), form_(form) {}

  void TestBody() override {
    const Solved& solved = SolveOnce(problem_);
    Options options = solved.options;
    options.form = form_;
    const int64_t chunks[] = {16, 1, 64, 7, 33, 200};
    if (form_ == Form::kChunkwise) options.chunk = chunks[problem_.shape.number % 6];
    options.target = target_;
    std::string ran;
    ASSERT_TRUE(ChooseTarget(target_, &ran).ok());
    ASSERT_EQ(ran, target_) << "the case's target did not run";
    // On tiles every operand of a product is rounded to bf16: six roundings on the way to a number, and as much again for their accumulation.
    const bool tiles = target_.rfind("AMX", 0) == 0 && form_ != Form::kRecurrent;
    const double tolerance = tiles ? 12 * 0x1p-9 : Tolerance(problem_.dtype, problem_.shape.tokens, problem_.shape.key_dim);
    ExpectNear(Compute(options, solved.inputs.view()), solved.answers, tolerance);
  }

 private:
  std::string target_;
  Problem problem_;
  Form form_;
};

void Register() {
  for (const RuleInfo& info : Rules())
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16})
      for (const Shape& shape : Shapes()) {
        // 7 has no factor in common with the numbers by which features and the rest change from shape to shape.
        if (contract::SizeOf(dtype) == 2 && shape.number % 7 > 1) continue;
        for (const std::string& target : Targets()) {
          if (target.rfind("AMX", 0) == 0 && dtype != Dtype::kBF16) continue;  // as on AVX3
          for (const Form form : {Form::kParallel, Form::kRecurrent, Form::kChunkwise, Form::kAutomatic}) {
            const std::string name = target + "_" + std::string(info.name) + "_" + std::string(Name(form)) + "_" + std::string(Name(dtype)) + "_T" +
                                     std::to_string(shape.tokens) + "_K" + std::to_string(shape.key_dim) + "_V" + std::to_string(shape.value_dim);
            testing::RegisterTest(std::string(info.name).c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                                  [=, rule = info.rule]() -> Conformance* {
                                    return new Conformance(target, {rule, dtype, shape}, form);
                                  });
          }
        }
      }
}

}  // namespace
}  // namespace tercet::test

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  tercet::test::OfferEmulatedAmx();
  tercet::test::Register();
  const int failed = RUN_ALL_TESTS();
  // A filter that no case matches must not pass for one that all pass.
  return failed != 0 || testing::UnitTest::GetInstance()->test_to_run_count() == 0 ? 1 : 0;
}
