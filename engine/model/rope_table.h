#pragma once

// Cosines and sines of every position, computed once.

#include <vector>

#include "engine/model/model_config.h"

namespace baton::model {

// [positions, D] f32: cos [D/2] | sin [D/2], times the attention factor. The angle is the f32
// product of position and inverse frequency and the factor is applied in f32, as transformers does;
// sine and cosine are rounded once from double, so the table has the same bits on every machine.
std::vector<float> MakeRopeTable(const ModelConfig& config, int positions);

}  // namespace baton::model
