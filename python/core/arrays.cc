#include "python/core/arrays.hpp"

#include <nanobind/stl/string.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace tercet::python {
namespace {

// DLPack's table of C functions, which PyTorch 2.10 and later hang on their tensors' type: a view costs a tenth of a microsecond by it and three
// otherwise. Layout: dlpack.h of DLPack 1.3, Apache-2.0, whose structures are fixed within a major version.
struct Managed {
  uint32_t major, minor;
  void* context;
  void (*deleter)(Managed*);
  uint64_t flags;
  nb::dlpack::dltensor tensor;
};
struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  int (*allocate)(nb::dlpack::dltensor* prototype, Managed** out, void* context, void (*set_error)(void*, const char* kind, const char* message));
  int (*managed_from_object)(void* object, Managed** out);
  int (*object_from_managed)(Managed* managed, void** object);
  int (*borrow)(void* object, nb::dlpack::dltensor* out);  // may be null
  int (*current_work_stream)(int32_t device_type, int32_t device, void** stream);
};

struct TypeInfo {
  Library library = Library::kNumPy;
  const ExchangeApi* api = nullptr;
};

// Held for the life of the process, as the types that it knows are.
std::unordered_map<PyObject*, TypeInfo>& Types() {
  static auto* types = new std::unordered_map<PyObject*, TypeInfo>;
  return *types;
}

std::string TypeName(nb::handle object) {
  nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
  std::string module = nb::cast<std::string>(nb::str(type.attr("__module__")));
  const std::string name = nb::cast<std::string>(nb::str(type.attr("__qualname__")));
  return module == "builtins" ? name : module + "." + name;
}

nb::object Loaded(const char* module) { return nb::steal<nb::object>(PyObject_CallMethod(PyImport_GetModuleDict(), "get", "s", module)); }

// The table of a tensor type. Types that PyTorch's own dispatch looks into (fake, functional and the like) have other insides and get none.
const ExchangeApi* ApiOf(nb::handle type, nb::handle torch) {
  if (!type.is(torch.attr("Tensor")) && !type.is(torch.attr("nn").attr("Parameter"))) return nullptr;
  if (!nb::hasattr(type, "__dlpack_c_exchange_api__")) return nullptr;
  const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api != nullptr && api->major > 1) api = api->previous;
  return api != nullptr && api->major == 1 && api->borrow != nullptr ? api : nullptr;
}

const TypeInfo& InfoOf(nb::handle array) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()));
  auto& types = Types();
  if (const auto known = types.find(type); known != types.end()) return known->second;
  TypeInfo info;
  if (const nb::object torch = Loaded("torch"); !torch.is_none() && nb::hasattr(torch, "nn") && nb::isinstance(array, torch.attr("Tensor"))) {
    info.library = Library::kTorch;
    info.api = ApiOf(type, torch);
  } else if (const nb::object jax = Loaded("jax"); !jax.is_none() && nb::hasattr(jax, "Array") && nb::isinstance(array, jax.attr("Array"))) {
    info.library = Library::kJax;
  }
  Py_INCREF(type);
  return types.emplace(type, info).first->second;
}

// An attribute for the life of the process. Looked up by name it would cost a string a call, and its hash.
nb::handle Kept(nb::handle owner, const char* name) { return nb::object(owner.attr(name)).release(); }

// What a call asks of torch itself.
struct Torch {
  nb::handle module = nb::object(nb::module_::import_("torch")).release();
  nb::handle is_neg = Kept(module.attr("Tensor"), "is_neg"), is_grad_enabled = Kept(module, "is_grad_enabled");
  nb::handle is_tracing = Kept(module.attr("_C"), "_is_tracing"), forward_ad = Kept(module.attr("autograd"), "forward_ad");
  nb::handle get_num_threads = Kept(module, "get_num_threads");
  nb::handle current_level = nb::object(nb::str("_current_level")).release(), mark = nb::object(nb::str("_dynamo_static_input_type")).release();
};
const Torch& TheTorch() {
  static const auto* torch = new Torch;
  return *torch;
}

// What a function says that takes nothing, or one thing.
nb::object Ask(nb::handle function, nb::handle of = {}) {
  nb::object answer = nb::steal<nb::object>(PyObject_CallFunctionObjArgs(function.ptr(), of.ptr(), nullptr));
  if (!answer.is_valid()) nb::raise_python_error();
  return answer;
}

[[noreturn]] void Refuse(const std::string& sentence) { throw nb::type_error(sentence.c_str()); }

