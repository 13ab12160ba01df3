// The rule of the slots, for every plane: what a packet may do, and what it does. C++ and BPF call these
// functions; src/tacit/aggregator/spec.py says the same in Python. No loops, no library, no clock.
//
// A job owns S slots (a power of two), each with two versions; one version is a cell. Chunk k belongs in slot
// k mod S, version (k / S) mod 2. The first packet of a chunk writes its lanes, the next add theirs, each
// rank once; the last one calls up the result for all ranks. A rank sends chunk k + S when it has the result
// of chunk k, so nobody writes over a sum that somebody may still ask for: chunk k + 2 S, which takes the
// same cell, is sent by ranks that have the result of k + S, which needed every rank to have the result of k.
//
// A cell knows its chunk, so a packet that comes late is told from one of the next phase, even on a path that
// reorders; the version bit alone could not (SwitchML clears a rank's bit in the other version instead).
//
// A plane: check its own bounds (short), tacit_check_packet, find the job, tacit_check_member, compare
// the source with the member's address (source), tacit_check_kind; then with the cell locked,
// tacit_take or tacit_settle and the lanes; then answer. Each packet is counted under exactly one verdict.
//
// A plane may be a rank of a job at another plane, its parent. A cell whose ranks are all in is then `full`,
// not done: its sum goes up as data, and goes up again with each duplicate while it is full. The ranks are
// the clock; a plane has none. The parent's result replaces the sum, completes the cell and goes to all.
//
// Rows touch no cell. A packet from one member of a job to another, each of them a rank or a shard, is
// checked like all others (tacit_check_packet, tacit_check_member, source, tacit_check_kind), and then passed
// on unchanged to the receiver's address, if there is one. No answer is longer than what came, and none goes
// to anybody who is not in the job.
#pragma once

#include "wire.h"

// X(name, its name in Python and in metrics)
#define TACIT_VERDICTS(X)                                                                      \
    X(WROTE, "wrote")         /* first of its chunk */                                         \
    X(ADDED, "added")         /* */                                                            \
    X(REPEATED, "repeated")   /* its chunk was complete: the stored result went to it alone */ \
    X(ECHOED, "echoed")       /* a probe */                                                    \
    X(SETTLED, "settled")     /* a quorum was summed up; the result went to all */             \
    X(ANSWERED, "answered")   /* the parent's result; it went to all */                        \
    X(FORWARDED, "forwarded") /* rows, passed on to another member */                          \
    X(PASSED, "passed")       /* a settle of a lossy job: its rank has sent all up to here */  \
    X(DUPLICATE, "duplicate") /* dropped, as are all that follow: already in the sum */        \
    X(EARLY, "early")         /* a settle without a quorum */                                  \
    X(STALE, "stale")         /* late or replayed: its cell holds a later chunk; told so */    \
    X(LATE, "late")           /* a result of the parent that nobody waits for any more */      \
    X(UNREACHED, "unreached") /* rows for a member that has not joined */                      \
    X(HELD, "held")           /* a rank of a lossy job may lack what its cell holds */         \
    X(SHORT, "short")         /* no whole header */                                            \
    X(MAGIC, "magic")         /* not ours */                                                   \
    X(LAYOUT, "layout")       /* ours, in another version of the layout */                     \
    X(TRUNCATED, "truncated") /* less payload than the header says */                          \
    X(OVERSIZED, "oversized") /* more */                                                       \
    X(KIND, "kind")           /* not for a plane */                                            \
    X(JOB, "job")             /* no such job; told so */                                       \
    X(COOKIE, "cookie")       /* the wrong key; told the same */                               \
    X(WORLD, "world")         /* disagrees with the job, as do all that follow */              \
    X(RANK, "rank")           /* */                                                            \
    X(SOURCE, "source")       /* not from that rank's address */                               \
    X(LANES, "lanes")         /* */                                                            \
    X(LENGTH, "length")       /* */                                                            \
    X(SLOT, "slot")           /* outside the job's range */                                    \
    X(PLACE, "place")         /* in it, but not where the chunk belongs */

