// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/uploader.h"

#include <glog/logging.h>

#include <algorithm>

#include "common/status.h"

namespace attnd::gpu {
namespace {

using attention::kPageTokens;
using attention::kTailBlockTokens;
using attention::PageGeometry;
using attention::Segment;
using attention::TailBlock;

// Rows of tokens [begin, end) of one head of a tail block: for each page its keys and its values,
// or all of it. first_token: the block's.
void AddHeadRows(const PageGeometry& geometry, const std::byte* from, std::byte* to,
                 uint32_t kv_head, uint64_t first_token, uint32_t begin, uint32_t end,
                 std::vector<Upload>* rows) {
  const auto add = [&](Upload::Rows kind, size_t at, uint64_t bytes) {
    rows->push_back({to + at, from + at, bytes, kind, kv_head, first_token + begin});
  };
  while (begin < end) {
    const uint32_t page_end = std::min(end, (begin / kPageTokens + 1) * kPageTokens);
    const uint32_t tokens = page_end - begin;
    if (tokens == kPageTokens) {
      add(Upload::Rows::kPage, geometry.KeyOffset(begin), geometry.page_bytes());
    } else {
      add(Upload::Rows::kKeys, geometry.KeyOffset(begin), tokens * geometry.key_row_bytes);
      add(Upload::Rows::kValues, geometry.ValueOffset(begin), tokens * geometry.value_row_bytes);
    }
    begin = page_end;
  }
}

// The same of all heads of a layer. to: the block's layer.
void AddRows(const TailBlock& block, const ModelShape& shape, uint32_t layer, std::byte* to,
             uint64_t first_token, uint32_t begin, uint32_t end, std::vector<Upload>* rows) {
  const PageGeometry geometry(shape);
  const uint64_t head_bytes = block.size() / shape.layers / shape.kv_heads;
  for (uint32_t head = 0; head < shape.kv_heads; ++head) {
    AddHeadRows(geometry, block.pages(layer, head), to + head * head_bytes, head, first_token,
                begin, end, rows);
  }
}

}  // namespace

absl::Status Uploader::Pin(std::span<const std::shared_ptr<DeviceCopyStore::Copy>> copies,
                           PagesIn pages_in, std::vector<Resident*>* residents, Lack* lack) {
  const size_t before = pins_.size();
  ATTND_RETURN_IF_ERROR(store_->Pin(copies, pages_in, &pins_, lack));
  AddPinned(before, residents);
  return absl::OkStatus();
}

absl::Status Uploader::PinIfThere(std::span<const std::shared_ptr<DeviceCopyStore::Copy>> copies,
                                  std::vector<Resident*>* residents) {
  const size_t before = pins_.size();
  if (!store_->PinIfThere(copies, &pins_)) {
    return absl::ResourceExhaustedError("a copy has no memory on the device");
  }
  AddPinned(before, residents);
  return absl::OkStatus();
}

void Uploader::AddPinned(size_t before, std::vector<Resident*>* residents) const {
  for (size_t i = before; i < pins_.size(); ++i) residents->push_back(pins_[i].get());
}

absl::Status Uploader::UploadLayer(Resident* resident, const Segment& segment, uint32_t layer,
                                   std::span<const std::byte> sink) {
  if (resident->tokens(layer) == segment.tokens()) return absl::OkStatus();
  MutexLock lock(resident->upload_mutex());
  if (resident->tokens(layer) == segment.tokens()) return absl::OkStatus();
  const uint32_t layers = segment.shape().layers;
  const auto send = [&](std::byte* to, std::span<const std::byte> block) {
    const uint64_t bytes = block.size() / layers;
    return context_->Send(to + layer * bytes, block.data() + layer * bytes, bytes);
  };
  if (resident->in_file()) {
    ATTND_RETURN_IF_ERROR(
        context_->Send(resident->sink() + layer * sink.size(), sink.data(), sink.size()));
  } else if (resident->host_pages() != nullptr) {
    ATTND_RETURN_IF_ERROR(store_->MapLayer(*resident, layer));
  } else {
    ATTND_RETURN_IF_ERROR(send(resident->pages(), segment.payload_block()));
  }
  ATTND_RETURN_IF_ERROR(send(resident->index(), segment.index_block()));
  ATTND_RETURN_IF_ERROR(context_->Synchronize());
  resident->RaiseTokens(layer, segment.tokens());
  return absl::OkStatus();
}

absl::Status Uploader::UploadTokens(Resident* resident, const TailBlock& block,
                                    const ModelShape& shape, uint32_t layer, uint32_t tokens,
                                    std::vector<Upload>* later, uint64_t first_token) {
  const uint32_t begin = resident->tokens(layer);
  if (begin >= tokens) return absl::OkStatus();
  CHECK_LE(tokens, kTailBlockTokens);
  arrivals_.push_back({resident, layer, tokens});
  std::byte* to = resident->pages() + layer * (block.size() / shape.layers);
  if (SendsWhole(*resident, layer, tokens)) return SendTokens(to, block, shape, layer, tokens);
  std::vector<Upload> now;
  AddRows(block, shape, layer, to, first_token, begin, tokens, later != nullptr ? later : &now);
  return SendOrGather(now);
}

bool Uploader::SendsWhole(const Resident& resident, uint32_t layer, uint32_t tokens) {
  return resident.tokens(layer) == 0 && tokens == kTailBlockTokens;
}

absl::Status Uploader::SendTokens(std::byte* to, const TailBlock& block, const ModelShape& shape,
                                  uint32_t layer, uint32_t tokens) {
  CHECK_LE(tokens, kTailBlockTokens);
  std::vector<Upload> uploads;
  if (tokens == kTailBlockTokens) {
    uploads.push_back(
        {.to = to, .from = block.pages(layer, 0), .bytes = block.size() / shape.layers});
  } else {
    AddRows(block, shape, layer, to, /*first_token=*/0, 0, tokens, &uploads);
  }
  return SendOrGather(uploads);
}

absl::Status Uploader::SendOrGather(std::span<const Upload> uploads) {
  if (gathered_ != nullptr) {
    gathered_->insert(gathered_->end(), uploads.begin(), uploads.end());
    return absl::OkStatus();
  }
  for (const Upload& upload : uploads) {
    ATTND_RETURN_IF_ERROR(context_->Send(upload.to, upload.from, upload.bytes));
  }
  return absl::OkStatus();
}

void Uploader::SetArrived() {
  for (const Arrival& arrival : arrivals_) {
    arrival.resident->RaiseTokens(arrival.layer, arrival.tokens);
  }
  arrivals_.clear();
}

void Uploader::Release() {
  context_->Flush().IgnoreError();  // a stream that fails runs nothing more
  arrivals_.clear();
  pins_.clear();
}

}  // namespace attnd::gpu
