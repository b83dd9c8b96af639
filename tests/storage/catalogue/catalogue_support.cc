// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/catalogue/catalogue_support.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::storage::test {
namespace {

constexpr uint64_t kKeys = 200;

// A number in [low, high], often one of these.
uint64_t Edge(Random* random, uint64_t low, uint64_t high) {
  switch (random->Below(4)) {
    case 0:
      return low;
    case 1:
      return high;
    default:
      return low + random->Below(high - low);
  }
}

uint64_t FileBytes(Random* random) {
  return kBlockBytes * Edge(random, 1, kFileBytesMax / kBlockBytes);
}
int64_t Time(Random* random) { return static_cast<int64_t>(Edge(random, 0, kUnixSMax)); }
std::string Tenant(Random* random) {
  return random->Bytes(random->Below(8) == 0 ? kTenantBytesMax : random->Below(40));
}

}  // namespace

std::string Random::Bytes(size_t count) {
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(Below(256));
  return bytes;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  ASSERT_TRUE(file.flush().good()) << path;
}

std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

ChainId ChainOf(uint64_t number) {
  std::mt19937_64 generator(number);
  ChainId chain;
  for (uint8_t& byte : chain) byte = static_cast<uint8_t>(generator());
  return chain;
}

SegmentRecord RandomSegment(Random* random, const ChainId& chain) {
  SegmentRecord record;
  record.chain = chain;
  if (random->Below(3) != 0) record.parent = ChainOf(UINT64_MAX - random->Below(1000));
  record.tenant = Tenant(random);
  record.file = Edge(random, 1, kNumberMax);
  record.file_bytes = FileBytes(random);
  record.first_position = Edge(random, 0, kPositionMax);
  record.tokens = static_cast<uint32_t>(Edge(random, 1, UINT32_MAX));
  record.used_unix_s = Time(random);
  return record;
}

SequenceRecord RandomSequence(Random* random, uint64_t id) {
  SequenceRecord record;
  record.id = id;
  record.tenant = Tenant(random);
  if (random->Below(3) != 0) record.last = ChainOf(random->Below(kKeys));
  record.tail_file = Edge(random, 1, kNumberMax);
  record.tail_file_bytes = FileBytes(random);
  record.tokens = Edge(random, 0, kPositionMax);
  record.sealed_unix_s = Time(random);
  record.used_unix_s = Time(random);
  return record;
}

std::unique_ptr<Catalogue> OpenOrFail(const std::string& folder, Catalogue::Mode mode) {
  auto opened = Catalogue::Open(folder, mode);
  EXPECT_TRUE(opened.ok()) << opened.status();
  return opened.ok() ? *std::move(opened) : nullptr;
}

void Model::Apply(const CatalogueChanges& changes) {
  for (const ChainId& chain : changes.dropped_segments) segments.erase(chain);
  for (const uint64_t id : changes.dropped_sequences) sequences.erase(id);
  for (const auto& record : changes.segments) segments[record.chain] = record;
  for (const auto& record : changes.sequences) sequences[record.id] = record;
}

CatalogueChanges Model::RandomChanges(Random* random) const {
  CatalogueChanges changes;
  for (uint64_t i = random->Below(8); i > 0; --i) {
    changes.segments.push_back(RandomSegment(random, ChainOf(random->Below(kKeys))));
  }
  for (uint64_t i = random->Below(8); i > 0; --i) {
    changes.sequences.push_back(RandomSequence(random, (1 + random->Below(kKeys)) << 5));
  }
  for (uint64_t i = random->Below(4); i > 0; --i) {
    changes.dropped_segments.push_back(ChainOf(random->Below(kKeys)));
    changes.dropped_sequences.push_back((1 + random->Below(kKeys)) << 5);
  }
  return changes;
}

absl::Status Model::Compare(const Catalogue& catalogue) const {
  auto segment = segments.begin();
  ATTND_RETURN_IF_ERROR(catalogue.ForEachSegment([&](const SegmentRecord& record) {
    if (segment == segments.end() || !(record == segment->second)) {
      return absl::InternalError("another segment");
    }
    ++segment;
    return absl::OkStatus();
  }));
  if (segment != segments.end()) return absl::InternalError("fewer segments");
  auto sequence = sequences.begin();
  ATTND_RETURN_IF_ERROR(catalogue.ForEachSequence([&](const SequenceRecord& record) {
    if (sequence == sequences.end() || !(record == sequence->second)) {
      return absl::InternalError("another sequence");
    }
    ++sequence;
    return absl::OkStatus();
  }));
  if (sequence != sequences.end()) return absl::InternalError("fewer sequences");
  for (const auto& [chain, expected] : segments) {
    const auto found = catalogue.FindSegment(chain);
    if (absl::IsNotFound(found.status())) return absl::InternalError("a segment is not found");
    ATTND_RETURN_IF_ERROR(found.status());
    if (!(*found == expected)) return absl::InternalError("a segment differs");
  }
  for (const auto& [id, expected] : sequences) {
    const auto found = catalogue.FindSequence(id);
    if (absl::IsNotFound(found.status())) {
      return absl::InternalError(absl::StrCat("sequence ", id, " is not found"));
    }
    ATTND_RETURN_IF_ERROR(found.status());
    if (!(*found == expected)) return absl::InternalError("a sequence differs");
  }
  return absl::OkStatus();
}

}  // namespace attnd::storage::test
