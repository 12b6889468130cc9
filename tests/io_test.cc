// The readers and writers of .safetensors, .npy and .npz: what is written is read back, what NumPy and safetensors wrote is read right, what is
// malformed is refused by its sentence, and no bytes whatever crash a reader or make it take memory out of proportion.
#include "src/io/arrays.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "src/contract/half.hpp"
#include "src/contract/tensor.hpp"
#include "tests/allocations.hpp"

namespace tercet::io {

static bool operator==(const Array& a, const Array& b) { return a.dtype == b.dtype && a.shape == b.shape && a.data == b.data; }

namespace {

namespace fs = std::filesystem;

const fs::path kFixtures = fs::path(TERCET_TEST_DATA) / "io";
constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16, Dtype::kI32, Dtype::kI64, Dtype::kBool};

int64_t Count(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

Array RandomArray(Dtype dtype, const std::vector<int64_t>& shape, std::mt19937_64* random) {
  Array array{dtype, shape, {}};
  array.data.resize(static_cast<size_t>(Count(shape) * contract::SizeOf(dtype)));
  for (std::byte& byte : array.data) byte = std::byte(static_cast<unsigned char>((*random)() >> 40 & (dtype == Dtype::kBool ? 1 : 255)));
  return array;
}

// What make.py puts into an array of that dtype and shape.
Array Expected(Dtype dtype, const std::vector<int64_t>& shape) {
  Array array{dtype, shape, {}};
  const auto append = [&](auto value) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    array.data.insert(array.data.end(), bytes, bytes + sizeof value);
  };
  for (int i = 0; i < Count(shape); ++i) {
    switch (dtype) {
      case Dtype::kF32:
        append(static_cast<float>(i) / 2 - 3);
        break;
      case Dtype::kF64:
        append(static_cast<double>(i) / 2 - 3);
        break;
      case Dtype::kBF16:
        append(contract::Narrow<BFloat16>(static_cast<float>(i) / 2 - 3));
        break;
      case Dtype::kF16:
        append(contract::Narrow<Float16>(static_cast<float>(i) / 2 - 3));
        break;
      case Dtype::kI32:
        append(int32_t{1000} * i - 3);
        break;
      case Dtype::kI64:
        append(int64_t{1000} * i - 3);
        break;
      case Dtype::kBool:
        append(i % 3 == 0);
        break;
    }
  }
  return array;
}

std::string Slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

void Spill(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

// A folder of the test's own, gone afterwards.
class Files : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder = fs::temp_directory_path() / ("tercet_io_" + std::to_string(getpid()) + "_" + test->name());
    fs::create_directories(folder);
  }
  void TearDown() override { fs::remove_all(folder); }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
    return names;
  }

  fs::path folder;
};

// ---- Bytes made by hand -------------------------------------------------------------------------------------------------------------------

std::string Number(uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> 8 * i & 255);
  return out;
}

std::string Safetensors(const std::string& header, const std::string& data = "") { return Number(header.size(), 8) + header + data; }

std::string Npy(const std::string& dictionary, const std::string& data = "") {
  return std::string("\x93NUMPY\1\0", 8) + Number(dictionary.size(), 2) + dictionary + data;
}

std::string NpyOf(const std::string& descr, const std::string& shape, const std::string& data = "") {
  return Npy("{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }\n", data);
}

