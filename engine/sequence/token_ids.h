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

// Ids are kept in pages of kPageIds positions. A page without any id takes no memory; the others
// hold their bytes in the budget. Not thread-safe: the sequence's lock guards it.
class TokenIds {
 private:
  static constexpr uint64_t kPageIds = 1024;
  struct Page {
    Reservation reservation;
    uint32_t ids[kPageIds];
    std::bitset<kPageIds> known;
  };
  // With its pointer, in a vector that may be twice as long as needed.
  static constexpr uint64_t kPageBytes = sizeof(Page) + 2 * sizeof(void*);
  using Pages = std::vector<std::unique_ptr<Page>>;

 public:
  // New pages for some positions, not yet part of the ids.
  class Room {
   private:
    friend class TokenIds;
    Pages pages;  // null where there is one already
    uint64_t first_page = 0;
  };

  // What the ids of positions [0, count) take.
  static uint64_t BytesOf(uint64_t count) { return (count + kPageIds - 1) / kPageIds * kPageBytes; }

  explicit TokenIds(MemoryBudget* budget) : budget_(budget) {}

  // AlreadyExists, naming the entry, if a position is known to have another id.
  absl::Status Check(uint64_t first_position, std::span<const uint32_t> ids) const;
  // The pages that Store needs for these positions. ResourceExhausted if the budget has no room;
  // throws std::bad_alloc if the system has none. Nothing is changed then.
  absl::StatusOr<Room> MakeRoom(uint64_t first_position, size_t count);
  void Store(uint64_t first_position, std::span<const uint32_t> ids, Room room) noexcept;

  // Ids of neighbouring positions.
  struct Run {
    uint64_t first_position = 0;
    std::vector<uint32_t> ids;
  };
  // The known ids of positions [begin, end), ascending.
  std::vector<Run> Runs(uint64_t begin, uint64_t end) const;

  // Whether all of these positions are known to have these ids.
  bool Holds(uint64_t first_position, std::span<const uint32_t> ids) const;

  // Forgets positions from `length` on.
  void Truncate(uint64_t length) noexcept;
  // A copy of the ids of the first `length` positions. Errors as for MakeRoom.
  absl::StatusOr<TokenIds> Prefix(uint64_t length) const;

 private:
  absl::StatusOr<std::unique_ptr<Page>> MakePage() const;

  MemoryBudget* budget_;
  Pages pages_;  // page i holds positions from kPageIds * i on; null without ids
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_TOKEN_IDS_H_
