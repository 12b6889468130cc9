// Named arrays in files: .safetensors, .npz and .npy. Files are untrusted: whatever the bytes, a reader answers with arrays or with a sentence.
#ifndef TERCET_SRC_IO_ARRAYS_HPP_
#define TERCET_SRC_IO_ARRAYS_HPP_

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tercet/tercet.hpp"

namespace tercet::io {

// A dense row-major array that owns its bytes. Any rank: the contract refuses what the call can't take.
struct Array {
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> data;  // product(shape) elements, native byte order
};

struct File {
  std::map<std::string, Array> arrays;
  std::map<std::string, std::string> metadata;  // safetensors only
};

// Reads a .safetensors, .npz or .npy file, told apart by its ending. A .npy file gives one array named by the file's stem.
Status Read(const std::string& path, File* file);

// The readers alone, on bytes in memory, for tests and fuzzers. `what` names the bytes in sentences.
Status ReadSafetensors(std::string_view bytes, std::string_view what, File* file);
Status ReadNpz(std::string_view bytes, std::string_view what, File* file);
Status ReadNpy(std::string_view bytes, std::string_view what, Array* array);

// Writes by the ending of `path`, to a temporary name beside it that is then renamed, so that a failure leaves the old file whole.
// A .npy file takes one array exactly.
Status Write(const std::string& path, const File& file);

}  // namespace tercet::io

#endif  // TERCET_SRC_IO_ARRAYS_HPP_