constexpr const char* kTaken = "an array on the CPU of NumPy, PyTorch or JAX, or one that speaks DLPack";

// float32 and the like, as NumPy and PyTorch call them.
std::string DtypeName(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code) { return dtype.code == static_cast<uint8_t>(code); };
  if (is(Code::Bool)) return "bool";
  const char* kind = is(Code::Int)       ? "int"
                     : is(Code::UInt)    ? "uint"
                     : is(Code::Float)   ? "float"
                     : is(Code::Bfloat)  ? "bfloat"
                     : is(Code::Complex) ? "complex"
                                         : "a foreign kind of ";
  return kind + std::to_string(dtype.bits);
}

std::optional<Dtype> FromDlpack(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) { return dtype.lanes == 1 && dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits; };
  if (is(Code::Float, 32)) return Dtype::kF32;
  if (is(Code::Float, 64)) return Dtype::kF64;
  if (is(Code::Bfloat, 16)) return Dtype::kBF16;
  if (is(Code::Float, 16)) return Dtype::kF16;
  if (is(Code::Int, 32)) return Dtype::kI32;
  if (is(Code::Int, 64)) return Dtype::kI64;
  if (is(Code::Bool, 8) || is(Code::UInt, 8)) return Dtype::kBool;
  return std::nullopt;
}

nb::dlpack::dtype ToDlpack(Dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto make = [](Code code, int bits) { return nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1}; };
  switch (dtype) {
    case Dtype::kF32:
      return make(Code::Float, 32);
    case Dtype::kF64:
      return make(Code::Float, 64);
    case Dtype::kBF16:
      return make(Code::Bfloat, 16);
    case Dtype::kF16:
      return make(Code::Float, 16);
    case Dtype::kI32:
      return make(Code::Int, 32);
    case Dtype::kI64:
      return make(Code::Int, 64);
    case Dtype::kBool:
      break;
  }
  return make(Code::UInt, 8);
}

// A view of DLPack's description. Rank 0 means "not given" to the library, so an array without axes is refused here.
Tensor ViewOf(const char* name, const nb::dlpack::dltensor& tensor, std::optional<Dtype> dtype) {
  constexpr int32_t kCpu = nb::device::cpu::value, kCudaHost = nb::device::cuda_host::value;
  if (tensor.device.device_type != kCpu && tensor.device.device_type != kCudaHost)
    Refuse(std::string(name) + " is on another device (DLPack's type " + std::to_string(tensor.device.device_type) + ") and must be " + kTaken);
  if (!dtype) dtype = FromDlpack(tensor.dtype);
  if (!dtype)
    Refuse(std::string(name) + " is of dtype " + DtypeName(tensor.dtype) +
           " and must be of float32, float64, bfloat16 or float16 (offsets of int32 or int64, valid of bool)");
  if (tensor.ndim == 0) throw nb::value_error((std::string(name) + " has no axes, and there is no input of one number").c_str());
  Tensor view;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.dtype = *dtype;
  view.rank = tensor.ndim;
  int64_t stride = 1;  // where DLPack leaves strides out: then the numbers are all there, and their count is one
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    if (axis < kMaxRank) {
      view.shape[static_cast<size_t>(axis)] = tensor.shape[axis];
      view.strides[static_cast<size_t>(axis)] = tensor.strides != nullptr ? tensor.strides[axis] : stride;
    }
    if (tensor.strides == nullptr) stride *= tensor.shape[axis];
  }
  return view;
}

// A view by the generic road: DLPack's capsules, or a buffer. What Python says against it goes with the refusal.
template <class Array>
Tensor ViewByProtocol(const char* name, nb::handle array, std::optional<Dtype> dtype, Held* held) {
  Array view;
  if (!nb::try_cast(array, view)) return Tensor{};
  nb::dlpack::dltensor tensor;
  tensor.data = const_cast<void*>(static_cast<const void*>(view.data()));
  tensor.device = {view.device_type(), view.device_id()};
  tensor.ndim = static_cast<int32_t>(view.ndim());
  tensor.dtype = view.dtype();
  tensor.shape = const_cast<int64_t*>(view.shape_ptr());
  tensor.strides = const_cast<int64_t*>(view.stride_ptr());
  const Tensor result = ViewOf(name, tensor, dtype);
  if constexpr (std::is_same_v<Array, nb::ndarray<>>)
    held->written.push_back(std::move(view));
  else
    held->read.push_back(std::move(view));
  return result;
}

