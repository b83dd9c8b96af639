// SPDX-License-Identifier: Apache-2.0
//
// Policies for requests, from flags.
#ifndef ATTND_BENCH_POLICY_MESSAGE_H_
#define ATTND_BENCH_POLICY_MESSAGE_H_

#include <string>
#include <utility>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "attnd/v1/attnd.pb.h"

namespace attnd::bench {

// parameters: NAME=VALUE, comma-separated. The server says what is wrong with them.
inline v1::Policy PolicyMessage(const std::string& preset, absl::string_view parameters) {
  v1::Policy policy;
  policy.set_preset(preset);
  for (const absl::string_view pair : absl::StrSplit(parameters, ',', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parameter =
        absl::StrSplit(pair, absl::MaxSplits('=', 1));
    (*policy.mutable_parameters())[parameter.first] = parameter.second;
  }
  return policy;
}

}  // namespace attnd::bench

#endif  // ATTND_BENCH_POLICY_MESSAGE_H_
