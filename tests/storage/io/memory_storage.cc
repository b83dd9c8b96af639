// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/io/memory_storage.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/storage/io/memory_state.h"

namespace attnd::storage::test {

class MemoryStorage::OpenFile : public File {
 public:
  OpenFile(std::shared_ptr<State> state, std::shared_ptr<Node> node, bool writable, uint64_t boot)
      : state_(std::move(state)),
        node_(std::move(node)),
        writable_(writable),
        boot_(boot),
        bytes_(node_->data.size()) {}
  ~OpenFile() override {
    MutexLock lock(state_->mutex);
    --state_->counters.open_files;
  }

  int fd() const override { return -1; }  // there is none
  uint64_t bytes() const override { return bytes_; }
  absl::Status Sync() override {
    MutexLock lock(state_->mutex);
    ATTND_RETURN_IF_ERROR(CheckBoot());
    return state_->Sync(node_.get());
  }

  // What a queue asks for.
  absl::Status Transfer(const IoRequest& request) const {
    MutexLock lock(state_->mutex);
    ATTND_RETURN_IF_ERROR(CheckBoot());
    if (writable_ != (request.kind == IoKind::kWrite)) {
      return absl::UnavailableError("the file is not open for that");
    }
    if (writable_) return state_->Write(node_.get(), request);
    return state_->Read(*node_, request);
  }

 private:
  absl::Status CheckBoot() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) {
    if (boot_ == state_->boot) return absl::OkStatus();
    return absl::UnavailableError("opened before the power failed");
  }

  const std::shared_ptr<State> state_;
  const std::shared_ptr<Node> node_;
  const bool writable_;
  const uint64_t boot_;
  const uint64_t bytes_;
};

class MemoryStorage::Queue : public IoQueue {
 public:
  Queue(std::shared_ptr<State> state, uint32_t depth) : state_(std::move(state)), depth_(depth) {}
  ~Queue() override {
    while (!pending_.empty()) Complete();
  }

  std::string name() const override { return "memory"; }
  uint32_t depth() const override { return depth_; }
  uint32_t in_flight() const override { return static_cast<uint32_t>(pending_.size()); }

  absl::Status Submit(std::span<const IoRequest> requests) override {
    for (const IoRequest& request : requests) ATTND_RETURN_IF_ERROR(Check(request));
    if (requests.size() > depth_ - pending_.size()) {
      return absl::ResourceExhaustedError(
          absl::StrCat(pending_.size(), " requests under way of ", depth_));
    }
    pending_.insert(pending_.end(), requests.begin(), requests.end());
    MutexLock lock(state_->mutex);
    MemoryCounters& counters = state_->counters;
    counters.queued += requests.size();
    counters.in_flight_max = std::max<uint64_t>(counters.in_flight_max, pending_.size());
    return absl::OkStatus();
  }

  size_t Poll(std::span<IoCompletion> done, std::chrono::microseconds) override {
    const size_t most = std::min(done.size(), pending_.size());
    if (most == 0) return 0;
    const size_t count = 1 + Below(most);
    for (size_t i = 0; i < count; ++i) done[i] = Complete();
    return count;
  }

  void Cancel(uint64_t tag) override {
    for (const IoRequest& request : pending_) {
      if (request.tag == tag) cancelled_.push_back(tag);
    }
  }

  absl::Status RegisterMemory(std::span<std::byte>) override {
    return absl::ResourceExhaustedError("no memory is registered here");
  }

