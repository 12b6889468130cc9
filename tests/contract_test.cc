// What a call may be: every refusal by its code and its whole sentence; that a refused call has written nothing; views that share memory; arguments
// that are absurd, or right but for one random thing; and the caller's floating-point mode, which a call neither feels nor changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "tercet/tercet.hpp"
#include "tests/allocations.hpp"
#include "tests/support.hpp"

// Sanitizers answer an allocation that no machine can serve by null, as malloc does.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace tercet::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// ---- A call that is right as it stands, for a test to spoil ---------------------------------------------------------------------------------

struct Call {
  Options options;
  OwnedInputs tensors;
  Results results;
  Inputs in;
  Outputs out;

  Call() = default;
  Call(Call&&) = default;  // moved vectors keep their memory, so views into them stay right
};

Call Right(const RandomSpec& spec) {
  Call call;
  call.options.rule = spec.rule;
  call.options.normalize = spec.normalize;
  call.options.executor = UsualExecutor();
  call.tensors = RandomInputs(spec);
  call.in = call.tensors.view();
  call.results = Room(call.options, call.in);
  call.out = call.results.view();
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
RandomSpec In(Dtype dtype, Rule rule) {
  RandomSpec spec = Spec(rule);
  spec.dtype = dtype;
  return spec;
}
Call Right(Rule rule) { return Right(Spec(rule)); }

// Calls that together have every tensor there is.
std::vector<RandomSpec> EverySpec() {
  std::vector<RandomSpec> specs;
  for (const RuleInfo& info : Rules()) {
    for (RandomSpec spec : {Masked(info.rule), Packed(info.rule)}) {
      spec.normalize = info.can_normalize;
      specs.push_back(spec);
    }
  }
  return specs;
}
std::vector<Call> EveryCall() {
  std::vector<Call> calls;
  for (const RandomSpec& spec : EverySpec()) calls.push_back(Right(spec));
  return calls;
}

// visit(name, view) for every tensor of a call, given or not.
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
template <class Visit>
void ForEachOutput(Outputs& out, Visit&& visit) {
  visit("out", out.out);
  visit("final_state", out.final_state);
  visit("final_key_sum", out.final_key_sum);
}
template <class Visit>
void ForEachTensor(Call& call, Visit&& visit) {
  ForEachInput(call.in, visit);
  ForEachOutput(call.out, visit);
}

std::vector<decltype(Owned::bytes)> AllBytes(const Call& call) {
  const OwnedInputs& in = call.tensors;
  const Results& results = call.results;
  std::vector<decltype(Owned::bytes)> bytes;
  for (const Owned* owned : {&in.q, &in.k, &in.v, &in.log_decay, &in.beta, &in.remove, &in.write, &in.bonus, &in.initial_state, &in.initial_key_sum,
                             &in.offsets, &in.valid, &results.out, &results.final_state, &results.final_key_sum})
    bytes.push_back(owned->bytes);
  return bytes;
}

// Refused so, with not a byte of the call's memory changed.
void ExpectRefused(const Call& call, StatusCode code, const std::string& sentence) {
  const auto before = AllBytes(call);
  const Status status = Attend(call.options, call.in, call.out);
  EXPECT_EQ(status.code, code) << status.message;
  EXPECT_EQ(status.message, sentence);
  EXPECT_TRUE(before == AllBytes(call)) << "a refused call has written: " << sentence;
}

void ExpectOk(const Call& call) {
  const Status status = Attend(call.options, call.in, call.out);
  EXPECT_EQ(status.code, StatusCode::kOk);
  EXPECT_EQ(status.message, "");
}

template <class View>
void SetShape(View& view, const std::vector<int64_t>& shape) {
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
}

// The environment variable TERCET_TARGET for as long as this lives.
class TargetVariable {
 public:
  explicit TargetVariable(const char* value) {
    if (const char* now = std::getenv("TERCET_TARGET")) before_ = now;
    if (value != nullptr)
      setenv("TERCET_TARGET", value, 1);
    else
      unsetenv("TERCET_TARGET");
  }
  ~TargetVariable() {
    if (before_)
      setenv("TERCET_TARGET", before_->c_str(), 1);
    else
      unsetenv("TERCET_TARGET");
  }

 private:
  std::optional<std::string> before_;
};

// ---- Refusals, one a sentence -----------------------------------------------------------------------------------------------------------------

struct Refusal {
  const char* name;
  StatusCode code;
  const char* sentence;
  Call (*spoiled)();
};

class Refusals : public testing::TestWithParam<Refusal> {};

TEST_P(Refusals, SayWhatIsWrongAndWriteNothing) {
  const Refusal& refusal = GetParam();
  ExpectRefused(refusal.spoiled(), refusal.code, refusal.sentence);
}

// A call with one thing done to it: SPOIL(specification, what is done to `c`).
#define SPOIL(spec, ...)  \
  [] {                    \
    Call c = Right(spec); \
    __VA_ARGS__;          \
    return c;             \
  }

const Refusal kOptionRefusals[] = {
    {"rule_past_the_last", StatusCode::kInvalidOption, "rule is 9 and must be one of the 9 that Rules() lists",
     SPOIL(Rule::kLinear, c.options.rule = static_cast<Rule>(9))},
    {"rule_255", StatusCode::kInvalidOption, "rule is 255 and must be one of the 9 that Rules() lists",
     SPOIL(Rule::kLinear, c.options.rule = static_cast<Rule>(255))},
    {"form", StatusCode::kInvalidOption, "form is 4 and must be automatic, parallel, recurrent or chunkwise",
     SPOIL(Rule::kLinear, c.options.form = static_cast<Form>(4))},
    {"feature_map", StatusCode::kInvalidOption, "feature_map is 200 and must be identity, elu_plus_one, relu or l2_norm",
     SPOIL(Rule::kLinear, c.options.feature_map = static_cast<FeatureMap>(200))},
    {"chunk_negative", StatusCode::kInvalidOption, "chunk is -1 and must be at least 1, or 0 for the library's choice",
     SPOIL(Rule::kLinear, c.options.chunk = -1)},
    {"chunk_most_negative", StatusCode::kInvalidOption, "chunk is -9223372036854775808 and must be at least 1, or 0 for the library's choice",
     SPOIL(Rule::kLinear, c.options.chunk = INT64_MIN)},
    {"chunk_of_parallel", StatusCode::kInvalidOption, "chunk is 4 and must not be given for the parallel form, which has no chunks",
     SPOIL(Rule::kLinear, c.options.chunk = 4; c.options.form = Form::kParallel)},
    {"chunk_of_recurrent", StatusCode::kInvalidOption, "chunk is 1 and must not be given for the recurrent form, which has no chunks",
     SPOIL(Rule::kLinear, c.options.chunk = 1; c.options.form = Form::kRecurrent)},
    {"scale_nan", StatusCode::kInvalidOption, "scale is nan and must be finite", SPOIL(Rule::kLinear, c.options.scale = kNan)},
    {"scale_infinite", StatusCode::kInvalidOption, "scale is -inf and must be finite", SPOIL(Rule::kLinear, c.options.scale = -kInfinity)},
    {"scale_under_normalize", StatusCode::kInvalidOption, "scale is inf and must be finite",
     SPOIL(Normalized(Rule::kLinear), c.options.scale = kInfinity)},
    {"eps_negative", StatusCode::kInvalidOption, "eps is -0.5 and must be finite and at least 0", SPOIL(Rule::kLinear, c.options.eps = -0.5)},
    {"eps_nan", StatusCode::kInvalidOption, "eps is nan and must be finite and at least 0", SPOIL(Rule::kLinear, c.options.eps = kNan)},
    {"eps_infinite", StatusCode::kInvalidOption, "eps is inf and must be finite and at least 0", SPOIL(Rule::kLinear, c.options.eps = kInfinity)},
    {"normalize_delta", StatusCode::kInvalidOption,
     "normalize is true and must be false for delta: only a rule that adds k v' to the state has a key sum to divide by",
     SPOIL(Rule::kDelta, c.options.normalize = true)},
    {"normalize_rwkv7", StatusCode::kInvalidOption,
     "normalize is true and must be false for rwkv7: only a rule that adds k v' to the state has a key sum to divide by",
     SPOIL(Rule::kRwkv7, c.options.normalize = true)},
    {"threads", StatusCode::kInvalidOption, "threads is -3 and must be at least 1, or 0 for all", SPOIL(Rule::kLinear, c.options.threads = -3)},
    {"table_limit_negative", StatusCode::kInvalidOption, "table_limit is -1 and must be at least 0 bytes",
     SPOIL(Rule::kLinear, c.options.table_limit = -1)},
    {"workspace_negative", StatusCode::kInvalidOption, "workspace has -1 bytes and must have at least 0",
     SPOIL(Rule::kLinear, c.options.workspace = {&c.in, -1})},
    {"workspace_most_negative", StatusCode::kInvalidOption, "workspace has -9223372036854775808 bytes and must have at least 0",
     SPOIL(Rule::kLinear, c.options.workspace.bytes = INT64_MIN)},
    {"saved_negative", StatusCode::kInvalidOption, "saved has -1 bytes and must have at least 0",
     SPOIL(Rule::kLinear, c.out.saved = {c.tensors.q.bytes.data(), -1})},
    {"saved_of_nothing", StatusCode::kNullData, "saved has no data and must point to its 100 bytes", SPOIL(Rule::kLinear, c.out.saved.bytes = 100)},
    {"workspace_of_nothing", StatusCode::kNullData, "workspace has no data and must point to its 100 bytes",
     SPOIL(Rule::kLinear, c.options.workspace.bytes = 100)},
};

const Refusal kPresenceRefusals[] = {
    {"no_q", StatusCode::kMissingInput, "q was not given and linear needs it as [B, T, H, K]", SPOIL(Rule::kLinear, c.in.q = {})},
    {"no_k", StatusCode::kMissingInput, "k was not given and linear needs it as [B, T, H, K]", SPOIL(Rule::kLinear, c.in.k = {})},
    {"no_v", StatusCode::kMissingInput, "v was not given and linear needs it as [B, T, H, V]", SPOIL(Rule::kLinear, c.in.v = {})},
    {"no_log_decay_per_head", StatusCode::kMissingInput, "log_decay was not given and retention needs it as [H]",
     SPOIL(Rule::kRetention, c.in.log_decay = {})},
    {"no_log_decay_per_step", StatusCode::kMissingInput, "log_decay was not given and gated_delta needs it as [B, T, H]",
     SPOIL(Rule::kGatedDelta, c.in.log_decay = {})},
    {"no_log_decay_per_channel", StatusCode::kMissingInput, "log_decay was not given and kda needs it as [B, T, H, K]",
     SPOIL(Rule::kKda, c.in.log_decay = {})},
    {"no_beta", StatusCode::kMissingInput, "beta was not given and delta needs it as [B, T, H]", SPOIL(Rule::kDelta, c.in.beta = {})},
    {"no_remove", StatusCode::kMissingInput, "remove was not given and rwkv7 needs it as [B, T, H, K]", SPOIL(Rule::kRwkv7, c.in.remove = {})},
    {"no_write", StatusCode::kMissingInput, "write was not given and rwkv7 needs it as [B, T, H, K]", SPOIL(Rule::kRwkv7, c.in.write = {})},
    {"no_bonus", StatusCode::kMissingInput, "bonus was not given and rwkv6 needs it as [H, K]", SPOIL(Rule::kRwkv6, c.in.bonus = {})},
    {"no_out", StatusCode::kMissingInput, "out was not given and must be [B, T, H, V]", SPOIL(Rule::kLinear, c.out.out = {})},
    {"nothing_at_all", StatusCode::kMissingInput, "q was not given and linear needs it as [B, T, H, K]",
     SPOIL(Rule::kLinear, c.in = {}; c.out = {}; c.options = {})},
    {"log_decay_of_delta", StatusCode::kUnexpectedInput, "log_decay was given and delta takes none", SPOIL(Rule::kDelta, c.in.log_decay = c.in.beta)},
    {"beta_of_linear", StatusCode::kUnexpectedInput, "beta was given and linear takes none", SPOIL(Rule::kLinear, c.in.beta = c.in.q)},
    {"remove_of_kda", StatusCode::kUnexpectedInput, "remove was given and kda takes none", SPOIL(Rule::kKda, c.in.remove = c.in.q)},
    {"write_of_gla", StatusCode::kUnexpectedInput, "write was given and gla takes none", SPOIL(Rule::kGla, c.in.write = c.in.q)},
    {"bonus_of_rwkv7", StatusCode::kUnexpectedInput, "bonus was given and rwkv7 takes none", SPOIL(Rule::kRwkv7, c.in.bonus = c.in.q)},
    {"initial_key_sum_without_normalize", StatusCode::kUnexpectedInput, "initial_key_sum was given and there is a key sum only with normalize",
     SPOIL(Normalized(Rule::kLinear), c.options.normalize = false; c.out.final_key_sum = {})},
    {"final_key_sum_without_normalize", StatusCode::kUnexpectedInput, "final_key_sum was given and there is a key sum only with normalize",
     SPOIL(Normalized(Rule::kLinear), c.options.normalize = false; c.in.initial_key_sum = {})},
};

const Refusal kShapeRefusals[] = {
    {"q_rank", StatusCode::kShape, "q has shape [2, 6, 2] and must be [B, T, H, K]: batch, tokens, heads, key_dim",
     SPOIL(Rule::kLinear, c.in.q.rank = 3)},
    {"k_rank", StatusCode::kShape, "k has shape [2, 6] and must be [B, T, H, K]: batch, tokens, heads, key_dim",
     SPOIL(Rule::kLinear, c.in.k.rank = 2)},
    {"v_rank", StatusCode::kShape, "v has shape [2] and must be [B, T, H, V]: batch, tokens, heads, value_dim",
     SPOIL(Rule::kLinear, c.in.v.rank = 1)},
    {"q_no_head", StatusCode::kShape, "q has shape [2, 6, 0, 4] and must have at least one head and one channel",
     SPOIL(Rule::kLinear, c.in.q.shape[2] = 0)},
    {"k_no_channel", StatusCode::kShape, "k has shape [2, 6, 2, 0] and must have at least one head and one channel",
     SPOIL(Rule::kLinear, c.in.k.shape[3] = 0)},
    {"v_no_channel", StatusCode::kShape, "v has shape [2, 6, 2, 0] and must have at least one head and one channel",
     SPOIL(Rule::kLinear, c.in.v.shape[3] = 0)},
    {"k_heads", StatusCode::kShape, "k has 2 heads and must have a count that divides the 3 state heads, those of v",
     SPOIL(Rule::kLinear, c.in.v.shape[2] = 3)},
    {"v_heads", StatusCode::kShape, "v has 2 heads and must have a count that divides the 3 state heads, those of k",
     SPOIL(Rule::kLinear, c.in.k.shape[2] = 3)},
    {"q_heads_fewer", StatusCode::kShape, "q has 2 heads and must have a count that divides the 3 output heads, the larger count of k and v",
     SPOIL(Rule::kLinear, c.in.k.shape[2] = 3; c.in.v.shape[2] = 3)},
    {"q_heads_more", StatusCode::kShape, "q has 3 heads and must have a count that is a multiple of the 2 state heads, the larger count of k and v",
     SPOIL(Rule::kLinear, c.in.q.shape[2] = 3)},
    {"k_tokens", StatusCode::kShape, "k has shape [2, 5, 2, 4] and must be [B, T, H, K] = [2, 6, 2, 4]", SPOIL(Rule::kLinear, c.in.k.shape[1] = 5)},
    {"k_batch", StatusCode::kShape, "k has shape [1, 6, 2, 4] and must be [B, T, H, K] = [2, 6, 2, 4]", SPOIL(Rule::kLinear, c.in.k.shape[0] = 1)},
    {"k_key_dim", StatusCode::kShape, "k has shape [2, 6, 2, 3] and must be [B, T, H, K] = [2, 6, 2, 4]", SPOIL(Rule::kLinear, c.in.k.shape[3] = 3)},
    {"v_tokens", StatusCode::kShape, "v has shape [2, 7, 2, 5] and must be [B, T, H, V] = [2, 6, 2, 5]", SPOIL(Rule::kLinear, c.in.v.shape[1] = 7)},
    {"log_decay_per_head", StatusCode::kShape, "log_decay has shape [2, 6, 2] and must be [H] = [H] with H a divisor of the 2 state heads",
     SPOIL(Rule::kRetention, SetShape(c.in.log_decay, {2, 6, 2}))},
    {"log_decay_per_step", StatusCode::kShape,
     "log_decay has shape [2, 6, 2, 4] and must be [B, T, H] = [2, 6, H] with H a divisor of the 2 state heads",
     SPOIL(Rule::kGatedDelta, c.in.log_decay = c.in.k)},
    {"log_decay_per_channel", StatusCode::kShape,
     "log_decay has shape [2, 6, 2, 5] and must be [B, T, H, K] = [2, 6, H, 4] with H a divisor of the 2 state heads",
     SPOIL(Rule::kGla, c.in.log_decay = c.in.v)},
    {"log_decay_heads", StatusCode::kShape, "log_decay has 3 heads (shape [3]) and must have a count that divides the 2 state heads",
     SPOIL(Rule::kRetention, SetShape(c.in.log_decay, {3}))},
    {"log_decay_no_head", StatusCode::kShape, "log_decay has 0 heads (shape [0]) and must have a count that divides the 2 state heads",
     SPOIL(Rule::kRetention, SetShape(c.in.log_decay, {0}))},
    {"beta", StatusCode::kShape, "beta has shape [2, 5, 2] and must be [B, T, H] = [2, 6, H] with H a divisor of the 2 state heads",
     SPOIL(Rule::kDelta, c.in.beta.shape[1] = 5)},
    {"beta_heads", StatusCode::kShape, "beta has 4 heads (shape [2, 6, 4]) and must have a count that divides the 2 state heads",
     SPOIL(Rule::kDelta, c.in.beta.shape[2] = 4)},
    {"remove", StatusCode::kShape, "remove has shape [2, 6, 2] and must be [B, T, H, K] = [2, 6, H, 4] with H a divisor of the 2 state heads",
     SPOIL(Rule::kRwkv7, c.in.remove.rank = 3)},
    {"write_heads", StatusCode::kShape, "write has 0 heads (shape [2, 6, 0, 4]) and must have a count that divides the 2 state heads",
     SPOIL(Rule::kRwkv7, c.in.write.shape[2] = 0)},
    {"bonus", StatusCode::kShape, "bonus has shape [2, 3] and must be [H, K] = [H, 4] with H a divisor of the 2 state heads",
     SPOIL(Rule::kRwkv6, c.in.bonus.shape[1] = 3)},
    {"initial_state", StatusCode::kShape, "initial_state has shape [2, 2, 5, 4] and must be [N, H, K, V] = [2, 2, 4, 5]",
     SPOIL(Rule::kLinear, SetShape(c.in.initial_state, {2, 2, 5, 4}))},
    {"initial_state_packed", StatusCode::kShape, "initial_state has shape [1, 2, 4, 5] and must be [N, H, K, V] = [3, 2, 4, 5]",
     SPOIL(Packed(Rule::kLinear), c.in.initial_state.shape[0] = 1)},
    {"initial_key_sum", StatusCode::kShape, "initial_key_sum has shape [2, 2, 5] and must be [N, H, K] = [2, 2, 4]",
     SPOIL(Normalized(Rule::kLinear), c.in.initial_key_sum.shape[2] = 5)},
    {"out", StatusCode::kShape, "out has shape [2, 6, 1, 5] and must be [B, T, H, V] = [2, 6, 2, 5]", SPOIL(Rule::kLinear, c.out.out.shape[2] = 1)},
    {"final_state", StatusCode::kShape, "final_state has shape [2, 2, 4] and must be [N, H, K, V] = [2, 2, 4, 5]",
     SPOIL(Rule::kLinear, c.out.final_state.rank = 3)},
    {"final_key_sum", StatusCode::kShape, "final_key_sum has shape [2, 1, 4] and must be [N, H, K] = [2, 2, 4]",
     SPOIL(Normalized(Rule::kLinear), c.out.final_key_sum.shape[1] = 1)},
    {"valid", StatusCode::kShape, "valid has shape [2, 5] and must be [B, T] = [2, 6]", SPOIL(Masked(Rule::kLinear), c.in.valid.shape[1] = 5)},
    {"offsets_rank", StatusCode::kShape, "offsets has shape [4, 1] and must be [N + 1], one more than the packed sequences",
     SPOIL(Packed(Rule::kLinear), SetShape(c.in.offsets, {4, 1}))},
    {"offsets_empty", StatusCode::kShape, "offsets has shape [0] and must be [N + 1], one more than the packed sequences",
     SPOIL(Packed(Rule::kLinear), c.in.offsets.shape[0] = 0)},
    {"offsets_batch", StatusCode::kShape, "offsets was given with a batch of 2 and packed sequences must have a batch of 1",
     SPOIL(Packed(Rule::kLinear), c.in.q.shape[0] = 2)},
    {"offsets_of_too_many_states", StatusCode::kShape,
     "offsets has 1024 sequences, each of 549755813888 state heads, and must have so few that these are at most 2^48",
     SPOIL(Packed(Rule::kLinear), SetShape(c.in.offsets, {1025}); c.in.offsets.strides[0] = 0; c.in.initial_state = {}; c.out.final_state = {};
           c.in.q.shape[1] = c.in.k.shape[1] = c.in.v.shape[1] = c.out.out.shape[1] = 0; c.in.k.shape[2] = int64_t{1} << 39)},
};

const Refusal kDtypeRefusals[] = {
    {"q_dtype", StatusCode::kDtype, "q is i32 and must be f32, f64, bf16 or f16", SPOIL(Rule::kLinear, c.in.q.dtype = Dtype::kI32)},
    {"q_dtype_unknown", StatusCode::kDtype, "q is unknown and must be f32, f64, bf16 or f16",
     SPOIL(Rule::kLinear, c.in.q.dtype = static_cast<Dtype>(77))},
    {"out_dtype_unknown", StatusCode::kDtype, "out is unknown and must be f32, the dtype of q",
     SPOIL(Rule::kLinear, c.out.out.dtype = static_cast<Dtype>(255))},
    {"offsets_dtype", StatusCode::kDtype, "offsets is bool and must be i32 or i64", SPOIL(Packed(Rule::kLinear), c.in.offsets.dtype = Dtype::kBool)},
    {"valid_dtype", StatusCode::kDtype, "valid is i64 and must be bool", SPOIL(Masked(Rule::kLinear), c.in.valid.dtype = Dtype::kI64)},
};

const Refusal kValueRefusals[] = {
    {"offsets_begin", StatusCode::kValue, "offsets[0] is 1 and must be 0", SPOIL(Packed(Rule::kLinear), c.tensors.offsets.Set(0, 1))},
    {"offsets_begin_most_negative", StatusCode::kValue, "offsets[0] is -9223372036854775808 and must be 0",
     SPOIL(Packed(Rule::kLinear), c.tensors.offsets.Set(0, -0x1p63))},
    {"offsets_decrease", StatusCode::kValue, "offsets[2] is 1 and must be at least 2, the offset before it",
     SPOIL(Packed(Rule::kLinear), c.tensors.offsets.Set(2, 1))},
    {"offsets_most_negative", StatusCode::kValue, "offsets[3] is -9223372036854775808 and must be at least 2, the offset before it",
     SPOIL(Packed(Rule::kLinear), c.tensors.offsets.Set(3, -0x1p63))},
    {"offsets_end", StatusCode::kValue, "offsets ends with 5 and must end with 6, the number of tokens",
     SPOIL(Packed(Rule::kLinear), c.tensors.offsets.Set(3, 5))},
    {"offsets_end_far", StatusCode::kValue, "offsets ends with 4611686018427387904 and must end with 6, the number of tokens",
     SPOIL(Packed(Rule::kLinear), c.tensors.offsets.Set(3, 0x1p62))},
    {"offsets_of_no_sequence", StatusCode::kValue, "offsets ends with 0 and must end with 6, the number of tokens",
     SPOIL(Packed(Rule::kLinear), SetShape(c.in.offsets, {1}); c.in.initial_state = {}; c.out.final_state = {})},
    {"log_decay_per_head_positive", StatusCode::kValue,
     "log_decay[1] is 0.5 and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(Rule::kRetention, c.tensors.log_decay.Set(1, 0.5))},
    {"log_decay_per_head_nan", StatusCode::kValue,
     "log_decay[0] is nan and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(Rule::kRetention, c.tensors.log_decay.Set(0, kNan))},
    {"log_decay_per_step_positive", StatusCode::kValue,
     "log_decay[1, 5, 1] is inf and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(Rule::kGatedDelta, c.tensors.log_decay.Set(23, kInfinity))},
    {"log_decay_per_channel_positive", StatusCode::kValue,
     "log_decay[1, 3, 0, 2] is 0.75 and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(Rule::kKda, c.tensors.log_decay.Set((((6 + 3) * 2) + 0) * 4 + 2, 0.75))},
    {"log_decay_strided", StatusCode::kValue,
     "log_decay[0, 2, 1, 3] is 0.125 and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(Rule::kGla, c.tensors.log_decay.Set((2 * 2 + 1) * 4, 0.125);
           c.in.log_decay.data = static_cast<const std::byte*>(c.in.log_decay.data) + 3 * sizeof(float); c.in.log_decay.strides[3] = -1)},
    {"beta_nan", StatusCode::kValue, "beta[0, 4, 1] is nan and must be finite", SPOIL(Rule::kDelta, c.tensors.beta.Set(9, kNan))},
    {"beta_infinite", StatusCode::kValue, "beta[1, 0, 0] is -inf and must be finite", SPOIL(Rule::kDelta, c.tensors.beta.Set(12, -kInfinity))},
    {"log_decay_bf16_positive", StatusCode::kValue,
     "log_decay[1, 5, 1] is 0.5 and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(In(Dtype::kBF16, Rule::kGatedDelta), c.tensors.log_decay.Set(23, 0.5))},
    {"log_decay_bf16_strided", StatusCode::kValue,
     "log_decay[0, 2, 1, 3] is nan and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(In(Dtype::kBF16, Rule::kGla), c.tensors.log_decay.Set((2 * 2 + 1) * 4, kNan);
           c.in.log_decay.data = static_cast<const std::byte*>(c.in.log_decay.data) + 3 * 2; c.in.log_decay.strides[3] = -1)},
    {"log_decay_f16_least", StatusCode::kValue,
     "log_decay[1] is 5.96046448e-08 and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(In(Dtype::kF16, Rule::kRetention), c.tensors.log_decay.Set(1, 0x1p-24))},
    {"beta_bf16_nan", StatusCode::kValue, "beta[0, 4, 1] is nan and must be finite",
     SPOIL(In(Dtype::kBF16, Rule::kDelta), c.tensors.beta.Set(9, kNan))},
    {"beta_f16_infinite", StatusCode::kValue, "beta[1, 0, 0] is inf and must be finite",
     SPOIL(In(Dtype::kF16, Rule::kKda), c.tensors.beta.Set(12, 70000))},
    {"valid_excuses_no_valid_token", StatusCode::kValue, "beta[0, 4, 1] is inf and must be finite",
     SPOIL(Masked(Rule::kDelta), c.tensors.beta.Set(9, kInfinity); std::memset(c.tensors.valid.bytes.data(), 0, 12); c.tensors.valid.Set(4, 1))},
    {"valid_excuses_no_constant", StatusCode::kValue,
     "log_decay[1] is 0.5 and must be at most 0: it is the natural logarithm of the factor by which the state decays",
     SPOIL(Masked(Rule::kRetention), c.tensors.log_decay.Set(1, 0.5); std::memset(c.tensors.valid.bytes.data(), 0, 12))},
};

const Refusal kTableRefusals[] = {
    {"table_limit", StatusCode::kTableLimit,
     "table_limit is 143 bytes and must be at least 144 for the parallel form's table of 6 x 6; the chunkwise form computes the same with a small "
     "one",
     SPOIL(Rule::kLinear, c.options.form = Form::kParallel; c.options.table_limit = 143)},
    {"table_limit_of_nothing", StatusCode::kTableLimit,
     "table_limit is 0 bytes and must be at least 144 for the parallel form's table of 6 x 6; the chunkwise form computes the same with a small one",
     SPOIL(Rule::kKda, c.options.form = Form::kParallel; c.options.table_limit = 0)},
    {"table_limit_of_the_longest_sequence", StatusCode::kTableLimit,
     "table_limit is 63 bytes and must be at least 64 for the parallel form's table of 4 x 4; the chunkwise form computes the same with a small one",
     SPOIL(Packed(Rule::kRwkv7), c.options.form = Form::kParallel; c.options.table_limit = 63)},
};

std::string NameOf(const testing::TestParamInfo<Refusal>& instance) { return instance.param.name; }
INSTANTIATE_TEST_SUITE_P(Options, Refusals, testing::ValuesIn(kOptionRefusals), NameOf);
INSTANTIATE_TEST_SUITE_P(Presence, Refusals, testing::ValuesIn(kPresenceRefusals), NameOf);
INSTANTIATE_TEST_SUITE_P(Shapes, Refusals, testing::ValuesIn(kShapeRefusals), NameOf);
INSTANTIATE_TEST_SUITE_P(Dtypes, Refusals, testing::ValuesIn(kDtypeRefusals), NameOf);
INSTANTIATE_TEST_SUITE_P(Values, Refusals, testing::ValuesIn(kValueRefusals), NameOf);
INSTANTIATE_TEST_SUITE_P(Tables, Refusals, testing::ValuesIn(kTableRefusals), NameOf);

// ---- Refusals that every tensor can have ------------------------------------------------------------------------------------------------------

std::string ShapeOf(const ConstTensor& t) { return contract::ShapeText(t); }

// Does `spoil` to one tensor after another of every call, and expects the refusal whose sentence is what `spoil` returns.
template <class Spoil>
void ForEachSpoiled(StatusCode code, Spoil spoil) {
  std::map<std::string, int> seen;
  for (size_t which = 0; which < 15; ++which) {
    for (Call& call : EveryCall()) {
      size_t at = 0;
      std::string sentence;
      ForEachTensor(call, [&](std::string_view name, auto& view) {
        if (at++ == which && view.given()) sentence = spoil(std::string(name), view);
        if (!sentence.empty()) seen[std::string(name)] += at == which + 1;
      });
      if (!sentence.empty()) ExpectRefused(call, code, sentence);
    }
  }
  EXPECT_GE(seen.size(), 13u);
}

TEST(EveryTensor, HasARankThatIsOne) {
  for (const int rank : {5, -1, INT32_MAX, INT32_MIN})
    ForEachSpoiled(StatusCode::kShape, [&](const std::string& name, auto& view) {
      view.rank = rank;
      return name + " has rank " + std::to_string(rank) + " and must have one from 0 (not given) to 4";
    });
}

TEST(EveryTensor, HasNoNegativeSize) {
  for (const int64_t size : {int64_t{-1}, int64_t{INT64_MIN}})
    ForEachSpoiled(StatusCode::kShape, [&](const std::string& name, auto& view) {
      view.shape[view.rank - 1] = size;
      return name + " has shape " + ShapeOf(view) + " and must have no negative size";
    });
}

TEST(EveryTensor, HasNoMoreElementsThanCanBeCounted) {
  for (const int64_t size : {(int64_t{1} << 48) + 1, kHuge})
    ForEachSpoiled(StatusCode::kShape, [&](const std::string& name, auto& view) {
      view.shape[0] = size;
      view.strides[0] = 0;
      return name + " has shape " + ShapeOf(view) + " and must have sizes whose product is at most 2^48";
    });
  // Also behind an axis of none, where the elements are none.
  ForEachSpoiled(StatusCode::kShape, [&](const std::string& name, auto& view) {
    if (view.rank < 2) return std::string();
    view.shape[0] = 0;
    view.shape[1] = kHuge;
    view.shape[view.rank - 1] = kHuge;
    return name + " has shape " + ShapeOf(view) + " and must have sizes whose product is at most 2^48";
  });
}

TEST(EveryTensor, HasStridesWhoseOffsetsCanBeCounted) {
  for (const int64_t stride : {kHuge, int64_t{INT64_MIN}, int64_t{1} << 62, -(int64_t{1} << 62), int64_t{1} << 60, -(int64_t{1} << 61) - 1})
    ForEachSpoiled(StatusCode::kShape, [&](const std::string& name, auto& view) {
      view.strides[view.rank - 1] = stride;
      // A stride is used where there are two elements; for bool not all of these are too far.
      if (view.shape[view.rank - 1] < 2 || view.dtype == Dtype::kBool) return std::string();
      return name + " has shape " + ShapeOf(view) + " and strides that span more than 2^61 bytes, and must have strides that span less";
    });
}

TEST(EveryTensor, HasData) {
  ForEachSpoiled(StatusCode::kNullData, [&](const std::string& name, auto& view) {
    view.data = nullptr;
    return name + " has no data and must point to its " + std::to_string(contract::Count(view)) + " elements";
  });
}

TEST(EveryTensor, HasTheDtypeOfQ) {
  for (const Dtype dtype : {Dtype::kF64, Dtype::kBF16, Dtype::kF16, Dtype::kI32, Dtype::kI64, Dtype::kBool}) {
    std::map<std::string, int> seen;
    for (size_t which = 1; which < 15; ++which) {
      for (Call& call : EveryCall()) {
        size_t at = 0;
        std::string spoiled;
        ForEachTensor(call, [&](std::string_view name, auto& view) {
          if (at++ != which || !view.given() || name == "offsets" || name == "valid") return;
          view.dtype = dtype;
          spoiled = name;
        });
        if (spoiled.empty()) continue;
        ++seen[spoiled];
        ExpectRefused(call, StatusCode::kDtype, spoiled + " is " + std::string(Name(dtype)) + " and must be f32, the dtype of q");
      }
    }
    EXPECT_EQ(seen.size(), 12u);
  }
}

// Beside bf16 and f16 gates may be f32 and states must.
TEST(EveryTensor, BesideSixteenBitsHasTheDtypeOfItsKind) {
  const std::set<std::string> features = {"k", "v", "out"}, states = {"initial_state", "initial_key_sum", "final_state", "final_key_sum"};
  for (const Dtype q : {Dtype::kBF16, Dtype::kF16}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16, Dtype::kI32, Dtype::kI64, Dtype::kBool}) {
      std::set<std::string> seen, taken;
      for (size_t which = 1; which < 15; ++which) {
        for (RandomSpec spec : EverySpec()) {
          spec.dtype = q;
          Call call = Right(spec);
          size_t at = 0;
          std::string spoiled;
          ForEachTensor(call, [&](std::string_view name, auto& view) {
            if (at++ != which || !view.given() || name == "offsets" || name == "valid") return;
            view.dtype = dtype;
            spoiled = name;
          });
          if (spoiled.empty()) continue;
          const std::string must = features.count(spoiled) > 0 ? std::string(Name(q)) + ", the dtype of q"
                                   : states.count(spoiled) > 0 ? "f32, which states and key sums are where q is " + std::string(Name(q))
                                                               : std::string(Name(q)) + ", the dtype of q, or f32";
          const bool takes = dtype == q ? states.count(spoiled) == 0 : dtype == Dtype::kF32 && features.count(spoiled) == 0;
          seen.insert(spoiled);
          if (takes) {
            taken.insert(spoiled);
            call.options.check_values = false;
            contract::Layer layer;
            const Status status = contract::Validate(call.options, call.in, &call.out, &layer);
            EXPECT_TRUE(status.ok() || status.code == StatusCode::kOverlap) << status.message;
          } else {
            ExpectRefused(call, StatusCode::kDtype, spoiled + " is " + std::string(Name(dtype)) + " and must be " + must);
          }
        }
      }
      EXPECT_EQ(seen.size(), 12u);
      EXPECT_EQ(taken.size(), dtype == q ? 8u : dtype == Dtype::kF32 ? 9u : 0u);
    }
  }
}

TEST(EveryRule, NeedsWhatItListsAndTakesNothingElse) {
  for (const RuleInfo& info : Rules()) {
    const std::string rule(info.name);
    const auto check = [&](const char* name, ConstTensor Inputs::*member, bool takes, std::string_view layout) {
      Call call = Right(info.rule);
      if (takes) {
        call.in.*member = {};
        ExpectRefused(call, StatusCode::kMissingInput, std::string(name) + " was not given and " + rule + " needs it as " + std::string(layout));
      } else {
        call.in.*member = call.in.q;
        ExpectRefused(call, StatusCode::kUnexpectedInput, std::string(name) + " was given and " + rule + " takes none");
      }
    };
    check("log_decay", &Inputs::log_decay, !info.log_decay_layout.empty(), info.log_decay_layout);
    check("beta", &Inputs::beta, info.takes_beta, "[B, T, H]");
    check("remove", &Inputs::remove, info.takes_remove_and_write, "[B, T, H, K]");
    check("write", &Inputs::write, info.takes_remove_and_write, "[B, T, H, K]");
    check("bonus", &Inputs::bonus, info.takes_bonus, "[H, K]");
    Call call = Right(info.rule);
    ExpectOk(call);
    call.options.normalize = true;
    if (!info.can_normalize)
      ExpectRefused(call, StatusCode::kInvalidOption,
                    "normalize is true and must be false for " + rule + ": only a rule that adds k v' to the state has a key sum to divide by");
  }
}

// ---- Limits on memory -------------------------------------------------------------------------------------------------------------------------

TEST(TableLimit, IsReachedAndNotPassed) {
  for (const RuleInfo& info : Rules()) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16}) {
      RandomSpec spec = Spec(info.rule);
      spec.dtype = dtype;
      Call call = Right(spec);
      call.options.form = Form::kParallel;
      call.options.table_limit = 36 * contract::SizeOf(contract::StateDtype(dtype));  // a table holds accumulators
      ExpectOk(call);
      Call below = Right(spec);
      below.options = call.options;
      --below.options.table_limit;
      const Status status = Attend(below.options, below.in, below.out);
      EXPECT_EQ(status.code, StatusCode::kTableLimit);
      // It binds the parallel form only.
      for (const Form form : {Form::kRecurrent, Form::kChunkwise, Form::kAutomatic}) {
        below.options.form = form;
        below.options.table_limit = 0;
        ExpectOk(below);
      }
    }
  }
}

