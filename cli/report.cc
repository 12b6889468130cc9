#include "cli/report.hpp"

#include <fmt/format.h>

#include <cmath>

#include "cli/terminal.hpp"

namespace tercet::cli {
namespace {

constexpr int kDecideColumn = 92;

// The bound on the chance that what is wrong passes the first half.
std::string Chance(double log2_failure) { return std::isfinite(log2_failure) ? fmt::format("2^{:.0f}", std::ceil(log2_failure)) : "0"; }

constexpr std::string_view kSmaller = " (less than the layer's own size, which would take long)";

std::string Padded(bool value, size_t width) { return TrueFalse(value) + std::string(width - (value ? 4 : 5), ' '); }

std::string Size(const proof::Algebra& algebra) {
  return fmt::format("tokens {}, key_dim {}, value_dim {}, chunk {}", algebra.tokens, algebra.key_dim, algebra.value_dim, algebra.chunk);
}

// Of each form the gradient whose ratio is largest.
std::vector<const proof::Judgement*> WorstOf(const proof::GradientVerdict& verdict) {
  std::vector<const proof::Judgement*> worst;
  for (const proof::Judgement& judgement : verdict.judgements) {
    if (worst.empty() || worst.back()->form != judgement.form)
      worst.push_back(&judgement);
    else if (judgement.ratio > worst.back()->ratio)
      worst.back() = &judgement;
  }
  return worst;
}

// What both verdicts say of the layer and how it was computed.
template <class Verdict>
Json LayerJson(const proof::VerifyOptions& options, const contract::Layer& layer, const Verdict& verdict) {
  Json json;
  json["same"] = verdict.same();
  json["rule"] = Name(layer.rule);
  json["dtype"] = Name(layer.dtype);
  json["feature_map"] = Name(layer.feature_map);
  json["normalize"] = layer.normalize;
  json["scale"] = layer.normalize ? Json() : Json(layer.scale);
  json["batch"] = layer.batch;
  json["tokens"] = layer.tokens;
  json["sequences"] = layer.sequences;
  json["key_dim"] = layer.key_dim;
  json["value_dim"] = layer.value_dim;
  json["q_heads"] = layer.q_heads;
  json["k_heads"] = layer.k_heads;
  json["v_heads"] = layer.v_heads;
  json["chunk"] = verdict.chunk;
  json["target"] = verdict.target;
  constexpr std::string_view kPlants[] = {"none", "decay", "scale", "mask"};  // in the order of the enum
  json["plant"] = kPlants[static_cast<size_t>(options.plant)];
  return json;
}

Json JudgementsJson(const std::vector<proof::Judgement>& judgements) {
  Json json = Json::array();
  for (const proof::Judgement& judgement : judgements)
    json.push_back({{"form", judgement.form},
                    {"same", judgement.same},
                    {"tensor", judgement.tensor},
                    {"distance", judgement.distance},
                    {"noise", judgement.noise},
                    {"ratio", judgement.ratio},
                    {"largest", judgement.largest},
                    {"operands", judgement.operands == proof::Operands::kNotRounded ? Json() : Json(proof::Name(judgement.operands))}});
  return json;
}

// Which forms round the operands of their products, in a line; nothing where none does.
std::string OperandsText(const std::vector<proof::Judgement>& judgements) {
  std::string text;
  std::string_view last;
  for (const proof::Judgement& judgement : judgements) {
    if (judgement.operands == proof::Operands::kNotRounded || judgement.form == last) continue;
    text += fmt::format("{} {} to {}", text.empty() ? "  operands of products are rounded, which the noise counts in:" : ",", judgement.form,
                        proof::Name(judgement.operands));
    last = judgement.form;
  }
  return text.empty() ? text : text + "\n";
}

}  // namespace

std::string Shape(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += fmt::format("{}{}", text.empty() ? "" : ", ", size);
  return fmt::format("({}{})", text, shape.size() == 1 ? "," : "");
}

std::string Shape(const ConstTensor& tensor) { return Shape(std::vector<int64_t>(tensor.shape.begin(), tensor.shape.begin() + tensor.rank)); }

std::string Decide(std::string_view text, bool value) { return fmt::format("{:<{}} {}\n", text, kDecideColumn, TrueFalse(value)); }

std::string Setting(const contract::Layer& layer, int64_t chunk, std::string_view target) {
  const std::string heads = layer.q_heads == layer.k_heads && layer.k_heads == layer.v_heads
                                ? fmt::format("heads {}", layer.q_heads)
                                : fmt::format("heads {} of q, {} of k, {} of v", layer.q_heads, layer.k_heads, layer.v_heads);
  const std::string sequences = layer.in.offsets.given() ? fmt::format("packed sequences {}, tokens {} in all", layer.sequences, layer.tokens)
                                                         : fmt::format("batch {}, tokens {}", layer.batch, layer.tokens);
  return fmt::format("  rule {}: {}\n  {}, {}, key_dim {}, value_dim {}\n  {}, chunk {}, feature map {}, {}, target {}\n", Name(layer.rule),
                     Info(layer.rule).equation, sequences, heads, layer.key_dim, layer.value_dim, Name(layer.dtype), chunk, Name(layer.feature_map),
                     layer.normalize ? std::string("normalised") : fmt::format("scale {:.6g}", layer.scale), target);
}

std::string PlantText(const proof::VerifyOptions& options, bool gradient) {
  std::string_view what;
  switch (options.plant) {
    case proof::Plant::kNone:
      return "";
    case proof::Plant::kDecay:
      what = gradient ? "a token's own decay falls on the gradient of what it writes" : "a token's own decay falls on what it has just written";
      break;
    case proof::Plant::kScale:
      what = "the scale is left out";
      break;
    case proof::Plant::kMask:
      what = gradient ? "what a token reads of its own write passes nothing on" : "the causal mask is off by one";
      break;
  }
  const std::string_view where = !options.plant_in_floating_point ? " in algebra alone" : !options.plant_in_algebra ? " in floating point alone" : "";
  return fmt::format("An error is planted in the {}{}, to see that the proof sees it: {}.\n\n",
                     gradient ? "chunkwise form's gradients" : "chunkwise form", where, what);
}

std::string Halves(const proof::Verdict& verdict) {
  const proof::Algebra& algebra = verdict.algebra;
  std::string text = Bold("The same in algebra") + ": the forms on random elements of the prime field of 2^61 - 1, where nothing is rounded.\n";
  text += fmt::format("  {}{}\n", Size(algebra), algebra.whole ? "" : kSmaller);
  text += fmt::format("  {} draws, degree at most {}, {} elements of each two forms compared; forms that differ would pass with a chance below {}\n",
                      algebra.draws, algebra.degree, algebra.compared, Chance(algebra.log2_failure));
  text += Decide("  parallel = recurrent", algebra.recurrent_is_parallel);
  text += Decide("  chunkwise = recurrent", algebra.chunkwise_is_recurrent);
  text += Decide("  chunkwise = parallel", algebra.chunkwise_is_parallel);
  text += '\n';
  text += Bold("The same in floating point") + ": how far each form is from a more precise reference, over the noise that rounding alone makes.\n";
  text += fmt::format("  {:<10} {:>10} {:>10} {:>8}  {:<15} {:>10}\n", "form", "distance", "noise", "ratio", "worst in", "largest");
  for (const proof::Judgement& judgement : verdict.judgements)
    text += Decide(fmt::format("  {:<10} {:>10.2e} {:>10.2e} {:>8.3g}  {:<15} {:>10.2e}  ratio at most {:g}", judgement.form, judgement.distance,
                               judgement.noise, judgement.ratio, judgement.tensor, judgement.largest, verdict.limit),
                   judgement.same);
  return text + OperandsText(verdict.judgements);
}

std::string Halves(const proof::GradientVerdict& verdict) {
  const proof::GradientAlgebra& algebra = verdict.algebra;
  std::string text =
      Bold("The formula in algebra") + ": the reference's gradients against dual numbers, on random elements of the prime field of 2^61 - 1.\n";
  text += fmt::format("  tokens {}, key_dim {}, value_dim {}{}\n", algebra.tokens, algebra.key_dim, algebra.value_dim, algebra.whole ? "" : kSmaller);
  text += fmt::format("  {} draws, degree at most {}, {} gradients weighed up each; a wrong formula would pass with a chance below {}\n",
                      algebra.draws, algebra.degree, algebra.compared, Chance(algebra.log2_failure));
  text += Decide("  gradients = derivatives", algebra.same);
  text += '\n';
  text +=
      Bold("The gradients in floating point") + ": how far each is from the reference in a wider type, over the noise that rounding alone makes.\n";
  text += fmt::format("  {:<10} {:<15} {:>10} {:>10} {:>8} {:>10}\n", "form", "gradient", "distance", "noise", "ratio", "largest");
  for (const proof::Judgement& judgement : verdict.judgements)
    text += Decide(fmt::format("  {:<10} {:<15} {:>10.2e} {:>10.2e} {:>8.3g} {:>10.2e}  ratio at most {:g}", judgement.form, judgement.tensor,
                               judgement.distance, judgement.noise, judgement.ratio, judgement.largest, verdict.limit),
                   judgement.same);
  return text + OperandsText(verdict.judgements);
}

std::string RowTitle(const proof::GradientVerdict& verdict) {
  std::string text = fmt::format("{:<13}{}{:<4}{} (distance / noise, at most {:g})\n", "", Bold("The formula in algebra"), "",
                                 Bold("The gradients in floating point"), verdict.limit) +
                     fmt::format("{:<13}{:<13}{:<13}", "rule", "derivatives", "chance <");
  for (const proof::Judgement* judgement : WorstOf(verdict)) text += fmt::format("{:<11}{:<17}", judgement->form, "worst in");
  return text + fmt::format("{:<8}{}\n", "within", "its gradients");
}

std::string Row(std::string_view rule, const proof::GradientVerdict& verdict) {
  std::string text = fmt::format("{:<13}{}{:<13}", rule, Padded(verdict.algebra.same, 13), Chance(verdict.algebra.log2_failure));
  bool within = true;
  for (const proof::Judgement* judgement : WorstOf(verdict)) {
    text += fmt::format("{:<11.3g}{:<17}", judgement->ratio, judgement->tensor);
    within &= judgement->same;
  }
  return text + Padded(within, 8) + TrueFalse(verdict.same()) + "\n";
}

std::string RowTitle(const proof::Verdict& verdict) {
  constexpr std::string_view kAlgebra = "The same in algebra", kFloats = "The same in floating point";
  return fmt::format("{:<13}{}{:<19}{} (distance / noise, at most {:g})\n", "", Bold(kAlgebra), "", Bold(kFloats), verdict.limit) +
         fmt::format("{:<13}{:<9}{:<9}{:<9}{:<11}{:<10}{:<11}{:<11}{:<8}{}\n", "rule", "par=rec", "chu=rec", "chu=par", "chance <", "parallel",
                     "recurrent", "chunkwise", "within", "same function");
}

std::string Row(std::string_view rule, const proof::Verdict& verdict) {
  const proof::Algebra& algebra = verdict.algebra;
  std::string text = fmt::format("{:<13}{}{}{}{:<11}", rule, Padded(algebra.recurrent_is_parallel, 9), Padded(algebra.chunkwise_is_recurrent, 9),
                                 Padded(algebra.chunkwise_is_parallel, 9), Chance(algebra.log2_failure));
  bool within = true;
  for (const proof::Judgement& judgement : verdict.judgements) {
    text += fmt::format("{:<{}.3g}", judgement.ratio, judgement.form == "parallel" ? 10 : 11);
    within &= judgement.same;
  }
  return text + Padded(within, 8) + TrueFalse(verdict.same()) + "\n";
}

Json ToJson(const proof::VerifyOptions& options, const contract::Layer& layer, const proof::Verdict& verdict) {
  Json json = LayerJson(options, layer, verdict);
  const proof::Algebra& algebra = verdict.algebra;
  json["algebra"] = {{"same", algebra.same()},
                     {"tokens", algebra.tokens},
                     {"key_dim", algebra.key_dim},
                     {"value_dim", algebra.value_dim},
                     {"chunk", algebra.chunk},
                     {"whole", algebra.whole},
                     {"draws", algebra.draws},
                     {"degree", algebra.degree},
                     {"log2_failure", algebra.log2_failure},
                     {"compared", algebra.compared},
                     {"recurrent_is_parallel", algebra.recurrent_is_parallel},
                     {"chunkwise_is_recurrent", algebra.chunkwise_is_recurrent},
                     {"chunkwise_is_parallel", algebra.chunkwise_is_parallel}};
  json["limit"] = verdict.limit;
  json["judgements"] = JudgementsJson(verdict.judgements);
  json["parallel_recurrent"] = verdict.parallel_recurrent;
  json["chunkwise_recurrent"] = verdict.chunkwise_recurrent;
  json["chunkwise_parallel"] = verdict.chunkwise_parallel;
  return json;
}

Json ToJson(const proof::VerifyOptions& options, const contract::Layer& layer, const proof::GradientVerdict& verdict) {
  Json json = LayerJson(options, layer, verdict);
  const proof::GradientAlgebra& algebra = verdict.algebra;
  json["algebra"] = {{"same", algebra.same},        {"tokens", algebra.tokens}, {"key_dim", algebra.key_dim}, {"value_dim", algebra.value_dim},
                     {"whole", algebra.whole},      {"draws", algebra.draws},   {"degree", algebra.degree},   {"log2_failure", algebra.log2_failure},
                     {"compared", algebra.compared}};
  json["limit"] = verdict.limit;
  json["judgements"] = JudgementsJson(verdict.judgements);
  return json;
}

std::string Dump(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

}  // namespace tercet::cli
