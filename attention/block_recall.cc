// SPDX-License-Identifier: Apache-2.0
#include "attention/block_recall.h"

#include <algorithm>
#include <utility>

namespace attnd::attention {

void BlockRecall::Truncate(uint64_t length) {
  MutexLock lock(mutex_);
  for (Layer& choices : layers_) {
    while (!choices.empty() && choices.back().position >= length) choices.pop_back();
  }
}

void BlockRecall::CopyFrom(const BlockRecall& other, uint64_t length) {
  std::vector<Layer> layers;
  {
    MutexLock lock(other.mutex_);
    layers = other.layers_;
  }
  {
    MutexLock lock(mutex_);
    layers_ = std::move(layers);
  }
  Truncate(length);
}

void BlockRecall::Remember(uint32_t layer, uint32_t kv_head, uint64_t position,
                           std::span<const uint64_t> blocks) {
  MutexLock lock(mutex_);
  Layer& choices = layers_[layer];
  auto at = std::lower_bound(choices.begin(), choices.end(), position,
                             [](const Choice& c, uint64_t p) { return c.position < p; });
  if (at == choices.end() || at->position != position) {
    at = choices.insert(at, Choice{position, {}});
    at->heads.resize(kv_heads_);
    if (choices.size() > kPositionsMax) {
      const bool self = at == choices.begin();  // older than all that are kept
      choices.pop_front();
      if (self) return;
      at = std::lower_bound(choices.begin(), choices.end(), position,
                            [](const Choice& c, uint64_t p) { return c.position < p; });
    }
  }
  at->heads[kv_head].emplace(blocks.begin(), blocks.end());
}

std::optional<std::vector<uint64_t>> BlockRecall::Of(uint32_t layer, uint32_t kv_head,
                                                     uint64_t position) const {
  MutexLock lock(mutex_);
  for (const Choice& choice : layers_[layer]) {
    if (choice.position == position) return choice.heads[kv_head];
  }
  return std::nullopt;
}

}  // namespace attnd::attention
