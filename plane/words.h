// SPDX-License-Identifier: Apache-2.0
//
// Words: how client and server take turns over shared memory, one layer of a pass at a time.
//
// A pass over memory of `layers` layers has the epochs first .. first + layers, in arithmetic of 32
// bits (the proto, PassMemory.first_epoch). Each side writes words of its own and waits for the
// other side's:
//
//   client   writes q, k and v of layer n, then ring = first + n       ("n is there")
//   server   reads them, answers, writes out and lse, then, by its host or its GPU,
//            answer = first + n                                        ("n is answered")
//   server   answer = first + layers: the pass is given up, or was never begun; the reply on the
//            Decode stream says why
//
// A word is written last and with release, and read with acquire, so that a side that sees an
// epoch also sees the data that it stands for. After a write the writer wakes the futex of the
// word, unless the writer is a GPU: a client's (PassMemory.device_rings), for which the server
// looks, or the server's, which tells such clients alone. An epoch names one layer of one pass:
// what a word has been left at by an earlier pass, or by a replay of an earlier graph, is never
// taken for a turn. So a client whose GPU rings may declare a pass while the server answers the one
// before, whose rings the word still has.
//
// A region's twin (plane/region_table.h) has these words, too, and q, k, v, out and lse, at the
// region's offsets. It is a shorter way for two GPU kernels to meet, a client's and the server's:
//
//   client   writes q, k and v to the twin, answer = first + n - 1 (whatever an earlier pass left
//            there), and its ring; then q, k, v and its ring to the region all the same
//   server   if its GPU took the turn from the twin and tells of the answer by itself, it does so
//            in the twin, behind out and lse there; all else it tells in the region
//
// So a client looks at both answer words, of which one comes, and finds out and lse where it came.
//
// All words lie in memory that the client can write at any time. So the server believes `ring`
// only where it is the epoch that the server waits for, and never reads back what the server wrote.
#ifndef ATTND_PLANE_WORDS_H_
#define ATTND_PLANE_WORDS_H_

#include <cstddef>
#include <cstdint>

namespace attnd::plane {

// Every offset and stride in a region is a multiple of this: a cache line, so that the words of one
// side do not share a line with anything of the other.
inline constexpr uint64_t kAlignmentBytes = 64;

struct Words {
  // Written by the client: the epoch of the last layer that is there.
  alignas(kAlignmentBytes) uint32_t ring;
  // Written by the server: the epoch of the last layer that is answered, or that the pass is over.
  alignas(kAlignmentBytes) uint32_t answer;
  // Written by the server before `answer`: rows that have left the pass so far. Their parts of out
  // and lse are NaN.
  uint32_t failed_rows;
};
static_assert(sizeof(Words) == 128 && offsetof(Words, answer) == 64 &&
              offsetof(Words, failed_rows) == 68);  // a device writes the two as one

}  // namespace attnd::plane

#endif  // ATTND_PLANE_WORDS_H_
