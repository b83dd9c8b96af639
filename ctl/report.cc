// SPDX-License-Identifier: Apache-2.0
#include "ctl/report.h"

#include <algorithm>
#include <array>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"

namespace attnd::ctl {

Value::Value(absl::string_view text) {
  const bool plain =
      std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
  data_ = plain ? std::string(text) : absl::CHexEscape(text);
}

Value::Value(double number) : data_(number) {}
Value::Value(Data data) : data_(std::move(data)) {}
Value::Value(const Value& other) = default;
Value::Value(Value&& other) noexcept = default;
Value& Value::operator=(const Value& other) = default;
Value& Value::operator=(Value&& other) noexcept = default;
Value::~Value() = default;

Value Value::Object() { return Value(Data(Members())); }
Value Value::List() { return Value(Data(Items())); }

Value& Value::Set(std::string name, Value value) {
  std::get<Members>(data_).push_back({std::move(name), std::move(value)});
  return *this;
}

Value& Value::Add(Value value) {
  std::get<Items>(data_).push_back(std::move(value));
  return *this;
}

// ---- JSON ----

class JsonWriter {
 public:
  static void Write(const Value& from, google::protobuf::Value* to) {
    constexpr uint64_t kExactMax = uint64_t{1} << 53;
    if (const auto* text = std::get_if<std::string>(&from.data_)) {
      to->set_string_value(*text);
    } else if (const auto* number = std::get_if<uint64_t>(&from.data_)) {
      if (*number <= kExactMax) {
        to->set_number_value(static_cast<double>(*number));
      } else {
        to->set_string_value(absl::StrCat(*number));
      }
    } else if (const auto* real = std::get_if<double>(&from.data_)) {
      to->set_number_value(*real);
    } else if (const auto* truth = std::get_if<bool>(&from.data_)) {
      to->set_bool_value(*truth);
    } else if (const auto* members = std::get_if<Value::Members>(&from.data_)) {
      auto* fields = to->mutable_struct_value()->mutable_fields();
      for (const Value::Member& member : *members) Write(member.value, &(*fields)[member.name]);
    } else if (const auto* items = std::get_if<Value::Items>(&from.data_)) {
      to->mutable_list_value();  // there, even if it is empty
      for (const Value& item : *items) Write(item, to->mutable_list_value()->add_values());
    }
  }
};

absl::StatusOr<std::string> Value::Json() const {
  google::protobuf::Value message;
  JsonWriter::Write(*this, &message);
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json);
  if (!status.ok()) return absl::InternalError(absl::StrCat("no JSON: ", status.ToString()));
  return json + "\n";
}

// ---- text ----

class TextWriter {
 public:
  std::string Take() { return std::move(text_); }

  void WriteMembers(const Value::Members& members, int indent) {
    for (const Value::Member& member : members) WriteMember(member, indent);
  }

  void WriteItems(const Value::Items& items, int indent) {
    if (IsTable(items)) return WriteTable(items, indent);
    for (const Value& item : items) {
      if (IsScalar(item)) {
        Line(indent, Scalar(item));
        continue;
      }
      Line(indent, "-");
      WriteInner(item, indent + 1);
    }
  }

  void WriteInner(const Value& value, int indent) {
    if (const auto* members = std::get_if<Value::Members>(&value.data_)) {
      WriteMembers(*members, indent);
    } else if (const auto* items = std::get_if<Value::Items>(&value.data_)) {
      WriteItems(*items, indent);
    } else {
      Line(indent, Scalar(value));
    }
  }

 private:
  void Line(int indent, absl::string_view line) {
    absl::StrAppend(&text_, std::string(static_cast<size_t>(2 * indent), ' '), line, "\n");
  }

