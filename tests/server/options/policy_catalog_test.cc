// SPDX-License-Identifier: Apache-2.0
//
// Goal: a policy file's names are presets like the built-in ones, and a mistake in it is named by
// file and field before anything starts. Method: files of right and wrong contents, with what must
// come out of them or the words that the message must contain.
#include "server/options/policy_catalog.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attnd/v1/attnd.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/calls/conversions.h"
#include "server/calls/sequence_conversions.h"
#include "server/calls/step_conversions.h"
#include "server/options/options.h"

namespace attnd::server {
namespace {

using ::testing::HasSubstr;

v1::Policy Request(const std::string& preset,
                   const std::map<std::string, std::string>& parameters = {}) {
  v1::Policy policy;
  policy.set_preset(preset);
  policy.mutable_parameters()->insert(parameters.begin(), parameters.end());
  return policy;
}

std::string Entry(const std::string& name, const std::string& policy) {
  return "policies { name: '" + name + "' policy { " + policy + " } note: 'from a test' }\n";
}

class PolicyCatalogTest : public ::testing::Test {
 protected:
  ~PolicyCatalogTest() override {
    for (const std::string& path : paths_) std::remove(path.c_str());
  }
  std::string Write(const std::string& text) {
    paths_.push_back(::testing::TempDir() + "/attnd-policies-" + std::to_string(getpid()) + "-" +
                     std::to_string(paths_.size()));
    std::ofstream(paths_.back()) << text;
    return paths_.back();
  }
  absl::StatusOr<PolicyCatalog> Load(const std::string& text) {
    return PolicyCatalog::Load({Write(text)});
  }
  // A catalogue with one name, "careful".
  PolicyCatalog Careful() {
    return Load(Entry("careful",
                      "preset: 'error-target' parameters { key: 'tolerance' value: '0.05' } "
                      "parameters { key: 'floor' value: '0.02' }"))
        .value();
  }

  std::vector<std::string> paths_;
};

TEST_F(PolicyCatalogTest, ANameStandsForItsPresetAndParameters) {
  const PolicyCatalog catalog = Careful();
  const auto policy = catalog.Parse(Request("careful"));
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->preset, "error-target");
  EXPECT_EQ(policy->tolerance, 0.05);
  EXPECT_EQ(policy->floor, 0.02);
  EXPECT_EQ(policy->window, 64u);  // a default
}

TEST_F(PolicyCatalogTest, ARequestsParametersComeOnTop) {
  const auto policy = Careful().Parse(Request("careful", {{"tolerance", "0.3"}, {"sink", "8"}}));
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->tolerance, 0.3);
  EXPECT_EQ(policy->floor, 0.02);
  EXPECT_EQ(policy->sink, 8u);
}

TEST_F(PolicyCatalogTest, BuiltInPresetsStayWhatTheyAre) {
  for (const attention::Policy& preset : attention::PresetPolicies()) {
    const auto policy = Careful().Parse(Request(preset.preset));
    ASSERT_TRUE(policy.ok()) << policy.status();
    EXPECT_EQ(policy->Parameters(), preset.Parameters());
  }
}

TEST_F(PolicyCatalogTest, WrongRequestsAreRefusedAsEver) {
  const PolicyCatalog catalog = Careful();
  const absl::Status unknown = catalog.Parse(Request("careless")).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("dense"));
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("the 1 names of policy_file"));
  const absl::Status parameter = catalog.Parse(Request("careful", {{"p1", "0.9"}})).status();
  EXPECT_EQ(parameter.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(parameter.message()), HasSubstr("p1"));
  EXPECT_THAT(std::string(catalog.Parse(Request("")).status().message()), HasSubstr("preset"));
  v1::Policy many = Request("careful");
  for (int i = 0; i <= kPolicyParametersMax; ++i) {
    (*many.mutable_parameters())[absl::StrCat("p", i)] = "1";
  }
  EXPECT_THAT(std::string(catalog.Parse(many).status().message()), HasSubstr("33 entries"));
}

