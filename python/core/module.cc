// The extension tercet._core: arguments to views, one call of the library, results as the caller's own arrays. Functions take their arguments by
// position and in full; their signatures, defaults and documentation are those of the Python functions that call them (python/tercet/__init__.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.hpp"
#include "cli/report.hpp"
#include "python/core/arrays.hpp"
#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/proof/verify.hpp"
#include "src/proof/verify_gradient.hpp"
#include "tercet/tercet.hpp"

namespace tercet::python {
namespace {

[[noreturn]] void Throw(const Status& status) {
  switch (status.code) {
    case StatusCode::kDtype:
      throw nb::type_error(status.message.c_str());
    case StatusCode::kOutOfMemory:
      PyErr_SetString(PyExc_MemoryError, status.message.c_str());
      nb::raise_python_error();
    case StatusCode::kInternal:
      throw std::runtime_error(status.message);
    default:
      throw nb::value_error(status.message.c_str());
  }
}

void Check(const Status& status) {
  if (!status.ok()) Throw(status);
}

template <class Value, class Names>
Value FromName(const char* what, std::string_view name, std::optional<Value> value, const Names& names) {
  if (value) return *value;
  std::string sentence = std::string(what) + " is '" + std::string(name) + "' and must be one of";
  for (size_t at = 0; at < std::size(names); ++at) sentence += (at == 0 ? " " : ", ") + std::string(Name(names[at]));
  throw nb::value_error(sentence.c_str());
}

Rule ToRule(std::string_view name) {
  const std::optional<Rule> rule = RuleFromName(name);
  if (rule) return *rule;
  std::vector<Rule> rules;
  for (const RuleInfo& info : Rules()) rules.push_back(info.rule);
  return FromName("rule", name, rule, rules);
}

Form ToForm(std::string_view name) {
  return FromName("form", name, FormFromName(name), std::array{Form::kAutomatic, Form::kParallel, Form::kRecurrent, Form::kChunkwise});
}

FeatureMap ToFeatureMap(std::string_view name) {
  return FromName("feature_map", name, FeatureMapFromName(name),
                  std::array{FeatureMap::kIdentity, FeatureMap::kEluPlusOne, FeatureMap::kRelu, FeatureMap::kL2Norm});
}

// One call's arguments.
struct Arguments {
  Options options;
  Inputs inputs;
  Held held;
  Library library = Library::kNumPy;
};

struct Input {
  const char* name;
  ConstTensor Inputs::*of;
  Tensor Gradients::*gradient;  // null: it has none
};
constexpr Input kInputs[] = {
    {"q", &Inputs::q, &Gradients::q},
    {"k", &Inputs::k, &Gradients::k},
    {"v", &Inputs::v, &Gradients::v},
    {"log_decay", &Inputs::log_decay, &Gradients::log_decay},
    {"beta", &Inputs::beta, &Gradients::beta},
    {"remove", &Inputs::remove, &Gradients::remove},
    {"write", &Inputs::write, &Gradients::write},
    {"bonus", &Inputs::bonus, &Gradients::bonus},
    {"initial_state", &Inputs::initial_state, &Gradients::initial_state},
    {"initial_key_sum", &Inputs::initial_key_sum, &Gradients::initial_key_sum},
    {"offsets", &Inputs::offsets, nullptr},
    {"valid", &Inputs::valid, nullptr},
};
constexpr size_t kInputCount = std::size(kInputs);

std::string TypeName(nb::handle object) { return nb::cast<std::string>(nb::type_name(object.type())); }

[[noreturn]] void RefuseType(const char* name, nb::handle object, const char* must) {
  throw nb::type_error((std::string(name) + " is a " + TypeName(object) + " and must be " + must).c_str());
}

// The text lives as long as `object`.
std::string_view Text(const char* name, nb::handle object) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(object.ptr()) ? PyUnicode_AsUTF8AndSize(object.ptr(), &size) : nullptr;
  if (text == nullptr) RefuseType(name, object, "a string");
  return {text, static_cast<size_t>(size)};
}

int64_t Integer(const char* name, nb::handle object) {
  const nb::object index = nb::steal<nb::object>(PyNumber_Index(object.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    RefuseType(name, object, "an integer");
  }
  const int64_t value = PyLong_AsLongLong(index.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::value_error((std::string(name) + " is an integer beyond 64 bits").c_str());
  }
  return value;
}

double Number(const char* name, nb::handle object) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    RefuseType(name, object, "a number");
  }
  return value;
}

