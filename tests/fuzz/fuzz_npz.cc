// Feeds any bytes to the reader of .npz files.
#include "tests/fuzz/check.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tercet::io::File file;
  const tercet::Status status = tercet::io::ReadNpz({reinterpret_cast<const char*>(data), size}, "f", &file);
  tercet::io::CheckAnswer(status, file);
  return 0;
}
