#include "src/proof/judge.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "src/contract/tensor.hpp"
#include "src/proof/difference.hpp"
#include "src/proof/heads.hpp"
#include "src/proof/monte_carlo.hpp"
#include "src/proof/span_noise.hpp"
#include "src/reference/recurrent.hpp"

namespace tercet::proof {

namespace {

using reference::Answer;
using reference::Head;

// Work of a thread between two reports of progress, in numbers of the state that are updated: a second or two.
constexpr double kBatch = 1 << 28;
// Numbers of the state that the noisy runs of a small layer may update beyond the draws asked for, some hundredths of a second, and the draws that
// are enough: the spread of one number is known to a quarter from eight of them, and to a tenth from 64.
constexpr double kCheap = 1 << 22;
constexpr int kEnoughDraws = 64;
// Bytes that the heads and answers in work at once may take.
constexpr double kSlice = 1 << 28;

enum Tensors { kOut, kState, kKeySum, kTensorCount };
constexpr const char* kTensorNames[] = {"out", "final_state", "final_key_sum"};

// A state head of a sequence. Its answer is judged in parts, each a group of its own: out for each output head, the state, the key sum.
template <class T>
struct Unit {
  int64_t sequence = 0, s = 0;
  std::vector<int64_t> tokens;
  Head<T> head;
  Answer<T> truth;
  std::vector<std::vector<long double>> drawn;  // [kinds of operands, draws][parts], mean squares
  std::vector<std::vector<double>> carried;     // [candidates][parts], likewise, in squares of half a unit in the last place of 1

  int64_t parts() const { return head.G + (head.normalize ? 2 : 1); }
};

template <class T>
struct Numbers {
  const T* data;
  int64_t count;
};

Tensors TensorOf(int64_t part, int64_t G) { return part < G ? kOut : part == G ? kState : kKeySum; }

template <class T>
Numbers<T> PartOf(const Answer<T>& answer, int64_t part, int64_t G) {
  switch (TensorOf(part, G)) {
    case kOut: {
      const int64_t count = static_cast<int64_t>(answer.out.size()) / G;
      return {answer.out.data() + part * count, count};
    }
    case kState:
      return {answer.state.data(), static_cast<int64_t>(answer.state.size())};
    default:
      return {answer.z.data(), static_cast<int64_t>(answer.z.size())};
  }
}

// What a group comes to.
struct Group {
  Tensors tensor;
  std::vector<double> noise;            // for each candidate
  double largest = 0;                   // of the truth
  std::vector<Difference> differences;  // of each candidate
};

template <class W>
class Judge {
 public:
  using T = Wider<W>;

  Judge(const contract::Layer& layer, const std::vector<Candidate>& candidates, int draws, uint64_t seed)
      : layer_(layer),
        candidates_(candidates),
        draws_(std::max(draws, static_cast<int>(std::min<double>(kEnoughDraws, kCheap / Updates(layer))))),
        seed_(seed),
        narrower_(NarrowerOf(layer.dtype)) {
    for (const Candidate& candidate : candidates)
      if (std::find(digits_.begin(), digits_.end(), DigitsOf(candidate)) == digits_.end()) digits_.push_back(DigitsOf(candidate));
  }