bool Flag(const char* name, nb::handle object) {
  if (!PyBool_Check(object.ptr())) RefuseType(name, object, "True or False");
  return object.is(Py_True);
}

constexpr size_t kOptionCount = 10;

// (rule, form, chunk, scale, feature_map, eps, normalize, check_values, threads, target). Its strings must outlive the call.
Options ReadOptions(const nb::tuple& from) {
  if (from.size() != kOptionCount) throw nb::type_error("the options are not the ten that they are");
  Options options;
  options.rule = ToRule(Text("rule", from[0]));
  options.form = ToForm(Text("form", from[1]));
  if (!from[2].is_none()) options.chunk = Integer("chunk", from[2]);
  if (!from[3].is_none()) options.scale = Number("scale", from[3]);
  options.feature_map = ToFeatureMap(Text("feature_map", from[4]));
  options.eps = Number("eps", from[5]);
  options.normalize = Flag("normalize", from[6]);
  options.check_values = Flag("check_values", from[7]);
  options.threads = static_cast<int>(std::clamp<int64_t>(Integer("threads", from[8]), INT32_MIN, INT32_MAX));
  if (!from[9].is_none()) options.target = Text("target", from[9]);
  return options;
}

// `inputs` as kInputs lists them.
void ReadCall(const nb::tuple& inputs, const nb::tuple& options, Arguments* call) {
  if (inputs.size() != kInputCount) throw nb::type_error("the inputs are not the twelve that they are");
  call->options = ReadOptions(options);
  if (inputs[0].is_none()) RefuseType("q", inputs[0], "an array");
  call->library = LibraryOf(inputs[0]);
  for (size_t at = 0; at < kInputCount; ++at) call->inputs.*kInputs[at].of = Read(kInputs[at].name, inputs[at], &call->held);
}

// The shapes of what a call computes, of inputs whose axes are counted right; whatever else is wrong with them the call itself says.
struct Shapes {
  std::array<int64_t, kMaxRank> out{}, state{}, key_sum{};
};

Shapes ShapesOf(const Arguments& call) {
  const Inputs& in = call.inputs;
  const bool packed = in.offsets.given();
  if (in.q.rank != 4 || in.k.rank != 4 || in.v.rank != 4 || (packed && (in.offsets.rank != 1 || in.offsets.shape[0] < 1))) {
    int64_t bytes = 0;
    Check(SavedBytes(call.options, in, &bytes));
  }
  const int64_t state_heads = std::max(in.k.shape[2], in.v.shape[2]), sequences = packed ? in.offsets.shape[0] - 1 : in.q.shape[0];
  Shapes shapes;
  shapes.out = {in.q.shape[0], in.q.shape[1], std::max(in.q.shape[2], state_heads), in.v.shape[3]};
  shapes.state = {sequences, state_heads, in.q.shape[3], in.v.shape[3]};
  shapes.key_sum = {sequences, state_heads, in.q.shape[3]};
  return shapes;
}

Dtype StateDtypeOf(Dtype dtype) { return dtype == Dtype::kF64 ? Dtype::kF64 : Dtype::kF32; }

// An output: the caller's own array where one is given, else, where it is wanted, a new one.
nb::object Output(const char* name, nb::handle given, bool wanted, Dtype dtype, int rank, const std::array<int64_t, kMaxRank>& shape, Arguments* call,
                  Tensor* view) {
  if (!given.is_none()) {
    *view = Write(name, given, &call->held);
    return nb::borrow(given);
  }
  if (!wanted) return nb::none();
  NewArray made = Empty(call->library, dtype, rank, shape, &call->held);
  *view = made.view;
  return made.array;
}

// What a call gives back: its first result alone, or all that are not None in a tuple.
nb::object Results(Library library, std::initializer_list<nb::object> results) {
  nb::list given;
  for (const nb::object& result : results)
    if (result.is_valid() && !result.is_none()) given.append(Finish(library, result));
  if (given.size() == 1) return given[0];
  return nb::tuple(given);
}