uint32_t Crc32(const std::string& bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

// A deflate stream that only stores.
std::string Deflated(const std::string& bytes) { return '\1' + Number(bytes.size(), 2) + Number(~bytes.size() & 0xffff, 2) + bytes; }

struct ZipMember {
  std::string name, packed;
  uint64_t size = 0;
  uint32_t crc = 0;
  int method = 0, flags = 0;
  uint64_t packed_size = 0;
};

ZipMember Stored(const std::string& name, const std::string& bytes) { return {name, bytes, bytes.size(), Crc32(bytes), 0, 0, bytes.size()}; }

ZipMember Packed(const std::string& name, const std::string& bytes) {
  const std::string packed = Deflated(bytes);
  return {name, packed, bytes.size(), Crc32(bytes), 8, 0, packed.size()};
}

// With `zip64` every size and place is in the zip64 fields. `share` puts all members at the first one's place.
std::string Zip(const std::vector<ZipMember>& members, bool zip64 = false, bool share = false) {
  std::string out, directory;
  size_t first = 0;
  for (const ZipMember& m : members) {
    const uint64_t place = share ? first : out.size();
    const std::string version = Number(zip64 ? 45 : 20, 2);
    const std::string common = version + Number(m.flags, 2) + Number(m.method, 2) + Number(0, 2) + Number(0x21, 2) + Number(m.crc, 4);
    const uint64_t no = 0xffffffff;
    const auto sizes = [&] { return Number(zip64 ? no : m.packed_size, 4) + Number(zip64 ? no : m.size, 4); };
    const std::string wide = Number(m.size, 8) + Number(m.packed_size, 8);
    const std::string local_extra = zip64 ? Number(1, 2) + Number(16, 2) + wide : "";
    const std::string extra = zip64 ? Number(1, 2) + Number(24, 2) + wide + Number(place, 8) : "";
    if (!share || out.empty())
      out += "PK\3\4" + common + sizes() + Number(m.name.size(), 2) + Number(local_extra.size(), 2) + m.name + local_extra + m.packed;
    directory += "PK\1\2" + version + common + sizes() + Number(m.name.size(), 2) + Number(extra.size(), 2) + std::string(10, '\0') +
                 Number(zip64 ? no : place, 4) + m.name + extra;
    // The 10 zero bytes: comment length, disk, internal and external attributes.
  }
  const uint64_t start = out.size(), count = members.size();
  out += directory;
  if (zip64) {
    const uint64_t end = out.size();
    out += "PK\6\6" + Number(44, 8) + Number(45, 2) + Number(45, 2) + Number(0, 8) + Number(count, 8) + Number(count, 8) +
           Number(directory.size(), 8) + Number(start, 8);
    out += "PK\6\7" + Number(0, 4) + Number(end, 8) + Number(1, 4);
  }
  return out + "PK\5\6" + Number(0, 4) + Number(zip64 ? 0xffff : count, 2) + Number(zip64 ? 0xffff : count, 2) +
         Number(zip64 ? 0xffffffff : directory.size(), 4) + Number(zip64 ? 0xffffffff : start, 4) + Number(0, 2);
}

// What a reader says to the bytes, which it gets in a block of exactly their size.
std::string Says(Status (*reader)(std::string_view, std::string_view, File*), const std::string& bytes, StatusCode* code = nullptr) {
  const std::vector<char> block(bytes.begin(), bytes.end());
  File file;
  file.metadata["untouched"] = "";
  const Status status = reader({block.data(), block.size()}, "f", &file);
  if (code != nullptr) *code = status.code;
  if (status.ok()) return "ok";
  EXPECT_TRUE(file.arrays.empty() && file.metadata.count("untouched") == 1) << "a refused file must leave its answer alone";
  return status.message;
}
std::string SafetensorsSays(const std::string& header, const std::string& data = "") { return Says(ReadSafetensors, Safetensors(header, data)); }
Status ReadNpyFile(std::string_view bytes, std::string_view what, File* file) {
  Array array;
  Status status = ReadNpy(bytes, what, &array);
  if (status.ok()) *file = {{{"", array}}, {}};
  return status;
}
std::string NpySays(const std::string& bytes) { return Says(ReadNpyFile, bytes); }
std::string NpzSays(const std::string& bytes) { return Says(ReadNpz, bytes); }

// ---- Round trips --------------------------------------------------------------------------------------------------------------------------

TEST_F(Files, EveryDtypeAndRankComesBackFromEveryFormat) {
  std::mt19937_64 random(1);
  File all;
  all.metadata = {{"rule", "gla"}, {"scale", "0.5"}, {"a name\nof \"two\" lines", "\xc3\xa9"}};
  for (const Dtype dtype : kDtypes) {
    const std::vector<std::vector<int64_t>> shapes = {{}, {5}, {2, 3}, {3, 1, 2}, {2, 3, 4, 5}, {0}, {3, 0}, {0, 2, 0, 1}, {1, 1, 1, 1, 1, 7}};
    for (const auto& shape : shapes) {
      const Array array = RandomArray(dtype, shape, &random);
      all.arrays[std::string("d") + std::to_string(static_cast<int>(dtype)) + "." + std::to_string(all.arrays.size())] = array;
      if (dtype == Dtype::kBF16) continue;  // none of NumPy's
      const std::string path = folder / "one.npy";
      const Status written = Write(path, {{{"any name", array}}, {}});
      ASSERT_TRUE(written.ok()) << written.message;
      File back;
      const Status read = Read(path, &back);
      ASSERT_TRUE(read.ok()) << read.message;
      ASSERT_EQ(back.arrays.size(), 1u);
      EXPECT_TRUE(back.arrays.at("one") == array);
    }
  }
  for (const std::string name : {"all.safetensors", "all.npz"}) {
    if (name == "all.npz") std::erase_if(all.arrays, [](const auto& entry) { return entry.second.dtype == Dtype::kBF16; });
    const std::string path = folder / name;
    const Status written = Write(path, all);
    ASSERT_TRUE(written.ok()) << written.message;
    File back;
    const Status read = Read(path, &back);
    ASSERT_TRUE(read.ok()) << read.message;
    EXPECT_TRUE(back.arrays == all.arrays) << name;
    EXPECT_EQ(back.metadata.size(), name == "all.safetensors" ? 3u : 0u);
    for (const auto& [key, value] : back.metadata) EXPECT_EQ(value, all.metadata.at(key));
  }
}

TEST_F(Files, TheSameArraysMakeTheSameFile) {
  std::mt19937_64 random(2);
  const File file{{{"q", RandomArray(Dtype::kF64, {2, 3}, &random)}, {"valid", RandomArray(Dtype::kBool, {3}, &random)}}, {}};
  for (const std::string ending : {".safetensors", ".npz"}) {
    ASSERT_TRUE(Write(folder / ("a" + ending), file).ok());
    ASSERT_TRUE(Write(folder / ("b" + ending), file).ok());
    EXPECT_EQ(Slurp(folder / ("a" + ending)), Slurp(folder / ("b" + ending)));
  }
}

TEST_F(Files, EveryTensorOfAWrittenSafetensorsIsAligned) {
  std::mt19937_64 random(3);
  const File file{{{"a", RandomArray(Dtype::kBool, {3}, &random)}, {"b", RandomArray(Dtype::kF64, {2}, &random)}}, {}};
  ASSERT_TRUE(Write(folder / "x.safetensors", file).ok());
  const std::string bytes = Slurp(folder / "x.safetensors");
  EXPECT_NE(bytes.find("\"data_offsets\":[16,19]"), std::string::npos) << bytes;
  EXPECT_EQ((bytes.size() - 19) % 8, 0u);
}

TEST_F(Files, AnEmptySafetensorsIsAFile) {
  ASSERT_TRUE(Write(folder / "x.safetensors", {}).ok());
  File back;
  ASSERT_TRUE(Read(folder / "x.safetensors", &back).ok());
  EXPECT_TRUE(back.arrays.empty() && back.metadata.empty());
}

// ---- What others wrote --------------------------------------------------------------------------------------------------------------------

std::map<std::string, Array> ExpectedFixtures() {
  return {{"f2", Expected(Dtype::kF16, {3, 5})},
          {"f4", Expected(Dtype::kF32, {2, 3})},
          {"f8", Expected(Dtype::kF64, {2, 1, 3, 2})},
          {"i4", Expected(Dtype::kI32, {5})},
          {"i8", Expected(Dtype::kI64, {3, 2})},
          {"b1", Expected(Dtype::kBool, {2, 4})},
          {"u1", Expected(Dtype::kBool, {7})},
          {"scalar", Expected(Dtype::kF64, {})},
          {"empty", Expected(Dtype::kF32, {0, 3})},
          {"fortran", Expected(Dtype::kF32, {2, 3, 4})},
          {"fortran4", Expected(Dtype::kI64, {2, 1, 3, 2})},
          {"big_f2", Expected(Dtype::kF16, {2, 2})},
          {"big_f4", Expected(Dtype::kF32, {2, 3})},
          {"big_f8", Expected(Dtype::kF64, {3, 2})},
          {"big_i4", Expected(Dtype::kI32, {5})},
          {"big_i8", Expected(Dtype::kI64, {2, 2})},
          {"long", Expected(Dtype::kF32, {40, 30})}};
}

TEST(Fixtures, NpzStoredAndDeflatedByNumpy) {
  for (const char* name : {"stored.npz", "deflated.npz"}) {
    File file;
    const Status status = Read(kFixtures / name, &file);
    ASSERT_TRUE(status.ok()) << status.message;
    const auto expected = ExpectedFixtures();
    EXPECT_EQ(file.arrays.size(), expected.size());
    for (const auto& [key, array] : expected) EXPECT_TRUE(file.arrays.count(key) && file.arrays[key] == array) << name << " " << key;
  }
}

TEST(Fixtures, NpyByNumpyInEachVersion) {
  File file;
  ASSERT_TRUE(Read(kFixtures / "one.npy", &file).ok());
  EXPECT_TRUE(file.arrays.at("one") == Expected(Dtype::kF32, {2, 3, 4}));
  for (const std::string stem : {"version2", "version3"}) {
    ASSERT_TRUE(Read(kFixtures / (stem + ".npy"), &file).ok());
    EXPECT_TRUE(file.arrays.at(stem) == Expected(Dtype::kF64, {3, 2})) << stem;
  }
}

TEST(Fixtures, SafetensorsByItsOwnLibrary) {
  File file;
  const Status status = Read(kFixtures / "official.safetensors", &file);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_EQ(file.metadata, (std::map<std::string, std::string>{{"rule", "linear"}, {"scale", "0.5"}}));
  auto expected = ExpectedFixtures();
  expected["bf16"] = Expected(Dtype::kBF16, {3, 5});
  for (const char* key : {"bf16", "f2", "f4", "f8", "i4", "i8", "b1", "u1", "scalar", "empty", "long"})
    EXPECT_TRUE(file.arrays.count(key) && file.arrays[key] == expected.at(key)) << key;
  EXPECT_EQ(file.arrays.size(), 11u);
}

TEST(Fixtures, GoldenAnswersAreRead) {
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(TERCET_TEST_DATA) / "golden")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++files;
    File file;
    const Status status = Read(entry.path(), &file);
    ASSERT_TRUE(status.ok()) << status.message;
    for (const char* name : {"q", "k", "v", "expected.out", "expected.final_state"}) EXPECT_EQ(file.arrays.count(name), 1u) << entry.path() << name;
    EXPECT_EQ(file.metadata.count("rule"), 1u);
  }
  EXPECT_GE(files, 13);
}

