// The scheduler: blocks, warps, barriers, shared memory, reports. Compiled without the thread
// sanitizer, which is to see the kernels' accesses only.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "tests/simt/engine_state.h"
#include "tests/simt/fiber.h"
#include "tests/simt/simt.h"

#if defined(BATON_SIMT_MSAN)
// Libraries that are built without the sanitizer write to the heap unseen: only memory that the
// emulator hands to kernels is poisoned when it is fresh.
extern "C" const char* __msan_default_options() { return "poison_in_malloc=0:poison_in_free=0"; }
#endif

namespace baton::simt {

constinit thread_local ThreadView* current_thread = nullptr;
constinit thread_local uint3 block_index{};
constinit thread_local dim3 block_dim{}, grid_dim{};
constinit thread_local char* shared_window = nullptr;

namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarpThreads;
constexpr size_t kDefaultDynamicLimit = 48 * 1024;
#if defined(__SANITIZE_ADDRESS__) || defined(BATON_SIMT_TSAN) || defined(BATON_SIMT_MSAN)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

}  // namespace

Thread* Self() { return static_cast<Thread*>(current_thread); }

namespace {

struct Warp {
  Thread* threads = nullptr;
  uint32_t index = 0;
  uint32_t ready = 0, alive = 0, waiting = 0;  // one bit a lane; waiting: in a warp collective
  // How often the mask with this lowest lane has met: keeps the edges of successive syncs apart.
  uint32_t phases[kWarpThreads] = {};
};

struct NamedBarrierState {
  uint32_t arrived = 0, expected = 0, phase = 0;
};

// Fibers, shared memory and addresses for memory edges of one block. One set is enough, but under
// the thread sanitizer consecutive blocks take different ones, so that races between them show.
struct BlockResources {
  std::vector<std::unique_ptr<Thread[]>> warps;
  SharedArena arena;
  uint32_t uses = 0;
  char block_edges[2] = {}, exit_edges[2] = {}, named_edges[kNamedBarriers][2] = {};
  char warp_edges[kMaxWarps][kWarpThreads][2] = {};
};

void ThreadMain();

// Of the program; an engine adds its own when a launch has ended.
struct Shared {
  Config config;
  std::mutex mutex;  // of the rest
  Stats stats;
  std::string report;
  // Kernels and what they may use of dynamic shared memory.
  std::vector<std::pair<const void*, size_t>> dynamic_limits;
  std::atomic<uint64_t> blocks{0};  // numbers them, so that no two of any engine have the same
  std::atomic<uint64_t> peer_waits{0};
};

Shared& TheShared() {
  static Shared* shared = new Shared;
  return *shared;
}

class Engine {
 public:
  const Config& config = TheShared().config;
  Stats stats;
  std::string report;
  Thread main;
  std::thread::id owner = std::this_thread::get_id();

  // Fibers go on where they stopped, in code that knows addresses of its OS thread: on another one
  // they begin anew.
  void MoveToThisThread();
  cudaError_t Run(
      dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*), const void* arguments);
  void WarpCollective(Thread* self, bool orders_memory);
  BarrierResult BlockBarrier(Thread* self, bool predicate);
  void NamedBarrier(Thread* self, uint32_t num_threads, bool wait);
  void Yield(Thread* self);
  void YieldToPeer(Thread* self);
  void BeginThread();
  void CallBody() { body_(arguments_); }
  void EndThread(Thread* self);
  [[noreturn]] void Abandon(const char* text);
  SharedArena& arena() { return resources_->arena; }
  void* dynamic_shared() const { return dynamic_shared_; }
  uint64_t block_number() const { return block_number_; }

 private:
  void Prepare(BlockResources* resources);
  static void ResetFibers(BlockResources* resources);
  void RunBlock(BlockResources* resources);
  void StartWarps();
  Thread* PickNext();
  Thread& RandomReady();
  uint64_t NextRandom();
  uint64_t BlockInOrder(uint64_t turn, uint64_t num_blocks) const;
  void Block(Thread* self);
  void SwitchTo(Thread* next);
  void MakeReady(Thread* thread);
  void NotReady(Thread* thread);
  bool TryCompleteWarp(Warp* warp, uint32_t mask);
  void CompleteBlockBarrier();
  void ReportDeadlock();

