// The field of 2^61 - 1: arithmetic without rounding, where two polynomials that are not the same almost never agree at a random point.
#ifndef TERCET_SRC_REFERENCE_FIELD_HPP_
#define TERCET_SRC_REFERENCE_FIELD_HPP_

#include <cstdint>

namespace tercet::reference {

class Field {
 public:
  static constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

  constexpr Field() = default;
  constexpr explicit Field(int64_t x) {
    const int64_t rest = x % static_cast<int64_t>(kPrime);
    value_ = static_cast<uint64_t>(rest < 0 ? rest + static_cast<int64_t>(kPrime) : rest);
  }

  // A uniformly random element from a source of uniformly random 64-bit words: 61 bits, drawn again in the one case that is no element.
  template <class Words>
  static Field Random(Words& words) {
    Field x;
    do x.value_ = static_cast<uint64_t>(words()) >> 3;
    while (x.value_ == kPrime);
    return x;
  }

  constexpr uint64_t value() const { return value_; }  // 0 ... kPrime - 1

  friend constexpr bool operator==(Field a, Field b) { return a.value_ == b.value_; }
  friend constexpr Field operator+(Field a, Field b) { return Reduced(a.value_ + b.value_); }
  friend constexpr Field operator-(Field a, Field b) { return Reduced(a.value_ + kPrime - b.value_); }
  friend constexpr Field operator*(Field a, Field b) {
    // 2^61 is 1 here, so the bits from 61 on are added to those below.
    const Wide product = static_cast<Wide>(a.value_) * b.value_;
    return Reduced((static_cast<uint64_t>(product) & kPrime) + static_cast<uint64_t>(product >> 61));
  }
  // 1 / b is b^(p - 2). The caller looks out for zero, whose power is zero.
  friend constexpr Field operator/(Field a, Field b) {
    Field power = b;
    for (uint64_t e = kPrime - 2; e != 0; e >>= 1) {
      if (e & 1) a = a * power;
      power = power * power;
    }
    return a;
  }

 private:
  __extension__ typedef unsigned __int128 Wide;

  static constexpr Field Reduced(uint64_t below_twice_prime) {
    Field x;
    x.value_ = below_twice_prime >= kPrime ? below_twice_prime - kPrime : below_twice_prime;
    return x;
  }

  uint64_t value_ = 0;
};

}  // namespace tercet::reference

#endif  // TERCET_SRC_REFERENCE_FIELD_HPP_
