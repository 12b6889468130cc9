#include "src/targets/targets.hpp"

#include <cctype>
#include <cstdlib>
#include <vector>

#include "src/targets/selection.hpp"
// After the selection.
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace tercet {

namespace targets {

namespace {

bool SameInAnyCase(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (std::toupper(static_cast<unsigned char>(a[i])) != std::toupper(static_cast<unsigned char>(b[i]))) return false;
  return true;
}

// Lower bits are better targets.
template <int kBit>
void AddFrom(int64_t supported, std::vector<Target>& list) {
  if constexpr (kBit < 63) {
    constexpr int64_t kTarget = int64_t{1} << kBit;
    if constexpr ((HWY_TARGETS & kTarget) != 0) {
      if ((supported & kTarget) != 0)
        list.push_back({hwy::TargetName(kTarget), &RecurrentEngine<kTarget>(), &ChunkwiseEngine<kTarget>(), &GradientEngineOf<kTarget>()});
    }
    AddFrom<kBit + 1>(supported, list);
  }
}

std::vector<Target>& All() {
  static std::vector<Target> all = [] {
    std::vector<Target> list;
    if (AmxTarget() != nullptr) list.push_back(*AmxTarget());
    AddFrom<0>(hwy::SupportedTargets() | HWY_STATIC_TARGET, list);
    return list;
  }();
  return all;
}

}  // namespace

void Offer(const Target& target) { All().push_back(target); }

Status Choose(std::string_view name, const Target** target) {
  std::string_view source = "target";
  if (name.empty()) {
    const char* environment = std::getenv("TERCET_TARGET");
    if (environment != nullptr) name = environment;
    source = "TERCET_TARGET";
  }
  for (const Target& one : All()) {
    if (!name.empty() && !SameInAnyCase(name, one.name)) continue;
    *target = &one;
    return {};
  }
  std::string known;
  for (const Target& one : All()) known += (known.empty() ? "" : ", ") + std::string(one.name);
  return {StatusCode::kInvalidOption,
          std::string(source) + " is \"" + std::string(name) + "\" and must be one of those this build and this machine have: " + known};
}

}  // namespace targets

std::vector<std::string> Targets() {
  std::vector<std::string> names;
  for (const targets::Target& one : targets::All()) names.emplace_back(one.name);
  return names;
}

Status ChooseTarget(std::string_view option, std::string* name) {
  const targets::Target* target = nullptr;
  Status status = targets::Choose(option, &target);
  if (status.ok()) *name = target->name;
  return status;
}

}  // namespace tercet