  std::vector<std::unique_ptr<BlockResources>> all_resources_;
  BlockResources* resources_ = nullptr;
  void (*body_)(const void*) = nullptr;
  const void* arguments_ = nullptr;
  void* dynamic_shared_ = nullptr;
  size_t dynamic_bytes_ = 0;
  uint64_t block_number_ = 0, random_ = 1, yields_ = 0, peer_yields_ = 0;
  std::chrono::steady_clock::time_point waits_since_;  // the block's first wait for a peer
  uint32_t num_threads_ = 0, num_warps_ = 0, num_alive_ = 0, ready_warps_ = 0, current_warp_ = 0;
  Warp warps_[kMaxWarps];
  uint32_t barrier_arrived_ = 0, barrier_phase_ = 0;
  BarrierResult barrier_results_[2];
  NamedBarrierState named_[kNamedBarriers];
  bool failed_ = false;
  cudaError_t error_ = cudaSuccess;
  char start_edge_ = 0, end_edge_ = 0;
};

// The engine of the launch that this OS thread runs.
constinit thread_local Engine* running = nullptr;
Engine& TheEngine() { return *running; }

// Engines that run nothing. They are kept: fibers may outlive static destructors.
std::vector<std::unique_ptr<Engine>>& IdleEngines() {
  static auto* idle = new std::vector<std::unique_ptr<Engine>>;
  return *idle;
}

// The one that this OS thread had before, if it can be.
std::unique_ptr<Engine> TakeEngine() {
  const std::lock_guard<std::mutex> lock(TheShared().mutex);
  std::vector<std::unique_ptr<Engine>>& idle = IdleEngines();
  if (idle.empty()) return std::make_unique<Engine>();
  const auto ours = std::find_if(idle.begin(), idle.end(), [](const auto& engine) {
    return engine->owner == std::this_thread::get_id();
  });
  std::swap(ours != idle.end() ? *ours : idle.front(), idle.back());
  std::unique_ptr<Engine> engine = std::move(idle.back());
  idle.pop_back();
  return engine;
}

void GiveBack(std::unique_ptr<Engine> engine, bool failed) {
  Shared& shared = TheShared();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.stats.Add(std::exchange(engine->stats, Stats()));
  if (failed) shared.report = engine->report;
  IdleEngines().push_back(std::move(engine));
}

// The bit that follows `after` in circular order.
int NextBit(uint32_t bits, int after, bool descending) {
  if (descending) {
    const uint32_t below = after <= 0 ? 0 : bits & ((1u << after) - 1);
    return 31 - std::countl_zero(below != 0 ? below : bits);
  }
  const uint32_t above = after >= 31 ? 0 : bits & (~0u << (after + 1));
  return std::countr_zero(above != 0 ? above : bits);
}

int NthBit(uint32_t bits, uint64_t n) {
  for (uint64_t skip = n % std::popcount(bits); skip > 0; --skip) bits &= bits - 1;
  return std::countr_zero(bits);
}

