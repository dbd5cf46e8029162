#pragma once

// A model of the tests, run step by step on a backend.

#include <string>
#include <vector>

#include "engine/runtime/model_runner.h"

namespace baton::simt {

struct ModelSetting {
  const char* model;
  const char* weights;
  const char* kv;
};

// Prefill by our own kernel, also where there is another.
runtime::ModelRunnerOptions OptionsOf(const ModelSetting& setting, const std::string& backend);

// One step of two sequences with blocks of their own, of which `lengths` tokens are in the cache;
// the logits of all its tokens.
std::vector<std::vector<float>> StepTwo(runtime::ModelRunner* runner,
                                        int (&lengths)[2],
                                        int first_count,
                                        int second_count);

// Two sequences with blocks of their own, fed in chunks, then one token at a time, then both with
// several: prefill over a cached prefix, decode and verify. Returns the logits of every token.
std::vector<std::vector<float>> RunModel(runtime::ModelRunner* runner);

// The same, of a model that is loaded for it. `prefill`: own, or another attention.
std::vector<std::vector<float>> LogitsOf(const ModelSetting& setting,
                                         const std::string& backend,
                                         const std::string& prefill = "own");

// The root of squared differences over that of squares.
double RelativeError(const std::vector<std::vector<float>>& got,
                     const std::vector<std::vector<float>>& want);

}  // namespace baton::simt
