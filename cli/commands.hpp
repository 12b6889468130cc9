// The subcommands. Each Add... registers one and returns what it does once the arguments are parsed: text for stdout, and whether what it checked
// holds. A status that is not ok means bad use or a bad file, and then nothing goes to stdout.
#ifndef TERCET_CLI_COMMANDS_HPP_
#define TERCET_CLI_COMMANDS_HPP_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <string_view>

#include "src/proof/verify.hpp"
#include "tercet/tercet.hpp"

namespace tercet::cli {

struct Result {
  std::string text;
  bool holds = true;
};
using Action = std::function<Status(Result*)>;

// `tercet verify` without arguments.
Status VerifySixTokens(proof::VerifyOptions options, bool json, Result* result);

Action AddVerify(CLI::App* command);
Action AddRun(CLI::App* command);
Action AddBench(CLI::App* command);
Action AddRules(CLI::App* command);
Action AddInfo(CLI::App* command);

// What `tercet info` says of the machine and the build.
std::string CpuName();
std::string_view CompilerName();

}  // namespace tercet::cli

#endif  // TERCET_CLI_COMMANDS_HPP_
