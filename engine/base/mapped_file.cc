#include "engine/base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "engine/base/status_macros.h"

namespace baton::base {
namespace {

// A descriptor that is closed on every way out.
class ScopedFd {
 public:
  explicit ScopedFd(int fd) : fd_(fd) {}
  ScopedFd(ScopedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~ScopedFd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

struct OpenedFile {
  ScopedFd fd;
  size_t size;
};

absl::Status ErrnoStatus(absl::string_view what, const std::string& path, int error) {
  const std::string message = absl::StrCat(what, ": file=", path, " reason=", strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
  if (error == ENOMEM) return absl::ResourceExhaustedError(message);
  return absl::InvalidArgumentError(message);
}

// O_NONBLOCK: opening a FIFO must not wait for a writer. The kind is checked on the descriptor, not
// on the name.
absl::StatusOr<OpenedFile> OpenRegular(const std::string& path) {
  if (path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError("cannot open: the file name holds a NUL byte");
  }
  ScopedFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (fd.get() < 0) return ErrnoStatus("cannot open", path, errno);
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus("cannot stat", path, errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("not a regular file: file=", path));
  }
  return OpenedFile{std::move(fd), static_cast<size_t>(info.st_size)};
}

absl::StatusOr<std::string> RealPath(const std::string& path) {
  char resolved[PATH_MAX];
  if (realpath(path.c_str(), resolved) == nullptr) {
    return ErrnoStatus("cannot resolve", path, errno);
  }
  return std::string(resolved);
}

absl::string_view ParentOf(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == absl::string_view::npos ? absl::string_view() : path.substr(0, slash);
}

// Both paths are real ones. True when `target` lies in `directory` itself or, for a snapshot of the
// Hugging Face cache, in the blobs of the same repository.
bool MayBeServedFrom(absl::string_view directory, absl::string_view target) {
  if (ParentOf(target) == absl::StripSuffix(directory, "/")) return true;
  const absl::string_view snapshots = ParentOf(directory);
  if (!absl::EndsWith(snapshots, "/snapshots")) return false;
  return ParentOf(target) == absl::StrCat(ParentOf(snapshots), "/blobs");
}

}  // namespace

absl::StatusOr<std::unique_ptr<MappedFile>> MappedFile::Open(const std::string& path) {
  BATON_ASSIGN_OR_RETURN(OpenedFile file, OpenRegular(path));
  if (file.size == 0) {
    return absl::InvalidArgumentError(absl::StrCat("empty file: file=", path));
  }
  void* data = mmap(nullptr, file.size, PROT_READ, MAP_SHARED, file.fd.get(), 0);
  if (data == MAP_FAILED) return ErrnoStatus("cannot map", path, ENOMEM);
  return std::unique_ptr<MappedFile>(
      new MappedFile(path, static_cast<const uint8_t*>(data), file.size));
}

MappedFile::~MappedFile() { munmap(const_cast<uint8_t*>(data_), size_); }

absl::StatusOr<std::string> ResolveInDirectory(const std::string& directory,
                                               absl::string_view name) {
  const auto refuse = [&](absl::string_view reason) {
    return absl::InvalidArgumentError(absl::StrCat("file name refused: directory=", directory,
                                                   " name=\"", absl::CHexEscape(name),
                                                   "\" reason=", reason));
  };
  if (name.empty() || name == "." || name == "..") return refuse("not a file name");
  if (name.find('\0') != absl::string_view::npos) return refuse("holds a NUL byte");
  if (name.find('/') != absl::string_view::npos || name.find('\\') != absl::string_view::npos) {
    return refuse("only plain names inside the model directory are accepted");
  }
  BATON_ASSIGN_OR_RETURN(const std::string real_directory, RealPath(directory));
  BATON_ASSIGN_OR_RETURN(const std::string real_path,
                         RealPath(absl::StrCat(real_directory, "/", name)));
  if (!MayBeServedFrom(real_directory, real_path)) {
    return refuse("a symbolic link leads out of the model directory");
  }
  return real_path;
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t max_bytes) {
  BATON_ASSIGN_OR_RETURN(OpenedFile file, OpenRegular(path));
  if (file.size > max_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "file too large: file=", path, " bytes=", file.size, " max_bytes=", max_bytes));
  }
  std::string text(file.size, '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = read(file.fd.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus("cannot read", path, errno);
    if (got == 0) break;  // cut short since fstat
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

}  // namespace baton::base
