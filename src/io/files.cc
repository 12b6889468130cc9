// Files on disk: told apart by their endings, read whole, written to a temporary name that is then renamed.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <system_error>
#include <utility>

#include "src/io/parts.hpp"

namespace tercet::io {
namespace {

enum class Kind { kSafetensors, kNpz, kNpy };

Status KindOf(const std::string& path, Kind* kind) {
  const auto ends_with = [&](std::string_view ending) {
    return path.size() >= ending.size() && std::string_view(path).substr(path.size() - ending.size()) == ending;
  };
  if (ends_with(".safetensors"))
    *kind = Kind::kSafetensors;
  else if (ends_with(".npz"))
    *kind = Kind::kNpz;
  else if (ends_with(".npy"))
    *kind = Kind::kNpy;
  else
    return Refuse(StatusCode::kValue, path, "its name must end in .safetensors, .npz or .npy");
  return {};
}

Status SystemFault(std::string_view path, const std::string& sentence) {
  return Refuse(errno == ENOMEM ? StatusCode::kOutOfMemory : StatusCode::kValue, path,
                sentence + " (" + std::generic_category().message(errno) + ")");
}

std::string Folder(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }  // empty, or ends in /

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }
  bool Close() { return ::close(std::exchange(fd_, -1)) == 0; }  // says whether what was written has arrived
  void Reset(int fd) { fd_ = fd; }

 private:
  int fd_;
};

Status ReadBytes(const std::string& path, std::unique_ptr<char[]>* bytes, size_t* size) {
  // Without O_NONBLOCK opening a pipe would wait for somebody to write to it.
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return SystemFault(path, "it can't be opened");
  struct stat stat;
  if (::fstat(fd.get(), &stat) != 0) return SystemFault(path, "it can't be opened");
  if (!S_ISREG(stat.st_mode)) return Refuse(StatusCode::kValue, path, "it is not a regular file");
  const auto capacity = static_cast<size_t>(stat.st_size);
  bytes->reset(new char[capacity]);  // not zeroed: a file that only claims to be huge must not fill the memory before it is read
  for (*size = 0; *size < capacity;) {
    const ssize_t got = ::read(fd.get(), bytes->get() + *size, std::min<size_t>(capacity - *size, 1 << 30));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemFault(path, "it can't be read");
    if (got == 0) break;
    *size += static_cast<size_t>(got);
  }
  return {};
}

// A new empty file beside the one that it will become, gone unless it is renamed. It has the permissions that the umask leaves.
class Temporary {
 public:
  Temporary() = default;
  ~Temporary() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  const std::string& path() const { return path_; }
  Descriptor& descriptor() { return descriptor_; }

  Status Create(const std::string& target) {
    static std::atomic<uint32_t> counter{0};
    for (int attempt = 0; attempt < 100; ++attempt) {
      std::string name = Folder(target) + ".tercet-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + ".tmp";
      descriptor_.Reset(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      if (descriptor_.get() >= 0) {
        path_ = std::move(name);
        return {};
      }
      if (errno != EEXIST) break;
    }
    return SystemFault(target, "no temporary file can be made beside it");
  }
  Status Become(const std::string& target) {
    if (::rename(path_.c_str(), target.c_str()) != 0) return SystemFault(target, "it can't be replaced");
    path_.clear();
    return {};
  }

 private:
  std::string path_;
  Descriptor descriptor_;
};

Status WriteBytes(int fd, const std::string& path, const void* data, size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t put = ::write(fd, at, std::min<size_t>(size, 1 << 30));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return SystemFault(path, "it can't be written");
    at += put;
    size -= static_cast<size_t>(put);
  }
  return {};
}

Status CheckArray(Kind kind, const std::string& path, const std::string& name, const Array& array) {
  const int64_t size = ByteSize(array.shape, array.dtype);
  if (array.shape.size() > kMaxAxes || size < 0 || array.data.size() != static_cast<uint64_t>(size))
    return Refuse(StatusCode::kShape, path,
                  "array " + Quoted(name) + " has " + Bytes(array.data.size()) + ", which is not what its dtype and its " +
                      std::to_string(array.shape.size()) + " sizes mean");
  if (kind != Kind::kSafetensors && array.dtype == Dtype::kBF16)
    return Refuse(StatusCode::kDtype, path, "array " + Quoted(name) + " is bf16, for which NumPy has no dtype; a .safetensors file can hold it");
  return {};
}

}  // namespace

Status Read(const std::string& path, File* file) {
  return Guarded(path, [&]() -> Status {
    Kind kind{};
    if (Status status = KindOf(path, &kind); !status.ok()) return status;
    std::unique_ptr<char[]> owner;
    size_t size = 0;
    if (Status status = ReadBytes(path, &owner, &size); !status.ok()) return status;
    const std::string_view bytes(owner.get(), size);
    if (kind == Kind::kSafetensors) return ReadSafetensors(bytes, path, file);
    if (kind == Kind::kNpz) return ReadNpz(bytes, path, file);
    Array array;
    if (Status status = ReadNpy(bytes, path, &array); !status.ok()) return status;
    const std::string name = path.substr(Folder(path).size());
    File result;
    result.arrays[name.substr(0, name.size() - std::string_view(".npy").size())] = std::move(array);
    *file = std::move(result);
    return {};
  });
}

Status Write(const std::string& path, const File& file) {
  return Guarded(path, [&]() -> Status {
    Kind kind{};
    if (Status status = KindOf(path, &kind); !status.ok()) return status;
    for (const auto& [name, array] : file.arrays)
      if (Status status = CheckArray(kind, path, name, array); !status.ok()) return status;
    if (kind == Kind::kNpy && file.arrays.size() != 1)
      return Refuse(StatusCode::kValue, path, "a .npy file takes exactly one array, and there are " + std::to_string(file.arrays.size()));

    std::string head;
    std::vector<const Array*> order;
    if (kind == Kind::kSafetensors) {
      if (Status status = SafetensorsHead(path, file, &head, &order); !status.ok()) return status;
    } else if (kind == Kind::kNpy) {
      order.push_back(&file.arrays.begin()->second);
      head = NpyHead(*order[0]);
    }
    Temporary temporary;
    if (Status status = temporary.Create(path); !status.ok()) return status;
    Descriptor& descriptor = temporary.descriptor();
    if (kind == Kind::kNpz) {
      if (Status status = WriteNpz(temporary.path(), path, file); !status.ok()) return status;
    } else {
      if (Status status = WriteBytes(descriptor.get(), path, head.data(), head.size()); !status.ok()) return status;
      for (const Array* array : order)
        if (Status status = WriteBytes(descriptor.get(), path, array->data.data(), array->data.size()); !status.ok()) return status;
    }
    if (!descriptor.Close()) return SystemFault(path, "it can't be written");
    return temporary.Become(path);
  });
}

}  // namespace tercet::io
