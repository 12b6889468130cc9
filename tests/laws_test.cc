// What must hold whatever the numbers are: forms and chunk sizes agree, pieces make the whole, rules are ladders of each other, the future changes no
// earlier bit, nor does the number of threads, views are what they show, and what is not a number stays where the formula carries it.
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <limits>

#include "tests/support.hpp"

namespace tercet::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

RandomSpec Spec(Rule rule, int64_t tokens = 50) {
  RandomSpec spec;
  spec.rule = rule;
  spec.tokens = tokens;
  spec.key_dim = 20;
  spec.value_dim = 37;
  spec.heads = 2;
  spec.seed = 11;
  return spec;
}

std::vector<Options> AllForms(Rule rule, int64_t chunk = 16) {
  std::vector<Options> all;
  for (const Form form : {Form::kRecurrent, Form::kChunkwise, Form::kParallel}) {
    Options options;
    options.rule = rule;
    options.form = form;
    if (form == Form::kChunkwise) options.chunk = chunk;
    all.push_back(options);
  }
  return all;
}

// Tokens begin .. end - 1 of a view [B, T, ...].
ConstTensor Tokens(ConstTensor t, int64_t begin, int64_t end) {
  if (t.rank < 3) return t;
  t.data = static_cast<const std::byte*>(t.data) + begin * t.strides[1] * contract::SizeOf(t.dtype);
  t.shape[1] = end - begin;
  return t;
}
Inputs Tokens(Inputs in, int64_t begin, int64_t end) {
  for (ConstTensor* t : {&in.q, &in.k, &in.v, &in.log_decay, &in.beta, &in.remove, &in.write}) *t = Tokens(*t, begin, end);
  if (in.valid.given()) {
    in.valid.data = static_cast<const std::byte*>(in.valid.data) + begin * in.valid.strides[1];
    in.valid.shape[1] = end - begin;
  }
  return in;
}

// Element [b, t, h, c] of a dense tensor.
int64_t At(const Owned& t, int64_t b, int64_t token, int64_t head, int64_t channel) {
  return ((b * t.shape[1] + token) * t.shape[2] + head) * t.shape[3] + channel;
}

class EveryRule : public testing::TestWithParam<Rule> {};
INSTANTIATE_TEST_SUITE_P(Laws, EveryRule, testing::ValuesIn([] {
                           std::vector<Rule> rules;
                           for (const RuleInfo& one : Rules()) rules.push_back(one.rule);
                           return rules;
                         }()),
                         [](const auto& instance) { return std::string(Name(instance.param)); });

TEST_P(EveryRule, FormsAndChunkSizesAgree) {
  const OwnedInputs inputs = RandomInputs(Spec(GetParam(), 130));
  Options options;
  options.rule = GetParam();
  options.form = Form::kRecurrent;
  const Answers recurrent = AsAnswers(Compute(options, inputs.view()));
  options.form = Form::kParallel;
  ExpectNear(Compute(options, inputs.view()), recurrent, Tolerance(Dtype::kF32, 130, 20));
  options.form = Form::kAutomatic;
  ExpectNear(Compute(options, inputs.view()), recurrent, Tolerance(Dtype::kF32, 130, 20));
  options.form = Form::kChunkwise;
  for (const int64_t chunk : {0, 1, 2, 7, 15, 16, 17, 31, 32, 64, 100, 129, 130, 131, 1000000}) {
    SCOPED_TRACE(chunk);
    options.chunk = chunk;
    ExpectNear(Compute(options, inputs.view()), recurrent, Tolerance(Dtype::kF32, 130, 20));
  }
}

TEST_P(EveryRule, PiecesMakeTheWhole) {
  const OwnedInputs inputs = RandomInputs(Spec(GetParam(), 90));
  for (Options options : AllForms(GetParam())) {
    SCOPED_TRACE(Name(options.form));
    const Results whole = Compute(options, inputs.view());
    Results pieces = Room(options, inputs.view());
    options.executor = UsualExecutor();
    int64_t begin = 0;
    for (const int64_t end : {0, 1, 30, 31, 90}) {
      Inputs in = Tokens(inputs.view(), begin, end);
      Outputs out = pieces.view();
      out.out.data = static_cast<std::byte*>(out.out.data) + begin * out.out.strides[1] * 4;
      out.out.shape[1] = end - begin;
      if (end > 0 || begin > 0) in.initial_state = pieces.final_state.view();
      if (begin == 0) in.initial_state = inputs.initial_state.view();
      const Status status = Attend(options, in, out);  // from the second piece on the state is written over itself
      ASSERT_TRUE(status.ok()) << status.message;
      begin = end;
    }
    if (options.form == Form::kRecurrent)
      ExpectSameBits(pieces, whole);
    else
      ExpectNear(pieces, AsAnswers(whole), Tolerance(Dtype::kF32, 90, 20));
  }
}