TEST(Npz, MembersMadeByHandAreRead) {
  const std::string npy = NpyOf("<i4", "(2,)", Number(7, 4) + Number(8, 4));
  for (const bool zip64 : {false, true})
    for (const bool deflated : {false, true}) {
      const std::string bytes = Zip({deflated ? Packed("q.npy", npy) : Stored("q.npy", npy), Stored("a/b.npy", npy)}, zip64);
      File file;
      const Status status = ReadNpz(bytes, "f", &file);
      ASSERT_TRUE(status.ok()) << status.message;
      EXPECT_EQ(file.arrays.size(), 2u);
      EXPECT_EQ(file.arrays.at("a/b").shape, std::vector<int64_t>{2});
      EXPECT_EQ(std::memcmp(file.arrays.at("q").data.data(), "\7\0\0\0\10\0\0\0", 8), 0);
    }
}

TEST(Npy, HeadersOfOtherWritersAreRead) {
  const std::string data = Number(7, 4);
  for (const char* dictionary :
       {"{'shape':(1,),'fortran_order':False,'descr':'<i4'}", "{\"descr\": \"<i4\", \"fortran_order\": True, \"shape\": (1L, 1), }",
        " { 'descr' : '<i4' , 'shape' : ( ) ,\n 'fortran_order' : False } \n"})
    EXPECT_EQ(NpySays(Npy(dictionary, data)), "ok") << dictionary;
}

TEST(Safetensors, BytesAreBools) {
  File file;
  ASSERT_TRUE(ReadSafetensors(Safetensors(R"({"m":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", std::string("\2\0\xff", 3)), "f", &file).ok());
  EXPECT_TRUE(file.arrays.at("m") == (Array{Dtype::kBool, {3}, {std::byte{1}, std::byte{0}, std::byte{1}}}));
}

// ---- Refusals -----------------------------------------------------------------------------------------------------------------------------