// What else is counted, beside the verdict of the packet that caused it.
#define TACIT_EVENTS(X)                                                             \
    X(COMPLETED, "completed") /* chunks whose result went to all */                 \
    X(SATURATED, "saturated") /* packets of which a lane met its limit */           \
    X(ABANDONED, "abandoned") /* unfinished sums that made way for a later chunk */ \
    X(PARTIAL, "partial")     /* of the completed, those without some rank: lossy jobs */

enum tacit_count {
    TACIT_FINE = 0,  // nothing to say against it so far; never counted
#define TACIT_COUNT(name, text) TACIT_COUNT_##name,
    TACIT_VERDICTS(TACIT_COUNT) TACIT_EVENTS(TACIT_COUNT)
#undef TACIT_COUNT
        TACIT_COUNTS
};

// What control tells a plane about a job.
struct tacit_job {
    __u64 cookie;
    __u16 first_slot, slots;  // slots is a power of two
    __u16 elements;           // of every packet: the last one of a vector is filled up with zeros
    __u16 data_nbytes, result_nbytes;
    __u8 world, quorum;  // a settle needs `quorum` ranks; if that is the world, nobody is left out
    __u8 lanes;
    __u8 below;    // its ranks are planes, which have so many below them; 0: they are not
    __u8 upward;   // it has an upstream
    __u8 members;  // the ranks, and behind them shards, which are in no sum
    __u8 table[TACIT_TABLE_ENTRIES];
};

// The job at the parent, as one of whose ranks this plane sends. Its data are the lanes of our sums, its
// chunks are ours; it has as many slots as ours or more, so that who keeps our window keeps the parent's.
struct tacit_upstream {
    __u64 cookie;
    struct tacit_address parent;
    __u16 first_slot, slots;
    __u8 job, world, rank;
    __u8 ranks;  // in its sums
};

// One version of one slot. The lanes of the sum lie beside it: never read before the first was written.
struct tacit_cell {
    __u64 seen;  // bit r: rank r is in the sum; 0: never used
    __u32 chunk;
    __u8 count, done, saturated;
    __u8 full;  // all of ours are in, the parent's sum is not
};

TACIT_ASSERT(sizeof(struct tacit_job) == 40 && sizeof(struct tacit_cell) == 16, "shared with BPF maps");

// ---- where a chunk belongs

// Among the job's 2 S cells; a plane with one array for all jobs starts a job's at 2 * first_slot.
TACIT_INLINE __u32 tacit_cell_of(const struct tacit_job* job, __u32 chunk) {
    return chunk & (2 * (__u32)job->slots - 1);
}

TACIT_INLINE __u32 tacit_place_in(__u32 first_slot, __u32 slots, __u32 chunk) {
    return (first_slot + (chunk & (slots - 1))) | (chunk & slots ? TACIT_VERSION : 0);
}

TACIT_INLINE __u32 tacit_place_of(const struct tacit_job* job, __u32 chunk) {
    return tacit_place_in(job->first_slot, job->slots, chunk);
}

// What a job's sums are to its parent: indices were looked up below.
TACIT_INLINE __u32 tacit_lanes_above(const struct tacit_job* job) {
    if (job->lanes == TACIT_LANES_TABLE_U8) return TACIT_LANES_U8;
    return job->lanes == TACIT_LANES_TABLE_U16 ? TACIT_LANES_U16 : job->lanes;
}

// ---- what is refused, in this order; TACIT_FINE goes on

// `payload_nbytes` is what came after the header.
TACIT_INLINE enum tacit_count tacit_check_packet(const struct tacit_header* h, __u32 payload_nbytes) {
    if ((h->magic & 0xf0) != TACIT_MAGIC) return TACIT_COUNT_MAGIC;
    if ((h->magic & 0x0f) != TACIT_LAYOUT) return TACIT_COUNT_LAYOUT;
    const __u32 nbytes = tacit_extra_nbytes(h->kind) + h->nbytes;
    if (nbytes > payload_nbytes) return TACIT_COUNT_TRUNCATED;
    if (nbytes < payload_nbytes) return TACIT_COUNT_OVERSIZED;
    if (h->kind != TACIT_KIND_DATA && h->kind != TACIT_KIND_PROBE && h->kind != TACIT_KIND_SETTLE &&
        h->kind != TACIT_KIND_ROWS)
        return TACIT_COUNT_KIND;
    return TACIT_FINE;
}

