// SPDX-License-Identifier: Apache-2.0
#include "attention/policy.h"

#include <charconv>
#include <cmath>
#include <functional>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Presets of docs/POLICIES.md that later versions bring.
constexpr absl::string_view kPlannedPresets[] = {
    "quest", "double-sparsity", "twilight", "asynctls", "snapkv", "ada-snapkv", "topk-completion"};

// The shortest text that reads back as the same number.
std::string FormatDouble(double value) {
  if (std::isinf(value)) return "off";
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

bool ParseDouble(const std::string& text, double* value) {
  return absl::SimpleAtod(text, value) && std::isfinite(*value);
}

// One parameter: how it is read into a policy and written from it. Set returns false for a value
// that is not allowed; `allowed` says what is.
struct Parameter {
  absl::string_view name;
  absl::string_view allowed;
  std::function<bool(const std::string&, Policy*)> set;
  std::function<std::string(const Policy&)> get;
};

Parameter Count(absl::string_view name, absl::string_view allowed, uint32_t max,
                uint32_t Policy::*field) {
  return {name, allowed,
          [=](const std::string& text, Policy* policy) {
            uint32_t value = 0;
            if (!absl::SimpleAtoi(text, &value) || value > max) return false;
            policy->*field = value;
            return true;
          },
          [=](const Policy& policy) { return absl::StrCat(policy.*field); }};
}

// A number in (0, 1], or [0, 1] if zero_allowed.
Parameter Share(absl::string_view name, bool zero_allowed, double Policy::*field) {
  return {name, zero_allowed ? "numbers from 0 to 1" : "numbers above 0, up to 1",
          [=](const std::string& text, Policy* policy) {
            double value = 0;
            if (!ParseDouble(text, &value) || value < 0 || value > 1) return false;
            if (value == 0 && !zero_allowed) return false;
            policy->*field = value;
            return true;
          },
          [=](const Policy& policy) { return FormatDouble(policy.*field); }};
}

Parameter Tolerance() {
  return {"tolerance", "numbers from 0, or off",
          [](const std::string& text, Policy* policy) {
            if (text == "off") {
              policy->tolerance = kInfinity;
              return true;
            }
            double value = 0;
            if (!ParseDouble(text, &value) || value < 0) return false;
            policy->tolerance = value;
            return true;
          },
          [](const Policy& policy) { return FormatDouble(policy.tolerance); }};
}

Parameter EstimatorPart() {
  return {"estimator", "centroid, second-order",
          [](const std::string& text, Policy* policy) {
            if (text != "centroid" && text != "second-order") return false;
            policy->estimator = text == "centroid" ? Estimator::kCentroid : Estimator::kSecondOrder;
            return true;
          },
          [](const Policy& policy) {
            return policy.estimator == Estimator::kCentroid ? "centroid" : "second-order";
          }};
}

Parameter OnMissPart() {
  return {
      "on_miss", "wait, estimate",
      [](const std::string& text, Policy* policy) {
        if (text != "wait" && text != "estimate") return false;
        policy->on_miss = text == "wait" ? OnMiss::kWait : OnMiss::kEstimate;
        return true;
      },
      [](const Policy& policy) { return policy.on_miss == OnMiss::kWait ? "wait" : "estimate"; }};
}

// The parameters that mean something for the policy's parts.
std::vector<Parameter> ParametersOf(const Policy& policy) {
  std::vector<Parameter> all = {
      Count("sink", "0..64", kSinkTokensMax, &Policy::sink),
      Count("window", "0..4096", kWindowTokensMax, &Policy::window),
  };
  if (policy.selector == Selector::kAll) return all;
  all.push_back(Count("dense_layers", "0..1024", 1024, &Policy::dense_layers));
  if (policy.selector != Selector::kClusters) return all;
  switch (policy.cut) {
    case Cut::kTopK:
      all.push_back(Share("exact", false, &Policy::exact_share));
      all.push_back(Share("estimated", true, &Policy::estimated_share));
      all.push_back(EstimatorPart());
      break;
    case Cut::kTopP:
      all.push_back(Share("p1", false, &Policy::p1));
      all.push_back(Share("p2", false, &Policy::p2));
      all.push_back(EstimatorPart());
      break;
    case Cut::kErrorBudget:  // needs the second-order estimator's variances
      all.push_back(Tolerance());
      all.push_back(Share("floor", true, &Policy::floor));
      break;
  }
  all.push_back(OnMissPart());
  all.push_back(Count("miss_wait_us", "0..1000000", kMissWaitUsMax, &Policy::miss_wait_us));
  return all;
}

absl::Status UnknownPreset(absl::string_view preset) {
  for (const absl::string_view planned : kPlannedPresets) {
    if (preset == planned) {
      return absl::UnimplementedError(
          absl::StrCat("policy.preset ", preset, " is not part of this version"));
    }
  }
  std::vector<std::string> names;
  for (const Policy& policy : PresetPolicies()) names.push_back(policy.preset);
  return absl::InvalidArgumentError(absl::StrCat("policy.preset \"", preset.substr(0, 64),
                                                 "\" is unknown; allowed are ",
                                                 absl::StrJoin(names, ", ")));
}

absl::Status SetParameter(const std::string& name, const std::string& value, Policy* policy) {
  const std::vector<Parameter> parameters = ParametersOf(*policy);
  for (const Parameter& parameter : parameters) {
    if (parameter.name != name) continue;
    if (parameter.set(value, policy)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("policy.parameters[", name, "] is \"",
                                                   value.substr(0, 64), "\"; allowed are ",
                                                   parameter.allowed));
  }
  const auto append_name = [](std::string* out, const Parameter& p) {
    absl::StrAppend(out, p.name);
  };
  return absl::InvalidArgumentError(absl::StrCat("policy.parameters has no \"", name.substr(0, 64),
                                                 "\" for ", policy->preset, "; allowed are ",
                                                 absl::StrJoin(parameters, ", ", append_name)));
}

}  // namespace

