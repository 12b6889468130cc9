// A number of a working precision whose every sum, product and quotient is rounded at random: a computation written for any scalar, run on this one,
// errs as rounding errs, and anew in every run. Slow beside the rows of monte_carlo.hpp, and needs nothing of the computation.
#ifndef TERCET_SRC_PROOF_ROUNDED_HPP_
#define TERCET_SRC_PROOF_ROUNDED_HPP_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "src/proof/monte_carlo.hpp"
#include "src/reference/recurrent.hpp"

namespace tercet::proof {

// What a run draws: where one lives, its thread's numbers are rounded by it.
class Rounding {
 public:
  explicit Rounding(uint64_t seed) : seed_(RandomWords::Mixed(seed)), words_(seed) { current_ = this; }
  ~Rounding() { current_ = nullptr; }
  Rounding(const Rounding&) = delete;
  Rounding& operator=(const Rounding&) = delete;

  uint32_t Next() {
    if (left_ == 0) row_ = words_.Row(left_ = kRow);
    return row_[--left_];
  }
  // The same words for the same number, all through the run.
  uint64_t Of(double x) const { return RandomWords::Mixed(seed_ ^ RandomWords::Mixed(std::bit_cast<uint64_t>(x))); }
  static Rounding& Current() { return *current_; }

 private:
  static constexpr int64_t kRow = 256;
  inline static thread_local Rounding* current_ = nullptr;
  uint64_t seed_;
  RandomWords words_;
  const uint32_t* row_ = nullptr;
  int64_t left_ = 0;
};

template <class Working>
class Rounded {
  using Wide = Wider<Working>;

 public:
  constexpr Rounded() = default;
  // Numbers that Working can hold, or nearly.
  template <class Number>
  constexpr explicit Rounded(Number x) : value_(static_cast<Working>(x)) {}

  constexpr explicit operator double() const { return static_cast<double>(value_); }
  constexpr Working value() const { return value_; }

  friend bool operator==(Rounded a, Rounded b) { return a.value_ == b.value_; }
  friend bool operator<=(Rounded a, Rounded b) { return a.value_ <= b.value_; }
  friend Rounded operator+(Rounded a, Rounded b) { return AtRandom(static_cast<Wide>(a.value_) + static_cast<Wide>(b.value_)); }
  friend Rounded operator-(Rounded a, Rounded b) { return AtRandom(static_cast<Wide>(a.value_) - static_cast<Wide>(b.value_)); }
  friend Rounded operator*(Rounded a, Rounded b) { return AtRandom(static_cast<Wide>(a.value_) * static_cast<Wide>(b.value_)); }
  friend Rounded operator/(Rounded a, Rounded b) { return AtRandom(static_cast<Wide>(a.value_) / static_cast<Wide>(b.value_)); }
  friend Rounded sqrt(Rounded a) {
    using std::sqrt;
    return AtRandom(sqrt(static_cast<Wide>(a.value_)));
  }
  // As the factor of products that are rounded, which one with 1 does not show: times a random number within half a unit in the last place of 1.
  friend Rounded Factor(Rounded a) {
    const Wide shift = (static_cast<Wide>(Rounding::Current().Next()) * Wide(0x1p-32) - Wide(0.5)) * std::numeric_limits<Working>::epsilon();
    return AtRandom(static_cast<Wide>(a.value_) + static_cast<Wide>(a.value_) * shift);
  }
  // Rounded by its argument, so that equal decays share an error: a constant one that is off by a little is off at every token, which no average
  // makes better. And twice, once within half a unit of 1, for so is every product of factors that it goes into. 1 and 0 are exact in both.
  friend Rounded exp(Rounded a) {
    using std::exp;
    const Wide y = exp(static_cast<Wide>(a.value_));
    const uint64_t words = Rounding::Current().Of(static_cast<double>(a.value_));
    const Wide shift = (static_cast<Wide>(words & 0xffffffff) * Wide(0x1p-32) - Wide(0.5)) * std::numeric_limits<Working>::epsilon();
    return Rounded(RoundBits<Working>(y == 1 ? y : y + y * shift, static_cast<uint32_t>(words >> 32)));
  }

 private:
  static Rounded AtRandom(Wide x) { return Rounded(RoundBits<Working>(x, Rounding::Current().Next())); }

  Working value_ = 0;
};

}  // namespace tercet::proof

namespace tercet::reference {

// The policy of these numbers: all else they round themselves.
template <class Working>
struct Exact<proof::Rounded<Working>> : Exact<Working> {
  using Stored = proof::Rounded<Working>;
  using Wide = Stored;
  void Round(const Stored* x, int64_t n, Stored* y) { std::copy(x, x + n, y); }
  void Partial(Stored* /*x*/, int64_t /*n*/) {}
  void Factors(const Stored* x, int64_t n, Stored* y) {
    for (int64_t i = 0; i < n; ++i) y[i] = Factor(x[i]);
  }
  void Operands(const Stored* x, int64_t n, Stored* y) { Factors(x, n, y); }
};

}  // namespace tercet::reference

#endif  // TERCET_SRC_PROOF_ROUNDED_HPP_
