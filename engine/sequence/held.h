// SPDX-License-Identifier: Apache-2.0
//
// Held: an object together with the reservation of its bytes in a memory budget.
#ifndef ATTND_ENGINE_SEQUENCE_HELD_H_
#define ATTND_ENGINE_SEQUENCE_HELD_H_

#include <memory>
#include <utility>

#include "attention/segment/segment.h"
#include "engine/memory_budget.h"

namespace attnd::engine {

// The reservation ends after the object.
template <typename T>
struct Held {
  template <typename... Arguments>
  explicit Held(Reservation r, Arguments&&... arguments)
      : reservation(std::move(r)), object(std::forward<Arguments>(arguments)...) {}
  Reservation reservation;
  T object;
};

// The segment, with a reservation that ends with it.
inline std::shared_ptr<const attention::Segment> HoldReservation(
    std::shared_ptr<const attention::Segment> segment, Reservation reservation) {
  auto held = std::make_shared<Held<std::shared_ptr<const attention::Segment>>>(
      std::move(reservation), std::move(segment));
  return std::shared_ptr<const attention::Segment>(held, held->object.get());
}

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_HELD_H_
