#include "tests/simt/fake_nccl.h"

#include <cuda_runtime.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "engine/base/nccl_library.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/fake_cudart.h"

namespace baton::base {

// A send or a receive.
struct FakeTransfer {
  bool is_send;
  uint8_t* data;
  size_t bytes;
  cudaStream_t stream;
  size_t done = 0;  // of a header that says how many bytes follow, and of these
  uint64_t header = 0;
  bool ended = false;
};

struct NcclComm {
  int rank = 0;
  int socket = -1, listener = -1;
  enum { kMeeting, kGreeting, kJoined } state = kMeeting;
  int result = kNcclSuccess;
  int asks_left = 0;  // until what is in progress ends
  bool aborted = false;
  std::shared_ptr<FakeTransfer> posting;
  std::deque<std::shared_ptr<FakeTransfer>> order;  // as they were posted: one after another
  std::shared_ptr<NcclComm> self;                   // until it is aborted
};

}  // namespace baton::base

namespace baton::simt {
namespace {

using base::FakeTransfer;
using base::NcclComm;
using base::NcclConfig;
using base::NcclResult;
using base::NcclUniqueId;

constexpr NcclResult kSystemError = 2, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5;
constexpr char kIdMark[] = "baton-emulated-nccl-";
constexpr size_t kStride = size_t{64} << 10;  // most bytes that move when asked

struct Library {
  FakeNcclConfig config;
  FakeNcclStats stats;
  std::map<std::string, int> listeners;  // of ids that nobody has joined with yet
  uint64_t random = 1;
  std::string last_error;

  Library() {
    if (const char* version = std::getenv("BATON_EMULATED_NCCL"))
      config.version = std::atoi(version);
  }
  int Random(int limit) {
    random = random * 6364136223846793005ull + config.seed * 2 + 1;
    return static_cast<int>((random >> 33) % static_cast<uint64_t>(limit));
  }
  NcclResult Misuse(const char* what) {
    ++stats.misuses;
    last_error = what;
    return kInvalidUsage;
  }
};

struct Locked {
  std::lock_guard<std::recursive_mutex> lock{RuntimeMutex()};
  Library& library = TheLibrary();

