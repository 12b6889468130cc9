// What the readers and writers of the three formats share. For src/io alone; arrays.hpp is the face.
#ifndef TERCET_SRC_IO_PARTS_HPP_
#define TERCET_SRC_IO_PARTS_HPP_

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "src/contract/tensor.hpp"
#include "src/io/arrays.hpp"

namespace tercet::io {

// More axes than NumPy allows are no array; with this bound a shape is short enough to copy and to print.
inline constexpr size_t kMaxAxes = 64;

// "what: sentence".
Status Refuse(StatusCode code, std::string_view what, std::string_view sentence);

// Text from a file, quoted for a sentence: cut when long, and whatever is not printable ASCII escaped, so that it can't forge lines or drive a
// terminal.
std::string Quoted(std::string_view text);

// "1 byte", "12 bytes".
std::string Bytes(uint64_t count);

// "[2, 6, 1, 4]"
std::string ShapeText(const std::vector<int64_t>& shape);

// The bytes of an array of that shape, or -1 if a size is negative or the sizes that are not 0 multiply to more than 63 bits hold.
int64_t ByteSize(const std::vector<int64_t>& shape, Dtype dtype);

// The unsigned number that `bytes` (at most 8) is, low byte first.
uint64_t LittleEndian(std::string_view bytes);

// Makes every true byte of a bool array 1: some files hold masks as numbers.
void Normalize(Array* array);

// Runs a reader or writer; what it throws becomes a Status.
template <class Work>
Status Guarded(std::string_view what, const Work& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  } catch (const std::exception& error) {
    return Refuse(StatusCode::kInternal, what, "an unexpected error: " + Quoted(error.what()));
  }
  return Refuse(StatusCode::kOutOfMemory, what, "there is not enough memory for it");
}

// ---- .npy ---------------------------------------------------------------------------------------------------------------------------------

// What the head of a .npy file says.
struct NpyLayout {
  Dtype dtype = Dtype::kF32;
  bool big_endian = false;
  bool fortran_order = false;
  std::vector<int64_t> shape;
  int64_t data_size = 0;  // bytes that must follow the head
};

inline constexpr size_t kNpyPrelude = 12;  // bytes from which NpyHeadSize can tell

// The size of the head, from the file's first bytes (kNpyPrelude, or all if it has fewer), and what the head says. `head` is all of it.
Status NpyHeadSize(std::string_view prelude, std::string_view what, size_t* size);
Status ParseNpyHead(std::string_view head, std::string_view what, NpyLayout* layout);

// Makes an array of the data bytes as they lie in the file: native byte order, row-major.
Array NpyArray(const NpyLayout& layout, std::vector<std::byte> data);

std::string NpyHead(const Array& array);

// ---- Writing ------------------------------------------------------------------------------------------------------------------------------

// The header of a .safetensors file, and the arrays in the order in which their data follows.
Status SafetensorsHead(std::string_view what, const File& file, std::string* head, std::vector<const Array*>* order);

// Fills the empty file `path`, which will become `what`.
Status WriteNpz(const std::string& path, std::string_view what, const File& file);

}  // namespace tercet::io

#endif  // TERCET_SRC_IO_PARTS_HPP_
