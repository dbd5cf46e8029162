#include "engine/process/fingerprint.h"

namespace baton::process {

std::string FingerprintKey(const worker::v1::LayoutFingerprint& fingerprint) {
  worker::v1::LayoutFingerprint copy = fingerprint;
  copy.clear_tp();
  return copy.SerializeAsString();
}

}  // namespace baton::process
