#include "src/proof/verify_gradient.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <new>
#include <type_traits>
#include <utility>

#include "src/contract/tensor.hpp"
#include "src/proof/algebra.hpp"
#include "src/proof/difference.hpp"
#include "src/proof/gradient.hpp"
#include "src/proof/judge.hpp"
#include "src/proof/rounded.hpp"
#include "src/proof/settle.hpp"
#include "src/proof/span_noise.hpp"
#include "src/proof/workers.hpp"

namespace tercet::proof {

namespace {

// Numbers of the state that the noisy runs of a small layer may walk over beyond the draws asked for, some tenths of a second, and the draws that are
// enough, as for the forms themselves.
constexpr double kCheap = 1 << 21;
constexpr int kEnoughDraws = 64;
// Tokens of the shortest chunks whose products run on tiles.
constexpr int64_t kFewestOnTiles = 16;

// Gradients in the dtypes of their inputs, in the order of kGradientNames; the scale's is a number.
struct Stored {
  std::array<Owned, kGradients - 1> tensors;
  double scale = 0;

  explicit Stored(const contract::Layer& layer) {
    const Inputs& in = layer.in;
    const ConstTensor* inputs[] = {&in.q, &in.k, &in.v, &in.log_decay, &in.beta, &in.remove, &in.write, &in.bonus};
    for (size_t i = 0; i < std::size(inputs); ++i)
      if (inputs[i]->given())
        tensors[i] = Owned::Zeros(inputs[i]->dtype, std::vector<int64_t>(inputs[i]->shape.begin(), inputs[i]->shape.begin() + inputs[i]->rank));
    tensors[8] = Owned::Zeros(layer.state_dtype(), {layer.sequences, layer.state_heads, layer.key_dim, layer.value_dim});
    if (layer.normalize) tensors[9] = Owned::Zeros(layer.state_dtype(), {layer.sequences, layer.state_heads, layer.key_dim});
  }

  Gradients wanted() {
    const auto view = [&](size_t i) { return tensors[i].mutable_view(); };
    return {view(0), view(1), view(2), view(3), view(4), view(5), view(6), view(7), view(8), view(9), &scale};
  }
  Dtype dtype(int i) const { return i < kGradients - 1 ? tensors[i].dtype : Dtype::kF64; }
  double Get(int i, int64_t at) const { return i < kGradients - 1 ? tensors[i].Get(at) : scale; }
  void Set(int i, int64_t at, double value) {
    if (i < kGradients - 1)
      tensors[i].Set(at, value);
    else
      scale = value;
  }
  bool operator==(const Stored& other) const {
    for (size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].bytes != other.tensors[i].bytes) return false;
    return scale == other.scale;
  }
};

// The reference's gradients in the working precision, rounded to the dtypes they are stored in.
template <class W>
Stored ReferenceGradients(const contract::Layer& layer, const OutputGradients& given, Plant plant) {
  Stored stored(layer);
  InputGradients<W> gradients =
      GradientsOf<W>(layer, given, [&](const reference::Head<W>& h, const reference::Answer<W>& d) { return reference::GradientOf(h, d, plant); });
  const auto flat = FlatOf(gradients);
  for (int i = 0; i < kGradients; ++i)
    for (int64_t at = 0; at < flat[i].count; ++at) stored.Set(i, at, static_cast<double>(flat[i].data[at]));
  return stored;
}

struct Candidate {
  std::string form;
  Stored gradients;
  int64_t span = 1;  // tokens whose writes the form sums up before it looks at the state again
  Operands operands = Operands::kNotRounded;
};

// Judged in groups: of what belongs to tokens one head of one sequence, of the rest one head, or one head of one sequence, too.
template <class W>
class Judge {
  using T = Wider<W>;

