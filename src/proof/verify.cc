#include "src/proof/verify.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/proof/algebra.hpp"
#include "src/proof/heads.hpp"
#include "src/proof/judge.hpp"
#include "src/proof/settle.hpp"
#include "src/proof/workers.hpp"
#include "src/reference/chunkwise.hpp"

namespace tercet::proof {

namespace {

// Fractions of the work, roughly: where the time goes at n = 8192, K = V = 128.
constexpr double kAlgebraDone = 0.03, kFormsDone = 0.2;

Status Refuse(StatusCode code, std::string message) { return {code, std::move(message)}; }

struct Answers {
  Owned out, final_state, final_key_sum;

  explicit Answers(const contract::Layer& layer)
      : out(Owned::Zeros(layer.dtype, {layer.batch, layer.tokens, layer.out_heads, layer.value_dim})),
        final_state(Owned::Zeros(layer.state_dtype(), {layer.sequences, layer.state_heads, layer.key_dim, layer.value_dim})) {
    if (layer.normalize) final_key_sum = Owned::Zeros(layer.state_dtype(), {layer.sequences, layer.state_heads, layer.key_dim});
  }

  Outputs outputs() { return {out.mutable_view(), final_state.mutable_view(), final_key_sum.mutable_view(), {}}; }
  Candidate candidate(std::string form, int64_t span, Operands operands = Operands::kNotRounded) const {
    return {std::move(form), out.view(), final_state.view(), final_key_sum.view(), span, 0, operands};
  }
};

Status CheckExpected(std::string_view name, const ConstTensor& t, const Owned& answer, Dtype q) {
  if (!t.given()) return {};
  const std::string named(name);
  if (answer.shape.empty()) return Refuse(StatusCode::kUnexpectedInput, named + " was given and there is a key sum only with normalize");
  bool same = t.rank == static_cast<int>(answer.shape.size());
  for (int axis = 0; same && axis < t.rank; ++axis) same = t.shape[axis] == answer.shape[axis];
  if (!same)
    return Refuse(StatusCode::kShape,
                  named + " has shape " + contract::ShapeText(t) + " and must have that of the answer, " + contract::ShapeText(answer.view()));
  if (t.dtype != answer.dtype)
    return Refuse(StatusCode::kDtype, named + " is " + std::string(Name(t.dtype)) + " and must be " + std::string(Name(answer.dtype)) +
                                          (answer.dtype == q ? ", the dtype of q" : ", the dtype of states where q is " + std::string(Name(q))));
  if (t.data == nullptr && answer.size() != 0)
    return Refuse(StatusCode::kNullData, named + " has no data and must point to its " + std::to_string(answer.size()) + " elements");
  return {};
}

// Computes the chunkwise reference form in the working precision, out rounded to the dtype, with the plant, and says whether the plant changed any
// number.
template <class W>
Status RunReference(const contract::Layer& layer, int64_t chunk, Plant plant, const Workers& workers, Answers* answers, bool* changed) {
  const int64_t units = layer.sequences * layer.state_heads, G = layer.queries_per_state(), K = layer.key_dim, V = layer.value_dim;
  std::vector<char> differs(units, 0);
  const auto copy = [](const std::vector<W>& from, int64_t begin, int64_t count, Owned* to, int64_t at) {
    for (int64_t i = 0; i < count; ++i) to->Set(at + i, static_cast<double>(from[begin + i]));
  };
  const auto rounded = [&](std::vector<W> out) {
    Owned one = Owned::Zeros(layer.dtype, {1});
    for (W& x : out) {
      one.Set(0, static_cast<double>(x));
      x = static_cast<W>(one.Get(0));
    }
    return out;
  };
  const auto one = [&](int64_t unit) {
    const int64_t number = unit / layer.state_heads, s = unit % layer.state_heads;
    const contract::Sequence sequence = contract::SequenceAt(layer, number);
    const std::vector<int64_t> tokens = ValidTokens(layer, sequence);
    const reference::Head<W> head = HeadOf<W>(layer, number, tokens, s);
    const reference::Answer<W> right = Chunkwise(head, chunk), planted = Chunkwise(head, chunk, plant);
    differs[unit] = rounded(planted.out) != rounded(right.out) || planted.state != right.state || planted.z != right.z;
    for (int64_t g = 0; g < G; ++g)
      for (int64_t i = 0; i < head.n; ++i)
        copy(planted.out, (g * head.n + i) * V, V, &answers->out, ((sequence.batch * layer.tokens + tokens[i]) * layer.out_heads + s * G + g) * V);
    copy(planted.state, 0, K * V, &answers->final_state, unit * K * V);
    if (layer.normalize) copy(planted.z, 0, K, &answers->final_key_sum, unit * K);
  };
  const Status status = workers.Run(units, 1, one, [](int64_t) {});
  *changed = std::find(differs.begin(), differs.end(), 1) != differs.end();
  return status;
}

double LargestDifference(const Owned& a, const Owned& b) {
  double largest = 0;
  for (int64_t i = 0; i < a.size(); ++i) {
    const double x = a.Get(i), y = b.Get(i);
    if (!std::isfinite(x) && !std::isfinite(y)) continue;
    const double difference = std::abs(x - y);
    largest = std::max(largest, std::isfinite(difference) ? difference : std::numeric_limits<double>::infinity());
  }
  return largest;
}

double LargestDifference(const Answers& a, const Answers& b) {
  return std::max(
      {LargestDifference(a.out, b.out), LargestDifference(a.final_state, b.final_state), LargestDifference(a.final_key_sum, b.final_key_sum)});
}

Status Run(const VerifyOptions& options, const Inputs& inputs, const Expected& expected, Verdict* verdict) {
  const auto progress = [&](double fraction, std::string_view doing) {
    if (options.progress) options.progress(fraction, doing);
  };
  Settled settled;
  if (Status status = Settle(options, inputs, &settled); !status.ok()) return status;
  const contract::Layer& layer = settled.layer;
  const Options& attend = settled.attend;
  Verdict v;
  v.limit = kLimit;
  v.target = settled.target;
  v.chunk = attend.chunk;

  // What each form computes. First, for it may be refused: the parallel form has a limit.
  Answers parallel(layer), recurrent(layer), chunkwise(layer);
  for (const auto& [name, tensor, answer] :
       {std::tuple("expected.out", &expected.out, &recurrent.out), std::tuple("expected.final_state", &expected.final_state, &recurrent.final_state),
        std::tuple("expected.final_key_sum", &expected.final_key_sum, &recurrent.final_key_sum)})
    if (Status status = CheckExpected(name, *tensor, *answer, layer.dtype); !status.ok()) return status;
  const std::pair<Form, Answers*> forms[] = {{Form::kParallel, &parallel}, {Form::kRecurrent, &recurrent}, {Form::kChunkwise, &chunkwise}};
  double done = 0;
  for (const auto& [form, answers] : forms) {
    progress(done, Name(form));
    Options of_form = attend;
    of_form.form = form;
    of_form.chunk = form == Form::kChunkwise ? v.chunk : 0;
    if (Status status = Attend(of_form, inputs, answers->outputs()); !status.ok()) return status;
    done += (kFormsDone - kAlgebraDone) / 3;
  }
  const Workers workers(attend.executor, attend.threads);
  if (options.plant != Plant::kNone && options.plant_in_floating_point) {
    chunkwise = Answers(layer);
    bool changed = false;
    const auto run = layer.f64() ? RunReference<double> : RunReference<float>;
    if (Status status = run(layer, v.chunk, options.plant, workers, &chunkwise, &changed); !status.ok()) return status;
    if (!changed) return Refuse(StatusCode::kInvalidOption, "the planted error changes no number of this layer, so that there is nothing to see");
  }
  v.parallel_recurrent = LargestDifference(parallel, recurrent);
  v.chunkwise_recurrent = LargestDifference(chunkwise, recurrent);
  v.chunkwise_parallel = LargestDifference(chunkwise, parallel);

  progress(done, "algebra");
  v.algebra = ProveInAlgebra(layer, v.chunk, options.field_draws, options.seed, options.plant_in_algebra ? options.plant : Plant::kNone);

  const int64_t whole = std::max<int64_t>(contract::LongestSequence(layer), 1);
  const bool planted = options.plant != Plant::kNone && options.plant_in_floating_point;  // in the reference, which rounds no operand
  std::vector<Candidate> candidates = {parallel.candidate("parallel", whole, settled.operands), recurrent.candidate("recurrent", 1),
                                       chunkwise.candidate("chunkwise", v.chunk, planted ? Operands::kNotRounded : settled.operands)};
  // Nobody says by which form the expected answers came about, so they get the span of the parallel one: but where operands are rounded, for what is
  // computed so is computed in chunks, and errors that a whole sequence carries would hide much.
  const Operands operands = options.expected_operands;
  if (expected.out.given() || expected.final_state.given() || expected.final_key_sum.given())
    candidates.push_back({"expected", expected.out, expected.final_state, expected.final_key_sum, operands == Operands::kNotRounded ? whole : v.chunk,
                          options.tolerance, operands});
  const auto judging = [&](double fraction) { progress(kFormsDone + fraction * (1 - kFormsDone), "rounding noise"); };
  judging(0);
  if (Status status = JudgeCandidates(layer, candidates, options.noise_draws, options.seed, workers, judging, &v.judgements); !status.ok())
    return status;
  progress(1, "done");

  v.out = std::move(recurrent.out);
  v.final_state = std::move(recurrent.final_state);
  v.final_key_sum = std::move(recurrent.final_key_sum);
  *verdict = std::move(v);
  return {};
}

}  // namespace

namespace {

struct NamedOperands {
  Operands operands;
  int digits;
  std::string_view name;
};
constexpr NamedOperands kOperands[] = {
    {Operands::kNotRounded, 0, ""}, {Operands::kInBF16, 8, "bf16"}, {Operands::kInF16, 11, "f16"}, {Operands::kInTF32, 11, "tf32"}};

}  // namespace

int DigitsOf(Operands operands) { return kOperands[static_cast<size_t>(operands)].digits; }
std::string_view Name(Operands operands) { return kOperands[static_cast<size_t>(operands)].name; }
bool Find(std::string_view name, Operands* operands) {
  for (const NamedOperands& known : kOperands) {
    if (known.name != name || name.empty()) continue;
    *operands = known.operands;
    return true;
  }
  return false;
}

bool Verdict::same() const {
  return algebra.same() && !judgements.empty() &&
         std::all_of(judgements.begin(), judgements.end(), [](const Judgement& judgement) { return judgement.same; });
}

Status Verify(const VerifyOptions& options, const Inputs& inputs, const Expected& expected, Verdict* verdict) {
  try {
    return Run(options, inputs, expected, verdict);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "the proof needs more memory than there is"};
  }
}

}  // namespace tercet::proof
