#pragma once

#include <cstdint>
#include <vector>

#include "engine/runtime/model_runner.h"
#include "engine/runtime/sequence.h"

namespace baton::worker {

// For tests: every block that becomes free is filled with 0xff, which is NaN in all formats, so
// that whoever reads a block that is not his finds out. Both outlive the pool's use.
inline void PoisonFreedBlocks(runtime::KvMemory* memory, runtime::ModelRunner* runner) {
  memory->pool().set_on_free([runner](kv::BlockId block) {
    const kv::KvLayout& layout = runner->layout();
    const std::vector<uint8_t> poison(layout.block_bytes() * layout.num_layers, 0xff);
    runner->WriteBlock(block, poison.data());
  });
}

}  // namespace baton::worker