// A token alone is computed on the state where it lies, unless its columns lie apart; with several queries a state, written over or not.
TEST_P(EveryRule, OneTokenOnAStateInPlaceGivesTheSameBits) {
  for (const std::string& target : Targets())
    for (const auto& [key_dim, value_dim] : {std::pair<int64_t, int64_t>{33, 64}, {64, 80}, {5, 16}, {128, 128}}) {
      SCOPED_TRACE(target + " " + std::to_string(key_dim) + " " + std::to_string(value_dim));
      RandomSpec spec = Spec(GetParam(), 1);
      spec.key_dim = key_dim;
      spec.value_dim = value_dim;
      spec.batch = 2;
      spec.q_heads = 6;  // three a state
      const OwnedInputs inputs = RandomInputs(spec);
      Options options;
      options.rule = GetParam();
      options.form = Form::kRecurrent;
      options.target = target;
      options.executor = UsualExecutor();
      const Results in_place = Compute(options, inputs.view());
      ExpectNear(in_place, Oracle<double>(options, inputs.view()), Tolerance(Dtype::kF32, 1, key_dim));

      Results over = Room(options, inputs.view());
      over.final_state = inputs.initial_state;
      Inputs in = inputs.view();
      in.initial_state = over.final_state.view();
      ASSERT_TRUE(Attend(options, in, over.view()).ok());
      ExpectSameBits(over, in_place);

      // The same state with every second column left out: that one is copied.
      Owned wide = Owned::Zeros(Dtype::kF32, {2, spec.heads, key_dim, 2 * value_dim});
      for (int64_t i = 0; i < inputs.initial_state.size(); ++i) wide.Set(2 * i, inputs.initial_state.Get(i));
      in.initial_state = wide.view();
      in.initial_state.shape[3] = value_dim;
      in.initial_state.strides[3] = 2;
      ExpectSameBits(Compute(options, in), in_place);
    }
}

TEST_P(EveryRule, TheFutureChangesNoEarlierBit) {
  const OwnedInputs inputs = RandomInputs(Spec(GetParam(), 100));
  RandomSpec other = Spec(GetParam(), 100);
  other.seed = 99;
  const OwnedInputs others = RandomInputs(other);
  for (const int64_t chunk : {1, 16, 24, 64, 100})
    for (const Options& options : AllForms(GetParam(), chunk))
      for (const int64_t cut : {1, 2, 15, 16, 17, 40, 63, 64, 65, 99}) {
        SCOPED_TRACE(std::string(Name(options.form)) + " chunk " + std::to_string(chunk) + " cut " + std::to_string(cut));
        const Results whole = Compute(options, inputs.view());
        const Results shorter = Compute(options, Tokens(inputs.view(), 0, cut));
        OwnedInputs mixed = inputs;  // the same up to the cut, then others
        const std::pair<Owned*, const Owned*> tensors[] = {
            {&mixed.q, &others.q},       {&mixed.k, &others.k},           {&mixed.v, &others.v},        {&mixed.log_decay, &others.log_decay},
            {&mixed.beta, &others.beta}, {&mixed.remove, &others.remove}, {&mixed.write, &others.write}};
        for (const auto& [to, from] : tensors) {
          if (to->shape.size() < 3) continue;
          const size_t token = to->bytes.size() / static_cast<size_t>(to->shape[1]);
          std::memcpy(to->bytes.data() + cut * token, from->bytes.data() + cut * token, (100 - cut) * token);
        }
        const Results changed = Compute(options, mixed.view());
        const size_t bytes = shorter.out.bytes.size();
        EXPECT_EQ(std::memcmp(whole.out.bytes.data(), shorter.out.bytes.data(), bytes), 0) << "appending tokens changed earlier bits";
        EXPECT_EQ(std::memcmp(whole.out.bytes.data(), changed.out.bytes.data(), bytes), 0) << "changing tokens changed earlier bits";
      }
}

TEST_P(EveryRule, AnyNumberOfThreadsGivesTheSameBits) {
  for (const int64_t heads : {1, 3}) {
    RandomSpec spec = Spec(GetParam(), 70);
    spec.heads = heads;
    spec.batch = 2;
    spec.key_dim = 64;
    spec.value_dim = 300;  // several panels for every target, the last one not whole
    const OwnedInputs inputs = RandomInputs(spec);
    for (Options options : AllForms(GetParam())) {
      SCOPED_TRACE(Name(options.form));
      ThreadExecutor one(1);
      options.executor = &one;
      const Results alone = Compute(options, inputs.view());
      for (const int threads : {2, 3, 5, 16}) {
        ThreadExecutor many(threads);
        options.executor = &many;
        ExpectSameBits(Compute(options, inputs.view()), alone);
      }
      options.executor = UsualExecutor();
      options.threads = 2;
      ExpectSameBits(Compute(options, inputs.view()), alone);
    }
  }
}

