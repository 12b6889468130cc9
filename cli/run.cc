// tercet run: computes a layer on the user's tensors and writes what it gives.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/report.hpp"
#include "cli/tensors.hpp"
#include "cli/terminal.hpp"
#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"

namespace tercet::cli {
namespace {

constexpr const char* kFooter = R"(
Reads tensors by the library's names (q k v log_decay beta remove write bonus initial_state initial_key_sum offsets valid), computes the layer and
writes the tensor out. The options may stand in a .safetensors file's metadata under the flags' names; a flag wins. Tensors named expected.* are
for `tercet verify` and are not used here.

Examples
  tercet run --rule linear --input layer.safetensors --output out.safetensors
  tercet run --rule gated_delta --form chunkwise --chunk 64 --input layer.npz --output out.npy

A long sequence in pieces, the state handed over by file, gives what one call gives:
  tercet run --rule gla --input first.npz --output out1.npz --final-state state.npz
  tercet run --rule gla --input second.npz --initial-state state.npz --output out2.npz --final-state state.npz

The files written end in .safetensors, .npz or .npy (one tensor alone: out, or the state). Each is written under another name and then renamed, so
that a failure leaves the old file whole.

Exit codes: 0 written; 2 bad use or a bad file, and no file has changed.)";

struct Command {
  Flags flags;
  std::vector<std::string> input;
  std::string output, initial_state, final_state;
  bool json = false;

  Status Run(Result* result);
};

bool EndsIn(const std::string& path, std::string_view ending) {
  return path.size() >= ending.size() && path.compare(path.size() - ending.size(), ending.size(), ending) == 0;
}

// Said before the work is done rather than after it.
Status CheckEnding(const std::string& flag, const std::string& path) {
  if (EndsIn(path, ".safetensors") || EndsIn(path, ".npz") || EndsIn(path, ".npy")) return {};
  return {StatusCode::kInvalidOption, fmt::format("{} is '{}'; it must end in .safetensors, .npz or .npy", flag, path)};
}

bool SameFile(const std::string& a, const std::string& b) {
  std::error_code error;
  const auto whole = [&](const std::string& path) { return std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error); };
  return whole(a) == whole(b);
}

io::Array Zeros(Dtype dtype, std::vector<int64_t> shape) {
  int64_t bytes = contract::SizeOf(dtype);
  for (const int64_t size : shape) bytes *= size;
  return {dtype, std::move(shape), std::vector<std::byte>(static_cast<size_t>(bytes))};
}

Tensor Writable(io::Array* array) {
  Tensor tensor;
  tensor.data = array->data.data();
  tensor.dtype = array->dtype;
  tensor.rank = static_cast<int>(array->shape.size());
  int64_t stride = 1;
  for (size_t axis = array->shape.size(); axis-- > 0;) {
    tensor.shape[axis] = array->shape[axis];
    tensor.strides[axis] = stride;
    stride *= array->shape[axis];
  }
  return tensor;
}

Status Command::Run(Result* result) {
  Tensors tensors;
  if (Status status = ReadTensors(input, &flags, &tensors); !status.ok()) return status;
  Options options;
  ReadLayerFlags(&flags, false, &options);
  if (!flags.status().ok()) return flags.status();
  if (!flags.Given("rule")) return {StatusCode::kInvalidOption, "no rule was given, by --rule or by the file's metadata; `tercet rules` lists them"};
  if ((options.form == Form::kParallel || options.form == Form::kRecurrent) && !flags.OnCommandLine("chunk")) options.chunk = 0;  // a file's default
  if (Status status = CheckEnding("--output", output); !status.ok()) return status;
  if (!final_state.empty()) {
    if (Status status = CheckEnding("--final-state", final_state); !status.ok()) return status;
    if (SameFile(output, final_state)) return {StatusCode::kInvalidOption, "--output and --final-state are the same file"};
    if (options.normalize && EndsIn(final_state, ".npy"))
      return {StatusCode::kInvalidOption,
              "--final-state is a .npy file, which holds one tensor, and a normalised layer leaves two: final_state and final_key_sum"};
  }
  if (!initial_state.empty()) {
    if (Status status = ReadState(initial_state, &tensors); !status.ok()) return status;
  }

  contract::Layer layer;
  if (Status status = CheckLayer(options, tensors.inputs, 1, &layer); !status.ok()) return status;
  if (layer.dtype == Dtype::kBF16 && !EndsIn(output, ".safetensors"))
    return {StatusCode::kInvalidOption,
            fmt::format("--output is {} and must end in .safetensors: out is bf16, for which NumPy has no dtype", output)};
  io::File out, left;
  io::Array& array = out.arrays.emplace("out", Zeros(layer.dtype, {layer.batch, layer.tokens, layer.out_heads, layer.value_dim})).first->second;
  Outputs outputs;
  outputs.out = Writable(&array);
  if (!final_state.empty()) {
    const auto add = [&](const char* name, std::vector<int64_t> shape) {
      return Writable(&left.arrays.emplace(name, Zeros(layer.state_dtype(), std::move(shape))).first->second);
    };
    outputs.final_state = add("final_state", {layer.sequences, layer.state_heads, layer.key_dim, layer.value_dim});
    if (layer.normalize) outputs.final_key_sum = add("final_key_sum", {layer.sequences, layer.state_heads, layer.key_dim});
  }
  std::string target;
  if (Status status = ChooseTarget(options.target, &target); !status.ok()) return status;
  if (Status status = Attend(options, tensors.inputs, outputs); !status.ok()) return status;
  if (Status status = io::Write(output, out); !status.ok()) return status;
  if (!final_state.empty()) {
    if (Status status = io::Write(final_state, left); !status.ok()) return status;
  }

  Json written = Json::array();
  std::string text = fmt::format("{}, {} form, {}, target {}\n", Name(layer.rule), Name(options.form), Name(layer.dtype), target);
  const auto tell = [&](const std::string& path, const io::File& file) {
    for (const auto& [name, tensor] : file.arrays) {
      written.push_back({{"file", path}, {"tensor", name}, {"dtype", Name(tensor.dtype)}, {"shape", tensor.shape}});
      text += fmt::format("{}: {} {}\n", Escape(path), name, Shape(tensor.shape));
    }
  };
  tell(output, out);
  if (!final_state.empty()) tell(final_state, left);
  result->text =
      json ? Dump({{"rule", Name(layer.rule)}, {"form", Name(options.form)}, {"dtype", Name(layer.dtype)}, {"target", target}, {"written", written}})
           : text;
  return {};
}

}  // namespace

Action AddRun(CLI::App* command) {
  auto self = std::make_shared<Command>();
  command->footer(kFooter);
  AddInputFlag(command, &self->input)->required();
  command->add_option("--output", self->output, "where to write out")->type_name("FILE")->required();
  command->add_option("--initial-state", self->initial_state, "the state to begin with, as --final-state wrote it")->type_name("FILE");
  command->add_option("--final-state", self->final_state, "where to write the state at the end (and the key sum)")->type_name("FILE");
  self->flags.Add(command, "form", "FORM", "automatic (the default), parallel, recurrent or chunkwise");
  AddLayerFlags(command, &self->flags, false);
  command->add_flag("--json", self->json, "say what was written as one JSON object");
  return [self](Result* result) { return self->Run(result); };
}

}  // namespace tercet::cli
