// SPDX-License-Identifier: Apache-2.0
//
// LayerRows: keys and values of a segment or tail file, layer by layer, in token order. A segment
// lies on disk in cluster order, another one for each head; its index says which token is where.
#ifndef ATTND_CTL_LAYER_ROWS_H_
#define ATTND_CTL_LAYER_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/aligned_buffer.h"
#include "ctl/data_reader.h"
#include "storage/io/io_queue.h"

namespace attnd::ctl {

// So much of one layer may be in memory: a segment of the greatest length, with 128 heads of 128.
inline constexpr uint64_t kLayerBytesMax = uint64_t{4} << 30;

// One thread at a time. The file must outlive it. Holds one layer of it, and which token is where
// for all.
class LayerRows {
 public:
  // Reads and checks the indexes, if there are any. DataLoss if they are wrong; ResourceExhausted
  // for a layer beyond kLayerBytesMax, or if the system refuses memory.
  static absl::StatusOr<LayerRows> Make(const OpenedFile* opened, storage::IoQueue* queue);

  // Reads a layer, DataLoss if it is damaged. keys: [tokens, kv_heads, head_dim], values: [tokens,
  // kv_heads, value_dim], none if the model is latent, in the model's dtype; good until the next
  // call.
  struct Layer {
    std::span<const std::byte> keys;
    std::span<const std::byte> values;
  };
  absl::StatusOr<Layer> Read(uint32_t layer, storage::IoQueue* queue);

 private:
  explicit LayerRows(const OpenedFile* opened) : opened_(opened) {}
  absl::Status ReadPositions(storage::IoQueue* queue);
  absl::Status TakeMemory();

  const OpenedFile* opened_;
  // [layers * kv_heads][tokens] the token, counted from the first one, at each place of the pages;
  // empty: place after place, from first_place_ on.
  std::vector<uint16_t> tokens_at_;
  uint64_t first_place_ = 0;
  AlignedBuffer pages_;  // of one layer, head by head
  std::vector<std::byte> keys_;
  std::vector<std::byte> values_;
};

}  // namespace attnd::ctl

#endif  // ATTND_CTL_LAYER_ROWS_H_