// Computes a call. Outputs that are None are made, those that are wanted.
nb::object Attended(Arguments& call, bool return_state, bool return_saved, nb::handle out, nb::handle final_state, nb::handle final_key_sum) {
  const Shapes shapes = ShapesOf(call);
  const Dtype dtype = call.inputs.q.dtype, state_dtype = StateDtypeOf(dtype);
  Outputs outputs;
  const nb::object out_array = Output("out", out, true, dtype, 4, shapes.out, &call, &outputs.out);
  const nb::object state = Output("final_state", final_state, return_state, state_dtype, 4, shapes.state, &call, &outputs.final_state);
  const nb::object key_sum =
      Output("final_key_sum", final_key_sum, return_state && call.options.normalize, state_dtype, 3, shapes.key_sum, &call, &outputs.final_key_sum);
  nb::object saved = nb::none();
  if (return_saved) {
    Options sizes = call.options;
    sizes.check_values = false;  // the call itself looks
    int64_t bytes = 0;
    Check(SavedBytes(sizes, call.inputs, &bytes));
    NewArray made = EmptyBytes(call.library, bytes, &call.held);
    outputs.saved = {made.view.data, bytes};
    saved = made.array;
  }
  Status status;
  {
    const nb::gil_scoped_release release;
    status = Attend(call.options, call.inputs, outputs);
  }
  Check(status);
  return Results(call.library, {out_array, return_state ? state : nb::none(), return_state ? key_sum : nb::none(), saved});
}

nb::object AttendArrays(const nb::tuple& inputs, const nb::tuple& options, bool return_state, bool return_saved, nb::handle out,
                        nb::handle final_state, nb::handle final_key_sum) {
  Arguments call;
  ReadCall(inputs, options, &call);
  return Attended(call, return_state, return_saved, out, final_state, final_key_sum);
}

// A call of a delta rule by tercet.transformers that asks for nothing but computing: (out, state or None). None where it does, or may, and Python has
// to look. One token of a model finds nothing of this in the caches: what it costs is the lines of code and data that it touches, and here they are
// half of Python's. `tensors` are query, key, value, g, beta and the initial state; no option in `named` may have a value; where `own_l2_norm` is not
// None, tensors in less than f32 have their norm from there.
nb::object AttendDelta(nb::handle rule, const nb::tuple& tensors, bool return_state, bool l2_norm, nb::handle own_l2_norm, const nb::dict& options,
                       nb::handle named) {
  constexpr size_t kAt[] = {0, 1, 2, 3, 4, 8};  // in kInputs
  for (const auto& [name, value] : options)
    if (!value.is_none() && PySet_Contains(named.ptr(), name.ptr()) > 0) return nb::none();
  if (tensors.size() != std::size(kAt) || !OnlyComputes(tensors)) return nb::none();
  Arguments call;
  call.library = Library::kTorch;
  try {
    for (size_t at = 0; at < std::size(kAt); ++at) call.inputs.*kInputs[kAt[at]].of = Read(kInputs[kAt[at]].name, tensors[at], &call.held);
  } catch (const std::exception&) {
    return nb::none();
  }
  const Inputs& in = call.inputs;
  const Dtype dtype = in.q.dtype;
  const auto is = [](const ConstTensor& t, Dtype one, Dtype other) { return t.given() && (t.dtype == one || t.dtype == other); };
  const bool dtypes = (dtype == Dtype::kF32 || is(in.q, Dtype::kBF16, Dtype::kF16)) && is(in.k, dtype, dtype) && is(in.v, dtype, dtype) &&
                      is(in.log_decay, dtype, Dtype::kF32) && is(in.beta, dtype, Dtype::kF32) &&
                      (!in.initial_state.given() || in.initial_state.dtype == Dtype::kF32);
  if (!dtypes || in.q.rank != 4 || in.k.rank != 4 || in.q.shape != in.k.shape || contract::Count(in.q) == 0) return nb::none();
  if (l2_norm && dtype != Dtype::kF32 && !own_l2_norm.is_none()) return nb::none();
  call.options.rule = ToRule(Text("rule", rule));
  call.options.feature_map = l2_norm ? FeatureMap::kL2Norm : FeatureMap::kIdentity;
  call.options.check_values = false;
  call.options.threads = TorchThreads();
  const bool in_place = return_state && in.initial_state.given() && IsStatic(tensors[5]);
  const nb::object result = Attended(call, return_state, false, nb::none(), in_place ? tensors[5] : nb::none(), nb::none());
  return return_state ? result : nb::make_tuple(result, nb::none());
}

