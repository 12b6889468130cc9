// The single checks that all checking is made of, each with its sentence, for what a call and a call for gradients may be.
#ifndef TERCET_SRC_CONTRACT_CHECKS_HPP_
#define TERCET_SRC_CONTRACT_CHECKS_HPP_

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "src/contract/layer.hpp"
#include "tercet/tercet.hpp"

namespace tercet::contract {

inline Status Refuse(StatusCode code, std::string message) { return {code, std::move(message)}; }
inline std::string Text(int64_t value) { return std::to_string(value); }
std::string Text(double value);

struct Named {
  std::string_view name;
  const ConstTensor* tensor;
};

// The inputs, and three tensors that have the layouts of the outputs.
std::array<Named, 15> InputsAnd(const Inputs& inputs, const Named& out, const Named& final_state, const Named& final_key_sum);

// No view has more elements than this, an empty axis counted as one: then no product of two sizes overflows, nor one of a size and what a chunk
// needs.
inline constexpr int64_t kMostElements = int64_t{1} << 48;

// Axes that are known: rank, sizes, and offsets that fit in 62 bits, so that no later sum of them overflows. The stride of an axis of one
// element, or of an empty view, is never used and may be anything.
Status CheckForm(std::string_view name, const ConstTensor& t);

// The axes of a layout. kAnyHeads matches a count of heads that divides the state heads.
inline constexpr int64_t kAnyHeads = -1;

// Up to kMaxRank sizes, and no memory but their own: a decode step is checked without asking for any.
class Sizes {
 public:
  Sizes(std::initializer_list<int64_t> sizes) : count_(sizes.size()) { std::copy(sizes.begin(), sizes.end(), sizes_.begin()); }
  size_t size() const { return count_; }
  int64_t operator[](size_t axis) const { return sizes_[axis]; }
  const int64_t* begin() const { return sizes_.data(); }
  const int64_t* end() const { return sizes_.data() + count_; }

 private:
  std::array<int64_t, kMaxRank> sizes_{};
  size_t count_;
};

struct Layout {
  std::string_view names;  // "[B, T, H, K]"
  Sizes sizes;
};

Layout OutLayout(const Layer& layer);
Layout StateLayout(const Layer& layer);
Layout KeySumLayout(const Layer& layer);

Status CheckLayout(std::string_view name, const ConstTensor& t, const Layout& layout, int64_t state_heads);

// What a floating tensor may be where q is bf16 or f16; where it is f32 or f64, all have its dtype.
enum class Precision { kOfQ, kOfQOrF32, kF32 };

// What a floating tensor must be where it is given.
struct Expected {
  Named named;
  Layout layout;
  Precision precision;
};
Status CheckExpected(const Expected& expected, const Layer& layer);

// No null where there are elements.
Status CheckData(std::string_view name, const ConstTensor& t);
// No memory that two elements share.
Status CheckOwnMemory(std::string_view name, const ConstTensor& t);
// None that both have.
Status CheckApart(const Named& one, const Named& other);

// A caller's memory: not negative, no null where there are bytes.
Status CheckMemory(std::string_view name, const Workspace& memory);
// It as a tensor of bytes, not given where it has none.
ConstTensor BytesOf(const Workspace& memory);

}  // namespace tercet::contract

#endif  // TERCET_SRC_CONTRACT_CHECKS_HPP_