// After TACIT_FINE, `rank` is below `members`, and so below TACIT_MOST_RANKS; in rows, so is `world`. Shards
// send rows and probes.
TACIT_INLINE enum tacit_count tacit_check_member(const struct tacit_header* h, const struct tacit_job* job) {
    const int rows = h->kind == TACIT_KIND_ROWS;
    if (h->cookie != job->cookie) return TACIT_COUNT_COOKIE;
    if (rows ? h->world >= job->members || h->world == h->rank : h->world != job->world)
        return TACIT_COUNT_WORLD;
    if (h->rank >= (rows || h->kind == TACIT_KIND_PROBE ? job->members : job->world)) return TACIT_COUNT_RANK;
    return TACIT_FINE;
}

// Whether the member has joined, so that packets come from it and go to it.
TACIT_INLINE int tacit_is_there(const struct tacit_address* member) { return member->ip || member->port; }

TACIT_INLINE enum tacit_count tacit_check_rows(const struct tacit_header* h) {
    if (h->lanes & ~TACIT_ROWS_ACK) return TACIT_COUNT_LANES;
    return h->nbytes > (h->lanes & TACIT_ROWS_ACK ? 0 : TACIT_MOST_ROWS) ? TACIT_COUNT_LENGTH : TACIT_FINE;
}

// A probe has no place; its chunk is whatever the sender likes to see again.
TACIT_INLINE enum tacit_count tacit_check_kind(const struct tacit_header* h, const struct tacit_job* job) {
    if (h->kind == TACIT_KIND_ROWS) return tacit_check_rows(h);
    // A plane may say that a lane met its limit below it; every rank, that it has more to send.
    const __u32 flags = TACIT_MORE | (job->below ? TACIT_SATURATED : 0);
    const __u32 lanes = h->kind == TACIT_KIND_DATA ? h->lanes & ~flags : h->lanes;
    if (lanes != job->lanes) return TACIT_COUNT_LANES;
    if (h->nbytes != (h->kind == TACIT_KIND_DATA ? job->data_nbytes : 0)) return TACIT_COUNT_LENGTH;
    if (h->kind == TACIT_KIND_PROBE) return TACIT_FINE;
    if ((__u32)(h->place & ~TACIT_VERSION) - job->first_slot >= job->slots) return TACIT_COUNT_SLOT;
    if (h->place != tacit_place_of(job, h->chunk)) return TACIT_COUNT_PLACE;
    return TACIT_FINE;
}

// To tacit_check_packet a result is not for a plane (kind). It is, if the job it names is one's upstream, it
// has the cookie of that (cookie) and comes from the parent (source); then this.
TACIT_INLINE enum tacit_count tacit_check_result(const struct tacit_header* h, const struct tacit_job* job,
                                                 const struct tacit_upstream* above) {
    if (h->world != above->ranks) return TACIT_COUNT_WORLD;
    if (h->rank >= above->world) return TACIT_COUNT_RANK;
    if ((h->lanes & ~TACIT_SATURATED) != tacit_lanes_above(job)) return TACIT_COUNT_LANES;
    if (h->nbytes != job->result_nbytes) return TACIT_COUNT_LENGTH;
    if ((__u32)(h->place & ~TACIT_VERSION) - above->first_slot >= above->slots) return TACIT_COUNT_SLOT;
    if (h->place != tacit_place_in(above->first_slot, above->slots, h->chunk)) return TACIT_COUNT_PLACE;
    return TACIT_FINE;
}

// ---- what it does to its cell, which is locked from here until the lanes are written, added or copied

// Whether an unfinished sum is about to make way: only where ranks gave up a round and went on.
TACIT_INLINE int tacit_abandons(const struct tacit_cell* cell, __u32 chunk) {
    return cell->seen && !cell->done && tacit_after(chunk, cell->chunk);
}

TACIT_INLINE void tacit_close(struct tacit_cell* cell, const struct tacit_job* job) {
    const int all = cell->count == job->world;
    cell->done = all && !job->upward;
    cell->full = all && job->upward;
    if (cell->done && job->below) cell->count = job->below;  // from here on, what the result says
}

