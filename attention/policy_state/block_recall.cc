// SPDX-License-Identifier: Apache-2.0
#include "attention/policy_state/block_recall.h"

#include <algorithm>
#include <utility>

namespace attnd::attention {
namespace {

// Of an allocation or two, their reference counts and what holds their bytes.
constexpr uint64_t kOverheadBytes = 160;
constexpr size_t kWordBits = 64;

size_t Words(size_t bits) { return (bits + kWordBits - 1) / kWordBits; }

}  // namespace

// ---- BlockChoice ----

size_t BlockChoice::CountBlocks(uint32_t block_tokens, std::span<const BlockRun> runs) {
  size_t blocks = 0;
  for (const BlockRun& run : runs) blocks += (run.end - run.begin) / block_tokens;
  return blocks;
}

uint64_t BlockChoice::Bytes(uint32_t block_tokens, std::span<const BlockRun> searched) {
  return sizeof(BlockChoice) + kOverheadBytes + searched.size() * sizeof(Run) +
         Words(CountBlocks(block_tokens, searched)) * sizeof(uint64_t);
}

BlockChoice::BlockChoice(uint32_t block_tokens, std::span<const BlockRun> searched,
                         absl::FunctionRef<bool(size_t)> is_chosen)
    : block_tokens_(block_tokens), searched_blocks_(CountBlocks(block_tokens, searched)) {
  searched_.reserve(searched.size());
  size_t first = 0;
  for (const BlockRun& run : searched) {
    searched_.push_back({run, first});
    first += (run.end - run.begin) / block_tokens;
  }
  chosen_.resize(Words(searched_blocks_), 0);
  for (size_t i = 0; i < searched_blocks_; ++i) {
    if (!is_chosen(i)) continue;
    chosen_[i / kWordBits] |= uint64_t{1} << i % kWordBits;
    ++chosen_blocks_;
  }
}

std::optional<bool> BlockChoice::Chose(uint64_t begin) const {
  const auto behind =
      std::upper_bound(searched_.begin(), searched_.end(), begin,
                       [](uint64_t b, const Run& run) { return b < run.positions.begin; });
  if (behind == searched_.begin()) return std::nullopt;
  const Run& run = *std::prev(behind);
  const uint64_t offset = begin - run.positions.begin;
  if (begin >= run.positions.end || offset % block_tokens_ != 0) return std::nullopt;
  const size_t number = run.first + offset / block_tokens_;
  return (chosen_[number / kWordBits] >> number % kWordBits & 1) != 0;
}

size_t BlockChoice::CountNew(std::span<const BlockRun> runs) const {
  size_t old = 0;
  auto searched = searched_.begin();
  for (const BlockRun& run : runs) {
    while (searched != searched_.end() && searched->positions.end <= run.begin) ++searched;
    for (auto at = searched; at != searched_.end() && at->positions.begin < run.end; ++at) {
      // Cut at other places they are other blocks.
      if (run.begin % block_tokens_ != at->positions.begin % block_tokens_) continue;
      old += (std::min(run.end, at->positions.end) - std::max(run.begin, at->positions.begin)) /
             block_tokens_;
    }
  }
  return CountBlocks(block_tokens_, runs) - old;
}

// ---- BlockRecall ----

BlockRecall::BlockRecall(uint32_t layers, uint32_t kv_heads, HoldBytes hold)
    : layers_count_(layers), kv_heads_(kv_heads), hold_(std::move(hold)) {}

bool BlockRecall::MakeTables() {
  if (!layers_.empty()) return true;
  const uint64_t steps = uint64_t{layers_count_} * (kPositionsMax + 1);
  memory_ = hold_(steps * sizeof(Step) + layers_count_ * sizeof(Layer) + kOverheadBytes);
  if (memory_ == nullptr) return false;
  layers_.resize(layers_count_);
  for (Layer& layer : layers_) layer.reserve(kPositionsMax + 1);
  return true;
}

// Where the step at `position` is in a layer, or would be.
size_t BlockRecall::PlaceOf(const Layer& layer, uint64_t position) {
  const auto at = std::lower_bound(layer.begin(), layer.end(), position,
                                   [](const Step& step, uint64_t p) { return step.position < p; });
  return static_cast<size_t>(at - layer.begin());
}

BlockRecall::Heads* BlockRecall::HeadsOf(Layer* layer, uint64_t position) {
  auto at = layer->begin() + static_cast<ptrdiff_t>(PlaceOf(*layer, position));
  const bool known = at != layer->end() && at->position == position;
  if (known && at->own) return at->heads.get();
  if (!known && at == layer->begin() && layer->size() == kPositionsMax) return nullptr;
  auto memory =
      hold_(sizeof(Heads) + kOverheadBytes + kv_heads_ * sizeof(std::shared_ptr<BlockChoice>));
  if (memory == nullptr) return nullptr;
  auto heads = std::make_shared<Heads>();
  heads->choices.resize(kv_heads_);
  if (known) heads->choices = at->heads->choices;
  heads->memory = std::move(memory);
  if (known) {
    at->heads = std::move(heads);
    at->own = true;
    return at->heads.get();
  }
  at = layer->insert(at, {position, true, std::move(heads)});
  Heads* const made = at->heads.get();
  if (layer->size() > kPositionsMax) layer->erase(layer->begin());
  return made;
}

void BlockRecall::Remember(uint32_t layer, uint32_t kv_head, uint64_t position,
                           uint32_t block_tokens, std::span<const BlockRun> searched,
                           absl::FunctionRef<bool(size_t)> is_chosen) {
  std::shared_ptr<const BlockChoice> choice;
  if (auto memory = hold_(BlockChoice::Bytes(block_tokens, searched)); memory != nullptr) {
    struct HeldChoice {
      std::shared_ptr<const void> memory;
      BlockChoice choice;
    };
    auto held = std::make_shared<HeldChoice>(
        HeldChoice{std::move(memory), BlockChoice(block_tokens, searched, is_chosen)});
    choice = std::shared_ptr<const BlockChoice>(held, &held->choice);
  }
  // One that there is no memory for takes the place of an earlier one, too: a repeated step's
  // choice is the newer history's.
  MutexLock lock(mutex_);
  if (!MakeTables()) return;
  Heads* const heads = HeadsOf(&layers_[layer], position);
  if (heads != nullptr) heads->choices[kv_head] = std::move(choice);
}

std::shared_ptr<const BlockChoice> BlockRecall::Of(uint32_t layer, uint32_t kv_head,
                                                   uint64_t position) const {
  MutexLock lock(mutex_);
  if (layers_.empty()) return nullptr;
  const Layer& steps = layers_[layer];
  const size_t place = PlaceOf(steps, position);
  if (place == steps.size() || steps[place].position != position) return nullptr;
  return steps[place].heads->choices[kv_head];
}

std::shared_ptr<BlockRecall> BlockRecall::Prefix(uint64_t length) {
  auto prefix = std::make_shared<BlockRecall>(layers_count_, kv_heads_, hold_);
  MutexLock lock(mutex_);
  if (layers_.empty()) return prefix;
  MutexLock prefix_lock(prefix->mutex_);
  if (!prefix->MakeTables()) return prefix;
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    for (Step& step : layers_[layer]) {
      if (step.position >= length) break;
      step.own = false;
      prefix->layers_[layer].push_back(step);
    }
  }
  return prefix;
}

}  // namespace attnd::attention
