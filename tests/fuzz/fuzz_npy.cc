// Feeds any bytes to the reader of .npy files.
#include "tests/fuzz/check.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tercet::io::Array array;
  const tercet::Status status = tercet::io::ReadNpy({reinterpret_cast<const char*>(data), size}, "f", &array);
  tercet::io::File file;
  if (status.ok()) file.arrays["f"] = array;
  tercet::io::CheckAnswer(status, file);
  return 0;
}