// ---- Ladders --------------------------------------------------------------------------------------------------------------------------------

// The same log decay for all channels.
Owned OverChannels(const Owned& per_step, int64_t channels) {
  Owned wide = Owned::Zeros(per_step.dtype, {per_step.shape[0], per_step.shape[1], per_step.shape[2], channels});
  for (int64_t i = 0; i < wide.size(); ++i) wide.Set(i, per_step.Get(i / channels));
  return wide;
}

void ExpectLadder(Rule lower, const OwnedInputs& lower_inputs, Rule upper, const OwnedInputs& upper_inputs) {
  for (const Options& low : AllForms(lower)) {
    Options high = low;
    high.rule = upper;
    SCOPED_TRACE(std::string(Name(lower)) + " and " + std::string(Name(upper)) + ", " + std::string(Name(low.form)));
    high.scale = 0.25;
    Options scaled = low;
    scaled.scale = 0.25;
    ExpectNear(Compute(high, upper_inputs.view()), AsAnswers(Compute(scaled, lower_inputs.view())), Tolerance(Dtype::kF32, 50, 20));
  }
}

TEST(Ladder, EqualChannelsAreOneDecayAStep) {
  OwnedInputs step = RandomInputs(Spec(Rule::kGatedDelta)), channels = step;
  channels.log_decay = OverChannels(step.log_decay, 20);
  ExpectLadder(Rule::kGatedDelta, step, Rule::kKda, channels);
  step.beta = channels.beta = {};
  ExpectLadder(Rule::kSimpleGla, step, Rule::kGla, channels);
}

TEST(Ladder, NoDecay) {
  const OwnedInputs delta = RandomInputs(Spec(Rule::kDelta));
  OwnedInputs gated = delta;
  gated.log_decay = Owned::Zeros(Dtype::kF32, {1, 50, 2});
  ExpectLadder(Rule::kDelta, delta, Rule::kGatedDelta, gated);
  OwnedInputs linear = delta, simple = gated, retention = delta;
  linear.beta = simple.beta = retention.beta = {};
  ExpectLadder(Rule::kLinear, linear, Rule::kSimpleGla, simple);
  retention.log_decay = Owned::Zeros(Dtype::kF32, {2});
  ExpectLadder(Rule::kLinear, linear, Rule::kRetention, retention);
}

TEST(Ladder, AConstantDecayIsRetention) {
  const OwnedInputs retention = RandomInputs(Spec(Rule::kRetention));
  OwnedInputs simple = retention;
  simple.log_decay = Owned::Zeros(Dtype::kF32, {1, 50, 2});
  for (int64_t i = 0; i < 100; ++i) simple.log_decay.Set(i, retention.log_decay.Get(i % 2));
  ExpectLadder(Rule::kRetention, retention, Rule::kSimpleGla, simple);
}

TEST(Ladder, KdaIsARankOneUpdate) {
  // S = D S + w (r' S) + k u' with r = D k, w = -beta k, u = beta v: rwkv7 with k taken as beta k.
  const OwnedInputs kda = RandomInputs(Spec(Rule::kKda));
  OwnedInputs rwkv7 = kda;
  rwkv7.beta = {};
  rwkv7.remove = rwkv7.write = kda.k;
  for (int64_t i = 0; i < kda.k.size(); ++i) {
    const double k = kda.k.Get(i), beta = kda.beta.Get(i / 20);
    rwkv7.remove.Set(i, k * std::exp(kda.log_decay.Get(i)));
    rwkv7.write.Set(i, -beta * k);
    rwkv7.k.Set(i, beta * k);
  }
  ExpectLadder(Rule::kKda, kda, Rule::kRwkv7, rwkv7);
}

// ---- Sequences, valid tokens, heads -----------------------------------------------------------------------------------------------------------

