#include "cli/command.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cli/commands.hpp"
#include "cli/terminal.hpp"
#include "tercet/tercet.hpp"

namespace tercet::cli {
namespace {

constexpr int kFailed = 1, kBadUse = 2;

constexpr const char* kFooter = R"(
Start with `tercet verify`: six tokens through one layer, and whether its three forms are the same function.
`tercet COMMAND --help` tells what each command does, with examples.

Exit codes: 0 what was asked holds or was done; 1 the check failed: the forms are not the same; 2 bad use or a bad file, with one line on stderr.)";

int Fail(std::string_view sentence) {
  fmt::print(stderr, "tercet: {}\n", Escape(sentence));
  return kBadUse;
}

int Print(std::string_view text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  return written && std::fflush(stdout) == 0 ? 0 : Fail("standard output could not be written");
}

int Main(int argc, char** argv) {
  CLI::App app("Causal linear attention: nine rules, each in three forms that are the same function.", "tercet");
  app.footer(kFooter);
  app.set_version_flag("--version", fmt::format("tercet {}", Version()), "print the version");
  app.set_help_flag("--help", "print this help");
  app.require_subcommand(0, 1);
  std::vector<std::pair<CLI::App*, Action>> commands;
  const auto add = [&](const char* name, const char* what, Action (*command)(CLI::App*)) {
    CLI::App* sub = app.add_subcommand(name, what);
    commands.emplace_back(sub, command(sub));
  };
  add("verify", "Compute a layer in all three forms and say whether they are the same function", AddVerify);
  add("run", "Compute a layer on tensors from files and write what it gives", AddRun);
  add("bench", "Time layers and say how near they come to what this machine can do", AddBench);
  add("rules", "List the rules: equation, other names, needed inputs", AddRules);
  add("info", "Show the processor, the instruction set in use, threads and versions", AddInfo);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Print(app.help());
  } catch (const CLI::CallForVersion& version) {
    return Print(std::string(version.what()) + "\n");
  } catch (const CLI::ParseError& error) {
    return Fail(std::string(error.what()) + "; see --help");
  }
  for (const auto& [sub, action] : commands) {
    if (!sub->parsed()) continue;
    Result result;
    if (const Status status = action(&result); !status.ok()) return Fail(status.message);
    if (const int code = Print(result.text); code != 0) return code;
    return result.holds ? 0 : kFailed;
  }
  Print(app.help());
  return kBadUse;
}

}  // namespace

int Run(int argc, char** argv) {
  // The library answers with a Status; these are for what the command itself allocates.
  try {
    return Main(argc, argv);
  } catch (const std::bad_alloc&) {
    return Fail("there is not enough memory for tensors of this size");
  } catch (const std::length_error&) {
    return Fail("there is not enough memory for tensors of this size");
  } catch (const std::exception& error) {
    return Fail(error.what());
  }
}

}  // namespace tercet::cli