TEST(TableLimit, SaysHowMuchHoweverMuchThatIs) {
  // 2^46 tokens that are one element; nothing here is read or written.
  const int64_t tokens = int64_t{1} << 46;
  Call call;
  const auto view = [&](auto& tensor, uintptr_t address, int64_t stride) {
    tensor.data = reinterpret_cast<float*>(address);
    SetShape(tensor, {1, tokens, 1, 1});
    tensor.strides[1] = stride;
  };
  view(call.in.q, 4096, 0);
  view(call.in.k, 8192, 0);
  view(call.in.v, 12288, 0);
  view(call.out.out, 16384, 1);
  call.options.form = Form::kParallel;
  ExpectRefused(
      call, StatusCode::kTableLimit,
      "table_limit is 1073741824 bytes and must be at least 19807040628566084398385987584 for the parallel form's table of 70368744177664 x "
      "70368744177664; the chunkwise form computes the same with a small one");
  call.options.table_limit = kHuge;
  ExpectRefused(call, StatusCode::kTableLimit,
                "table_limit is 9223372036854775807 bytes and must be at least 19807040628566084398385987584 for the parallel form's table of "
                "70368744177664 x 70368744177664; the chunkwise form computes the same with a small one");
  call.options.form = Form::kChunkwise;
  call.options.chunk = kHuge;
  ExpectRefused(
      call, StatusCode::kOutOfMemory,
      "the call takes 70368744177664 tokens at a time with key_dim 1 and value_dim 1, and these must be so small that the tables of them are "
      "at most 2^50 numbers; a smaller chunk takes fewer tokens at a time");
}

