// The C face: what C can say turned into what tercet.hpp takes, and what that answers written into the caller's memory. Beside NULL, sizes of structs
// and numbers that no enumeration can hold nothing is checked here. Exceptions end here.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tercet/tercet.h"
#include "tercet/tercet.hpp"

// A piece of a call is a number that its body is called with.
struct tercet_work {
  const std::function<void(int64_t)>* body;
};

namespace {

using tercet::Status;
using tercet::StatusCode;

// Each enumeration here is counted like that of C++.
static_assert(TERCET_ERROR_INTERNAL == static_cast<int>(StatusCode::kInternal));
static_assert(TERCET_DTYPE_BOOL == static_cast<int>(tercet::Dtype::kBool));
static_assert(TERCET_RULE_RWKV7 == static_cast<int>(tercet::Rule::kRwkv7));
static_assert(TERCET_FORM_CHUNKWISE == static_cast<int>(tercet::Form::kChunkwise));
static_assert(TERCET_FEATURE_MAP_L2_NORM == static_cast<int>(tercet::FeatureMap::kL2Norm));

// ---- Answers --------------------------------------------------------------------------------------------------------------------------------

void Write(std::string_view sentence, tercet_message* message) {
  constexpr std::string_view kCut = "...";
  constexpr size_t kRoom = sizeof(message->text) - 1;
  size_t kept = sentence.size();
  std::string_view end;
  if (kept > kRoom) {
    end = kCut;
    kept = kRoom - kCut.size();
    while (kept > 0 && (static_cast<unsigned char>(sentence[kept]) & 0xc0) == 0x80) --kept;  // not within a character of UTF-8
  }
  *std::copy(end.begin(), end.end(), std::copy_n(sentence.begin(), kept, message->text)) = '\0';
}

// What call() says, written where the caller wants it.
template <class Call>
tercet_code Say(tercet_message* message, const Call& call) {
  Status status;
  try {
    status = call();
  } catch (...) {
    status.code = StatusCode::kOutOfMemory;
  }
  std::string_view sentence = status.message;
  if (!status.ok() && sentence.empty()) sentence = "the call ran out of memory, and had none for the sentence that says where";
  if (message != nullptr) Write(sentence, message);
  return static_cast<tercet_code>(status.code);
}

Status NotNull(const void* pointer, const char* name, const char* type) {
  if (pointer != nullptr) return {};
  return {StatusCode::kNullData, std::string(name) + " is NULL and must point to " + type};
}

// ---- Structs that may grow ------------------------------------------------------------------------------------------------------------------

// More bytes than any of them will ever have: a size that was not set is not believed so far as to look for zeros there.
constexpr size_t kMostBytes = 16384;

// *given as this version has it: zeros where it is shorter.
template <class T>
Status Whole(const T* given, const char* name, const char* type, T* whole) {
  if (Status status = NotNull(given, name, type); !status.ok()) return status;
  const size_t size = given->struct_size;
  const auto refuse = [&](const std::string& must) -> Status {
    return {StatusCode::kInvalidOption, std::string(name) + " has struct_size " + std::to_string(size) + " and must have " + must};
  };
  if (size < sizeof(size_t) || size > kMostBytes || size % alignof(T) != 0)
    return refuse("that of " + std::string(type) + ", here " + std::to_string(sizeof(T)));
  const char* bytes = reinterpret_cast<const char*>(given);
  if (size > sizeof(T) && std::any_of(bytes + sizeof(T), bytes + size, [](char byte) { return byte != 0; }))
    return refuse("zeros past its first " + std::to_string(sizeof(T)) + " bytes, which are all that this version of the library knows");
  *whole = {};
  std::memcpy(whole, given, std::min(size, sizeof(T)));
  return {};
}

// A number for an enumeration of C++; one that it can't hold becomes one that none has.
template <class Enum>
Enum ValueOf(int32_t value) {
  constexpr int32_t kNone = std::numeric_limits<std::underlying_type_t<Enum>>::max();
  return static_cast<Enum>(value >= 0 && value < kNone ? value : kNone);
}

// Likewise, but refused: the library would say that the number was another.
template <class Enum>
Status Choose(int32_t value, const char* name, const char* constants, Enum* choice) {
  *choice = ValueOf<Enum>(value);
  if (static_cast<int32_t>(*choice) == value) return {};
  return {StatusCode::kInvalidOption, std::string(name) + " is " + std::to_string(value) + " and must be one of the constants " + constants};
}

template <class To, class From>
To TensorOf(const From& t) {
  To view;
  view.data = t.data;
  view.dtype = ValueOf<tercet::Dtype>(t.dtype);
  view.rank = t.rank;
  std::copy(std::begin(t.shape), std::end(t.shape), view.shape.begin());
  std::copy(std::begin(t.strides), std::end(t.strides), view.strides.begin());
  return view;
}
tercet::ConstTensor View(const tercet_const_tensor& t) { return TensorOf<tercet::ConstTensor>(t); }
tercet::Tensor View(const tercet_tensor& t) { return TensorOf<tercet::Tensor>(t); }

class Callbacks : public tercet::Executor {
 public:
  tercet_executor functions{};