TEST(Refusals, Safetensors) {
  const auto says = [](const std::string& bytes) { return Says(ReadSafetensors, bytes); };
  EXPECT_EQ(says(""), "f: it has 0 bytes, too few for a .safetensors file");
  EXPECT_EQ(says("1234567"), "f: it has 7 bytes, too few for a .safetensors file");
  EXPECT_EQ(says(Number(100, 8) + "{}"), "f: its header claims 100 bytes, but only 2 follow");
  EXPECT_EQ(says(Number(~0ull, 8) + "{}"), "f: its header claims 18446744073709551615 bytes, but only 2 follow");
  EXPECT_EQ(says(Number(0, 8)), "f: its header does not begin with {");
  EXPECT_EQ(SafetensorsSays(" {}"), "f: its header does not begin with {");
  EXPECT_EQ(SafetensorsSays("[]"), "f: its header does not begin with {");
  EXPECT_EQ(SafetensorsSays("{"), "f: its header is not valid JSON (at byte 2)");
  EXPECT_EQ(SafetensorsSays("{} x"), "f: its header is not valid JSON (at byte 4)");
  EXPECT_EQ(SafetensorsSays("{\"\xff\":1}"), "f: its header is not valid JSON (at byte 3)");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"shape":[NaN]}})"), "f: its header is not valid JSON (at byte 16)");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"shape":[1e999]}})"), "f: its header is not valid JSON (at byte 20)");
  EXPECT_EQ(SafetensorsSays(R"({"q":7})"), "f: tensor \"q\" is a number, but must be an object");
  EXPECT_EQ(SafetensorsSays(R"({"q":[]})"), "f: tensor \"q\" is a list, but must be an object");
  EXPECT_EQ(SafetensorsSays(R"({"q":null})"), "f: tensor \"q\" is null, but must be an object");
  EXPECT_EQ(SafetensorsSays(R"({"__metadata__":true})"), "f: __metadata__ is a boolean, but must be an object");
  EXPECT_EQ(SafetensorsSays(R"({"__metadata__":{"scale":0.5}})"),
            "f: its metadata \"scale\" is a number that is no whole number below 2^64, but must be a string");
  EXPECT_EQ(SafetensorsSays(R"({"__metadata__":{"a":{}}})"), "f: its metadata \"a\" is an object, but must be a string");
  EXPECT_EQ(SafetensorsSays(R"({"__metadata__":{"a":"","a":""}})"), "f: its metadata has the key \"a\" twice");
  EXPECT_EQ(SafetensorsSays(R"({"__metadata__":{},"__metadata__":{}})"), "f: its header has __metadata__ twice");
  EXPECT_EQ(SafetensorsSays(R"({"q":{}})"), "f: tensor \"q\" lacks its dtype");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"dtype":"F32"}})"), "f: tensor \"q\" lacks its shape");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"dtype":"F32","shape":[]}})"), "f: tensor \"q\" lacks its data_offsets");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"colour":"red"}})"), "f: tensor \"q\" has the key \"colour\"; it must have dtype, shape and data_offsets");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"shape":[1],"shape":[1]}})"), "f: tensor \"q\" has the key \"shape\" twice");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"dtype":5}})"), "f: tensor \"q\" has a number as its dtype");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"shape":"big"}})"), "f: tensor \"q\" has a string as its shape");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"dtype":[]}})"), "f: tensor \"q\" has a list as its dtype");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"shape":[[1]]}})"), "f: tensor \"q\" has a list in its shape");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"shape":[-1]}})"), "f: tensor \"q\" has a negative number in its shape");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"shape":[2.0]}})"), "f: tensor \"q\" has a number that is no whole number below 2^64 in its shape");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"shape":[9223372036854775808]}})"), "f: tensor \"q\" has a size in its shape that does not fit in 63 bits");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"data_offsets":[0]}})"), "f: tensor \"q\" has fewer than two data_offsets");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"data_offsets":[0,1,2]}})"), "f: tensor \"q\" has more than two data_offsets");
  EXPECT_EQ(SafetensorsSays(R"({"q":{"data_offsets":[-1,2]}})"), "f: tensor \"q\" has a negative number in its data_offsets");
  std::string axes = "1";
  for (int i = 0; i < 64; ++i) axes += ",1";
  EXPECT_EQ(SafetensorsSays("{\"q\":{\"shape\":[" + axes + "]}}"), "f: tensor \"q\" has more than 64 axes");

  const auto tensor = [](const std::string& name, const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
  };
  const auto one = [&](const std::string& dtype, const std::string& shape, const std::string& offsets, size_t data) {
    return SafetensorsSays(std::string("{") + tensor("q", dtype, shape, offsets) + "}", std::string(data, '\0'));
  };
  EXPECT_EQ(one("F32", "[2]", "[0,8]", 8), "ok");
  EXPECT_EQ(one("F8_E4M3", "[4]", "[0,4]", 4), "f: tensor \"q\" has dtype \"F8_E4M3\"; BF16, F16, F32, F64, I32, I64, BOOL and U8 are read");
  EXPECT_EQ(one("F\\n16", "[2]", "[0,4]", 4), "f: tensor \"q\" has dtype \"F\\x0a16\"; BF16, F16, F32, F64, I32, I64, BOOL and U8 are read");
  EXPECT_EQ(one("F32", "[2]", "[0,8]", 7), "f: tensor \"q\" lies at 0 to 8, outside the 7 bytes of data");
  EXPECT_EQ(one("F32", "[2]", "[8,0]", 8), "f: tensor \"q\" lies at 8 to 0, outside the 8 bytes of data");
  EXPECT_EQ(one("F32", "[2]", "[18446744073709551608,18446744073709551615]", 8),
            "f: tensor \"q\" lies at 18446744073709551608 to 18446744073709551615, outside the 8 bytes of data");
  EXPECT_EQ(one("F32", "[2]", "[0,8]", 9), "f: 1 byte of data belong to no tensor");
  EXPECT_EQ(one("F32", "[2]", "[1,9]", 9), "f: there is a gap of 1 byte before tensor \"q\"");
  EXPECT_EQ(one("F32", "[3]", "[0,8]", 8), "f: tensor \"q\" has 8 bytes of data, but its shape [3] of F32 means 12 bytes");
  EXPECT_EQ(one("F32", "[4294967296,4294967296]", "[0,8]", 8),
            "f: tensor \"q\" has the shape [4294967296, 4294967296], whose size in bytes does not fit in 63 bits");
  EXPECT_EQ(one("F32", "[4294967296,0,4294967296]", "[0,0]", 0),
            "f: tensor \"q\" has the shape [4294967296, 0, 4294967296], whose size in bytes does not fit in 63 bits");
  const auto two = [&](const std::string& name, const std::string& offsets, size_t data) {
    return SafetensorsSays(std::string("{") + tensor("q", "F32", "[2]", "[0,8]") + "," + tensor(name, "F32", "[2]", offsets) + "}",
                           std::string(data, '\0'));
  };
  EXPECT_EQ(two("k", "[8,16]", 16), "ok");
  EXPECT_EQ(two("q", "[8,16]", 16), "f: two tensors have the name \"q\"");
  EXPECT_EQ(two("k", "[4,12]", 12), "f: tensor \"k\" overlaps the one before it");
  EXPECT_EQ(two("k", "[12,20]", 20), "f: there is a gap of 4 bytes before tensor \"k\"");
  EXPECT_EQ(two("\\u001b[31m\\u00e9", "[12,20]", 20), "f: there is a gap of 4 bytes before tensor \"\\x1b[31m\\xc3\\xa9\"");
  EXPECT_EQ(two(std::string(100, 'x'), "[12,20]", 20), "f: there is a gap of 4 bytes before tensor \"" + std::string(80, 'x') + "...\"");

  const std::string deep(100000, '[');
  EXPECT_EQ(SafetensorsSays("{\"q\":" + deep), "f: tensor \"q\" is a list, but must be an object");
  EXPECT_EQ(SafetensorsSays("{\"q\":{\"shape\":" + deep), "f: tensor \"q\" has a list in its shape");

  StatusCode code{};
  Says(ReadSafetensors, Safetensors(std::string("{") + tensor("q", "C64", "[2]", "[0,4]") + "}", "1234"), &code);
  EXPECT_EQ(code, StatusCode::kDtype);
  Says(ReadSafetensors, Safetensors(std::string("{") + tensor("q", "F32", "[2]", "[0,4]") + "}", "1234"), &code);
  EXPECT_EQ(code, StatusCode::kShape);
}

