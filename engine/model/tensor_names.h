#pragma once

// How the tensors of a decoder are called in the two kinds of checkpoint, and what shape each must
// have.

#include <string>
#include <vector>

#include "engine/model/checkpoint.h"

namespace baton::model {

struct ExpectedTensor {
  TensorRole role;
  int layer;  // -1 for roles that are not per layer
  std::string hf_name;
  std::string gguf_name;
  Shape shape;
  bool is_vector;
};

// Every tensor that a model of this config must have, no more and no less.
std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config);

}  // namespace baton::model
