// SPDX-License-Identifier: Apache-2.0
//
// What the catalogue's tests share: random records, and a plain model
// of a catalogue that says whether a real one holds the same.
#ifndef ATTND_TESTS_STORAGE_CATALOGUE_CATALOGUE_SUPPORT_H_
#define ATTND_TESTS_STORAGE_CATALOGUE_CATALOGUE_SUPPORT_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "storage/catalogue/catalogue.h"
#include "tests/storage/io/io_support.h"

namespace attnd::storage::test {

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  // 0 .. n - 1
  uint64_t Below(uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(generator_);
  }
  std::string Bytes(size_t count);

 private:
  std::mt19937_64 generator_;
};

std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, const std::string& bytes);
// Names in a folder, by ascending order; not those in its folders.
std::vector<std::string> NamesIn(const std::string& folder);

ChainId ChainOf(uint64_t number);  // in no order
// Anything that a catalogue may hold.
SegmentRecord RandomSegment(Random* random, const ChainId& chain);
SequenceRecord RandomSequence(Random* random, uint64_t id);

// Opens a catalogue; null, and a failed test, if that fails.
std::unique_ptr<Catalogue> OpenOrFail(const std::string& folder,
                                      Catalogue::Mode mode = Catalogue::Mode::kReadWrite);

struct Model {
  std::map<ChainId, SegmentRecord> segments;
  std::map<uint64_t, SequenceRecord> sequences;

  void Apply(const CatalogueChanges& changes);
  // Something of everything; keys are few, so that they are met again.
  CatalogueChanges RandomChanges(Random* random) const;
  // OK if `catalogue` holds the same, one by one and in order; its error; Internal says what
  // differs.
  absl::Status Compare(const Catalogue& catalogue) const;
};

}  // namespace attnd::storage::test

#endif  // ATTND_TESTS_STORAGE_CATALOGUE_CATALOGUE_SUPPORT_H_
