// The rule of lossy jobs: when a chunk whose sum lacks some ranks is closed all the same. User plane only,
// since it needs a clock. src/tacit/aggregator/spec.py says the same in Python; why it is so:
// docs/decisions/0026-bounded-loss.md.
//
// A chunk is closed as soon as it waits for nobody. It waits for a rank whose lanes are not in it, unless
//   - that rank has sent a chunk `lossy_gap` or more later, or has said that it has sent all up to here (a
//     settle): its packet is lost;
//   - or the rank is absent: a chunk was open for the deadline without it. It is back once its packet of some
//     chunk, closed or not, comes within the deadline after the first rank's.
// Half of the ranks must be in, or it goes on waiting. What is closed stays closed, and goes to all ranks:
// who asks later, or was not in it, gets the same bits.
//
// A rank may be late by many chunks, and then takes the sums that the others have closed. They are in their
// cells until chunk k + 2 S comes, and that chunk is held back while a rank may lack chunk k. Ranks of a
// lossy job send a chunk only if they have the results of all chunks that lie S / 2 or more before it, so the
// newest chunk of the last rank says what all of them have. Chunks of a lossy job start at 0.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "slot.h"

namespace tacit {

constexpr std::uint32_t lossy_gap = 4;  // later chunks of a rank: paths reorder a little

// What a job remembers of its ranks. One thread at a time.
class Lossy {
  public:
    struct Open {
        std::uint32_t chunk;
        std::uint64_t since_ns;
    };

    Lossy(std::size_t world, std::uint32_t slots, std::uint64_t deadline_ns)
        : newest_(world, ~0u),
          passed_(world, ~0u),
          since_ns_(2 * std::size_t(slots)),
          slots_(slots),
          deadline_ns_(deadline_ns) {}

    std::deque<Open> open;  // chunks with some rank in them, the oldest first; some of them are closed by now

    // The first packet of a chunk.
    void opened(std::uint32_t chunk, std::uint64_t now_ns) {
        since_ns(chunk) = now_ns;
        open.push_back({chunk, now_ns});
    }
    bool is_over(std::uint64_t since_ns, std::uint64_t now_ns) const {
        return now_ns - std::min(now_ns, since_ns) >= deadline_ns_;
    }
    std::size_t least() const { return (newest_.size() + 1) / 2; }
    std::uint32_t reach() const { return slots_ / 2; }

    // Whether a rank may still need what the cell of this chunk holds.
    bool holds(std::uint32_t chunk) const {
        std::uint32_t last = newest_.front();
        for (const std::uint32_t newest : newest_)
            if (tacit_after(last, newest)) last = newest;
        return tacit_after(chunk, last + 2 * slots_ - reach());
    }

    // Chunks (from, to] that no longer wait for the rank, now that it has sent this one, or all up to it.
    struct Gone {
        std::uint32_t from, to;
    };
    Gone sent(std::size_t rank, std::uint32_t chunk) { return advance(newest_[rank], chunk, lossy_gap); }
    Gone passed(std::size_t rank, std::uint32_t chunk) { return advance(passed_[rank], chunk, 0); }

    std::uint64_t missing(const tacit_cell& cell) const {
        return ~cell.seen & (~std::uint64_t(0) >> (64 - newest_.size()));
    }
    bool waits(const tacit_cell& cell) const {
        if (std::size_t(std::popcount(cell.seen)) < least()) return true;
        for (std::uint64_t left = missing(cell) & ~absent_; left; left &= left - 1)
            if (!is_past(std::size_t(std::countr_zero(left)), cell.chunk)) return true;
        return false;
    }

    void came(std::size_t rank, std::uint32_t chunk, std::uint64_t now_ns) {
        if (!is_over(since_ns(chunk), now_ns)) absent_ &= ~(std::uint64_t(1) << rank);
    }
    void late(const tacit_cell& cell) {
        for (std::uint64_t left = missing(cell); left; left &= left - 1)
            if (!is_past(std::size_t(std::countr_zero(left)), cell.chunk)) absent_ |= left & -left;
    }

  private:
    std::uint64_t& since_ns(std::uint32_t chunk) { return since_ns_[chunk & (2 * slots_ - 1)]; }
    bool is_past(std::size_t rank, std::uint32_t chunk) const {
        return !tacit_after(chunk + lossy_gap, newest_[rank]) || !tacit_after(chunk, passed_[rank]);
    }
    // Never more than `reach` of them: what lies before has its results.
    Gone advance(std::uint32_t& at, std::uint32_t chunk, std::uint32_t behind) const {
        if (!tacit_after(chunk, at)) return {0, 0};
        const std::uint32_t from = chunk - at > reach() ? chunk - reach() : at;
        at = chunk;
        return {from - behind, chunk - behind};
    }

    std::vector<std::uint32_t> newest_, passed_;  // by rank; ~0: just before chunk 0
    std::vector<std::uint64_t> since_ns_;         // by cell: when its chunk's first packet came
    std::uint64_t absent_ = 0;
    std::uint32_t slots_;
    std::uint64_t deadline_ns_;
};

}  // namespace tacit
