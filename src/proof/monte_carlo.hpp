// Monte Carlo arithmetic: a computation in a wider type whose results are rounded to the working one at random, up or down with the chances that make
// the mean right. A few such runs show how far rounding alone carries an answer.
//
// Source: D. S. Parker, Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic, UCLA CSD-970002, 1997.
#ifndef TERCET_SRC_PROOF_MONTE_CARLO_HPP_
#define TERCET_SRC_PROOF_MONTE_CARLO_HPP_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

namespace tercet::proof {

template <class Working>
using Wider = std::conditional_t<std::is_same_v<Working, float>, double, long double>;

// Whether long double is the 80-bit format of x87: a mantissa of 64 bits, little-endian, then sign and exponent.
#if defined(__x86_64__) || defined(__i386__)
inline constexpr bool kHasX87 = std::numeric_limits<long double>::digits == 64;
#else
inline constexpr bool kHasX87 = false;
#endif

// Random 32-bit words by the row: sixteen generators side by side, Marsaglia's xorshift of 128 bits, which a compiler vectorises.
class RandomWords {
 public:
  explicit RandomWords(uint64_t seed) {
    for (auto& part : state_)
      for (uint32_t& word : part) word = static_cast<uint32_t>(Mixed(seed += 0x9e3779b97f4a7c15) >> 32) | 1;  // a state of zeros would stay zero
  }

  // n words, good until the next call.
  const uint32_t* Row(int64_t n) {
    if (static_cast<int64_t>(row_.size()) < n) row_.resize((n + kLanes - 1) / kLanes * kLanes);
    for (int64_t begin = 0; begin < n; begin += kLanes) {
      uint32_t* out = row_.data() + begin;
      for (int64_t l = 0; l < kLanes; ++l) {
        const uint32_t oldest = state_[0][l] ^ (state_[0][l] << 11);
        state_[0][l] = state_[1][l];
        state_[1][l] = state_[2][l];
        state_[2][l] = state_[3][l];
        state_[3][l] = state_[3][l] ^ (state_[3][l] >> 19) ^ oldest ^ (oldest >> 8);
        out[l] = state_[3][l];
      }
    }
    return row_.data();
  }

  // A bijection of 64-bit words under which neighbours look unrelated (the finaliser of SplitMix64).
  static uint64_t Mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

 private:
  static constexpr int64_t kLanes = 16;
  uint32_t state_[4][kLanes];
  std::vector<uint32_t> row_;
};

// x rounded to one of its two neighbours in Working: up in magnitude where the word, as a fraction of 2^32, is below x's place between them. What is
// below the normal range is zero, as the library flushes it; what is not finite stays as it is.
template <class Working>
Working RoundAtRandom(Wider<Working> x, uint32_t word) {
  using Limits = std::numeric_limits<Working>;
  Working low = static_cast<Working>(x);
  if (!(std::abs(x) <= Limits::max())) return low;
  if (std::abs(static_cast<Wider<Working>>(low)) > std::abs(x)) low = std::nextafter(low, Working(0));
  const Working high = std::nextafter(low, x < 0 ? -Limits::infinity() : Limits::infinity());
  const Wider<Working> place = (x - low) / (static_cast<Wider<Working>>(high) - low);
  const Working rounded = static_cast<Wider<Working>>(word) * Wider<Working>(0x1p-32) < place ? high : low;
  return std::abs(rounded) < Limits::min() ? Working(0) : rounded;
}

inline constexpr uint64_t kBelowFloat = (uint64_t{1} << 29) - 1;  // the bits of a double below a float's last

// The same on the bits of x, which is fast.
template <class Working>
Working RoundBits(Wider<Working> x, uint32_t word) {
  if constexpr (std::is_same_v<Working, float>) {
    // 29 random bits are added below the last bit of a float and cut off: they carry with the right chance.
    const double z = std::bit_cast<double>((std::bit_cast<uint64_t>(x) + (word & kBelowFloat)) & ~kBelowFloat);
    return static_cast<float>(std::abs(z) < std::numeric_limits<float>::min() ? 0.0 : z);
  } else if constexpr (kHasX87) {
    // The same with the 11 bits that x87 has more, on the integers, for x87 itself only rounds to nearest at this speed.
    uint64_t mantissa;
    uint16_t head;
    std::memcpy(&mantissa, reinterpret_cast<const char*>(&x), 8);
    std::memcpy(&head, reinterpret_cast<const char*>(&x) + 8, 2);
    const uint32_t exponent = (head & 0x7fffu) - 15361u;  // of a double, less one: the mantissa's leading bit adds it
    if (exponent > 2045) return RoundAtRandom<double>(x, word);
    const uint64_t carry = ((mantissa & 0x7ff) + (word >> 21)) >> 11;
    const uint64_t bits = (static_cast<uint64_t>(exponent) << 52) + (mantissa >> 11) + carry;
    return std::bit_cast<double>(bits | static_cast<uint64_t>(head >> 15) << 63);
  } else {
    return RoundAtRandom<Working>(x, word);
  }
}

// A dtype narrower than any C++ type: numbers of so many digits, of which none is smaller than `least`, and `edge` is the first that rounds to inf.
struct Narrower {
  int digits;
  double least, edge;
  // A unit in the last place of x, and nothing for 0.
  double Unit(double x) const {
    if (x == 0) return 0;
    int exponent;
    std::frexp(x, &exponent);
    return std::max(std::ldexp(1.0, exponent - digits), least);
  }
};
inline constexpr Narrower kBF16 = {8, 0x1p-133, 0x1p128 - 0x1p119}, kF16 = {11, 0x1p-24, 65520};

// x rounded to one of its two neighbours of those, with the same chances.
inline float RoundAtRandom(const Narrower& to, float x, uint32_t word) {
  if (!std::isfinite(x) || x == 0) return x;
  const double step = to.Unit(static_cast<double>(x)), size = std::abs(static_cast<double>(x)) / step;
  const double low = std::floor(size), rounded = (low + (word * 0x1p-32 < size - low ? 1 : 0)) * step;
  return std::copysign(rounded < to.edge ? static_cast<float>(rounded) : std::numeric_limits<float>::infinity(), x);
}

// The policy of the recurrent reference form.
template <class Working>
class MonteCarlo {
 public:
  using Stored = Working;
  using Wide = Wider<Working>;