  Status Run(const Workers& workers, const std::function<void(double)>& progress) {
    const int64_t units = layer_.sequences * layer_.state_heads;
    for (int64_t begin = 0; begin < units;) {
      // A slice of units whose heads and answers fit in memory together, at least one.
      std::vector<Unit<T>> slice;
      double bytes = 0, updates = 0;
      for (int64_t i = begin; i < units && (slice.empty() || bytes < kSlice); ++i) {
        slice.emplace_back();
        slice.back().sequence = i / layer_.state_heads;
        slice.back().s = i % layer_.state_heads;
        const contract::Sequence at = contract::SequenceAt(layer_, slice.back().sequence);
        const double n = static_cast<double>(at.end - at.begin), K = static_cast<double>(layer_.key_dim), V = static_cast<double>(layer_.value_dim);
        const double G = static_cast<double>(layer_.queries_per_state());
        bytes += (n * ((G + 4) * K + (G + 1) * V) + K * V) * static_cast<double>(sizeof(T));
        updates = std::max(updates, (n + 1) * K * V);
      }
      const auto count = static_cast<int64_t>(slice.size());
      const auto batch = static_cast<int64_t>(kBatch / updates);
      // Of runs + 2 passes over every unit, `passes` are done for this slice and `ran` pieces of the next one.
      const int64_t runs = Runs();
      const auto told = [&](int64_t passes) {
        return [&, passes](int64_t ran) {
          progress(static_cast<double>(begin * (runs + 2) + passes * count + ran) / static_cast<double>(units * (runs + 2)));
        };
      };
      if (Status status = workers.Run(
              count, batch, [&](int64_t i) { Prepare(&slice[i]); }, told(0));
          !status.ok())
        return status;
      const auto draw = [&](int64_t i) { Draw(&slice[i / runs], i % runs); };
      if (Status status = workers.Run(count * runs, batch, draw, told(1)); !status.ok()) return status;
      std::vector<std::vector<Group>> groups(count);
      if (Status status = workers.Run(
              count, batch, [&](int64_t i) { groups[i] = Compare(slice[i]); }, told(runs + 1));
          !status.ok())
        return status;
      for (std::vector<Group>& of_unit : groups) groups_.insert(groups_.end(), of_unit.begin(), of_unit.end());
      begin += count;
    }
    return {};
  }

  std::vector<Judgement> Judgements() const {
    std::array<double, kTensorCount> largest{};
    for (const Group& group : groups_) largest[group.tensor] = std::max(largest[group.tensor], group.largest);
    std::vector<Judgement> judgements;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      Judgement judgement;
      judgement.form = candidates_[i].form;
      judgement.operands = candidates_[i].operands;
      judgement.tensor = kTensorNames[kOut];
      bool first = true;
      for (const Group& group : groups_) {
        const Difference& d = group.differences[i];
        const double slack = candidates_[i].tolerance * largest[group.tensor];
        const bool differs = d.differs || d.masked > slack;
        if (d.count == 0 && !differs) continue;
        const double noise = group.noise[i] + slack / kLimit;
        const double distance = differs ? kInfinity : static_cast<double>(std::sqrt(d.MeanSquare()));
        const double quotient = distance / noise, ratio = std::isnan(quotient) ? kInfinity : quotient;
        judgement.largest = std::max(judgement.largest, differs ? kInfinity : d.largest);
        if (!first && ratio <= judgement.ratio) continue;
        first = false;
        judgement.tensor = kTensorNames[group.tensor];
        judgement.distance = distance;
        judgement.noise = noise;
        judgement.ratio = ratio;
      }
      judgement.same = judgement.ratio <= kLimit;
      judgements.push_back(judgement);
    }
    return judgements;
  }

 private:
  // Of the operands of a candidate's products, and the noisy runs of a unit: as many for each kind of operands.
  static int DigitsOf(const Candidate& candidate) {
    constexpr int kAll = std::numeric_limits<W>::digits;
    return candidate.operands == Operands::kNotRounded ? kAll : std::min(proof::DigitsOf(candidate.operands), kAll);
  }
  int64_t Runs() const { return static_cast<int64_t>(digits_.size()) * draws_; }
  const Narrower* NarrowerAt(int64_t part, int64_t G) const { return TensorOf(part, G) == kOut ? narrower_ : nullptr; }
  // The largest number that a part's dtype can hold, or what rounds to it.
  long double MostOf(int64_t part, int64_t G) const { return MostOfDtype<W>(NarrowerAt(part, G)); }

  // Numbers of all states that one run updates, at least 1.
  static double Updates(const contract::Layer& layer) {
    return static_cast<double>(layer.batch * layer.tokens * layer.state_heads + 1) * static_cast<double>(layer.key_dim) *
           static_cast<double>(layer.value_dim);
  }

