// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/chunker.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "client/cpp/memory_client.h"
#include "plane/words.h"

namespace attnd::client {
namespace {

uint64_t ElementBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_BF16:
    case v1::DTYPE_FP16:
      return 2;
    case v1::DTYPE_FP32:
      return 4;
    default:
      return 0;
  }
}

// Of values that are sent: none if the model is latent.
uint64_t ValueDim(const v1::ModelShape& shape) {
  if (shape.latent()) return 0;
  return shape.value_dim() != 0 ? shape.value_dim() : shape.head_dim();
}

absl::Status CheckBytes(size_t block, const char* name, uint64_t bytes, uint64_t expected) {
  if (bytes == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("blocks[", block, "].", name, " has ", bytes,
                                                 " bytes; its tokens and the shape make it ",
                                                 expected));
}

void FillTensor(v1::DType dtype, uint64_t tokens, uint32_t heads, uint64_t dim,
                absl::string_view bytes, bool sent, v1::Tensor* tensor) {
  tensor->set_dtype(dtype);
  tensor->clear_shape();
  tensor->add_shape(static_cast<uint32_t>(tokens));
  tensor->add_shape(heads);
  tensor->add_shape(static_cast<uint32_t>(dim));
  if (!sent) return tensor->clear_data();
  tensor->mutable_data()->assign(bytes.data(), bytes.size());
}

// Tokens behind which both tensors may begin in shared memory.
uint64_t UnitOf(uint64_t k_token_bytes, uint64_t v_token_bytes) {
  const auto unit = [](uint64_t bytes) {  // 1 of no bytes
    return plane::kAlignmentBytes / std::gcd(bytes, plane::kAlignmentBytes);
  };
  return std::lcm(unit(k_token_bytes), unit(v_token_bytes));
}

}  // namespace

absl::StatusOr<Chunker> Chunker::Create(uint64_t sequence_id, const v1::ModelShape& shape,
                                        std::span<const KvBlock> blocks,
                                        std::span<const uint32_t> token_ids,
                                        const AppendOptions& options) {
  Chunker chunker;
  chunker.sequence_id_ = sequence_id;
  chunker.shape_ = shape;
  chunker.blocks_ = blocks;
  chunker.token_ids_ = token_ids;
  chunker.prefill_complete_ = options.prefill_complete;
  chunker.prompt_tokens_ = options.prompt_tokens;
  const uint64_t head_bytes = ElementBytes(shape.dtype()) * shape.kv_heads();
  chunker.k_token_bytes_ = head_bytes * shape.head_dim();
  chunker.v_token_bytes_ = head_bytes * ValueDim(shape);
  if (chunker.k_token_bytes_ == 0) {
    return absl::InvalidArgumentError("shape: dtype, kv_heads or head_dim is missing");
  }
  chunker.memory_ = options.memory;
  const uint64_t unit =
      options.memory == nullptr ? 1 : UnitOf(chunker.k_token_bytes_, chunker.v_token_bytes_);
  const uint64_t units =
      options.chunk_bytes / (chunker.k_token_bytes_ + chunker.v_token_bytes_) / unit;
  chunker.chunk_tokens_ = std::max<uint64_t>(1, units) * unit;
  uint64_t first_layer_tokens = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const KvBlock& block = blocks[i];
    if (block.tokens == 0) {
      return absl::InvalidArgumentError(absl::StrCat("blocks[", i, "].tokens is 0"));
    }
    absl::Status status = CheckBytes(i, "k", block.k.size(), block.tokens * chunker.k_token_bytes_);
    status.Update(CheckBytes(i, "v", block.v.size(), block.tokens * chunker.v_token_bytes_));
    if (options.memory != nullptr) {
      status.Update(chunker.CheckPlace(i, "k", block.k));
      status.Update(chunker.CheckPlace(i, "v", block.v));
    }
    if (!status.ok()) return status;
    if (block.layer == blocks[0].layer) first_layer_tokens += block.tokens;
  }
  if (!token_ids.empty() && token_ids.size() != first_layer_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token_ids has ", token_ids.size(), " entries; allowed are none or ", first_layer_tokens));
  }
  return chunker;
}

absl::Status Chunker::CheckPlace(size_t block, const char* name, absl::string_view bytes) const {
  if (bytes.empty()) return absl::OkStatus();
  // Of an address before the region's the offset is a large number.
  const uint64_t offset = OffsetOf(bytes), room = memory_->memory->bytes();
  const bool inside = offset <= room && bytes.size() <= room - offset;
  if (inside && offset % plane::kAlignmentBytes == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("blocks[", block, "].", name,
                                                 " does not lie in the memory from a multiple of ",
                                                 plane::kAlignmentBytes, " bytes on"));
}

uint64_t Chunker::OffsetOf(absl::string_view bytes) const {
  return reinterpret_cast<uintptr_t>(bytes.data()) -
         reinterpret_cast<uintptr_t>(memory_->memory->data());
}

bool Chunker::Next(v1::AppendKvRequest* message) {
  if (complete_) return false;
  message->set_sequence_id(sequence_id_);
  message->clear_token_ids();
  if (block_ < blocks_.size()) {
    const KvBlock& block = blocks_[block_];
    const uint64_t tokens = std::min(chunk_tokens_, block.tokens - sent_);
    FillChunk(block, tokens, message);
    if (!token_ids_.empty() && block.layer == blocks_[0].layer) {
      const auto ids = token_ids_.first(tokens);
      message->mutable_token_ids()->Add(ids.begin(), ids.end());
      token_ids_ = token_ids_.subspan(tokens);
    }
    sent_ += tokens;
    if (sent_ == block.tokens) {
      ++block_;
      sent_ = 0;
    }
  } else {  // no blocks at all: only the end of the prefill
    message->Clear();
    message->set_sequence_id(sequence_id_);
  }
  complete_ = block_ == blocks_.size();
  message->set_prefill_complete(complete_ && prefill_complete_);
  message->set_prompt_tokens(prompt_tokens_);
  return true;
}

void Chunker::FillChunk(const KvBlock& block, uint64_t tokens, v1::AppendKvRequest* message) const {
  message->set_layer(block.layer);
  message->set_first_position(block.first_position + sent_);
  const bool sent = memory_ == nullptr;
  const auto k = block.k.substr(sent_ * k_token_bytes_, tokens * k_token_bytes_);
  const auto v = block.v.substr(sent_ * v_token_bytes_, tokens * v_token_bytes_);
  if (!sent) {
    v1::KvMemory* const places = message->mutable_memory();
    places->set_region_id(memory_->id);
    places->set_k_offset(OffsetOf(k));
    places->set_v_offset(shape_.latent() ? 0 : OffsetOf(v));
  }
  FillTensor(shape_.dtype(), tokens, shape_.kv_heads(), shape_.head_dim(), k, sent,
             message->mutable_k());
  if (shape_.latent()) return message->clear_v();
  FillTensor(shape_.dtype(), tokens, shape_.kv_heads(), ValueDim(shape_), v, sent,
             message->mutable_v());
}

}  // namespace attnd::client