// One of them of a single token, whose state is computed in place where its columns are whole vectors.
TEST_P(EveryRule, PackedSequencesAreSeparateCalls) {
  for (const int64_t columns : {37, 64}) {
    RandomSpec spec = Spec(GetParam(), 60);
    spec.value_dim = columns;
    spec.offsets = {0, 0, 17, 18, 60, 60};
    const OwnedInputs inputs = RandomInputs(spec);
    for (const Options& options : AllForms(GetParam())) {
      SCOPED_TRACE(std::string(Name(options.form)) + " " + std::to_string(columns));
      const Results packed = Compute(options, inputs.view());
      for (int64_t n = 0; n < 5; ++n) {
        Inputs in = Tokens(inputs.view(), spec.offsets[n], spec.offsets[n + 1]);
        in.offsets = {};
        in.initial_state.data = static_cast<const std::byte*>(in.initial_state.data) + n * in.initial_state.strides[0] * 4;
        in.initial_state.shape[0] = 1;
        const Results alone = Compute(options, in);
        const int64_t token = 2 * columns * 4, state = 2 * 20 * columns * 4;
        EXPECT_TRUE(std::equal(alone.out.bytes.begin(), alone.out.bytes.end(), packed.out.bytes.begin() + spec.offsets[n] * token));
        EXPECT_EQ(std::memcmp(packed.final_state.bytes.data() + n * state, alone.final_state.bytes.data(), state), 0);
      }
    }
  }
}

TEST_P(EveryRule, InvalidTokensAreAsIfAbsentWhateverTheyHold) {
  RandomSpec spec = Spec(GetParam(), 60);
  spec.batch = 2;
  OwnedInputs whole = RandomInputs(spec);
  whole.valid = Owned::Zeros(Dtype::kBool, {2, 60});
  std::vector<int64_t> kept;  // of both rows of the batch, so that the shorter layer is a tensor again
  for (int64_t t = 0; t < 60; ++t)
    if (t % 7 < 3 || (t > 30 && t < 50)) kept.push_back(t);
  for (const int64_t t : kept) whole.valid.Set(t, 1), whole.valid.Set(60 + t, 1);
  OwnedInputs shorter = whole;
  shorter.valid = {};
  for (Owned OwnedInputs::*tensor :
       {&OwnedInputs::q, &OwnedInputs::k, &OwnedInputs::v, &OwnedInputs::log_decay, &OwnedInputs::beta, &OwnedInputs::remove, &OwnedInputs::write}) {
    Owned& from = whole.*tensor;
    if (from.shape.size() < 3) continue;
    std::vector<int64_t> shape = from.shape;
    shape[1] = static_cast<int64_t>(kept.size());
    Owned to = Owned::Zeros(from.dtype, shape);
    const int64_t token = from.size() / 120;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < shape[1]; ++i)
        for (int64_t c = 0; c < token; ++c) to.Set((b * shape[1] + i) * token + c, from.Get((b * 60 + kept[i]) * token + c));
      for (int64_t t = 0; t < 60; ++t)
        if (whole.valid.Get(t) == 0)
          for (int64_t c = 0; c < token; ++c) from.Set((b * 60 + t) * token + c, c % 2 == 0 ? kNan : kInfinity);
    }
    shorter.*tensor = to;
  }
  for (const Options& options : AllForms(GetParam())) {
    SCOPED_TRACE(Name(options.form));
    const Results masked = Compute(options, whole.view()), absent = Compute(options, shorter.view());
    EXPECT_TRUE(SameBits(masked.final_state, absent.final_state));
    for (int64_t b = 0; b < 2; ++b) {
      size_t next = 0;
      for (int64_t t = 0; t < 60; ++t) {
        const bool valid = whole.valid.Get(t) != 0;
        for (int64_t h = 0; h < 2; ++h)
          for (int64_t c = 0; c < 37; ++c)
            ASSERT_EQ(masked.out.Get(At(masked.out, b, t, h, c)), valid ? absent.out.Get(At(absent.out, b, static_cast<int64_t>(next), h, c)) : 0.0);
        next += valid;
      }
    }
  }
}

// [B, T, H, ...] with every head `times` times.
Owned Repeated(const Owned& from, int64_t times) {
  std::vector<int64_t> shape = from.shape;
  if (shape.size() < 3) return from;
  shape[2] *= times;
  Owned to = Owned::Zeros(from.dtype, shape);
  const int64_t channels = shape.size() > 3 ? shape[3] : 1;
  for (int64_t i = 0; i < to.size(); ++i) {
    const int64_t head = i / channels % shape[2], row = i / channels / shape[2];
    to.Set(i, from.Get((row * from.shape[2] + head / times) * channels + i % channels));
  }
  return to;
}

