#pragma once

// One simulation: a seed makes a cluster, its load and its misfortunes, and everything that must
// hold is looked at after every event and at the end.

#include <cstdint>
#include <string>

#include "tests/sim/data_plane.h"

namespace baton::sim {

struct SimOptions {
  uint64_t seed = 1;
  bool trace = false;
  Plant plant = Plant::kNone;
  bool real_model = false;  // a small transformer instead of the hash
};

struct SimResult {
  std::string violation;  // empty: everything held
  std::string trace;      // with SimOptions::trace
  uint64_t digest = 0;    // of all events: equal for equal runs
  uint64_t num_events = 0;
  // What the run went through.
  int requests = 0, completed = 0, cancelled = 0, failed = 0, faults = 0, retried = 0;
};

SimResult RunSimulation(const SimOptions& options);

// The story so far of the simulation that is running, for whoever must explain why it died.
const std::string& StoryOfTheRunning();

}  // namespace baton::sim