TEST(Memory, ThatCanNotBeHadIsRefused) {
  // A chunk of 2^23 tokens: a table of 2^49 bytes, more than an address space holds.
  const int64_t tokens = int64_t{1} << 23;
  const double one = 1;
  std::vector<double> out(tokens, 12345.0);
  Call call;
  for (ConstTensor* tensor : {&call.in.q, &call.in.k, &call.in.v}) {
    *tensor = View(&one, {1, tokens, 1, 1});
    tensor->strides[1] = 0;
  }
  call.out.out = View(out.data(), {1, tokens, 1, 1});
  call.options.form = Form::kChunkwise;
  call.options.chunk = tokens;
  const Status status = Attend(call.options, call.in, call.out);
  EXPECT_EQ(status.code, StatusCode::kOutOfMemory);
  EXPECT_EQ(status.message.find("the call needs "), 0u) << status.message;
  EXPECT_GE(std::atoll(status.message.c_str() + std::strlen("the call needs ")), int64_t{1} << 49);
  EXPECT_NE(status.message.find(" bytes to work in and they could not be had; a smaller chunk or fewer threads need less"), std::string::npos);
  EXPECT_EQ(std::count(out.begin(), out.end(), 12345.0), tokens);
}

// C++'s heap is not asked at all, and the memory to work in is the thread's own from its last call: a stream of decode steps allocates nothing.
TEST(Memory, IsNotAskedForAgainAndAgain) {
  ThreadExecutor one(1);
  for (const RandomSpec& spec : {Masked(Rule::kKda), Packed(Rule::kRwkv6), Normalized(Rule::kRetention), Masked(Rule::kRwkv7)}) {
    for (const Form form : {Form::kAutomatic, Form::kRecurrent, Form::kChunkwise, Form::kParallel}) {
      Call call = Right(spec);
      call.options.form = form;
      call.options.executor = &one;
      Status status = Attend(call.options, call.in, call.out);  // the first of a process makes its lists of rules and targets
      largest_block = 0;
      status = Attend(call.options, call.in, call.out);
      EXPECT_EQ(largest_block, 0u);
      EXPECT_TRUE(status.ok()) << status.message;
    }
  }
}

