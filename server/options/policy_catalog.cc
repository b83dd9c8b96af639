// SPDX-License-Identifier: Apache-2.0
#include "server/options/policy_catalog.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/options/text_file.h"

namespace attnd::server {
namespace {

absl::Status Invalid(absl::string_view what) { return absl::InvalidArgumentError(what); }

bool IsName(absl::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  };
  return !name.empty() && name.size() <= kPolicyNameBytesMax &&
         std::all_of(name.begin(), name.end(), allowed);
}

// Built-in presets, and those of later versions: a file must not change its meaning with an update.
bool IsBuiltIn(const std::string& name) {
  return !absl::IsInvalidArgument(attention::ParsePolicy(name).status());
}

}  // namespace

absl::StatusOr<PolicyCatalog> PolicyCatalog::Load(const std::vector<std::string>& paths) {
  if (paths.size() > kPolicyFilesMax) {
    return Invalid(
        absl::StrCat("policy_file has ", paths.size(), " files; allowed are 0..", kPolicyFilesMax));
  }
  PolicyCatalog catalog;
  for (const std::string& path : paths) {
    v1::PolicyFile file;
    ATTND_RETURN_IF_ERROR(ReadTextFile("policy_file", path, &file));
    for (int i = 0; i < file.policies_size(); ++i) {
      const absl::Status status = catalog.Add(file.policies(i));
      if (status.ok()) continue;
      return Invalid(absl::StrCat("policy_file ", path, ": policies[", i, "].", status.message()));
    }
  }
  return catalog;
}

absl::Status PolicyCatalog::Add(const v1::NamedPolicy& entry) {
  const std::string name = entry.name().substr(0, kPolicyNameBytesMax);
  if (!IsName(entry.name())) {
    return Invalid(absl::StrCat("name is \"", name, "\"; allowed are 1..", kPolicyNameBytesMax,
                                " of a-z, 0-9 and -"));
  }
  if (IsBuiltIn(name)) {
    return Invalid(absl::StrCat("name is \"", name, "\", which is a built-in preset's"));
  }
  if (named_.size() == kNamedPoliciesMax) {
    return Invalid(absl::StrCat("name is one too many; allowed are ", kNamedPoliciesMax,
                                " policies in all files together"));
  }
  // A built-in preset's name: no named one stands for another.
  ATTND_RETURN_IF_ERROR(PolicyCatalog().Parse(entry.policy()).status());
  if (!named_.emplace(name, entry.policy()).second) {
    return Invalid(absl::StrCat("name is \"", name, "\" for the second time"));
  }
  return absl::OkStatus();
}

absl::StatusOr<attention::Policy> PolicyCatalog::Parse(const v1::Policy& policy) const {
  if (policy.preset().empty()) return Invalid("policy.preset is empty");
  if (policy.parameters_size() > kPolicyParametersMax) {
    return Invalid(absl::StrCat("policy.parameters has ", policy.parameters_size(),
                                " entries; allowed are 0..", kPolicyParametersMax));
  }
  std::map<std::string, std::string> parameters(policy.parameters().begin(),
                                                policy.parameters().end());
  const auto named = named_.find(policy.preset());
  if (named != named_.end()) {
    // The message's own are there already, and insert leaves them.
    const v1::Policy& base = named->second;
    parameters.insert(base.parameters().begin(), base.parameters().end());
    return attention::ParsePolicy(base.preset(), parameters);
  }
  auto parsed = attention::ParsePolicy(policy.preset(), parameters);
  if (parsed.ok() || named_.empty() || IsBuiltIn(policy.preset())) return parsed;
  return Invalid(absl::StrCat(parsed.status().message(), ", and the ", named_.size(),
                              " names of policy_file"));
}

}  // namespace attnd::server
