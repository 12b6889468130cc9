// NumPy's .npy: a magic word, a version, the length of a Python dictionary, the dictionary, the data. Versions 1 to 3 are read, 1 is written.
// Fortran order and big-endian numbers are turned into row-major native ones. Not read: structured and object dtypes, and any that is not listed
// below; bf16 is none of NumPy's. Source: NumPy's documentation of numpy.lib.format.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "src/io/parts.hpp"

namespace tercet::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kMaxHead = 1 << 16;  // a dictionary with 64 axes of 19 digits is far below it

struct NpyDtype {
  std::string_view descr;
  Dtype dtype;
  bool big_endian;
};
// The first entry of a dtype is the one that is written.
constexpr NpyDtype kDtypes[] = {
    {"<f2", Dtype::kF16, false}, {"<f4", Dtype::kF32, false},  {"<f8", Dtype::kF64, false},  {"<i4", Dtype::kI32, false},
    {"<i8", Dtype::kI64, false}, {"|b1", Dtype::kBool, false}, {"|u1", Dtype::kBool, false}, {">f2", Dtype::kF16, true},
    {">f4", Dtype::kF32, true},  {">f8", Dtype::kF64, true},   {">i4", Dtype::kI32, true},   {">i8", Dtype::kI64, true},
};
constexpr std::string_view kAreRead = "f2, f4, f8, i4, i8, b1 and u1 are read";

// The few Python literals a head may hold. A false answer leaves `fault` with the sentence, where there is one better than the general.
class Literal {
 public:
  explicit Literal(std::string_view text) : text_(text) {}

  std::string fault;

  bool Take(char c) {
    SkipSpace();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool AtEnd() {
    SkipSpace();
    return at_ == text_.size();
  }
  bool String(std::string_view* value) {
    SkipSpace();
    if (at_ >= text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) return false;
    const size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) return false;
    *value = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return true;
  }
  bool Bool(bool* value) {
    SkipSpace();
    for (const std::string_view word : {"True", "False"}) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      *value = word == "True";
      return true;
    }
    return false;
  }
  bool Shape(std::vector<int64_t>* shape) {
    if (!Take('(')) return false;
    bool comma = true;
    while (!Take(')')) {
      int64_t size = 0;
      if (!comma || !Size(&size)) return false;
      if (shape->size() == kMaxAxes) {
        fault = "its shape has more than " + std::to_string(kMaxAxes) + " axes";
        return false;
      }
      shape->push_back(size);
      comma = Take(',');
    }
    // (3) is a number in Python; a tuple of one has a comma.
    return shape->size() != 1 || comma;
  }

 private:
  void SkipSpace() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
  }
  bool Size(int64_t* size) {
    SkipSpace();
    if (at_ < text_.size() && text_[at_] == '-') {
      fault = "its shape has a negative size";
      return false;
    }
    const size_t start = at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      const int64_t digit = text_[at_] - '0';
      if (*size > (std::numeric_limits<int64_t>::max() - digit) / 10) {
        fault = "its shape has a size that does not fit in 63 bits";
        return false;
      }
      *size = *size * 10 + digit;
    }
    if (at_ == start) return false;
    if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote its long numbers so
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
};

// Element i of the row-major order lies in the file at the Fortran-order place of the same index.
std::vector<std::byte> FromFortranOrder(const std::vector<int64_t>& shape, int64_t element, const std::vector<std::byte>& data) {
  const size_t rank = shape.size();
  std::array<int64_t, kMaxAxes> strides{}, index{};
  int64_t stride = element;
  for (size_t axis = 0; axis < rank; ++axis) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  std::vector<std::byte> out(data.size());
  int64_t from = 0;
  for (size_t to = 0; to < out.size(); to += element) {
    std::memcpy(&out[to], &data[from], element);
    for (size_t axis = rank; axis-- > 0;) {
      from += strides[axis];
      if (++index[axis] < shape[axis]) break;
      from -= strides[axis] * shape[axis];
      index[axis] = 0;
    }
  }
  return out;
}

}  // namespace

Status NpyHeadSize(std::string_view prelude, std::string_view what, size_t* size) {
  if (prelude.substr(0, kMagic.size()) != kMagic.substr(0, prelude.size()) || prelude.empty())
    return Refuse(StatusCode::kValue, what, "it is no .npy file: it does not begin with \\x93NUMPY");
  if (prelude.size() >= kMagic.size() + 2) {
    const int major = static_cast<unsigned char>(prelude[6]), minor = static_cast<unsigned char>(prelude[7]);
    if (major < 1 || major > 3 || minor != 0)
      return Refuse(StatusCode::kValue, what,
                    "its .npy version is " + std::to_string(major) + "." + std::to_string(minor) + "; 1.0, 2.0 and 3.0 are read");
    const size_t digits = major == 1 ? 2 : 4;
    if (prelude.size() >= 8 + digits) {
      const uint64_t length = LittleEndian(prelude.substr(8, digits));
      if (length > kMaxHead)
        return Refuse(StatusCode::kValue, what,
                      "its header claims " + Bytes(length) + ", more than the " + std::to_string(kMaxHead) + " that are read");
      *size = 8 + digits + static_cast<size_t>(length);
      return {};
    }
  }
  return Refuse(StatusCode::kValue, what, "it ends inside its header, after " + Bytes(prelude.size()));
}

