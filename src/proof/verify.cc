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
  Candidate candidate(std::string form, int64_t span) const {
    return {std::move(form), out.view(), final_state.view(), final_key_sum.view(), span, 0};
  }
};

// The chunk asked for; else 64, the tables' own size; where that would make one chunk of the whole sequence, one that makes several and a shorter
// last one.
int64_t ChooseChunk(int64_t asked, const contract::Layer& layer) {
  const int64_t n = contract::LongestSequence(layer), own = 64;
  if (asked > 0) return asked;
  if (n > own) return own;
  if (n > 16) return n % 16 != 0 ? 16 : 20;
  return std::max<int64_t>(1, (2 * n + 1) / 3);
}

// The targets that compute chunks of bf16 on Intel AMX.
bool OnTiles(std::string_view target) { return target.rfind("AMX", 0) == 0; }

// A plant that can change nothing would be a test that can't fail.
Status CheckPlant(const VerifyOptions& options, const contract::Layer& layer) {
  if (options.plant != Plant::kNone && contract::LongestSequence(layer) == 0)
    return Refuse(StatusCode::kInvalidOption, "an error is planted and there is no token to get wrong: give at least one");
  if (options.plant == Plant::kDecay && layer.axes.decay == Decay::kNone)
    return Refuse(StatusCode::kInvalidOption,
                  "plant is decay and " + std::string(Name(layer.rule)) + " has no decay that could be off by one: plant scale or mask");
  if (options.plant == Plant::kScale && layer.normalize)
    return Refuse(StatusCode::kInvalidOption,
                  "plant is scale and under normalize the scale cancels, so that leaving it out changes nothing: plant decay or mask");
  if (options.plant == Plant::kScale && layer.scale == 1)
    return Refuse(StatusCode::kInvalidOption,
                  "plant is scale and the scale is 1, so that leaving it out changes nothing: give another scale, or plant decay or mask");
  if (options.plant == Plant::kMask && layer.axes.update == Update::kAddReadBefore && layer.normalize && contract::LongestSequence(layer) <= 1 &&
      !layer.in.initial_state.given() && !layer.in.initial_key_sum.given())
    return Refuse(StatusCode::kInvalidOption,
                  "plant is mask and a first token of rwkv6 under normalize gives its own v whatever its weight, so that nothing changes: give more "
                  "tokens or a state");
  return {};
}

Status CheckOptions(const VerifyOptions& options) {
  if (options.field_draws < 1)
    return Refuse(StatusCode::kInvalidOption, "field_draws is " + std::to_string(options.field_draws) + " and must be at least 1");
  if (options.noise_draws < 1)
    return Refuse(StatusCode::kInvalidOption, "noise_draws is " + std::to_string(options.noise_draws) + " and must be at least 1");
  if (!(options.tolerance >= 0) || !std::isfinite(options.tolerance))
    return Refuse(StatusCode::kInvalidOption, "tolerance is " + std::to_string(options.tolerance) + " and must be finite and at least 0");
  return {};
}

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
  if (Status status = CheckOptions(options); !status.ok()) return status;
  Options attend = options.attend;
  attend.form = Form::kChunkwise;
  contract::Layer layer;
  if (Status status = contract::Validate(attend, inputs, nullptr, &layer); !status.ok()) return status;
  if (layer.f64() && std::numeric_limits<long double>::digits <= std::numeric_limits<double>::digits)
    return Refuse(StatusCode::kDtype, "q is f64 and must be f32 here: on this machine no floating type is more precise than f64 to judge it by");
  if (Status status = CheckPlant(options, layer); !status.ok()) return status;
  Verdict v;
  v.limit = kLimit;
  if (Status status = ChooseTarget(attend.target, &v.target); !status.ok()) return status;
  if (layer.dtype == Dtype::kBF16 && OnTiles(v.target)) {
    if (!attend.target.empty())
      return Refuse(StatusCode::kInvalidOption, "target is " + v.target +
                                                    " and must be another for bf16: products on tiles round every operand to bf16, and the noise "
                                                    "model has no term for that");
    for (const std::string& name : Targets()) {
      v.target = name;
      if (!OnTiles(name)) break;
    }
    attend.target = v.target;
  }
  attend.chunk = v.chunk = ChooseChunk(attend.chunk, layer);

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

  // Nobody says by which form the expected answers came about, so they get what the parallel one gets.
  const int64_t whole = std::max<int64_t>(contract::LongestSequence(layer), 1);
  std::vector<Candidate> candidates = {parallel.candidate("parallel", whole), recurrent.candidate("recurrent", 1),
                                       chunkwise.candidate("chunkwise", v.chunk)};
  if (expected.out.given() || expected.final_state.given() || expected.final_key_sum.given())
    candidates.push_back({"expected", expected.out, expected.final_state, expected.final_key_sum, whole, options.tolerance});
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
