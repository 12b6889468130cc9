// Not a number but a bound: the total degree, at most, of the polynomial that a reference form builds from its inputs when each input is a variable.
//
// A sum's degree is at most the larger of its terms' degrees (terms may cancel, so it can be less), a product's is the sum. Run on this type a form
// thus bounds the degree of each of its answers. For a quotient P / Q it gives deg P + deg Q, a bound of both; docs/proof.md says what identity is
// tested then.
#ifndef TERCET_SRC_REFERENCE_DEGREE_HPP_
#define TERCET_SRC_REFERENCE_DEGREE_HPP_

#include <algorithm>
#include <cstdint>

namespace tercet::reference {

class Degree {
 public:
  constexpr Degree() = default;  // of the zero polynomial, which adds nothing to a sum and makes a product zero
  constexpr explicit Degree(int64_t constant) : value_(constant == 0 ? kZero : 0) {}
  static constexpr Degree Variable() { return Of(1); }

  constexpr int64_t value() const { return std::max<int64_t>(value_, 0); }

  friend constexpr bool operator==(Degree a, Degree b) { return a.value_ == b.value_; }
  friend constexpr Degree operator+(Degree a, Degree b) { return Of(std::max(a.value_, b.value_)); }
  friend constexpr Degree operator-(Degree a, Degree b) { return a + b; }
  friend constexpr Degree operator*(Degree a, Degree b) { return a.value_ == kZero || b.value_ == kZero ? Degree() : Of(a.value_ + b.value_); }
  friend constexpr Degree operator/(Degree a, Degree b) { return Of(a.value() + b.value()); }

 private:
  static constexpr int64_t kZero = -1;
  static constexpr Degree Of(int64_t value) {
    Degree degree;
    degree.value_ = value;
    return degree;
  }

  int64_t value_ = kZero;
};

}  // namespace tercet::reference

#endif  // TERCET_SRC_REFERENCE_DEGREE_HPP_
