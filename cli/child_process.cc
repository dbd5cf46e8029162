#include "cli/child_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace baton::cli {
namespace {

// Runs in the child between fork and exec: only async-signal-safe calls.
[[noreturn]] void Exec(char* const* argv, pid_t parent, int error_fd) {
  setpgid(
      0, 0);  // Ctrl-C in the terminal reaches `serve` only, which then stops its children in order
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);
  execv(argv[0], argv);
  const int error = errno;
  if (write(error_fd, &error, sizeof(error)) < 0) _exit(126);
  _exit(127);
}

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(std::string name,
                                                 const std::vector<std::string>& argv) {
  std::vector<char*> pointers;
  for (const std::string& word : argv) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  int error_pipe[2];
  if (pipe2(error_pipe, O_CLOEXEC) != 0)
    return absl::InternalError(absl::StrCat("pipe: ", std::strerror(errno)));
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) Exec(pointers.data(), parent, error_pipe[1]);
  close(error_pipe[1]);
  int error = 0;
  const bool failed = pid < 0 || read(error_pipe[0], &error, sizeof(error)) == sizeof(error);
  close(error_pipe[0]);
  if (!failed) return ChildProcess(std::move(name), pid);
  if (pid > 0) waitpid(pid, nullptr, 0);
  return absl::InternalError(
      absl::StrCat("start ", argv[0], ": ", std::strerror(pid < 0 ? errno : error)));
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : name_(std::move(other.name_)), pid_(std::exchange(other.pid_, -1)), status_(other.status_) {}

ChildProcess::~ChildProcess() {
  if (Running()) Stop(absl::ZeroDuration());
}

bool ChildProcess::Running() {
  if (pid_ < 0) return false;
  if (waitpid(pid_, &status_, WNOHANG) == 0) return true;
  pid_ = -1;
  return false;
}

std::string ChildProcess::exit_text() const {
  if (WIFSIGNALED(status_)) return absl::StrCat("signal ", WTERMSIG(status_));
  return absl::StrCat("exit code ", WEXITSTATUS(status_));
}

void ChildProcess::Signal(int signal) {
  if (Running()) kill(pid_, signal);
}

void ChildProcess::Stop(absl::Duration grace) {
  Signal(SIGTERM);
  const absl::Time deadline = absl::Now() + grace;
  while (Running() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(10));
  Signal(SIGKILL);
  while (Running()) absl::SleepFor(absl::Milliseconds(1));
}

}  // namespace baton::cli
