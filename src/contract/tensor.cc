#include "src/contract/tensor.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "src/contract/half.hpp"

namespace tercet::contract {

namespace {

template <class T>
T ReadAs(const ConstTensor& t, int64_t offset) {
  T value;
  std::memcpy(&value, static_cast<const char*>(t.data) + offset * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// A view as bytes: where it starts (its lowest address), and its axes, outermost (the largest step) first. Axes of one element or no step are left
// out.
struct Bytes {
  int64_t start = 0, element = 0;
  int axes = 0;
  std::array<int64_t, kMaxRank> size{}, step{};

  int64_t Extent(int from) const {
    int64_t extent = element;
    for (int axis = from; axis < axes; ++axis) extent += (size[axis] - 1) * step[axis];
    return extent;
  }
};

Bytes BytesOf(const ConstTensor& t) {
  Bytes bytes;
  bytes.start = static_cast<int64_t>(reinterpret_cast<intptr_t>(t.data));
  bytes.element = SizeOf(t.dtype);
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.shape[axis] <= 1 || t.strides[axis] == 0) continue;
    const int64_t step = t.strides[axis] * bytes.element;
    if (step < 0) bytes.start += (t.shape[axis] - 1) * step;
    bytes.size[bytes.axes] = t.shape[axis];
    bytes.step[bytes.axes] = std::abs(step);
    for (int at = bytes.axes++; at > 0 && bytes.step[at] > bytes.step[at - 1]; --at) {
      std::swap(bytes.step[at], bytes.step[at - 1]);
      std::swap(bytes.size[at], bytes.size[at - 1]);
    }
  }
  return bytes;
}

// Whether the axes of `a` from `a_axis` on, at 0, and those of `b` from `b_axis` on, at `distance`, may meet. Where what is inside a step is no
// longer than the step, element i of one and j of the other can meet for two values of i - j only, so that the answer is exact: two columns of one
// table never meet. A view without that step has one element of it.
bool MayMeet(const Bytes& a, int a_axis, const Bytes& b, int b_axis, int64_t distance) {
  if (distance >= a.Extent(a_axis) || distance + b.Extent(b_axis) <= 0) return false;
  const int64_t a_step = a_axis < a.axes ? a.step[a_axis] : 0, b_step = b_axis < b.axes ? b.step[b_axis] : 0;
  const int64_t step = std::max(a_step, b_step);
  if (step == 0) return true;
  const int64_t a_size = a_step == step ? a.size[a_axis++] : 1, b_size = b_step == step ? b.size[b_axis++] : 1;
  if (a.Extent(a_axis) > step || b.Extent(b_axis) > step) return true;
  const int64_t apart = distance / step - (distance % step < 0);
  for (const int64_t i : {apart, apart + 1})
    if (i < a_size && -i < b_size && MayMeet(a, a_axis, b, b_axis, distance - i * step)) return true;
  return false;
}

}  // namespace

double ReadDouble(const ConstTensor& t, int64_t offset) {
  switch (t.dtype) {
    case Dtype::kF32:
      return static_cast<double>(ReadAs<float>(t, offset));
    case Dtype::kF64:
      return ReadAs<double>(t, offset);
    case Dtype::kBF16:
      return static_cast<double>(Widen(ReadAs<BFloat16>(t, offset)));
    case Dtype::kF16:
      return static_cast<double>(Widen(ReadAs<Float16>(t, offset)));
    default:
      return static_cast<double>(ReadInteger(t, offset));
  }
}

void WriteDouble(const Tensor& t, int64_t offset, double x) {
  const auto write = [&](auto value) {
    std::memcpy(static_cast<char*>(t.data) + offset * static_cast<int64_t>(sizeof(value)), &value, sizeof(value));
  };
  const auto narrow = static_cast<float>(x);
  if (t.dtype == Dtype::kF64) write(x);
  if (t.dtype == Dtype::kF32) write(narrow);
  if (t.dtype == Dtype::kBF16) write(Narrow<BFloat16>(narrow));
  if (t.dtype == Dtype::kF16) write(Narrow<Float16>(narrow));
}

int64_t ReadInteger(const ConstTensor& t, int64_t offset) {
  switch (t.dtype) {
    case Dtype::kI32:
      return ReadAs<int32_t>(t, offset);
    case Dtype::kI64:
      return ReadAs<int64_t>(t, offset);
    case Dtype::kBool:
      return ReadAs<uint8_t>(t, offset) != 0;
    default:
      return 0;
  }
}

int64_t Count(const ConstTensor& t) {
  int64_t count = 1;
  bool too_many = false;
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.shape[axis] == 0) return 0;
    too_many |= __builtin_mul_overflow(count, t.shape[axis], &count);
  }
  return too_many ? -1 : count;
}

std::string ShapeText(const ConstTensor& t) {
  std::string text = "[";
  for (int axis = 0; axis < t.rank; ++axis) text += (axis == 0 ? "" : ", ") + std::to_string(t.shape[axis]);
  return text + "]";
}

bool MayOverlap(const ConstTensor& a, const ConstTensor& b) {
  if (Count(a) == 0 || Count(b) == 0) return false;
  const Bytes x = BytesOf(a), y = BytesOf(b);
  return MayMeet(x, 0, y, 0, y.start - x.start);
}

bool MayOverlapItself(const ConstTensor& t) {
  if (Count(t) == 0) return false;
  for (int axis = 0; axis < t.rank; ++axis)
    if (t.shape[axis] > 1 && t.strides[axis] == 0) return true;
  const Bytes bytes = BytesOf(t);
  for (int axis = 0; axis < bytes.axes; ++axis)
    if (bytes.step[axis] < bytes.Extent(axis + 1)) return true;
  return false;
}

}  // namespace tercet::contract
