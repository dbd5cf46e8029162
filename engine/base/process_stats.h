#pragma once

// process_*: CPU, memory, descriptors, start time, under the names every Prometheus client uses.

#include <string>

namespace baton::base {

// Their lines in the text format 0.0.4. Reads /proc; what cannot be read is left out.
void AppendProcessStats(std::string* out);

}  // namespace baton::base
