#pragma once

// Included into the device tests by the build: where the tests' models are.

#include <cstdlib>
#include <string>

namespace baton::simt {

inline std::string SourceDir() {
  const char* dir = std::getenv("BATON_TESTS_ROOT");
  return dir != nullptr ? dir : ".";
}

}  // namespace baton::simt
