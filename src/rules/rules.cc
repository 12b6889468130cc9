// The rules as data, made from the list, and the names of every other choice.
#include <array>

#include "src/rules/all.hpp"
#include "tercet/tercet.hpp"

namespace tercet {

namespace {

constexpr std::string_view LogDecayLayout(Decay decay) {
  switch (decay) {
    case Decay::kNone:
      return "";
    case Decay::kPerHead:
      return "[H]";
    case Decay::kPerStep:
      return "[B, T, H]";
    case Decay::kPerChannel:
      return "[B, T, H, K]";
  }
  return "";
}

template <class Value, size_t kCount>
std::string_view NameIn(const std::array<std::pair<Value, std::string_view>, kCount>& names, Value value) {
  for (const auto& [known, name] : names)
    if (known == value) return name;
  return "unknown";
}

template <class Value, size_t kCount>
std::optional<Value> ValueIn(const std::array<std::pair<Value, std::string_view>, kCount>& names, std::string_view name) {
  for (const auto& [value, known] : names)
    if (known == name) return value;
  return std::nullopt;
}

constexpr std::array<std::pair<Form, std::string_view>, 4> kForms = {
    {{Form::kAutomatic, "automatic"}, {Form::kParallel, "parallel"}, {Form::kRecurrent, "recurrent"}, {Form::kChunkwise, "chunkwise"}}};
constexpr std::array<std::pair<FeatureMap, std::string_view>, 4> kFeatureMaps = {
    {{FeatureMap::kIdentity, "identity"}, {FeatureMap::kEluPlusOne, "elu_plus_one"}, {FeatureMap::kRelu, "relu"}, {FeatureMap::kL2Norm, "l2_norm"}}};
constexpr std::array<std::pair<Dtype, std::string_view>, 7> kDtypes = {{{Dtype::kF32, "f32"},
                                                                        {Dtype::kF64, "f64"},
                                                                        {Dtype::kBF16, "bf16"},
                                                                        {Dtype::kF16, "f16"},
                                                                        {Dtype::kI32, "i32"},
                                                                        {Dtype::kI64, "i64"},
                                                                        {Dtype::kBool, "bool"}}};

}  // namespace

const std::vector<RuleInfo>& Rules() {
  static const std::vector<RuleInfo> rules = [] {
    std::vector<RuleInfo> list;
    rules::All::ForEach([&]<class R>(R) {
      const bool adds = R::kUpdate == Update::kAdd || R::kUpdate == Update::kAddReadBefore;
      list.push_back({R::kRule, R::kName, R::kEquation, R::kAlsoKnownAs, LogDecayLayout(R::kDecay), R::kUpdate == Update::kDelta,
                      R::kUpdate == Update::kRankOne, R::kUpdate == Update::kAddReadBefore, adds, R::kDefaultScaleIsOne});
    });
    return list;
  }();
  return rules;
}

const RuleInfo& Info(Rule rule) {
  const auto at = static_cast<size_t>(rule);
  return Rules()[at < Rules().size() ? at : 0];
}

std::string_view Name(Rule rule) { return static_cast<size_t>(rule) < Rules().size() ? Info(rule).name : "unknown"; }
std::string_view Name(Form form) { return NameIn(kForms, form); }
std::string_view Name(FeatureMap map) { return NameIn(kFeatureMaps, map); }
std::string_view Name(Dtype dtype) { return NameIn(kDtypes, dtype); }

std::optional<Rule> RuleFromName(std::string_view name) {
  for (const RuleInfo& info : Rules())
    if (info.name == name) return info.rule;
  return std::nullopt;
}
std::optional<Form> FormFromName(std::string_view name) { return ValueIn(kForms, name); }
std::optional<FeatureMap> FeatureMapFromName(std::string_view name) { return ValueIn(kFeatureMaps, name); }

namespace rules {

Axes AxesOf(Rule rule) {
  Axes axes;
  All::ForEach([&]<class R>(R) {
    if (R::kRule == rule) axes = {R::kDecay, R::kUpdate};
  });
  return axes;
}

}  // namespace rules

}  // namespace tercet
