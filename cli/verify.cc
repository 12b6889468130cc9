// tercet verify: the six-token layer, random tensors or the user's own, in three forms, and whether the three are the same function.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/report.hpp"
#include "cli/tensors.hpp"
#include "cli/terminal.hpp"
#include "src/contract/tensor.hpp"
#include "src/proof/inputs.hpp"
#include "src/proof/verify.hpp"
#include "src/proof/verify_gradient.hpp"

namespace tercet::cli {
namespace {

constexpr const char* kFooter = R"(
A layer has three forms: parallel (a table of n x n affinities), recurrent (a state of fixed size, token by token) and chunkwise (a table in each
chunk, the state handed from chunk to chunk). This computes all three and says whether they are the same function, twice over: in algebra, where
the forms must be equal on random elements of a prime field, and in floating point, where each must be as near to a more precise reference as
rounding allows. With --gradient it judges gradients, of the two forms that have them, in the same way.

Examples
  tercet verify                                    six tokens whose numbers are built in, everything printed
  tercet verify --rule all                         every rule on random tensors
  tercet verify --rule kda --tokens 500 --chunk 64 --dtype f64
  tercet verify --input layer.safetensors          tensors q k v log_decay beta remove write bonus initial_state initial_key_sum offsets valid;
                                                   the file's metadata may give rule, scale, feature_map and the like, and a flag wins over it
  tercet verify --rule linear --input q.npy --input k.npy --input v=values.npy
  tercet verify --rule all --plant decay           puts an error into the chunkwise form, to see that the proof sees it
  tercet verify --rule all --gradient              the gradients of the recurrent and the chunkwise form

Tensors named expected.out, expected.final_state and expected.final_key_sum are somebody's answers, judged like a fourth form; --tolerance says how
exactly they were written down, relative to the largest of them, and --operands to what the operands of the products behind them were rounded.

Exit codes: 0 all is the same function; 1 it is not; 2 bad use or a bad file.)";

// These make random tensors, so they can't go with --input; the layer's own flags can.
constexpr std::string_view kSizes[] = {"tokens", "key_dim", "value_dim", "heads", "q_heads", "k_heads", "v_heads", "batch", "dtype"};
constexpr std::string_view kLayer[] = {"rule", "chunk", "scale", "feature_map", "eps", "normalize", "seed"};

struct Command {
  Flags flags;
  std::vector<std::string> input;
  bool json = false, gradient = false;

  Status Run(Result* result);

 private:
  proof::VerifyOptions options_;

