// A verdict for the reader: as lines that each end in True or False, as one row of a table, or as JSON.
#ifndef TERCET_CLI_REPORT_HPP_
#define TERCET_CLI_REPORT_HPP_

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "src/contract/layer.hpp"
#include "src/proof/verify.hpp"
#include "src/proof/verify_gradient.hpp"

namespace tercet::cli {

using Json = nlohmann::ordered_json;

// "(1, 6, 1, 4)"
std::string Shape(const std::vector<int64_t>& shape);
std::string Shape(const ConstTensor& tensor);

// `text` and then, in one column for all lines, True or False.
std::string Decide(std::string_view text, bool value);

// The rule, the sizes and the options of a checked call.
std::string Setting(const contract::Layer& layer, int64_t chunk, std::string_view target);

// What is planted, if anything is.
std::string PlantText(const proof::VerifyOptions& options, bool gradient = false);

// Both halves of the proof.
std::string Halves(const proof::Verdict& verdict);
std::string Halves(const proof::GradientVerdict& verdict);
// Both halves as a row under `RowTitle`.
std::string RowTitle(const proof::Verdict& verdict);
std::string Row(std::string_view rule, const proof::Verdict& verdict);
std::string RowTitle(const proof::GradientVerdict& verdict);
std::string Row(std::string_view rule, const proof::GradientVerdict& verdict);

Json ToJson(const proof::VerifyOptions& options, const contract::Layer& layer, const proof::Verdict& verdict);
Json ToJson(const proof::VerifyOptions& options, const contract::Layer& layer, const proof::GradientVerdict& verdict);
// `json` as text that is valid whatever bytes its strings hold.
std::string Dump(const Json& json);

}  // namespace tercet::cli

#endif  // TERCET_CLI_REPORT_HPP_
