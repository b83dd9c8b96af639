// SPDX-License-Identifier: Apache-2.0
//
// PolicyCatalog: the presets that requests may name: the built-in ones, and those of the operator's
// policy files (PolicyFile in proto/attnd/v1/config.proto). Only the server knows named presets:
// what leaves here is a built-in preset with all its parameters, so that sequences, sealed files
// and backends never meet a name that another server lacks.
#ifndef ATTND_SERVER_OPTIONS_POLICY_CATALOG_H_
#define ATTND_SERVER_OPTIONS_POLICY_CATALOG_H_

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/policy/policy.h"
#include "attnd/v1/config.pb.h"

namespace attnd::server {

inline constexpr size_t kPolicyFilesMax = 16;
inline constexpr size_t kNamedPoliciesMax = 256;  // of all files together
inline constexpr size_t kPolicyNameBytesMax = 64;
// Of one Policy message.
inline constexpr int kPolicyParametersMax = 32;

// A value, constant once it is loaded. Thread-safety: const methods may be called from any thread.
class PolicyCatalog {
 public:
  // The built-in presets alone.
  PolicyCatalog() = default;

  // With the policies of these files. InvalidArgument names the file, and the field or the line and
  // column, and what is allowed; so does a policy that does not parse.
  static absl::StatusOr<PolicyCatalog> Load(const std::vector<std::string>& paths);

  // The policy that a message means, a named preset's parameters overridden by the message's own.
  // Errors as ParsePolicy's; InvalidArgument, too, if no preset is named.
  absl::StatusOr<attention::Policy> Parse(const v1::Policy& policy) const;

  // Named presets, by name.
  const std::map<std::string, v1::Policy>& named() const { return named_; }

 private:
  absl::Status Add(const v1::NamedPolicy& entry);

  std::map<std::string, v1::Policy> named_;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_OPTIONS_POLICY_CATALOG_H_