uint32_t LowBits(uint32_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

bool SameSite(const Site& a, const Site& b) {
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

void ThreadMain() {
  Engine& engine = TheEngine();
  FinishSwitch(&Self()->fiber, &engine.main.fiber);
  for (;;) {
    engine.BeginThread();
    engine.CallBody();
    engine.EndThread(Self());
  }
}

cudaError_t Engine::Run(
    dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*), const void* arguments) {
  body_ = body;
  arguments_ = arguments;
  dynamic_bytes_ = shared_bytes;
  num_threads_ = block.x * block.y * block.z;
  num_warps_ = (num_threads_ + kWarpThreads - 1) / kWarpThreads;
  block_dim = block;
  grid_dim = grid;
  failed_ = false;
  error_ = cudaSuccess;
  random_ = config.seed * 0x9e3779b97f4a7c15ull + 1;
  ++stats.launches;
  const uint64_t num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  size_t num_sets = 1;
#if defined(BATON_SIMT_TSAN)
  num_sets = std::min<uint64_t>({num_blocks, std::max(1u, 2048 / num_threads_), 16});
#endif
  while (all_resources_.size() < num_sets)
    all_resources_.push_back(std::make_unique<BlockResources>());
  for (size_t i = 0; i < num_sets; ++i) Prepare(all_resources_[i].get());
  AdoptCurrentStack(&main.fiber);
  ReleaseMemory(&start_edge_);
  for (uint64_t turn = 0; turn < num_blocks && !failed_; ++turn) {
    const uint64_t number = BlockInOrder(turn, num_blocks);
    block_index = uint3{static_cast<unsigned>(number % grid.x),
                        static_cast<unsigned>(number / grid.x % grid.y),
                        static_cast<unsigned>(number / grid.x / grid.y)};
    RunBlock(all_resources_[turn % num_sets].get());
  }
  AcquireMemory(&end_edge_);
  return error_;
}

uint64_t Engine::BlockInOrder(uint64_t turn, uint64_t num_blocks) const {
  if (config.order == Order::kAscending) return turn;
  if (config.order == Order::kDescending) return num_blocks - 1 - turn;
  uint64_t step = 2 * (config.seed % num_blocks) + 1;  // an affine permutation
  while (std::gcd(step, num_blocks) != 1) ++step;
  return (step % num_blocks * turn + config.seed) % num_blocks;
}

void Engine::Prepare(BlockResources* resources) {
  while (resources->warps.size() < num_warps_) {
    const uint32_t first = static_cast<uint32_t>(resources->warps.size()) * kWarpThreads;
    auto threads = std::make_unique<Thread[]>(kWarpThreads);
    for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
      threads[lane].lane = lane;
      threads[lane].linear = first + lane;
      CreateFiber(&threads[lane].fiber, kStackBytes, first + lane);
      ResetFiber(&threads[lane].fiber, &ThreadMain, first + lane);
    }
    resources->warps.push_back(std::move(threads));
  }
}

void Engine::RunBlock(BlockResources* resources) {
  resources_ = resources;
  ++resources->uses;
  block_number_ = ++TheShared().blocks;
  ++stats.blocks;
  stats.threads += num_threads_;
  resources->arena.Clear();
  shared_window = resources->arena.base();
  barrier_arrived_ = barrier_phase_ = 0;
  yields_ = peer_yields_ = 0;
  for (NamedBarrierState& barrier : named_) barrier = NamedBarrierState();
  current_thread = &main;
  dynamic_shared_ = nullptr;
  if (dynamic_bytes_ > 0) dynamic_shared_ = resources->arena.Take(dynamic_bytes_, 1024);
  num_alive_ = num_threads_;
  StartWarps();
  current_warp_ = config.order == Order::kDescending ? num_warps_ - 1 : 0;
  SwitchTo(PickNext());
  current_thread = nullptr;
  if (!failed_ && num_alive_ != 0) ReportDeadlock();
  if (!failed_ && !resources->arena.RedZonesIntact()) {
    failed_ = true;
    error_ = cudaErrorIllegalAddress;
    report = "a write beyond an array in shared memory";
  }
  if (failed_) ResetFibers(resources);
}

void Engine::StartWarps() {
  ready_warps_ = LowBits(num_warps_);
  for (uint32_t w = 0; w < num_warps_; ++w) {
    Warp& warp = warps_[w];
    const uint32_t lanes = std::min<uint32_t>(kWarpThreads, num_threads_ - w * kWarpThreads);
    warp = Warp();
    warp.threads = resources_->warps[w].get();
    warp.index = w;
    warp.ready = warp.alive = LowBits(lanes);
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      Thread& thread = warp.threads[lane];
      const uint32_t i = thread.linear;
      thread.thread_index =
          uint3{i % block_dim.x, i / block_dim.x % block_dim.y, i / block_dim.x / block_dim.y};
      thread.warp = w;
      thread.state = ThreadState::kReady;
      thread.copies.Clear();
    }
  }
}

