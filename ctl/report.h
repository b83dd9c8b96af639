// SPDX-License-Identifier: Apache-2.0
//
// Value: what a command has to say, as a tree that is made once and printed either way: as JSON for
// programs, as text for people.
#ifndef ATTND_CTL_REPORT_H_
#define ATTND_CTL_REPORT_H_

#include <concepts>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd::ctl {

// A text, a number, a truth, a list, or an object, whose members keep the order that they were set
// in. One thread at a time.
class Value {
 public:
  struct Member;
  using Members = std::vector<Member>;
  using Items = std::vector<Value>;

  // Implicit, so that a report reads like what it says. Text beyond printable ASCII is escaped: it
  // may come from a file, and goes to a terminal.
  Value(absl::string_view text);                                      // NOLINT
  Value(const std::string& text) : Value(absl::string_view(text)) {}  // NOLINT
  Value(const char* text) : Value(absl::string_view(text)) {}         // NOLINT
  Value(double number);                                               // NOLINT
  template <std::same_as<bool> T>
  Value(T truth) : Value(Data(truth)) {}  // NOLINT
  template <std::unsigned_integral T>
  requires(!std::same_as<T, bool>) Value(T number) : Value(Data(uint64_t{number})) {}  // NOLINT
  // Not inline: they need Member, which needs this.
  Value(const Value& other);
  Value(Value&& other) noexcept;
  Value& operator=(const Value& other);
  Value& operator=(Value&& other) noexcept;
  ~Value();
  static Value Object();
  static Value List();

  // Of an object, and of a list; return this.
  Value& Set(std::string name, Value value);
  Value& Add(Value value);

  // One document, with a line's end. Numbers beyond 2^53, which JSON's readers round, are texts.
  // Internal if the library refuses it.
  absl::StatusOr<std::string> Json() const;
  // Lines of "name: value"; a list of flat objects is a table.
  std::string Text() const;

 private:
  friend class TextWriter;
  friend class JsonWriter;
  using Data = std::variant<std::string, uint64_t, double, bool, Members, Items>;
  explicit Value(Data data);

  Data data_;
};

struct Value::Member {
  std::string name;
  Value value;
};

// "2026-01-31T12:00:00Z".
std::string TimeText(int64_t unix_s);
// "1.5 GiB"; for people only.
std::string BytesText(uint64_t bytes);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_REPORT_H_