  Status ReadPlant();
  Status ReadSpec(proof::RandomSpec* spec);
  Status Random(Result* result);
  Status AllRules(Result* result);
  Status Files(const Tensors& tensors, Result* result);
  Status Gradient(const std::string& title, const Inputs& inputs, Result* result);
  std::string GradientText() const;
  Status One(const std::string& title, const Inputs& inputs, const proof::Expected& expected, Result* result);
};

Status Command::Run(Result* result) {
  Tensors tensors;
  if (Status status = ReadTensors(input, &flags, &tensors); !status.ok()) return status;
  Options& attend = options_.attend;
  ReadLayerFlags(&flags, input.empty(), &attend);
  if (!flags.OnCommandLine("form")) attend.form = Form::kAutomatic;  // a file may give the form that `run` is to take
  flags.Get("seed", &options_.seed);
  flags.Get("tolerance", &options_.tolerance);
  if (flags.Given("operands") && !proof::Find(flags.Text("operands"), &options_.expected_operands)) flags.Refuse("operands", "bf16, f16 or tf32");
  if (!flags.status().ok()) return flags.status();
  if (Status status = ReadPlant(); !status.ok()) return status;

  if (flags.OnCommandLine("form") && !gradient)
    return {StatusCode::kInvalidOption, "--form is for --gradient; without it all three forms are computed"};
  const proof::Expected& expected = tensors.expected;
  for (const std::string name : {"tolerance", "operands"}) {
    if (flags.OnCommandLine(name) && gradient)
      return {StatusCode::kInvalidOption, "--" + name + " is for expected answers, and --gradient judges none"};
    if (flags.OnCommandLine(name) && !expected.out.given() && !expected.final_state.given() && !expected.final_key_sum.given())
      return {StatusCode::kInvalidOption,
              "--" + name + " is for tensors named expected.out, expected.final_state or expected.final_key_sum, and none was given"};
  }
  Progress progress;
  options_.progress = [&](double fraction, std::string_view doing) { progress.Update(fraction, doing); };
  if (!input.empty()) return Files(tensors, result);
  const auto given = [&](std::string_view name) { return flags.OnCommandLine(std::string(name)); };
  if (!gradient && std::none_of(std::begin(kSizes), std::end(kSizes), given) && std::none_of(std::begin(kLayer), std::end(kLayer), given))
    return VerifySixTokens(options_, json, result);
  return flags.Text("rule") == "all" ? AllRules(result) : Random(result);
}

Status Command::ReadPlant() {
  const std::string& plant = flags.Text("plant");
  const std::string& where = flags.Text("plant_in");
  if (flags.Given("plant_in") && !flags.Given("plant")) flags.Refuse("--plant-in says where an error is planted; --plant says which");
  if (plant == "decay")
    options_.plant = proof::Plant::kDecay;
  else if (plant == "scale")
    options_.plant = proof::Plant::kScale;
  else if (plant == "mask")
    options_.plant = proof::Plant::kMask;
  else if (flags.Given("plant"))
    flags.Refuse("plant", "decay, scale or mask");
  if (flags.Given("plant_in") && where != "algebra" && where != "floating-point" && where != "both")
    flags.Refuse("plant_in", "algebra, floating-point or both");
  options_.plant_in_algebra = where != "floating-point";
  options_.plant_in_floating_point = where != "algebra";
  return flags.status();
}

Status Command::ReadSpec(proof::RandomSpec* spec) {
  flags.Get("tokens", &spec->tokens, 0);
  flags.Get("key_dim", &spec->key_dim, 0);
  flags.Get("value_dim", &spec->value_dim, 0);
  flags.Get("batch", &spec->batch, 0);
  flags.Get("heads", &spec->heads, 0);
  int64_t q = spec->heads, k = spec->heads, v = spec->heads;
  flags.Get("q_heads", &q, 0);
  flags.Get("k_heads", &k, 0);
  flags.Get("v_heads", &v, 0);
  if (flags.Given("dtype")) {
    const std::string& dtype = flags.Text("dtype");
    const Dtype dtypes[] = {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16};
    const Dtype* known = std::find_if(std::begin(dtypes), std::end(dtypes), [&](Dtype one) { return Name(one) == dtype; });
    if (known == std::end(dtypes))
      flags.Refuse("dtype", "f32, f64, bf16 or f16");
    else
      spec->dtype = *known;
  }
  if (!flags.status().ok()) return flags.status();
  spec->q_heads = q;
  spec->k_heads = k;
  spec->v_heads = v;
  spec->gate_heads = std::max(k, v);
  spec->normalize = options_.attend.normalize;
  spec->feature_map = options_.attend.feature_map;
  spec->seed = options_.seed;
  const int64_t heads = std::max({q, k, v});
  const double tokens = Product({spec->batch, spec->tokens, heads});
  const double elements =
      tokens * (4 * Product({spec->key_dim}) + 2 * Product({spec->value_dim})) + 4 * Product({spec->batch, heads, spec->key_dim, spec->value_dim});
  return CheckMemory("random tensors of these sizes and their outputs",
                     elements * static_cast<double>(contract::SizeOf(contract::StateDtype(spec->dtype))));
}

Status Command::One(const std::string& title, const Inputs& inputs, const proof::Expected& expected, Result* result) {
  contract::Layer layer;
  if (Status status = CheckLayer(options_.attend, inputs, 4, &layer); !status.ok()) return status;
  proof::Verdict verdict;
  if (Status status = proof::Verify(options_, inputs, expected, &verdict); !status.ok()) return status;
  result->holds = verdict.same();
  if (json) {
    result->text = Dump(ToJson(options_, layer, verdict));
    return {};
  }
  const bool judged = expected.out.given() || expected.final_state.given() || expected.final_key_sum.given();
  result->text = Bold(title) + "\n" + Setting(layer, verdict.chunk, verdict.target) + "\n" + PlantText(options_) + Halves(verdict) + "\n" +
                 Decide(judged ? "parallel, recurrent, chunkwise and the expected answers are the same function"
                               : "parallel, recurrent and chunkwise are the same function",
                        result->holds);
  return {};
}

// Gradients of a checked layer. The reference keeps the states of a head's every token, once in the wider type and then once a thread.
Status VerifyGradientIfItFits(const proof::VerifyOptions& options, const contract::Layer& layer, const Inputs& inputs,
                              proof::GradientVerdict* verdict) {
  const int threads = options.attend.threads > 0 ? std::min(options.attend.threads, DefaultConcurrency()) : DefaultConcurrency();
  const double states = Product({contract::LongestSequence(layer) + 1, layer.key_dim, layer.value_dim});
  if (Status status = CheckMemory("the states of every token, from which the reference takes its gradients,",
                                  states * (layer.f64() ? 8 : 4) * std::max(threads, 2));
      !status.ok())
    return status;
  return proof::VerifyGradient(options, inputs, verdict);
}

std::string Command::GradientText() const {
  const Form form = options_.attend.form;
  const std::string forms = form == Form::kAutomatic ? "recurrent and the chunkwise" : std::string(Name(form));
  return "the gradients of the " + forms + " form are the layer's derivatives";
}

Status Command::Gradient(const std::string& title, const Inputs& inputs, Result* result) {
  contract::Layer layer;
  if (Status status = CheckLayer(options_.attend, inputs, 4, &layer); !status.ok()) return status;
  proof::GradientVerdict verdict;
  if (Status status = VerifyGradientIfItFits(options_, layer, inputs, &verdict); !status.ok()) return status;
  result->holds = verdict.same();
  result->text = json ? Dump(ToJson(options_, layer, verdict))
                      : Bold(title) + "\n" + Setting(layer, verdict.chunk, verdict.target) + "\n" + PlantText(options_, true) + Halves(verdict) +
                            "\n" + Decide(GradientText(), result->holds);
  return {};
}

Status Command::Files(const Tensors& tensors, Result* result) {
  for (const std::string_view name : kSizes)
    if (flags.OnCommandLine(std::string(name)))
      return {StatusCode::kInvalidOption, fmt::format("{} is for random tensors, and --input gives the tensors", flags.Spelling(std::string(name)))};
  if (!flags.Given("rule")) return {StatusCode::kInvalidOption, "no rule was given, by --rule or by the file's metadata; `tercet rules` lists them"};
  std::string files;
  for (const std::string& name : input) files += (files.empty() ? "" : ", ") + Escape(name);
  if (gradient) return Gradient("The gradients of the layer of " + files + ": are they its derivatives?", tensors.inputs, result);
  return One("The layer of " + files + " in three forms: are they the same function?", tensors.inputs, tensors.expected, result);
}

Status Command::Random(Result* result) {
  proof::RandomSpec spec;
  spec.rule = options_.attend.rule;
  if (Status status = ReadSpec(&spec); !status.ok()) return status;
  const proof::OwnedInputs inputs = proof::RandomInputs(spec);
  if (gradient)
    return Gradient(fmt::format("The gradients of a {} layer of random tensors (seed {}): are they its derivatives?", Name(spec.rule), spec.seed),
                    inputs.view(), result);
  return One(fmt::format("A {} layer of random tensors (seed {}) in three forms: are they the same function?", Name(spec.rule), spec.seed),
             inputs.view(), {}, result);
}

Status Command::AllRules(Result* result) {
  proof::RandomSpec spec;
  if (Status status = ReadSpec(&spec); !status.ok()) return status;
  Json rules = Json::array(), left_out = Json::array();
  std::string rows, left_out_text;
  const auto progress = options_.progress;
  int64_t done = 0;
  contract::Layer layer;
  proof::Verdict verdict;
  proof::GradientVerdict of_gradients;
  const auto leave_out = [&](const RuleInfo& info, const std::string& why) {
    left_out.push_back({{"rule", info.name}, {"why", why}});
    left_out_text += fmt::format("{:<13}left out: {}\n", info.name, why);
  };
  result->holds = true;
  for (const RuleInfo& info : Rules()) {
    const double begun = static_cast<double>(left_out.size() + rules.size());
    options_.progress = [&](double fraction, std::string_view doing) {
      progress((begun + fraction) / static_cast<double>(Rules().size()), fmt::format("{}: {}", info.name, doing));
    };
    if (options_.attend.normalize && !info.can_normalize) {
      leave_out(info, "only a rule that adds k v' to the state has a key sum to divide by");
      continue;
    }
    spec.rule = options_.attend.rule = info.rule;
    const proof::OwnedInputs inputs = proof::RandomInputs(spec);
    if (Status status = CheckLayer(options_.attend, inputs.view(), 4, &layer); !status.ok()) return status;
    Status status =
        gradient ? VerifyGradientIfItFits(options_, layer, inputs.view(), &of_gradients) : proof::Verify(options_, inputs.view(), {}, &verdict);
    if (status.code == StatusCode::kInvalidOption && options_.plant != proof::Plant::kNone) {
      leave_out(info, status.message);  // the call itself has just been checked, so it is the plant that can change nothing here
      continue;
    }
    if (!status.ok()) return {status.code, fmt::format("{}: {}", info.name, status.message)};
    if (done++ == 0) rows += gradient ? RowTitle(of_gradients) : RowTitle(verdict);
    rows += gradient ? Row(info.name, of_gradients) : Row(info.name, verdict);
    rules.push_back(gradient ? ToJson(options_, layer, of_gradients) : ToJson(options_, layer, verdict));
    result->holds &= gradient ? of_gradients.same() : verdict.same();
  }
  if (done == 0) return {StatusCode::kInvalidOption, "no rule is left to judge: " + left_out[0]["why"].get<std::string>()};
  if (json) {
    result->text = Dump({{"same", result->holds}, {"rules", rules}, {"left_out", left_out}});
    return {};
  }
  const proof::Algebra& algebra = verdict.algebra;
  const proof::GradientAlgebra& formula = of_gradients.algebra;
  const std::string title = gradient ? "The gradients of every rule on random tensors (seed {}): are they its derivatives?"
                                     : "Every rule on random tensors (seed {}) in three forms: are they the same function?";
  const std::string size =
      gradient ? fmt::format("tokens {}, key_dim {}, value_dim {}", formula.tokens, formula.key_dim, formula.value_dim)
               : fmt::format("tokens {}, key_dim {}, value_dim {}, chunk {}", algebra.tokens, algebra.key_dim, algebra.value_dim, algebra.chunk);
  result->text = Bold(fmt::format(fmt::runtime(title), spec.seed)) +
                 fmt::format("\n  batch {}, tokens {}, heads {}, key_dim {}, value_dim {}, {}, chunk {}, target {}\n", layer.batch, layer.tokens,
                             layer.out_heads, layer.key_dim, layer.value_dim, Name(layer.dtype), gradient ? of_gradients.chunk : verdict.chunk,
                             gradient ? of_gradients.target : verdict.target) +
                 fmt::format("  in algebra {}; `tercet verify --rule RULE{}` shows all numbers of one\n\n", size, gradient ? " --gradient" : "") +
                 PlantText(options_, gradient) + rows + left_out_text + "\n" +
                 Decide(fmt::format("{}, for {} rules", gradient ? GradientText() : "parallel, recurrent and chunkwise are the same function", done),
                        result->holds);
  return {};
}

}  // namespace