TEST_P(EveryRule, GroupedHeadsAreRepeatedHeads) {
  struct Case {
    int64_t q, k, v, gates;
  };
  for (const Case heads :
       {Case{6, 2, 2, 2}, Case{6, 2, 2, 1}, Case{2, 2, 6, 6}, Case{1, 2, 4, 2}, Case{3, 6, 3, 1}, Case{8, 4, 1, 4}, Case{6, 6, 6, 3}}) {
    SCOPED_TRACE(std::to_string(heads.q) + " " + std::to_string(heads.k) + " " + std::to_string(heads.v) + " " + std::to_string(heads.gates));
    RandomSpec spec = Spec(GetParam(), 33);
    spec.q_heads = heads.q, spec.k_heads = heads.k, spec.v_heads = heads.v, spec.gate_heads = heads.gates;
    const OwnedInputs grouped = RandomInputs(spec);
    const int64_t state = std::max(heads.k, heads.v), out = std::max(heads.q, state);
    // Every output head gets a state of its own.
    OwnedInputs repeated = grouped;
    repeated.q = Repeated(grouped.q, out / heads.q);
    repeated.k = Repeated(grouped.k, out / heads.k);
    repeated.v = Repeated(grouped.v, out / heads.v);
    for (Owned OwnedInputs::*gate : {&OwnedInputs::log_decay, &OwnedInputs::beta, &OwnedInputs::remove, &OwnedInputs::write})
      repeated.*gate = Repeated(grouped.*gate, out / heads.gates);
    for (const auto& [gate, columns] : {std::pair{&OwnedInputs::log_decay, int64_t{1}}, std::pair{&OwnedInputs::bonus, int64_t{20}}}) {
      const Owned& from = grouped.*gate;  // [H] of retention, and the bonus [H, K]
      if (from.shape.empty() || from.shape.size() > 2) continue;
      Owned to = Owned::Zeros(from.dtype, columns == 1 ? std::vector<int64_t>{out} : std::vector<int64_t>{out, columns});
      for (int64_t i = 0; i < to.size(); ++i) to.Set(i, from.Get(i / columns / (out / heads.gates) * columns + i % columns));
      repeated.*gate = to;
    }
    const int64_t size = 20 * 37;
    repeated.initial_state = Owned::Zeros(Dtype::kF32, {1, out, 20, 37});
    for (int64_t i = 0; i < out * size; ++i) repeated.initial_state.Set(i, grouped.initial_state.Get(i / size / (out / state) * size + i % size));
    for (const Options& options : AllForms(GetParam())) {
      const Results g = Compute(options, grouped.view()), r = Compute(options, repeated.view());
      EXPECT_TRUE(SameBits(g.out, r.out)) << Name(options.form);
      for (int64_t i = 0; i < state * size; ++i)
        ASSERT_EQ(g.final_state.Get(i), r.final_state.Get(i / size * (out / state) * size + i % size)) << Name(options.form);
    }
  }
}

// ---- Views ------------------------------------------------------------------------------------------------------------------------------------

TEST_P(EveryRule, StridesMayBeAnything) {
  const OwnedInputs inputs = RandomInputs(Spec(GetParam(), 33));
  for (const Options& options : AllForms(GetParam())) {
    SCOPED_TRACE(Name(options.form));
    const Results dense = Compute(options, inputs.view());
    std::vector<Scattered> memory;
    memory.reserve(9);
    Inputs in = inputs.view();
    for (ConstTensor* t : {&in.q, &in.k, &in.v, &in.log_decay, &in.beta, &in.remove, &in.write, &in.bonus, &in.initial_state})
      *t = memory.emplace_back(*t).view();
    Results strange = Room(options, inputs.view());
    Scattered out_rows(strange.out.view()), states(strange.final_state.view());
    Outputs out;
    out.out = out_rows.mutable_view();
    out.final_state = states.mutable_view();
    Options with = options;
    with.executor = UsualExecutor();
    const Status status = Attend(with, in, out);
    ASSERT_TRUE(status.ok()) << status.message;
    out_rows.Gather();
    states.Gather();
    ExpectSameBits(strange, dense);
  }
}

TEST_P(EveryRule, AStateThatLiesTurnedGivesTheSameBits) {
  for (const std::string& target : Targets())
    for (const auto& [tokens, key_dim, value_dim] : {std::array<int64_t, 3>{1, 64, 128}, {1, 5, 37}, {1, 33, 64}, {33, 20, 37}, {33, 64, 16}})
      for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16})
        for (Options options : AllForms(GetParam())) {
          SCOPED_TRACE(target + " " + std::to_string(tokens) + " " + std::to_string(key_dim) + " " + std::string(Name(dtype)) + " " +
                       std::string(Name(options.form)));
          RandomSpec spec = Spec(GetParam(), tokens);
          spec.dtype = dtype;
          spec.key_dim = key_dim;
          spec.value_dim = value_dim;
          const OwnedInputs inputs = RandomInputs(spec);
          options.target = target;
          options.executor = UsualExecutor();
          const Results dense = Compute(options, inputs.view());
          Results results = Room(options, inputs.view());
          const Scattered before(inputs.initial_state.view(), Scattered::kTurned);
          Scattered after(results.final_state.view(), Scattered::kTurned);
          Inputs in = inputs.view();
          in.initial_state = before.view();
          Outputs out = results.view();
          out.final_state = after.mutable_view();
          const Status status = Attend(options, in, out);
          ASSERT_TRUE(status.ok()) << status.message;
          after.Gather();
          ExpectSameBits(results, dense);
        }
}

