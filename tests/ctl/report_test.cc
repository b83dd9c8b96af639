// SPDX-License-Identifier: Apache-2.0
//
// Goal: a report says the same as JSON and as text, and neither shows a terminal what it should not
// see; progress lines say how far it is. Method: trees made by hand.
#include "ctl/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ctl/progress.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"

namespace attnd::ctl::test {
namespace {

using testing::HasSubstr;
using testing::Not;

Value Tree() {
  Value rows = Value::List(), ids = Value::List(), mixed = Value::List();
  ids.Add(7u).Add(8u);
  rows.Add(Value::Object().Set("id", 1u).Set("needed_by", ids));
  rows.Add(Value::Object().Set("id", 20000u).Set("needed_by", Value::List()));
  mixed.Add(Value::Object().Set("a", Value::Object().Set("b", 0.5))).Add("text");
  Value tree = Value::Object();
  tree.Set("name", "value")
      .Set("fine", true)
      .Set("large", (uint64_t{1} << 53) + 2)
      .Set("rows", std::move(rows))
      .Set("none", Value::List())
      .Set("ids", std::move(ids))
      .Set("mixed", std::move(mixed));
  return tree;
}

TEST(ReportTest, Text) {
  EXPECT_EQ(Tree().Text(),
            "name: value\n"
            "fine: yes\n"
            "large: 9007199254740994\n"
            "rows:\n"
            "  id     needed_by\n"
            "  1      7, 8\n"
            "  20000  \n"
            "none: none\n"
            "ids: 7, 8\n"
            "mixed:\n"
            "  -\n"
            "    a:\n"
            "      b: 0.5\n"
            "  text\n");
}

TEST(ReportTest, Json) {
  google::protobuf::Struct parsed;
  const std::string json = Tree().Json().value();
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(json, &parsed).ok()) << json;
  const auto& fields = parsed.fields();
  EXPECT_EQ(fields.at("name").string_value(), "value");
  EXPECT_TRUE(fields.at("fine").bool_value());
  EXPECT_EQ(fields.at("large").string_value(), "9007199254740994") << "a double would round it";
  EXPECT_EQ(
      fields.at("rows").list_value().values(1).struct_value().fields().at("id").number_value(),
      20000);
  EXPECT_TRUE(fields.at("none").has_list_value());
  EXPECT_EQ(json.back(), '\n');
}

TEST(ReportTest, WhatIsNotPrintableIsEscaped) {
  Value value = Value::Object();
  value.Set("tenant", std::string("\x1b[2J\xff\n", 6));
  EXPECT_THAT(value.Text(), Not(HasSubstr("\x1b")));
  EXPECT_THAT(value.Text(), HasSubstr("\\x1b[2J\\xff\\n"));
  EXPECT_TRUE(value.Json().ok());
}

TEST(ReportTest, Units) {
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1536), "1.5 KiB");
  EXPECT_EQ(BytesText(uint64_t{3} << 40), "3.0 TiB");
  EXPECT_EQ(TimeText(1767225600), "2026-01-01T00:00:00Z");
}

TEST(ProgressTest, Lines) {
  using Unit = Progress::Unit;
  EXPECT_EQ(ProgressLine("verify", Unit::kBytes, 1 << 20, 4 << 20, 2),
            "verify [######                  ]  25%  1.0 MiB of 4.0 MiB  512.0 KiB/s  0:06 left");
  EXPECT_EQ(ProgressLine("read", Unit::kFiles, 0, 10, 0),
            "read [                        ]   0%  0 of 10");
  EXPECT_THAT(ProgressLine("read", Unit::kFiles, 12, 10, 1), HasSubstr("100%  12 of 12"));
  EXPECT_THAT(ProgressLine("read", Unit::kFiles, 0, 0, 1), HasSubstr("100%"));
}

TEST(ProgressTest, WithoutATerminalNothingIsShown) {
  Progress progress("verify", Progress::Unit::kBytes, 10, nullptr);
  progress.Add(5);
  progress.MoveTo(10);
}

}  // namespace
}  // namespace attnd::ctl::test
