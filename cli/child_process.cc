#include "cli/child_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace baton::cli {
namespace {

constexpr size_t kErrorsMaxBytes = size_t{64} << 10;

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

// As exec wants it; borrowed.
std::vector<char*> Pointers(const std::vector<std::string>& argv) {
  std::vector<char*> pointers;
  for (const std::string& word : argv) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

std::string BinaryDir() {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  return size > 0 ? std::filesystem::path(std::string(path, static_cast<size_t>(size)))
                        .parent_path()
                        .string()
                  : ".";
}

absl::StatusOr<ChildAnswer> AskChild(const std::vector<std::string>& argv) {
  int errors[2];
  if (pipe2(errors, O_CLOEXEC) != 0)
    return absl::InternalError(absl::StrCat("pipe: ", std::strerror(errno)));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, errors[1], STDERR_FILENO);
  pid_t pid = -1;
  const int error =
      posix_spawn(&pid, argv[0].c_str(), &actions, nullptr, Pointers(argv).data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(errors[1]);
  ChildAnswer answer;
  char piece[4096];
  for (ssize_t got; error == 0 && (got = read(errors[0], piece, sizeof(piece))) > 0;) {
    if (answer.errors.size() < kErrorsMaxBytes)
      answer.errors.append(piece, static_cast<size_t>(got));
  }
  close(errors[0]);
  if (error != 0)
    return absl::InternalError(absl::StrCat("start ", argv[0], ": ", std::strerror(error)));
  int status = 0;
  waitpid(pid, &status, 0);
  answer.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return answer;
}

absl::StatusOr<ChildProcess> ChildProcess::Start(std::string name,
                                                 const std::vector<std::string>& argv) {
  std::vector<char*> pointers = Pointers(argv);
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