// ---- The caller's workspace ---------------------------------------------------------------------------------------------------------------------

const Form kForms[] = {Form::kAutomatic, Form::kParallel, Form::kRecurrent, Form::kChunkwise};

// An executor made of what it does.
class Executes : public Executor {
 public:
  Executes(int concurrency, std::function<void(int64_t, const std::function<void(int64_t)>&)> run)
      : concurrency_(concurrency), run_(std::move(run)) {}
  int Concurrency() const override { return concurrency_; }
  void ParallelFor(int64_t count, const std::function<void(int64_t)>& body) override { run_(count, body); }

 private:
  int concurrency_;
  std::function<void(int64_t, const std::function<void(int64_t)>&)> run_;
};

// One piece after another, in order: an executor may.
void RunInOrder(int64_t count, const std::function<void(int64_t)>& body) {
  for (int64_t i = 0; i < count; ++i) body(i);
}

// Work enough for a second thread.
RandomSpec Large(Rule rule) {
  RandomSpec spec = Spec(rule);
  spec.batch = 1;
  spec.tokens = 80;
  spec.heads = 1;
  spec.key_dim = 65;
  spec.value_dim = 257;
  return spec;
}

int64_t BytesOf(const Call& call) {
  int64_t bytes = -1;
  const Status status = WorkspaceBytes(call.options, call.in, call.out, &bytes);
  EXPECT_TRUE(status.ok()) << status.message;
  return bytes;
}

// Specifications whose calls are shared out among threads, by heads or by value columns, and one that is not.
std::vector<RandomSpec> SharedOut(const RuleInfo& info) {
  std::vector<RandomSpec> specs = {Packed(info.rule), Large(info.rule), Large(info.rule)};
  specs[2].heads = 6;
  specs[2].value_dim = 40;
  for (RandomSpec& spec : specs) spec.normalize = info.can_normalize;
  return specs;
}

// Of exactly so many bytes, at any address, full of anything and between guards: the bits are those of a call without one, the guards stay, and
// C++'s heap is not asked at all, however many workers there are.
TEST(CallersWorkspace, OfExactlyWhatIsSaidIsAllThatIsUsed) {
  constexpr int64_t kGuard = 64;
  for (const RuleInfo& info : Rules()) {
    for (RandomSpec spec : SharedOut(info)) {
      for (const Form form : kForms) {
        for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16}) {
          spec.dtype = dtype;
          Call without = Right(spec), with = Right(spec);
          without.options.form = with.options.form = form;
          ExpectOk(without);
          for (const int threads : {1, 2, 5}) {
            Executes in_order(threads, RunInOrder);
            with.options.executor = &in_order;
            with.options.workspace = {};
            const int64_t bytes = BytesOf(with), shift = (7 * threads) % kGuard;
            ASSERT_GT(bytes, 0);
            std::vector<std::byte> memory(static_cast<size_t>(bytes + 3 * kGuard), std::byte{0xff});
            std::byte* data = memory.data() + kGuard + shift;
            with.options.workspace = {data, bytes};
            largest_block = 0;
            const Status status = Attend(with.options, with.in, with.out);
            EXPECT_EQ(largest_block, 0u);
            ASSERT_TRUE(status.ok()) << status.message;
            ExpectSameBits(with.results, without.results);
            EXPECT_EQ(std::count(memory.data(), data, std::byte{0xff}), kGuard + shift);
            EXPECT_EQ(std::count(data + bytes, memory.data() + memory.size(), std::byte{0xff}), 2 * kGuard - shift);
            EXPECT_LT(std::count(data, data + bytes, std::byte{0xff}), bytes);
          }
        }
      }
    }
  }
}

// A thread of its own has kept nothing from another test's call.
TEST(CallersWorkspace, IsInPlaceOfMemoryOfTheLibrarys) {
  std::thread([] {
    ThreadExecutor one(1);
    Call call = Right(Rule::kKda);
    call.options.executor = &one;
    std::vector<std::byte> memory(static_cast<size_t>(BytesOf(call)));
    Options with = call.options;
    with.workspace = {memory.data(), static_cast<int64_t>(memory.size())};
    Status status = Attend(with, call.in, call.out);  // the first of a process makes its lists of rules and targets
    largest_block = 0;
    status = Attend(with, call.in, call.out);
    EXPECT_EQ(largest_block, 0u);
    EXPECT_TRUE(status.ok()) << status.message;
    status = Attend(call.options, call.in, call.out);
    EXPECT_EQ(largest_block, memory.size() - 63);
    EXPECT_TRUE(status.ok()) << status.message;
  }).join();
}

TEST(CallersWorkspace, ThatIsTooSmallIsRefused) {
  for (const RuleInfo& info : Rules()) {
    for (const Form form : kForms) {
      Call call = Right(info.rule);
      call.options.form = form;
      const int64_t needed = BytesOf(call);
      std::vector<std::byte> memory(static_cast<size_t>(needed), std::byte{0x3a});
      for (const int64_t bytes : {needed - 1, int64_t{1}, int64_t{0}}) {
        call.options.workspace = {memory.data(), bytes};
        ExpectRefused(call, StatusCode::kInvalidOption,
                      "workspace has " + std::to_string(bytes) + " bytes and must have at least " + std::to_string(needed) +
                          ", which WorkspaceBytes says of this call");
      }
      EXPECT_EQ(std::count(memory.begin(), memory.end(), std::byte{0x3a}), needed);
    }
  }
}

// Over the last or the first byte of every tensor, before it and after it.
TEST(CallersWorkspace, MustBeApartFromEveryTensor) {
  for (Call& call : EveryCall()) {
    std::vector<std::byte> memory(static_cast<size_t>(BytesOf(call)));
    ForEachTensor(call, [&](std::string_view name, auto& view) {
      if (!view.given()) return;
      const int64_t size = contract::Count(view) * contract::SizeOf(view.dtype);
      // A copy of the tensor in memory that has room on both sides.
      std::vector<std::byte> room(static_cast<size_t>(2 * memory.size() + size));
      std::byte* copy = room.data() + memory.size();
      std::memcpy(copy, view.data, static_cast<size_t>(size));
      const auto was = view.data;
      view.data = copy;
      const auto bytes = static_cast<int64_t>(memory.size());
      const std::string sentence = "workspace shares memory with " + std::string(name) + " and must be apart from it";
      for (const int64_t at : {size - 1, 1 - bytes}) {
        call.options.workspace = {copy + at, bytes};
        ExpectRefused(call, StatusCode::kOverlap, sentence);
      }
      call.options.workspace = {copy, INT64_MAX};
      const Status status = Attend(call.options, call.in, call.out);
      EXPECT_EQ(status.code, StatusCode::kOverlap);
      for (const int64_t at : {size, -bytes}) {
        call.options.workspace = {copy + at, bytes};
        ExpectOk(call);
      }
      call.options.workspace = {};
      view.data = was;
    });
  }
}

// So must what is kept for the gradients, also from the workspace.
TEST(CallersSaved, MustBeApartFromEverything) {
  std::set<std::string> seen;
  for (Call& call : EveryCall()) {
    ForEachTensor(call, [&](std::string_view name, auto& view) {
      if (!view.given()) return;
      seen.insert(std::string(name));
      std::byte* data = const_cast<std::byte*>(static_cast<const std::byte*>(view.data));
      const int64_t size = contract::Count(view) * contract::SizeOf(view.dtype);
      for (const Workspace over : {Workspace{data, 1}, Workspace{data + size - 1, 1}, Workspace{data, size}}) {
        call.out.saved = over;
        ExpectRefused(call, StatusCode::kOverlap, "saved shares memory with " + std::string(name) + " and must be apart from it");
      }
    });
    std::vector<std::byte> memory(100);
    call.out.saved = {memory.data(), 60};
    call.options.workspace = {memory.data() + 59, 41};
    ExpectRefused(call, StatusCode::kOverlap, "workspace shares memory with saved and must be apart from it");
    call.options.workspace = {memory.data() + 60, 40};
    contract::Layer layer;
    EXPECT_TRUE(contract::Validate(call.options, call.in, &call.out, &layer).ok());
  }
  EXPECT_EQ(seen.size(), 15u);
}