TEST(Refusals, Npy) {
  EXPECT_EQ(NpySays(NpyOf("<i4", "(1,)", "1234")), "ok");
  EXPECT_EQ(NpySays(""), "f: it is no .npy file: it does not begin with \\x93NUMPY");
  EXPECT_EQ(NpySays("PK\3\4"), "f: it is no .npy file: it does not begin with \\x93NUMPY");
  EXPECT_EQ(NpySays("\x93NUM"), "f: it ends inside its header, after 4 bytes");
  EXPECT_EQ(NpySays(std::string("\x93NUMPY\1\0\1", 9)), "f: it ends inside its header, after 9 bytes");
  EXPECT_EQ(NpySays(std::string("\x93NUMPY\2\0\1\0\0", 11)), "f: it ends inside its header, after 11 bytes");
  EXPECT_EQ(NpySays(std::string("\x93NUMPY\4\0\0\0\0\0", 12)), "f: its .npy version is 4.0; 1.0, 2.0 and 3.0 are read");
  EXPECT_EQ(NpySays(std::string("\x93NUMPY\1\1\0\0\0\0", 12)), "f: its .npy version is 1.1; 1.0, 2.0 and 3.0 are read");
  EXPECT_EQ(NpySays(std::string("\x93NUMPY\2\0\xff\xff\xff\xff", 12)), "f: its header claims 4294967295 bytes, more than the 65536 that are read");
  EXPECT_EQ(NpySays(std::string("\x93NUMPY\1\0\x76\0{}", 12)), "f: it ends inside its header, which claims 128 bytes of the file's 12");

  const std::string malformed = "f: its header is not a dictionary with the keys descr, fortran_order and shape";
  for (const char* dictionary : {"",
                                 "{",
                                 "}",
                                 "{}",
                                 "{,}",
                                 "[]",
                                 "{'descr'",
                                 "{'descr':",
                                 "{'descr': '<f4",
                                 "{'descr': <f4}",
                                 "{'descr': None}",
                                 "{'descr': '<f4', 'shape': (1,)}",
                                 "{'descr': '<f4' 'shape': (1,)}",
                                 "{'descr': '<f4', 'fortran_order': 1, 'shape': (1,)}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': 1}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': (1)}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': (1,}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': (1 1)}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': (1.0,)}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': (nan,)}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': ((1,),)}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': [1]}",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + exit()",
                                 "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)"})
    EXPECT_EQ(NpySays(Npy(dictionary, "1234")), malformed) << dictionary;
  EXPECT_EQ(NpySays(Npy("{'descr': '<f4', 'descr': '<f4'}")), "f: its header has the key \"descr\" twice");
  EXPECT_EQ(NpySays(Npy("{'colour\n': 1}")), "f: its header has the key \"colour\\x0a\"; it must have descr, fortran_order and shape");
  EXPECT_EQ(NpySays(Npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': ()}")),
            "f: its dtype is a structured one; f2, f4, f8, i4, i8, b1 and u1 are read");
  for (const std::string descr : {"<c8", "|O", "<U3", "<u4", "f4", "=f4", "<b1", "|f4", ""})
    EXPECT_EQ(NpySays(NpyOf(descr, "()", "1234")), "f: its dtype is \"" + descr + "\"; f2, f4, f8, i4, i8, b1 and u1 are read");
  for (const std::string descr : {"<V2", "|V2"})
    EXPECT_EQ(NpySays(NpyOf(descr, "(2,)", "1234")),
              "f: its dtype is \"" + descr +
                  "\", two bytes without a meaning, which is how bf16 is written for want of a dtype in NumPy; f2, f4, f8, i4, i8, b1 and u1 are "
                  "read, and bf16 from a .safetensors file");
  EXPECT_EQ(NpySays(NpyOf("<f4", "(-1,)")), "f: its shape has a negative size");
  EXPECT_EQ(NpySays(NpyOf("<f4", "(9223372036854775808,)")), "f: its shape has a size that does not fit in 63 bits");
  EXPECT_EQ(NpySays(NpyOf("<f4", "(9223372036854775807,)")), "f: its shape is [9223372036854775807], whose size in bytes does not fit in 63 bits");
  EXPECT_EQ(NpySays(NpyOf("<f4", "(0, 4294967296, 4294967296)")),
            "f: its shape is [0, 4294967296, 4294967296], whose size in bytes does not fit in 63 bits");
  std::string axes = "(";
  for (int i = 0; i < 65; ++i) axes += "1,";
  EXPECT_EQ(NpySays(NpyOf("<f4", axes + ")")), "f: its shape has more than 64 axes");
  EXPECT_EQ(NpySays(NpyOf("<f4", "(2,)", "1234567")), "f: it holds 7 bytes of data, but its shape [2] means 8 bytes");
  EXPECT_EQ(NpySays(NpyOf("<f4", "()", "12345")), "f: it holds 5 bytes of data, but its shape [] means 4 bytes");
  EXPECT_EQ(NpySays(NpyOf("<f8", "(1000000000000,)", "1")), "f: it holds 1 byte of data, but its shape [1000000000000] means 8000000000000 bytes");
  EXPECT_EQ(NpySays(NpyOf("|b1", "(0,)", "1")), "f: it holds 1 byte of data, but its shape [0] means 0 bytes");

  Array array;
  EXPECT_EQ(ReadNpy(NpyOf("<c8", "()"), "f", &array).code, StatusCode::kDtype);
  EXPECT_EQ(ReadNpy(NpyOf("<f4", "()"), "f", &array).code, StatusCode::kShape);
  EXPECT_EQ(ReadNpy("", "f", &array).code, StatusCode::kValue);
}

TEST(Refusals, Npz) {
  const std::string npy = NpyOf("<i4", "(2,)", "12345678");
  const std::string head(npy, 0, npy.size() - 8);
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", npy), Packed("k.npy", npy)})), "ok");
  EXPECT_EQ(NpzSays(""), "f: it is empty");
  EXPECT_EQ(NpzSays("not a zip").rfind("f: it is no zip archive that can be read (", 0), 0u);
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", npy)}).substr(1)).rfind("f: ", 0), 0u);
  EXPECT_EQ(NpzSays(Zip({Stored("read\nme.txt", npy)})), "f: member \"read\\x0ame.txt\": it must be a .npy");
  EXPECT_EQ(NpzSays(Zip({Stored("", npy)})), "f: member \"\": it must be a .npy");
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", npy), Stored("q.npy", npy)})), "f: member \"q.npy\": two members have this name");
  const std::string large = NpyOf("|u1", "(4000,)", std::string(4000, '\0'));
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", large), Stored("k.npy", large)})), "ok");
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", large), Stored("k.npy", large)}, false, true)),
            "f: member \"k.npy\": with it the members claim more bytes than the file has");
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", "hello world!")})), "f: member \"q.npy\": it is no .npy file: it does not begin with \\x93NUMPY");
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", "")})), "f: member \"q.npy\": it is no .npy file: it does not begin with \\x93NUMPY");
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", std::string("\x93NUMPY\1\0\0\0", 10))})), "f: member \"q.npy\": its header is too short");
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", npy.substr(0, 30))})), "f: member \"q.npy\": it ends inside its header, after 30 bytes");
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", NpyOf("<c8", "()", "12345678"))})),
            "f: member \"q.npy\": its dtype is \"<c8\"; f2, f4, f8, i4, i8, b1 and u1 are read");

  ZipMember member = Stored("q.npy", npy);
  member.flags = 1;
  EXPECT_EQ(NpzSays(Zip({member})), "f: member \"q.npy\": it is encrypted, which is not read");
  member = Stored("q.npy", npy);
  member.method = 12;
  EXPECT_EQ(NpzSays(Zip({member})), "f: member \"q.npy\": it is compressed by method 12; stored (0) and deflated (8) members are read");
  const std::string sizes = std::to_string(head.size());
  EXPECT_EQ(NpzSays(Zip({Stored("q.npy", head + "1234")})), "f: member \"q.npy\": it claims " + std::to_string(head.size() + 4) +
                                                                " bytes, but its header and its shape [2] mean " + sizes + " and 8");
  EXPECT_EQ(NpzSays(Zip({Packed("q.npy", npy + "x")})), "f: member \"q.npy\": it claims " + std::to_string(head.size() + 9) +
                                                            " bytes, but its header and its shape [2] mean " + sizes + " and 8");
  for (const auto& make : {Stored, Packed}) {
    member = make("q.npy", npy);
    member.crc ^= 1;
    EXPECT_EQ(NpzSays(Zip({member})).rfind("f: member \"q.npy\": its bytes can't be unpacked (", 0), 0u);
  }
  // The directory and the header agree on more than the stream holds, and on less.
  member = Packed("q.npy", head + "1234");
  member.size += 4;
  EXPECT_EQ(NpzSays(Zip({member})).rfind("f: member \"q.npy\": it", 0), 0u);
  EXPECT_NE(NpzSays(Zip({member})), "ok");
  member = Packed("q.npy", npy + "12345678");
  member.size -= 8;
  EXPECT_NE(NpzSays(Zip({member})), "ok");
  member = Packed("q.npy", npy);
  member.packed[0] = '\7';  // a block type that deflate does not have
  EXPECT_EQ(NpzSays(Zip({member})).rfind("f: member \"q.npy\": its bytes can't be unpacked (", 0), 0u);
}

