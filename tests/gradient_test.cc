// The gradients of the library against the oracle's reverse accumulation: every target this machine runs x rule x form x dtype x the odd shapes of
// the conformance grid, each case a test of its own that fails where its target did not run; and what a case can't show.
#include <memory>

#include "tests/gradients.hpp"
#include "tests/grid.hpp"

namespace tercet::test {
namespace {

struct Solved : Drawn {
  OwnedGiven given;
  proof::InputGradients<double> answers;
};

Solved Solve(const Problem& problem) {
  Solved solved{Draw(problem), {}, {}};
  solved.given = DrawGiven(solved.options, solved.inputs.view(), 1000 + static_cast<uint64_t>(problem.shape.number));
  solved.answers = problem.dtype == Dtype::kF64 ? OracleGradients<long double>(solved.options, solved.inputs.view(), solved.given.view())
                                                : OracleGradients<double>(solved.options, solved.inputs.view(), solved.given.view());
  return solved;
}

const Solved& SolveOnce(const Problem& problem) {
  static std::unique_ptr<Solved> last;
  static Problem of;
  if (last == nullptr || of.rule != problem.rule || of.dtype != problem.dtype || of.shape.number != problem.shape.number) {
    last = std::make_unique<Solved>(Solve(problem));
    of = problem;
  }
  return *last;
}

class GradientConformance : public testing::Test {
 public:
  GradientConformance(std::string target, Problem problem, Form form) : target_(std::move(target)), problem_(problem), form_(form) {}

  void TestBody() override {
    const Solved& solved = SolveOnce(problem_);
    Options options = solved.options;
    options.form = form_;
    if (form_ == Form::kChunkwise) options.chunk = ChunkOf(problem_.shape);
    options.target = target_;
    std::string ran;
    ASSERT_TRUE(ChooseTarget(target_, &ran).ok());
    ASSERT_EQ(ran, target_) << "the case's target did not run";
    OwnedGiven given = solved.given;
    if (problem_.shape.number / 2 % 2 == 1) given.saved = Save(options, solved.inputs.view());
    OwnedGradients got = ComputeGradients(options, solved.inputs, given);
    ExpectNearGradients(got, solved.answers,
                        GradientTolerance(problem_.dtype, problem_.shape.tokens, problem_.shape.key_dim + problem_.shape.value_dim));
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
        // 7 has no factor in common with the numbers by which features and the rest change from shape to shape. A shape's oracle takes T K V, and
        // long double is slow.
        if (contract::SizeOf(dtype) == 2 && shape.number % 7 > 0) continue;
        if (dtype == Dtype::kF64 && shape.number % 7 > 2) continue;
        if (kAddressSanitizer && shape.number % 7 > 0) continue;  // which is slower still
        for (const std::string& target : Targets()) {
          if (target.rfind("AMX", 0) == 0) continue;  // as on AVX3
          for (const Form form : {Form::kRecurrent, Form::kChunkwise, Form::kAutomatic}) {
            testing::RegisterTest(std::string(info.name).c_str(), NameOf(target, {info.rule, dtype, shape}, form).c_str(), nullptr, nullptr, __FILE__,
                                  __LINE__, [=, rule = info.rule]() -> GradientConformance* {
                                    return new GradientConformance(target, {rule, dtype, shape}, form);
                                  });
          }
        }
      }
}

}  // namespace
}  // namespace tercet::test

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  tercet::test::Register();
  const int failed = RUN_ALL_TESTS();
  // A filter that no case matches must not pass for one that all pass.
  return failed != 0 || testing::UnitTest::GetInstance()->test_to_run_count() == 0 ? 1 : 0;
}
