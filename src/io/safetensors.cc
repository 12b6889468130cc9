// The .safetensors format: 8 bytes with the length of a header, the header (JSON: each tensor's dtype, shape and place, and a map of strings named
// __metadata__), the data. Read strictly: the tensors must fill the data without a gap or an overlap. Source: the format's description in
// huggingface/safetensors.
#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "src/io/parts.hpp"

namespace tercet::io {
namespace {

constexpr std::string_view kMetadata = "__metadata__";

struct SafetensorsDtype {
  std::string_view name;
  Dtype dtype;
};
// The first entry of a dtype is the one that is written.
constexpr SafetensorsDtype kDtypes[] = {
    {"BF16", Dtype::kBF16}, {"F16", Dtype::kF16}, {"F32", Dtype::kF32},   {"F64", Dtype::kF64},
    {"I32", Dtype::kI32},   {"I64", Dtype::kI64}, {"BOOL", Dtype::kBool}, {"U8", Dtype::kBool},
};

struct Entry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::vector<uint64_t> data_offsets;
};

// Takes the header as nlohmann's parser reads it. No document is built: that would lose repeated names and let a small header take much memory.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view what) : what_(what) {}

  Status status;
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;

  bool null() { return Misplaced("null"); }
  bool boolean(bool) { return Misplaced("a boolean"); }
  bool number_float(double, const std::string&) { return Misplaced("a number that is no whole number below 2^64"); }
  bool binary(std::vector<uint8_t>&) { return Misplaced("binary data"); }
  bool number_integer(int64_t) { return Misplaced("a negative number"); }
  bool number_unsigned(uint64_t value) {
    if (place_ == kShape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        return Fail(StatusCode::kShape, Tensor() + " has a size in its shape that does not fit in 63 bits");
      if (entries.back().shape.size() == kMaxAxes) return Fail(StatusCode::kShape, Tensor() + " has more than " + std::to_string(kMaxAxes) + " axes");
      entries.back().shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ != kOffsets) return Misplaced("a number");
    if (entries.back().data_offsets.size() == 2) return Fail(StatusCode::kValue, Tensor() + " has more than two data_offsets");
    entries.back().data_offsets.push_back(value);
    return true;
  }
  bool string(std::string& value) {
    if (place_ == kTensor && field_ == "dtype")
      entries.back().dtype = value;
    else if (place_ == kStrings)
      metadata[field_] = value;
    else
      return Misplaced("a string");
    return true;
  }
  bool start_object(size_t) {
    if (place_ == kOutside)
      place_ = kTop;
    else if (place_ == kTop && in_metadata_)
      place_ = kStrings;
    else if (place_ == kTop)
      place_ = kTensor;
    else
      return Misplaced("an object");
    return true;
  }
  bool key(std::string& value) {
    if (place_ == kTop) {
      in_metadata_ = value == kMetadata;
      if (in_metadata_) return std::exchange(has_metadata_, true) ? Fail(StatusCode::kValue, "its header has __metadata__ twice") : true;
      entries.emplace_back();
      entries.back().name = value;
      has_dtype_ = has_shape_ = has_offsets_ = false;
      return true;
    }
    field_ = value;
    if (place_ == kStrings) return metadata.count(value) == 0 || Fail(StatusCode::kValue, "its metadata has the key " + Quoted(value) + " twice");
    bool* has = value == "dtype" ? &has_dtype_ : value == "shape" ? &has_shape_ : value == "data_offsets" ? &has_offsets_ : nullptr;
    if (has == nullptr) return Fail(StatusCode::kValue, Tensor() + " has the key " + Quoted(value) + "; it must have dtype, shape and data_offsets");
    return std::exchange(*has, true) ? Fail(StatusCode::kValue, Tensor() + " has the key " + Quoted(value) + " twice") : true;
  }
  bool end_object() {
    if (place_ == kTensor && !(has_dtype_ && has_shape_ && has_offsets_))
      return Fail(StatusCode::kValue, Tensor() + " lacks its " + (!has_dtype_ ? "dtype" : !has_shape_ ? "shape" : "data_offsets"));
    place_ = place_ == kTop ? kOutside : kTop;
    return true;
  }
  bool start_array(size_t) {
    if (place_ == kTensor && field_ == "shape")
      place_ = kShape;
    else if (place_ == kTensor && field_ == "data_offsets")
      place_ = kOffsets;
    else
      return Misplaced("a list");
    return true;
  }
  bool end_array() {
    if (place_ == kOffsets && entries.back().data_offsets.size() != 2) return Fail(StatusCode::kValue, Tensor() + " has fewer than two data_offsets");
    place_ = kTensor;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    return Fail(StatusCode::kValue, "its header is not valid JSON (at byte " + std::to_string(position) + ")");
  }