// A small file that claims much must not be given much.
TEST(Refusals, AClaimIsNeverAnAllocation) {
  std::vector<std::string> files;
  for (const uint64_t claim : {uint64_t{1} << 24, uint64_t{1} << 40, uint64_t{1} << 60}) {
    const std::string shape = std::to_string(claim);
    const std::string npy = NpyOf("|u1", "(" + shape + ",)", std::string(100, '\0'));
    files.push_back(npy);
    files.push_back(Safetensors("{\"q\":{\"dtype\":\"U8\",\"shape\":[" + shape + "],\"data_offsets\":[0," + shape + "]}}", std::string(100, '\0')));
    for (const bool deflated : {false, true})
      for (const bool lie_about_packed : {false, true}) {
        ZipMember member = deflated ? Packed("q.npy", npy) : Stored("q.npy", npy);
        member.size += claim - 100;
        if (lie_about_packed) member.packed_size = member.size;
        files.push_back(Zip({member}, true));
      }
  }
  for (size_t i = 0; i < files.size(); ++i) {
    largest_block = 0;
    EXPECT_NE(Says(ReadSafetensors, files[i]), "ok");
    EXPECT_NE(NpySays(files[i]), "ok");
    EXPECT_NE(NpzSays(files[i]), "ok");
    EXPECT_LE(largest_block, size_t{1} << 17) << "file " << i;
  }
}