// In a gap that a tensor's strides leave it is apart.
TEST(CallersWorkspace, MayLieBetweenTheRowsOfATensor) {
  Call plain = Right(Rule::kKda), call = Right(Rule::kKda);
  ExpectOk(plain);
  const int64_t bytes = BytesOf(call), row = 2 * 5 * 4, gap = bytes + 100 - bytes % 4;
  std::vector<std::byte> memory(static_cast<size_t>(12 * (row + gap)));
  call.out.out.data = memory.data();
  call.out.out.strides = {6 * (row + gap) / 4, (row + gap) / 4, 5, 1};
  call.options.workspace = {memory.data() + 3 * (row + gap) + row, bytes};
  ExpectOk(call);
  for (int64_t token = 0; token < 12; ++token)
    EXPECT_EQ(std::memcmp(memory.data() + token * (row + gap), plain.results.out.bytes.data() + token * row, static_cast<size_t>(row)), 0);
  call.options.workspace = {memory.data() + 3 * (row + gap) + row - 1, bytes};
  const Status status = Attend(call.options, call.in, call.out);
  EXPECT_EQ(status.message, "workspace shares memory with out and must be apart from it");
}

TEST(CallersWorkspace, IsNotNeededWhereThereIsNothingToCompute) {
  Call call = Right(Rule::kLinear);
  for (ConstTensor* t : {&call.in.q, &call.in.k, &call.in.v}) t->shape[1] = 0;
  call.out.out.shape[1] = 0;
  call.out.final_state = {};
  EXPECT_EQ(BytesOf(call), 0);
  std::byte none{};
  call.options.workspace = {&none, 0};
  ExpectOk(call);
}

// The query says what Attend says, whatever workspace the options have, and sets nothing where it refuses.
TEST(CallersWorkspace, IsAskedForAsACallIsMade) {
  for (const auto& refusals : {std::vector<Refusal>(std::begin(kOptionRefusals), std::end(kOptionRefusals)),
                               std::vector<Refusal>(std::begin(kValueRefusals), std::end(kValueRefusals)),
                               std::vector<Refusal>(std::begin(kTableRefusals), std::end(kTableRefusals))}) {
    for (const Refusal& refusal : refusals) {
      const Call call = refusal.spoiled();
      int64_t bytes = -7;
      const Status status = WorkspaceBytes(call.options, call.in, call.out, &bytes);
      if (std::string_view(refusal.name).substr(0, 9) == "workspace") {
        EXPECT_TRUE(status.ok()) << status.message;
        EXPECT_GT(bytes, 0);
      } else {
        EXPECT_EQ(status.code, refusal.code);
        EXPECT_EQ(status.message, refusal.sentence);
        EXPECT_EQ(bytes, -7);
      }
    }
  }
}

// Of more workers than memory there is: the most that can be said, and not had.
TEST(CallersWorkspace, IsCountedWithoutOverflow) {
  const int64_t tokens = int64_t{1} << 24;
  Executes many(INT32_MAX, RunInOrder);
  Call call;
  const auto view = [&](auto& tensor, uintptr_t address, const std::array<int64_t, kMaxRank>& strides) {  // nothing here is read or written
    tensor.data = reinterpret_cast<float*>(address);
    SetShape(tensor, {1 << 12, tokens, 1 << 12, 1});
    tensor.strides = strides;
  };
  view(call.in.q, 4096, {});
  view(call.in.k, 8192, {});
  view(call.in.v, 12288, {});
  view(call.out.out, 16384, {tokens << 12, 1 << 12, 1, 1});
  call.options.executor = &many;
  call.options.form = Form::kChunkwise;
  call.options.chunk = tokens;
  EXPECT_EQ(BytesOf(call), kHuge);
  const Status status = Attend(call.options, call.in, call.out);
  EXPECT_EQ(status.code, StatusCode::kOutOfMemory) << status.message;
}

// ---- Executors --------------------------------------------------------------------------------------------------------------------------------

TEST(Executors, ThatDoNothingOrThrowAreSaidSo) {
  Executes nothing(4, [](int64_t, const std::function<void(int64_t)>&) {});
  Call call = Right(Large(Rule::kLinear));
  call.options.executor = &nothing;
  ExpectRefused(call, StatusCode::kInternal, "the executor returned before it had run every piece of the call, so the outputs are not complete");
  Executes throws(4, [](int64_t, const std::function<void(int64_t)>&) { throw std::runtime_error("no"); });
  call.options.executor = &throws;
  const Status status = Attend(call.options, call.in, call.out);
  EXPECT_EQ(status.code, StatusCode::kInternal);
  EXPECT_FALSE(status.message.empty());
}

TEST(Executors, MayRunInAnyOrderAndClaimAnyConcurrency) {
  const auto backwards = [](int64_t count, const std::function<void(int64_t)>& body) {
    for (int64_t i = count - 1; i >= 0; --i) body(i);
  };
  const auto only_one = [](int64_t, const std::function<void(int64_t)>& body) { body(0); };
  for (const Rule rule : {Rule::kLinear, Rule::kKda}) {
    Call whole = Right(Large(rule));
    whole.options.threads = 1;
    ExpectOk(whole);
    for (const int concurrency : {1, 2, 7, INT32_MAX, 0, -1, INT32_MIN}) {
      for (const auto& run : std::vector<std::function<void(int64_t, const std::function<void(int64_t)>&)>>{RunInOrder, backwards, only_one}) {
        Executes executor(concurrency, run);
        Call call = Right(Large(rule));
        call.options.executor = &executor;
        ExpectOk(call);
        ExpectSameBits(call.results, whole.results);
      }
    }
  }
}

// ---- Targets ----------------------------------------------------------------------------------------------------------------------------------

std::string Known() {
  std::string known;
  for (const std::string& name : Targets()) known += (known.empty() ? "" : ", ") + name;
  return known;
}

TEST(TargetOption, MustBeOneThatIsThere) {
  const TargetVariable none(nullptr);
  ASSERT_FALSE(Targets().empty());
  for (const char* name : {"sse9", "AVX", " ", "AVX2 ", "\xff\xfe", "unknown"}) {
    Call call = Right(Rule::kLinear);
    call.options.target = name;
    const std::string sentence = "target is \"" + std::string(name) + "\" and must be one of those this build and this machine have: " + Known();
    ExpectRefused(call, StatusCode::kInvalidOption, sentence);
    std::string chosen = "as it was";
    const Status status = ChooseTarget(name, &chosen);
    EXPECT_EQ(status.code, StatusCode::kInvalidOption);
    EXPECT_EQ(status.message, sentence);
    EXPECT_EQ(chosen, "as it was");
  }
}

TEST(TargetOption, MayBeInAnyCaseAndWinsOverTheEnvironment) {
  const TargetVariable wrong("sse9");
  for (const std::string& name : Targets()) {
    std::string lower = name;
    for (char& letter : lower) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    for (const std::string& spelt : {name, lower}) {
      std::string chosen;
      EXPECT_TRUE(ChooseTarget(spelt, &chosen).ok());
      EXPECT_EQ(chosen, name);
      Call call = Right(Rule::kLinear);
      call.options.target = spelt;
      ExpectOk(call);
    }
  }
}

TEST(TargetVariable, IsTakenWhereNoOptionIsGiven) {
  {
    const TargetVariable wrong("no such");
    ExpectRefused(Right(Rule::kLinear), StatusCode::kInvalidOption,
                  "TERCET_TARGET is \"no such\" and must be one of those this build and this machine have: " + Known());
  }
  for (const char* best : {static_cast<const char*>(nullptr), ""}) {
    const TargetVariable variable(best);
    std::string chosen;
    EXPECT_TRUE(ChooseTarget("", &chosen).ok());
    EXPECT_EQ(chosen, Targets().front());
    ExpectOk(Right(Rule::kLinear));
  }
  for (const std::string& name : Targets()) {
    const TargetVariable variable(name.c_str());
    std::string chosen;
    EXPECT_TRUE(ChooseTarget("", &chosen).ok());
    EXPECT_EQ(chosen, name);
  }
}

// ---- Nothing to compute -----------------------------------------------------------------------------------------------------------------------

TEST(Empty, NoTokensNeedNoDataAndHandTheStateOn) {
  for (const RuleInfo& info : Rules()) {
    for (const Form form : kForms) {
      for (const bool given : {true, false}) {
        RandomSpec spec = Masked(info.rule);
        spec.tokens = 0;
        spec.normalize = info.can_normalize;
        spec.initial_state = given;
        Call call = Right(spec);
        call.options.form = form;
        for (ConstTensor* tensor : {&call.in.q, &call.in.k, &call.in.v, &call.in.beta, &call.in.remove, &call.in.write, &call.in.valid})
          tensor->data = nullptr;
        if (info.log_decay_layout != "[H]") call.in.log_decay.data = nullptr;
        call.out.out.data = nullptr;
        call.in.q.strides = {kHuge, INT64_MIN, 0, -1};  // and no strides that mean anything
        call.out.out.strides = {0, 0, kHuge, 0};
        ExpectOk(call);
        const Owned zeros = Owned::Zeros(Dtype::kF32, {2, 2, 4, 5});
        EXPECT_TRUE(SameBits(call.results.final_state, given ? call.tensors.initial_state : zeros)) << info.name;
        if (spec.normalize) {
          EXPECT_TRUE(SameBits(call.results.final_key_sum, given ? call.tensors.initial_key_sum : Owned::Zeros(Dtype::kF32, {2, 2, 4}))) << info.name;
        }
      }
    }
  }
}

TEST(Empty, NoBatchAndNoSequences) {
  for (const RuleInfo& info : Rules()) {
    for (const Form form : kForms) {
      RandomSpec spec = Spec(info.rule);
      spec.batch = 0;
      spec.normalize = info.can_normalize;
      Call batch = Right(spec);
      spec = Packed(info.rule);
      spec.tokens = 0;
      spec.offsets = {0};
      spec.normalize = info.can_normalize;
      Call sequences = Right(spec);
      for (Call* call : {&batch, &sequences}) {
        call->options.form = form;
        ForEachTensor(*call, [](std::string_view name, auto& view) {
          if (contract::Count(view) == 0 || !view.given())
            view.data = nullptr;
          else
            EXPECT_TRUE(name == "offsets" || name == "bonus" || name == "log_decay") << name;
        });
        ExpectOk(*call);
      }
    }
  }
  // Offsets of 32 bits, and none.
  const int32_t offsets[] = {0, 2, 2, 6};
  Call narrow = Right(Packed(Rule::kGla)), wide = Right(Packed(Rule::kGla));
  narrow.in.offsets = View(offsets, {4});
  ExpectOk(narrow);
  ExpectOk(wide);
  ExpectSameBits(narrow.results, wide.results);
}

// ---- Gates ------------------------------------------------------------------------------------------------------------------------------------

TEST(Gates, OfInvalidTokensMayBeAnything) {
  for (const RuleInfo& info : Rules()) {
    for (const Form form : kForms) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16}) {
        RandomSpec spec = Masked(info.rule);
        spec.dtype = dtype;
        Call good = Right(spec), spoiled = Right(spec);
        good.options.form = spoiled.options.form = form;
        const double poison[] = {kNan, 1.0, kInfinity, -kInfinity};
        int64_t invalid = 0;
        for (int64_t token = 0; token < 12; ++token) {
          if (spec.valid_fraction < 1 && spoiled.tensors.valid.Get(token) != 0) continue;
          ++invalid;
          if (info.log_decay_layout == "[B, T, H]") spoiled.tensors.log_decay.Set(token * 2 + token % 2, poison[token % 4]);
          if (info.log_decay_layout == "[B, T, H, K]") spoiled.tensors.log_decay.Set(token * 8 + token % 8, poison[token % 4]);
          if (info.takes_beta) spoiled.tensors.beta.Set(token * 2 + 1, poison[token % 4]);
        }
        ASSERT_GT(invalid, 0);
        ExpectOk(good);
        ExpectOk(spoiled);
        ExpectSameBits(spoiled.results, good.results);
      }
    }
  }
}

TEST(Gates, AreNotLookedAtWhereThatIsOff) {
  for (const RuleInfo& info : Rules()) {
    for (const Form form : kForms) {
      for (const double value : {kNan, 1.0, 1e30, kInfinity}) {
        Call call = Right(info.rule);
        call.options.form = form;
        call.options.check_values = false;
        for (Owned* gate : {&call.tensors.log_decay, &call.tensors.beta})
          if (!gate->shape.empty()) gate->Set(gate->size() - 1, value);
        ExpectOk(call);
      }
    }
  }
}

