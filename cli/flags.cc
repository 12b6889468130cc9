#include "cli/flags.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

namespace tercet::cli {
namespace {

// What a file may say about a layer. How this machine computes it (threads, target, table_limit) is not a file's to say.
constexpr std::string_view kFromMetadata[] = {"rule", "form", "chunk", "scale", "feature_map", "eps", "normalize", "tolerance", "operands"};

template <class T>
bool Parse(const std::string& text, T* value) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, *value);
  return result.ec == std::errc() && result.ptr == end;
}

}  // namespace

std::string RuleNames() {
  std::string names;
  for (const RuleInfo& info : Rules()) names += (names.empty() ? "" : ", ") + std::string(info.name);
  return names;
}

std::string Flags::Spelling(const std::string& name) {
  std::string spelling = "--" + name;
  std::replace(spelling.begin(), spelling.end(), '_', '-');
  return spelling;
}

CLI::Option* Flags::Add(CLI::App* app, const std::string& name, const std::string& value, const std::string& help) {
  Entry& entry = entries_[name];
  return entry.option = app->add_option(Spelling(name), entry.text, help)->type_name(value);
}

void Flags::AddSwitch(CLI::App* app, const std::string& name, const std::string& help) {
  Entry& entry = entries_[name];
  entry.option = app->add_flag(Spelling(name), entry.text, help);
}

void Flags::AddMetadata(const std::string& file, const std::map<std::string, std::string>& metadata) {
  for (const auto& [key, text] : metadata) {
    std::string name = key;
    std::replace(name.begin(), name.end(), '-', '_');
    if (std::find(std::begin(kFromMetadata), std::end(kFromMetadata), name) == std::end(kFromMetadata)) continue;
    Entry& entry = entries_[name];
    if (OnCommandLine(name)) continue;
    if (!entry.file.empty() && entry.text != text)
      Refuse(fmt::format("the metadata of {} gives {} as '{}' and that of {} as '{}'; give {}", entry.file, name, entry.text, file, text,
                         Spelling(name)));
    entry.text = text;
    entry.file = file;
  }
}

bool Flags::OnCommandLine(const std::string& name) const {
  const auto it = entries_.find(name);
  return it != entries_.end() && it->second.option != nullptr && it->second.option->count() > 0;
}

bool Flags::Given(const std::string& name) const {
  const auto it = entries_.find(name);
  return it != entries_.end() && (OnCommandLine(name) || !it->second.file.empty());
}

const std::string& Flags::Text(const std::string& name) const {
  static const std::string none;
  const auto it = entries_.find(name);
  return it == entries_.end() ? none : it->second.text;
}

void Flags::Refuse(std::string message) {
  if (status_.ok()) status_ = {StatusCode::kInvalidOption, std::move(message)};
}

void Flags::Refuse(const std::string& name, std::string_view must_be) {
  const Entry& entry = entries_[name];
  const std::string where = entry.file.empty() ? Spelling(name) : fmt::format("{}: the metadata's {}", entry.file, name);
  Refuse(fmt::format("{} is '{}'; it must be {}", where, entry.text, must_be));
}

void Flags::Get(const std::string& name, int64_t* value, int64_t least) {
  if (!Given(name)) return;
  if (!Parse(Text(name), value))
    Refuse(name, "a whole number of at most 64 bits");
  else if (*value < least)
    Refuse(name, fmt::format("at least {}", least));
}

void Flags::Get(const std::string& name, uint64_t* value) {
  if (Given(name) && !Parse(Text(name), value)) Refuse(name, "a whole number from 0 to 2^64 - 1");
}

void Flags::Get(const std::string& name, int* value) {
  if (Given(name) && !Parse(Text(name), value)) Refuse(name, "a whole number of at most 32 bits");
}

void Flags::Get(const std::string& name, double* value) {
  if (Given(name) && !Parse(Text(name), value)) Refuse(name, "a number, such as 0.125 or 1e-5");
}

