#include "src/contract/checks.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "src/contract/tensor.hpp"

namespace tercet::contract {

namespace {

std::string SizesText(const Layout& layout) {
  std::string text = "[";
  for (size_t axis = 0; axis < layout.sizes.size(); ++axis)
    text += (axis == 0 ? "" : ", ") + (layout.sizes[axis] == kAnyHeads ? std::string("H") : Text(layout.sizes[axis]));
  return text + "]";
}

Status CheckFloating(std::string_view name, const ConstTensor& t, Precision precision, Dtype dtype) {
  const bool narrow = SizeOf(dtype) == 2;
  if (narrow && precision != Precision::kOfQ && t.dtype == Dtype::kF32) return {};
  if (!(narrow && precision == Precision::kF32) && t.dtype == dtype) return {};
  const std::string q(Name(dtype));
  const std::string must = !narrow || precision == Precision::kOfQ ? q + ", the dtype of q"
                           : precision == Precision::kOfQOrF32     ? q + ", the dtype of q, or f32"
                                                                   : "f32, which states and key sums are where q is " + q;
  return Refuse(StatusCode::kDtype, std::string(name) + " is " + std::string(Name(t.dtype)) + " and must be " + must);
}

}  // namespace

std::string Text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

std::array<Named, 15> InputsAnd(const Inputs& inputs, const Named& out, const Named& final_state, const Named& final_key_sum) {
  return {{{"q", &inputs.q},
           {"k", &inputs.k},
           {"v", &inputs.v},
           {"log_decay", &inputs.log_decay},
           {"beta", &inputs.beta},
           {"remove", &inputs.remove},
           {"write", &inputs.write},
           {"bonus", &inputs.bonus},
           {"initial_state", &inputs.initial_state},
           {"initial_key_sum", &inputs.initial_key_sum},
           {"offsets", &inputs.offsets},
           {"valid", &inputs.valid},
           out,
           final_state,
           final_key_sum}};
}

Status CheckForm(std::string_view name, const ConstTensor& t) {
  if (t.rank < 0 || t.rank > kMaxRank)
    return Refuse(StatusCode::kShape,
                  std::string(name) + " has rank " + Text(int64_t{t.rank}) + " and must have one from 0 (not given) to " + Text(int64_t{kMaxRank}));
  int64_t elements = 1, furthest = 0;
  bool too_many = false, too_far = false;
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.shape[axis] < 0) return Refuse(StatusCode::kShape, std::string(name) + " has shape " + ShapeText(t) + " and must have no negative size");
    too_many |= __builtin_mul_overflow(elements, std::max<int64_t>(t.shape[axis], 1), &elements);
  }
  if (too_many || elements > kMostElements)
    return Refuse(StatusCode::kShape, std::string(name) + " has shape " + ShapeText(t) + " and must have sizes whose product is at most 2^48");
  for (int axis = 0; Count(t) > 0 && axis < t.rank; ++axis) {
    int64_t step = 0, span = 0;
    if (t.shape[axis] == 1) continue;
    too_far |= __builtin_mul_overflow(t.strides[axis], SizeOf(t.dtype), &step) || step == INT64_MIN;
    too_far |= __builtin_mul_overflow(t.shape[axis] - 1, too_far ? 0 : std::abs(step), &span);
    too_far |= __builtin_add_overflow(furthest, span, &furthest);
  }
  if (too_far || furthest > (int64_t{1} << 61))
    return Refuse(StatusCode::kShape, std::string(name) + " has shape " + ShapeText(t) +
                                          " and strides that span more than 2^61 bytes, and must have strides that span less");
  return {};
}

Layout OutLayout(const Layer& layer) { return {"[B, T, H, V]", {layer.batch, layer.tokens, layer.out_heads, layer.value_dim}}; }
Layout StateLayout(const Layer& layer) { return {"[N, H, K, V]", {layer.sequences, layer.state_heads, layer.key_dim, layer.value_dim}}; }
Layout KeySumLayout(const Layer& layer) { return {"[N, H, K]", {layer.sequences, layer.state_heads, layer.key_dim}}; }

Status CheckLayout(std::string_view name, const ConstTensor& t, const Layout& layout, int64_t state_heads) {
  bool same = t.rank == static_cast<int>(layout.sizes.size());
  bool grouped = false;
  int64_t heads = 1;
  for (int axis = 0; same && axis < t.rank; ++axis) {
    if (layout.sizes[axis] == kAnyHeads) {
      grouped = true;
      heads = t.shape[axis];
    } else {
      same = t.shape[axis] == layout.sizes[axis];
    }
  }
  if (!same)
    return Refuse(StatusCode::kShape, std::string(name) + " has shape " + ShapeText(t) + " and must be " + std::string(layout.names) + " = " +
                                          SizesText(layout) +
                                          (std::find(layout.sizes.begin(), layout.sizes.end(), kAnyHeads) != layout.sizes.end()
                                               ? " with H a divisor of the " + Text(state_heads) + " state heads"
                                               : ""));
  if (grouped && (heads < 1 || state_heads % heads != 0))
    return Refuse(StatusCode::kShape, std::string(name) + " has " + Text(heads) + " heads (shape " + ShapeText(t) +
                                          ") and must have a count that divides the " + Text(state_heads) + " state heads");
  return {};
}

Status CheckExpected(const Expected& expected, const Layer& layer) {
  if (!expected.named.tensor->given()) return {};
  const auto& [name, tensor] = expected.named;
  if (Status status = CheckLayout(name, *tensor, expected.layout, layer.state_heads); !status.ok()) return status;
  return CheckFloating(name, *tensor, expected.precision, layer.dtype);
}

Status CheckData(std::string_view name, const ConstTensor& t) {
  if (t.given() && t.data == nullptr && Count(t) != 0)
    return Refuse(StatusCode::kNullData, std::string(name) + " has no data and must point to its " + Text(Count(t)) + " elements");
  return {};
}

Status CheckOwnMemory(std::string_view name, const ConstTensor& t) {
  if (!MayOverlapItself(t)) return {};
  return Refuse(StatusCode::kOverlap, std::string(name) + " has strides under which two of its elements share memory and each must have its own");
}

Status CheckApart(const Named& one, const Named& other) {
  if (!one.tensor->given() || !other.tensor->given() || !MayOverlap(*one.tensor, *other.tensor)) return {};
  return Refuse(StatusCode::kOverlap, std::string(one.name) + " shares memory with " + std::string(other.name) + " and must be apart from it");
}

Status CheckMemory(std::string_view name, const Workspace& memory) {
  if (memory.bytes < 0)
    return Refuse(StatusCode::kInvalidOption, std::string(name) + " has " + Text(memory.bytes) + " bytes and must have at least 0");
  if (memory.data == nullptr && memory.bytes > 0)
    return Refuse(StatusCode::kNullData, std::string(name) + " has no data and must point to its " + Text(memory.bytes) + " bytes");
  return {};
}

ConstTensor BytesOf(const Workspace& memory) {
  if (memory.bytes <= 0) return {};
  // More bytes than an address space has are clipped, so that no sum of them overflows.
  return View(static_cast<const uint8_t*>(memory.data), {std::min(memory.bytes, kMostElements)});
}

}  // namespace tercet::contract