TEST(Gates, MayBeZeroOrMinusInfinity) {
  for (const double value : {0.0, -0.0, -kInfinity, -1e300}) {
    for (const Rule rule : {Rule::kRetention, Rule::kGatedDelta, Rule::kKda}) {
      RandomSpec spec = Spec(rule);
      spec.dtype = Dtype::kF64;
      Call call = Right(spec);
      call.tensors.log_decay.Set(0, value);
      ExpectOk(call);
      for (int64_t i = 0; i < call.results.out.size(); ++i) EXPECT_TRUE(std::isfinite(call.results.out.Get(i)));
    }
  }
}

// ---- Shared memory ----------------------------------------------------------------------------------------------------------------------------

TEST(Overlap, OfAnOutputWithItselfIsRefused) {
  const auto check = [](const char* name, auto spoil) {
    Call call = Right(Normalized(Rule::kGla));
    spoil(call.out);
    ExpectRefused(call, StatusCode::kOverlap,
                  std::string(name) + " has strides under which two of its elements share memory and each must have its own");
  };
  check("out", [](Outputs& out) { out.out.strides[1] = 0; });
  check("out", [](Outputs& out) { out.out.strides[2] = 4; });
  check("out", [](Outputs& out) { out.out.strides[0] = -out.out.strides[1]; });
  check("final_state", [](Outputs& out) { out.final_state.strides[3] = 0; });
  check("final_state", [](Outputs& out) { out.final_state.strides[0] = 1; });
  check("final_key_sum", [](Outputs& out) { out.final_key_sum.strides[1] = 3; });
}

// Every output laid over every other tensor, the smaller one inside the larger.
TEST(Overlap, OfAnOutputWithAnythingElseIsRefused) {
  int checked = 0;
  for (size_t written = 0; written < 3; ++written) {
    for (size_t other = 0; other < 15; ++other) {
      for (Call& call : EveryCall()) {
        Tensor* output = nullptr;
        std::string output_name, other_name;
        size_t at = 0;
        ForEachOutput(call.out, [&](std::string_view name, Tensor& view) {
          if (at++ == written && view.given()) output = &view, output_name = name;
        });
        if (output == nullptr || other == 12 + written) continue;
        at = 0;
        ForEachTensor(call, [&](std::string_view name, auto& view) {
          if (at++ != other || !view.given()) return;
          other_name = name;
          const int64_t sizes[] = {contract::Count(*output) * 4, contract::Count(view) * contract::SizeOf(view.dtype)};
          if (name == "offsets") std::memcpy(output->data, view.data, static_cast<size_t>(sizes[1]));  // they are read before memory is looked at
          if (sizes[0] < sizes[1] && name != "offsets")
            output->data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(view.data))) + sizes[1] - sizes[0];
          else
            view.data = static_cast<std::byte*>(output->data) + (name == "offsets" ? 0 : sizes[0] - sizes[1]);
        });
        if (other_name.empty()) continue;
        // The very same view is what a state may be.
        const bool own =
            (output_name == "final_state" && other_name == "initial_state") || (output_name == "final_key_sum" && other_name == "initial_key_sum");
        if (own) continue;
        ++checked;
        if (other >= 12 && other < 12 + written) std::swap(output_name, other_name);  // of two outputs the first is named first
        ExpectRefused(call, StatusCode::kOverlap, output_name + " shares memory with " + other_name + " and must be apart from it");
      }
    }
  }
  EXPECT_GT(checked, 200);
}

TEST(Overlap, OfAStateWithItsOwnInitialStateMustBeWhole) {
  const std::string state = "final_state shares memory with initial_state and must be the same view of it, or apart from it";
  const std::string key_sum = "final_key_sum shares memory with initial_key_sum and must be the same view of it, or apart from it";
  const auto check = [](const std::string& sentence, auto spoil) {
    Call call = Right(Normalized(Rule::kGla));
    // In the middle of memory of their own: what is shifted meets no other tensor, wherever these lie.
    std::vector<std::byte> memory[2];
    for (ConstTensor* t : {&call.in.initial_state, &call.in.initial_key_sum}) {
      std::vector<std::byte>& room = memory[t == &call.in.initial_key_sum];
      const auto bytes = static_cast<size_t>(contract::Count(*t) * contract::SizeOf(t->dtype));
      room.resize(3 * bytes);
      std::memcpy(room.data() + bytes, t->data, bytes);
      t->data = room.data() + bytes;
    }
    spoil(call);
    ExpectRefused(call, StatusCode::kOverlap, sentence);
  };
  const auto shifted = [](const ConstTensor& t, int64_t bytes) { return const_cast<std::byte*>(static_cast<const std::byte*>(t.data)) + bytes; };
  for (const int64_t shift : {4, 16, 1, -4, 4 * 79}) {
    check(state, [&](Call& c) { c.out.final_state.data = shifted(c.in.initial_state, shift); });
    if (shift < 64) check(key_sum, [&](Call& c) { c.out.final_key_sum.data = shifted(c.in.initial_key_sum, shift); });
  }
  check(state, [&](Call& c) {  // transposed
    c.out.final_state.data = shifted(c.in.initial_state, 0);
    c.out.final_state.strides = {40, 20, 1, 4};
  });
  check(state, [&](Call& c) {  // backwards
    c.out.final_state.data = shifted(c.in.initial_state, 4 * 40);
    c.out.final_state.strides[0] = -40;
  });
  check(key_sum, [&](Call& c) {  // the heads exchanged
    c.out.final_key_sum.data = shifted(c.in.initial_key_sum, 0);
    c.out.final_key_sum.strides = {4, 8, 1};
  });
}

// A state and a key sum written over themselves give what apart ones give, also where the columns of a head are shared out among threads that run one
// after the other.
TEST(Overlap, OfAStateWithItselfIsRight) {
  Executes in_order(8, RunInOrder);
  for (const RuleInfo& info : Rules()) {
    for (const Form form : kForms) {
      for (RandomSpec spec : {Spec(info.rule), Packed(info.rule), Large(info.rule)}) {
        spec.normalize = info.can_normalize;
        Call apart = Right(spec), over = Right(spec);
        apart.options.form = over.options.form = form;
        over.options.executor = &in_order;
        ExpectOk(apart);
        over.out.final_state = over.tensors.initial_state.mutable_view();
        if (spec.normalize) over.out.final_key_sum = over.tensors.initial_key_sum.mutable_view();
        ExpectOk(over);
        EXPECT_TRUE(SameBits(over.results.out, apart.results.out)) << info.name << " " << Name(form) << " " << spec.value_dim;
        EXPECT_TRUE(SameBits(over.tensors.initial_state, apart.results.final_state)) << info.name << " " << Name(form) << " " << spec.value_dim;
        EXPECT_TRUE(!spec.normalize || SameBits(over.tensors.initial_key_sum, apart.results.final_key_sum)) << info.name << " " << Name(form);
      }
    }
  }
}

// q, k, v and out as the four columns of one table [B, T, 4, H, D], and the states as two of another [B, 2, H, D, D].
TEST(Overlap, OfViewsIntoOneBufferIsNone) {
  for (const RuleInfo& info : Rules()) {
    for (const Form form : kForms) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16}) {
        for (const int64_t tokens : {1, 6, 20}) {
          const int64_t B = 2, H = 3, D = 5;
          RandomSpec spec = Spec(info.rule);
          spec.dtype = dtype;
          spec.tokens = tokens;
          spec.heads = H;
          spec.key_dim = spec.value_dim = D;
          Call apart = Right(spec), table = Right(spec);
          apart.options.form = table.options.form = form;
          ExpectOk(apart);
          Owned rows = Owned::Zeros(dtype, {B * tokens * 4, H * D}), states = Owned::Zeros(contract::StateDtype(dtype), {B * 2, H * D * D});
          // Column `column` of `columns`, whose rows of n elements lie one after the other in `from`.
          const auto move = [&](const ConstTensor& from, Owned& to, int64_t column, int64_t columns, int64_t n) {
            const int64_t size = contract::SizeOf(from.dtype);
            for (int64_t i = 0; i < to.size() / n / columns; ++i)
              std::memcpy(to.bytes.data() + (i * columns + column) * n * size, static_cast<const std::byte*>(from.data) + i * n * size,
                          static_cast<size_t>(n * size));
          };
          const auto row_view = [&](auto& view, int64_t column) {
            view.data = rows.bytes.data() + column * H * D * contract::SizeOf(view.dtype);
            view.strides = {tokens * 4 * H * D, 4 * H * D, D, 1};
          };
          const auto state_view = [&](auto& view, int64_t column) {
            view.data = states.bytes.data() + column * H * D * D * contract::SizeOf(view.dtype);
            view.strides = {2 * H * D * D, D * D, D, 1};
          };
          move(table.in.q, rows, 0, 4, H * D);
          move(table.in.k, rows, 1, 4, H * D);
          move(table.in.v, rows, 3, 4, H * D);
          move(table.in.initial_state, states, 1, 2, H * D * D);
          row_view(table.in.q, 0);
          row_view(table.in.k, 1);
          row_view(table.out.out, 2);
          row_view(table.in.v, 3);
          state_view(table.out.final_state, 0);
          state_view(table.in.initial_state, 1);
          const Owned rows_before = rows, states_before = states;
          ExpectOk(table);
          // The columns of the answers are the answers, and the others are as they were.
          Owned rows_wanted = rows_before, states_wanted = states_before;
          move(apart.results.out.view(), rows_wanted, 2, 4, H * D);
          move(apart.results.final_state.view(), states_wanted, 0, 2, H * D * D);
          EXPECT_TRUE(SameBits(rows, rows_wanted)) << info.name << " " << Name(form) << " " << tokens;
          EXPECT_TRUE(SameBits(states, states_wanted)) << info.name << " " << Name(form) << " " << tokens;
        }
      }
    }
  }
}

// One table [B, T, 8, D] for grouped heads: four of q, one of k and v, and two heads of out between them (then the other two after all).
TEST(Overlap, OfGroupedHeadsInOneTableIsNone) {
  RandomSpec spec = Spec(Rule::kLinear);
  spec.q_heads = 4;
  spec.k_heads = spec.v_heads = 1;
  spec.key_dim = spec.value_dim = 4;
  Call call = Right(spec);
  std::vector<float> table(2 * 6 * 10 * 4, 1.0f);
  const auto view = [&](auto& tensor, int64_t column, int64_t head_stride) {
    tensor.data = table.data() + column * 4;
    tensor.strides = {6 * 10 * 4, 10 * 4, head_stride * 4, 1};
  };
  view(call.in.q, 0, 2);    // 0 2 4 6
  view(call.in.k, 1, 7);    // 1, whatever the stride of its one head
  view(call.in.v, 3, -99);  // 3
  view(call.out.out, 9, -1);
  ExpectRefused(call, StatusCode::kOverlap, "out shares memory with q and must be apart from it");  // 9 8 7 6
  call.out.out.strides[2] = -2 * 4;
  ExpectRefused(call, StatusCode::kOverlap, "out shares memory with v and must be apart from it");  // 9 7 5 3
  view(call.in.v, 8, 0);
  ExpectOk(call);
}

// ---- Views --------------------------------------------------------------------------------------------------------------------------------------

TEST(Views, CountTheirElements) {
  const auto count = [](const std::vector<int64_t>& shape) {
    ConstTensor t;
    SetShape(t, shape);
    return contract::Count(t);
  };
  EXPECT_EQ(count({}), 1);
  EXPECT_EQ(count({7}), 7);
  EXPECT_EQ(count({2, 3, 4, 5}), 120);
  EXPECT_EQ(count({2, 0, 4}), 0);
  EXPECT_EQ(count({kHuge}), kHuge);
  EXPECT_EQ(count({int64_t{1} << 31, int64_t{1} << 31}), int64_t{1} << 62);
  EXPECT_EQ(count({int64_t{1} << 32, int64_t{1} << 31}), -1);
  EXPECT_EQ(count({kHuge, kHuge, kHuge, kHuge}), -1);
  EXPECT_EQ(count({kHuge, kHuge, 0}), 0);
}

// The bytes of each element of a view, as a byte map from `base` on; false if two elements share one.
bool Mark(const ConstTensor& t, const char* base, std::vector<char>* bytes) {
  bool apart = true;
  const int64_t size = contract::SizeOf(t.dtype), count = contract::Count(t);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, offset = 0;
    for (int axis = t.rank - 1; axis >= 0; --axis) {
      offset += rest % t.shape[axis] * t.strides[axis];
      rest /= t.shape[axis];
    }
    char* at = bytes->data() + (static_cast<const char*>(t.data) - base) + offset * size;
    for (int64_t b = 0; b < size; ++b) {
      apart &= at[b] == 0;
      at[b] = 1;
    }
  }
  return apart;
}