template <class Array>
Tensor View(const char* name, nb::handle array, Held* held) {
  constexpr bool kWrites = !std::is_same_v<Array, nb::ndarray<nb::ro>>;
  if (array.is_none()) return {};
  const TypeInfo& info = InfoOf(array);
  if (kWrites && info.library == Library::kJax) Refuse(std::string(name) + " is a JAX array, which can't be written to");
  nb::object exported = nb::borrow(array);
  std::optional<Dtype> dtype;
  if (info.library == Library::kTorch) {
    // A tensor with its negative bit set (x.conj().imag) holds the negatives of its numbers.
    if (!Ask(TheTorch().is_neg, array).is(Py_False)) {
      if (kWrites) Refuse(std::string(name) + " is a view that negates and can't be written to; resolve_neg() makes a plain tensor");
      exported = array.attr("resolve_neg")();
    }
    if (info.api != nullptr && exported.is(array)) {
      nb::dlpack::dltensor tensor;
      if (info.api->borrow(array.ptr(), &tensor) == 0) return ViewOf(name, tensor, std::nullopt);
      nb::python_error error;
      const std::string why = nb::cast<std::string>(nb::str(error.value()));
      Refuse(std::string(name) + " is not " + kTaken + ": " + why.substr(0, why.find('\n')));
    }
    exported = exported.attr("detach")();  // a tensor that requires a gradient does not export itself
  }
  if (const Tensor view = ViewByProtocol<Array>(name, exported, dtype, held); view.given()) return view;
  // NumPy has no bfloat16 of its own; that of ml_dtypes neither exports itself nor has a buffer, but its bits do.
  if (nb::hasattr(array, "dtype") && nb::hasattr(array, "view")) {
    const nb::object array_dtype = array.attr("dtype");
    if (nb::hasattr(array_dtype, "name") && nb::cast<std::string>(nb::str(array_dtype.attr("name"))) == "bfloat16") {
      if (const Tensor view = ViewByProtocol<Array>(name, array.attr("view")("uint16"), Dtype::kBF16, held); view.given()) return view;
    } else if (kWrites && nb::hasattr(array, "flags") && nb::hasattr(array.attr("flags"), "writeable") &&
               !nb::cast<bool>(array.attr("flags").attr("writeable"))) {
      throw nb::value_error((std::string(name) + " is read-only and must be an array to write to").c_str());
    } else if (info.library != Library::kTorch) {
      Refuse(std::string(name) + " is a " + TypeName(array) + " of dtype " + nb::cast<std::string>(nb::str(array_dtype)) + " and must be " + kTaken +
             ", of float32, float64, bfloat16 or float16 in this machine's byte order, with strides of whole elements");
    }
  }
  Refuse(std::string(name) + " is a " + TypeName(array) + " and must be " + kTaken);
}

// Objects looked up once and kept for the life of the process.
nb::handle NumPyEmpty() {
  static const nb::object* empty = new nb::object(nb::module_::import_("numpy").attr("empty"));
  return *empty;
}

// What ml_dtypes, NumPy and PyTorch call the dtypes of new arrays; one of bytes is made as kBool.
constexpr const char* kNames[] = {"float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8"};

nb::object NumPyDtype(Dtype dtype) {
  static auto* known = new std::array<nb::object, std::size(kNames)>;
  nb::object& object = (*known)[static_cast<size_t>(dtype)];
  if (object.is_valid()) return object;
  const char* name = kNames[static_cast<size_t>(dtype)];
  const nb::module_ numpy = nb::module_::import_("numpy");
  object = numpy.attr("dtype")(dtype == Dtype::kBF16 ? nb::module_::import_("ml_dtypes").attr(name) : numpy.attr(name));
  return object;
}

// Asks for large pages for memory that nobody has touched yet, as NumPy does for its own: the kernel then hands it out in 2 MiB instead of 4 KiB
// (forward with kept states, H = 32, K = V = 128, 2048 tokens: 1690 instead of 2290 ns a token and head). An advice: whether it is taken does not
// matter.
void AdviseLargePages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr int64_t kWorth = int64_t{4} << 20;
  if (bytes < kWorth) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

void SetError(void*, const char* kind, const char* message) {
  const nb::gil_scoped_acquire acquire;
  PyErr_SetString(std::string_view(kind) == "MemoryError" ? PyExc_MemoryError : PyExc_RuntimeError, message);
}

