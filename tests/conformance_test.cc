// The conformance grid: every target this machine runs x rule x form x dtype x odd shapes, against the reference recurrence. A case is a test of its
// own, AVX2_kda_chunkwise_f32_T33_K16_V31, and fails where its target did not run. bf16 and f16 take every third shape or so, by turns
// with gates of their own and in f32.
#include <memory>

#include "tests/amx_emulation.hpp"
#include "tests/grid.hpp"
#include "tests/support.hpp"

namespace tercet::test {
namespace {

struct Solved : Drawn {
  Answers answers;
};

Solved Solve(const Problem& problem) {
  Solved solved{Draw(problem), {}};
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
    if (form_ == Form::kChunkwise) options.chunk = ChunkOf(problem_.shape);
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
            testing::RegisterTest(std::string(info.name).c_str(), NameOf(target, {info.rule, dtype, shape}, form).c_str(), nullptr, nullptr, __FILE__,
                                  __LINE__, [=, rule = info.rule]() -> Conformance* {
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