// Whether no step of `a` or `b` is shorter than what either has inside it.
bool Nest(const ConstTensor& a, const ConstTensor& b) {
  for (const ConstTensor* steps : {&a, &b}) {
    for (int axis = 0; axis < steps->rank; ++axis) {
      const int64_t step = std::abs(steps->strides[axis]) * contract::SizeOf(steps->dtype);
      if (steps->shape[axis] < 2 || step == 0) continue;
      for (const ConstTensor* t : {&a, &b}) {
        int64_t inside = contract::SizeOf(t->dtype);
        int as_long = 0;
        for (int other = 0; other < t->rank; ++other) {
          const int64_t length = std::abs(t->strides[other]) * contract::SizeOf(t->dtype);
          if (t->shape[other] < 2 || length == 0) continue;
          if (length < step) inside += (t->shape[other] - 1) * length;
          as_long += length == step;
        }
        if (inside > step || as_long > 1) return false;
      }
    }
  }
  return true;
}

class Meeting : public testing::Test {
 protected:
  static constexpr int64_t kBytes = 8192;

  int64_t Draw(int64_t from, int64_t to) { return std::uniform_int_distribution<int64_t>(from, to)(random_); }

  // Says what is true of two views, and counts.
  void Check(const ConstTensor& a, const ConstTensor& b) {
    std::vector<char> of_a(kBytes), of_b(kBytes);
    const bool apart_a = Mark(a, memory_, &of_a), apart_b = Mark(b, memory_, &of_b);
    bool meet = false;
    for (int64_t i = 0; i < kBytes; ++i) meet |= of_a[i] != 0 && of_b[i] != 0;
    const bool said = contract::MayOverlap(a, b), nest = Nest(a, b);
    EXPECT_EQ(said, contract::MayOverlap(b, a));
    ASSERT_FALSE(meet && !said) << Text(a) << " meets " << Text(b);
    ASSERT_TRUE(!nest || meet == said) << Text(a) << " and " << Text(b) << " nest";
    const bool said_itself = contract::MayOverlapItself(a);
    ASSERT_FALSE(!apart_a && !said_itself) << Text(a) << " meets itself";
    ASSERT_TRUE(!Nest(a, a) || !apart_a == said_itself) << Text(a) << " nests";
    ASSERT_TRUE(apart_b || contract::MayOverlapItself(b)) << Text(b) << " meets itself";
    ++counts_[std::string(meet ? "meet" : "apart") + (nest ? ", nested" : "") + (said == meet ? "" : ", said otherwise")];
  }

  std::string Text(const ConstTensor& t) {
    std::string text = "bytes of " + std::to_string(contract::SizeOf(t.dtype)) + " from " +
                       std::to_string(static_cast<const char*>(t.data) - memory_) + ", shape " + ShapeOf(t) + ", strides";
    for (int axis = 0; axis < t.rank; ++axis) text += " " + std::to_string(t.strides[axis]);
    return text;
  }

  Dtype DrawDtype() {
    const Dtype dtypes[] = {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kBool};
    return dtypes[Draw(0, 3)];
  }

  std::mt19937_64 random_{20240607};
  char memory_[kBytes];
  std::map<std::string, int> counts_;
};