Status ParseNpyHead(std::string_view head, std::string_view what, NpyLayout* layout) {
  Literal literal(head.substr(head[6] == 1 ? 10 : 12));
  const auto malformed = [&] {
    const std::string general = "its header is not a dictionary with the keys descr, fortran_order and shape";
    return Refuse(StatusCode::kValue, what, literal.fault.empty() ? general : literal.fault);
  };
  bool has_descr = false, has_order = false, has_shape = false;
  std::string_view descr;
  if (!literal.Take('{')) return malformed();
  for (bool comma = true; !literal.Take('}'); comma = literal.Take(',')) {
    std::string_view key;
    if (!comma || !literal.String(&key) || !literal.Take(':')) return malformed();
    bool* has = key == "descr" ? &has_descr : key == "fortran_order" ? &has_order : key == "shape" ? &has_shape : nullptr;
    if (has == nullptr)
      return Refuse(StatusCode::kValue, what, "its header has the key " + Quoted(key) + "; it must have descr, fortran_order and shape");
    if (*has) return Refuse(StatusCode::kValue, what, "its header has the key " + Quoted(key) + " twice");
    *has = true;
    if (has == &has_descr) {
      if (literal.Take('[')) return Refuse(StatusCode::kDtype, what, "its dtype is a structured one; " + std::string(kAreRead));
      if (!literal.String(&descr)) return malformed();
    } else if (has == &has_order) {
      if (!literal.Bool(&layout->fortran_order)) return malformed();
    } else if (!literal.Shape(&layout->shape)) {
      return malformed();
    }
  }
  if (!has_descr || !has_order || !has_shape || !literal.AtEnd()) return malformed();

  const NpyDtype* known = std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const NpyDtype& d) { return d.descr == descr; });
  if (descr == "<V2" || descr == "|V2")
    return Refuse(StatusCode::kDtype, what,
                  "its dtype is " + Quoted(descr) + ", two bytes without a meaning, which is how bf16 is written for want of a dtype in NumPy; " +
                      std::string(kAreRead) + ", and bf16 from a .safetensors file");
  if (known == std::end(kDtypes)) return Refuse(StatusCode::kDtype, what, "its dtype is " + Quoted(descr) + "; " + std::string(kAreRead));
  layout->dtype = known->dtype;
  layout->big_endian = known->big_endian;
  layout->data_size = ByteSize(layout->shape, layout->dtype);
  if (layout->data_size < 0)
    return Refuse(StatusCode::kShape, what, "its shape is " + ShapeText(layout->shape) + ", whose size in bytes does not fit in 63 bits");
  return {};
}

Array NpyArray(const NpyLayout& layout, std::vector<std::byte> data) {
  const int64_t element = contract::SizeOf(layout.dtype);
  if (layout.big_endian)
    for (size_t i = 0; i < data.size(); i += element) std::reverse(&data[i], &data[i] + element);
  if (layout.fortran_order && layout.shape.size() > 1) data = FromFortranOrder(layout.shape, element, data);
  Array array{layout.dtype, layout.shape, std::move(data)};
  Normalize(&array);
  return array;
}

Status ReadNpy(std::string_view bytes, std::string_view what, Array* array) {
  return Guarded(what, [&]() -> Status {
    size_t head = 0;
    if (Status status = NpyHeadSize(bytes.substr(0, kNpyPrelude), what, &head); !status.ok()) return status;
    if (bytes.size() < head)
      return Refuse(StatusCode::kValue, what,
                    "it ends inside its header, which claims " + Bytes(head) + " of the file's " + std::to_string(bytes.size()));
    NpyLayout layout;
    if (Status status = ParseNpyHead(bytes.substr(0, head), what, &layout); !status.ok()) return status;
    const std::string_view data = bytes.substr(head);
    if (data.size() != static_cast<uint64_t>(layout.data_size))
      return Refuse(StatusCode::kShape, what,
                    "it holds " + Bytes(data.size()) + " of data, but its shape " + ShapeText(layout.shape) + " means " +
                        Bytes(static_cast<uint64_t>(layout.data_size)));
    const auto* first = reinterpret_cast<const std::byte*>(data.data());
    *array = NpyArray(layout, std::vector<std::byte>(first, first + data.size()));
    return {};
  });
}

std::string NpyHead(const Array& array) {
  std::string dictionary = "{'descr': '";
  dictionary += std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const NpyDtype& d) { return d.dtype == array.dtype; })->descr;
  dictionary += "', 'fortran_order': False, 'shape': (";
  for (const int64_t size : array.shape) dictionary += std::to_string(size) + (array.shape.size() == 1 ? "," : ", ");
  if (array.shape.size() > 1) dictionary.resize(dictionary.size() - 2);
  dictionary += "), }";
  // The data begins at a multiple of 64, as NumPy has it.
  const size_t unpadded = 10 + dictionary.size() + 1;
  dictionary.append((64 - unpadded % 64) % 64, ' ');
  dictionary += '\n';
  std::string head(kMagic);
  head += {'\1', '\0', static_cast<char>(dictionary.size() & 255), static_cast<char>(dictionary.size() >> 8)};
  return head + dictionary;
}

}  // namespace tercet::io
