// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/io/memory_state.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::storage::test {
namespace {

constexpr uint64_t kSectorBytes = 512;  // what a disk writes whole

void Apply(const NameChange& change, Names* names) {
  if (!change.erase.empty()) names->erase(change.erase);
  if (!change.set.empty()) (*names)[change.set] = change.node;
}

bool IsIn(const std::string& path, const std::string& folder) {
  return !path.empty() && path != "/" && ParentOf(path) == folder;
}

// `bytes` from `offset` on; zeros where there are none.
void CopyFrom(const std::vector<std::byte>& data, uint64_t offset, std::byte* to, size_t bytes) {
  const uint64_t there =
      offset >= data.size() ? 0 : std::min<uint64_t>(bytes, data.size() - offset);
  if (there > 0) std::memcpy(to, data.data() + offset, there);
  std::fill(to + there, to + bytes, std::byte{0});
}

}  // namespace

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status MemoryStorage::State::CheckPower() const {
  if (changes < changes_max) return absl::OkStatus();
  return absl::UnavailableError("the power is off");
}

absl::Status MemoryStorage::State::BeginChange() {
  ATTND_RETURN_IF_ERROR(CheckPower());
  ++changes;
  return absl::OkStatus();
}

std::shared_ptr<Node> MemoryStorage::State::Find(const std::string& path) const {
  const auto found = names.find(path);
  return found == names.end() ? nullptr : found->second;
}

void MemoryStorage::State::Change(NameChange change) {
  Apply(change, &names);
  pending.push_back(std::move(change));
}

absl::Status MemoryStorage::State::MakeFolders(const std::string& folder) {
  if (const auto node = Find(folder); node != nullptr) {
    if (node->folder) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat(folder, ": a file"));
  }
  const std::string parent = ParentOf(folder);
  if (Find(parent) == nullptr) {
    ATTND_RETURN_IF_ERROR(MakeFolders(parent));
    SyncNames(ParentOf(parent));  // as FileSystem says
  }
  ATTND_RETURN_IF_ERROR(BeginChange());
  auto node = std::make_shared<Node>();
  node->folder = true;
  Change({"", folder, node});
  return absl::OkStatus();
}

// A rename between two folders is durable when one of them is.
void MemoryStorage::State::SyncNames(const std::string& folder) {
  std::vector<NameChange> rest;
  for (NameChange& change : pending) {
    if (IsIn(change.erase, folder) || IsIn(change.set, folder)) {
      Apply(change, &durable_names);
    } else {
      rest.push_back(std::move(change));
    }
  }
  pending = std::move(rest);
}

uint64_t MemoryStorage::State::FreeBytes() const {
  uint64_t used = 0;
  for (const auto& [path, node] : names) used += node->data.size();
  return used >= capacity_bytes ? 0 : capacity_bytes - used;
}

absl::Status MemoryStorage::State::Read(const Node& node, const IoRequest& request) {
  ATTND_RETURN_IF_ERROR(CheckPower());
  ++counters.reads;
  counters.read_bytes += request.bytes;
  if (Draw(faults.read_error)) {
    std::fill_n(request.data, Below(request.bytes), std::byte{0xa5});
    return absl::UnavailableError("read: a fault drawn by the test");
  }
  const bool ends = request.offset + request.bytes > node.data.size();
  if (ends || Draw(faults.read_short)) return absl::DataLossError("the file ended");
  CopyFrom(node.data, request.offset, request.data, request.bytes);
  if (Draw(faults.read_misdirected)) ReadElsewhere(node, request);
  if (Draw(faults.read_bit_flip)) {
    request.data[Below(request.bytes)] ^= std::byte{1} << Below(8);
  }
  return absl::OkStatus();
}

void MemoryStorage::State::ReadElsewhere(const Node& node, const IoRequest& request) {
  auto other = names.begin();
  std::advance(other, Below(names.size()));
  const bool here = other->second->data.empty() || Below(2) == 0;
  const Node& from = here ? node : *other->second;
  const uint64_t blocks = from.data.size() / kBlockBytes + 1;
  CopyFrom(from.data, Below(blocks) * kBlockBytes, request.data, request.bytes);
}

absl::Status MemoryStorage::State::Write(Node* node, const IoRequest& request) {
  ATTND_RETURN_IF_ERROR(BeginChange());
  ++counters.writes;
  if (request.offset + request.bytes > node->data.size()) {
    return absl::UnavailableError("write: beyond the file's end");
  }
  uint64_t offset = request.offset;
  uint32_t bytes = request.bytes;
  const bool fails = Draw(faults.write_error);
  if (fails) bytes = static_cast<uint32_t>(Below(bytes / kBlockBytes + 1) * kBlockBytes);
  if (Draw(faults.write_lost)) bytes = 0;
  if (Draw(faults.write_misdirected)) {
    offset = Below((node->data.size() - bytes) / kBlockBytes + 1) * kBlockBytes;
  }
  for (uint64_t at = 0; at < bytes; at += kBlockBytes) {
    WriteBlock(node, (offset + at) / kBlockBytes, request.data + at, kBlockBytes);
  }
  node->failed |= fails;
  return fails ? absl::UnavailableError("write: a fault drawn by the test") : absl::OkStatus();
}

void MemoryStorage::State::WriteBlock(Node* node, uint64_t block, const std::byte* data,
                                      size_t bytes) {
  std::byte* to = node->data.data() + block * kBlockBytes;
  node->unsynced.try_emplace(block, to, to + bytes);  // not again: the first is what is durable
  std::memcpy(to, data, bytes);
}

absl::Status MemoryStorage::State::Sync(Node* node) {
  ATTND_RETURN_IF_ERROR(BeginChange());
  ++counters.syncs;
  if (node->failed) ++counters.syncs_after_error;
  if (Draw(faults.sync_error)) node->failed = true;
  if (node->failed) return absl::UnavailableError("sync: a fault drawn by the test");
  node->synced = true;
  node->unsynced.clear();
  return absl::OkStatus();
}

void MemoryStorage::State::LosePower() {
  const uint64_t happened = Below(pending.size() + 1);
  for (uint64_t i = 0; i < happened; ++i) Apply(pending[i], &durable_names);
  pending.clear();
  // A folder that is gone takes its files along; parents come before what is in them.
  for (auto name = durable_names.begin(); name != durable_names.end();) {
    const bool orphan = name->first != "/" && !durable_names.contains(ParentOf(name->first));
    name = orphan ? durable_names.erase(name) : std::next(name);
  }
  names = durable_names;
  std::set<Node*> nodes;
  for (const auto& [path, node] : names) nodes.insert(node.get());
  for (Node* node : nodes) TearBlocks(node);
  ++boot;
  changes_max = UINT64_MAX;
}

void MemoryStorage::State::TearBlocks(Node* node) {
  for (const auto& [block, before] : node->unsynced) {
    std::byte* now = node->data.data() + block * kBlockBytes;
    const uint64_t fate = Below(3);
    for (uint64_t at = 0; at < before.size(); at += kSectorBytes) {
      const bool lost = fate == 0 || (fate == 1 && Below(2) == 0);
      if (lost) std::copy_n(before.begin() + static_cast<ptrdiff_t>(at), kSectorBytes, now + at);
    }
  }
  if (!node->synced && !node->folder && Below(2) == 0) {
    node->data.resize(Below(node->data.size() / kBlockBytes + 1) * kBlockBytes);
  }
  node->unsynced.clear();
  node->synced = true;
  node->failed = false;
}

}  // namespace attnd::storage::test