 public:
  Judge(const contract::Layer& layer, const OutputGradients& given, const Stored& like) : layer_(layer), given_(given) {
    for (int64_t n = 0; n < layer.sequences; ++n) {
      const contract::Sequence at = contract::SequenceAt(layer, n);
      sequence_of_.resize(layer.batch * layer.tokens, -1);
      for (const int64_t token : ValidTokens(layer, at)) sequence_of_[at.batch * layer.tokens + token] = n;
    }
    for (int i = 0; i < kGradients; ++i) {
      Kind& kind = kinds_[i];
      if (i == kGradients - 1) continue;
      const std::vector<int64_t>& shape = like.tensors[i].shape;
      if (shape.empty()) continue;
      const int head = i == 3 && shape.size() == 1 ? 0 : i == 7 ? 0 : i >= 8 ? 1 : 2;
      kind.of_tokens = head == 2;
      kind.heads = shape[head];
      for (size_t axis = head + 1; axis < shape.size(); ++axis) kind.size *= shape[axis];
      kind.groups = kind.of_tokens ? layer.sequences * kind.heads : i >= 8 ? shape[0] * shape[1] : shape[0];
      kind.narrower = NarrowerOf(like.dtype(i));
    }
  }

  Status Run(const std::vector<Candidate>& candidates, int draws, uint64_t seed, const Workers& workers, const std::function<void(double)>& progress,
             std::vector<Judgement>* judgements) {
    const double updates = static_cast<double>(layer_.batch * layer_.tokens * layer_.state_heads + 1) * static_cast<double>(layer_.key_dim) *
                           static_cast<double>(layer_.value_dim);
    draws = std::max(draws, static_cast<int>(std::min<double>(kEnoughDraws, kCheap / updates)));
    InputGradients<T> truth;
    std::vector<std::vector<std::vector<Difference>>> drawn(draws);  // [draws][gradients][groups]
    const bool removes = layer_.axes.update == Update::kDelta || layer_.axes.update == Update::kRankOne;
    const auto spans = [&](const Candidate& candidate) { return removes && candidate.span > 1; };
    const auto rounds = [](const Candidate& candidate) { return candidate.operands != Operands::kNotRounded; };
    const auto any = [&](const auto& what) { return std::any_of(candidates.begin(), candidates.end(), what); };
    const int passes = 1 + (any(spans) ? 1 : 0) + (any(rounds) ? 1 : 0);
    const auto told = [&](int64_t done) { progress(static_cast<double>(done) / (passes * draws + 1)); };
    if (Status status = workers.Run(
            1, 1, [&](int64_t) { truth = GradientsOf<T>(layer_, given_); }, told);
        !status.ok())
      return status;
    const auto draw = [&](int64_t i) {
      Rounding rounding(RandomWords::Mixed(seed + static_cast<uint64_t>(i) + 1));
      InputGradients<Rounded<W>> noisy = GradientsOf<Rounded<W>>(layer_, given_);
      const auto flat = FlatOf(noisy);
      drawn[i] = Differences(truth, [&](int part, int64_t at) {
        W x = flat[part].data[at].value();
        if constexpr (std::is_same_v<W, float>)
          if (kinds_[part].narrower != nullptr) x = RoundAtRandom(*kinds_[part].narrower, x, rounding.Next());
        return static_cast<long double>(x);
      });
    };
    if (Status status = workers.Run(draws, 1, draw, [&](int64_t done) { told(done + 1); }); !status.ok()) return status;

    // What a span of a rule that removes adds to the noise, and what operands that are rounded do, drawn as often each. One candidate at most has
    // either, with a span of more than one token.
    std::vector<std::vector<std::vector<Difference>>> added;
    const auto add = [&](const auto& gradient_of) -> Status {
      const auto begin = static_cast<int64_t>(added.size());
      added.resize(begin + draws);
      const auto one = [&, begin](int64_t i) {
        uint64_t of_draw = RandomWords::Mixed(seed + static_cast<uint64_t>(i) + 1);
        InputGradients<T> erring = GradientsOf<T>(layer_, given_, [&](const reference::Head<T>& h, const reference::Answer<T>& d) {
          of_draw = RandomWords::Mixed(of_draw + 1);
          return gradient_of(h, d, of_draw);
        });
        const auto flat = FlatOf(erring);
        added[begin + i] = Differences(truth, [&](int part, int64_t at) { return static_cast<long double>(flat[part].data[at]); });
      };
      return workers.Run(draws, 1, one, [&](int64_t done) { told(draws + begin + 1 + done); });
    };
    for (const Candidate& candidate : candidates) {
      const auto carry = [&](const reference::Head<T>& h, const reference::Answer<T>& d, uint64_t of_draw) {
        return reference::GradientOf(h, d, Plant::kNone, SpanDraw<T>(h, candidate.span, static_cast<double>(kHalfAUnit<W>), of_draw));
      };
      if (spans(candidate))
        if (Status status = add(carry); !status.ok()) return status;
      const auto round = [&](reference::Head<T> h, reference::Answer<T> d, uint64_t of_draw) {
        OperandDraw<T> rounded(h, std::ldexp(1.0, -DigitsOf(candidate.operands)), of_draw);
        for (std::vector<T>* rows : {&h.q, &h.k, &h.v, &h.remove, &h.write, &d.out}) rounded.Round(rows);
        return reference::GradientOf(h, d, Plant::kNone, rounded);
      };
      if (rounds(candidate))
        if (Status status = add(round); !status.ok()) return status;
    }

    const auto flat = FlatOf(truth);
    for (const Candidate& candidate : candidates) {
      const auto differences = Differences(truth, [&](int part, int64_t at) { return candidate.gradients.Get(part, at); });
      for (int part = 0; part < kGradients; ++part) {
        if (flat[part].count == 0) continue;
        std::vector<Floor<W>> floors(kinds_[part].groups, Floor<W>(kinds_[part].narrower));
        for (int64_t at = 0; at < flat[part].count; ++at)
          if (const int64_t group = GroupOf(part, at); group >= 0) floors[group].Add(static_cast<long double>(flat[part].data[at]));
        std::vector<double> noise;
        for (int64_t group = 0; group < kinds_[part].groups; ++group) {
          long double variance = 0;
          for (const auto& one : drawn) variance += one[part][group].MeanSquare() / draws;
          for (size_t i = 0; candidate.span > 1 && i < added.size(); ++i) variance += added[i][part][group].MeanSquare() / draws;
          noise.push_back(floors[group].Noise(variance));
        }
        judgements->push_back(JudgementOf(candidate, part, differences[part], noise));
      }
    }
    return {};
  }