  void Prepare(Unit<T>* unit) const {
    unit->tokens = ValidTokens(layer_, contract::SequenceAt(layer_, unit->sequence));
    unit->head = HeadOf<T>(layer_, unit->sequence, unit->tokens, unit->s);
    unit->drawn.resize(Runs());
    std::vector<SpanNoise<T>> spans;
    const bool removes = layer_.axes.update == Update::kDelta || layer_.axes.update == Update::kRankOne;
    for (const Candidate& candidate : candidates_)
      if (removes && candidate.span > 1) {
        const int fewer = std::numeric_limits<W>::digits - DigitsOf(candidate);
        spans.emplace_back(unit->head, candidate.span, std::numeric_limits<W>::max(), fewer > 0 ? std::ldexp(1.0, fewer) : 0);
      }
    reference::Exact<T> exact;
    unit->truth = reference::Recurrent(unit->head, exact, [&](int64_t t, const T* S) {
      for (SpanNoise<T>& span : spans) span.Add(t, S);
    });
    auto span = spans.begin();
    for (const Candidate& candidate : candidates_) {
      unit->carried.emplace_back(unit->parts(), 0.0);
      if (!removes || candidate.span <= 1) continue;
      for (int64_t g = 0; g < unit->head.G; ++g) unit->carried.back()[g] = span->OfOut(g);
      unit->carried.back()[unit->head.G] = span->OfState();
      ++span;
    }
  }

  // The head as the working precision can hold it: features, decay factors and the scale rounded at random, the inputs as they are. A decay that
  // tokens or channels share is rounded once for all of them.
  Head<W> Rounded(const Head<T>& h, uint64_t seed, MonteCarlo<W>* rounding) const {
    Head<W> r;
    r.update = h.update;
    r.normalize = h.normalize;
    r.n = h.n;
    r.K = h.K;
    r.V = h.V;
    r.G = h.G;
    rounding->Round(&h.scale, 1, &r.scale);
    const auto rows = [&](const std::vector<T>& from, std::vector<W>* to) {
      to->resize(from.size());
      for (size_t i = 0; i < from.size(); i += h.K) rounding->Round(from.data() + i, h.K, to->data() + i);
    };
    const auto given = [](const std::vector<T>& from, std::vector<W>* to) {
      to->reserve(from.size());
      for (const T x : from) to->push_back(static_cast<W>(x));
    };
    rows(h.q, &r.q);
    rows(h.k, &r.k);
    // A decay is rounded by its value: tokens and channels that decay alike share one error, as they do in any form. It is rounded twice, for so is
    // every product of factors that it goes into, likewise: once within half a unit of 1, and once to the working precision. 1 and 0 are exact in
    // both.
    r.D.reserve(h.D.size());
    for (const T D : h.D) {
      const uint64_t words = RandomWords::Mixed(seed ^ RandomWords::Mixed(std::bit_cast<uint64_t>(static_cast<double>(D))));
      const T shift = (static_cast<T>(words & 0xffffffff) * T(0x1p-32) - T(0.5)) * std::numeric_limits<W>::epsilon();
      r.D.push_back(RoundAtRandom<W>(D == 1 ? D : D + D * shift, static_cast<uint32_t>(words >> 32)));
    }
    given(h.v, &r.v);
    given(h.beta, &r.beta);
    given(h.remove, &r.remove);
    given(h.write, &r.write);
    given(h.bonus, &r.bonus);
    given(h.S0, &r.S0);
    given(h.z0, &r.z0);
    return r;
  }

  void Draw(Unit<T>* unit, int64_t draw) const {
    uint64_t seed = seed_;
    for (const int64_t part : {draw % draws_, unit->sequence, unit->s}) seed = RandomWords::Mixed(seed + static_cast<uint64_t>(part) + 1);
    MonteCarlo<W> rounding(seed, digits_[draw / draws_]);
    Answer<W> answer = reference::Recurrent(Rounded(unit->head, seed, &rounding), rounding, [](int64_t, const W*) {});
    // What is computed is f32; out is rounded once more.
    if constexpr (std::is_same_v<W, float>)
      if (narrower_ != nullptr) rounding.Narrow(*narrower_, answer.out.data(), static_cast<int64_t>(answer.out.size()));
    for (int64_t part = 0; part < unit->parts(); ++part) {
      const Numbers<T> truth = PartOf(unit->truth, part, unit->head.G);
      const Numbers<W> drawn = PartOf(answer, part, unit->head.G);
      Difference difference;
      for (int64_t i = 0; i < truth.count; ++i) difference.Add(truth.data[i], drawn.data[i], MostOf(part, unit->head.G));
      unit->drawn[draw].push_back(difference.MeanSquare());
    }
  }

