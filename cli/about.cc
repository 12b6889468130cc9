// tercet rules and tercet info: what there is to compute, and what with.
#include <fmt/format.h>
#include <oneapi/tbb/version.h>

#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/commands.hpp"
#include "cli/report.hpp"
#include "cli/terminal.hpp"

#ifdef __clang__
#define TERCET_COMPILER "Clang " __clang_version__
#else
#define TERCET_COMPILER "GCC " __VERSION__
#endif

namespace tercet::cli {
namespace {

using NamedLayout = std::pair<std::string_view, std::string_view>;

std::vector<NamedLayout> NeededInputs(const RuleInfo& info) {
  std::vector<NamedLayout> inputs = {{"q", "[B, T, H, K]"}, {"k", "[B, T, H, K]"}, {"v", "[B, T, H, V]"}};
  if (!info.log_decay_layout.empty()) inputs.emplace_back("log_decay", info.log_decay_layout);
  if (info.takes_beta) inputs.emplace_back("beta", "[B, T, H]");
  if (info.takes_remove_and_write) inputs.insert(inputs.end(), {{"remove", "[B, T, H, K]"}, {"write", "[B, T, H, K]"}});
  if (info.takes_bonus) inputs.emplace_back("bonus", "[H, K]");
  return inputs;
}

Status ListRules(bool json, Result* result) {
  Json rules = Json::array();
  std::string& text = result->text;
  text = "B batch, T tokens, H heads, K key_dim, V value_dim. S is the state [K, V], D = exp(log_decay), and t' is t transposed.\n";
  for (const RuleInfo& info : Rules()) {
    Json inputs = Json::object();
    std::string needs;
    for (const auto& [name, layout] : NeededInputs(info)) {
      inputs[std::string(name)] = layout;
      needs += fmt::format("{}{} {}", needs.empty() ? "" : ", ", name, layout);
    }
    rules.push_back({{"name", info.name},
                     {"equation", info.equation},
                     {"also_known_as", info.also_known_as},
                     {"inputs", inputs},
                     {"can_normalize", info.can_normalize},
                     {"default_scale", info.default_scale_is_one ? "1" : "1 / sqrt(key_dim)"}});
    text += fmt::format("\n{}\n  {}\n  also known as  {}\n  needs          {}\n  default scale  {}{}\n", Bold(info.name), info.equation,
                        info.also_known_as, needs, info.default_scale_is_one ? "1" : "1 / sqrt(key_dim)",
                        info.can_normalize ? "; can be normalised" : "");
  }
  text += "\nEvery rule also takes initial_state [N, H, K, V], offsets [N + 1] and valid [B, T]; a normalised one initial_key_sum [N, H, K].\n";
  if (json) text = Dump({{"rules", rules}});
  return {};
}

Status ShowInfo(bool json, Result* result) {
  std::string target;
  if (Status status = ChooseTarget("", &target); !status.ok()) return status;
  std::string targets;
  for (const std::string& name : Targets()) targets += (targets.empty() ? "" : " ") + name;
  const std::vector<std::pair<std::string_view, std::string>> versions = {
      {"tercet", std::string(Version())}, {"compiler", std::string(CompilerName())}, {"highway", TERCET_HWY_VERSION}, {"onetbb", TBB_VERSION_STRING}};
  if (json) {
    Json object = {{"cpu", CpuName()},
                   {"cores", std::thread::hardware_concurrency()},
                   {"threads", DefaultConcurrency()},
                   {"target", target},
                   {"targets", Targets()}};
    for (const auto& [name, version] : versions) object["versions"][std::string(name)] = version;
    result->text = Dump(object);
    return {};
  }
  result->text = fmt::format("cpu       {}\ncores     {}\nthreads   {}\ntarget    {}\ntargets   {}\n", Escape(CpuName()),
                             std::thread::hardware_concurrency(), DefaultConcurrency(), target, targets);
  for (const auto& [name, version] : versions) result->text += fmt::format("{:<9} {}\n", name, version);
  return {};
}

Action WithJson(CLI::App* command, Status (*show)(bool, Result*)) {
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "as one JSON object");
  return [json, show](Result* result) { return show(*json, result); };
}

}  // namespace

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (colon != std::string::npos && (line.rfind("model name", 0) == 0 || line.rfind("Model", 0) == 0)) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string_view CompilerName() { return TERCET_COMPILER; }

Action AddRules(CLI::App* command) {
  command->footer(
      "\nLists every rule with its equation, the names it has elsewhere, and the tensors it needs with their layouts.\n\n"
      "Exit codes: 0; 2 bad use.");
  return WithJson(command, ListRules);
}

Action AddInfo(CLI::App* command) {
  command->footer(
      "\nShows the processor, the instruction set that calls will use (target) and all that this machine can use (targets, best first), the threads\n"
      "and the versions. --target on the other commands, or TERCET_TARGET=NAME for any program, chooses another.\n\n"
      "Exit codes: 0; 2 bad use, or a TERCET_TARGET that names none of the targets.");
  return WithJson(command, ShowInfo);
}

}  // namespace tercet::cli