 private:
  struct Kind {
    bool of_tokens = false;
    int64_t heads = 1, size = 1;  // numbers of a head, of a token if it is of tokens
    int64_t groups = 1;
    const Narrower* narrower = nullptr;
  };

  // -1: of a token that is not valid.
  int64_t GroupOf(int part, int64_t at) const {
    const Kind& kind = kinds_[part];
    if (!kind.of_tokens) return at / kind.size;
    const int64_t sequence = sequence_of_[at / kind.size / kind.heads];
    return sequence < 0 ? -1 : sequence * kind.heads + at / kind.size % kind.heads;
  }

  // Of the numbers value(gradient, i) from the truth, [gradients][groups]. What belongs to tokens that are not valid counts for every group: there
  // must be zeros.
  template <class Value>
  std::vector<std::vector<Difference>> Differences(InputGradients<T>& truth, const Value& value) const {
    const auto flat = FlatOf(truth);
    std::vector<std::vector<Difference>> all(kGradients);
    for (int part = 0; part < kGradients; ++part) {
      std::vector<Difference>& groups = all[part];
      groups.resize(kinds_[part].groups);
      const long double most = MostOfDtype<W>(kinds_[part].narrower);
      bool masked = false;
      for (int64_t at = 0; at < flat[part].count; ++at) {
        if (const int64_t group = GroupOf(part, at); group >= 0)
          groups[group].Add(static_cast<long double>(flat[part].data[at]), value(part, at), most);
        else
          masked |= !(value(part, at) == 0);
      }
      for (Difference& group : groups) group.differs |= masked;
    }
    return all;
  }