TEST_F(Files, OnlyTheThreeEndingsAndRegularFilesAreRead) {
  File file;
  const auto says = [&](const std::string& name) {
    const std::string message = Read(folder / name, &file).message;
    const std::string prefix = folder.string() + "/";
    return message.rfind(prefix, 0) == 0 ? message.substr(prefix.size()) : message;
  };
  EXPECT_EQ(says("q.txt"), "q.txt: its name must end in .safetensors, .npz or .npy");
  EXPECT_EQ(says("two\nlines"), "two\\x0alines: its name must end in .safetensors, .npz or .npy");
  EXPECT_EQ(says("q.npy"), "q.npy: it can't be opened (No such file or directory)");
  fs::create_directory(folder / "folder.npz");
  EXPECT_EQ(says("folder.npz"), "folder.npz: it is not a regular file");
  ASSERT_EQ(mkfifo((folder / "pipe.npy").c_str(), 0600), 0);
  EXPECT_EQ(says("pipe.npy"), "pipe.npy: it is not a regular file");
  Spill(folder / "empty.safetensors", "");
  EXPECT_EQ(says("empty.safetensors"), "empty.safetensors: it has 0 bytes, too few for a .safetensors file");
}

// Each allocation of each reader and writer fails once.
TEST_F(Files, WithoutMemoryEveryReaderAndWriterSaysSo) {
  const auto exhaust = [](const auto& work) {
    for (int64_t n = 0;; ++n) {
      until_failure = n;
      const Status status = work();
      const bool failed = until_failure < 0;
      until_failure = -1;
      if (!failed) return status.ok() ? n : -1;
      EXPECT_EQ(status.code, StatusCode::kOutOfMemory) << n << " " << status.message;
      EXPECT_EQ(status.message.substr(status.message.rfind(':')), ": there is not enough memory for it");
      if (testing::Test::HasFailure()) return int64_t{-1};
    }
  };
  for (const char* name : {"stored.npz", "one.npy", "official.safetensors"}) {
    File file;
    const std::string from = kFixtures / name, to = folder / name;
    EXPECT_GT(exhaust([&] { return Read(from, &file); }), 3) << name;
    ASSERT_FALSE(file.arrays.empty());
    EXPECT_GT(exhaust([&] { return Write(to, file); }), 3) << name;
    EXPECT_EQ(Names(), std::vector<std::string>{name});
    fs::remove(to);
  }
}

// ---- Writing ------------------------------------------------------------------------------------------------------------------------------

