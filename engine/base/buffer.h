#pragma once

// The only owners of big memory. A Buffer is taken at start, never in a step.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::base {

// Host memory, zeroed, aligned to 4 KiB, advised to use huge pages. Thread-compatible.
class Buffer {
 public:
  // Private to the process.
  // Errors: RESOURCE_EXHAUSTED when the memory cannot be mapped.
  static absl::StatusOr<Buffer> Allocate(size_t size);
  // Backed by a memfd, so that another process can map it once the descriptor has been passed to
  // it; nothing is left behind when the process is killed. `name` shows in /proc only. Errors:
  // RESOURCE_EXHAUSTED.
  static absl::StatusOr<Buffer> AllocateShared(absl::string_view name, size_t size);
  // Maps a memfd received from another process. Takes no ownership of `fd`.
  // Errors: INVALID_ARGUMENT when the file is smaller than `size` (a later access would be SIGBUS)
  // or not sealed against shrinking.
  static absl::StatusOr<Buffer> MapShared(int fd, size_t size);

  // Memory that came from elsewhere, for example a device's, which the host must not touch.
  // `release` gives it back.
  static Buffer Adopt(uint8_t* data, size_t size, std::function<void()> release);

  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  // The memfd, or -1 for private memory. Owned by the buffer.
  int fd() const { return fd_; }

 private:
  Buffer(uint8_t* data, size_t size, int fd) : data_(data), size_(size), fd_(fd) {}
  void Release();

  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;
  std::function<void()> release_;  // of adopted memory
};

}  // namespace baton::base