TEST(Views, ManyIntoOneBufferAndStrideZero) {
  // q, k and v as columns of one [B, T, 3, H, D] buffer; one query and one decay for all tokens by stride 0.
  RandomSpec spec = Spec(Rule::kGla, 40);
  spec.key_dim = spec.value_dim = 24;
  OwnedInputs inputs = RandomInputs(spec);
  std::vector<float> buffer(40 * 3 * 2 * 24);
  for (int64_t t = 0; t < 40; ++t)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t c = 0; c < 24; ++c) {
        for (int64_t which = 0; which < 3; ++which) {
          const Owned& from = which == 0 ? inputs.q : which == 1 ? inputs.k : inputs.v;
          buffer[((t * 3 + which) * 2 + h) * 24 + c] = static_cast<float>(from.Get(At(from, 0, t, h, c)));
        }
        inputs.log_decay.Set(At(inputs.log_decay, 0, t, h, c), inputs.log_decay.Get(At(inputs.log_decay, 0, 0, h, c)));
      }
  for (const Options& options : AllForms(Rule::kGla)) {
    const Results dense = Compute(options, inputs.view());
    Inputs in = inputs.view();
    for (int which = 0; which < 3; ++which) {
      ConstTensor& t = which == 0 ? in.q : which == 1 ? in.k : in.v;
      t.data = buffer.data() + which * 48;
      t.strides[1] = 3 * 48;
    }
    in.log_decay.strides[1] = 0;
    ExpectSameBits(Compute(options, in), dense);
    in.k = in.q;  // one view for two tensors
    in.log_decay.strides[3] = 0;
    EXPECT_TRUE(std::isfinite(Compute(options, in).out.Get(0)));
  }
}

TEST(Views, OffsetsPastTwoToTheThirtyOne) {
  // Rows 2^31 + 12 elements apart in a mapping of which only the pages that are touched exist.
  const int64_t tokens = 3, K = 5, V = 7, apart = (int64_t{1} << 31) + 12;
  const size_t bytes = static_cast<size_t>(apart * tokens + 64) * 4;
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  float* far = static_cast<float*>(mapping);
  RandomSpec spec;
  spec.rule = Rule::kLinear;
  spec.tokens = tokens;
  spec.key_dim = K;
  spec.value_dim = V;
  spec.heads = 1;
  const OwnedInputs inputs = RandomInputs(spec);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < K; ++c) far[t * apart + c] = static_cast<float>(inputs.q.Get(t * K + c));
    for (int64_t c = 0; c < V; ++c) far[t * apart + 16 + c] = static_cast<float>(inputs.v.Get(t * V + c));
  }
  for (const Options& options : AllForms(Rule::kLinear)) {
    const Results dense = Compute(options, inputs.view());
    Inputs in = inputs.view();
    in.q.data = far;
    in.v.data = far + 16;
    in.q.strides[1] = in.v.strides[1] = apart;
    Results results = Room(options, inputs.view());
    Outputs out = results.view();
    out.out.data = far + 32;
    out.out.strides[1] = apart;
    Options with = options;
    with.executor = UsualExecutor();
    const Status status = Attend(with, in, out);
    ASSERT_TRUE(status.ok()) << status.message;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t c = 0; c < V; ++c) EXPECT_EQ(static_cast<double>(far[t * apart + 32 + c]), dense.out.Get(t * V + c));
  }
  munmap(mapping, bytes);
}

TEST_P(EveryRule, AStateMayBeWrittenOverItselfAndNothingElseIsTouched) {
  RandomSpec spec = Spec(GetParam());
  spec.normalize = Info(GetParam()).can_normalize;
  const OwnedInputs inputs = RandomInputs(spec);
  for (Options options : AllForms(GetParam())) {
    options.normalize = spec.normalize;
    if (options.normalize) options.feature_map = FeatureMap::kEluPlusOne;
    const Results apart = Compute(options, inputs.view());
    OwnedInputs own = inputs;
    Results results = Room(options, own.view());
    Outputs out = results.view();
    out.final_state = own.initial_state.mutable_view();
    if (options.normalize) out.final_key_sum = own.initial_key_sum.mutable_view();
    options.executor = UsualExecutor();
    const Status status = Attend(options, own.view(), out);
    ASSERT_TRUE(status.ok()) << status.message;
    EXPECT_TRUE(SameBits(own.initial_state, apart.final_state));
    if (options.normalize) {
      EXPECT_TRUE(SameBits(own.initial_key_sum, apart.final_key_sum));
    }
    EXPECT_TRUE(SameBits(results.out, apart.out));
    for (Owned OwnedInputs::*tensor : {&OwnedInputs::q, &OwnedInputs::k, &OwnedInputs::v, &OwnedInputs::log_decay, &OwnedInputs::beta,
                                       &OwnedInputs::remove, &OwnedInputs::write, &OwnedInputs::bonus})
      EXPECT_TRUE(SameBits(own.*tensor, inputs.*tensor));
  }
}