  static Judgement JudgementOf(const Candidate& candidate, int part, const std::vector<Difference>& groups, const std::vector<double>& noise) {
    Judgement judgement;
    judgement.form = candidate.form;
    judgement.operands = candidate.operands;
    judgement.tensor = kGradientNames[part];
    bool first = true;
    for (size_t group = 0; group < groups.size(); ++group) {
      const Difference& d = groups[group];
      if (d.count == 0 && !d.differs) continue;
      const double distance = d.differs ? kInfinity : static_cast<double>(std::sqrt(d.MeanSquare()));
      const double quotient = distance / noise[group], ratio = std::isnan(quotient) ? kInfinity : quotient;
      judgement.largest = std::max(judgement.largest, d.differs ? kInfinity : d.largest);
      if (!first && ratio <= judgement.ratio) continue;
      first = false;
      judgement.distance = distance;
      judgement.noise = noise[group];
      judgement.ratio = ratio;
    }
    judgement.same = judgement.ratio <= kLimit;
    return judgement;
  }

  const contract::Layer& layer_;
  const OutputGradients& given_;
  std::vector<int64_t> sequence_of_;  // [B, T], -1 where a token is not valid
  std::array<Kind, kGradients> kinds_;
};

template <class W>
Status Run(const VerifyOptions& options, const Settled& settled, const Inputs& inputs, GradientVerdict* verdict) {
  const auto progress = [&](double fraction, std::string_view doing) {
    if (options.progress) options.progress(fraction, doing);
  };
  const contract::Layer& layer = settled.layer;
  const OwnedOutputGradients drawn = RandomOutputGradients(layer, options.seed);
  const OutputGradients given = drawn.view();
  std::vector<Candidate> candidates;
  for (const Form form : {Form::kRecurrent, Form::kChunkwise}) {
    if (options.attend.form != Form::kAutomatic && options.attend.form != form) continue;
    progress(0, Name(form));
    Options attend = settled.attend;
    attend.form = form;
    if (form == Form::kRecurrent) attend.chunk = 0;
    const int64_t span = form == Form::kChunkwise ? attend.chunk : 1;
    candidates.push_back({std::string(Name(form)), Stored(layer), span, span >= kFewestOnTiles ? settled.operands : Operands::kNotRounded});
    if (Status status = AttendGradient(attend, inputs, given, candidates.back().gradients.wanted()); !status.ok()) return status;
  }
  if (options.plant != Plant::kNone && options.plant_in_floating_point) {
    candidates.back().operands = Operands::kNotRounded;
    candidates.back().gradients = ReferenceGradients<W>(layer, given, options.plant);
    if (candidates.back().gradients == ReferenceGradients<W>(layer, given, Plant::kNone))
      return {StatusCode::kInvalidOption, "the planted error changes no number of these gradients, so that there is nothing to see"};
  }

  progress(0.03, "algebra");
  verdict->algebra = ProveGradientInAlgebra(layer, options.field_draws, options.seed, options.plant_in_algebra ? options.plant : Plant::kNone);
  const auto judging = [&](double fraction) { progress(0.06 + fraction * 0.94, "rounding noise"); };
  judging(0);
  Judge<W> judge(layer, given, Stored(layer));
  const Workers workers(settled.attend.executor, settled.attend.threads);
  return judge.Run(candidates, options.noise_draws, options.seed, workers, judging, &verdict->judgements);
}

}  // namespace

bool GradientVerdict::same() const {
  return algebra.same && !judgements.empty() &&
         std::all_of(judgements.begin(), judgements.end(), [](const Judgement& judgement) { return judgement.same; });
}

Status VerifyGradient(const VerifyOptions& options, const Inputs& inputs, GradientVerdict* verdict) {
  try {
    contract::GradientLayer checked;
    if (Status status = contract::ValidateGradient(options.attend, inputs, {}, {}, &checked); !status.ok()) return status;
    if (options.plant != Plant::kNone && options.attend.form == Form::kRecurrent)
      return {StatusCode::kInvalidOption, "form is recurrent and must be automatic or chunkwise: an error is planted in the chunkwise form"};
    Settled settled;
    if (Status status = Settle(options, inputs, &settled); !status.ok()) return status;
    GradientVerdict v;
    v.limit = kLimit;
    v.target = settled.target;
    v.chunk = settled.attend.chunk;
    const auto run = settled.layer.f64() ? Run<double> : Run<float>;
    if (Status status = run(options, settled, inputs, &v); !status.ok()) return status;
    *verdict = std::move(v);
    return {};
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "the proof needs more memory than there is"};
  }
}

}  // namespace tercet::proof