TEST_F(PolicyCatalogTest, MistakesNameTheFileAndTheField) {
  const std::string good = Entry("good", "preset: 'dense'");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {Entry("", "preset: 'dense'"), "policies[0].name is \"\""},
      {Entry("Loud", "preset: 'dense'"), "policies[0].name is \"Loud\"; allowed are 1..64"},
      {Entry("a_b", "preset: 'dense'"), "policies[0].name"},
      {Entry(std::string(65, 'x'), "preset: 'dense'"), "policies[0].name"},
      {Entry("dense", "preset: 'streaming'"), "policies[0].name is \"dense\", which is a built-in"},
      {good + good, "policies[1].name is \"good\" for the second time"},
      {good + Entry("empty", ""), "policies[1].policy.preset is empty"},
      {good + "policies { name: 'none' }", "policies[1].policy.preset is empty"},
      {good + Entry("of-name", "preset: 'good'"), "policies[1].policy.preset \"good\" is unknown"},
      {Entry("x", "preset: 'double-p' parameters { key: 'p1' value: '2' }"),
       "policies[0].policy.parameters[p1] is \"2\""},
      {"policies { name: 'x'\n nome: 'y' }", "line 2, column"},
      {"policies {", "line 1"},
      {"#" + std::string(1 << 20, 'x'), "more than 1048576 bytes"},
  };
  for (const auto& [text, words] : cases) {
    const std::string path = Write(text);
    const absl::Status status = PolicyCatalog::Load({path}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(std::string(status.message()), HasSubstr("policy_file " + path + ": "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    EXPECT_LT(status.message().size(), 1000u);
  }
}

// A file that a version takes must mean the same to the next one.
TEST_F(PolicyCatalogTest, NamesOfPresetsThatAreStillToComeAreNotFree) {
  for (const char* const planned :
       {"quest", "double-sparsity", "twilight", "asynctls", "snapkv", "topk-completion"}) {
    EXPECT_THAT(std::string(Load(Entry(planned, "preset: 'dense'")).status().message()),
                HasSubstr("built-in"));
  }
}

TEST_F(PolicyCatalogTest, FilesThatCannotBeRead) {
  EXPECT_THAT(std::string(PolicyCatalog::Load({"/nowhere/file"}).status().message()),
              HasSubstr("policy_file /nowhere/file: No such file"));
  EXPECT_FALSE(PolicyCatalog::Load({::testing::TempDir()}).ok());
}

TEST_F(PolicyCatalogTest, SeveralFilesAreOneCatalogueWithOneLimit) {
  std::string most;
  for (size_t i = 0; i < kNamedPoliciesMax; ++i) {
    most += Entry(absl::StrCat("p", i), "preset: 'dense'");
  }
  const std::string full = Write(most);
  EXPECT_EQ(PolicyCatalog::Load({full})->named().size(), kNamedPoliciesMax);
  const std::string more = Write(Entry("more", "preset: 'dense'"));
  const absl::Status status = PolicyCatalog::Load({full, more}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr(more + ": policies[0].name"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("256"));
  EXPECT_THAT(std::string(PolicyCatalog::Load({more, more}).status().message()),
              HasSubstr("second time"));
  EXPECT_EQ(PolicyCatalog::Load(std::vector<std::string>(17, more)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(PolicyCatalogTest, TheConfigurationLoadsThemBeforeItsDefaultPolicy) {
  v1::ServerConfig config;
  config.add_policy_file(Write(Entry("mine", "preset: 'streaming'")));
  *config.mutable_default_policy() = Request("mine", {{"sink", "1"}});
  ServerOptions options;
  ASSERT_TRUE(ApplyConfig(config, &options).ok());
  EXPECT_EQ(options.default_policy.preset, "streaming");
  EXPECT_EQ(options.default_policy.sink, 1u);
  EXPECT_EQ(options.policies.named().count("mine"), 1u);
  config.add_policy_file("/nowhere/file");
  EXPECT_FALSE(ApplyConfig(config, &options).ok());
}

TEST_F(PolicyCatalogTest, RequestsMayNameThem) {
  const PolicyCatalog catalog = Careful();
  v1::OpenSequenceRequest open;
  v1::ModelShape* shape = open.mutable_model()->mutable_shape();
  shape->set_layers(1);
  shape->set_query_heads(2);
  shape->set_kv_heads(1);
  shape->set_head_dim(16);
  shape->set_dtype(v1::DTYPE_FP32);
  *open.mutable_policy() = Request("careful");
  EXPECT_FALSE(FromProto(open, 100).ok());
  const auto args = FromProto(open, 100, catalog);
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_EQ(args->policy->tolerance, 0.05);
}

}  // namespace
}  // namespace attnd::server
