// The options of one command as text, by name: what the command line gave and, where it gave nothing, what a file's metadata did. One parser for
// both, so that a wrong value gets the same sentence from either.
#ifndef TERCET_CLI_FLAGS_HPP_
#define TERCET_CLI_FLAGS_HPP_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tercet/tercet.hpp"

namespace tercet::cli {

class Flags {
 public:
  // Adds "--name VALUE", or "--name" alone. Names here have underscores; on the command line they have hyphens.
  CLI::Option* Add(CLI::App* app, const std::string& name, const std::string& value, const std::string& help);
  void AddSwitch(CLI::App* app, const std::string& name, const std::string& help);
  // Takes the options of a layer from a file's metadata, under either spelling, and leaves the rest.
  void AddMetadata(const std::string& file, const std::map<std::string, std::string>& metadata);

  // Whether the command line gave it, or anything did.
  bool OnCommandLine(const std::string& name) const;
  bool Given(const std::string& name) const;
  static std::string Spelling(const std::string& name);  // "--key-dim"
  const std::string& Text(const std::string& name) const;

  // Put the option into `value` if it was given and is one; else `status` says why not. The first thing wrong counts.
  void Get(const std::string& name, int64_t* value, int64_t least = std::numeric_limits<int64_t>::min());
  void Get(const std::string& name, uint64_t* value);
  void Get(const std::string& name, int* value);
  void Get(const std::string& name, double* value);
  void Get(const std::string& name, bool* value);
  void Get(const std::string& name, Rule* value);
  void Get(const std::string& name, Form* value);
  void Get(const std::string& name, FeatureMap* value);
  // The same for values between commas; what was not given leaves `values` as it was. `more` is what Get takes beyond.
  template <class T, class... More>
  void GetList(const std::string& name, std::vector<T>* values, More... more) {
    ForEach(name, [&, first = true](const std::string&) mutable {
      if (std::exchange(first, false)) values->clear();
      Get(name, &values->emplace_back(), more...);
    });
  }
  // Calls `body` with each of the values between commas, while Text and Refuse know that one alone.
  void ForEach(const std::string& name, const std::function<void(const std::string&)>& body);
  void Refuse(const std::string& name, std::string_view must_be);
  void Refuse(std::string message);
  const Status& status() const { return status_; }

 private:
  struct Entry {
    std::string text;
    CLI::Option* option = nullptr;
    std::string file;  // whose metadata gave it
  };
  std::map<std::string, Entry> entries_;
  Status status_;
};

// The flags that say which layer it is and how to compute it. `options` then refers to the text of `flags`.
void AddLayerFlags(CLI::App* app, Flags* flags, bool rule_may_be_all);
void ReadLayerFlags(Flags* flags, bool rule_may_be_all, Options* options);
// Those of them that bear one value in every command: scale, feature_map, eps, normalize, target and table_limit.
void AddOptionFlags(CLI::App* app, Flags* flags);
void ReadOptionFlags(Flags* flags, Options* options);
// All rules' names, with commas.
std::string RuleNames();

// Refuses what no memory of this machine holds, before anything is allocated; `what` begins the sentence. Sizes of 0 count as 1, so that behind it no
// product of a part of the sizes overflows.
Status CheckMemory(std::string_view what, double bytes);
double Product(std::initializer_list<int64_t> sizes);

}  // namespace tercet::cli

#endif  // TERCET_CLI_FLAGS_HPP_
