// What the readers and writers of the three formats share.
#include "src/io/parts.hpp"

#include <bit>
#include <limits>

namespace tercet::io {

// Every format here is little-endian, and so is every machine Tercet has code for.
static_assert(std::endian::native == std::endian::little);

namespace {

void AppendEscaped(unsigned char c, std::string* out) {
  constexpr char kDigits[] = "0123456789abcdef";
  *out += "\\x";
  *out += kDigits[c >> 4];
  *out += kDigits[c & 15];
}

}  // namespace

Status Refuse(StatusCode code, std::string_view what, std::string_view sentence) {
  std::string message;
  // `what` is the caller's own text and may be any language's; only what would break the line is escaped.
  for (const char c : what) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f)
      AppendEscaped(byte, &message);
    else
      message += c;
  }
  message += ": ";
  message += sentence;
  return {code, message};
}

std::string Quoted(std::string_view text) {
  constexpr size_t kLongest = 80;
  std::string out = "\"";
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) {
      AppendEscaped(byte, &out);
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  out += text.size() > kLongest ? "...\"" : "\"";
  return out;
}

std::string Bytes(uint64_t count) { return std::to_string(count) + (count == 1 ? " byte" : " bytes"); }

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (const int64_t size : shape) {
    if (out.size() > 1) out += ", ";
    out += std::to_string(size);
  }
  return out + "]";
}

int64_t ByteSize(const std::vector<int64_t>& shape, Dtype dtype) {
  int64_t bytes = contract::SizeOf(dtype);
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return -1;
    if (size == 0)
      empty = true;
    else if (bytes > std::numeric_limits<int64_t>::max() / size)
      return -1;
    else
      bytes *= size;
  }
  return empty ? 0 : bytes;
}

uint64_t LittleEndian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

void Normalize(Array* array) {
  if (array->dtype != Dtype::kBool) return;
  for (std::byte& value : array->data) value = std::byte{value != std::byte{0}};
}

}  // namespace tercet::io
