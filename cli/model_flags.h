#pragma once

// Flags that say what a worker will hold: of `serve`, which passes them on, and of the commands
// that plan for it. Unset ones have the workers' own defaults.

#include <string>

#include "absl/flags/declare.h"
#include "absl/types/optional.h"

ABSL_DECLARE_FLAG(std::string, model);
ABSL_DECLARE_FLAG(absl::optional<std::string>, weight_dtype);
ABSL_DECLARE_FLAG(absl::optional<std::string>, kv_dtype);
ABSL_DECLARE_FLAG(absl::optional<std::string>, kv_cache_bytes);
ABSL_DECLARE_FLAG(absl::optional<std::string>, num_blocks);
ABSL_DECLARE_FLAG(absl::optional<std::string>, gpu_memory_utilization);
ABSL_DECLARE_FLAG(absl::optional<std::string>, max_model_len);
ABSL_DECLARE_FLAG(absl::optional<std::string>, tp);
ABSL_DECLARE_FLAG(absl::optional<std::string>, kv_transport);
ABSL_DECLARE_FLAG(absl::optional<std::string>, require_transport);
