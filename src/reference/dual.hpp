// A number and its derivative along a direction: a + a' x with x^2 = 0. Inputs are given as values with the direction as their derivatives, and what
// a reference form then answers has the directional derivative beside each value, exact but for rounding, without a formula for any gradient.
#ifndef TERCET_SRC_REFERENCE_DUAL_HPP_
#define TERCET_SRC_REFERENCE_DUAL_HPP_

#include <cmath>

namespace tercet::reference {

template <class T>
class Dual {
 public:
  constexpr Dual() = default;
  template <class Constant>
  constexpr explicit Dual(const Constant& value) : value_(static_cast<T>(value)) {}
  constexpr Dual(const T& value, const T& derivative) : value_(value), derivative_(derivative) {}

  constexpr const T& value() const { return value_; }
  constexpr const T& derivative() const { return derivative_; }

  // Where to go depends on the value alone: a denominator of zero is one, in whatever direction it leaves zero.
  friend constexpr bool operator==(const Dual& a, const Dual& b) { return a.value_ == b.value_; }
  friend constexpr bool operator<=(const Dual& a, const Dual& b) { return a.value_ <= b.value_; }
  friend constexpr Dual operator+(const Dual& a, const Dual& b) { return {a.value_ + b.value_, a.derivative_ + b.derivative_}; }
  friend constexpr Dual operator-(const Dual& a, const Dual& b) { return {a.value_ - b.value_, a.derivative_ - b.derivative_}; }
  friend constexpr Dual operator*(const Dual& a, const Dual& b) { return {a.value_ * b.value_, a.derivative_ * b.value_ + a.value_ * b.derivative_}; }
  friend constexpr Dual operator/(const Dual& a, const Dual& b) {
    const T value = a.value_ / b.value_;
    return {value, (a.derivative_ - value * b.derivative_) / b.value_};
  }
  // Of floating types alone.
  friend Dual exp(const Dual& a) {
    using std::exp;
    const T value = exp(a.value_);
    return {value, value * a.derivative_};
  }
  friend Dual sqrt(const Dual& a) {
    using std::sqrt;
    const T value = sqrt(a.value_);
    return {value, a.derivative_ / (value + value)};
  }

 private:
  T value_ = T(0);
  T derivative_ = T(0);
};

}  // namespace tercet::reference

#endif  // TERCET_SRC_REFERENCE_DUAL_HPP_