// The gradients that `wanted` names, as a list in the order of kInputs and then scale's; None where they are not wanted.
nb::object GradientArrays(const nb::tuple& inputs, const nb::tuple& options, nb::handle out, nb::handle final_state, nb::handle final_key_sum,
                          nb::handle saved, const nb::object& wanted) {
  Arguments call;
  ReadCall(inputs, options, &call);
  OutputGradients given;
  given.out = Read("grad_out", out, &call.held);
  given.final_state = Read("grad_final_state", final_state, &call.held);
  given.final_key_sum = Read("grad_final_key_sum", final_key_sum, &call.held);
  if (const ConstTensor kept = Read("saved", saved, &call.held); kept.given()) {
    if (kept.dtype != Dtype::kBool || kept.rank != 1 || (kept.shape[0] > 1 && kept.strides[0] != 1))
      throw nb::value_error("saved is not what attend(return_saved=True) gave: an array of bytes, [n], without gaps");
    given.saved = {const_cast<void*>(kept.data), kept.shape[0]};
  }
  std::array<bool, kInputCount> want{};
  bool want_scale = wanted.is_none();
  if (wanted.is_none()) {
    for (size_t at = 0; at < kInputCount; ++at) want[at] = kInputs[at].gradient != nullptr && (call.inputs.*kInputs[at].of).given();
  } else {
    if (PyUnicode_Check(wanted.ptr())) throw nb::type_error("wanted is a string and must be a collection of names");
    for (const nb::handle item : wanted) {
      const std::string_view name = Text("a name in wanted", item);
      const auto* known = std::find_if(std::begin(kInputs), std::end(kInputs), [&](const Input& one) { return name == one.name; });
      if (name == "scale")
        want_scale = true;
      else if (known == std::end(kInputs) || known->gradient == nullptr)
        throw nb::value_error(("wanted names '" + std::string(name) + "', and there is no gradient of that").c_str());
      else
        want[static_cast<size_t>(known - kInputs)] = true;
    }
  }
  const Shapes shapes = ShapesOf(call);
  Gradients gradients;
  std::array<nb::object, kInputCount> arrays;
  for (size_t at = 0; at < kInputCount; ++at) {
    arrays[at] = nb::none();
    if (!want[at]) continue;
    ConstTensor of = call.inputs.*kInputs[at].of;
    if (!of.given()) {  // the states have gradients where they are not given, too
      if (kInputs[at].gradient != &Gradients::initial_state && kInputs[at].gradient != &Gradients::initial_key_sum)
        throw nb::value_error((std::string("wanted names '") + kInputs[at].name + "', which was not given").c_str());
      const bool state = kInputs[at].gradient == &Gradients::initial_state;
      of.dtype = StateDtypeOf(call.inputs.q.dtype);
      of.rank = state ? 4 : 3;
      of.shape = state ? shapes.state : shapes.key_sum;
    }
    if (of.rank > kMaxRank) {
      int64_t bytes = 0;
      Check(SavedBytes(call.options, call.inputs, &bytes));
    }
    NewArray made = Empty(call.library, of.dtype, of.rank, of.shape, &call.held);
    gradients.*kInputs[at].gradient = made.view;
    arrays[at] = made.array;
  }
  double scale = 0;
  if (want_scale) gradients.scale = &scale;
  Status status;
  {
    const nb::gil_scoped_release release;
    status = AttendGradient(call.options, call.inputs, given, gradients);
  }
  Check(status);
  nb::list results;
  for (size_t at = 0; at < kInputCount; ++at)
    if (kInputs[at].gradient != nullptr) results.append(arrays[at].is_none() ? arrays[at] : Finish(call.library, arrays[at]));
  results.append(want_scale ? nb::object(nb::float_(scale)) : nb::none());
  return results;
}

