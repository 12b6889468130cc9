// How far numbers lie from the truth, and what rounding them once may cost.
#ifndef TERCET_SRC_PROOF_DIFFERENCE_HPP_
#define TERCET_SRC_PROOF_DIFFERENCE_HPP_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "src/proof/monte_carlo.hpp"
#include "tercet/tercet.hpp"

namespace tercet::proof {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline const Narrower* NarrowerOf(Dtype dtype) { return dtype == Dtype::kBF16 ? &kBF16 : dtype == Dtype::kF16 ? &kF16 : nullptr; }

// The largest number that a dtype can hold, or what rounds to it. `narrower` is null for W itself.
template <class W>
long double MostOfDtype(const Narrower* narrower) {
  return narrower != nullptr ? std::nextafter(narrower->edge, 0.0) : static_cast<long double>(std::numeric_limits<W>::max());
}

// A group's distance from the truth, over the numbers that are finite in both.
struct Difference {
  long double squares = 0;
  int64_t count = 0;
  double largest = 0;
  double masked = 0;     // the largest number in rows of out that belong to tokens that are not valid, where there must be zeros
  bool differs = false;  // a number is finite in one and not in the other

  // `most` is the largest number that the tensor's dtype can hold: what is beyond it is not finite there.
  void Add(long double truth, long double value, long double most) {
    const bool finite = std::abs(truth) <= most;
    if (!finite || !(std::abs(value) <= most)) {
      differs |= finite != (std::abs(value) <= most);
      return;
    }
    const long double d = value - truth;
    squares += d * d;
    largest = std::max(largest, static_cast<double>(std::abs(d)));
    ++count;
  }
  long double MeanSquare() const { return count == 0 ? 0 : squares / static_cast<long double>(count); }
};

// Half a unit in the last place of 1.
template <class W>
inline constexpr long double kHalfAUnit = std::numeric_limits<W>::epsilon() / 2;

// The least noise of a group. Rounding an answer once costs up to half a unit in its last place, however lucky the draws were: taken as half a unit
// in the last place of 1, and of each number where it is rounded once more, for there that is most of the noise.
template <class W>
class Floor {
 public:
  explicit Floor(const Narrower* narrower) : narrower_(narrower), most_(MostOfDtype<W>(narrower)) {}

  void Add(long double truth) {
    size_.Add(0, truth, most_);
    if (!(std::abs(truth) <= most_)) return;
    rounding_.Add(0, narrower_ != nullptr ? narrower_->Unit(static_cast<double>(truth)) / 2 : kHalfAUnit<W> * truth, most_);
  }
  double largest() const { return size_.largest; }
  // What `variance` comes to above it.
  double Noise(long double variance) const {
    return static_cast<double>(std::max(std::sqrt(variance), std::sqrt(rounding_.MeanSquare())) + std::numeric_limits<W>::min());
  }

 private:
  const Narrower* narrower_;
  long double most_;
  Difference size_, rounding_;  // from zero: how large the numbers are, and what rounding costs
};

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_DIFFERENCE_HPP_
