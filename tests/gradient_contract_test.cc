// What a call for gradients may be: every refusal by its code and its whole sentence, and what is taken. What its inputs may be is Attend's matter
// (contract_test.cc); here they are only seen to be looked at.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/proof/inputs.hpp"
#include "tercet/tercet.hpp"
#include "tests/allocations.hpp"

namespace tercet::test {
namespace {

using proof::Owned;
using proof::OwnedInputs;
using proof::RandomSpec;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
const Dtype kFloating[] = {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16};

// ---- A call that is right as it stands, for a test to spoil ---------------------------------------------------------------------------------

// Every gradient there is, given and wanted, each in memory of its own.
struct Call {
  Options options;
  OwnedInputs tensors;
  std::vector<Owned> memory;
  std::vector<double> scale;
  Inputs in;
  OutputGradients given;
  Gradients wanted;

  Call() = default;
  Call(Call&&) = default;  // moved vectors keep their memory, so views into them stay right

  Status Validate(contract::GradientLayer* layer) const { return contract::ValidateGradient(options, in, given, wanted, layer); }
};

template <class Visit>
void ForEachInput(Inputs& in, Visit&& visit) {
  visit("q", in.q);
  visit("k", in.k);
  visit("v", in.v);
  visit("log_decay", in.log_decay);
  visit("beta", in.beta);
  visit("remove", in.remove);
  visit("write", in.write);
  visit("bonus", in.bonus);
  visit("initial_state", in.initial_state);
  visit("initial_key_sum", in.initial_key_sum);
  visit("offsets", in.offsets);
  visit("valid", in.valid);
}
// The ten gradients that are tensors and the three given ones: visit(name, view, the input it is of).
template <class Visit>
void ForEachWanted(Call& call, Visit&& visit) {
  Gradients& d = call.wanted;
  visit("q", d.q, call.in.q);
  visit("k", d.k, call.in.k);
  visit("v", d.v, call.in.v);
  visit("log_decay", d.log_decay, call.in.log_decay);
  visit("beta", d.beta, call.in.beta);
  visit("remove", d.remove, call.in.remove);
  visit("write", d.write, call.in.write);
  visit("bonus", d.bonus, call.in.bonus);
  visit("initial_state", d.initial_state, call.in.initial_state);
  visit("initial_key_sum", d.initial_key_sum, call.in.initial_key_sum);
}
template <class Visit>
void ForEachGiven(Call& call, Visit&& visit) {
  visit("out", call.given.out);
  visit("final_state", call.given.final_state);
  visit("final_key_sum", call.given.final_key_sum);
}
constexpr size_t kGradients = 13;  // those given, then those wanted
template <class Visit>
void ForEachGradient(Call& call, Visit&& visit) {
  ForEachGiven(call, visit);
  ForEachWanted(call, [&](std::string_view name, Tensor& view, const ConstTensor&) { visit(name, view); });
}

Call Right(const RandomSpec& spec) {
  Call call;
  call.options.rule = spec.rule;
  call.options.normalize = spec.normalize;
  call.options.feature_map = spec.feature_map;
  call.tensors = proof::RandomInputs(spec);
  call.in = call.tensors.view();
  call.memory.reserve(kGradients);
  const auto room = [&](Dtype dtype, std::vector<int64_t> shape) {
    call.memory.push_back(Owned::Zeros(dtype, std::move(shape)));
    return call.memory.back().mutable_view();
  };
  const Inputs& in = call.in;
  const Dtype dtype = spec.dtype, state_dtype = contract::StateDtype(dtype);
  const int64_t N = in.offsets.given() ? in.offsets.shape[0] - 1 : in.q.shape[0], K = in.q.shape[3], V = in.v.shape[3];
  const int64_t state_heads = std::max(in.k.shape[2], in.v.shape[2]), out_heads = std::max(in.q.shape[2], state_heads);
  call.given.out = room(dtype, {in.q.shape[0], in.q.shape[1], out_heads, V});
  call.given.final_state = room(state_dtype, {N, state_heads, K, V});
  if (spec.normalize) call.given.final_key_sum = room(state_dtype, {N, state_heads, K});
  ForEachWanted(call, [&](std::string_view name, Tensor& view, const ConstTensor& of) {
    if (name == "initial_state")
      view = room(state_dtype, {N, state_heads, K, V});
    else if (name == "initial_key_sum" && spec.normalize)
      view = room(state_dtype, {N, state_heads, K});
    else if (of.given())
      view = room(of.dtype, {of.shape.begin(), of.shape.begin() + of.rank});
  });
  call.scale = {0.0};
  call.wanted.scale = call.scale.data();
  return call;
}

RandomSpec Spec(Rule rule) {
  RandomSpec spec;
  spec.rule = rule;
  spec.batch = 2;
  spec.tokens = 6;
  spec.heads = 2;
  spec.key_dim = 4;
  spec.value_dim = 5;
  return spec;
}
RandomSpec Packed(Rule rule) {
  RandomSpec spec = Spec(rule);
  spec.batch = 1;
  spec.offsets = {0, 2, 2, 6};
  return spec;
}
RandomSpec Masked(Rule rule) {
  RandomSpec spec = Spec(rule);
  spec.valid_fraction = 0.7;
  return spec;
}
RandomSpec Normalized(Rule rule) {
  RandomSpec spec = Spec(rule);
  spec.normalize = true;
  return spec;
}
// Three counts of heads, one of gates; out has four, the states two.
RandomSpec Grouped(Rule rule) {
  RandomSpec spec = Spec(rule);
  spec.q_heads = 4;
  spec.k_heads = 1;
  spec.v_heads = 2;
  spec.gate_heads = 1;
  return spec;
}
Call Right(Rule rule) { return Right(Spec(rule)); }

// Calls that together have every tensor there is.
std::vector<Call> EveryCall(Dtype dtype = Dtype::kF32) {
  std::vector<Call> calls;
  for (const RuleInfo& info : Rules()) {
    for (RandomSpec spec : {Masked(info.rule), Packed(info.rule)}) {
      spec.normalize = info.can_normalize;
      spec.dtype = dtype;
      calls.push_back(Right(spec));
    }
  }
  return calls;
}

// Refused so, with the layer as it was.
void ExpectRefused(const Call& call, StatusCode code, const std::string& sentence) {
  contract::GradientLayer layer;
  layer.key_dim = 12345;
  const Status status = call.Validate(&layer);
  EXPECT_EQ(status.code, code) << status.message;
  EXPECT_EQ(status.message, sentence);
  EXPECT_EQ(layer.key_dim, 12345);
  EXPECT_FALSE(layer.in.q.given());
}

void ExpectOk(const Call& call) {
  contract::GradientLayer layer;
  const Status status = call.Validate(&layer);
  EXPECT_EQ(status.code, StatusCode::kOk);
  EXPECT_EQ(status.message, "");
}

template <class View>
void SetShape(View& view, const std::vector<int64_t>& shape) {
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
}

std::string ShapeOf(const ConstTensor& t) { return contract::ShapeText(t); }
std::string NameOfGradient(std::string_view of) { return "the gradient of " + std::string(of); }
std::byte* BytesOf(const ConstTensor& t) { return const_cast<std::byte*>(static_cast<const std::byte*>(t.data)); }
int64_t SizeInBytes(const ConstTensor& t) { return contract::Count(t) * contract::SizeOf(t.dtype); }

// ---- What is taken ----------------------------------------------------------------------------------------------------------------------------

void ExpectSameView(const ConstTensor& got, const ConstTensor& want) {
  EXPECT_EQ(got.data, want.data);
  EXPECT_EQ(got.dtype, want.dtype);
  EXPECT_EQ(got.rank, want.rank);
  EXPECT_EQ(got.shape, want.shape);
  EXPECT_EQ(got.strides, want.strides);
}

// Taken, in every form that has gradients, and all that was said stands in the layer.
void ExpectTaken(Call& call) {
  for (const Form form : {Form::kAutomatic, Form::kRecurrent, Form::kChunkwise}) {
    call.options.form = form;
    contract::GradientLayer layer;
    const Status status = call.Validate(&layer);
    ASSERT_TRUE(status.ok()) << status.message;
    contract::Layer inputs;
    ASSERT_TRUE(contract::Validate(call.options, call.in, nullptr, &inputs).ok());
    EXPECT_EQ(layer.rule, call.options.rule);
    EXPECT_EQ(layer.tokens, call.in.q.shape[1]);
    EXPECT_EQ(layer.state_heads, inputs.state_heads);
    EXPECT_EQ(layer.out_heads, inputs.out_heads);
    EXPECT_EQ(layer.sequences, inputs.sequences);
    EXPECT_EQ(layer.scale, inputs.scale);
    EXPECT_EQ(layer.dtype, call.in.q.dtype);
    ExpectSameView(layer.in.valid, call.in.valid);
    EXPECT_FALSE(layer.out.out.given());
    Call seen;
    seen.given = layer.given;
    seen.wanted = layer.wanted;
    std::vector<ConstTensor> got, want;
    ForEachGradient(seen, [&](std::string_view, const auto& view) { got.push_back(view); });
    ForEachGradient(call, [&](std::string_view, const auto& view) { want.push_back(view); });
    ASSERT_EQ(got.size(), kGradients);
    for (size_t i = 0; i < kGradients; ++i) ExpectSameView(got[i], want[i]);
    EXPECT_EQ(layer.wanted.scale, call.wanted.scale);
  }
}

class EveryRule : public testing::TestWithParam<Rule> {};
INSTANTIATE_TEST_SUITE_P(GradientContract, EveryRule, testing::ValuesIn([] {
                           std::vector<Rule> rules;
                           for (const RuleInfo& one : Rules()) rules.push_back(one.rule);
                           return rules;
                         }()),
                         [](const auto& instance) { return std::string(Name(instance.param)); });

// Every kind of call of a rule, of every dtype.
std::vector<RandomSpec> SpecsOf(Rule rule) {
  RandomSpec stateless = Spec(rule), no_tokens = Masked(rule), no_batch = Spec(rule), no_sequences = Packed(rule), one = Spec(rule),
             values_grouped = Grouped(rule);
  stateless.initial_state = false;
  no_tokens.tokens = 0;
  no_batch.batch = 0;
  no_sequences.tokens = 0;
  no_sequences.offsets = {0};
  one.batch = one.tokens = one.heads = one.key_dim = one.value_dim = 1;
  values_grouped.q_heads = 1;
  values_grouped.k_heads = 6;
  values_grouped.gate_heads = 3;
  std::vector<RandomSpec> specs;
  for (const Dtype dtype : kFloating) {
    for (const std::optional<Dtype> gates : {std::optional<Dtype>(), std::optional<Dtype>(Dtype::kF32)}) {
      if (gates && contract::SizeOf(dtype) != 2) continue;
      for (RandomSpec spec :
           {Spec(rule), Packed(rule), Masked(rule), Grouped(rule), values_grouped, stateless, no_tokens, no_batch, no_sequences, one}) {
        for (const bool normalize : {false, true}) {
          if (normalize && !Info(rule).can_normalize) continue;
          spec.dtype = dtype;
          spec.gate_dtype = gates;
          spec.normalize = normalize;
          specs.push_back(spec);
        }
      }
    }
  }
  return specs;
}

TEST_P(EveryRule, MayHaveAllItsGradients) {
  for (const RandomSpec& spec : SpecsOf(GetParam())) {
    SCOPED_TRACE(std::string(Name(spec.dtype)) + " " + std::to_string(spec.tokens) + " tokens");
    Call call = Right(spec);
    std::set<std::string_view> wanted;
    ForEachWanted(call, [&](std::string_view name, const Tensor& view, const ConstTensor&) {
      if (view.given()) wanted.insert(name);
    });
    const RuleInfo& info = Info(GetParam());
    EXPECT_EQ(wanted.count("log_decay"), info.log_decay_layout.empty() ? 0u : 1u);
    EXPECT_EQ(wanted.count("beta"), info.takes_beta ? 1u : 0u);
    EXPECT_EQ(wanted.count("remove") + wanted.count("write"), info.takes_remove_and_write ? 2u : 0u);
    EXPECT_EQ(wanted.count("bonus"), info.takes_bonus ? 1u : 0u);
    EXPECT_EQ(wanted.count("initial_key_sum"), spec.normalize ? 1u : 0u);
    ExpectTaken(call);
  }
}

TEST_P(EveryRule, MayHaveAnyOneOrNone) {
  for (const RandomSpec& spec : SpecsOf(GetParam())) {
    Call call = Right(spec);
    const OutputGradients given = call.given;
    const Gradients wanted = call.wanted;
    for (size_t which = 0; which <= kGradients; ++which) {
      call.given = given;
      call.wanted = wanted;
      call.wanted.scale = nullptr;
      size_t at = 0;
      ForEachGradient(call, [&](std::string_view, auto& view) {
        if (at++ == which) return;
        view.rank = 0;
        view.data = call.scale.data();  // which says nothing then
      });
      ExpectTaken(call);
    }
    call.wanted.scale = wanted.scale;  // the last call had no other
    ExpectTaken(call);
  }
}

// Where there are no elements, no data is needed and strides are not looked at.
TEST_P(EveryRule, NeedsNoDataOfNoElements) {
  for (const RandomSpec& spec : SpecsOf(GetParam())) {
    Call call = Right(spec);
    int empty = 0;
    ForEachGradient(call, [&](std::string_view, auto& view) {
      if (!view.given() || contract::Count(view) > 0) return;
      ++empty;
      view.data = nullptr;
      view.strides = {kHuge, INT64_MIN, 0, -1};
    });
    EXPECT_EQ(empty > 0, spec.tokens == 0 || spec.batch == 0);
    ExpectTaken(call);
  }
}

TEST(Taken, StridesOfAxesOfOneAreNotUsed) {
  for (const RuleInfo& info : Rules()) {
    RandomSpec spec = Spec(info.rule);
    spec.batch = spec.tokens = spec.heads = spec.key_dim = spec.value_dim = 1;
    spec.normalize = info.can_normalize;
    Call call = Right(spec);
    ForEachGradient(call, [](std::string_view, auto& view) { view.strides = {kHuge, INT64_MIN, 0, -1}; });
    ExpectTaken(call);
  }
}

// What is only read may lie anywhere: a gradient of ones is one number with strides of zero, and may be an input.
TEST(Taken, GivenGradientsMayShareMemory) {
  for (Call& call : EveryCall()) {
    ForEachGiven(call, [&](std::string_view, ConstTensor& view) {
      if (!view.given()) return;
      view.data = call.in.q.data;
      view.strides = {0, 0, 0, 0};
    });
    ExpectTaken(call);
  }
}

// The gradients of q, k and v as columns of one table [B, T, 4, H, D], whose last column is the gradient of out, with tokens in falling order.
TEST(Taken, GradientsMayBeColumnsOfOneTable) {
  const int64_t B = 2, T = 6, H = 3, D = 5;
  RandomSpec spec = Spec(Rule::kKda);
  spec.heads = H;
  spec.key_dim = spec.value_dim = D;
  Call call = Right(spec);
  std::vector<float> table(static_cast<size_t>(B * T * 4 * H * D));
  const auto column = [&](auto& view, int64_t at) {
    view.data = table.data() + (T - 1) * 4 * H * D + at * H * D;
    view.strides = {T * 4 * H * D, -4 * H * D, D, 1};
  };
  column(call.wanted.q, 0);
  column(call.wanted.k, 1);
  column(call.wanted.v, 3);
  column(call.given.out, 2);
  ExpectTaken(call);
  column(call.wanted.v, 1);
  ExpectRefused(call, StatusCode::kOverlap, "the gradient of k shares memory with the gradient of v and must be apart from it");
}

// A call that is checked asks C++'s heap for nothing.
TEST(Taken, WithoutMemory) {
  for (const Call& call : EveryCall()) {
    contract::GradientLayer layer;
    Status status = call.Validate(&layer);  // the first of a process makes its list of rules
    largest_block = 0;
    status = call.Validate(&layer);
    EXPECT_EQ(largest_block, 0u);
    EXPECT_TRUE(status.ok()) << status.message;
  }
}

// ---- Refusals, one a sentence -----------------------------------------------------------------------------------------------------------------

struct Refusal {
  const char* name;
  StatusCode code;
  const char* sentence;
  Call (*spoiled)();
};

class Refusals : public testing::TestWithParam<Refusal> {};

TEST_P(Refusals, SayWhatIsWrong) { ExpectRefused(GetParam().spoiled(), GetParam().code, GetParam().sentence); }

// A call with one thing done to it: SPOIL(specification, what is done to `c`).
#define SPOIL(spec, ...)  \
  [] {                    \
    Call c = Right(spec); \
    __VA_ARGS__;          \
    return c;             \
  }

const Refusal kRefusals[] = {
    // Options and inputs, as Attend says it.
    {"parallel", StatusCode::kInvalidOption, "form is parallel and must be automatic, recurrent or chunkwise: the parallel form has no gradients",
     SPOIL(Rule::kLinear, c.options.form = Form::kParallel)},
    {"form", StatusCode::kInvalidOption, "form is 4 and must be automatic, parallel, recurrent or chunkwise",
     SPOIL(Rule::kLinear, c.options.form = static_cast<Form>(4))},
    {"rule", StatusCode::kInvalidOption, "rule is 9 and must be one of the 9 that Rules() lists",
     SPOIL(Rule::kLinear, c.options.rule = static_cast<Rule>(9))},
    {"table_limit", StatusCode::kInvalidOption, "table_limit is -1 and must be at least 0 bytes", SPOIL(Rule::kLinear, c.options.table_limit = -1)},
    {"normalize", StatusCode::kInvalidOption,
     "normalize is true and must be false for kda: only a rule that adds k v' to the state has a key sum to divide by",
     SPOIL(Rule::kKda, c.options.normalize = true)},
    {"no_q", StatusCode::kMissingInput, "q was not given and linear needs it as [B, T, H, K]", SPOIL(Rule::kLinear, c.in.q = {})},
    {"no_beta", StatusCode::kMissingInput, "beta was not given and delta needs it as [B, T, H]", SPOIL(Rule::kDelta, c.in.beta = {})},
    {"workspace", StatusCode::kInvalidOption, "workspace has -1 bytes and must have at least 0",
     SPOIL(Rule::kLinear, c.options.workspace.bytes = -1)},
    {"saved_negative", StatusCode::kInvalidOption, "saved has -2 bytes and must have at least 0",
     SPOIL(Rule::kLinear, c.given.saved = {c.scale.data(), -2})},
    {"saved_null", StatusCode::kNullData, "saved has no data and must point to its 8 bytes", SPOIL(Rule::kLinear, c.given.saved.bytes = 8)},
    {"workspace_over_saved", StatusCode::kOverlap, "workspace shares memory with saved and must be apart from it",
     SPOIL(Rule::kLinear, c.given.saved = {c.tensors.q.bytes.data(), 8}; c.options.workspace = {c.tensors.q.bytes.data() + 7, 1};
           c.in.q.data = c.in.k.data)},
    {"k_tokens", StatusCode::kShape, "k has shape [2, 5, 2, 4] and must be [B, T, H, K] = [2, 6, 2, 4]", SPOIL(Rule::kLinear, c.in.k.shape[1] = 5)},
    {"q_dtype", StatusCode::kDtype, "q is i32 and must be f32, f64, bf16 or f16", SPOIL(Rule::kLinear, c.in.q.dtype = Dtype::kI32)},
    {"v_data", StatusCode::kNullData, "v has no data and must point to its 120 elements", SPOIL(Rule::kLinear, c.in.v.data = nullptr)},
    {"offsets", StatusCode::kValue, "offsets ends with 5 and must end with 6, the number of tokens",
     SPOIL(Packed(Rule::kLinear), c.tensors.offsets.Set(3, 5))},
    {"log_decay_value", StatusCode::kValue,
     "log_decay[1] is 0.5 and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(Rule::kRetention, c.tensors.log_decay.Set(1, 0.5))},

    // Gradients that there are not.
    {"log_decay_of_delta", StatusCode::kUnexpectedInput, "the gradient of log_decay is wanted and delta takes no log_decay",
     SPOIL(Rule::kDelta, c.wanted.log_decay = c.wanted.beta)},
    {"beta_of_linear", StatusCode::kUnexpectedInput, "the gradient of beta is wanted and linear takes no beta",
     SPOIL(Rule::kLinear, c.wanted.beta = c.wanted.q)},
    {"remove_of_kda", StatusCode::kUnexpectedInput, "the gradient of remove is wanted and kda takes no remove",
     SPOIL(Rule::kKda, c.wanted.remove = c.wanted.q)},
    {"write_of_gla", StatusCode::kUnexpectedInput, "the gradient of write is wanted and gla takes no write",
     SPOIL(Rule::kGla, c.wanted.write = c.wanted.q)},
    {"bonus_of_rwkv7", StatusCode::kUnexpectedInput, "the gradient of bonus is wanted and rwkv7 takes no bonus",
     SPOIL(Rule::kRwkv7, c.wanted.bonus = c.wanted.q)},
    {"initial_key_sum_without_normalize", StatusCode::kUnexpectedInput,
     "the gradient of initial_key_sum is wanted and there is a key sum only with normalize",
     SPOIL(Normalized(Rule::kGla), c.options.normalize = false; c.in.initial_key_sum = {}; c.given.final_key_sum = {})},
    {"final_key_sum_without_normalize", StatusCode::kUnexpectedInput,
     "the gradient of final_key_sum was given and there is a key sum only with normalize",
     SPOIL(Normalized(Rule::kGla), c.options.normalize = false; c.in.initial_key_sum = {})},
    {"initial_key_sum_of_delta", StatusCode::kUnexpectedInput, "the gradient of initial_key_sum is wanted and there is a key sum only with normalize",
     SPOIL(Rule::kDelta, c.wanted.initial_key_sum = c.wanted.initial_state)},

    // Shapes.
    {"out", StatusCode::kShape, "the gradient of out has shape [2, 6, 1, 5] and must be [B, T, H, V] = [2, 6, 2, 5]",
     SPOIL(Rule::kLinear, c.given.out.shape[2] = 1)},
    {"out_grouped", StatusCode::kShape, "the gradient of out has shape [2, 6, 2, 5] and must be [B, T, H, V] = [2, 6, 4, 5]",
     SPOIL(Grouped(Rule::kLinear), c.given.out.shape[2] = 2)},
    {"final_state", StatusCode::kShape, "the gradient of final_state has shape [2, 2, 4] and must be [N, H, K, V] = [2, 2, 4, 5]",
     SPOIL(Rule::kLinear, c.given.final_state.rank = 3)},
    {"final_state_packed", StatusCode::kShape, "the gradient of final_state has shape [1, 2, 4, 5] and must be [N, H, K, V] = [3, 2, 4, 5]",
     SPOIL(Packed(Rule::kLinear), c.given.final_state.shape[0] = 1)},
    {"final_key_sum", StatusCode::kShape, "the gradient of final_key_sum has shape [2, 1, 4] and must be [N, H, K] = [2, 2, 4]",
     SPOIL(Normalized(Rule::kLinear), c.given.final_key_sum.shape[1] = 1)},
    {"q", StatusCode::kShape, "the gradient of q has shape [2, 6, 2, 5] and must be [2, 6, 2, 4], the shape of q",
     SPOIL(Rule::kLinear, c.wanted.q.shape[3] = 5)},
    {"k_grouped", StatusCode::kShape, "the gradient of k has shape [2, 6, 4, 4] and must be [2, 6, 1, 4], the shape of k",
     SPOIL(Grouped(Rule::kLinear), c.wanted.k = c.wanted.q)},
    {"v", StatusCode::kShape, "the gradient of v has shape [2, 6] and must be [2, 6, 2, 5], the shape of v",
     SPOIL(Rule::kLinear, c.wanted.v.rank = 2)},
    {"log_decay", StatusCode::kShape, "the gradient of log_decay has shape [2, 6, 2] and must be [2], the shape of log_decay",
     SPOIL(Rule::kRetention, SetShape(c.wanted.log_decay, {2, 6, 2}))},
    {"beta_grouped", StatusCode::kShape, "the gradient of beta has shape [2, 6, 2] and must be [2, 6, 1], the shape of beta",
     SPOIL(Grouped(Rule::kDelta), c.wanted.beta.shape[2] = 2)},
    {"remove", StatusCode::kShape, "the gradient of remove has shape [2, 6, 2] and must be [2, 6, 2, 4], the shape of remove",
     SPOIL(Rule::kRwkv7, c.wanted.remove.rank = 3)},
    {"write", StatusCode::kShape, "the gradient of write has shape [2, 6, 0, 4] and must be [2, 6, 2, 4], the shape of write",
     SPOIL(Rule::kRwkv7, c.wanted.write.shape[2] = 0)},
    {"bonus", StatusCode::kShape, "the gradient of bonus has shape [2, 3] and must be [2, 4], the shape of bonus",
     SPOIL(Rule::kRwkv6, c.wanted.bonus.shape[1] = 3)},
    {"initial_state", StatusCode::kShape, "the gradient of initial_state has shape [2, 2, 5, 4] and must be [N, H, K, V] = [2, 2, 4, 5]",
     SPOIL(Rule::kLinear, SetShape(c.wanted.initial_state, {2, 2, 5, 4}))},
    {"initial_state_not_given", StatusCode::kShape, "the gradient of initial_state has shape [1, 2, 4, 5] and must be [N, H, K, V] = [2, 2, 4, 5]",
     SPOIL(Rule::kLinear, c.in.initial_state = {}; c.wanted.initial_state.shape[0] = 1)},
    {"initial_key_sum", StatusCode::kShape, "the gradient of initial_key_sum has shape [2, 2, 5] and must be [N, H, K] = [2, 2, 4]",
     SPOIL(Normalized(Rule::kLinear), c.wanted.initial_key_sum.shape[2] = 5)},
    {"initial_key_sum_not_given", StatusCode::kShape, "the gradient of initial_key_sum has shape [2, 2] and must be [N, H, K] = [2, 2, 4]",
     SPOIL(Normalized(Rule::kLinear), c.in.initial_key_sum = {}; c.wanted.initial_key_sum.rank = 2)},

    // Memory.
    {"q_itself", StatusCode::kOverlap, "the gradient of q has strides under which two of its elements share memory and each must have its own",
     SPOIL(Rule::kLinear, c.wanted.q.strides[1] = 0)},
    {"bonus_itself", StatusCode::kOverlap,
     "the gradient of bonus has strides under which two of its elements share memory and each must have its own",
     SPOIL(Rule::kRwkv6, c.wanted.bonus.strides[0] = 3)},
    {"q_in_place", StatusCode::kOverlap, "the gradient of q shares memory with q and must be apart from it",
     SPOIL(Rule::kLinear, c.wanted.q.data = c.tensors.q.bytes.data())},
    {"initial_state_in_place", StatusCode::kOverlap, "the gradient of initial_state shares memory with initial_state and must be apart from it",
     SPOIL(Rule::kLinear, c.wanted.initial_state.data = c.tensors.initial_state.bytes.data())},
    {"initial_state_over_final_state", StatusCode::kOverlap,
     "the gradient of initial_state shares memory with the gradient of final_state and must be apart from it",
     SPOIL(Rule::kLinear, c.given.final_state.data = c.wanted.initial_state.data)},
    {"v_over_out", StatusCode::kOverlap, "the gradient of v shares memory with the gradient of out and must be apart from it",
     SPOIL(Rule::kLinear, c.given.out.data = c.wanted.v.data)},
    {"q_over_k", StatusCode::kOverlap, "the gradient of q shares memory with the gradient of k and must be apart from it",
     SPOIL(Rule::kLinear, c.wanted.k.data = c.wanted.q.data)},
    {"scale_in_q", StatusCode::kOverlap, "the gradient of scale shares memory with q and must be apart from it",
     SPOIL(Rule::kLinear, c.wanted.scale = reinterpret_cast<double*>(c.tensors.q.bytes.data() + 8))},
    {"scale_in_out", StatusCode::kOverlap, "the gradient of scale shares memory with the gradient of out and must be apart from it",
     SPOIL(Rule::kLinear, c.wanted.scale = reinterpret_cast<double*>(BytesOf(c.given.out)))},
    {"scale_in_the_gradient_of_v", StatusCode::kOverlap, "the gradient of v shares memory with the gradient of scale and must be apart from it",
     SPOIL(Rule::kLinear, c.wanted.scale = static_cast<double*>(c.wanted.v.data))},
};
INSTANTIATE_TEST_SUITE_P(GradientContract, Refusals, testing::ValuesIn(kRefusals), [](const auto& instance) { return instance.param.name; });

// ---- Refusals that every gradient can have ----------------------------------------------------------------------------------------------------

// Does `spoil` to one gradient after another of every call, and expects the refusal whose sentence is what `spoil` returns.
template <class Spoil>
void ForEachSpoiled(StatusCode code, Spoil spoil, Dtype dtype = Dtype::kF32) {
  std::set<std::string> seen;
  for (size_t which = 0; which < kGradients; ++which) {
    for (Call& call : EveryCall(dtype)) {
      size_t at = 0;
      std::string sentence;
      ForEachGradient(call, [&](std::string_view name, auto& view) {
        if (at++ != which || !view.given()) return;
        sentence = spoil(NameOfGradient(name), view);
        seen.insert(std::string(name));
      });
      if (!sentence.empty()) ExpectRefused(call, code, sentence);
    }
  }
  EXPECT_EQ(seen.size(), kGradients);
}

TEST(EveryGradient, HasARankThatIsOne) {
  for (const int rank : {5, -1, INT32_MAX, INT32_MIN})
    ForEachSpoiled(StatusCode::kShape, [&](const std::string& name, auto& view) {
      view.rank = rank;
      return name + " has rank " + std::to_string(rank) + " and must have one from 0 (not given) to 4";
    });
}

TEST(EveryGradient, HasSizesThatCanBeCounted) {
  for (const int64_t size : {int64_t{-1}, int64_t{INT64_MIN}})
    ForEachSpoiled(StatusCode::kShape, [&](const std::string& name, auto& view) {
      view.shape[view.rank - 1] = size;
      return name + " has shape " + ShapeOf(view) + " and must have no negative size";
    });
  for (const int64_t size : {(int64_t{1} << 48) + 1, kHuge})
    ForEachSpoiled(StatusCode::kShape, [&](const std::string& name, auto& view) {
      view.shape[0] = size;
      view.strides[0] = 0;
      return name + " has shape " + ShapeOf(view) + " and must have sizes whose product is at most 2^48";
    });
}

TEST(EveryGradient, HasStridesWhoseOffsetsCanBeCounted) {
  for (const int64_t stride : {kHuge, int64_t{INT64_MIN}, int64_t{1} << 62, int64_t{1} << 60, -(int64_t{1} << 61) - 1})
    ForEachSpoiled(StatusCode::kShape, [&](const std::string& name, auto& view) {
      view.strides[view.rank - 1] = stride;
      return name + " has shape " + ShapeOf(view) + " and strides that span more than 2^61 bytes, and must have strides that span less";
    });
}

TEST(EveryGradient, HasData) {
  ForEachSpoiled(StatusCode::kNullData, [&](const std::string& name, auto& view) {
    view.data = nullptr;
    return name + " has no data and must point to its " + std::to_string(contract::Count(view)) + " elements";
  });
}

// One size more and one less, on every axis.
TEST(EveryGradient, HasTheShapeOfItsTensor) {
  for (const int64_t more : {1, -1}) {
    for (int axis = 0; axis < kMaxRank; ++axis) {
      for (size_t which = 0; which < kGradients; ++which) {
        for (Call& call : EveryCall()) {
          size_t at = 0;
          std::string begins;
          ForEachGradient(call, [&](std::string_view name, auto& view) {
            if (at++ != which || axis >= view.rank) return;
            const std::string must = ShapeOf(view);
            view.shape[static_cast<size_t>(axis)] += more;
            begins = NameOfGradient(name) + " has shape " + ShapeOf(view) + " and must be ";
            const bool state = name.find("_state") != name.npos || name.find("_key_sum") != name.npos || name == "out";
            begins += !state                          ? must + ", the shape of " + std::string(name)
                      : name == "out"                 ? "[B, T, H, V] = " + must
                      : name.find("key") != name.npos ? "[N, H, K] = " + must
                                                      : "[N, H, K, V] = " + must;
          });
          if (!begins.empty()) ExpectRefused(call, StatusCode::kShape, begins);
        }
      }
    }
  }
}

TEST(EveryGradient, HasTheDtypeOfItsTensor) {
  const Dtype dtypes[] = {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16, Dtype::kI32, Dtype::kI64, Dtype::kBool, static_cast<Dtype>(77)};
  for (const Dtype q : kFloating) {
    for (const Dtype dtype : dtypes)
      ForEachSpoiled(
          StatusCode::kDtype,
          [&](const std::string& name, auto& view) {
            if (view.dtype == dtype) return std::string();
            const std::string of = name.substr(std::string("the gradient of ").size());
            const std::string is = std::string(Name(view.dtype));
            view.dtype = dtype;
            std::string must = is + ", the dtype of " + (of == "out" ? "q" : of);
            if (of.find("_state") != of.npos || of.find("_key_sum") != of.npos)
              must = contract::SizeOf(q) == 2 ? "f32, which states and key sums are where q is " + std::string(Name(q)) : is + ", the dtype of q";
            return name + " is " + std::string(Name(dtype)) + " and must be " + must;
          },
          q);
  }
}

// Beside bf16 and f16 a gate may be f32, and its gradient is what it is.
TEST(EveryGradient, OfAGateHasTheDtypeOfTheGate) {
  for (const Dtype q : {Dtype::kBF16, Dtype::kF16}) {
    std::set<std::string> seen;
    for (const RuleInfo& info : Rules()) {
      for (const Dtype gate : {q, Dtype::kF32}) {
        for (const std::string_view which : {"log_decay", "beta", "remove", "write", "bonus"}) {
          RandomSpec spec = Spec(info.rule);
          spec.dtype = q;
          spec.gate_dtype = gate;
          Call call = Right(spec);
          ExpectOk(call);
          const Dtype other = gate == q ? Dtype::kF32 : q;
          bool spoiled = false;
          ForEachWanted(call, [&](std::string_view name, Tensor& view, const ConstTensor&) {
            if (name != which || !view.given()) return;
            view.dtype = other;
            spoiled = true;
          });
          if (!spoiled) continue;
          seen.insert(std::string(which));
          ExpectRefused(call, StatusCode::kDtype,
                        NameOfGradient(which) + " is " + std::string(Name(other)) + " and must be " + std::string(Name(gate)) + ", the dtype of " +
                            std::string(which));
        }
      }
    }
    EXPECT_EQ(seen.size(), 5u);
  }
}

TEST_P(EveryRule, HasNoGradientOfAnInputThatItDoesNotTake) {
  for (size_t which = 0; which < kGradients - 3; ++which) {
    Call call = Right(GetParam());
    size_t at = 0;
    std::string sentence;
    ForEachWanted(call, [&](std::string_view name, Tensor& view, const ConstTensor& of) {
      if (at++ != which || of.given()) return;
      view = call.wanted.q;
      sentence = NameOfGradient(name) + " is wanted and ";
      sentence +=
          name == "initial_key_sum" ? "there is a key sum only with normalize" : std::string(Name(GetParam())) + " takes no " + std::string(name);
    });
    if (sentence.empty())
      ExpectOk(call);
    else
      ExpectRefused(call, StatusCode::kUnexpectedInput, sentence);
  }
}

// ---- Shared memory ----------------------------------------------------------------------------------------------------------------------------

TEST(Overlap, OfAWantedGradientWithItselfIsRefused) {
  std::set<std::string> seen;
  for (size_t which = 0; which < kGradients - 3; ++which) {
    for (Call& call : EveryCall()) {
      size_t at = 0;
      std::string sentence;
      ForEachWanted(call, [&](std::string_view name, Tensor& view, const ConstTensor&) {
        if (at++ != which || !view.given()) return;
        view.strides[view.rank - 1] = 0;
        seen.insert(std::string(name));
        sentence = NameOfGradient(name) + " has strides under which two of its elements share memory and each must have its own";
      });
      if (!sentence.empty()) ExpectRefused(call, StatusCode::kOverlap, sentence);
    }
  }
  EXPECT_EQ(seen.size(), kGradients - 3);
}

// Every wanted gradient laid over every other tensor of the call, where they meet in one byte, in all, or just not.
TEST(Overlap, OfAWantedGradientWithAnythingElseIsRefused) {
  struct Seen {
    std::string name;
    ConstTensor view;
  };
  constexpr size_t kSlot = 4096, kFirst = 12 + 3;  // the first of the wanted ones
  std::map<std::string, std::set<std::string>> met;
  for (Call& call : EveryCall()) {
    // Each tensor amid a slot of its own, far from the others, in the order in which they are looked at: inputs, given gradients, wanted ones.
    std::vector<double> arena((kFirst + 11) * kSlot / sizeof(double));
    std::vector<Seen> all;
    const auto place = [&](const std::string& name, auto& view) {
      std::byte* to = reinterpret_cast<std::byte*>(arena.data()) + all.size() * kSlot + kSlot / 2;
      if (view.given()) {
        ASSERT_LT(SizeInBytes(view), static_cast<int64_t>(kSlot / 4));
        std::memcpy(to, view.data, static_cast<size_t>(SizeInBytes(view)));
        view.data = to;
      }
      all.push_back({name, view});
    };
    ForEachInput(call.in, [&](std::string_view name, ConstTensor& view) { place(std::string(name), view); });
    ForEachGradient(call, [&](std::string_view name, auto& view) { place(NameOfGradient(name), view); });
    Tensor scale = View(call.wanted.scale, {1});
    place("the gradient of scale", scale);
    call.wanted.scale = static_cast<double*>(scale.data);
    ExpectOk(call);

    const Gradients before = call.wanted;
    for (size_t written = kFirst; written < all.size(); ++written) {
      for (size_t other = 0; other < all.size(); ++other) {
        const ConstTensor &w = all[written].view, &o = all[other].view;
        if (other == written || !w.given() || !o.given()) continue;
        const bool swapped = other >= kFirst && other < written;  // of two wanted ones the first is named first
        const std::string sentence =
            all[swapped ? other : written].name + " shares memory with " + all[swapped ? written : other].name + " and must be apart from it";
        const bool is_scale = written + 1 == all.size();
        for (const int64_t shift : {-SizeInBytes(w), 1 - SizeInBytes(w), int64_t{0}, SizeInBytes(o) - 1, SizeInBytes(o)}) {
          std::byte* to = BytesOf(o) + shift;
          if (is_scale && shift % 8 != 0) continue;  // no double lies there
          call.wanted = before;
          size_t at = kFirst;
          ForEachWanted(call, [&](std::string_view, Tensor& view, const ConstTensor&) {
            if (at++ == written) view.data = to;
          });
          if (is_scale) call.wanted.scale = reinterpret_cast<double*>(to);
          if (shift == -SizeInBytes(w) || shift == SizeInBytes(o)) {
            ExpectOk(call);
          } else {
            ExpectRefused(call, StatusCode::kOverlap, sentence);
            met[all[written].name].insert(all[other].name);
          }
        }
      }
    }
  }
  EXPECT_EQ(met.size(), 11u);
  EXPECT_EQ(met["the gradient of q"].size(), 12u + 3u + 10u);
  EXPECT_EQ(met["the gradient of scale"].size(), 12u + 3u + 10u);
}

// Every tensor of every call, met in its first byte, its last, and all. The workspace is written, and what was saved is read.
TEST(Overlap, OfTheWorkspaceAndOfWhatWasSavedIsRefused) {
  std::set<std::string> seen;
  for (Call& call : EveryCall()) {
    std::vector<std::byte> apart(100);
    const auto check = [&](const std::string& name, const ConstTensor& view, bool wanted) {
      if (!view.given()) return;
      seen.insert(name);
      const int64_t size = SizeInBytes(view);
      for (const auto& [shift, bytes] : {std::pair(int64_t{0}, int64_t{1}), std::pair(size - 1, int64_t{1}), std::pair(int64_t{0}, size)}) {
        const Workspace over{BytesOf(view) + shift, bytes};
        call.options.workspace = over;
        ExpectRefused(call, StatusCode::kOverlap, "workspace shares memory with " + name + " and must be apart from it");
        call.options.workspace = {apart.data(), 100};
        call.given.saved = over;
        if (wanted)
          ExpectRefused(call, StatusCode::kOverlap, "saved shares memory with " + name + " and must be apart from it");
        else
          ExpectTaken(call);
        call.given.saved = {};
      }
      // More bytes than there are.
      call.options.workspace = {BytesOf(view) - size, kHuge};
      contract::GradientLayer layer;
      EXPECT_EQ(call.Validate(&layer).code, StatusCode::kOverlap) << name;
    };
    ForEachInput(call.in, [&](std::string_view name, const ConstTensor& view) { check(std::string(name), view, false); });
    ForEachGiven(call, [&](std::string_view name, const ConstTensor& view) { check(NameOfGradient(name), view, false); });
    ForEachWanted(call, [&](std::string_view name, const Tensor& view, const ConstTensor&) { check(NameOfGradient(name), view, true); });
    check("the gradient of scale", View(call.wanted.scale, {1}), true);
    call.options.workspace = {apart.data(), 50};
    call.given.saved = {apart.data() + 50, 50};
    ExpectTaken(call);
    // Of no bytes, they are nowhere.
    call.options.workspace = {call.wanted.q.data, 0};
    call.given.saved = {call.wanted.q.data, 0};
    ExpectTaken(call);
  }
  EXPECT_EQ(seen.size(), 12u + kGradients + 1u);
}

// All in one arena, end to end, the workspace and what was saved last: each begins where the one before it ends.
TEST(Overlap, OfNeighboursIsNone) {
  for (const Dtype dtype : kFloating) {
    for (Call& call : EveryCall(dtype)) {
      int64_t bytes = 24;
      ForEachGradient(call, [&](std::string_view, const auto& view) { bytes += view.given() ? SizeInBytes(view) : 0; });
      std::vector<double> arena(static_cast<size_t>(bytes / 8 + 1));
      call.wanted.scale = arena.data();
      std::byte* next = reinterpret_cast<std::byte*>(arena.data()) + 8;
      ForEachGradient(call, [&](std::string_view, auto& view) {
        if (!view.given()) return;
        view.data = next;
        next += SizeInBytes(view);
      });
      call.options.workspace = {next, 8};
      call.given.saved = {next + 8, 8};
      ExpectTaken(call);
    }
  }
}

}  // namespace
}  // namespace tercet::test
