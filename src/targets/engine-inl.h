// A form for every rule and accumulator type, as this target's engine.
#include <cstddef>
#include <type_traits>

#include "src/forms/job.hpp"
#include "src/forms/tiles-inl.h"
#include "src/rules/all.hpp"

#if defined(TERCET_SRC_TARGETS_ENGINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERCET_SRC_TARGETS_ENGINE_INL_H_
#undef TERCET_SRC_TARGETS_ENGINE_INL_H_
#else
#define TERCET_SRC_TARGETS_ENGINE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet {
namespace HWY_NAMESPACE {

// Enters the rules of `List` in an engine, of a form or of gradients. Form<R, T> has Run and Bytes as src/forms/job.hpp describes them.
template <template <class R, class T> class Form, class List, class Engine>
void AddTo(Engine& engine) {
  List::ForEach([&]<class R>(R) {
    constexpr auto kRule = static_cast<size_t>(R::kRule);
    engine.run[0][kRule] = &Form<R, float>::Run;
    engine.run[1][kRule] = &Form<R, double>::Run;
    engine.bytes[0][kRule] = &Form<R, float>::Bytes;
    engine.bytes[1][kRule] = &Form<R, double>::Bytes;
    if constexpr (std::is_same_v<Engine, forms::Engine>) {
      if constexpr (requires { Form<R, float>::kTokens; }) engine.tokens_a_pass[kRule] = Form<R, float>::kTokens;
      if constexpr (requires { Form<R, float>::kPanel; }) {
        engine.panel[0] = Form<R, float>::kPanel;
        engine.panel[1] = Form<R, double>::kPanel;
      }
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

#endif  // TERCET_SRC_TARGETS_ENGINE_INL_H_