 private:
  enum Place { kOutside, kTop, kTensor, kShape, kOffsets, kStrings };

  std::string Tensor() const { return "tensor " + Quoted(entries.back().name); }
  bool Fail(StatusCode code, const std::string& sentence) {
    status = Refuse(code, what_, sentence);
    return false;
  }
  bool Misplaced(const std::string& thing) {
    switch (place_) {
      case kOutside:
        return Fail(StatusCode::kValue, "its header is " + thing + ", but must be a JSON object");
      case kTop:
        return Fail(StatusCode::kValue, (in_metadata_ ? "__metadata__" : Tensor()) + " is " + thing + ", but must be an object");
      case kTensor:
        return Fail(StatusCode::kValue, Tensor() + " has " + thing + " as its " + field_);
      case kShape:
        return Fail(StatusCode::kShape, Tensor() + " has " + thing + " in its shape");
      case kOffsets:
        return Fail(StatusCode::kValue, Tensor() + " has " + thing + " in its data_offsets");
      case kStrings:
        return Fail(StatusCode::kValue, "its metadata " + Quoted(field_) + " is " + thing + ", but must be a string");
    }
    return false;
  }

  std::string_view what_;
  Place place_ = kOutside;
  bool in_metadata_ = false, has_metadata_ = false;  // in_metadata_: the last name at the top was __metadata__
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::string field_;  // the last key below the top
};

Status ReadTensor(const Entry& entry, std::string_view data, std::string_view what, Array* array) {
  const std::string tensor = "tensor " + Quoted(entry.name);
  const SafetensorsDtype* known =
      std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const SafetensorsDtype& d) { return d.name == entry.dtype; });
  if (known == std::end(kDtypes))
    return Refuse(StatusCode::kDtype, what, tensor + " has dtype " + Quoted(entry.dtype) + "; BF16, F16, F32, F64, I32, I64, BOOL and U8 are read");
  const int64_t size = ByteSize(entry.shape, known->dtype);
  if (size < 0)
    return Refuse(StatusCode::kShape, what, tensor + " has the shape " + ShapeText(entry.shape) + ", whose size in bytes does not fit in 63 bits");
  if (data.size() != static_cast<uint64_t>(size))
    return Refuse(StatusCode::kShape, what,
                  tensor + " has " + Bytes(data.size()) + " of data, but its shape " + ShapeText(entry.shape) + " of " + entry.dtype + " means " +
                      Bytes(static_cast<uint64_t>(size)));
  const auto* first = reinterpret_cast<const std::byte*>(data.data());
  *array = {known->dtype, entry.shape, std::vector<std::byte>(first, first + data.size())};
  Normalize(array);
  return {};
}

}  // namespace

