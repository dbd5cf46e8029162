#pragma once

// BATON_RETURN_IF_ERROR and BATON_ASSIGN_OR_RETURN: pass a failure on to the caller.

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#define BATON_CONCAT_INNER_(a, b) a##b
#define BATON_CONCAT_(a, b) BATON_CONCAT_INNER_(a, b)

#define BATON_RETURN_IF_ERROR(expr)                  \
  do {                                               \
    ::absl::Status baton_status_ = (expr);           \
    if (!baton_status_.ok()) return baton_status_;   \
  } while (0)

#define BATON_ASSIGN_OR_RETURN(lhs, expr) \
  BATON_ASSIGN_OR_RETURN_IMPL_(BATON_CONCAT_(baton_statusor_, __LINE__), lhs, expr)

#define BATON_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                                 \
  if (!statusor.ok()) return std::move(statusor).status(); \
  lhs = std::move(statusor).value()

namespace baton {

// The same code with `context` in front of the message. Context is added once, where a name becomes known.
inline absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(context, ": ", status.message()));
}

}  // namespace baton
