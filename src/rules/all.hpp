// The only list of rules. A new rule is an enum value, a header, a line here and a reference case.
#ifndef TERCET_SRC_RULES_ALL_HPP_
#define TERCET_SRC_RULES_ALL_HPP_

#include <utility>

#include "src/rules/delta.hpp"
#include "src/rules/gated_delta.hpp"
#include "src/rules/gla.hpp"
#include "src/rules/kda.hpp"
#include "src/rules/linear.hpp"
#include "src/rules/retention.hpp"
#include "src/rules/rwkv6.hpp"
#include "src/rules/rwkv7.hpp"
#include "src/rules/simple_gla.hpp"

namespace tercet::rules {

template <class... R>
struct List {
  static constexpr int kCount = sizeof...(R);
  template <class F>
  static constexpr void ForEach(F&& f) {
    (f(R{}), ...);
  }
};

// In the order of the enum `Rule`.
using All = List<Linear, Retention, SimpleGla, Gla, Rwkv6, Delta, GatedDelta, Kda, Rwkv7>;

// Those whose update reads the state, and those whose update only adds: their engines are compiled side by side.
template <bool kReads>
struct Chosen {
  template <class R>
  static constexpr bool kIsOne = (R::kUpdate == Update::kDelta || R::kUpdate == Update::kRankOne) == kReads;
  template <class F>
  static constexpr void ForEach(F&& f) {
    All::ForEach([&]<class R>(R rule) {
      if constexpr (kIsOne<R>) f(rule);
    });
  }
};
using Adding = Chosen<false>;
using Reading = Chosen<true>;

// A rule's point on the axes, for code that does not fold it in at compile time.
struct Axes {
  Decay decay = Decay::kNone;
  Update update = Update::kAdd;
};
Axes AxesOf(Rule rule);

}  // namespace tercet::rules

#endif  // TERCET_SRC_RULES_ALL_HPP_