  static Library& TheLibrary() {
    static Library* library = new Library;
    return *library;
  }
};

sockaddr_un Address(const std::string& name, socklen_t* size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // abstract
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

int NewSocket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

NcclResult GetVersion(int* version) {
  Locked l;
  *version = l.library.config.version;
  return base::kNcclSuccess;
}

NcclResult GetUniqueId(NcclUniqueId* id) {
  Locked l;
  static std::atomic<int> count{0};
  const std::string name =
      kIdMark + std::to_string(getpid()) + "-" + std::to_string(count.fetch_add(1));
  socklen_t size = 0;
  const sockaddr_un address = Address(name, &size);
  const int listener = NewSocket();
  if (listener < 0 || bind(listener, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener, 1) != 0)
    return kSystemError;
  l.library.listeners[name] = listener;
  id->bytes.fill(0);
  std::memcpy(id->bytes.data(), name.data(), name.size());
  return base::kNcclSuccess;
}

NcclResult Init(NcclComm** out, int ranks, NcclUniqueId id, int rank, NcclConfig* config) {
  Locked l;
  // The part of the configuration that 2.17 knows.
  if (config->size != 40 || config->magic != 0xcafebeef || config->version < 21700 ||
      config->blocking != 0 || config->max_ctas < 1 || config->cga_cluster_size != INT_MIN)
    return kInvalidArgument;
  const std::string name(id.bytes.data(), strnlen(id.bytes.data(), id.bytes.size() - 1));
  if (ranks != 2 || rank < 0 || rank > 1 || name.rfind(kIdMark, 0) != 0 || !HasThreadContext())
    return kInvalidArgument;
  auto comm = std::make_shared<NcclComm>();
  comm->rank = rank;
  comm->asks_left = l.library.Random(4);
  if (rank == 0) {
    const auto found = l.library.listeners.find(name);
    if (found == l.library.listeners.end()) return kInvalidArgument;
    comm->listener = found->second;
    l.library.listeners.erase(found);
  } else {
    socklen_t size = 0;
    const sockaddr_un address = Address(name, &size);
    comm->socket = NewSocket();
    // (A root that is gone already: nobody will ever answer.)
    if (connect(comm->socket, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
      close(comm->socket);
      comm->socket = -1;
    }
  }
  comm->self = comm;
  *out = comm.get();
  ++l.library.stats.communicators;
  return base::kNcclInProgress;
}

// Takes joining further. False: in progress.
bool Meet(Library* library, NcclComm* comm) {
  if (comm->state == NcclComm::kMeeting) {
    if (comm->rank == 0 && comm->socket < 0) {
      comm->socket = accept4(comm->listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    }
    if (comm->socket < 0) return false;
    const int version = library->config.version;
    if (send(comm->socket, &version, sizeof(version), MSG_NOSIGNAL) != sizeof(version))
      return false;
    comm->state = NcclComm::kGreeting;
  }
  int version = 0;
  if (recv(comm->socket, &version, sizeof(version), 0) != sizeof(version)) return false;
  comm->state = NcclComm::kJoined;
  comm->result = library->config.init_result;
  if (version != library->config.version) {
    comm->result = kInvalidUsage;
    library->last_error = "Mismatched NCCL version detected";
  }
  return true;
}

// Moves some bytes of the transfer whose turn it is. True: it has ended.
bool Move(NcclComm* comm, FakeTransfer* transfer, bool corrupt) {
  uint8_t* const header = reinterpret_cast<uint8_t*>(&transfer->header);
  while (true) {
    const bool in_header = transfer->done < sizeof(transfer->header);
    uint8_t* const place = in_header ? header + transfer->done
                                     : transfer->data + (transfer->done - sizeof(transfer->header));
    const size_t end = sizeof(transfer->header) + (in_header ? 0 : transfer->bytes);
    const size_t size = std::min(end - transfer->done, kStride);
    const ssize_t moved = transfer->is_send ? send(comm->socket, place, size, MSG_NOSIGNAL)
                                            : recv(comm->socket, place, size, 0);
    if (moved <= 0) return false;  // the peer does nothing now, or never will
    transfer->done += static_cast<size_t>(moved);
    if (in_header) {
      if (transfer->header == transfer->bytes || transfer->done < sizeof(transfer->header))
        continue;
      comm->result = kInternalError;  // counts that do not match
      return false;
    }
    if (transfer->done < end) return false;
    if (corrupt && !transfer->is_send) transfer->data[transfer->bytes - 1] ^= 0x10;
    return true;
  }
}

void Post(Library* library, NcclComm* comm, std::shared_ptr<FakeTransfer> transfer) {
  if (library->config.fail) {
    comm->result = kSystemError;
    library->last_error = "NET/Emulated : the link is down";
    return;
  }
  comm->order.push_back(transfer);
  EnqueuePeerWork(transfer->stream, [comm = comm->self, transfer, config = &library->config] {
    if (comm->aborted || transfer->ended) return true;
    if (config->hold || comm->order.front() != transfer || comm->result != base::kNcclSuccess)
      return false;
    if (!Move(comm.get(), transfer.get(), config->corrupt)) return false;
    comm->order.pop_front();
    return transfer->ended = true;
  });
}

NcclResult AsyncError(NcclComm* comm, NcclResult* state) {
  Locked l;
  *state = base::kNcclInProgress;
  if (comm->asks_left > 0) {
    --comm->asks_left;
    return base::kNcclSuccess;
  }
  if (comm->state != NcclComm::kJoined &&
      (l.library.config.init_never_ends || !Meet(&l.library, comm)))
    return base::kNcclSuccess;
  if (comm->posting != nullptr) Post(&l.library, comm, std::exchange(comm->posting, nullptr));
  *state = comm->result;
  return base::kNcclSuccess;
}

NcclResult Transfer(bool is_send,
                    void* data,
                    size_t count,
                    int type,
                    int peer,
                    NcclComm* comm,
                    cudaStream_t stream) {
  Locked l;
  if (comm->state != NcclComm::kJoined || comm->asks_left > 0 || comm->posting != nullptr)
    return l.library.Misuse("the communicator is in progress");
  if (!HasThreadContext()) return l.library.Misuse("no device is chosen");
  if (count == 0 || type != base::kNcclBytes || peer != 1 - comm->rank ||
      !DeviceMemory::Get().Contains(data, count))
    return l.library.Misuse("not a transfer of device memory to the other rank");
  auto transfer = std::make_shared<FakeTransfer>();
  *transfer = {is_send, static_cast<uint8_t*>(data), count, stream};
  if (is_send) transfer->header = count;
  comm->asks_left = l.library.Random(3);
  if (comm->asks_left > 0) {
    comm->posting = std::move(transfer);
    return base::kNcclInProgress;
  }
  Post(&l.library, comm, std::move(transfer));
  return comm->result;
}

NcclResult Send(
    const void* data, size_t count, int type, int peer, NcclComm* comm, base::CuStream* stream) {
  return Transfer(true, const_cast<void*>(data), count, type, peer, comm,
                  reinterpret_cast<cudaStream_t>(stream));
}

NcclResult Receive(
    void* data, size_t count, int type, int peer, NcclComm* comm, base::CuStream* stream) {
  return Transfer(false, data, count, type, peer, comm, reinterpret_cast<cudaStream_t>(stream));
}

NcclResult Abort(NcclComm* comm) {
  int delay_ms = 0;
  {
    Locked l;
    delay_ms = l.library.config.abort_ms;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
  Locked l;
  comm->aborted = true;
  for (int fd : {comm->socket, comm->listener}) {
    if (fd >= 0) close(fd);
  }
  ++l.library.stats.aborted;
  --l.library.stats.communicators;
  const std::shared_ptr<NcclComm> last = std::move(comm->self);
  return base::kNcclSuccess;
}

const char* ErrorString(NcclResult result) {
  switch (result) {
    case kSystemError:
      return "unhandled system error (emulated)";
    case kInternalError:
      return "internal error (emulated)";
    case kInvalidArgument:
      return "invalid argument (emulated)";
    default:
      return "invalid usage (emulated)";
  }
}

const char* LastError(NcclComm*) {
  Locked l;
  thread_local std::string copy;
  copy = l.library.last_error;
  return copy.c_str();
}

}  // namespace

FakeNcclConfig& GetFakeNcclConfig() { return Locked::TheLibrary().config; }
FakeNcclStats GetFakeNcclStats() {
  Locked l;
  return l.library.stats;
}

}  // namespace baton::simt

namespace baton::base {

// Null for what the emulated library has not.
void* EmulatedNcclFunction(const char* name) {
  const simt::FakeNcclConfig& config = simt::GetFakeNcclConfig();
  if (config.version == 0 || config.missing == name) return nullptr;
  static const auto* const functions = new std::map<std::string, void*>{
      {"ncclGetVersion", reinterpret_cast<void*>(&simt::GetVersion)},
      {"ncclGetUniqueId", reinterpret_cast<void*>(&simt::GetUniqueId)},
      {"ncclCommInitRankConfig", reinterpret_cast<void*>(&simt::Init)},
      {"ncclCommGetAsyncError", reinterpret_cast<void*>(&simt::AsyncError)},
      {"ncclCommAbort", reinterpret_cast<void*>(&simt::Abort)},
      {"ncclSend", reinterpret_cast<void*>(&simt::Send)},
      {"ncclRecv", reinterpret_cast<void*>(&simt::Receive)},
      {"ncclGetErrorString", reinterpret_cast<void*>(&simt::ErrorString)},
      {"ncclGetLastError", reinterpret_cast<void*>(&simt::LastError)},
  };
  const auto found = functions->find(name);
  return found == functions->end() ? nullptr : found->second;
}

}  // namespace baton::base