// Both halves of the proof as (JSON, text for a reader): what `tercet verify --json` and `tercet verify` print.
nb::object VerifyArrays(const nb::tuple& inputs, const nb::tuple& options, bool gradient, uint64_t seed, nb::handle out, nb::handle final_state,
                        nb::handle final_key_sum, double tolerance, const std::optional<std::string>& operands) {
  Arguments call;
  ReadCall(inputs, options, &call);
  proof::Expected expected;
  expected.out = Read("expected_out", out, &call.held);
  expected.final_state = Read("expected_final_state", final_state, &call.held);
  expected.final_key_sum = Read("expected_final_key_sum", final_key_sum, &call.held);
  proof::VerifyOptions verify;
  verify.attend = call.options;
  verify.seed = seed;
  verify.tolerance = tolerance;
  if (operands && !proof::Find(*operands, &verify.expected_operands))
    Check({StatusCode::kInvalidOption, "operands is '" + *operands + "' and must be 'bf16', 'f16', 'tf32' or None"});
  Status status;
  std::string json, text;
  {
    const nb::gil_scoped_release release;
    contract::Layer layer;
    status = contract::Validate(verify.attend, call.inputs, nullptr, &layer);
    const auto tell = [&](const auto& verdict) {
      json = cli::Dump(cli::ToJson(verify, layer, verdict));
      text = cli::Setting(layer, verdict.chunk, verdict.target) + cli::Halves(verdict);
    };
    if (status.ok() && gradient) {
      proof::GradientVerdict verdict;
      status = proof::VerifyGradient(verify, call.inputs, &verdict);
      if (status.ok()) tell(verdict);
    } else if (status.ok()) {
      proof::Verdict verdict;
      status = proof::Verify(verify, call.inputs, expected, &verdict);
      if (status.ok()) tell(verdict);
    }
  }
  Check(status);
  return nb::make_tuple(json, text);
}

// Every rule as (name, equation, also_known_as, log_decay_layout, takes_beta, takes_remove_and_write, takes_bonus, can_normalize,
// default_scale_is_one).
nb::object RuleList() {
  nb::list rules;
  for (const RuleInfo& info : Rules())
    rules.append(nb::make_tuple(std::string(info.name), std::string(info.equation), std::string(info.also_known_as),
                                std::string(info.log_decay_layout), info.takes_beta, info.takes_remove_and_write, info.takes_bonus,
                                info.can_normalize, info.default_scale_is_one));
  return rules;
}

int Command(const std::vector<std::string>& arguments) {
  std::vector<std::string> copies = arguments;
  std::vector<char*> pointers;
  for (std::string& argument : copies) pointers.push_back(argument.data());
  const nb::gil_scoped_release release;
  return cli::Run(static_cast<int>(pointers.size()), pointers.data());
}

}  // namespace
}  // namespace tercet::python

NB_MODULE(_core, module) {
  namespace nb = nanobind;
  using namespace tercet::python;
  module.doc() = "Tercet's library. Its functions are documented where tercet calls them.";
  module.def("attend", &AttendArrays, nb::arg("inputs"), nb::arg("options"), nb::arg("return_state"), nb::arg("return_saved"), nb::arg("out").none(),
             nb::arg("final_state").none(), nb::arg("final_key_sum").none());
  module.def("attend_delta", &AttendDelta, nb::arg("rule"), nb::arg("tensors"), nb::arg("return_state"), nb::arg("l2_norm"),
             nb::arg("own_l2_norm").none(), nb::arg("options"), nb::arg("named"));
  module.def("only_computes", &OnlyComputes, nb::arg("tensors"));
  module.def("gradient", &GradientArrays, nb::arg("inputs"), nb::arg("options"), nb::arg("grad_out").none(), nb::arg("grad_final_state").none(),
             nb::arg("grad_final_key_sum").none(), nb::arg("saved").none(), nb::arg("wanted").none());
  module.def("verify", &VerifyArrays, nb::arg("inputs"), nb::arg("options"), nb::arg("gradient"), nb::arg("seed"), nb::arg("expected_out").none(),
             nb::arg("expected_final_state").none(), nb::arg("expected_final_key_sum").none(), nb::arg("tolerance"), nb::arg("operands").none());
  module.def("rules", &RuleList);
  module.def("targets", [] { return tercet::Targets(); });
  module.def("version", [] { return std::string(tercet::Version()); });
  module.def("concurrency", [] { return tercet::DefaultConcurrency(); });
  module.def("command", &Command, nb::arg("arguments"));
}