NewArray EmptyTorch(Dtype dtype, int rank, const std::array<int64_t, kMaxRank>& shape, Held* held) {
  static const nb::object* torch = new nb::object(nb::module_::import_("torch"));
  std::array<int64_t, kMaxRank> sizes = shape;
  static const ExchangeApi* api = ApiOf(torch->attr("Tensor"), *torch);
  if (api == nullptr) {
    nb::list axes;
    for (int axis = 0; axis < rank; ++axis) axes.append(shape[static_cast<size_t>(axis)]);
    NewArray made{torch->attr("empty")(axes, nb::arg("dtype") = torch->attr(kNames[static_cast<size_t>(dtype)])), {}};
    made.view = Write("a new tensor", made.array, held);
    return made;
  }
  nb::dlpack::dltensor prototype;
  prototype.device = {nb::device::cpu::value, 0};
  prototype.ndim = rank;
  prototype.dtype = ToDlpack(dtype);
  prototype.shape = sizes.data();
  Managed* managed = nullptr;
  if (api->allocate(&prototype, &managed, nullptr, &SetError) != 0) nb::raise_python_error();
  const nb::dlpack::dltensor tensor = managed->tensor;
  void* object = nullptr;
  NewArray made;
  made.view = ViewOf("a new tensor", tensor, dtype);
  int64_t bytes = ToDlpack(dtype).bits / 8;
  for (int axis = 0; axis < rank; ++axis) bytes *= sizes[static_cast<size_t>(axis)];
  AdviseLargePages(made.view.data, bytes);
  if (api->object_from_managed(managed, &object) != 0) nb::raise_python_error();
  made.array = nb::steal<nb::object>(static_cast<PyObject*>(object));
  return made;
}

}  // namespace

Library LibraryOf(nb::handle array) { return InfoOf(array).library; }

bool OnlyComputes(const nb::tuple& tensors) {
  for (const nb::handle tensor : tensors)
    if (!tensor.is_none() && InfoOf(tensor).api == nullptr) return false;
  nb::dlpack::dltensor first;
  if (tensors.size() == 0 || tensors[0].is_none() || InfoOf(tensors[0]).api->borrow(tensors[0].ptr(), &first) != 0) {
    PyErr_Clear();
    return false;
  }
  const Torch& torch = TheTorch();
  if (first.device.device_type != nb::device::cpu::value || !Ask(torch.is_grad_enabled).is(Py_False) || !Ask(torch.is_tracing).is(Py_False))
    return false;
  const nb::object level = nb::steal<nb::object>(PyObject_GetAttr(torch.forward_ad.ptr(), torch.current_level.ptr()));
  const bool none = level.is_valid() && PyLong_Check(level.ptr()) && PyLong_AsLong(level.ptr()) < 0;
  PyErr_Clear();
  return none;
}

int TorchThreads() { return nb::cast<int>(Ask(TheTorch().get_num_threads)); }

bool IsStatic(nb::handle tensor) {
  const nb::object mark = nb::steal<nb::object>(PyObject_GetAttr(tensor.ptr(), TheTorch().mark.ptr()));
  PyErr_Clear();
  return mark.is_valid();
}

ConstTensor Read(const char* name, nb::handle array, Held* held) { return View<nb::ndarray<nb::ro>>(name, array, held); }

Tensor Write(const char* name, nb::handle array, Held* held) { return View<nb::ndarray<>>(name, array, held); }

NewArray Empty(Library library, Dtype dtype, int rank, const std::array<int64_t, kMaxRank>& shape, Held* held) {
  if (library == Library::kTorch) return EmptyTorch(dtype, rank, shape, held);
  PyObject* axes = PyTuple_New(rank);
  if (axes == nullptr) nb::raise_python_error();
  const nb::object tuple = nb::steal<nb::object>(axes);
  for (int axis = 0; axis < rank; ++axis) PyTuple_SetItem(axes, axis, PyLong_FromLongLong(shape[static_cast<size_t>(axis)]));
  NewArray made;
  made.array = NumPyEmpty()(tuple, NumPyDtype(dtype));
  made.view = Write("a new array", made.array, held);
  return made;
}

NewArray EmptyBytes(Library library, int64_t bytes, Held* held) { return Empty(library, Dtype::kBool, 1, {bytes}, held); }

nb::object Finish(Library library, nb::object array) {
  if (library != Library::kJax || !array.is_valid() || array.is_none()) return array;
  static const nb::object* to_jax = new nb::object(nb::module_::import_("jax").attr("numpy").attr("asarray"));
  return (*to_jax)(array);
}

}  // namespace tercet::python
