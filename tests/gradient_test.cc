// The gradients of the library against the oracle's reverse accumulation: every target this machine runs x rule x form x dtype x the odd shapes of
// the conformance grid, each case a test of its own that fails where its target did not run; and what a case can't show.
#include <memory>
#include <random>

#include "src/proof/gradient.hpp"
#include "tests/grid.hpp"
#include "tests/support.hpp"

namespace tercet::test {
namespace {

struct OwnedGiven {
  Owned out, final_state, final_key_sum;
  OutputGradients view() const {
    OutputGradients given{out.view(), final_state.view(), {}};
    if (!final_key_sum.shape.empty()) given.final_key_sum = final_key_sum.view();
    return given;
  }
};

// Normal numbers in the shapes of the outputs.
OwnedGiven DrawGiven(const Options& options, const Inputs& in, uint64_t seed) {
  Results room = Room(options, in);
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (Owned* owned : {&room.out, &room.final_state, &room.final_key_sum})
    for (int64_t i = 0; !owned->shape.empty() && i < owned->size(); ++i) owned->Set(i, normal(random));
  return {room.out, room.final_state, room.final_key_sum};
}

struct OwnedGradients {
  Owned q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum;
  double scale = 12345;

  std::vector<std::pair<const char*, Owned*>> All() {
    return {{"q", &q},           {"k", &k},         {"v", &v},         {"log_decay", &log_decay},         {"beta", &beta},
            {"remove", &remove}, {"write", &write}, {"bonus", &bonus}, {"initial_state", &initial_state}, {"initial_key_sum", &initial_key_sum}};
  }
  Gradients view() {
    const auto tensor = [](Owned& owned) { return owned.shape.empty() ? Tensor() : owned.mutable_view(); };
    return {tensor(q),      tensor(k),     tensor(v),     tensor(log_decay),     tensor(beta),
            tensor(remove), tensor(write), tensor(bonus), tensor(initial_state), tensor(initial_key_sum),
            &scale};
  }
};

OwnedGradients RoomForGradients(const Options& options, const OwnedInputs& in) {
  const Results room = Room(options, in.view());
  OwnedGradients gradients{in.q, in.k, in.v, in.log_decay, in.beta, in.remove, in.write, in.bonus, room.final_state, room.final_key_sum, 12345};
  for (auto& [name, owned] : gradients.All())
    for (int64_t i = 0; !owned->shape.empty() && i < owned->size(); ++i) owned->Set(i, 12345.0);
  return gradients;
}

OwnedGradients ComputeGradients(const Options& options, const OwnedInputs& in, const OwnedGiven& given) {
  OwnedGradients gradients = RoomForGradients(options, in);
  Options with = options;
  if (with.executor == nullptr) with.executor = UsualExecutor();
  const Status status = AttendGradient(with, in.view(), given.view(), gradients.view());
  EXPECT_TRUE(status.ok()) << status.message;
  return gradients;
}

template <class T>
proof::InputGradients<double> OracleGradients(const Options& options, const Inputs& in, const OutputGradients& given) {
  proof::InputGradients<T> wide;
  const Status status = proof::GradientsOf(options, in, given, &wide);
  EXPECT_TRUE(status.ok()) << status.message;
  const auto narrow = [](const std::vector<T>& x) { return std::vector<double>(x.begin(), x.end()); };
  return {narrow(wide.q),
          narrow(wide.k),
          narrow(wide.v),
          narrow(wide.log_decay),
          narrow(wide.beta),
          narrow(wide.remove),
          narrow(wide.write),
          narrow(wide.bonus),
          narrow(wide.initial_state),
          narrow(wide.initial_key_sum),
          static_cast<double>(wide.scale)};
}

// A number of a gradient is a sum over a walk forward and one back.
double GradientTolerance(Dtype dtype, const Shape& shape) { return 4 * Tolerance(dtype, shape.tokens, shape.key_dim + shape.value_dim); }

// Relative to the largest of a tensor; but where little is left of a sum by nature, relative to the largest of all, of which it is a sum: a row of
// one channel has next to no gradient behind l2_norm and none under the normaliser, a state of one channel is forgotten by a delta rule, and one
// number for all channels of a token or a head can be anything.
void ExpectNearGradients(OwnedGradients& got, const proof::InputGradients<double>& want, double tolerance) {
  const std::vector<double>* wants[] = {&want.q,      &want.k,     &want.v,     &want.log_decay,     &want.beta,
                                        &want.remove, &want.write, &want.bonus, &want.initial_state, &want.initial_key_sum};
  double largest_of_all = 1;  // which is what the given gradients are
  for (const std::vector<double>* one : wants)
    for (const double x : *one) largest_of_all = std::max(largest_of_all, std::abs(x));
  int at = 0;
  for (auto& [name, owned] : got.All()) {
    const std::vector<double>& one = *wants[at++];
    if (owned->shape.empty()) continue;
    double largest = 0, worst = 0;
    for (const double x : one) largest = std::max(largest, std::abs(x));
    ASSERT_EQ(owned->size(), static_cast<int64_t>(one.size())) << name;
    for (int64_t i = 0; i < owned->size(); ++i) {
      const double gap = std::abs(owned->Get(i) - one[i]);
      ASSERT_FALSE(std::isnan(gap)) << name << " element " << i << " is " << owned->Get(i) << " and the oracle says " << one[i];
      worst = std::max(worst, gap);
    }
    const bool cancels = got.q.shape[3] == 1 || owned->shape.size() < 4;
    const double bound = tolerance * (cancels ? largest_of_all : largest) + RoundingOf(owned->dtype) * largest;
    EXPECT_LE(worst, bound) << name << ", whose largest is " << largest;
  }
  // One sum over everything: as exact as the gradient of q that it is made of.
  double size = 0;
  for (const double x : want.q) size += std::abs(x);
  EXPECT_LE(std::abs(got.scale - want.scale), tolerance * (size + std::abs(want.scale))) << "scale is " << got.scale << ", not " << want.scale;
}

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
    OwnedGradients got = ComputeGradients(options, solved.inputs, solved.given);
    ExpectNearGradients(got, solved.answers, GradientTolerance(problem_.dtype, problem_.shape));
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
