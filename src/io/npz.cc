// NumPy's .npz: a zip archive of .npy members, stored or deflated, zip64 too. Written stored. libzip reads the archive; what its directory claims is
// believed only as far as the bytes bear it out. Not read: encrypted members, other compressions, members that are no .npy.
#include <zip.h>

#include <algorithm>
#include <memory>

#include "src/io/parts.hpp"

namespace tercet::io {
namespace {

struct Discard {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};
struct Close {
  void operator()(zip_file_t* member) const { zip_fclose(member); }
};
using Archive = std::unique_ptr<zip_t, Discard>;
using Member = std::unique_ptr<zip_file_t, Close>;

constexpr std::string_view kEnding = ".npy";

Status ZipFault(std::string_view what, std::string_view doing, zip_error_t* error) {
  const StatusCode code = zip_error_code_zip(error) == ZIP_ER_MEMORY ? StatusCode::kOutOfMemory : StatusCode::kValue;
  return Refuse(code, what, std::string(doing) + " (" + zip_error_strerror(error) + ")");
}

// Reads up to `size` bytes, fewer only where the member ends.
Status ReadUpTo(zip_file_t* member, size_t size, std::string_view what, std::byte* out, size_t* read) {
  constexpr size_t kBlock = 1 << 30;
  *read = 0;
  while (*read < size) {
    const zip_int64_t got = zip_fread(member, out + *read, std::min(size - *read, kBlock));
    if (got < 0) return ZipFault(what, "its bytes can't be unpacked", zip_file_get_error(member));
    if (got == 0) break;
    *read += static_cast<size_t>(got);
  }
  return {};
}

Status ReadMember(zip_file_t* member, const zip_stat_t& stat, std::string_view what, Array* array) {
  std::string head(kNpyPrelude, '\0');
  const auto grow_head = [&](size_t from, size_t to) -> Status {
    head.resize(to);
    size_t read = 0;
    if (Status status = ReadUpTo(member, to - from, what, reinterpret_cast<std::byte*>(&head[from]), &read); !status.ok()) return status;
    head.resize(from + read);
    return {};
  };
  size_t head_size = 0;
  if (Status status = grow_head(0, kNpyPrelude); !status.ok()) return status;
  if (Status status = NpyHeadSize(head, what, &head_size); !status.ok()) return status;
  // No valid head is shorter than the prelude.
  if (head_size < kNpyPrelude) return Refuse(StatusCode::kValue, what, "its header is too short");
  if (Status status = grow_head(head.size(), head_size); !status.ok()) return status;
  if (head.size() < head_size) return Refuse(StatusCode::kValue, what, "it ends inside its header, after " + Bytes(head.size()));
  NpyLayout layout;
  if (Status status = ParseNpyHead(head, what, &layout); !status.ok()) return status;

  const auto needed = static_cast<uint64_t>(layout.data_size);
  if (stat.size < head_size || stat.size - head_size != needed)
    return Refuse(StatusCode::kShape, what,
                  "it claims " + Bytes(stat.size) + ", but its header and its shape " + ShapeText(layout.shape) + " mean " +
                      std::to_string(head_size) + " and " + std::to_string(needed));
  // Memory grows with the bytes that are really there: a small member can claim terabytes.
  std::vector<std::byte> data;
  for (size_t read = 0; data.size() < needed;) {
    const size_t have = data.size();
    const uint64_t next = std::min<uint64_t>(needed, std::max<uint64_t>({2 * have, stat.comp_size, 1 << 16}));
    data.reserve(next);  // resize alone may take twice as much
    data.resize(next);
    if (Status status = ReadUpTo(member, data.size() - have, what, &data[have], &read); !status.ok()) return status;
    if (read < data.size() - have)
      return Refuse(StatusCode::kShape, what,
                    "it holds " + Bytes(have + read) + " of data, but its shape " + ShapeText(layout.shape) + " means " + Bytes(needed));
  }
  // Reading to the end makes libzip compare the checksum.
  std::byte more{};
  size_t read = 0;
  if (Status status = ReadUpTo(member, 1, what, &more, &read); !status.ok()) return status;
  if (read != 0) return Refuse(StatusCode::kShape, what, "it holds more than the " + Bytes(needed) + " of data that its shape means");
  *array = NpyArray(layout, std::move(data));
  return {};
}

}  // namespace

Status ReadNpz(std::string_view bytes, std::string_view what, File* file) {
  return Guarded(what, [&]() -> Status {
    if (bytes.empty()) return Refuse(StatusCode::kValue, what, "it is empty");
    zip_error_t error;
    zip_error_init(&error);
    zip_source_t* source = zip_source_buffer_create(bytes.data(), bytes.size(), 0, &error);
    Archive archive(source == nullptr ? nullptr : zip_open_from_source(source, ZIP_RDONLY, &error));
    if (archive == nullptr) {
      if (source != nullptr) zip_source_free(source);
      Status status = ZipFault(what, "it is no zip archive that can be read", &error);
      zip_error_fini(&error);
      return status;
    }
    File result;
    uint64_t left = bytes.size();
    const zip_int64_t count = zip_get_num_entries(archive.get(), 0);
    for (zip_int64_t i = 0; i < count; ++i) {
      const auto index = static_cast<zip_uint64_t>(i);
      const char* raw_name = zip_get_name(archive.get(), index, ZIP_FL_ENC_RAW);
      zip_stat_t stat;
      constexpr zip_uint64_t kNeeded = ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
      if (raw_name == nullptr || zip_stat_index(archive.get(), index, 0, &stat) != 0 || (stat.valid & kNeeded) != kNeeded)
        return ZipFault(what, "member " + std::to_string(i) + " can't be described", zip_get_error(archive.get()));
      const std::string_view name = raw_name;
      const std::string member_what = std::string(what) + ": member " + Quoted(name);
      if (name.size() < kEnding.size() || name.substr(name.size() - kEnding.size()) != kEnding)
        return Refuse(StatusCode::kValue, member_what, "it must be a .npy");
      if (stat.encryption_method != ZIP_EM_NONE) return Refuse(StatusCode::kValue, member_what, "it is encrypted, which is not read");
      if (stat.comp_method != ZIP_CM_STORE && stat.comp_method != ZIP_CM_DEFLATE)
        return Refuse(StatusCode::kValue, member_what,
                      "it is compressed by method " + std::to_string(stat.comp_method) + "; stored (0) and deflated (8) members are read");
      // Members that share bytes would let a small archive unpack into any number of large arrays.
      if (stat.comp_size > left) return Refuse(StatusCode::kValue, member_what, "with it the members claim more bytes than the file has");
      left -= stat.comp_size;
      const auto [place, fresh] = result.arrays.try_emplace(std::string(name.substr(0, name.size() - kEnding.size())));
      if (!fresh) return Refuse(StatusCode::kValue, member_what, "two members have this name");
      const Member member(zip_fopen_index(archive.get(), index, 0));
      if (member == nullptr) return ZipFault(member_what, "it can't be opened", zip_get_error(archive.get()));
      if (Status status = ReadMember(member.get(), stat, member_what, &place->second); !status.ok()) return status;
    }
    *file = std::move(result);
    return {};
  });
}

Status WriteNpz(const std::string& path, std::string_view what, const File& file) {
  if (file.arrays.empty()) return Refuse(StatusCode::kValue, what, "an .npz file must have at least one array");
  int code = 0;
  // The source of a member points into `file` and into `heads`, and is read when the archive is closed.
  std::vector<std::string> heads;
  heads.reserve(file.arrays.size());
  Archive archive(zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &code));
  zip_error_t error;
  zip_error_init_with_code(&error, code);
  if (archive == nullptr) {
    Status status = ZipFault(what, "it can't be written", &error);
    zip_error_fini(&error);
    return status;
  }
  zip_error_fini(&error);
  const auto fault = [&] { return ZipFault(what, "it can't be written", zip_get_error(archive.get())); };
  for (const auto& [name, array] : file.arrays) {
    if (name.find('\0') != std::string::npos) return Refuse(StatusCode::kValue, what, "the name " + Quoted(name) + " has a zero byte");
    heads.push_back(NpyHead(array));
    const auto unconst = [](const void* data) { return static_cast<zip_uint8_t*>(const_cast<void*>(data)); };
    const zip_buffer_fragment_t parts[] = {{unconst(heads.back().data()), heads.back().size()}, {unconst(array.data.data()), array.data.size()}};
    zip_source_t* source = zip_source_buffer_fragment(archive.get(), parts, array.data.empty() ? 1 : 2, 0);
    if (source == nullptr) return fault();
    const zip_int64_t index = zip_file_add(archive.get(), (name + std::string(kEnding)).c_str(), source, ZIP_FL_ENC_UTF_8);
    if (index < 0) {
      zip_source_free(source);
      return fault();
    }
    const auto member = static_cast<zip_uint64_t>(index);
    constexpr zip_uint16_t kFirstDay = 0x21;  // 1980-01-01, so that the same arrays make the same file
    if (zip_set_file_compression(archive.get(), member, ZIP_CM_STORE, 0) != 0 || zip_file_set_dostime(archive.get(), member, 0, kFirstDay, 0) != 0)
      return fault();
  }
  if (zip_close(archive.get()) != 0) return fault();
  static_cast<void>(archive.release());  // zip_close has freed it
  return {};
}

}  // namespace tercet::io