TEST_F(Files, AWriteThatFailsLeavesTheOldFileWholeAndNothingElse) {
  std::mt19937_64 random(4);
  const File small{{{"q", RandomArray(Dtype::kF32, {2, 3}, &random)}}, {}};
  const File large{{{"q", RandomArray(Dtype::kF64, {1 << 14}, &random)}}, {}};
  for (const std::string name : {"x.npy", "x.npz", "x.safetensors"}) {
    const fs::path path = folder / name;
    ASSERT_TRUE(Write(path, small).ok());
    const std::string before = Slurp(path);

    // No file may grow past 4 KiB: a full disk, as far as a program can tell.
    rlimit old_limit{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
    const rlimit limit{4096, old_limit.rlim_max};
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const Status status = Write(path, large);
    setrlimit(RLIMIT_FSIZE, &old_limit);
    std::signal(SIGXFSZ, old_handler);

    EXPECT_EQ(status.code, StatusCode::kValue);
    EXPECT_EQ(status.message.rfind(path.string() + ": it can't be written (", 0), 0u) << status.message;
    EXPECT_NE(status.message.find("File too large"), std::string::npos) << status.message;
    EXPECT_EQ(Slurp(path), before);
    EXPECT_EQ(Names(), std::vector<std::string>{name});
    // And with room it is replaced.
    EXPECT_TRUE(Write(path, large).ok());
    File back;
    ASSERT_TRUE(Read(path, &back).ok());
    EXPECT_TRUE(back.arrays.begin()->second == large.arrays.at("q"));
    fs::remove(path);
  }
}

TEST_F(Files, WhatCantBeWrittenIsRefused) {
  std::mt19937_64 random(5);
  const Array array = RandomArray(Dtype::kF32, {2}, &random);
  const auto says = [&](const std::string& name, const File& file) {
    const Status status = Write(folder / name, file);
    const std::string prefix = folder.string() + "/";
    return status.ok() ? "ok" : status.message.substr(prefix.size());
  };
  const File one{{{"q", array}}, {}};
  EXPECT_EQ(says("x.txt", one), "x.txt: its name must end in .safetensors, .npz or .npy");
  for (const std::string ending : {".npy", ".npz", ".safetensors"}) {
    EXPECT_EQ(says("missing/x" + ending, one), "missing/x" + ending + ": no temporary file can be made beside it (No such file or directory)");
    fs::create_directory(folder / ("d" + ending));
    EXPECT_EQ(says("d" + ending, one), "d" + ending + ": it can't be replaced (Is a directory)");
    Array wrong = array;
    wrong.data.pop_back();
    EXPECT_EQ(says("x" + ending, {{{"q", wrong}}, {}}), "x" + ending + ": array \"q\" has 7 bytes, which is not what its dtype and its 1 sizes mean");
    wrong.shape = {-2};
    EXPECT_EQ(says("x" + ending, {{{"q", wrong}}, {}}), "x" + ending + ": array \"q\" has 7 bytes, which is not what its dtype and its 1 sizes mean");
  }
  EXPECT_EQ(says("x.npy", {}), "x.npy: a .npy file takes exactly one array, and there are 0");
  EXPECT_EQ(says("x.npy", {{{"q", array}, {"k", array}}, {}}), "x.npy: a .npy file takes exactly one array, and there are 2");
  EXPECT_EQ(says("x.npz", {}), "x.npz: an .npz file must have at least one array");
  EXPECT_EQ(says("x.npz", {{{std::string("a\0b", 3), array}}, {}}), "x.npz: the name \"a\\x00b\" has a zero byte");
  EXPECT_EQ(says("x.safetensors", {{{"__metadata__", array}}, {}}), "x.safetensors: no tensor of a .safetensors file can be named __metadata__");
  EXPECT_EQ(says("x.safetensors", {{{"\xff", array}}, {}}),
            "x.safetensors: a name or the metadata is not valid UTF-8, which a .safetensors file needs");
  for (const std::string ending : {".npy", ".npz"})
    EXPECT_EQ(says("x" + ending, {{{"q", RandomArray(Dtype::kBF16, {2}, &random)}}, {}}),
              "x" + ending + ": array \"q\" is bf16, for which NumPy has no dtype; a .safetensors file can hold it");
  EXPECT_EQ(Names().size(), 3u) << "only the three folders";
}

TEST_F(Files, PermissionsFollowTheUmask) {
  const File one{{{"q", {Dtype::kF32, {}, std::vector<std::byte>(4)}}}, {}};
  const mode_t old_mask = umask(027);
  for (const char* name : {"x.npy", "x.npz", "x.safetensors"}) {
    EXPECT_TRUE(Write(folder / name, one).ok());
    struct stat status {};
    ASSERT_EQ(stat((folder / name).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0640u) << name;
  }
  umask(old_mask);
}

TEST(Writing, ANameWithoutAFolderIsWrittenHere) {
  const std::string name = "tercet_io_here_" + std::to_string(getpid()) + ".npy";
  ASSERT_TRUE(Write(name, {{{"q", {Dtype::kF32, {}, std::vector<std::byte>(4)}}}, {}}).ok());
  EXPECT_TRUE(fs::remove(name));
}

// ---- Any bytes ----------------------------------------------------------------------------------------------------------------------------

void ExpectWhole(const Array& array, const std::string& name) {
  EXPECT_EQ(array.data.size(), static_cast<size_t>(Count(array.shape) * contract::SizeOf(array.dtype))) << name;
}

TEST(AnyBytes, GiveArraysOrASentence) {
  const uint64_t seed = 20260101;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::vector<std::string> valid;
  for (const char* name : {"stored.npz", "deflated.npz", "one.npy", "version2.npy", "official.safetensors"}) valid.push_back(Slurp(kFixtures / name));
  const std::string npy = NpyOf("<i4", "(2,)", "12345678");
  valid.push_back(Zip({Stored("q.npy", npy), Packed("k.npy", npy)}));
  valid.push_back(Zip({Packed("q.npy", npy)}, true));
  valid.push_back(Safetensors(R"({"__metadata__":{"a":"b"},"q":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678"));

  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  int taken = 0, refused = 0;
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    std::string bytes = valid[below(valid.size())];
    for (size_t edits = 1 + below(3); edits > 0 && !bytes.empty(); --edits) {
      const size_t at = below(bytes.size());
      switch (below(6)) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] ^ 1 << below(8));
          break;
        case 2:
          bytes.resize(at);
          break;
        case 3:
          bytes.erase(at, 1 + below(16));
          break;
        case 4: {
          const std::string& other = valid[below(valid.size())];
          bytes.insert(at, other, below(other.size()), below(200));
          break;
        }
        default: {
          const uint64_t nasty[] = {0, 1, 0x7fffffff, 0xffffffff, 0x7fffffffffffffff, ~0ull, bytes.size()};
          const std::string number = Number(nasty[below(std::size(nasty))], 1 << below(4));
          bytes.replace(at, number.size(), number);
        }
      }
    }
    const std::vector<char> block(bytes.begin(), bytes.end());
    const std::string_view view(block.data(), block.size());
    largest_block = 0;
    for (const auto& reader : {ReadSafetensors, ReadNpz, ReadNpyFile}) {
      File file;
      const Status status = reader(view, "f", &file);
      if (status.ok()) {
        ++taken;
        for (const auto& [name, array] : file.arrays) ExpectWhole(array, name);
      } else {
        ++refused;
        EXPECT_FALSE(status.message.empty());
        EXPECT_NE(status.code, StatusCode::kInternal) << status.message;
        for (const char c : status.message) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << status.message;
      }
    }
    ASSERT_LE(largest_block, (size_t{1} << 17) + 1032 * bytes.size()) << "round " << round;
    ASSERT_FALSE(testing::Test::HasFailure()) << "round " << round;
  }
  // A round tries three readers, of which two are wrong for it; if none or all of the rest passed, the test would not be one.
  EXPECT_GT(taken, kRounds / 100);
  EXPECT_GT(refused, 2 * kRounds);
}

}  // namespace
}  // namespace tercet::io
