// SPDX-License-Identifier: Apache-2.0
#include "attention/index/key_index_builder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <span>

#include "attention/policy_state/label_choice.h"
#include "attention/segment/index_parts.h"
#include "common/dtype.h"

namespace attnd::attention {
namespace {

constexpr uint32_t kKeyChunkTokens = 256;
constexpr uint32_t kSummaryChunkTokens = 16;  // a token's features take some 25,000 products
constexpr float kCodeLevels = 15;             // 4 bits

}  // namespace

void KeyIndexBuilder::Start(const Head& head) {
  head_ = head;
  const size_t dim = head.form->shape.head_dim;
  key_.resize(dim);
  bounds_.resize(2 * dim);
  magnitude_.assign(dim, 0.0f);
  channels_.clear();
  if (const LabelChoice* choice = head.state->label_choice.get(); choice != nullptr) {
    const auto given = choice->ChannelsOf(head.number(), head.form->shape);
    channels_.assign(given.begin(), given.end());
  }
  phase_ = Phase::kMeasure;
  next_ = head.form->unclustered;
  if (!Wanted(phase_)) Advance();
}

bool KeyIndexBuilder::Wanted(Phase phase) const {
  const IndexSet& indexes = head_.form->indexes;
  switch (phase) {
    case Phase::kMeasure:
      return indexes.Has(IndexKind::kLabels) && channels_.empty();
    case Phase::kBlocks16:
      return indexes.Has(IndexKind::kBlocks16) && head_.layout->blocks16.count > 0;
    case Phase::kBlocks64:
      return indexes.Has(IndexKind::kBlocks64) && head_.layout->blocks64.count > 0;
    case Phase::kLabels:
      return indexes.Has(IndexKind::kLabels);
    case Phase::kKeys4:
      return indexes.Has(IndexKind::kKeys4);
    case Phase::kSummary:
      return indexes.Has(IndexKind::kSummary);
    case Phase::kDone:
      return true;
  }
  return true;
}

// To the next phase that has something to do.
void KeyIndexBuilder::Advance() {
  if (phase_ == Phase::kMeasure && Wanted(phase_)) ChooseChannels();
  do {
    phase_ = static_cast<Phase>(static_cast<int>(phase_) + 1);
  } while (!Wanted(phase_));
  next_ = 0;
  if (phase_ == Phase::kSummary) StartSummary();
  if (phase_ != Phase::kLabels) return;
  std::byte* part = head_.index + head_.layout->labels.channel;
  for (size_t i = 0; i < channels_.size(); ++i) StoreAt(part, i, channels_[i]);
}

uint32_t KeyIndexBuilder::PhaseEnd() const {
  switch (phase_) {
    case Phase::kMeasure:
    case Phase::kLabels:
    case Phase::kKeys4:
    case Phase::kSummary:
      return head_.form->tokens;
    case Phase::kBlocks16:
      return head_.layout->blocks16.count;
    case Phase::kBlocks64:
      return head_.layout->blocks64.count;
    case Phase::kDone:
      return 0;
  }
  return 0;
}

bool KeyIndexBuilder::RunChunk() {
  if (phase_ == Phase::kDone) return false;
  const IndexLayout& layout = *head_.layout;
  const uint32_t tokens_each = phase_ == Phase::kBlocks16   ? layout.blocks16.tokens
                               : phase_ == Phase::kBlocks64 ? layout.blocks64.tokens
                               : phase_ == Phase::kSummary  ? kKeyChunkTokens / kSummaryChunkTokens
                                                            : 1;
  const uint32_t end = std::min(PhaseEnd(), next_ + kKeyChunkTokens / tokens_each);
  if (phase_ == Phase::kSummary) {
    sums_->Add({head_.pages, {next_, end}});
    next_ = end;
  }
  for (; next_ < end; ++next_) {
    switch (phase_) {
      case Phase::kMeasure:
        MeasureKey(next_);
        break;
      case Phase::kBlocks16:
        WriteBlock(layout.blocks16, next_);
        break;
      case Phase::kBlocks64:
        WriteBlock(layout.blocks64, next_);
        break;
      case Phase::kLabels:
        WriteCodes(layout.labels, next_);
        break;
      case Phase::kKeys4:
        WriteCodes(layout.keys4, next_);
        break;
      case Phase::kSummary:
      case Phase::kDone:
        break;
    }
  }
  if (next_ < PhaseEnd()) return true;
  if (phase_ == Phase::kSummary) WriteSummary();
  Advance();
  return phase_ != Phase::kDone;
}

const float* KeyIndexBuilder::LoadKey(uint32_t slot) {
  const PageGeometry geometry(head_.form->shape);
  ToFloat(geometry.dtype, head_.pages + geometry.KeyOffset(slot), geometry.head_dim, key_.data());
  return key_.data();
}

void KeyIndexBuilder::MeasureKey(uint32_t slot) {
  const float* key = LoadKey(slot);
  for (size_t c = 0; c < magnitude_.size(); ++c) {
    magnitude_[c] = std::max(magnitude_[c], std::abs(key[c]));
  }
}

void KeyIndexBuilder::ChooseChannels() {
  std::span<const float> weights;
  if (const LabelChoice* choice = head_.state->label_choice.get(); choice != nullptr) {
    weights = choice->QueryMagnitudesOf(head_.number(), head_.form->shape);
  }
  channels_ = ChooseLabelChannels(magnitude_, weights, head_.layout->labels.channels);
}

void KeyIndexBuilder::WriteBlock(const IndexLayout::Blocks& part, uint32_t block) {
  const size_t dim = head_.form->shape.head_dim;
  const std::span<float> greatest(bounds_.data(), dim);
  const std::span<float> least(bounds_.data() + dim, dim);
  const uint32_t first = (part.first + block) * part.tokens;
  for (uint32_t slot = first; slot < first + part.tokens; ++slot) {
    const float* key = LoadKey(slot);
    for (size_t c = 0; c < dim; ++c) {
      greatest[c] = slot == first ? key[c] : std::max(greatest[c], key[c]);
      least[c] = slot == first ? key[c] : std::min(least[c], key[c]);
    }
  }
  // Numbers of the keys' dtype: stored as they are.
  const DType dtype = head_.form->shape.dtype;
  const size_t row = block * dim * DTypeBytes(dtype);
  FromFloat(dtype, greatest.data(), dim, head_.index + part.greatest + row);
  FromFloat(dtype, least.data(), dim, head_.index + part.least + row);
}

void KeyIndexBuilder::WriteCodes(const IndexLayout::KeyCodes& part, uint32_t slot) {
  const float* key = LoadKey(slot);
  const auto channel = [&](size_t i) {
    return part.channel == 0 ? key[i] : key[channels_[i]];  // all of them, or the chosen ones
  };
  float least = std::numeric_limits<float>::infinity(), greatest = -least;
  for (size_t i = 0; i < part.channels; ++i) {
    least = std::min(least, channel(i));
    greatest = std::max(greatest, channel(i));
  }
  // Halves: the difference of two floats may be none.
  const float scale = (greatest / 2 - least / 2) / kCodeLevels * 2;
  const auto code = [&](size_t i) -> uint32_t {
    if (i >= part.channels || scale == 0) return 0;
    const float level = std::round((channel(i) / 2 - least / 2) / (scale / 2));
    return static_cast<uint32_t>(std::clamp(level, 0.0f, kCodeLevels));
  };
  const size_t half = part.width / 2;
  auto* codes = reinterpret_cast<uint8_t*>(head_.index + part.codes) + slot * half;
  for (size_t i = 0; i < half; ++i) {
    codes[i] = static_cast<uint8_t>(code(i) | code(i + half) << 4);
  }
  StoreAt(head_.index + part.scale, slot, scale);
  StoreAt(head_.index + part.least, slot, least);
}

void KeyIndexBuilder::StartSummary() {
  const size_t bytes = FeatureSums::Bytes(head_.form->shape);
  if (sums_memory_.size() != bytes) sums_memory_ = AlignedBuffer(bytes);
  if (sums_memory_.data() == nullptr) throw std::bad_alloc();
  sums_.emplace(head_.state->feature_maps.get(), head_.form->shape, head_.layer, head_.kv_head,
                /*shift=*/nullptr, sums_memory_.data());
  next_ = head_.form->unclustered;
}

void KeyIndexBuilder::WriteSummary() {
  const IndexLayout::Summary& part = head_.layout->summary;
  sums_->Finish();
  for (size_t f = 0; f < sums_->m().size(); ++f) {
    StoreAt(head_.index + part.m, f, sums_->m()[f]);
    StoreAt(head_.index + part.u, f, static_cast<float>(sums_->u()[f]));
  }
  for (size_t i = 0; i < sums_->t().size(); ++i) {
    StoreAt(head_.index + part.t, i, static_cast<float>(sums_->t()[i]));
  }
}

}  // namespace attnd::attention