// ---- What is not a number, and what is nearly nothing -----------------------------------------------------------------------------------------

// Which elements of out may not be finite after one element was spoilt; all others keep their bits.
template <class May>
void ExpectContained(const Options& options, const OwnedInputs& clean, const OwnedInputs& spoilt, May may) {
  const Results before = Compute(options, clean.view()), after = Compute(options, spoilt.view());
  const std::vector<int64_t>& shape = before.out.shape;
  int64_t reached = 0;
  for (int64_t b = 0; b < shape[0]; ++b)
    for (int64_t t = 0; t < shape[1]; ++t)
      for (int64_t h = 0; h < shape[2]; ++h)
        for (int64_t c = 0; c < shape[3]; ++c) {
          const int64_t i = At(before.out, b, t, h, c);
          if (may(b, t, h, c))
            reached += !std::isfinite(after.out.Get(i));
          else
            ASSERT_EQ(before.out.Get(i), after.out.Get(i)) << "batch " << b << " token " << t << " head " << h << " channel " << c;
        }
  EXPECT_GT(reached, 0) << "what is not a number is data and must be seen";
}

TEST_P(EveryRule, NanAndInfinityStayWhereTheFormulaCarriesThem) {
  RandomSpec spec = Spec(GetParam(), 70);
  spec.batch = 2;
  const OwnedInputs clean = RandomInputs(spec);
  for (const double bad : {kNan, kInfinity, -kInfinity})
    for (const int64_t token : {0, 5, 16, 37, 69})
      for (const Options& options : AllForms(GetParam())) {
        SCOPED_TRACE(std::string(Name(options.form)) + ", " + std::to_string(bad) + " at token " + std::to_string(token));
        OwnedInputs spoilt = clean;
        spoilt.q.Set(At(spoilt.q, 1, token, 0, 3), bad);  // reaches its own row alone
        ExpectContained(options, clean, spoilt, [&](int64_t b, int64_t t, int64_t h, int64_t) { return b == 1 && h == 0 && t == token; });
        spoilt = clean;
        spoilt.k.Set(At(spoilt.k, 1, token, 0, 3), bad);  // its head from its token on
        ExpectContained(options, clean, spoilt, [&](int64_t b, int64_t t, int64_t h, int64_t) { return b == 1 && h == 0 && t >= token; });
        spoilt = clean;
        spoilt.v.Set(At(spoilt.v, 1, token, 0, 30), bad);  // its column of them
        ExpectContained(options, clean, spoilt,
                        [&](int64_t b, int64_t t, int64_t h, int64_t c) { return b == 1 && h == 0 && t >= token && c == 30; });
        for (Owned OwnedInputs::*tensor : {&OwnedInputs::remove, &OwnedInputs::write}) {
          if ((clean.*tensor).shape.empty()) continue;
          spoilt = clean;
          (spoilt.*tensor).Set(At(spoilt.*tensor, 1, token, 0, 3), bad);
          ExpectContained(options, clean, spoilt, [&](int64_t b, int64_t t, int64_t h, int64_t) { return b == 1 && h == 0 && t >= token; });
        }
      }
}

// All forms against the reference recurrence, in f64 and f32, for log decays that a test sets.
template <class SetDecay>
void ExpectStrongDecayRight(Rule rule, SetDecay set) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF64}) {
    RandomSpec spec = Spec(rule, 150);
    spec.dtype = dtype;
    OwnedInputs inputs = RandomInputs(spec);
    Owned& log_decay = inputs.log_decay;
    const int64_t channels = log_decay.shape.size() == 4 ? log_decay.shape[3] : 1,
                  per_token = log_decay.shape.size() == 1 ? 2 : log_decay.size() / 150;
    for (int64_t i = 0; i < log_decay.size(); ++i) log_decay.Set(i, set(i / per_token, i % channels));
    Options options;
    options.rule = rule;
    const Answers answers = Oracle<long double>(options, inputs.view());
    for (const double x : answers.out) ASSERT_TRUE(std::isfinite(x));
    for (const int64_t chunk : {1, 16, 64, 150})
      for (const Options& form : AllForms(rule, chunk)) {
        SCOPED_TRACE(std::string(Name(form.form)) + " chunk " + std::to_string(chunk));
        const Results results = Compute(form, inputs.view());
        for (int64_t i = 0; i < results.out.size(); ++i) ASSERT_TRUE(std::isfinite(results.out.Get(i)));
        ExpectNear(results, answers, Tolerance(dtype, 150, 20));
      }
  }
}