void Engine::BeginThread() {
  AcquireMemory(&start_edge_);
  // A block is ordered after the previous block on the same fibers, never among its own threads.
  AcquireMemory(&resources_->exit_edges[(resources_->uses - 1) & 1]);
}

void Engine::EndThread(Thread* self) {
  Warp& warp = warps_[self->warp];
  self->state = ThreadState::kDone;
  self->copies.Clear();
  warp.alive &= ~(1u << self->lane);
  NotReady(self);
  --num_alive_;
  ReleaseMemory(&resources_->exit_edges[resources_->uses & 1]);
  ReleaseMemory(&end_edge_);
  // Others may have been waiting for this thread only.
  for (uint32_t left = warp.waiting; left != 0;) {
    const uint32_t mask = warp.threads[std::countr_zero(left)].mask;
    TryCompleteWarp(&warp, mask);
    left &= ~mask;
  }
  if (barrier_arrived_ != 0 && barrier_arrived_ == num_alive_) CompleteBlockBarrier();
  Thread* next = PickNext();
  SwitchTo(next != nullptr ? next : &main);
}

void Engine::Abandon(const char* text) {
  report = text;
  failed_ = true;
  error_ = cudaErrorLaunchFailure;
  ReleaseMemory(&end_edge_);
  SwitchTo(&main);
  std::abort();  // the fiber is never resumed
}

void Engine::SwitchTo(Thread* next) {
  Thread* self = Self();
  if (next == self) return;
  current_thread = next;
  SwitchFiber(&self->fiber, &next->fiber);
  FinishSwitch(&self->fiber, &main.fiber);
}

Thread* Engine::PickNext() {
  if (ready_warps_ == 0) return nullptr;
  if (config.order == Order::kRandom) return &RandomReady();
  const bool descending = config.order == Order::kDescending;
  const bool stays = (ready_warps_ >> current_warp_ & 1) != 0;
  if (!stays) current_warp_ = NextBit(ready_warps_, static_cast<int>(current_warp_), descending);
  const Warp& warp = warps_[current_warp_];
  const Thread* self = Self();
  const bool same_warp = self != &main && self->warp == current_warp_;
  const int after = same_warp ? static_cast<int>(self->lane) : descending ? 32 : -1;
  if (after == 32) return &warp.threads[31 - std::countl_zero(warp.ready)];
  return &warp.threads[NextBit(warp.ready, after, descending)];
}

Thread& Engine::RandomReady() {
  Warp& warp = warps_[NthBit(ready_warps_, NextRandom())];
  return warp.threads[NthBit(warp.ready, NextRandom())];
}

uint64_t Engine::NextRandom() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return random_ >> 8;
}

void Engine::MakeReady(Thread* thread) {
  thread->state = ThreadState::kReady;
  warps_[thread->warp].ready |= 1u << thread->lane;
  ready_warps_ |= 1u << thread->warp;
}

void Engine::NotReady(Thread* thread) {
  Warp& warp = warps_[thread->warp];
  warp.ready &= ~(1u << thread->lane);
  if (warp.ready == 0) ready_warps_ &= ~(1u << thread->warp);
}

// `self` has said what it waits for.
void Engine::Block(Thread* self) {
  // Completed by its own arrival: goes on, but in the random order, where anybody may be next.
  if (self->state == ThreadState::kReady && config.order != Order::kRandom) return;
  Thread* next = PickNext();
  SwitchTo(next != nullptr ? next : &main);
}

void Engine::WarpCollective(Thread* self, bool orders_memory) {
  Warp& warp = warps_[self->warp];
  ++stats.collectives;
  const int lowest = std::countr_zero(self->mask);
  char* edge = &resources_->warp_edges[self->warp][lowest][warp.phases[lowest] & 1];
  if (orders_memory) ReleaseMemory(edge);
  self->state = ThreadState::kInWarp;
  warp.waiting |= 1u << self->lane;
  NotReady(self);
  TryCompleteWarp(&warp, self->mask);
  Block(self);
  if (orders_memory) AcquireMemory(edge);
}