  std::vector<Group> Compare(const Unit<T>& unit) const {
    std::vector<Group> groups;
    for (int64_t part = 0; part < unit.parts(); ++part) {
      Group group;
      group.tensor = TensorOf(part, unit.head.G);
      const Numbers<T> truth = PartOf(unit.truth, part, unit.head.G);
      Floor<W> floor(NarrowerAt(part, unit.head.G));
      for (int64_t i = 0; i < truth.count; ++i) floor.Add(truth.data[i]);
      std::vector<long double> means(digits_.size(), 0);
      for (size_t i = 0; i < unit.drawn.size(); ++i) means[i / draws_] += unit.drawn[i][part] / draws_;
      group.largest = floor.largest();
      for (size_t i = 0; i < candidates_.size(); ++i) {
        const auto kind = std::find(digits_.begin(), digits_.end(), DigitsOf(candidates_[i])) - digits_.begin();
        group.noise.push_back(floor.Noise(means[kind] + unit.carried[i][part] * kHalfAUnit<W> * kHalfAUnit<W>));
        group.differences.push_back(DifferenceOf(candidates_[i], unit, part, truth));
      }
      groups.push_back(group);
    }
    return groups;
  }

  Difference DifferenceOf(const Candidate& candidate, const Unit<T>& unit, int64_t part, Numbers<T> truth) const {
    const int64_t n = unit.head.n, V = unit.head.V, K = unit.head.K;
    const long double most = MostOf(part, unit.head.G);
    Difference difference;
    const auto add = [&](const ConstTensor& t, T number, int64_t offset) { difference.Add(number, contract::ReadDouble(t, offset), most); };
    switch (TensorOf(part, unit.head.G)) {
      case kOut: {
        const ConstTensor& t = candidate.out;
        if (!t.given()) break;
        const contract::Sequence at = contract::SequenceAt(layer_, unit.sequence);
        int64_t i = 0;
        for (int64_t token = at.begin; token < at.end; ++token) {
          const bool valid = i < n && unit.tokens[i] == token;
          for (int64_t e = 0; e < V; ++e) {
            const int64_t offset = contract::Offset(t, at.batch, token, unit.s * unit.head.G + part, e);
            if (valid) {
              add(t, truth.data[i * V + e], offset);
            } else {
              const double masked = std::abs(contract::ReadDouble(t, offset));
              difference.masked = std::isnan(masked) ? kInfinity : std::max(difference.masked, masked);
            }
          }
          i += valid;
        }
        break;
      }
      case kState:
        if (!candidate.final_state.given()) break;
        for (int64_t c = 0; c < K; ++c)
          for (int64_t e = 0; e < V; ++e)
            add(candidate.final_state, truth.data[c * V + e], contract::Offset(candidate.final_state, unit.sequence, unit.s, c, e));
        break;
      default:
        if (!candidate.final_key_sum.given()) break;
        for (int64_t c = 0; c < K; ++c)
          add(candidate.final_key_sum, truth.data[c], contract::Offset(candidate.final_key_sum, unit.sequence, unit.s, c));
    }
    return difference;
  }

  const contract::Layer& layer_;
  const std::vector<Candidate>& candidates_;
  const int draws_;  // for each kind of operands
  const uint64_t seed_;
  std::vector<int> digits_;         // of the operands of products, a kind each
  const Narrower* const narrower_;  // of out, where it is not held in W
  std::vector<Group> groups_;
};

template <class W>
Status JudgeIn(const contract::Layer& layer, const std::vector<Candidate>& candidates, int draws, uint64_t seed, const Workers& workers,
               const std::function<void(double)>& progress, std::vector<Judgement>* judgements) {
  Judge<W> judge(layer, candidates, draws, seed);
  if (Status status = judge.Run(workers, progress); !status.ok()) return status;
  *judgements = judge.Judgements();
  return {};
}

}  // namespace

Status JudgeCandidates(const contract::Layer& layer, const std::vector<Candidate>& candidates, int draws, uint64_t seed, const Workers& workers,
                       const std::function<void(double)>& progress, std::vector<Judgement>* judgements) {
  const auto judge = layer.f64() ? JudgeIn<double> : JudgeIn<float>;
  return judge(layer, candidates, draws, seed, workers, progress, judgements);
}

}  // namespace tercet::proof