 private:
  static absl::Status Check(const IoRequest& request) {
    const bool aligned = request.offset % kBlockBytes == 0 && request.bytes % kBlockBytes == 0 &&
                         reinterpret_cast<uintptr_t>(request.data) % kBlockBytes == 0;
    if (aligned && request.bytes > 0 && request.bytes <= kIoBytesMax && request.file != nullptr) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("request of ", request.bytes, " bytes at ",
                                                   request.offset, ": not whole blocks"));
  }

  size_t Below(uint64_t n) {
    MutexLock lock(state_->mutex);
    return state_->Below(n);
  }

  // One of those under way.
  IoCompletion Complete() {
    const size_t chosen = Below(pending_.size());
    const IoRequest request = pending_[chosen];
    pending_.erase(pending_.begin() + static_cast<ptrdiff_t>(chosen));
    const bool cancelled = std::erase(cancelled_, request.tag) > 0 && Below(2) == 0;
    absl::Status status = cancelled ? absl::CancelledError("cancelled")
                                    : static_cast<const OpenFile*>(request.file)->Transfer(request);
    MutexLock lock(state_->mutex);
    --state_->counters.queued;
    return IoCompletion{request.tag, std::move(status)};
  }

  const std::shared_ptr<State> state_;
  const uint32_t depth_;
  std::vector<IoRequest> pending_;
  std::vector<uint64_t> cancelled_;  // tags
};

MemoryStorage::MemoryStorage(uint64_t seed, uint64_t capacity_bytes)
    : state_(std::make_shared<State>(seed, capacity_bytes)) {}
MemoryStorage::~MemoryStorage() = default;

absl::StatusOr<std::unique_ptr<File>> MemoryStorage::Open(const std::string& path) {
  MutexLock lock(state_->mutex);
  ATTND_RETURN_IF_ERROR(state_->CheckPower());
  auto node = state_->Find(path);
  if (node == nullptr) return absl::NotFoundError(absl::StrCat("open ", path));
  if (node->folder) return absl::UnavailableError(absl::StrCat("open ", path, ": a folder"));
  ++state_->counters.open_files;
  return std::make_unique<OpenFile>(state_, std::move(node), false, state_->boot);
}

absl::StatusOr<std::unique_ptr<File>> MemoryStorage::Create(const std::string& path,
                                                            uint64_t bytes) {
  if (bytes % kBlockBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat("create ", path, ": bytes is ", bytes));
  }
  MutexLock lock(state_->mutex);
  ATTND_RETURN_IF_ERROR(state_->BeginChange());
  if (state_->Find(path) != nullptr) return absl::AlreadyExistsError(absl::StrCat("create ", path));
  const auto folder = state_->Find(ParentOf(path));
  if (folder == nullptr || !folder->folder) {
    return absl::NotFoundError(absl::StrCat("create ", path, ": no such folder"));
  }
  if (state_->Draw(state_->faults.create_full) || bytes > state_->FreeBytes()) {
    return absl::ResourceExhaustedError(absl::StrCat("create ", path, ": the disk is full"));
  }
  auto node = std::make_shared<Node>();
  node->data.resize(bytes);
  state_->Change({"", path, node});
  ++state_->counters.open_files;
  return std::make_unique<OpenFile>(state_, std::move(node), true, state_->boot);
}

absl::Status MemoryStorage::Rename(const std::string& from, const std::string& to) {
  MutexLock lock(state_->mutex);
  ATTND_RETURN_IF_ERROR(state_->BeginChange());
  auto node = state_->Find(from);
  const auto folder = state_->Find(ParentOf(to));
  if (node == nullptr || folder == nullptr || !folder->folder) {
    return absl::NotFoundError(absl::StrCat("rename ", from, " to ", to));
  }
  if (node->folder || state_->Draw(state_->faults.rename_error)) {
    return absl::UnavailableError(absl::StrCat("rename ", from, ": a fault drawn by the test"));
  }
  state_->Change({from, to, std::move(node)});
  return absl::OkStatus();
}

