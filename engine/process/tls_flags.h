#pragma once

// The flags of TLS. tls_flags.cc defines those of a port and includes those of
// tls_client_flags.cc, which commands that are only clients take alone.

#include "engine/process/tls.h"

namespace baton::process {

// --tls-cert, --tls-key, --tls-client-ca, --tls-reload-interval, --allow-plaintext, and those
// below. Where --tls-ca is given without --tls-client-cert, the process shows its own --tls-cert to
// others.
TlsOptions TlsOptionsFromFlags();

// --tls-ca, --tls-client-cert, --tls-client-key, --tls-server-name.
TlsClientOptions TlsClientOptionsFromFlags();

}  // namespace baton::process