std::vector<Policy> PresetPolicies() {
  Policy dense;
  dense.preset = "dense";
  dense.selector = Selector::kAll;

  Policy streaming;
  streaming.preset = "streaming";
  streaming.selector = Selector::kNone;

  Policy clusters_top_k;
  clusters_top_k.preset = "clusters-top-k";
  clusters_top_k.selector = Selector::kClusters;
  clusters_top_k.cut = Cut::kTopK;

  Policy double_p;
  double_p.preset = "double-p";
  double_p.selector = Selector::kClusters;
  double_p.cut = Cut::kTopP;

  Policy error_target;
  error_target.preset = "error-target";
  error_target.selector = Selector::kClusters;
  error_target.cut = Cut::kErrorBudget;
  error_target.estimator = Estimator::kSecondOrder;

  return {dense, streaming, clusters_top_k, double_p, error_target};
}

std::map<std::string, std::string> Policy::Parameters() const {
  std::map<std::string, std::string> all;
  for (const Parameter& parameter : ParametersOf(*this)) {
    all.emplace(parameter.name, parameter.get(*this));
  }
  return all;
}

absl::StatusOr<Policy> ParsePolicy(absl::string_view preset,
                                   const std::map<std::string, std::string>& parameters) {
  for (Policy& policy : PresetPolicies()) {
    if (policy.preset != preset) continue;
    for (const auto& [name, value] : parameters) {
      ATTND_RETURN_IF_ERROR(SetParameter(name, value, &policy));
    }
    if (policy.p2 > policy.p1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "policy.parameters[p2] is ", policy.p2, "; allowed are numbers up to p1, ", policy.p1));
    }
    return std::move(policy);
  }
  return UnknownPreset(preset);
}

}  // namespace attnd::attention
