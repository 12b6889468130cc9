#include "cli/tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "src/contract/tensor.hpp"

namespace tercet::cli {
namespace {

// What other libraries and papers call them. Looked up as written first (Mamba's C, B and A are not a and b), then in lower case.
struct Aliases {
  std::string_view meant, names;  // each name between two spaces
};
constexpr Aliases kAliases[] = {
    {"q", " C query queries receptance r "},
    {"k", " B key keys "},
    {"v", " value values x "},
    {"log_decay", " A g gk gate gates log_gate w decay alpha log_alpha "},
    {"remove", " a "},
    {"write", " b "},
    {"bonus", " u "},
    {"initial_state", " state s0 h0 h past_state "},
    {"initial_key_sum", " key_sum z0 z "},
    {"offsets", " cu_seqlens cu_seq_lens seqlens indptr "},
    {"valid", " mask attention_mask padding_mask "},
    {"expected.out", " out output o y "},
    {"expected.final_state", " final_state ht present_state "},
    {"expected.final_key_sum", " final_key_sum "},
};

struct NamedAnswer {
  std::string_view name;
  ConstTensor proof::Expected::*tensor;
};
constexpr NamedAnswer kAnswers[] = {
    {"expected.out", &proof::Expected::out},
    {"expected.final_state", &proof::Expected::final_state},
    {"expected.final_key_sum", &proof::Expected::final_key_sum},
};

// Letters to insert, delete, replace or swap with their neighbour until `a` is `b`.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> before, last, row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    before = std::exchange(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

ConstTensor* Find(std::string_view name, Tensors* tensors) {
  for (const Named& named : InputNames())
    if (named.name == name) return &(tensors->inputs.*named.tensor);
  for (const NamedAnswer& answer : kAnswers)
    if (answer.name == name) return &(tensors->expected.*answer.tensor);
  return nullptr;
}

// A view of `array`, which has been checked to have an axis at least and kMaxRank at most.
Status ViewOf(const std::string& path, std::string_view name, const io::Array& array, ConstTensor* view) {
  const size_t rank = array.shape.size();
  if (rank < 1 || rank > kMaxRank)
    return {StatusCode::kShape, fmt::format("{}: {} has {} axes; a tensor of a layer has from 1 to {}", path, name, rank, kMaxRank)};
  view->data = array.data.data();
  view->dtype = array.dtype;
  view->rank = static_cast<int>(rank);
  int64_t stride = 1;
  for (size_t axis = rank; axis-- > 0;) {
    view->shape[axis] = array.shape[axis];
    view->strides[axis] = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(array.shape[axis], 1), &stride))
      return {StatusCode::kShape, fmt::format("{}: the sizes of {} multiply to more than 64 bits hold", path, name)};
  }
  return {};
}

Status Unknown(const std::string& path, std::string_view name) {
  const std::string_view meant = ProbablyMeant(name);
  std::string message = fmt::format("{}: no tensor of a layer is named '{}'; ", path, name);
  if (meant == "log_decay" && name.find("log") == std::string_view::npos)
    message += "'log_decay' was probably meant, the natural logarithm of the decay";
  else if (!meant.empty())
    message += fmt::format("'{}' was probably meant", meant);
  else {
    message += "the names are";
    for (const Named& named : InputNames()) message += fmt::format(" {}", named.name);
    for (const NamedAnswer& answer : kAnswers) message += fmt::format(" {}", answer.name);
  }
  return {StatusCode::kUnexpectedInput, std::move(message)};
}

}  // namespace

const std::vector<Named>& InputNames() {
  static const std::vector<Named> names = {
      {"q", &Inputs::q},
      {"k", &Inputs::k},
      {"v", &Inputs::v},
      {"log_decay", &Inputs::log_decay},
      {"beta", &Inputs::beta},
      {"remove", &Inputs::remove},
      {"write", &Inputs::write},
      {"bonus", &Inputs::bonus},
      {"initial_state", &Inputs::initial_state},
      {"initial_key_sum", &Inputs::initial_key_sum},
      {"offsets", &Inputs::offsets},
      {"valid", &Inputs::valid},
  };
  return names;
}

std::string_view ProbablyMeant(std::string_view name) {
  if (name.size() > 64 || name.find(' ') != std::string_view::npos) return "";
  std::string plain(name);
  for (char& c : plain) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c == '-' ? '_' : c;
  for (const std::string_view spelling : {name, std::string_view(plain)})
    for (const Aliases& aliases : kAliases)
      if (aliases.names.find(fmt::format(" {} ", spelling)) != std::string_view::npos) return aliases.meant;

  std::vector<std::string_view> names;
  for (const Named& named : InputNames()) names.push_back(named.name);
  for (const NamedAnswer& answer : kAnswers) names.push_back(answer.name);
  std::string_view nearest;
  size_t least = plain.size() / 3 + 1;  // so far off it is another word
  for (const std::string_view candidate : names) {
    const size_t distance = EditDistance(plain, candidate);
    if (distance < least) {
      nearest = candidate;
      least = distance;
    }
  }
  return nearest;
}