TEST_F(Meeting, IsAlwaysSaid) {
  for (int round = 0; round < 20000; ++round) {
    ConstTensor views[2];
    for (ConstTensor& view : views) {
      view.dtype = DrawDtype();
      view.rank = static_cast<int>(Draw(1, 4));
      for (int axis = 0; axis < view.rank; ++axis) {
        view.shape[axis] = Draw(0, 19) == 0 ? 0 : Draw(1, 4);
        view.strides[axis] = Draw(-9, 9);
      }
      view.data = memory_ + kBytes / 2 + Draw(-60, 60);
    }
    Check(views[0], views[1]);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(counts_["meet"], 3000);
  EXPECT_GT(counts_["apart"], 3000);
}

// Views whose steps come from one ladder, each rung at least as long as what both have below it: there the answer is exact.
TEST_F(Meeting, OfNestedViewsIsSaidExactly) {
  for (int round = 0; round < 20000; ++round) {
    ConstTensor views[2];
    int64_t extent[2], low[2];
    for (int v = 0; v < 2; ++v) {
      views[v].dtype = DrawDtype();
      extent[v] = contract::SizeOf(views[v].dtype);
      low[v] = 0;
    }
    for (int rung = 0; rung < 4; ++rung) {
      const int64_t step = ((std::max(extent[0], extent[1]) + 7) / 8 + Draw(0, 1)) * 8;
      for (int v = 0; v < 2; ++v) {
        ConstTensor& view = views[v];
        const int axis = view.rank++;
        view.shape[axis] = Draw(1, 3);
        view.strides[axis] = (view.shape[axis] == 1 ? Draw(-1000, 1000) : Draw(0, 2) == 0 ? -step : step) / contract::SizeOf(view.dtype);
        if (view.shape[axis] == 1) continue;
        extent[v] += (view.shape[axis] - 1) * step;
        if (view.strides[axis] < 0) low[v] += (view.shape[axis] - 1) * step;
      }
    }
    for (int v = 0; v < 2; ++v) {
      const int64_t shift = Draw(0, 1) == 0 ? Draw(0, 40) : Draw(0, 2 * extent[0]);
      ASSERT_LT(low[v] + shift + extent[v], kBytes);
      views[v].data = memory_ + low[v] + shift;
    }
    Check(views[0], views[1]);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(counts_["meet, nested"], 2000);
  EXPECT_GT(counts_["apart, nested"], 2000);
  EXPECT_EQ(counts_["meet, nested"] + counts_["apart, nested"], 20000);
}

TEST(Views, OfUnalignedDataAreAsGoodAsAligned) {
  for (const RuleInfo& info : Rules()) {
    RandomSpec spec = Masked(info.rule);
    Call call = Right(spec), unaligned = Right(spec);
    ExpectOk(call);
    std::vector<std::vector<std::byte>> copies;
    std::byte* out = nullptr;
    ForEachTensor(unaligned, [&](std::string_view name, auto& view) {
      if (!view.given()) return;
      const size_t size = static_cast<size_t>(contract::Count(view) * contract::SizeOf(view.dtype));
      copies.emplace_back(size + 1);
      std::memcpy(copies.back().data() + 1, view.data, size);
      view.data = copies.back().data() + 1;
      if (name == "out") out = copies.back().data() + 1;
    });
    ExpectOk(unaligned);
    EXPECT_EQ(std::memcmp(out, call.results.out.bytes.data(), call.results.out.bytes.size()), 0) << info.name;
  }
}

// ---- Absurd arguments ---------------------------------------------------------------------------------------------------------------------------

TEST(Absurd, ChunksThreadsAndLimitsAreTakenAsAll) {
  for (const RuleInfo& info : Rules()) {
    Call all = Right(info.rule);
    all.options.form = Form::kChunkwise;
    all.options.chunk = 6;
    ExpectOk(all);
    for (const int64_t chunk : {int64_t{1} << 62, kHuge, int64_t{7}}) {
      Call call = Right(info.rule);
      call.options.form = Form::kChunkwise;
      call.options.chunk = chunk;
      call.options.threads = INT32_MAX;
      ExpectOk(call);
      ExpectSameBits(call.results, all.results);
    }
    Call call = Right(info.rule);
    call.options.form = Form::kParallel;
    call.options.table_limit = kHuge;
    ExpectOk(call);
    ExpectSameBits(call.results, all.results);
    call.options.chunk = 5;  // may be given for a form that is not chosen yet
    call.options.form = Form::kAutomatic;
    ExpectOk(call);
  }
}

TEST(Absurd, StridesOfAxesOfOneAreNotUsed) {
  for (const RuleInfo& info : Rules()) {
    for (const Form form : kForms) {
      RandomSpec spec = Spec(info.rule);
      spec.batch = spec.tokens = spec.heads = spec.key_dim = spec.value_dim = 1;
      spec.normalize = info.can_normalize;
      Call plain = Right(spec), call = Right(spec);
      plain.options.form = call.options.form = form;
      ExpectOk(plain);
      const int64_t strides[] = {kHuge, INT64_MIN, -1, int64_t{1} << 62};
      size_t next = 0;
      ForEachTensor(call, [&](std::string_view, auto& view) {
        for (int64_t& stride : view.strides) stride = strides[next++ % 4];
        next += 3;
      });
      ExpectOk(call);
      ExpectSameBits(call.results, plain.results);
      // Also where a state is written over itself.
      call.out.final_state = call.tensors.initial_state.mutable_view();
      call.out.final_state.strides = {0, 0, 0, 0};
      ExpectOk(call);
      EXPECT_TRUE(SameBits(call.tensors.initial_state, plain.results.final_state));
    }
  }
}

// Sizes up to the most that a view may have, over no elements or over one seen again and again: computed at once, for there is nothing to write, or
// refused.
TEST(Absurd, SizesNeverOverflowNorTakeTime) {
  const float one = 1;
  const int64_t sizes[] = {0, 1, 2, int64_t{1} << 24, (int64_t{1} << 47) + 1, int64_t{1} << 48, kHuge};
  std::map<StatusCode, int> counts;
  for (const Form form : kForms) {
    for (const int64_t tokens : {0, 1}) {
      for (const int64_t batch : sizes) {
        for (const int64_t heads : sizes) {
          for (const int64_t key_dim : sizes) {
            for (const int64_t value_dim : sizes) {
              if (tokens > 0 && key_dim == int64_t{1} << 24) continue;  // could be computed, but in seconds
              Call call;
              float out = 12345, state = 12345;
              call.options.form = form;
              call.in.q = call.in.k = View(&one, {batch, tokens, heads, key_dim});
              call.in.v = View(&one, {batch, tokens, 1, value_dim});
              call.in.q.strides = call.in.k.strides = call.in.v.strides = {0, 0, 0, 0};
              call.out.out.data = &out;
              SetShape(call.out.out, {batch, tokens, heads, value_dim});
              const Status status = Attend(call.options, call.in, call.out);
              call.out.final_state.data = &state;
              SetShape(call.out.final_state, {batch, heads, key_dim, value_dim});
              const Status with_state = Attend(call.options, call.in, call.out);
              ++counts[status.code];
              ++counts[with_state.code];
              EXPECT_EQ(status.ok(), status.message.empty());
              EXPECT_EQ(with_state.ok(), with_state.message.empty());
              EXPECT_TRUE(status.ok() || out == 12345.0f);
              EXPECT_TRUE(with_state.ok() || state == 12345.0f);
            }
          }
        }
      }
    }
  }
  for (const StatusCode code : {StatusCode::kOk, StatusCode::kShape, StatusCode::kOverlap, StatusCode::kOutOfMemory}) EXPECT_GT(counts[code], 0);
}

// ---- Right but for something random -----------------------------------------------------------------------------------------------------------

// The tensors of a call, each in the middle of memory of its own that holds it whatever is done to it: sizes only shrink, strides only shrink or turn
// round, and no dtype is wider than 8 bytes.
struct Roomy {
  Options options;
  Inputs in;
  Outputs out;
  std::vector<std::vector<std::byte>> memory;

  explicit Roomy(const RandomSpec& spec) {
    Call call = Right(spec);
    options = call.options;
    in = call.in;
    out = call.out;
    int64_t most = 0;
    const auto size = [&](std::string_view, auto& view) { most = std::max(most, contract::Count(view)); };
    ForEachInput(in, size);
    ForEachOutput(out, size);
    const auto place = [&](std::string_view, auto& view) {
      memory.emplace_back(static_cast<size_t>(16 * most + 8), std::byte{0x3a});
      std::byte* middle = memory.back().data() + 8 * most;
      if (view.given()) std::memcpy(middle, view.data, static_cast<size_t>(contract::Count(view) * contract::SizeOf(view.dtype)));
      view.data = middle;
    };
    ForEachInput(in, place);
    ForEachOutput(out, place);
  }
};

class Mutations {
 public:
  explicit Mutations(uint64_t seed) : random_(seed) {}

  int64_t Draw(int64_t from, int64_t to) { return std::uniform_int_distribution<int64_t>(from, to)(random_); }

  void Mutate(Roomy& call) {
    if (Draw(0, 3) == 0) return MutateOptions(call.options);
    if (Draw(0, 9) == 0) return Shrink(call);
    if (Draw(0, 9) == 0) return MutateValues(call);
    const int64_t which = Draw(0, 14), from = Draw(0, 14);
    void* other = call.memory[static_cast<size_t>(from)].data() + (call.memory[0].size() - 8) / 2;
    int64_t at = 0;
    const auto visit = [&](std::string_view, auto& view) {
      if (at++ == which) MutateView(view, other);
    };
    ForEachInput(call.in, visit);
    ForEachOutput(call.out, visit);
  }

 private:
  template <class View>
  void MutateView(View& view, void* other) {
    const int axis = static_cast<int>(Draw(0, std::max(view.rank, 1) - 1));
    switch (Draw(0, 8)) {
      case 0:
        view.rank = 0;
        break;
      case 1: {  // one axis fewer, or one more of one element
        const bool fewer = Draw(0, 1) == 0;
        if (fewer && view.rank > 0) --view.rank;
        if (!fewer && view.rank < kMaxRank) {
          view.shape[view.rank] = 1;
          view.strides[view.rank++] = Draw(-1, 1);
        }
        break;
      }
      case 2:
        view.shape[axis] = Draw(0, view.shape[axis]);
        break;
      case 3:
        view.shape[axis] = std::min<int64_t>(view.shape[axis], 1);
        break;
      case 4:
        view.dtype = static_cast<Dtype>(Draw(0, 7));
        break;
      case 5:
        view.strides[axis] = Draw(-std::abs(view.strides[axis]), std::abs(view.strides[axis]));
        break;
      case 6:
        view.strides[axis] = Draw(0, 1) == 0 ? 0 : -view.strides[axis];
        break;
      case 7:
        view.data = nullptr;
        break;
      case 8:
        view.data = other;
        break;
    }
  }

  void MutateOptions(Options& options) {
    const double numbers[] = {kNan, kInfinity, -1.0, 0.0, 0.25};
    const int64_t integers[] = {-1, 0, 1, 3, kHuge, INT64_MIN};
    switch (Draw(0, 10)) {
      case 0:
        options.rule = static_cast<Rule>(Draw(0, 10));
        break;
      case 1:
        options.form = static_cast<Form>(Draw(0, 4));
        break;
      case 2:
        options.chunk = integers[Draw(0, 5)];
        break;
      case 3:
        options.scale = numbers[Draw(0, 4)];
        break;
      case 4:
        options.feature_map = static_cast<FeatureMap>(Draw(0, 4));
        break;
      case 5:
        options.eps = numbers[Draw(0, 4)];
        break;
      case 6:
        options.normalize = !options.normalize;
        break;
      case 7:
        options.check_values = !options.check_values;
        break;
      case 8:
        options.form = Form::kParallel;
        options.table_limit = Draw(0, 1) == 0 ? 60 : integers[Draw(0, 5)];
        break;
      case 9:
        options.threads = static_cast<int>(Draw(-1, 3));
        break;
      case 10:
        options.target = Draw(0, 1) == 0 ? "no such" : "";
        break;
    }
  }

  // One size of the layout less, in all tensors that have it: a call that may be right.
  void Shrink(Roomy& call) {
    const int axis = static_cast<int>(Draw(0, 1));
    const int64_t size = Draw(0, call.in.q.shape[axis]);
    for (ConstTensor* t : {&call.in.q, &call.in.k, &call.in.v, &call.in.beta, &call.in.remove, &call.in.write, &call.in.valid})
      if (t->rank > axis) t->shape[axis] = std::min(t->shape[axis], size);
    if (call.in.log_decay.rank > 2) call.in.log_decay.shape[axis] = std::min(call.in.log_decay.shape[axis], size);
    if (call.out.out.rank > axis) call.out.out.shape[axis] = std::min(call.out.out.shape[axis], size);
    if (axis == 0 && !call.in.offsets.given()) {
      for (ConstTensor* t : {&call.in.initial_state, &call.in.initial_key_sum}) t->shape[0] = std::min(t->shape[0], size);
      for (Tensor* t : {&call.out.final_state, &call.out.final_key_sum}) t->shape[0] = std::min(t->shape[0], size);
    }
  }

  void MutateValues(Roomy& call) {
    const double values[] = {kNan, 0.5, kInfinity, -kInfinity, 0.0};
    const double value = values[Draw(0, 4)];
    const float narrow = static_cast<float>(value);
    const int64_t offset = Draw(-3, 7);
    const size_t middle = (call.memory[0].size() - 8) / 2;
    switch (Draw(0, 2)) {
      case 0:
        std::memcpy(call.memory[3].data() + middle, call.in.q.dtype == Dtype::kF64 ? static_cast<const void*>(&value) : &narrow,
                    call.in.q.dtype == Dtype::kF64 ? 8 : 4);
        break;
      case 1:
        std::memcpy(call.memory[4].data() + middle, call.in.q.dtype == Dtype::kF64 ? static_cast<const void*>(&value) : &narrow,
                    call.in.q.dtype == Dtype::kF64 ? 8 : 4);
        break;
      case 2:
        std::memcpy(call.memory[10].data() + middle + 8 * static_cast<size_t>(Draw(0, 3)), &offset, 8);
        break;
    }
  }

  std::mt19937_64 random_;
};

TEST(Random, MutationsAreComputedOrRefusedAndNothingElseIsWritten) {
  const TargetVariable none(nullptr);
  std::map<StatusCode, int> counts;
  Mutations mutations(7);
  std::vector<std::byte> work(1 << 20);
  for (int round = 0; round < 6000; ++round) {
    const RuleInfo& info = Rules()[static_cast<size_t>(round) % Rules().size()];
    RandomSpec spec = round % 2 == 0 ? Masked(info.rule) : Packed(info.rule);
    const Dtype dtypes[] = {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16};
    spec.dtype = dtypes[round / 2 % 4];
    spec.normalize = info.can_normalize && round % 3 == 0;
    spec.q_heads = round % 5 == 0 ? 4 : 2;
    Roomy call(spec);
    for (int64_t n = mutations.Draw(1, 3); n > 0; --n) mutations.Mutate(call);
    if (mutations.Draw(0, 2) == 0) call.options.workspace = {work.data(), mutations.Draw(0, 3) > 0 ? static_cast<int64_t>(work.size()) : 63};
    const auto before = call.memory;
    const Status status = Attend(call.options, call.in, call.out);
    ++counts[status.code];
    if (!status.ok()) {
      ASSERT_FALSE(status.message.empty());
      ASSERT_EQ(status.message.find('\n'), std::string::npos) << status.message;
      ASSERT_NE(status.message.back(), '.') << status.message;
      ASSERT_TRUE(before == call.memory) << "a refused call has written: " << status.message;
      continue;
    }
    ASSERT_EQ(status.message, "");
    // What is not an element of an output is as it was.
    auto expected = before;
    ForEachOutput(call.out, [&](std::string_view, Tensor& view) {
      if (!view.given()) return;
      for (size_t m = 0; m < expected.size(); ++m) {
        const char* base = reinterpret_cast<const char*>(call.memory[m].data());
        if (static_cast<const char*>(view.data) < base || static_cast<const char*>(view.data) >= base + call.memory[m].size()) continue;
        std::vector<char> written(call.memory[m].size());
        ASSERT_TRUE(Mark(view, base, &written));
        for (size_t b = 0; b < written.size(); ++b)
          if (written[b] != 0) expected[m][b] = call.memory[m][b];
      }
    });
    ASSERT_TRUE(expected == call.memory) << "round " << round;
  }
  for (const StatusCode code :
       {StatusCode::kOk, StatusCode::kInvalidOption, StatusCode::kMissingInput, StatusCode::kUnexpectedInput, StatusCode::kShape, StatusCode::kDtype,
        StatusCode::kNullData, StatusCode::kValue, StatusCode::kOverlap, StatusCode::kTableLimit})
    EXPECT_GT(counts[code], code == StatusCode::kOk ? 500 : 10) << static_cast<int>(code);
  EXPECT_EQ(counts[StatusCode::kInternal], 0);
}

// ---- The caller's floating-point mode ---------------------------------------------------------------------------------------------------------

// The control word without the flags of what has happened.
unsigned ControlWord() {
#if defined(__SSE2__)
  return _mm_getcsr() & 0xFFC0u;
#elif defined(__aarch64__)
  uint64_t word;
  __asm__ volatile("mrs %0, fpcr" : "=r"(word));
  return static_cast<unsigned>(word);
#else
  return static_cast<unsigned>(std::fegetround());
#endif
}

class FloatingPoint : public testing::TestWithParam<Rule> {
 protected:
  void TearDown() override { std::fesetenv(FE_DFL_ENV); }

  // Attend with the mode that `set` sets gives the bits it gives without, and leaves that mode.
  void Check(const char* what, const std::function<void()>& set) {
    SCOPED_TRACE(what);
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16}) {
      for (const FeatureMap map : {FeatureMap::kIdentity, FeatureMap::kEluPlusOne, FeatureMap::kL2Norm}) {
        for (const Form form : kForms) {
          for (RandomSpec spec : {Masked(GetParam()), Large(GetParam())}) {
            if (spec.tokens > 6 && map != FeatureMap::kIdentity) continue;
            spec.dtype = dtype;
            spec.normalize = Info(GetParam()).can_normalize && map == FeatureMap::kEluPlusOne;
            if (spec.tokens == 6) spec.key_dim = 7;  // whose root is no number
            Call plain = Right(spec), call = Right(spec);
            plain.options.form = call.options.form = form;
            plain.options.feature_map = call.options.feature_map = map;
            ExpectOk(plain);
            set();
            const unsigned before = ControlWord();
            const Status status = Attend(call.options, call.in, call.out);
            const unsigned after = ControlWord();
            std::fesetenv(FE_DFL_ENV);
            EXPECT_TRUE(status.ok()) << status.message;
            EXPECT_EQ(before, after);
            ExpectSameBits(call.results, plain.results);
          }
        }
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Mode, FloatingPoint,
                         testing::Values(Rule::kLinear, Rule::kRetention, Rule::kSimpleGla, Rule::kGla, Rule::kRwkv6, Rule::kDelta, Rule::kGatedDelta,
                                         Rule::kKda, Rule::kRwkv7),
                         [](const auto& instance) { return std::string(Name(instance.param)); });

TEST_P(FloatingPoint, RoundingChangesNoBitAndStays) {
  Check("upward", [] { std::fesetround(FE_UPWARD); });
  Check("downward", [] { std::fesetround(FE_DOWNWARD); });
  Check("toward zero", [] { std::fesetround(FE_TOWARDZERO); });
}

#if defined(__SSE2__)
TEST_P(FloatingPoint, FlushingChangesNoBitAndStays) {
  Check("flush to zero, denormals are zero", [] { _mm_setcsr(_mm_getcsr() | 0x8040u); });
}
#elif defined(__aarch64__)
TEST_P(FloatingPoint, FlushingChangesNoBitAndStays) {
  Check("flush to zero", [] { __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 24)); });
  Check("NaN is the default one", [] { __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 25)); });
}
#endif

#if defined(__GLIBC__)
TEST_P(FloatingPoint, TrapsAreNotSprungAndStay) {
  if (feenableexcept(FE_ALL_EXCEPT) == -1) GTEST_SKIP() << "this machine has no traps";
  std::fesetenv(FE_DFL_ENV);
  Check("all traps", [] { feenableexcept(FE_ALL_EXCEPT); });
}

TEST(FloatingPoint, RefusalsSpringNoTrap) {
  if (feenableexcept(FE_ALL_EXCEPT) == -1) GTEST_SKIP() << "this machine has no traps";
  std::fesetenv(FE_DFL_ENV);
  Call gate = Right(Rule::kKda), scale = Right(Rule::kKda), table = Right(Rule::kKda);
  gate.tensors.log_decay.Set(0, kNan);
  scale.options.scale = kNan;
  table.options.form = Form::kParallel;
  table.options.table_limit = kHuge - 1;
  feenableexcept(FE_ALL_EXCEPT);
  const Status of_gate = Attend(gate.options, gate.in, gate.out), of_scale = Attend(scale.options, scale.in, scale.out),
               of_table = Attend(table.options, table.in, table.out);
  const int traps = fegetexcept();
  std::fesetenv(FE_DFL_ENV);
  EXPECT_EQ(traps, FE_ALL_EXCEPT);
  EXPECT_EQ(of_gate.code, StatusCode::kValue);
  EXPECT_EQ(of_scale.code, StatusCode::kInvalidOption);
  EXPECT_TRUE(of_table.ok()) << of_table.message;
}
#endif

}  // namespace
}  // namespace tercet::test