Status ReadSafetensors(std::string_view bytes, std::string_view what, File* file) {
  return Guarded(what, [&]() -> Status {
    constexpr size_t kLength = 8;
    if (bytes.size() < kLength) return Refuse(StatusCode::kValue, what, "it has " + Bytes(bytes.size()) + ", too few for a .safetensors file");
    const uint64_t length = LittleEndian(bytes.substr(0, kLength));
    if (length > bytes.size() - kLength)
      return Refuse(StatusCode::kValue, what,
                    "its header claims " + Bytes(length) + ", but only " + std::to_string(bytes.size() - kLength) + " follow");
    const std::string_view header = bytes.substr(kLength, static_cast<size_t>(length));
    const std::string_view data = bytes.substr(kLength + header.size());
    if (header.empty() || header[0] != '{') return Refuse(StatusCode::kValue, what, "its header does not begin with {");

    HeaderReader reader(what);
    if (!nlohmann::json::sax_parse(header.begin(), header.end(), &reader)) return reader.status;

    std::vector<const Entry*> order;
    for (const Entry& entry : reader.entries) {
      const uint64_t begin = entry.data_offsets[0], end = entry.data_offsets[1];
      if (begin > end || end > data.size())
        return Refuse(StatusCode::kValue, what,
                      "tensor " + Quoted(entry.name) + " lies at " + std::to_string(begin) + " to " + std::to_string(end) + ", outside the " +
                          Bytes(data.size()) + " of data");
      order.push_back(&entry);
    }
    std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) { return a->data_offsets < b->data_offsets; });

    // The tensors lie end to end, so all of them together are no larger than the file.
    uint64_t reached = 0;
    File result;
    for (const Entry* entry : order) {
      const uint64_t begin = entry->data_offsets[0], end = entry->data_offsets[1];
      if (begin < reached) return Refuse(StatusCode::kValue, what, "tensor " + Quoted(entry->name) + " overlaps the one before it");
      if (begin > reached)
        return Refuse(StatusCode::kValue, what, "there is a gap of " + Bytes(begin - reached) + " before tensor " + Quoted(entry->name));
      reached = end;
      const auto [place, fresh] = result.arrays.try_emplace(entry->name);
      if (!fresh) return Refuse(StatusCode::kValue, what, "two tensors have the name " + Quoted(entry->name));
      if (Status status = ReadTensor(*entry, data.substr(begin, end - begin), what, &place->second); !status.ok()) return status;
    }
    if (reached != data.size()) return Refuse(StatusCode::kValue, what, Bytes(data.size() - reached) + " of data belong to no tensor");
    result.metadata = std::move(reader.metadata);
    *file = std::move(result);
    return {};
  });
}

Status SafetensorsHead(std::string_view what, const File& file, std::string* head, std::vector<const Array*>* order) {
  using Named = std::pair<const std::string, Array>;
  std::vector<const Named*> named;
  for (const Named& entry : file.arrays) named.push_back(&entry);
  // Widest elements first, so that each tensor is aligned to its own.
  std::sort(named.begin(), named.end(), [](const Named* a, const Named* b) {
    const int64_t a_size = contract::SizeOf(a->second.dtype), b_size = contract::SizeOf(b->second.dtype);
    return a_size != b_size ? a_size > b_size : a->first < b->first;
  });

  // Written by hand but for the strings: an nlohmann object allocates in its destructor, where a failure would end the program.
  std::string text = "{";
  const auto append = [&](std::initializer_list<std::string_view> parts) {
    for (const std::string_view part : parts) text += part;
  };
  const auto quoted = [](std::string_view value) { return nlohmann::json(value).dump(); };
  size_t reached = 0;
  try {
    const char* comma = "";
    if (!file.metadata.empty()) {
      append({quoted(kMetadata), ":{"});
      for (const auto& [key, value] : file.metadata) {
        append({comma, quoted(key), ":", quoted(value)});
        comma = ",";
      }
      text += '}';
    }
    for (const Named* entry : named) {
      const Array& array = entry->second;
      if (entry->first == kMetadata) return Refuse(StatusCode::kValue, what, "no tensor of a .safetensors file can be named __metadata__");
      const auto* known = std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const SafetensorsDtype& d) { return d.dtype == array.dtype; });
      append({comma, quoted(entry->first), ":{\"dtype\":\"", known->name, "\",\"shape\":["});
      comma = "";
      for (const int64_t size : array.shape) {
        append({comma, std::to_string(size)});
        comma = ",";
      }
      append({"],\"data_offsets\":[", std::to_string(reached), ",", std::to_string(reached + array.data.size()), "]}"});
      reached += array.data.size();
      comma = ",";
      order->push_back(&array);
    }
  } catch (const nlohmann::json::exception&) {
    return Refuse(StatusCode::kValue, what, "a name or the metadata is not valid UTF-8, which a .safetensors file needs");
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  head->clear();
  for (int shift = 0; shift < 64; shift += 8) *head += static_cast<char>(text.size() >> shift & 255);
  *head += text;
  return {};
}

}  // namespace tercet::io