bool Engine::TryCompleteWarp(Warp* warp, uint32_t mask) {
  const uint32_t needed = mask & warp->alive;
  if (needed == 0 || (warp->waiting & needed) != needed) return false;
  const Thread& first = warp->threads[std::countr_zero(needed)];
  void* arguments[kWarpThreads] = {};
  for (uint32_t left = needed; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    const Thread& other = warp->threads[lane];
    if (other.mask != mask) return false;  // shows up in the deadlock report
    if (other.operation != first.operation || other.complete != first.complete) {
      Fail(other.site, "lanes of mask %08x meet in different operations: %s and %s (line %u)", mask,
           other.operation, first.operation, first.site.line());
    }
    arguments[lane] = other.argument;
  }
  warp->waiting &= ~needed;
  if (first.complete != nullptr) first.complete(arguments, needed, first.site);
  ++warp->phases[std::countr_zero(mask)];
  for (uint32_t left = needed; left != 0; left &= left - 1)
    MakeReady(&warp->threads[std::countr_zero(left)]);
  return true;
}

BarrierResult Engine::BlockBarrier(Thread* self, bool predicate) {
  const uint32_t phase = barrier_phase_ & 1;
  BarrierResult& result = barrier_results_[phase];
  if (barrier_arrived_ == 0) result = BarrierResult();
  result.count += predicate ? 1 : 0;
  result.all = result.all && predicate;
  result.any = result.any || predicate;
  ++barrier_arrived_;
  ReleaseMemory(&resources_->block_edges[phase]);
  self->state = ThreadState::kAtBlockBarrier;
  NotReady(self);
  if (barrier_arrived_ == num_alive_) CompleteBlockBarrier();
  Block(self);
  AcquireMemory(&resources_->block_edges[phase]);
  return barrier_results_[phase];
}

void Engine::CompleteBlockBarrier() {
  const Thread* first = nullptr;
  for (uint32_t i = 0; i < num_threads_; ++i) {
    Thread& thread = warps_[i / kWarpThreads].threads[i % kWarpThreads];
    if (thread.state != ThreadState::kAtBlockBarrier) continue;
    if (first == nullptr) first = &thread;
    if (!SameSite(thread.site, first->site)) {
      Fail(thread.site, "divergent __syncthreads: some threads at line %u, others at line %u",
           first->site.line(), thread.site.line());
    }
    MakeReady(&thread);
  }
  if (num_alive_ != num_threads_) {
    Fail(first->site, "divergent __syncthreads: %u of %u threads have already returned",
         num_threads_ - num_alive_, num_threads_);
  }
  barrier_arrived_ = 0;
  ++barrier_phase_;
  ++stats.barriers;
}

void Engine::NamedBarrier(Thread* self, uint32_t num_threads, bool wait) {
  const int id = self->barrier;
  if (id < 0 || id >= kNamedBarriers || num_threads == 0 || num_threads % kWarpThreads != 0) {
    Fail(self->site, "named barrier %d for %u threads", id, num_threads);
  }
  NamedBarrierState& barrier = named_[id];
  if (barrier.arrived != 0 && barrier.expected != num_threads) {
    Fail(self->site, "named barrier %d: %u threads expected, here %u", id, barrier.expected,
         num_threads);
  }
  barrier.expected = num_threads;
  char* edge = &resources_->named_edges[id][barrier.phase & 1];
  ReleaseMemory(edge);
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.phase;
    for (uint32_t i = 0; i < num_threads_; ++i) {
      Thread& thread = warps_[i / kWarpThreads].threads[i % kWarpThreads];
      if (thread.state == ThreadState::kAtNamedBarrier && thread.barrier == id) MakeReady(&thread);
    }
  } else if (wait) {
    self->state = ThreadState::kAtNamedBarrier;
    NotReady(self);
    Block(self);
  }
  if (wait) AcquireMemory(edge);
}

void Engine::MoveToThisThread() {
  if (owner == std::this_thread::get_id()) return;
  owner = std::this_thread::get_id();
  for (const auto& resources : all_resources_) ResetFibers(resources.get());
}

void Engine::ResetFibers(BlockResources* resources) {
  for (const auto& threads : resources->warps) {
    for (int lane = 0; lane < kWarpThreads; ++lane)
      ResetFiber(&threads[lane].fiber, &ThreadMain, threads[lane].linear);
  }
}

