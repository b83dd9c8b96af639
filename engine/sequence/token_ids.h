// SPDX-License-Identifier: Apache-2.0
//
// TokenIds: the token ids of a sequence, by position, where they are known.
#ifndef ATTND_ENGINE_SEQUENCE_TOKEN_IDS_H_
#define ATTND_ENGINE_SEQUENCE_TOKEN_IDS_H_

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/memory_budget.h"

namespace attnd::engine {

// Pages of kPageIds positions; those without any id take no memory, the others hold theirs of the
// budget. Not thread-safe: its sequence's lock guards it.
class TokenIds {
 private:
  static constexpr uint64_t kPageIds = 1024;
  struct Page {
    Reservation reservation;
    uint32_t ids[kPageIds];
    std::bitset<kPageIds> known;
  };
  using Pages = std::vector<std::unique_ptr<Page>>;

 public:
  // Pages for some positions, not yet part of the ids.
  class Room {
   private:
    friend class TokenIds;
    Pages pages;  // null where there is one already
    uint64_t first_page = 0;
  };

  explicit TokenIds(MemoryBudget* budget) : budget_(budget) {}

  // AlreadyExists, naming the entry, if a position is known to have another id.
  absl::Status Check(uint64_t first_position, std::span<const uint32_t> ids) const;
  // What Store needs for these positions. ResourceExhausted, nothing changed, if the budget has it
  // not; std::bad_alloc likewise.
  absl::StatusOr<Room> MakeRoom(uint64_t first_position, size_t count);
  void Store(uint64_t first_position, std::span<const uint32_t> ids, Room room) noexcept;

  // Ids of neighbouring positions.
  struct Run {
    uint64_t first_position = 0;
    std::vector<uint32_t> ids;
  };
  // Those that are known of positions [begin, end), in their order.
  std::vector<Run> Runs(uint64_t begin, uint64_t end) const;

  // Whether these positions have these ids, all of them known.
  bool Holds(uint64_t first_position, std::span<const uint32_t> ids) const;

  // Forgets positions from `length` on.
  void Truncate(uint64_t length) noexcept;
  // The ids of the first `length` positions, on memory of their own. Errors as MakeRoom.
  absl::StatusOr<TokenIds> Prefix(uint64_t length) const;

 private:
  absl::StatusOr<std::unique_ptr<Page>> MakePage() const;

  MemoryBudget* budget_;
  Pages pages_;  // page i holds positions from kPageIds * i; null without ids
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_TOKEN_IDS_H_
