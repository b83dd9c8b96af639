// SPDX-License-Identifier: Apache-2.0
//
// Macros over absl::Status; the distribution's Abseil has none.
#ifndef ATTND_COMMON_STATUS_H_
#define ATTND_COMMON_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define ATTND_STATUS_CONCAT_INNER(a, b) a##b
#define ATTND_STATUS_CONCAT(a, b) ATTND_STATUS_CONCAT_INNER(a, b)

// Returns from the enclosing function if `expression`, an absl::Status, is not OK.
#define ATTND_RETURN_IF_ERROR(expression)                               \
  do {                                                                  \
    if (absl::Status attnd_status = (expression); !attnd_status.ok()) { \
      return attnd_status;                                              \
    }                                                                   \
  } while (false)

// ATTND_ASSIGN_OR_RETURN(auto x, F()): declares x from the StatusOr of F(), or returns its status.
#define ATTND_ASSIGN_OR_RETURN(declaration, expression)                                      \
  ATTND_ASSIGN_OR_RETURN_INNER(ATTND_STATUS_CONCAT(attnd_status_or_, __LINE__), declaration, \
                               expression)
// Its arguments are names, not expressions.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define ATTND_ASSIGN_OR_RETURN_INNER(status_or, declaration, expression) \
  auto status_or = (expression);                                         \
  if (!status_or.ok()) return std::move(status_or).status();             \
  declaration = *std::move(status_or)
// NOLINTEND(bugprone-macro-parentheses)

#endif  // ATTND_COMMON_STATUS_H_