void Engine::YieldToPeer(Thread* self) {
  using Clock = std::chrono::steady_clock;
  static const std::chrono::seconds limit = [] {
    const char* seconds = std::getenv("BATON_SIMT_PEER_SECONDS");
    return std::chrono::seconds(seconds != nullptr ? std::atoi(seconds) : 60);
  }();
  ++TheShared().peer_waits;
  const Clock::time_point now = Clock::now();
  if (peer_yields_++ == 0) waits_since_ = now;
  if (now - waits_since_ > limit) Fail(self->site, "deadlock: the other device does not come");
  std::this_thread::sleep_for(std::chrono::microseconds(20));
  Yield(self);
}

void Engine::Yield(Thread* self) {
  if (++yields_ > config.yield_limit) Fail(self->site, "livelock: threads only wait");
  // The next ready thread in linear order, whatever the schedule, so that none is starved.
  const Warp& warp = warps_[self->warp];
  const uint32_t above = self->lane == 31 ? 0 : warp.ready & (~0u << (self->lane + 1));
  if (above == 0) current_warp_ = NextBit(ready_warps_, static_cast<int>(self->warp), false);
  const uint32_t ready = above != 0 ? above : warps_[current_warp_].ready;
  SwitchTo(&warps_[current_warp_].threads[std::countr_zero(ready)]);
}

void Engine::ReportDeadlock() {
  struct Group {
    const Thread* first;
    uint32_t count;
  };
  std::vector<Group> groups;
  for (uint32_t i = 0; i < num_threads_; ++i) {
    const Thread& thread = warps_[i / kWarpThreads].threads[i % kWarpThreads];
    const auto same = [&](const Group& group) {
      const Thread& other = *group.first;
      if (other.state != thread.state) return false;
      return thread.state == ThreadState::kDone ||
             (SameSite(other.site, thread.site) && other.operation == thread.operation &&
              other.mask == thread.mask);
    };
    const auto found = std::find_if(groups.begin(), groups.end(), same);
    if (found != groups.end()) {
      ++found->count;
    } else {
      groups.push_back({&thread, 1});
    }
  }
  char line[512];
  std::snprintf(line, sizeof(line), "deadlock in block (%u,%u,%u):", block_index.x, block_index.y,
                block_index.z);
  report = line;
  for (const auto& [first, count] : groups) {
    if (first->state == ThreadState::kDone) {
      std::snprintf(line, sizeof(line), "\n  %u threads (first %u) have returned", count,
                    first->linear);
    } else {
      std::snprintf(line, sizeof(line), "\n  %u threads (first %u) wait in %s mask %08x at %s:%u",
                    count, first->linear, first->operation, first->mask, first->site.file_name(),
                    first->site.line());
    }
    report += line;
  }
  failed_ = true;
  error_ = cudaErrorLaunchTimeout;
}

// Whether this is the barrier that mutants.py leaves out: BATON_SIMT_DROP=FILE:LINE, where FILE is
// the end of a path.
bool IsDropped(const Site& site) {
  struct Place {
    std::string file;
    uint32_t line = 0;
  };
  static const Place dropped = [] {
    Place place;
    const char* text = std::getenv("BATON_SIMT_DROP");
    const char* colon = text != nullptr ? std::strrchr(text, ':') : nullptr;
    if (colon == nullptr) return place;
    place.file.assign(text, colon);
    place.line = static_cast<uint32_t>(std::strtoul(colon + 1, nullptr, 10));
    return place;
  }();
  return site.line() == dropped.line && std::string(site.file_name()).ends_with(dropped.file);
}

Thread* Enter(const char* operation, uint32_t mask, const Site& site) {
  Thread* self = Self();
  self->operation = operation;
  self->mask = mask;
  self->site = site;
  return self;
}

}  // namespace

Stats& RunningStats() { return TheEngine().stats; }

void Stats::Add(const Stats& other) {
  launches += other.launches;
  blocks += other.blocks;
  threads += other.threads;
  collectives += other.collectives;
  barriers += other.barriers;
  mma += other.mma;
  ldmatrix += other.ldmatrix;
  ldmatrix_conflicts += other.ldmatrix_conflicts;
  async_copies += other.async_copies;
}

