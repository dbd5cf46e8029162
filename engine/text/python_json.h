#pragma once

// JSON as chat templates print it.

#include <string>

#include "engine/base/json.h"

namespace baton::text {

// What Python's json.dumps(value, ensure_ascii=False) prints for the value that json.loads read: ",
// " and ": " between, members in their order, integers of any size unchanged, everything else as
// the shortest float (1.0, 1e-07, 1e+16). Models were trained on prompts in this form, so other
// spellings of the same value are other prompts.
std::string PythonJson(const base::JsonValue& value);

}  // namespace baton::text