  int Concurrency() const override { return static_cast<int>(std::clamp<int64_t>(functions.concurrency, 1, std::numeric_limits<int>::max())); }
  void ParallelFor(int64_t count, const std::function<void(int64_t)>& body) override {
    tercet_work work{&body};
    functions.parallel_for(functions.context, count, &work);
  }
};

struct Options : tercet::Options {
  Callbacks callbacks;
};

Status Take(const tercet_options* given, Options* taken) {
  tercet_options o;
  Status status = Whole(given, "options", "a tercet_options", &o);
  if (status.ok()) status = Choose(o.rule, "rule", "TERCET_RULE_...", &taken->rule);
  if (status.ok()) status = Choose(o.form, "form", "TERCET_FORM_...", &taken->form);
  if (status.ok()) status = Choose(o.feature_map, "feature_map", "TERCET_FEATURE_MAP_...", &taken->feature_map);
  if (status.ok() && o.executor != nullptr) {
    status = Whole(o.executor, "executor", "a tercet_executor", &taken->callbacks.functions);
    if (status.ok() && taken->callbacks.functions.parallel_for == nullptr) status = NotNull(nullptr, "parallel_for of the executor", "a function");
    taken->executor = &taken->callbacks;
  }
  if (!status.ok()) return status;
  taken->chunk = o.chunk;
  if (o.scale != nullptr) taken->scale = *o.scale;
  if (o.eps != nullptr) taken->eps = *o.eps;
  taken->normalize = o.normalize != 0;
  taken->check_values = o.skip_check_values == 0;
  taken->threads = o.threads;
  if (o.table_limit != 0) taken->table_limit = o.table_limit;
  if (o.target != nullptr) taken->target = o.target;
  taken->workspace = {o.workspace.data, o.workspace.bytes};
  return {};
}

Status Take(const tercet_inputs* given, tercet::Inputs* taken) {
  tercet_inputs in;
  if (Status status = Whole(given, "inputs", "a tercet_inputs", &in); !status.ok()) return status;
  *taken = {View(in.q),       View(in.k),     View(in.v),     View(in.log_decay),     View(in.beta),
            View(in.remove),  View(in.write), View(in.bonus), View(in.initial_state), View(in.initial_key_sum),
            View(in.offsets), View(in.valid)};
  return {};
}

Status Take(const tercet_outputs* given, tercet::Outputs* taken) {
  tercet_outputs out;
  if (Status status = Whole(given, "outputs", "a tercet_outputs", &out); !status.ok()) return status;
  *taken = {View(out.out), View(out.final_state), View(out.final_key_sum), {out.saved.data, out.saved.bytes}};
  return {};
}

Status Take(const tercet_output_gradients* given, tercet::OutputGradients* taken) {
  tercet_output_gradients d;
  if (Status status = Whole(given, "given", "a tercet_output_gradients", &d); !status.ok()) return status;
  *taken = {View(d.out), View(d.final_state), View(d.final_key_sum), {d.saved.data, d.saved.bytes}};
  return {};
}

Status Take(const tercet_gradients* given, tercet::Gradients* taken) {
  tercet_gradients d;
  if (Status status = Whole(given, "wanted", "a tercet_gradients", &d); !status.ok()) return status;
  *taken = {View(d.q),      View(d.k),     View(d.v),     View(d.log_decay),     View(d.beta),
            View(d.remove), View(d.write), View(d.bonus), View(d.initial_state), View(d.initial_key_sum),
            d.scale};
  return {};
}

Status Take(const tercet_options* options, const tercet_inputs* inputs, Options* o, tercet::Inputs* in) {
  Status status = Take(options, o);
  return status.ok() ? Take(inputs, in) : status;
}

// ---- Views and names ------------------------------------------------------------------------------------------------------------------------

template <class T, class Data>
T Dense(Data* data, tercet_dtype dtype, int32_t rank, const int64_t* shape) {
  T view{};
  view.data = data;
  view.dtype = dtype;
  view.rank = rank;
  int64_t stride = 1;
  for (int32_t axis = std::min(rank, tercet::kMaxRank) - 1; axis >= 0; --axis) {
    view.shape[axis] = shape != nullptr ? shape[axis] : -1;
    view.strides[axis] = stride;
    stride = static_cast<int64_t>(static_cast<uint64_t>(stride) * static_cast<uint64_t>(view.shape[axis]));  // as in tercet::View
  }
  return view;
}

// The library's names are literals, and so end in a zero.
template <class Enum>
const char* NameOf(int32_t value) {
  try {
    return Name(ValueOf<Enum>(value)).data();
  } catch (...) {
    return "unknown";
  }
}

template <class Enum>
int32_t FromName(const char* name, std::optional<Enum> (*find)(std::string_view)) {
  try {
    const std::optional<Enum> found = name != nullptr ? find(name) : std::nullopt;
    return found ? static_cast<int32_t>(*found) : -1;
  } catch (...) {
    return -1;
  }
}

// The names that are handed out.
const std::vector<std::string>& Targets() {
  static const std::vector<std::string> targets = tercet::Targets();
  return targets;
}

}  // namespace

