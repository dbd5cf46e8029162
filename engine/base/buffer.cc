#include "engine/base/buffer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace baton::base {
namespace {

absl::Status Failed(absl::string_view what, size_t size) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": bytes=", size, " error=", std::strerror(errno)));
}

absl::StatusOr<uint8_t*> Map(size_t size, int flags, int fd) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) return Failed("map memory", size);
  madvise(data, size, MADV_HUGEPAGE);  // a wish: not every kernel or memfd has huge pages
  return static_cast<uint8_t*>(data);
}

}  // namespace

absl::StatusOr<Buffer> Buffer::Allocate(size_t size) {
  if (size == 0) return Buffer();
  absl::StatusOr<uint8_t*> data = Map(size, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  if (!data.ok()) return data.status();
  return Buffer(*data, size, -1);
}

absl::StatusOr<Buffer> Buffer::AllocateShared(absl::string_view name, size_t size) {
  const int fd = memfd_create(std::string(name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return Failed("memfd_create", size);
  if (ftruncate(fd, static_cast<off_t>(size)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    absl::Status status = Failed("size memfd", size);
    close(fd);
    return status;
  }
  absl::StatusOr<uint8_t*> data = Map(size, MAP_SHARED, fd);
  if (!data.ok()) {
    close(fd);
    return data.status();
  }
  return Buffer(*data, size, fd);
}

absl::StatusOr<Buffer> Buffer::MapShared(int fd, size_t size) {
  struct stat info;
  if (fstat(fd, &info) != 0) return Failed("stat shared memory", size);
  const int seals = fcntl(fd, F_GET_SEALS);
  if (static_cast<uint64_t>(info.st_size) < size || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("shared memory: need_bytes=", size,
                                                   " file_bytes=", info.st_size, " seals=", seals));
  }
  const int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own_fd < 0) return Failed("dup shared memory", size);
  absl::StatusOr<uint8_t*> data = Map(size, MAP_SHARED, own_fd);
  if (!data.ok()) {
    close(own_fd);
    return data.status();
  }
  return Buffer(*data, size, own_fd);
}

Buffer Buffer::Adopt(uint8_t* data, size_t size, std::function<void()> release) {
  Buffer buffer(data, size, -1);
  buffer.release_ = std::move(release);
  return buffer;
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      fd_(std::exchange(other.fd_, -1)),
      release_(std::exchange(other.release_, nullptr)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  Release();
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  fd_ = std::exchange(other.fd_, -1);
  release_ = std::exchange(other.release_, nullptr);
  return *this;
}

Buffer::~Buffer() { Release(); }

void Buffer::Release() {
  if (release_ != nullptr) {
    std::exchange(release_, nullptr)();
    return;
  }
  if (data_ != nullptr) munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
}

}  // namespace baton::base
