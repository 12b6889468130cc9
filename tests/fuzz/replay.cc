// Runs a fuzzer once over every file of the folders given, for builds without libFuzzer: replay FOLDER...
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  int files = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream in(entry.path(), std::ios::binary);
      // A block of exactly the file's size, so that ASan sees a read past its end.
      const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
      std::vector<uint8_t> block(bytes.begin(), bytes.end());
      block.shrink_to_fit();
      std::printf("%s\n", entry.path().filename().c_str());
      std::fflush(stdout);  // the last name printed is the file that crashed
      LLVMFuzzerTestOneInput(block.data(), block.size());
      ++files;
    }
  }
  std::printf("%d files\n", files);
  return files == 0;
}
