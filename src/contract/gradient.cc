// What a call for gradients may be: what its inputs may be for Attend, and what is checked here of the gradients.
#include <algorithm>
#include <string>
#include <string_view>

#include "src/contract/checks.hpp"
#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"

namespace tercet::contract {

namespace {

// A gradient that may be wanted, and the input that it is of. The initial state and key sum have one even where they are not given, and scale, whose
// gradient is seen as a tensor of one number, is no tensor: these stand here without their input.
struct Wanted {
  std::string_view name;
  ConstTensor tensor;
  Named of;
};

ConstTensor OneNumber(double* number) { return number != nullptr ? ConstTensor(View(number, {1})) : ConstTensor{}; }

// Of the shape and the dtype of its input, which have been checked.
Status CheckLike(const Wanted& wanted) {
  const ConstTensor &t = wanted.tensor, &input = *wanted.of.tensor;
  const std::string_view of = wanted.of.name;
  if (t.rank != input.rank || !std::equal(t.shape.begin(), t.shape.begin() + t.rank, input.shape.begin()))
    return Refuse(StatusCode::kShape,
                  std::string(wanted.name) + " has shape " + ShapeText(t) + " and must be " + ShapeText(input) + ", the shape of " + std::string(of));
  if (t.dtype != input.dtype)
    return Refuse(StatusCode::kDtype, std::string(wanted.name) + " is " + std::string(Name(t.dtype)) + " and must be " +
                                          std::string(Name(input.dtype)) + ", the dtype of " + std::string(of));
  return {};
}

}  // namespace

Status ValidateGradient(const Options& options, const Inputs& inputs, const OutputGradients& given, const Gradients& wanted, GradientLayer* layer) {
  if (options.form == Form::kParallel)
    return Refuse(StatusCode::kInvalidOption, "form is parallel and must be automatic, recurrent or chunkwise: the parallel form has no gradients");
  GradientLayer l;
  if (Status status = Validate(options, inputs, nullptr, &l); !status.ok()) return status;
  l.given = given;
  l.wanted = wanted;

  const Named out{"the gradient of out", &given.out}, final_state{"the gradient of final_state", &given.final_state},
      final_key_sum{"the gradient of final_key_sum", &given.final_key_sum};
  const Wanted gradients[] = {{"the gradient of q", wanted.q, {"q", &inputs.q}},
                              {"the gradient of k", wanted.k, {"k", &inputs.k}},
                              {"the gradient of v", wanted.v, {"v", &inputs.v}},
                              {"the gradient of log_decay", wanted.log_decay, {"log_decay", &inputs.log_decay}},
                              {"the gradient of beta", wanted.beta, {"beta", &inputs.beta}},
                              {"the gradient of remove", wanted.remove, {"remove", &inputs.remove}},
                              {"the gradient of write", wanted.write, {"write", &inputs.write}},
                              {"the gradient of bonus", wanted.bonus, {"bonus", &inputs.bonus}},
                              {"the gradient of initial_state", wanted.initial_state, {}},
                              {"the gradient of initial_key_sum", wanted.initial_key_sum, {}},
                              {"the gradient of scale", OneNumber(wanted.scale), {}}};
  const Wanted &initial_state = gradients[8], &initial_key_sum = gradients[9];

  if (Status status = CheckMemory("saved", given.saved); !status.ok()) return status;
  for (const Named& one : {out, final_state, final_key_sum})
    if (Status status = CheckForm(one.name, *one.tensor); !status.ok()) return status;
  for (const Wanted& one : gradients)
    if (Status status = CheckForm(one.name, one.tensor); !status.ok()) return status;

  // Which there are. A rule takes what inputs were given.
  for (const Wanted& one : gradients)
    if (one.tensor.given() && one.of.tensor != nullptr && !one.of.tensor->given())
      return Refuse(StatusCode::kUnexpectedInput,
                    std::string(one.name) + " is wanted and " + std::string(Name(l.rule)) + " takes no " + std::string(one.of.name));
  if (final_key_sum.tensor->given() && !l.normalize)
    return Refuse(StatusCode::kUnexpectedInput, std::string(final_key_sum.name) + " was given and there is a key sum only with normalize");
  if (initial_key_sum.tensor.given() && !l.normalize)
    return Refuse(StatusCode::kUnexpectedInput, std::string(initial_key_sum.name) + " is wanted and there is a key sum only with normalize");

  // Shapes, dtypes and data.
  const Expected expected[] = {
      {out, OutLayout(l), Precision::kOfQ},
      {final_state, StateLayout(l), Precision::kF32},
      {final_key_sum, KeySumLayout(l), Precision::kF32},
      {{initial_state.name, &initial_state.tensor}, StateLayout(l), Precision::kF32},
      {{initial_key_sum.name, &initial_key_sum.tensor}, KeySumLayout(l), Precision::kF32},
  };
  for (const Expected& one : expected)
    if (Status status = CheckExpected(one, l); !status.ok()) return status;
  for (const Wanted& one : gradients)
    if (one.tensor.given() && one.of.tensor != nullptr)
      if (Status status = CheckLike(one); !status.ok()) return status;
  for (const Named& one : {out, final_state, final_key_sum})
    if (Status status = CheckData(one.name, *one.tensor); !status.ok()) return status;
  for (const Wanted& one : gradients)
    if (Status status = CheckData(one.name, one.tensor); !status.ok()) return status;

  // Memory that is written: its elements apart from each other and from all that is read, every gradient apart from every other, and the workspace
  // apart from all.
  const ConstTensor workspace_bytes = BytesOf(options.workspace), saved_bytes = BytesOf(given.saved);
  const Named workspace{"workspace", &workspace_bytes}, saved{"saved", &saved_bytes};
  const auto read = InputsAnd(inputs, out, final_state, final_key_sum);
  for (const Wanted& one : gradients) {
    if (!one.tensor.given()) continue;
    const Named written{one.name, &one.tensor};
    if (Status status = CheckOwnMemory(one.name, one.tensor); !status.ok()) return status;
    for (const Named& r : read)
      if (Status status = CheckApart(written, r); !status.ok()) return status;
    for (const Wanted& w : gradients)
      if (&w != &one)
        if (Status status = CheckApart(written, {w.name, &w.tensor}); !status.ok()) return status;
    for (const Named& memory : {workspace, saved})
      if (Status status = CheckApart(memory, written); !status.ok()) return status;
  }
  for (const Named& r : {out, final_state, final_key_sum, saved})
    if (Status status = CheckApart(workspace, r); !status.ok()) return status;
  *layer = l;
  return {};
}

}  // namespace tercet::contract