void Flags::Get(const std::string& name, bool* value) {
  if (!Given(name)) return;
  std::string text = Text(name);
  std::transform(text.begin(), text.end(), text.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  if (text == "true" || text == "1")
    *value = true;
  else if (text == "false" || text == "0")
    *value = false;
  else
    Refuse(name, "true or false");
}

void Flags::Get(const std::string& name, Rule* value) {
  if (!Given(name)) return;
  if (const auto rule = RuleFromName(Text(name)))
    *value = *rule;
  else
    Refuse(name, "one of " + RuleNames());
}

void Flags::Get(const std::string& name, Form* value) {
  if (!Given(name)) return;
  if (const auto form = FormFromName(Text(name)))
    *value = *form;
  else
    Refuse(name, "automatic, parallel, recurrent or chunkwise");
}

void Flags::Get(const std::string& name, FeatureMap* value) {
  if (!Given(name)) return;
  if (const auto map = FeatureMapFromName(Text(name)))
    *value = *map;
  else
    Refuse(name, "identity, elu_plus_one, relu or l2_norm");
}

void Flags::ForEach(const std::string& name, const std::function<void(const std::string&)>& body) {
  if (!Given(name)) return;
  std::string& text = entries_[name].text;
  const std::string whole = text;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = whole.find(',', begin);
    text = whole.substr(begin, end == std::string::npos ? end : end - begin);
    body(text);
  }
  text = whole;
}

void AddLayerFlags(CLI::App* app, Flags* flags, bool rule_may_be_all) {
  flags->Add(app, "rule", "RULE", RuleNames() + (rule_may_be_all ? ", or all" : ""));
  flags->Add(app, "chunk", "N", "tokens a chunk in the chunkwise form; 0: the library chooses");
  flags->Add(app, "threads", "N", "at most so many; 0: all cores");
  AddOptionFlags(app, flags);
}

void AddOptionFlags(CLI::App* app, Flags* flags) {
  flags->Add(app, "scale", "X", "multiplies q; by default 1 / sqrt(key_dim), for rwkv7 1");
  flags->Add(app, "feature_map", "MAP", "applied to q and k: identity, elu_plus_one, relu, l2_norm");
  flags->Add(app, "eps", "X", "inside the root of l2_norm; by default 1e-6");
  flags->AddSwitch(app, "normalize", "divide by the key sum; for the rules that only add. --normalize=false against a file that says true");
  flags->Add(app, "target", "NAME", "instruction set, as `tercet info` names them; by default $TERCET_TARGET, else the best");
  flags->Add(app, "table_limit", "BYTES", "what the tables of the parallel form may take; by default 1 GiB");
}

void ReadLayerFlags(Flags* flags, bool rule_may_be_all, Options* options) {
  if (!rule_may_be_all || flags->Text("rule") != "all") flags->Get("rule", &options->rule);
  flags->Get("form", &options->form);
  flags->Get("chunk", &options->chunk);
  flags->Get("threads", &options->threads);
  ReadOptionFlags(flags, options);
}

void ReadOptionFlags(Flags* flags, Options* options) {
  double scale = 0;
  flags->Get("scale", &scale);
  if (flags->Given("scale")) options->scale = scale;
  flags->Get("feature_map", &options->feature_map);
  flags->Get("eps", &options->eps);
  flags->Get("normalize", &options->normalize);
  flags->Get("table_limit", &options->table_limit);
  options->target = flags->Text("target");
}

double Product(std::initializer_list<int64_t> sizes) {
  double product = 1;
  for (const int64_t size : sizes) product *= static_cast<double>(std::max<int64_t>(size, 1));
  return product;
}

Status CheckMemory(std::string_view what, double bytes) {
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (bytes <= memory) return {};
  return {StatusCode::kOutOfMemory, fmt::format("{} would take {:.3g} GiB, and this machine has {:.3g}", what, bytes / 0x1p30, memory / 0x1p30)};
}

}  // namespace tercet::cli