  void WriteMember(const Value::Member& member, int indent) {
    const auto* items = std::get_if<Value::Items>(&member.value.data_);
    if (IsScalar(member.value)) {
      Line(indent, absl::StrCat(member.name, ": ", Scalar(member.value)));
    } else if (items != nullptr && items->empty()) {
      Line(indent, absl::StrCat(member.name, ": none"));
    } else if (items != nullptr && std::all_of(items->begin(), items->end(), IsScalar)) {
      Line(indent, absl::StrCat(member.name, ": ", Join(*items)));
    } else {
      Line(indent, member.name + ":");
      WriteInner(member.value, indent + 1);
    }
  }

  static std::string Join(const Value::Items& items) {
    return absl::StrJoin(items, ", ", [](std::string* out, const Value& item) {
      absl::StrAppend(out, Scalar(item));
    });
  }

  static bool IsScalar(const Value& value) {
    return !std::holds_alternative<Value::Members>(value.data_) &&
           !std::holds_alternative<Value::Items>(value.data_);
  }

  // A cell: a scalar, or a list of them.
  static bool IsCell(const Value& value) {
    const auto* items = std::get_if<Value::Items>(&value.data_);
    return IsScalar(value) ||
           (items != nullptr && std::all_of(items->begin(), items->end(), IsScalar));
  }

  static std::string Cell(const Value& value) {
    const auto* items = std::get_if<Value::Items>(&value.data_);
    return items == nullptr ? Scalar(value) : Join(*items);
  }

  static bool IsRow(const Value& value) {
    const auto* members = std::get_if<Value::Members>(&value.data_);
    return members != nullptr &&
           std::all_of(members->begin(), members->end(),
                       [](const Value::Member& member) { return IsCell(member.value); });
  }

  // Objects of the same members.
  static bool IsTable(const Value::Items& items) {
    if (items.empty() || !std::all_of(items.begin(), items.end(), IsRow)) return false;
    const auto& first = std::get<Value::Members>(items[0].data_);
    return std::all_of(items.begin(), items.end(), [&](const Value& item) {
      const auto& members = std::get<Value::Members>(item.data_);
      return std::equal(members.begin(), members.end(), first.begin(), first.end(),
                        [](const auto& a, const auto& b) { return a.name == b.name; });
    });
  }

  void WriteTable(const Value::Items& items, int indent) {
    std::vector<std::vector<std::string>> rows(1);
    for (const auto& member : std::get<Value::Members>(items[0].data_)) {
      rows[0].push_back(member.name);
    }
    std::vector<size_t> widths(rows[0].size());
    for (const Value& item : items) {
      rows.emplace_back();
      for (const auto& member : std::get<Value::Members>(item.data_)) {
        rows.back().push_back(Cell(member.value));
      }
    }
    for (const auto& row : rows) {
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    for (const auto& row : rows) {
      std::string line;
      for (size_t i = 0; i < row.size(); ++i) {
        const size_t padding = i + 1 == row.size() ? 0 : widths[i] - row[i].size() + 2;
        absl::StrAppend(&line, row[i], std::string(padding, ' '));
      }
      Line(indent, line);
    }
  }

  static std::string Scalar(const Value& value) {
    if (const auto* text = std::get_if<std::string>(&value.data_)) return *text;
    if (const auto* number = std::get_if<uint64_t>(&value.data_)) return absl::StrCat(*number);
    if (const auto* real = std::get_if<double>(&value.data_)) return absl::StrCat(*real);
    return std::get<bool>(value.data_) ? "yes" : "no";
  }

  std::string text_;
};

std::string Value::Text() const {
  TextWriter writer;
  writer.WriteInner(*this, 0);
  return writer.Take();
}

std::string TimeText(int64_t unix_s) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::FromUnixSeconds(unix_s), absl::UTCTimeZone());
}

std::string BytesText(uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  auto amount = static_cast<double>(bytes);
  for (; amount >= 1024 && unit + 1 < kUnits.size(); ++unit) amount /= 1024;
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", amount, kUnits[unit]);
}

}  // namespace attnd::ctl