  // Operands of products have so many digits, where these are fewer than the working precision has.
  explicit MonteCarlo(uint64_t seed, int operand_digits = std::numeric_limits<Working>::digits) : words_(seed), operand_digits_(operand_digits) {}

  // y = x, each number rounded as RoundAtRandom does.
  void Round(const Wide* x, int64_t n, Stored* y) {
    const uint32_t* words = words_.Row(n);
    for (int64_t i = 0; i < n; ++i) y[i] = RoundBits<Working>(x[i], words[i]);
  }

  // y = x times a random number within half a unit in the last place of 1: x as the factor of products that are rounded. One error is drawn for all
  // products of a channel with the state's row; to draw one for each would cost as much as the whole recurrence.
  void Factors(const Stored* x, int64_t n, Wide* y) { Vary(x, n, std::numeric_limits<Working>::digits, y); }
  // The same within half a unit in the last place of 1 that an operand has. Both operands are rounded, and the other one errs likewise: half a unit
  // of 1 is more than rounding one of them costs, about as much as both.
  void Operands(const Stored* x, int64_t n, Wide* y) { Vary(x, n, operand_digits_, y); }

  // Rounds n sums on their way, in place and without regard for the range.
  void Partial(Wide* x, int64_t n) {
    const uint32_t* words = words_.Row(n);
    if constexpr (std::is_same_v<Working, float>) {
      for (int64_t i = 0; i < n; ++i) x[i] = std::bit_cast<double>((std::bit_cast<uint64_t>(x[i]) + (words[i] & kBelowFloat)) & ~kBelowFloat);
    } else if constexpr (kHasX87) {
      for (int64_t i = 0; i < n; ++i) {
        uint64_t mantissa;
        std::memcpy(&mantissa, x + i, 8);
        const uint64_t sum = mantissa + (words[i] >> 21);
        if (sum < mantissa) {
          x[i] = RoundAtRandom<double>(x[i], words[i]);
          continue;
        }
        mantissa = sum & ~uint64_t{0x7ff};
        std::memcpy(x + i, &mantissa, 8);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) x[i] = RoundAtRandom<Working>(x[i], words[i]);
    }
  }

  // Rounds n numbers once more, in place.
  void Narrow(const Narrower& to, Stored* x, int64_t n) {
    static_assert(std::is_same_v<Working, float>);
    const uint32_t* words = words_.Row(n);
    for (int64_t i = 0; i < n; ++i) x[i] = RoundAtRandom(to, x[i], words[i]);
  }

  // A random order of the channels, one for the whole run: in which order a sum is taken decides how large it is on its way.
  std::vector<int64_t> Order(int64_t K) {
    std::vector<int64_t> order(K);
    std::iota(order.begin(), order.end(), int64_t{0});
    const uint32_t* words = words_.Row(K);
    for (int64_t i = K - 1; i > 0; --i) std::swap(order[i], order[words[i] % static_cast<uint32_t>(i + 1)]);
    return order;
  }

 private:
  void Vary(const Stored* x, int64_t n, int digits, Wide* y) {
    const uint32_t* words = words_.Row(n);
    const Wide unit = std::ldexp(Wide(1), -31 - digits);
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<Wide>(x[i]) * (1 + static_cast<Wide>(static_cast<int32_t>(words[i])) * unit);
  }

  RandomWords words_;
  int operand_digits_;
};

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_MONTE_CARLO_HPP_
