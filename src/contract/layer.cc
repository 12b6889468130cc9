#include "src/contract/layer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>

#include "src/contract/checks.hpp"
#include "src/contract/half.hpp"
#include "src/contract/tensor.hpp"

namespace tercet::contract {

namespace {

Status CheckOffsets(const ConstTensor& offsets, int64_t batch, int64_t tokens) {
  if (offsets.dtype != Dtype::kI32 && offsets.dtype != Dtype::kI64)
    return Refuse(StatusCode::kDtype, "offsets is " + std::string(Name(offsets.dtype)) + " and must be i32 or i64");
  if (offsets.rank != 1 || offsets.shape[0] < 1)
    return Refuse(StatusCode::kShape, "offsets has shape " + ShapeText(offsets) + " and must be [N + 1], one more than the packed sequences");
  if (batch != 1)
    return Refuse(StatusCode::kShape, "offsets was given with a batch of " + Text(batch) + " and packed sequences must have a batch of 1");
  if (Status status = CheckData("offsets", offsets); !status.ok()) return status;
  int64_t last = 0;
  for (int64_t n = 0; n < offsets.shape[0]; ++n) {
    const int64_t offset = ReadInteger(offsets, Offset(offsets, n));
    if (n == 0 && offset != 0) return Refuse(StatusCode::kValue, "offsets[0] is " + Text(offset) + " and must be 0");
    if (offset < last)
      return Refuse(StatusCode::kValue,
                    "offsets[" + Text(n) + "] is " + Text(offset) + " and must be at least " + Text(last) + ", the offset before it");
    last = offset;
  }
  if (last != tokens)
    return Refuse(StatusCode::kValue, "offsets ends with " + Text(last) + " and must end with " + Text(tokens) + ", the number of tokens");
  return {};
}

// Walks the rows (all axes but the last) of a tensor whose first axes are batch and token, and calls row(index of the row's start, its indices) for
// those of valid tokens until one refuses.
template <class Row>
Status ForEachRow(const ConstTensor& t, bool by_token, const ConstTensor& valid, Row&& row) {
  const int outer = t.rank - 1;
  std::array<int64_t, kMaxRank> index{};
  int64_t rows = 1;
  for (int axis = 0; axis < outer; ++axis) rows *= t.shape[axis];
  for (int64_t r = 0; r < rows; ++r) {
    const bool counts = !by_token || !valid.given() || ReadInteger(valid, Offset(valid, index[0], index[1])) != 0;
    if (counts) {
      if (Status status = row(Offset(t, index[0], index[1], index[2]), index); !status.ok()) return status;
    }
    for (int axis = outer - 1; axis >= 0; --axis) {
      if (++index[axis] < t.shape[axis]) break;
      index[axis] = 0;
    }
  }
  return {};
}

// Whether any of n elements `step` apart is bad. Without a branch in the loop, so that it vectorises.
template <class T, class Bad>
bool AnyBad(const ConstTensor& t, int64_t offset, int64_t n, int64_t step, Bad bad) {
  const char* at = static_cast<const char*>(t.data) + offset * static_cast<int64_t>(sizeof(T));
  int any = 0;
  const auto look = [&](int64_t i) {
    T value;
    std::memcpy(&value, at + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    if constexpr (sizeof(T) == 2)
      any |= bad(Widen(value));
    else
      any |= bad(value);
  };
  if (step == 1) {
    for (int64_t i = 0; i < n; ++i) look(i);
  } else {
    for (int64_t i = 0; i < n; ++i) look(i * step);
  }
  return any != 0;
}

template <class Bad, class Sentence>
Status CheckValues(std::string_view name, const ConstTensor& t, bool by_token, const ConstTensor& valid, Bad bad, Sentence sentence) {
  if (!t.given() || Count(t) == 0) return {};
  const int last = t.rank - 1;
  const int64_t n = t.shape[last], step = t.strides[last];
  return ForEachRow(t, by_token, valid, [&](int64_t offset, const std::array<int64_t, kMaxRank>& index) -> Status {
    const bool any = t.dtype == Dtype::kF32    ? AnyBad<float>(t, offset, n, step, bad)
                     : t.dtype == Dtype::kF64  ? AnyBad<double>(t, offset, n, step, bad)
                     : t.dtype == Dtype::kBF16 ? AnyBad<BFloat16>(t, offset, n, step, bad)
                                               : AnyBad<Float16>(t, offset, n, step, bad);
    if (!any) return {};
    for (int64_t i = 0; i < n; ++i) {
      const double value = ReadDouble(t, offset + i * step);
      if (!bad(value)) continue;
      std::string where(name);
      where += "[";
      for (int axis = 0; axis < last; ++axis) where += Text(index[axis]) + ", ";
      return Refuse(StatusCode::kValue, where + Text(i) + "] is " + Text(value) + sentence);
    }
    return {};
  });
}

// [B, T, H] is checked a token at a time only where `valid` can excuse it; then its last axis, heads, is the row.
Status CheckGates(const Layer& layer) {
  const Inputs& in = layer.in;
  const auto positive = [](auto x) { return !(x <= 0); };
  const auto not_finite = [](auto x) { return !(std::abs(x) <= std::numeric_limits<decltype(x)>::max()); };
  if (Status status = CheckValues("log_decay", in.log_decay, layer.axes.decay != Decay::kPerHead, in.valid, positive,
                                  " and must be at most 0: it is the natural logarithm of the factor by which the state decays");
      !status.ok())
    return status;
  return CheckValues("beta", in.beta, true, in.valid, not_finite, " and must be finite");
}

}  // namespace

Sequence SequenceAt(const Layer& layer, int64_t n) {
  if (!layer.in.offsets.given()) return {n, 0, layer.tokens};
  return {0, ReadInteger(layer.in.offsets, Offset(layer.in.offsets, n)), ReadInteger(layer.in.offsets, Offset(layer.in.offsets, n + 1))};
}

int64_t LongestSequence(const Layer& layer) {
  if (!layer.in.offsets.given()) return layer.sequences > 0 ? layer.tokens : 0;
  int64_t longest = 0;
  for (int64_t n = 0; n < layer.sequences; ++n) {
    const Sequence at = SequenceAt(layer, n);
    longest = std::max(longest, at.end - at.begin);
  }
  return longest;
}

Status Validate(const Options& options, const Inputs& inputs, const Outputs* outputs, Layer* layer) {
  // Options.
  if (static_cast<size_t>(options.rule) >= Rules().size())
    return Refuse(StatusCode::kInvalidOption, "rule is " + Text(static_cast<int64_t>(options.rule)) + " and must be one of the " +
                                                  Text(static_cast<int64_t>(Rules().size())) + " that Rules() lists");
  if (Name(options.form) == "unknown")
    return Refuse(StatusCode::kInvalidOption,
                  "form is " + Text(static_cast<int64_t>(options.form)) + " and must be automatic, parallel, recurrent or chunkwise");
  if (Name(options.feature_map) == "unknown")
    return Refuse(StatusCode::kInvalidOption,
                  "feature_map is " + Text(static_cast<int64_t>(options.feature_map)) + " and must be identity, elu_plus_one, relu or l2_norm");
  const RuleInfo& info = Info(options.rule);
  const std::string rule(info.name);
  if (options.chunk < 0)
    return Refuse(StatusCode::kInvalidOption, "chunk is " + Text(options.chunk) + " and must be at least 1, or 0 for the library's choice");
  if (options.chunk > 0 && (options.form == Form::kParallel || options.form == Form::kRecurrent))
    return Refuse(StatusCode::kInvalidOption, "chunk is " + Text(options.chunk) + " and must not be given for the " +
                                                  std::string(Name(options.form)) + " form, which has no chunks");
  if (options.scale && !std::isfinite(*options.scale))
    return Refuse(StatusCode::kInvalidOption, "scale is " + Text(*options.scale) + " and must be finite");
  if (!(options.eps >= 0) || !std::isfinite(options.eps))
    return Refuse(StatusCode::kInvalidOption, "eps is " + Text(options.eps) + " and must be finite and at least 0");
  if (options.normalize && !info.can_normalize)
    return Refuse(StatusCode::kInvalidOption,
                  "normalize is true and must be false for " + rule + ": only a rule that adds k v' to the state has a key sum to divide by");
  if (options.threads < 0)
    return Refuse(StatusCode::kInvalidOption, "threads is " + Text(int64_t{options.threads}) + " and must be at least 1, or 0 for all");
  if (options.table_limit < 0)
    return Refuse(StatusCode::kInvalidOption, "table_limit is " + Text(options.table_limit) + " and must be at least 0 bytes");
  if (Status status = CheckMemory("workspace", options.workspace); !status.ok()) return status;

  // Which tensors.
  const Outputs none;
  const Outputs& out = outputs != nullptr ? *outputs : none;
  const ConstTensor out_view = out.out, state_view = out.final_state, key_sum_view = out.final_key_sum;
  const Named written[] = {{"out", &out_view}, {"final_state", &state_view}, {"final_key_sum", &key_sum_view}};
  const auto given = InputsAnd(inputs, written[0], written[1], written[2]);
  if (Status status = CheckMemory("saved", out.saved); !status.ok()) return status;
  for (const Named& one : given)
    if (Status status = CheckForm(one.name, *one.tensor); !status.ok()) return status;
  const auto presence = [&](std::string_view name, const ConstTensor& t, bool takes, std::string_view layout) -> Status {
    if (takes && !t.given())
      return Refuse(StatusCode::kMissingInput, std::string(name) + " was not given and " + rule + " needs it as " + std::string(layout));
    if (!takes && t.given()) return Refuse(StatusCode::kUnexpectedInput, std::string(name) + " was given and " + rule + " takes none");
    return {};
  };
  const std::tuple<std::string_view, const ConstTensor*, bool, std::string_view> needs[] = {
      {"q", &inputs.q, true, "[B, T, H, K]"},
      {"k", &inputs.k, true, "[B, T, H, K]"},
      {"v", &inputs.v, true, "[B, T, H, V]"},
      {"log_decay", &inputs.log_decay, !info.log_decay_layout.empty(), info.log_decay_layout},
      {"beta", &inputs.beta, info.takes_beta, "[B, T, H]"},
      {"remove", &inputs.remove, info.takes_remove_and_write, "[B, T, H, K]"},
      {"write", &inputs.write, info.takes_remove_and_write, "[B, T, H, K]"},
      {"bonus", &inputs.bonus, info.takes_bonus, "[H, K]"},
  };
  for (const auto& [name, tensor, takes, layout] : needs)
    if (Status status = presence(name, *tensor, takes, layout); !status.ok()) return status;
  for (const Named& one : {Named{"initial_key_sum", &inputs.initial_key_sum}, Named{"final_key_sum", &key_sum_view}})
    if (one.tensor->given() && !options.normalize)
      return Refuse(StatusCode::kUnexpectedInput, std::string(one.name) + " was given and there is a key sum only with normalize");
  if (outputs != nullptr && !out.out.given()) return Refuse(StatusCode::kMissingInput, "out was not given and must be [B, T, H, V]");

  // Sizes: q, k and v say what they are, the rest must follow.
  for (const Named& one : {Named{"q", &inputs.q}, Named{"k", &inputs.k}, Named{"v", &inputs.v}}) {
    if (one.tensor->rank != 4)
      return Refuse(StatusCode::kShape,
                    std::string(one.name) + " has shape " + ShapeText(*one.tensor) + " and must be " +
                        (one.name == "v" ? "[B, T, H, V]: batch, tokens, heads, value_dim" : "[B, T, H, K]: batch, tokens, heads, key_dim"));
    if (one.tensor->shape[2] < 1 || one.tensor->shape[3] < 1)
      return Refuse(StatusCode::kShape,
                    std::string(one.name) + " has shape " + ShapeText(*one.tensor) + " and must have at least one head and one channel");
  }
  Layer l;
  l.rule = options.rule;
  l.axes = rules::AxesOf(options.rule);
  l.feature_map = options.feature_map;
  l.eps = options.eps;
  l.normalize = options.normalize;
  l.dtype = inputs.q.dtype;
  l.batch = inputs.q.shape[0];
  l.tokens = inputs.q.shape[1];
  l.q_heads = inputs.q.shape[2];
  l.k_heads = inputs.k.shape[2];
  l.v_heads = inputs.v.shape[2];
  l.key_dim = inputs.q.shape[3];
  l.value_dim = inputs.v.shape[3];
  l.state_heads = std::max(l.k_heads, l.v_heads);
  l.out_heads = std::max(l.q_heads, l.state_heads);
  l.scale = options.normalize ? 1.0 : options.scale.value_or(info.default_scale_is_one ? 1.0 : 1.0 / std::sqrt(static_cast<double>(l.key_dim)));
  l.in = inputs;
  l.out = out;
  if (l.dtype != Dtype::kF32 && l.dtype != Dtype::kF64 && l.dtype != Dtype::kBF16 && l.dtype != Dtype::kF16)
    return Refuse(StatusCode::kDtype, "q is " + std::string(Name(l.dtype)) + " and must be f32, f64, bf16 or f16");

  const auto divides = [&](std::string_view name, int64_t heads, int64_t group, std::string_view group_name) -> Status {
    if (group % heads == 0) return {};
    return Refuse(StatusCode::kShape, std::string(name) + " has " + Text(heads) + " heads and must have a count that divides the " + Text(group) +
                                          " " + std::string(group_name));
  };
  if (Status status = divides("k", l.k_heads, l.state_heads, "state heads, those of v"); !status.ok()) return status;
  if (Status status = divides("v", l.v_heads, l.state_heads, "state heads, those of k"); !status.ok()) return status;
  if (l.q_heads < l.out_heads) {
    if (Status status = divides("q", l.q_heads, l.out_heads, "output heads, the larger count of k and v"); !status.ok()) return status;
  } else if (l.out_heads % l.state_heads != 0) {
    return Refuse(StatusCode::kShape, "q has " + Text(l.q_heads) + " heads and must have a count that is a multiple of the " + Text(l.state_heads) +
                                          " state heads, the larger count of k and v");
  }

  if (inputs.offsets.given()) {
    if (Status status = CheckOffsets(inputs.offsets, l.batch, l.tokens); !status.ok()) return status;
    l.sequences = inputs.offsets.shape[0] - 1;
    if (l.sequences > 0 && l.state_heads > kMostElements / l.sequences)
      return Refuse(StatusCode::kShape, "offsets has " + Text(l.sequences) + " sequences, each of " + Text(l.state_heads) +
                                            " state heads, and must have so few that these are at most 2^48");
  } else {
    l.sequences = l.batch;
  }

  const Layout per_token{"[B, T, H]", {l.batch, l.tokens, kAnyHeads}};
  const Layout per_channel{"[B, T, H, K]", {l.batch, l.tokens, kAnyHeads, l.key_dim}};
  const Layout decay = l.axes.decay == Decay::kPerHead ? Layout{"[H]", {kAnyHeads}} : l.axes.decay == Decay::kPerStep ? per_token : per_channel;
  const Expected expected[] = {
      {{"k", &inputs.k}, {"[B, T, H, K]", {l.batch, l.tokens, l.k_heads, l.key_dim}}, Precision::kOfQ},
      {{"v", &inputs.v}, {"[B, T, H, V]", {l.batch, l.tokens, l.v_heads, l.value_dim}}, Precision::kOfQ},
      {{"log_decay", &inputs.log_decay}, decay, Precision::kOfQOrF32},
      {{"beta", &inputs.beta}, per_token, Precision::kOfQOrF32},
      {{"remove", &inputs.remove}, per_channel, Precision::kOfQOrF32},
      {{"write", &inputs.write}, per_channel, Precision::kOfQOrF32},
      {{"bonus", &inputs.bonus}, {"[H, K]", {kAnyHeads, l.key_dim}}, Precision::kOfQOrF32},
      {{"initial_state", &inputs.initial_state}, StateLayout(l), Precision::kF32},
      {{"initial_key_sum", &inputs.initial_key_sum}, KeySumLayout(l), Precision::kF32},
      {written[0], OutLayout(l), Precision::kOfQ},
      {written[1], StateLayout(l), Precision::kF32},
      {written[2], KeySumLayout(l), Precision::kF32},
  };
  for (const Expected& one : expected)
    if (Status status = CheckExpected(one, l); !status.ok()) return status;
  if (inputs.valid.given()) {
    if (inputs.valid.dtype != Dtype::kBool)
      return Refuse(StatusCode::kDtype, "valid is " + std::string(Name(inputs.valid.dtype)) + " and must be bool");
    if (Status status = CheckLayout("valid", inputs.valid, {"[B, T]", {l.batch, l.tokens}}, l.state_heads); !status.ok()) return status;
  }
  for (const Named& one : given)
    if (Status status = CheckData(one.name, *one.tensor); !status.ok()) return status;

  // Memory that is written: its elements apart from each other, and from all that is read, but for a state written over itself.
  for (const Named& w : written) {
    if (!w.tensor->given()) continue;
    if (Status status = CheckOwnMemory(w.name, *w.tensor); !status.ok()) return status;
    for (const Named& r : given) {
      if (r.tensor == w.tensor || !r.tensor->given() || !MayOverlap(*w.tensor, *r.tensor)) continue;
      const bool own =
          (w.tensor == &state_view && r.tensor == &inputs.initial_state) || (w.tensor == &key_sum_view && r.tensor == &inputs.initial_key_sum);
      bool identical = own && w.tensor->data == r.tensor->data;
      for (int axis = 0; identical && axis < w.tensor->rank; ++axis)
        identical = w.tensor->shape[axis] == 1 || w.tensor->strides[axis] == r.tensor->strides[axis];
      if (!identical)
        return Refuse(StatusCode::kOverlap, std::string(w.name) + " shares memory with " + std::string(r.name) +
                                                (own ? " and must be the same view of it, or apart from it" : " and must be apart from it"));
    }
  }
  const ConstTensor workspace_bytes = BytesOf(options.workspace), saved_bytes = BytesOf(out.saved);
  const Named workspace{"workspace", &workspace_bytes}, saved{"saved", &saved_bytes};
  for (const Named& memory : {workspace, saved})
    for (const Named& one : given)
      if (Status status = CheckApart(memory, one); !status.ok()) return status;
  if (Status status = CheckApart(workspace, saved); !status.ok()) return status;

  if (options.check_values) {
    if (Status status = CheckGates(l); !status.ok()) return status;
  }
  *layer = l;
  return {};
}

}  // namespace tercet::contract
