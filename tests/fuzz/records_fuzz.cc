// SPDX-License-Identifier: Apache-2.0
//
// Goal: no bytes make DecodeSegment or DecodeSequence crash, and what they accept is within every
// limit and read back the same. No checksum stands before them.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "storage/catalogue/catalogue.h"
#include "tests/fuzz/target.h"

namespace attnd::fuzz {
namespace {

using storage::SegmentRecord;
using storage::SequenceRecord;

void TrySegment(const std::string& bytes) {
  const auto record = storage::DecodeSegment(bytes);
  if (!record.ok()) {
    if (!absl::IsDataLoss(record.status())) Fail("a segment's error is not DataLoss");
    return;
  }
  if (!storage::CheckSegment(*record).ok()) Fail("a segment beyond its limits");
  const auto again = storage::DecodeSegment(storage::EncodeSegment(*record));
  if (!again.ok() || !(*again == *record)) Fail("a segment is not read back");
}

void TrySequence(const std::string& bytes) {
  const auto record = storage::DecodeSequence(bytes);
  if (!record.ok()) {
    if (!absl::IsDataLoss(record.status())) Fail("a sequence's error is not DataLoss");
    return;
  }
  if (!storage::CheckSequence(*record).ok()) Fail("a sequence beyond its limits");
  const auto again = storage::DecodeSequence(storage::EncodeSequence(*record));
  if (!again.ok() || !(*again == *record)) Fail("a sequence is not read back");
}

}  // namespace

void Fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

std::string GoodInput(std::mt19937_64* random) {
  const auto number = [&] { return 1 + Below(random, uint64_t{1} << Below(random, 40)); };
  const auto chain = [&] {
    storage::ChainId id;
    for (uint8_t& byte : id) byte = static_cast<uint8_t>(Below(random, 256));
    return id;
  };
  const std::string tenant(Below(random, 30), 't');
  if (Below(random, 2) == 0) {
    SequenceRecord record{number(), tenant, chain(), number(), 4096 * number(), number(), 17, 18};
    return storage::EncodeSequence(record);
  }
  const auto tokens = static_cast<uint32_t>(1 + Below(random, 100000));
  SegmentRecord record{chain(), chain(), tenant, number(), 4096 * number(), number(), tokens, 17};
  return storage::EncodeSegment(record);
}

}  // namespace attnd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string text(reinterpret_cast<const char*>(data), bytes);
  attnd::fuzz::TrySegment(text);
  attnd::fuzz::TrySequence(text);
  return 0;
}