tercet_const_tensor tercet_const_view(const void* data, tercet_dtype dtype, int32_t rank, const int64_t* shape) {
  return Dense<tercet_const_tensor>(data, dtype, rank, shape);
}
tercet_tensor tercet_view(void* data, tercet_dtype dtype, int32_t rank, const int64_t* shape) {
  return Dense<tercet_tensor>(data, dtype, rank, shape);
}

const tercet_rule_info* tercet_info(tercet_rule rule) {
  try {
    static const std::vector<tercet_rule_info> infos = [] {
      std::vector<tercet_rule_info> list;
      for (const tercet::RuleInfo& info : tercet::Rules())
        list.push_back({static_cast<tercet_rule>(info.rule), info.takes_beta, info.takes_remove_and_write, info.takes_bonus, info.can_normalize,
                        info.default_scale_is_one, info.name.data(), info.equation.data(), info.also_known_as.data(), info.log_decay_layout.data()});
      return list;
    }();
    return rule >= 0 && static_cast<size_t>(rule) < infos.size() ? &infos[static_cast<size_t>(rule)] : nullptr;
  } catch (...) {
    return nullptr;
  }
}

const char* tercet_rule_name(tercet_rule rule) { return NameOf<tercet::Rule>(rule); }
const char* tercet_form_name(tercet_form form) { return NameOf<tercet::Form>(form); }
const char* tercet_feature_map_name(tercet_feature_map map) { return NameOf<tercet::FeatureMap>(map); }
const char* tercet_dtype_name(tercet_dtype dtype) { return NameOf<tercet::Dtype>(dtype); }
tercet_rule tercet_rule_from_name(const char* name) { return FromName(name, tercet::RuleFromName); }
tercet_form tercet_form_from_name(const char* name) { return FromName(name, tercet::FormFromName); }
tercet_feature_map tercet_feature_map_from_name(const char* name) { return FromName(name, tercet::FeatureMapFromName); }