absl::Status MemoryStorage::SyncFolder(const std::string& folder) {
  MutexLock lock(state_->mutex);
  ATTND_RETURN_IF_ERROR(state_->BeginChange());
  const auto node = state_->Find(folder);
  if (node == nullptr || !node->folder) return absl::NotFoundError(absl::StrCat("sync ", folder));
  if (state_->Draw(state_->faults.sync_folder_error)) {
    return absl::UnavailableError(absl::StrCat("sync ", folder, ": a fault drawn by the test"));
  }
  state_->SyncNames(folder);
  return absl::OkStatus();
}

absl::Status MemoryStorage::Remove(const std::string& path) {
  MutexLock lock(state_->mutex);
  ATTND_RETURN_IF_ERROR(state_->BeginChange());
  const auto node = state_->Find(path);
  if (node == nullptr) return absl::NotFoundError(absl::StrCat("remove ", path));
  if (node->folder || state_->Draw(state_->faults.remove_error)) {
    return absl::UnavailableError(absl::StrCat("remove ", path, ": refused"));
  }
  state_->Change({path, "", nullptr});
  return absl::OkStatus();
}

absl::Status MemoryStorage::MakeFolder(const std::string& folder) {
  MutexLock lock(state_->mutex);
  ATTND_RETURN_IF_ERROR(state_->CheckPower());
  return state_->MakeFolders(folder);
}

absl::StatusOr<std::vector<FolderEntry>> MemoryStorage::List(const std::string& folder) {
  MutexLock lock(state_->mutex);
  ATTND_RETURN_IF_ERROR(state_->CheckPower());
  const auto node = state_->Find(folder);
  if (node == nullptr || !node->folder) return absl::NotFoundError(absl::StrCat("list ", folder));
  std::vector<FolderEntry> entries;
  for (const auto& [path, entry] : state_->names) {
    if (path == "/" || ParentOf(path) != folder) continue;
    entries.push_back({path.substr(path.rfind('/') + 1), entry->folder, entry->data.size()});
  }
  return entries;
}

absl::StatusOr<uint64_t> MemoryStorage::FreeBytes(const std::string&) {
  MutexLock lock(state_->mutex);
  ATTND_RETURN_IF_ERROR(state_->CheckPower());
  return state_->FreeBytes();
}

std::unique_ptr<IoQueue> MemoryStorage::MakeQueue(uint32_t depth) {
  return std::make_unique<Queue>(state_, depth);
}

void MemoryStorage::SetFaults(const MemoryFaults& faults) {
  MutexLock lock(state_->mutex);
  state_->faults = faults;
}

void MemoryStorage::PowerOffAfter(uint64_t count) {
  MutexLock lock(state_->mutex);
  state_->changes_max = state_->changes + count;
}

bool MemoryStorage::power() const {
  MutexLock lock(state_->mutex);
  return state_->CheckPower().ok();
}

uint64_t MemoryStorage::changes() const {
  MutexLock lock(state_->mutex);
  return state_->changes;
}

void MemoryStorage::Crash() {
  MutexLock lock(state_->mutex);
  state_->LosePower();
}

std::vector<std::string> MemoryStorage::Paths() const {
  MutexLock lock(state_->mutex);
  std::vector<std::string> paths;
  for (const auto& [path, node] : state_->names) {
    if (!node->folder) paths.push_back(path);
  }
  return paths;
}

std::vector<std::byte>* MemoryStorage::MutableBytes(const std::string& path) {
  MutexLock lock(state_->mutex);
  const auto node = state_->Find(path);
  if (node == nullptr || node->folder) return nullptr;
  node->unsynced.clear();
  node->synced = true;
  return &node->data;
}

void MemoryStorage::Put(const std::string& path, std::vector<std::byte> bytes) {
  MutexLock lock(state_->mutex);
  auto node = std::make_shared<Node>();
  node->data = std::move(bytes);
  node->synced = true;
  state_->Change({"", path, std::move(node)});
  state_->SyncNames(ParentOf(path));
}

MemoryCounters MemoryStorage::counters() const {
  MutexLock lock(state_->mutex);
  return state_->counters;
}

}  // namespace attnd::storage::test