Action AddVerify(CLI::App* command) {
  auto self = std::make_shared<Command>();
  Flags* flags = &self->flags;
  command->footer(kFooter);
  AddInputFlag(command, &self->input);
  AddLayerFlags(command, flags, true);
  const auto random = [&](const char* name, const char* value, const char* help) {
    flags->Add(command, name, value, help)->group("Random tensors, without --input");
  };
  random("tokens", "N", "by default 96");
  random("key_dim", "N", "by default 32");
  random("value_dim", "N", "by default 32");
  random("batch", "N", "by default 1");
  random("heads", "N", "by default 2");
  random("q_heads", "N", "by default as --heads, as are the next two");
  random("k_heads", "N", "");
  random("v_heads", "N", "");
  random("dtype", "DTYPE", "f32 (the default), f64, bf16 or f16");
  flags->Add(command, "seed", "N", "of the random tensors and of the proof; by default 1");
  flags->Add(command, "tolerance", "X", "of the expected answers, relative to their largest; by default 0: written down to the last bit");
  flags->Add(command, "operands", "DTYPE",
             "of the expected answers' products: bf16, f16 or tf32, as on tensor cores and AMX; by default not rounded");
  flags->Add(command, "plant", "ERROR", "decay, scale or mask: an error for the chunkwise form, or for its gradients");
  flags->Add(command, "plant_in", "HALF", "algebra, floating-point or both (the default)");
  command->add_flag("--gradient", self->gradient, "the gradients of the recurrent and the chunkwise form; the parallel form has none");
  flags->Add(command, "form", "FORM", "with --gradient: recurrent or chunkwise alone");
  command->add_flag("--json", self->json, "the verdict as one JSON object");
  return [self](Result* result) { return self->Run(result); };
}

}  // namespace tercet::cli