Config& GetConfig() { return TheShared().config; }
Stats& GetStats() { return TheShared().stats; }
uint64_t NumPeerWaits() { return TheShared().peer_waits; }
const std::string& LastReport() { return TheShared().report; }

void Fail(const Site& site, const char* format, ...) {
  char message[512], text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  const uint3& thread = Self()->thread_index;
  std::snprintf(text, sizeof(text), "%s:%u: %s [block (%u,%u,%u) thread (%u,%u,%u)]",
                site.file_name(), site.line(), message, block_index.x, block_index.y, block_index.z,
                thread.x, thread.y, thread.z);
  TheEngine().Abandon(text);
}

void WarpCollective(const char* operation,
                    uint32_t mask,
                    void* argument,
                    Completion complete,
                    bool orders_memory,
                    const Site& site) {
  if (IsDropped(site)) return;
  Thread* self = Enter(operation, mask, site);
  if ((mask >> self->lane & 1) == 0) {
    Fail(site, "%s: mask %08x does not name the calling lane %u", operation, mask, self->lane);
  }
  self->argument = argument;
  self->complete = complete;
  TheEngine().WarpCollective(self, orders_memory);
}

BarrierResult BlockBarrier(bool predicate, const Site& site) {
  if (IsDropped(site)) return BarrierResult();
  return TheEngine().BlockBarrier(Enter("__syncthreads", 0, site), predicate);
}

void NamedBarrier(int id, uint32_t num_threads, bool wait, const Site& site) {
  Thread* self = Enter("named barrier", 0, site);
  self->barrier = id;
  TheEngine().NamedBarrier(self, num_threads, wait);
}

void Yield(const Site& site) { TheEngine().Yield(Enter("yield", 0, site)); }
void YieldToPeer(const Site& site) { TheEngine().YieldToPeer(Enter("yield to peer", 0, site)); }

void* SharedMemory(SharedDeclaration* declaration, size_t bytes, size_t alignment) {
  Engine& engine = TheEngine();
  if (declaration->block_number != engine.block_number()) {
    declaration->address = engine.arena().Take(bytes, std::max<size_t>(alignment, 16));
    declaration->block_number = engine.block_number();
    if (engine.arena().bytes_taken() > engine.config.shared_limit) {
      Fail(Site::current(), "the block uses %zu bytes of shared memory",
           engine.arena().bytes_taken());
    }
  }
  return declaration->address;
}

void* DynamicSharedMemory() { return TheEngine().dynamic_shared(); }
bool IsShared(const void* address) { return TheEngine().arena().Contains(address); }

cudaError_t CheckLaunch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes) {
  const Config& config = GetConfig();
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64 || blocks == 0 ||
      grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  size_t limit = kDefaultDynamicLimit;
  {
    const std::lock_guard<std::mutex> lock(TheShared().mutex);
    for (const auto& [known, bytes] : TheShared().dynamic_limits) {
      if (known == kernel) limit = std::max(limit, bytes);
    }
  }
  if (shared_bytes > limit || shared_bytes > config.shared_limit) return cudaErrorInvalidValue;
  return cudaSuccess;
}

void SetDynamicSharedLimit(const void* kernel, size_t bytes) {
  const std::lock_guard<std::mutex> lock(TheShared().mutex);
  TheShared().dynamic_limits.emplace_back(kernel, bytes);
}

cudaError_t RunGrid(dim3 grid,
                    dim3 block,
                    size_t shared_bytes,
                    void (*body)(const void* arguments),
                    const void* arguments) {
  if (current_thread != nullptr) return cudaErrorNotSupported;
  std::unique_ptr<Engine> engine = TakeEngine();
  engine->MoveToThisThread();
  running = engine.get();
  const cudaError_t error = engine->Run(grid, block, shared_bytes, body, arguments);
  running = nullptr;
  GiveBack(std::move(engine), error != cudaSuccess);
  return error;
}

}  // namespace baton::simt
