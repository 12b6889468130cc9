// The user's tensors: read from files, known by the library's names.
#ifndef TERCET_CLI_TENSORS_HPP_
#define TERCET_CLI_TENSORS_HPP_

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "cli/flags.hpp"
#include "src/contract/layer.hpp"
#include "src/io/arrays.hpp"
#include "src/proof/verify.hpp"
#include "tercet/tercet.hpp"

namespace tercet::cli {

// One of the library's tensors, by its name in files.
struct Named {
  std::string_view name;
  ConstTensor Inputs::*tensor;
};
const std::vector<Named>& InputNames();

struct Tensors {
  Inputs inputs;
  proof::Expected expected;
  std::deque<io::File> files;  // own the memory the views above look at
};

// The flag --input, which may be repeated.
CLI::Option* AddInputFlag(CLI::App* command, std::vector<std::string>* input);

// Reads every PATH or NAME=PATH.npy into `tensors`; the options in their metadata go to `flags`.
Status ReadTensors(const std::vector<std::string>& arguments, Flags* flags, Tensors* tensors);

// Reads the state that an earlier call left, as initial_state and initial_key_sum.
Status ReadState(const std::string& path, Tensors* tensors);

// contract::Validate, and whether this machine can hold `copies` of what the layer gives.
Status CheckLayer(const Options& options, const Inputs& inputs, int copies, contract::Layer* layer);

// The library's name that `name` probably stands for, or "".
std::string_view ProbablyMeant(std::string_view name);

}  // namespace tercet::cli

#endif  // TERCET_CLI_TENSORS_HPP_
