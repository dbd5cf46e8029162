// What the tests of tests/simt ask of the emulator, where there is a real device instead: schedules
// and counters mean nothing there.

#include "tests/simt/fake_cudart.h"
#include "tests/simt/simt.h"

namespace baton::simt {

Config& GetConfig() {
  static Config config;
  return config;
}
Stats& GetStats() {
  static Stats stats;
  return stats;
}
const std::string& LastReport() {
  static const std::string none;
  return none;
}
RuntimeConfig& GetRuntimeConfig() {
  static RuntimeConfig config;
  return config;
}
void ClearDeviceError() { cudaGetLastError(); }

}  // namespace baton::simt