TEST_P(EveryRule, StrongNoAndTotalDecay) {
  if (Info(GetParam()).log_decay_layout.empty()) return;
  ExpectStrongDecayRight(GetParam(), [](int64_t, int64_t channel) { return channel == 0 ? -30.0 : -0.1; });
  ExpectStrongDecayRight(GetParam(), [](int64_t, int64_t) { return 0.0; });
  ExpectStrongDecayRight(GetParam(), [](int64_t, int64_t) { return -1000.0; });
  if (GetParam() == Rule::kRetention)
    ExpectStrongDecayRight(GetParam(), [](int64_t, int64_t) { return -kInfinity; });
  else
    for (const int64_t at : {0, 1, 16, 70, 149})
      ExpectStrongDecayRight(GetParam(), [=](int64_t token, int64_t) { return token == at ? -kInfinity : -0.05; });
}

TEST_P(EveryRule, ZerosStayZerosUnderL2NormWithoutEps) {
  OwnedInputs inputs = RandomInputs(Spec(GetParam(), 33));
  const int64_t row = 2 * 20;
  for (Owned* tensor : {&inputs.q, &inputs.k})
    for (int64_t i = 0; i < tensor->size(); ++i)
      if (i / row % 3 == 0) tensor->Set(i, 0);
  for (const std::string& target : Targets())
    for (Options options : AllForms(GetParam())) {
      SCOPED_TRACE(target + " " + std::string(Name(options.form)));
      options.feature_map = FeatureMap::kL2Norm;
      options.eps = 0;
      options.target = target;
      const Results results = Compute(options, inputs.view());
      ExpectNear(results, Oracle<double>(options, inputs.view()), Tolerance(Dtype::kF32, 33, 20));
      for (int64_t t = 0; t < 33; t += 3)
        for (int64_t i = 0; i < 2 * 37; ++i) ASSERT_EQ(results.out.Get(t * 2 * 37 + i), 0.0);
    }
}

TEST(Numbers, AConstantDecayKeepsItsPowersOverALongSequence) {
  // 0.99999 rounded to f32 is off by a quarter of a part in 1e7; over 1e5 tokens that is a third of a percent. Chunks of 64 do not drift.
  const int64_t tokens = 100000;
  std::vector<float> ones(tokens, 1.0f), out(tokens);
  const float log_decay = -1e-5f;
  Inputs in;
  in.q = in.k = in.v = View<const float>(ones.data(), {1, tokens, 1, 1});
  in.log_decay = View<const float>(&log_decay, {1});
  Outputs outputs;
  outputs.out = View<float>(out.data(), {1, tokens, 1, 1});
  Options options;
  options.rule = Rule::kRetention;
  options.form = Form::kChunkwise;
  options.chunk = 64;
  options.executor = UsualExecutor();
  const Status status = Attend(options, in, outputs);
  ASSERT_TRUE(status.ok()) << status.message;
  const double D = std::exp(static_cast<double>(log_decay)), exact = (1 - std::pow(D, tokens)) / (1 - D);
  EXPECT_NEAR(out.back() / exact, 1, 2e-5);
}

TEST(Numbers, AZeroDenominatorGivesAZeroRow) {
  RandomSpec spec = Spec(Rule::kLinear, 20);
  spec.normalize = true;
  OwnedInputs inputs = RandomInputs(spec);
  inputs.initial_key_sum = {};
  for (int64_t t = 0; t < 5; ++t)
    for (int64_t c = 0; c < 20; ++c) inputs.k.Set(At(inputs.k, 0, t, 0, c), -1.0);  // relu makes nothing of them
  for (Options options : AllForms(Rule::kLinear)) {
    options.normalize = true;
    options.feature_map = FeatureMap::kRelu;
    const Results results = Compute(options, inputs.view());
    for (int64_t t = 0; t < 5; ++t)
      for (int64_t c = 0; c < 37; ++c) EXPECT_EQ(results.out.Get(At(results.out, 0, t, 0, c)), 0.0);
    for (int64_t i = 0; i < results.out.size(); ++i) EXPECT_TRUE(std::isfinite(results.out.Get(i)));
    ExpectNear(results, Oracle<double>(options, inputs.view()), Tolerance(Dtype::kF32, 20, 20));
  }
}

}  // namespace
}  // namespace tercet::test