// Data. WROTE: its lanes become the sum; ADDED: they are added to it; in both cases, if the cell is now
// `done`, the result goes to all ranks. REPEATED: the result goes to the sender. Others: the lanes are not
// touched. After WROTE, ADDED and DUPLICATE, if the cell is `full`, its sum goes up.
TACIT_INLINE enum tacit_count tacit_take(struct tacit_cell* cell, const struct tacit_job* job, __u32 chunk,
                                         __u32 rank) {
    const __u64 bit = (__u64)1 << (rank & (TACIT_MOST_RANKS - 1));
    if (!cell->seen || tacit_after(chunk, cell->chunk)) {
        cell->seen = bit;
        cell->chunk = chunk;
        cell->count = 1;
        cell->saturated = 0;
        tacit_close(cell, job);
        return TACIT_COUNT_WROTE;
    }
    if (chunk != cell->chunk) return TACIT_COUNT_STALE;
    if (cell->done) return TACIT_COUNT_REPEATED;
    if (cell->seen & bit) return TACIT_COUNT_DUPLICATE;
    cell->seen |= bit;
    cell->count++;
    tacit_close(cell, job);
    return TACIT_COUNT_ADDED;
}

// A settle. SETTLED: the result goes to all ranks; who comes later gets it too, and is not in it. REPEATED:
// to the sender.
TACIT_INLINE enum tacit_count tacit_settle(struct tacit_cell* cell, const struct tacit_job* job,
                                           __u32 chunk) {
    if (!cell->seen || tacit_after(chunk, cell->chunk)) return TACIT_COUNT_EARLY;
    if (chunk != cell->chunk) return TACIT_COUNT_STALE;
    if (cell->done) return TACIT_COUNT_REPEATED;
    if (cell->count < job->quorum || job->upward) return TACIT_COUNT_EARLY;
    cell->done = 1;
    return TACIT_COUNT_SETTLED;
}

// The parent's result. ANSWERED: its lanes become the sum, which goes to all ranks.
TACIT_INLINE enum tacit_count tacit_answer(struct tacit_cell* cell, const struct tacit_header* h) {
    if (!cell->full || h->chunk != cell->chunk) return TACIT_COUNT_LATE;
    cell->full = 0;
    cell->done = 1;
    cell->count = h->world;
    if (h->lanes & TACIT_SATURATED) cell->saturated = 1;
    return TACIT_COUNT_ANSWERED;
}

// ---- what is answered: the header of the packet that called it up, changed in place

TACIT_INLINE void tacit_make_result(struct tacit_header* h, const struct tacit_job* job,
                                    const struct tacit_cell* cell) {
    h->kind = TACIT_KIND_RESULT;
    h->world = cell->count;
    h->lanes = job->lanes | (cell->saturated ? TACIT_SATURATED : 0);
    h->nbytes = job->result_nbytes;
}

// The sum of a full cell, on its way to the parent.
TACIT_INLINE void tacit_make_upward(struct tacit_header* h, const struct tacit_job* job,
                                    const struct tacit_upstream* above, const struct tacit_cell* cell) {
    h->kind = TACIT_KIND_DATA;
    h->cookie = above->cookie;
    h->job = above->job;
    h->world = above->world;
    h->rank = above->rank;
    h->lanes = tacit_lanes_above(job) | (cell->saturated ? TACIT_SATURATED : 0);
    h->place = tacit_place_in(above->first_slot, above->slots, h->chunk);
    h->nbytes = job->result_nbytes;
}

// The parent's result, on its way to our ranks: as if rank 0 had called it up.
TACIT_INLINE void tacit_make_downward(struct tacit_header* h, __u32 id, const struct tacit_job* job,
                                      const struct tacit_cell* cell) {
    h->cookie = job->cookie;
    h->job = id;
    h->rank = 0;
    h->place = tacit_place_of(job, h->chunk);
    tacit_make_result(h, job, cell);
}

// Echo, unknown, stale: the header alone, to where the packet came from. Never longer than what called it up.
TACIT_INLINE void tacit_make_reply(struct tacit_header* h, enum tacit_kind kind) {
    h->kind = kind;
    h->nbytes = 0;
}