void tercet_run_piece(tercet_work* work, int64_t piece) {
  if (work != nullptr) (*work->body)(piece);
}

tercet_code tercet_attend(const tercet_options* options, const tercet_inputs* inputs, const tercet_outputs* outputs, tercet_message* message) {
  return Say(message, [&] {
    Options o;
    tercet::Inputs in;
    tercet::Outputs out;
    Status status = Take(options, inputs, &o, &in);
    if (status.ok()) status = Take(outputs, &out);
    return status.ok() ? tercet::Attend(o, in, out) : status;
  });
}

tercet_code tercet_workspace_bytes(const tercet_options* options, const tercet_inputs* inputs, const tercet_outputs* outputs, int64_t* bytes,
                                   tercet_message* message) {
  return Say(message, [&] {
    Options o;
    tercet::Inputs in;
    tercet::Outputs out;
    Status status = Take(options, inputs, &o, &in);
    if (status.ok()) status = Take(outputs, &out);
    if (status.ok()) status = NotNull(bytes, "bytes", "an int64_t");
    return status.ok() ? tercet::WorkspaceBytes(o, in, out, bytes) : status;
  });
}

tercet_code tercet_saved_bytes(const tercet_options* options, const tercet_inputs* inputs, int64_t* bytes, tercet_message* message) {
  return Say(message, [&] {
    Options o;
    tercet::Inputs in;
    Status status = Take(options, inputs, &o, &in);
    if (status.ok()) status = NotNull(bytes, "bytes", "an int64_t");
    return status.ok() ? tercet::SavedBytes(o, in, bytes) : status;
  });
}

tercet_code tercet_attend_gradient(const tercet_options* options, const tercet_inputs* inputs, const tercet_output_gradients* given,
                                   const tercet_gradients* wanted, tercet_message* message) {
  return Say(message, [&] {
    Options o;
    tercet::Inputs in;
    tercet::OutputGradients from;
    tercet::Gradients to;
    Status status = Take(options, inputs, &o, &in);
    if (status.ok()) status = Take(given, &from);
    if (status.ok()) status = Take(wanted, &to);
    return status.ok() ? tercet::AttendGradient(o, in, from, to) : status;
  });
}

tercet_code tercet_gradient_workspace_bytes(const tercet_options* options, const tercet_inputs* inputs, const tercet_output_gradients* given,
                                            const tercet_gradients* wanted, int64_t* bytes, tercet_message* message) {
  return Say(message, [&] {
    Options o;
    tercet::Inputs in;
    tercet::OutputGradients from;
    tercet::Gradients to;
    Status status = Take(options, inputs, &o, &in);
    if (status.ok()) status = Take(given, &from);
    if (status.ok()) status = Take(wanted, &to);
    if (status.ok()) status = NotNull(bytes, "bytes", "an int64_t");
    return status.ok() ? tercet::GradientWorkspaceBytes(o, in, from, to, bytes) : status;
  });
}

const char* tercet_target(int32_t index) {
  try {
    return index >= 0 && static_cast<size_t>(index) < Targets().size() ? Targets()[static_cast<size_t>(index)].c_str() : nullptr;
  } catch (...) {
    return nullptr;
  }
}

tercet_code tercet_choose_target(const char* option, const char** name, tercet_message* message) {
  return Say(message, [&] {
    std::string chosen;
    Status status = NotNull(name, "name", "a const char*");
    if (status.ok()) status = tercet::ChooseTarget(option != nullptr ? option : "", &chosen);
    if (status.ok()) *name = std::find(Targets().begin(), Targets().end(), chosen)->c_str();  // all that can be chosen are listed
    return status;
  });
}

int32_t tercet_default_concurrency(void) {
  try {
    return tercet::DefaultConcurrency();
  } catch (...) {
    return 1;
  }
}

const char* tercet_version(void) { return tercet::Version().data(); }
