// SPDX-License-Identifier: Apache-2.0
//
// A policy's parameters: which ones its parts have, how each is read from text and written to it,
// and in words what is allowed.
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "attention/policy/policy.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

// The same without 0.
Parameter CountFromOne(absl::string_view name, absl::string_view allowed, uint32_t max,
                       uint32_t Policy::*field) {
  Parameter parameter = Count(name, allowed, max, field);
  parameter.set = [set = std::move(parameter.set)](const std::string& text, Policy* policy) {
    return text != "0" && set(text, policy);
  };
  return parameter;
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

// Tokens, or a share of the middle with a percent sign.
Parameter BudgetOf() {
  return {"budget", "1..1073741824 tokens, or a share above 0% and up to 100%",
          [](const std::string& text, Policy* policy) {
            Budget budget;
            absl::string_view number = text;
            if (absl::ConsumeSuffix(&number, "%")) {
              double percent = 0;
              if (!ParseDouble(std::string(number), &percent)) return false;
              if (percent <= 0 || percent > 100) return false;
              budget = {0, percent};
            } else if (!absl::SimpleAtoi(number, &budget.tokens) || budget.tokens == 0 ||
                       budget.tokens > kBudgetTokensMax) {
              return false;
            }
            policy->budget = budget;
            return true;
          },
          [](const Policy& policy) {
            if (!policy.budget.is_share()) return absl::StrCat(policy.budget.tokens);
            return absl::StrCat(FormatDouble(policy.budget.percent), "%");
          }};
}

// A parameter that takes one of a few words, each with what it does; the first that `is` says yes
// to is the policy's.
struct Choice {
  absl::string_view word;
  std::function<void(Policy*)> set;
  std::function<bool(const Policy&)> is;
};
Parameter OneOf(absl::string_view name, absl::string_view allowed,
                const std::vector<Choice>& choices) {
  return {name, allowed,
          [choices](const std::string& text, Policy* policy) {
            for (const Choice& choice : choices) {
              if (choice.word != text) continue;
              choice.set(policy);
              return true;
            }
            return false;
          },
          [choices](const Policy& policy) {
            for (const Choice& choice : choices) {
              if (choice.is(policy)) return std::string(choice.word);
            }
            return std::string();
          }};
}

template <typename T>
Choice Word(absl::string_view word, T Policy::*field, T value) {
  return {word, [=](Policy* policy) { policy->*field = value; },
          [=](const Policy& policy) { return policy.*field == value; }};
}

// What may stand in for the selector of a preset that chooses tokens.
struct TokenSelector {
  absl::string_view word;
  uint32_t block_tokens;  // 0: as they are
  Selector selector;
  bool adaptive = false;
};
constexpr TokenSelector kTokenSelectors[] = {
    {"full", 0, Selector::kAll},
    {"exhaustive", 0, Selector::kExhaustive},
    {"quest", 0, Selector::kBlocks},
    {"double-sparsity", 0, Selector::kLabels},
    {"asynctls", 64, Selector::kBlocksLabels},
    {"snapkv", 0, Selector::kKeepSet},
    {"ada-snapkv", 0, Selector::kKeepSet, true},
    {"clusters", 0, Selector::kClusters},
};

// all: also every token, which leaves nothing to complete.
Parameter SelectorPart(bool all) {
  std::vector<Choice> choices;
  for (const TokenSelector& part : kTokenSelectors) {
    if (part.selector == Selector::kAll && !all) continue;
    choices.push_back({part.word,
                       [part](Policy* policy) {
                         policy->selector = part.selector;
                         policy->adaptive = part.adaptive;
                         if (part.block_tokens > 0) policy->block_tokens = part.block_tokens;
                       },
                       [part](const Policy& policy) {
                         return policy.selector == part.selector &&
                                policy.adaptive == part.adaptive;
                       }});
  }
  return OneOf("selector",
               all ? "full, exhaustive, quest, double-sparsity, asynctls, snapkv, ada-snapkv, "
                     "clusters"
                   : "exhaustive, quest, double-sparsity, asynctls, snapkv, ada-snapkv, clusters",
               choices);
}

void AddCompletionParameters(std::vector<Parameter>* all) {
  all->push_back(SelectorPart(/*all=*/false));
  all->push_back(OneOf("completion", "maps, on, off",
                       {Word("maps", &Policy::completion, Completion::kMaps),
                        Word("on", &Policy::completion, Completion::kOn),
                        Word("off", &Policy::completion, Completion::kOff)}));
  all->push_back(Share("epsilon", true, &Policy::epsilon));
}

Parameter BlockTokens() {
  return OneOf("block", "16, 64",
               {Word("16", &Policy::block_tokens, 16u), Word("64", &Policy::block_tokens, 64u)});
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

Parameter Quantile() {
  return {"quantile", "mean, or numbers above 0 and below 1",
          [](const std::string& text, Policy* policy) {
            double value = 0;
            if (text != "mean" && (!ParseDouble(text, &value) || value <= 0 || value >= 1)) {
              return false;
            }
            policy->quantile = value;
            return true;
          },
          [](const Policy& policy) {
            return policy.quantile == 0 ? "mean" : FormatDouble(policy.quantile);
          }};
}

Parameter EstimatorPart() {
  return OneOf("estimator", "centroid, second-order",
               {Word("centroid", &Policy::estimator, Estimator::kCentroid),
                Word("second-order", &Policy::estimator, Estimator::kSecondOrder)});
}

Parameter OnMissPart() {
  return OneOf("on_miss", "wait, estimate",
               {Word("wait", &Policy::on_miss, OnMiss::kWait),
                Word("estimate", &Policy::on_miss, OnMiss::kEstimate)});
}

void AddClusterParameters(const Policy& policy, std::vector<Parameter>* all) {
  switch (policy.cut) {
    case Cut::kTopK:
      all->push_back(Share("exact", false, &Policy::exact_share));
      all->push_back(Share("estimated", true, &Policy::estimated_share));
      all->push_back(EstimatorPart());
      break;
    case Cut::kTopP:
      all->push_back(Share("p1", false, &Policy::p1));
      all->push_back(Share("p2", false, &Policy::p2));
      all->push_back(EstimatorPart());
      break;
    case Cut::kErrorBudget:  // needs the second-order estimator's variances
      all->push_back(Tolerance());
      all->push_back(Quantile());
      all->push_back(Share("floor", true, &Policy::floor));
      break;
  }
  all->push_back(OnMissPart());
  all->push_back(Count("miss_wait_us", "0..1000000", kMissWaitUsMax, &Policy::miss_wait_us));
}

// The parameters that mean something for the policy's parts.
std::vector<Parameter> ParametersOf(const Policy& policy) {
  std::vector<Parameter> all = {
      Count("sink", "0..64", kSinkTokensMax, &Policy::sink),
      Count("window", "0..4096", kWindowTokensMax, &Policy::window),
  };
  if (policy.DenseIn(policy.dense_layers)) return all;
  all.push_back(Count("dense_layers", "0..1024", kLayersMax, &Policy::dense_layers));
  if (policy.pruner == Pruner::kTopP) {
    all.push_back(SelectorPart(/*all=*/true));
    all.push_back(Share("p", false, &Policy::prune_p));
  }
  if (policy.estimator == Estimator::kFeatureMap) AddCompletionParameters(&all);
  switch (policy.selector) {
    case Selector::kAll:
    case Selector::kNone:
      break;
    case Selector::kClusters:
      if (policy.cuts_clusters()) {
        AddClusterParameters(policy, &all);
      } else {
        all.push_back(BudgetOf());
      }
      break;
    case Selector::kBlocks:
      all.push_back(BudgetOf());
      all.push_back(BlockTokens());
      break;
    case Selector::kLabels:
    case Selector::kExhaustive:
    case Selector::kKeepSet:
      all.push_back(BudgetOf());
      break;
    case Selector::kBlocksLabels:
      all.push_back(BudgetOf());
      all.push_back(CountFromOne("blocks", "1..1048576", kBlocksMax, &Policy::blocks));
      all.push_back(Count("lag", "0, 1", 1, &Policy::lag));
      break;
  }
  return all;
}

absl::Status UnknownPreset(absl::string_view preset) {
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

std::vector<ParameterInfo> ParametersWithRanges(const Policy& policy) {
  std::vector<ParameterInfo> infos;
  for (const Parameter& parameter : ParametersOf(policy)) {
    infos.push_back({std::string(parameter.name), std::string(parameter.allowed)});
  }
  return infos;
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
    if (const auto part = parameters.find("selector"); part != parameters.end()) {
      ATTND_RETURN_IF_ERROR(SetParameter(part->first, part->second, &policy));
    }
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