CLI::Option* AddInputFlag(CLI::App* command, std::vector<std::string>* input) {
  return command->add_option("--input", *input, "a .safetensors, .npz or .npy file of tensors; NAME=FILE names the one in a .npy; may be repeated")
      ->type_name("FILE")
      ->expected(1)
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

Status ReadTensors(const std::vector<std::string>& arguments, Flags* flags, Tensors* tensors) {
  std::map<std::string, std::string> source;  // of each tensor
  for (const std::string& argument : arguments) {
    // NAME=PATH, unless a directory's name holds the sign: ./a=b.npz is a path.
    const size_t sign = argument.find('=');
    const bool named = sign != std::string::npos && argument.find('/') > sign;
    const std::string path = named ? argument.substr(sign + 1) : argument;
    io::File& file = tensors->files.emplace_back();
    if (Status status = io::Read(path, &file); !status.ok()) return status;
    if (named) {
      const std::string name = argument.substr(0, sign);
      if (path.size() < 4 || path.compare(path.size() - 4, 4, ".npy") != 0 || file.arrays.size() != 1)
        return {StatusCode::kInvalidOption,
                fmt::format("--input {}: only a .npy file takes a name; give a file whose own name holds '=' as ./{}", argument, argument)};
      io::Array array = std::move(file.arrays.begin()->second);
      file.arrays.clear();
      file.arrays.emplace(name, std::move(array));
    }
    flags->AddMetadata(path, file.metadata);
    for (const auto& [name, array] : file.arrays) {
      ConstTensor* view = Find(name, tensors);
      if (view == nullptr) return Unknown(path, name);
      const auto [first, inserted] = source.emplace(name, path);
      if (!inserted) return {StatusCode::kUnexpectedInput, fmt::format("{} is given twice: by {} and by {}", name, first->second, path)};
      if (Status status = ViewOf(path, name, array, view); !status.ok()) return status;
    }
  }
  return flags->status();
}

Status ReadState(const std::string& path, Tensors* tensors) {
  if (tensors->inputs.initial_state.given() || tensors->inputs.initial_key_sum.given())
    return {StatusCode::kInvalidOption, fmt::format("the initial state is given twice: by --input and by --initial-state {}", path)};
  io::File& file = tensors->files.emplace_back();
  if (Status status = io::Read(path, &file); !status.ok()) return status;
  const auto& arrays = file.arrays;
  // A .npy file holds one tensor and has no name for it.
  const bool alone = path.size() >= 4 && path.compare(path.size() - 4, 4, ".npy") == 0;
  if (alone && arrays.size() == 1) return ViewOf(path, "the state", arrays.begin()->second, &tensors->inputs.initial_state);
  const auto take = [&](const std::string& what, ConstTensor* view) -> Status {
    const auto left = arrays.find("final_" + what), given = arrays.find("initial_" + what);
    if (left != arrays.end() && given != arrays.end())
      return {StatusCode::kUnexpectedInput,
              fmt::format("{} holds both final_{} and initial_{}; which is the state to begin with?", path, what, what)};
    const auto found = left != arrays.end() ? left : given;
    return found == arrays.end() ? Status{} : ViewOf(path, found->first, found->second, view);
  };
  if (Status status = take("state", &tensors->inputs.initial_state); !status.ok()) return status;
  if (Status status = take("key_sum", &tensors->inputs.initial_key_sum); !status.ok()) return status;
  if (!tensors->inputs.initial_state.given())
    return {StatusCode::kMissingInput, fmt::format("{} holds no state: a tensor named final_state or initial_state", path)};
  return {};
}

Status CheckLayer(const Options& options, const Inputs& inputs, int copies, contract::Layer* layer) {
  if (Status status = contract::Validate(options, inputs, nullptr, layer); !status.ok()) return status;
  const auto bytes = [](Dtype dtype, std::initializer_list<int64_t> shape) { return Product(shape) * static_cast<double>(contract::SizeOf(dtype)); };
  return CheckMemory("what this layer gives",
                     copies * (bytes(layer->dtype, {layer->batch, layer->tokens, layer->out_heads, layer->value_dim}) +
                               bytes(layer->state_dtype(), {layer->sequences, layer->state_heads, layer->key_dim, layer->value_dim})));
}

}  // namespace tercet::cli
