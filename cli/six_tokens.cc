// The six-token layer: all its numbers, the deciding lines and both halves of the proof.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "cli/commands.hpp"
#include "cli/report.hpp"
#include "cli/six_tokens.hpp"
#include "cli/tensors.hpp"
#include "cli/terminal.hpp"

namespace tercet::cli {
namespace {

proof::OwnedInputs SixTokenInputs() {
  using namespace six_tokens;
  const auto owned = [](std::vector<int64_t> shape, const double* values) {
    proof::Owned tensor = proof::Owned::Zeros(Dtype::kF64, std::move(shape));
    for (int64_t i = 0; i < tensor.size(); ++i) tensor.Set(i, values[i]);
    return tensor;
  };
  proof::OwnedInputs inputs;
  inputs.q = owned({1, kTokens, 1, kKeyDim}, kQ);
  inputs.k = owned({1, kTokens, 1, kKeyDim}, kK);
  inputs.v = owned({1, kTokens, 1, kValueDim}, kV);
  return inputs;
}

// The numbers of `tensor` in rows; `transposed`, if it holds cols x rows of them.
Json Matrix(const proof::Owned& tensor, int64_t rows, int64_t cols, bool transposed = false) {
  Json matrix = Json::array();
  for (int64_t i = 0; i < rows; ++i) {
    Json row = Json::array();
    for (int64_t j = 0; j < cols; ++j) row.push_back(tensor.Get(transposed ? j * rows + i : i * cols + j));
    matrix.push_back(row);
  }
  return matrix;
}

std::string MatrixText(const Json& matrix, bool causal) {
  std::string text;
  for (size_t i = 0; i < matrix.size(); ++i) {
    text += "  ";
    for (size_t j = 0; j < matrix[i].size(); ++j)
      text += causal && j > i ? fmt::format("{:>11}", ".") : fmt::format("{:>11.6f}", matrix[i][j].get<double>());
    text += "\n";
  }
  return text;
}

// The largest distance of `tensor` from `values`; inf where one is not a number.
template <size_t n>
double Distance(const proof::Owned& tensor, const double (&values)[n]) {
  double largest = tensor.size() == static_cast<int64_t>(n) ? 0 : INFINITY;
  for (int64_t i = 0; i < tensor.size() && i < static_cast<int64_t>(n); ++i) {
    const double distance = std::abs(tensor.Get(i) - values[i]);
    largest = distance >= 0 ? std::max(largest, distance) : INFINITY;
  }
  return largest;
}

}  // namespace

Status VerifySixTokens(proof::VerifyOptions options, bool json, Result* result) {
  using namespace six_tokens;
  options.attend.rule = Rule::kLinear;
  options.attend.feature_map = FeatureMap::kEluPlusOne;
  options.attend.normalize = true;
  options.attend.chunk = 4;
  const proof::OwnedInputs owned = SixTokenInputs();
  const Inputs inputs = owned.view();
  proof::Expected golden;
  golden.out = View(kOut, {1, kTokens, 1, kValueDim});
  golden.final_state = View(kState, {1, 1, kKeyDim, kValueDim});
  golden.final_key_sum = View(kKeySum, {1, 1, kKeyDim});
  contract::Layer layer;
  if (Status status = CheckLayer(options.attend, inputs, 4, &layer); !status.ok()) return status;
  proof::Verdict verdict;
  if (Status status = proof::Verify(options, inputs, golden, &verdict); !status.ok()) return status;

  // With the identity in the place of v, out is the table of affinities itself.
  proof::Owned identity = proof::Owned::Zeros(Dtype::kF64, {1, kTokens, 1, kTokens});
  proof::Owned table = identity;
  for (int64_t i = 0; i < kTokens; ++i) identity.Set(i * (kTokens + 1), 1);
  Inputs table_inputs = inputs;
  table_inputs.v = identity.view();
  Outputs table_outputs;
  table_outputs.out = table.mutable_view();
  Options table_options = options.attend;
  table_options.form = Form::kParallel;
  table_options.chunk = 0;
  if (Status status = Attend(table_options, table_inputs, table_outputs); !status.ok()) return status;

  constexpr double kNear = 1e-12;
  const auto near = [](double difference) { return difference < kNear; };  // false for NaN
  const double pr = verdict.parallel_recurrent, cr = verdict.chunkwise_recurrent, cp = verdict.chunkwise_parallel;
  const double largest = std::max({pr, cr, cp});
  const bool all_near = near(pr) && near(cr) && near(cp);
  // Of the recurrent form from the golden answer, and of the others from it: no form is further away.
  const double from_golden =
      std::max({Distance(verdict.out, kOut), Distance(verdict.final_state, kState), Distance(verdict.final_key_sum, kKeySum)}) + std::max(pr, cr);
  const auto judged = [&](size_t form) { return form < verdict.judgements.size() && verdict.judgements[form].same; };  // as verify.hpp orders them
  const bool parallel = judged(0), recurrent = judged(1), chunkwise = judged(2);
  const std::array<std::pair<std::string, bool>, 6> lines = {{
      {fmt::format("parallel and recurrent differ by {:.2e}, less than 1e-12", pr), near(pr)},
      {"parallel and recurrent are the same", near(pr) && parallel && recurrent},
      {fmt::format("chunkwise (chunks of 4, the last of 2) = recurrent, to {:.2e}", cr), near(cr) && chunkwise && recurrent},
      {fmt::format("chunkwise = parallel, to {:.2e}", cp), near(cp) && chunkwise && parallel},
      {fmt::format("largest difference {:.2e}, below 1e-12", largest), all_near},
      {fmt::format("all three are within 1e-12 of the golden answer, state and key sum too: {:.2e} at most", from_golden), near(from_golden)},
  }};
  result->holds = verdict.same() && std::all_of(lines.begin(), lines.end(), [](const auto& line) { return line.second; });

  const Json table_numbers = Matrix(table, kTokens, kTokens), out_numbers = Matrix(verdict.out, kTokens, kValueDim);
  const Json state_numbers = Matrix(verdict.final_state, kValueDim, kKeyDim, true);
  if (json) {
    Json object = ToJson(options, layer, verdict);
    object["same"] = result->holds;
    object["from_golden"] = from_golden;
    object["lines"] = Json::array();
    for (const auto& [line, value] : lines) object["lines"].push_back({{"line", line}, {"value", value}});
    object["attention_table"] = table_numbers;
    object["out"] = out_numbers;
    object["state"] = state_numbers;
    result->text = Dump(object);
    return {};
  }
  std::string& text = result->text;
  text = Bold("Six tokens through one layer of causal linear attention, in three forms: are they the same function?") + "\n" +
         Setting(layer, verdict.chunk, verdict.target) + "\n";
  text += PlantText(options);
  text += fmt::format("q ({0}, {1})   k ({0}, {1})   v ({0}, {2})\n\n", kTokens, kKeyDim, kValueDim);
  text += fmt::format("Attention table ({0}, {0}), of the parallel form: phi(q_i).phi(k_j) over the sum of its row. It grows as n^2.\n", kTokens) +
          MatrixText(table_numbers, true) + "\n";
  text += fmt::format("Output ({}, {})\n", kTokens, kValueDim) + MatrixText(out_numbers, false) + "\n";
  text += fmt::format("State ({}, {}), of the recurrent form: d_v x d_k, fixed whatever n is.\n", kValueDim, kKeyDim) +
          MatrixText(state_numbers, false) + "\n";
  for (const auto& [line, value] : lines) text += Decide(line, value);
  text += '\n';
  text += Halves(verdict) + "\n" + Decide("parallel, recurrent and chunkwise are the same function", result->holds);
  return {};
}

}  // namespace tercet::cli
