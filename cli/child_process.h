#pragma once

// Child processes of the tool: those of `baton serve`, started, watched, stopped, and told to stop
// when their parent dies, however that happens; and short ones that are asked something.

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace baton::cli {

// The folder of this program; ours lie side by side.
std::string BinaryDir();

struct ChildAnswer {
  int exit_code = 0;   // 128 + the number of a signal that ended it
  std::string errors;  // what it wrote to stderr, the first 64 KiB
};
// Runs a program to its end; `argv[0]` is its path. Errors: INTERNAL with the reason.
absl::StatusOr<ChildAnswer> AskChild(const std::vector<std::string>& argv);

// Thread-compatible. The destructor kills a child that is still running.
class ChildProcess {
 public:
  // `argv[0]` is the path of the binary.
  // Errors: INTERNAL with the reason (file missing, no memory).
  static absl::StatusOr<ChildProcess> Start(std::string name, const std::vector<std::string>& argv);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess();

  const std::string& name() const { return name_; }
  // True until it has ended; after that exit_text() says how.
  bool Running();
  // "exit code 2", "signal 9".
  std::string exit_text() const;
  bool ended_well() const { return pid_ < 0 && status_ == 0; }
  void Signal(int signal);
  // SIGTERM, then SIGKILL when it has not ended after `grace`.
  void Stop(absl::Duration grace);

 private:
  ChildProcess(std::string name, pid_t pid) : name_(std::move(name)), pid_(pid) {}

  std::string name_;
  pid_t pid_ = -1;  // -1 once reaped
  int status_ = 0;  // of waitpid
};

}  // namespace baton::cli
