// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The kernel plane: the slot rule of slot.h inside the path of packets, before the network stack sees them.
// One body (judge) and two entry points. src/tacit/aggregator/planes/kernel_plane.py loads it and fills its maps.
//
// tc, on the way into every port, judges a packet and sends the answers through the ports' queues, so that
// shaping applies to them. XDP, in the driver, judges too: most packets are added and not answered, and never
// become an skb. What has to be answered it marks as judged and passes on to tc, which stands behind it on
// the same port; what it cannot reach into (jumbo frames in several buffers) and rows it passes on as they are.
//
// Everything that is not a whole UDP packet to the plane's own address and port goes on its way untouched.
// clang-format off: the others need the types of the first
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
// clang-format on

#include "slot.h"

char _license[] SEC("license") = "GPL";  // which the kernel asks for, because of bpf_cast_to_kern_ctx

// ---- set before loading; to the verifier they are constants

const volatile struct {
    __u32 ip;  // the plane's own address; network order, as is the port
    __u16 port, unused;
    __u32 most_nbytes;  // of lanes in a cell; a multiple of 64
    __u32 behind_xdp;   // tc: XDP stands before it and marks what it has judged
} settings;

enum {
    NO_JOB = TACIT_MOST_JOBS,  // where packets are counted that belong to none
    FRAME_NBYTES = TACIT_LOWER_NBYTES + TACIT_HEADER_NBYTES,
    // In `kind`, on the few instructions' way from XDP to tc. Whoever forges it must pass tacit_check_member,
    // and gets results that are there anyway, or has them sent.
    JUDGED = 0x80,
    TO_ALL = 0x40,
    OWED = 0x20,
    BLOCK = 64,  // of lanes
    MOST_OWED = 2,
};

// ---- what is kept

// How to reach a member: read off its packets, so that nobody has to ask for addresses in the path.
struct path {
    union {
        struct {
            __u8 our_mac[ETH_ALEN], its_mac[ETH_ALEN];  // as they stand in its packets
        };
        __u32 macs[3];
    };
    __u32 ifindex;  // 0: nothing has come from it yet
};

struct member {
    struct tacit_address address;
    struct path path;
    __u64 packets, nbytes, last_ns;
    __u64 newest;  // chunk that came from it, | NEWEST_KNOWN, | NEWEST_MORE
    __u64 owed;    // chunks + 1 whose results wait for its next packets; the low half is owed longer
};

#define NEWEST_MORE ((__u64)1 << 32)
#define NEWEST_KNOWN ((__u64)1 << 33)

struct job {
    struct tacit_job terms;
    __u64 unused[3];
    __u32 pairs[256];  // what a byte of two indices stands for: two lanes, the low nibble's first
    struct member members[TACIT_MOST_RANKS];
};

struct cell {
    struct bpf_spin_lock lock;  // also guards the lanes
    __u32 unused;
    struct tacit_cell state;
};

struct counters {
    __u64 counts[TACIT_COUNTS];
    __u64 answered_nbytes;
    __u64 carried;    // results that were owed, and left in a packet of their rank's own
    __u64 unsent;     // answers to members of whom nothing has come yet
    __u64 failures;   // what the kernel would not do
    __u64 segmented;  // several packets in one, as a sender's UDP_SEGMENT leaves them on virtual links
};

_Static_assert(sizeof(struct job) == 5184 && sizeof(struct member) == 64, "kernel_plane.py says the same");
_Static_assert(sizeof(struct cell) == 24, "kernel_plane.py says the same");

// A job is one map, put into `jobs` when it is complete: a packet finds all of it or nothing.
struct job_map {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __uint(key_size, sizeof(__u32));
    __uint(value_size, sizeof(struct job));
};

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
    __uint(max_entries, TACIT_MOST_JOBS);
    __type(key, __u32);
    __array(values, struct job_map);
} jobs SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 2);  // two for each slot of the plane
    __type(key, __u32);
    __type(value, struct cell);
} cells SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 2);
    __uint(key_size, sizeof(__u32));
    __uint(value_size, BLOCK);  // most_nbytes
} lanes SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
    __uint(max_entries, TACIT_MOST_JOBS + 1);
    __type(key, __u32);
    __type(value, struct counters);
} counters SEC(".maps");

// ---- a packet

struct lower {
    struct ethhdr eth;
    struct iphdr ip;
    struct udphdr udp;
} __attribute__((packed, aligned(2)));

struct frame {
    struct lower lower;
    struct tacit_header tacit;
} __attribute__((packed, aligned(2)));

union head {
    struct frame frame;
    __u64 words[FRAME_NBYTES / 8];
    __u32 halves[FRAME_NBYTES / 4];
};

_Static_assert(sizeof(union head) == FRAME_NBYTES, "the payload starts at byte 64");

struct packet {
    union head head;  // a copy: helpers may move the packet
    __u32 ifindex;
    __u32 payload_nbytes;  // after the header, as UDP says
    __u32 answer;          // 0, or a kind and perhaps TO_ALL
    __u32 verdict, abandons, saturates;
    __u32 checksum_left;  // to the last device
};

static __always_inline void copy_head(void* to, const void* from) {
    __u64* const words = to;
    const __u64* const source = from;
#pragma unroll
    for (int i = 0; i < FRAME_NBYTES / 8; ++i) words[i] = source[i];
}

static __always_inline bool is_ours(const void* data, const void* end) {
    const struct lower* const lower = data;
    if ((const void*)(lower + 1) > end) return false;
    if (lower->eth.h_proto != bpf_htons(ETH_P_IP)) return false;
    if (*(const __u8*)&lower->ip != 0x45) return false;  // version 4, no options
    if (lower->ip.protocol != IPPROTO_UDP) return false;
    if (lower->ip.frag_off & bpf_htons(0x3fff)) return false;  // part of a packet
    return lower->ip.daddr == settings.ip && lower->udp.dest == settings.port;
}

static __always_inline struct counters* counters_of(__u32 job) {
    return bpf_map_lookup_elem(&counters, &job);
}

static __always_inline void count(__u32 job, __u32 what) {
    struct counters* const own = counters_of(job);
    if (own && what < TACIT_COUNTS) own->counts[what]++;
}

static __always_inline struct job* find_job(__u32 id) {
    const __u32 only = 0;
    void* const found = bpf_map_lookup_elem(&jobs, &id);
    return found ? bpf_map_lookup_elem(found, &only) : 0;
}

// After tacit_check_member.
static __always_inline struct member* member_of(struct job* job, const struct packet* packet) {
    return &job->members[packet->head.frame.tacit.rank & (TACIT_MOST_RANKS - 1)];
}

// Of rows.
static __always_inline struct member* receiver_of(struct job* job, const struct packet* packet) {
    return &job->members[packet->head.frame.tacit.world & (TACIT_MOST_RANKS - 1)];
}

static __always_inline bool comes_from(const struct packet* packet, const struct member* member) {
    const struct lower* const lower = &packet->head.frame.lower;
    return tacit_is_there(&member->address) && lower->ip.saddr == member->address.ip &&
           lower->udp.source == member->address.port;
}

static __always_inline struct path path_of(const struct packet* packet) {
    const __u32* const words = packet->head.halves;
    return (struct path){.macs = {words[0], words[1], words[2]}, .ifindex = packet->ifindex};
}

static __always_inline void learn_path(struct path* path, const struct packet* packet) {
    const struct path seen = path_of(packet);
    if (path->ifindex == seen.ifindex && path->macs[0] == seen.macs[0] && path->macs[1] == seen.macs[1] &&
        path->macs[2] == seen.macs[2])
        return;  // its cache line stays with whom it is
    *path = seen;
}

// ---- lanes, eight bytes at a time; under the lock, so without helpers
//
// The verifier takes every turn of a loop. Turns are of 64 bytes, because each way out of a loop is one more
// path to it; what is left over is done from a place that it does not know, lest it do that once for every
// turn. All checks against `end` are made for it: judge() is called for packets that are whole.

// As if eight bytes were one number: right if no lane carries into the next. `signs` collects the carries out
// of every bit, those of a lane's highest bit among them.
static __always_inline __u64 add_word(__u64 a, __u64 b, __u64* signs) {
    const __u64 sum = a + b;
    *signs |= (a & b) | ((a ^ b) & ~sum);
    return sum;
}

// Two lanes with a sign, which carry into nothing. In `signs`, whether both had another sign than the sum.
static __always_inline __u64 add_signed(__u64 a, __u64 b, __u64* signs) {
    const __u64 high = 0x8000000080000000;
    const __u64 sum = ((a & ~high) + (b & ~high)) ^ ((a ^ b) & high);
    *signs |= (a ^ sum) & (b ^ sum);
    return sum;
}

// Lanes that stop at their limit, from what add_word() made of them. `high`: the highest bit of each.
static __always_inline __u64 repair_word(__u64 wrong, __u64 b, __u64 high, __u32 bits) {
    const __u64 a = wrong - b, sum = ((a & ~high) + (b & ~high)) ^ ((a ^ b) & high);
    const __u64 over = ((a & b) | ((a | b) & ~sum)) & high, ones = over >> (bits - 1);
    return sum | ((ones << bits) - ones);
}

// What a rank's indices stand for; up to eight lanes of 8 bits, four of 16.
static __always_inline __u64 look_up(__u32 lanes, const void* own, const __u32* pairs) {
    if (lanes == TACIT_LANES_TABLE_U16) {
        const __u32 indices = *(const __u16*)own;
        return pairs[indices & 255] | (__u64)pairs[indices >> 8] << 32;
    }
    const __u32 indices = *(const __u32*)own;
    const __u64 low = pairs[indices & 255] | pairs[indices >> 8 & 255] << 16;
    const __u64 high = pairs[indices >> 16 & 255] | pairs[indices >> 24] << 16;
    return low | high << 32;
}

enum work { WRITE, ADD, REPAIR };  // the first packet of a chunk writes, the others add

// Eight bytes of sums. With a table no lane meets its limit: one that could is refused with its job.
static __always_inline void work_on(enum work work, __u32 lanes, __u64* sum, const void* own,
                                    const __u32* pairs, __u64* signs) {
    if (work == WRITE)
        *sum = tacit_bits_up(lanes) == 4 ? look_up(lanes, own, pairs) : *(const __u64*)own;
    else if (work == REPAIR && lanes == TACIT_LANES_U8)
        *sum = repair_word(*sum, *(const __u64*)own, 0x8080808080808080, 8);
    else if (work == REPAIR)
        *sum = repair_word(*sum, *(const __u64*)own, 0x8000800080008000, 16);
    else if (tacit_bits_up(lanes) == 4)
        *sum += look_up(lanes, own, pairs);
    else if (lanes == TACIT_LANES_I32)
        *sum = add_signed(*sum, *(const __u64*)own, signs);
    else
        *sum = add_word(*sum, *(const __u64*)own, signs);
    asm volatile("" : "+r"(*signs));  // one after another, or clang runs out of registers
}

// The same number, of which the verifier no longer knows what the loop before has taught it.
static __always_inline __u32 forget(const __u16* nbytes) { return *(const volatile __u16*)nbytes; }

// Where a packet lies, asked anew for the same reason.
struct where {
    const void* context;
    bool xdp;  // known when it is compiled
};

static __always_inline const void* payload_of(struct where where) {
    const volatile struct xdp_md* const xdp = where.context;
    const volatile struct __sk_buff* const skb = where.context;
    return (void*)(long)(where.xdp ? xdp->data : skb->data) + FRAME_NBYTES;
}

static __always_inline const void* end_of(struct where where) {
    const volatile struct xdp_md* const xdp = where.context;
    const volatile struct __sk_buff* const skb = where.context;
    return (void*)(long)(where.xdp ? xdp->data_end : skb->data_end);
}

// `work` and `lanes` are known when this is compiled, so that each pair has a loop of its own.
static __always_inline void work_through(enum work work, __u32 lanes, const struct job* job,
                                         struct where where, void* sums, __u64* signs) {
    const __u32 nbytes = forget(&job->terms.result_nbytes), most = settings.most_nbytes;
    const void *const payload = payload_of(where), *const end = end_of(where);
    const __u32 up = 8 * tacit_bits_up(lanes) / tacit_bits_down(lanes);  // bytes behind eight bytes of sums
    for (__u32 i = 0; i < most; i += BLOCK) {
        const void* const own = payload + i / 8 * up;
        __u64* const sum = sums + i;
        if (i + BLOCK > nbytes || own + BLOCK / 8 * up > end) break;
#pragma unroll
        for (int k = 0; k < BLOCK / 8; ++k)
            work_on(work, lanes, sum + k, own + k * up, job->pairs, signs);
    }
    const __u32 all = forget(&job->terms.result_nbytes), at = all & ~(BLOCK - 1);
    if (at > most - BLOCK) return;
    const void* const own = payload + at / 8 * up;
    __u64* const sum = sums + at;
    for (__u32 k = 0; k < BLOCK / 8; ++k) {
        if (at + 8 * k >= all || own + (k + 1) * up > end) break;
        work_on(work, lanes, sum + k, own + k * up, job->pairs, signs);
    }
}

// Whether a lane met its limit.
static __always_inline bool add_lanes(__u32 lanes, const struct job* job, struct where where, void* sums,
                                      bool first) {
    const __u64 high = lanes == TACIT_LANES_U8    ? 0x8080808080808080
                       : lanes == TACIT_LANES_U16 ? 0x8000800080008000
                                                  : 0x8000000080000000;
    __u64 signs = 0;
    if (first) {
        work_through(WRITE, lanes, job, where, sums, &signs);
        return false;
    }
    work_through(ADD, lanes, job, where, sums, &signs);
    if (tacit_bits_up(lanes) == 4 || !(signs & high)) return false;
    if (lanes == TACIT_LANES_I32) return true;
    work_through(REPAIR, lanes, job, where, sums, &signs);
    return true;
}

static __always_inline bool add_payload(const struct job* job, struct where where, void* sums, bool first) {
    switch (job->terms.lanes) {
        case TACIT_LANES_U8:
            return add_lanes(TACIT_LANES_U8, job, where, sums, first);
        case TACIT_LANES_U16:
            return add_lanes(TACIT_LANES_U16, job, where, sums, first);
        case TACIT_LANES_I32:
            return add_lanes(TACIT_LANES_I32, job, where, sums, first);
        case TACIT_LANES_TABLE_U8:
            return add_lanes(TACIT_LANES_TABLE_U8, job, where, sums, first);
        default:
            return add_lanes(TACIT_LANES_TABLE_U16, job, where, sums, first);
    }
}

static __always_inline void copy_sums(const struct job* job, const void* sums, void* payload,
                                      const void* end) {
    const __u32 nbytes = job->terms.result_nbytes, most = settings.most_nbytes;
    for (__u32 i = 0; i < most; i += BLOCK) {
        const __u64* const sum = sums + i;
        __u64* const to = payload + i;
        if (i + BLOCK > nbytes || (void*)to + BLOCK > end) break;
#pragma unroll
        for (int k = 0; k < BLOCK / 8; ++k) to[k] = sum[k];
    }
    const __u32 all = forget(&job->terms.result_nbytes), at = all & ~(BLOCK - 1);
    if (at > most - BLOCK) return;
    const __u64* const sum = sums + at;
    __u64* const to = payload + at;
    for (__u32 k = 0; k < BLOCK / 8; ++k) {
        if (at + 8 * k >= all || (const void*)(to + k + 1) > end) break;
        to[k] = sum[k];
    }
}

// ---- results that wait for a packet
//
// A result goes to everybody, each in a packet of its own. A copy costs the kernel new memory and 9 kB of
// copying, half of what sending it takes; and all packets of a chunk but the last one are added and dropped.
// So a rank that is going to send more anyway is owed its result until its next packet, which carries it
// home. Nothing depends on it: a result that is not carried, since packets were lost, is asked for as ever.
// Packets of indices are shorter than a result: they would take new memory themselves.

// Whether the member will send on, whatever we say. Nobody waits for ever: take the smallest chunk c that is
// owed to anyone. When it was, the member had sent up to c + slots - 6 at most, with 8 more in its vector; so
// one of those it has not sent waits for a chunk below c, which is not owed, and so waits for another rank,
// which waits for an even smaller one.
static __always_inline bool is_sending(__u64 newest, const struct tacit_job* terms, __u32 chunk) {
    const __s32 ahead = (__u32)newest - chunk, most = (__s32)terms->slots - (2 * MOST_OWED + 2);
    if (terms->data_nbytes != terms->result_nbytes) return false;
    return newest & NEWEST_MORE && ahead >= 0 && ahead <= most;
}

static __always_inline bool owe(struct member* member, const struct tacit_job* terms, __u32 chunk) {
    const __u64 owed = member->owed, entry = chunk + 1;  // 0, once in 2^32: it is not owed, but sent
    if (!entry || owed >> 32 || !is_sending(member->newest, terms, chunk)) return false;
    const __u64 more = owed ? owed | entry << 32 : entry;
    return __sync_val_compare_and_swap(&member->owed, owed, more) == owed;
}

// Turns the header into that of the chunk that has been owed longest, if there is one.
static __always_inline bool take_owed(struct member* member, const struct tacit_job* terms,
                                      struct tacit_header* header) {
    const __u64 owed = member->owed;
    if (!owed || __sync_val_compare_and_swap(&member->owed, owed, owed >> 32) != owed) return false;
    header->chunk = (__u32)owed - 1;
    header->place = tacit_place_of(terms, header->chunk);
    return true;
}

static __always_inline void learn_newest(struct member* member, const struct tacit_header* header) {
    const __u64 newest = member->newest;
    if (newest && !tacit_after(header->chunk, newest)) return;
    member->newest = header->chunk | NEWEST_KNOWN | (header->lanes & TACIT_MORE ? NEWEST_MORE : 0);
}

// ---- the body

// What a packet with a place does to its cell, and in packet->answer what is to be said to it.
static __always_inline enum tacit_count sum_up(struct job* job, struct packet* packet, struct where where) {
    const struct tacit_header* const header = &packet->head.frame.tacit;
    const __u32 chunk = header->chunk, rank = header->rank;
    const bool data = header->kind == TACIT_KIND_DATA;
    const __u32 at = 2 * (__u32)job->terms.first_slot + tacit_cell_of(&job->terms, chunk);
    struct cell* const cell = bpf_map_lookup_elem(&cells, &at);
    void* const sums = bpf_map_lookup_elem(&lanes, &at);
    if (!cell || !sums) return TACIT_COUNT_SLOT;  // never: add_job has checked the range

    bpf_spin_lock(&cell->lock);
    packet->abandons = data && tacit_abandons(&cell->state, chunk);
    packet->verdict = data ? tacit_take(&cell->state, &job->terms, chunk, rank)
                           : tacit_settle(&cell->state, &job->terms, chunk);
    // Read back, so that the verifier walks through the lanes once and not once for every verdict.
    const enum tacit_count verdict = *(volatile __u32*)&packet->verdict;
    const bool adds = verdict == TACIT_COUNT_WROTE || verdict == TACIT_COUNT_ADDED;
    if (adds && add_payload(job, where, sums, verdict == TACIT_COUNT_WROTE)) {
        cell->state.saturated = 1;
        packet->saturates = 1;
    }
    if (adds && header->lanes & TACIT_SATURATED) cell->state.saturated = 1;  // at a plane below
    const bool completed = verdict == TACIT_COUNT_SETTLED || (adds && cell->state.done);
    bpf_spin_unlock(&cell->lock);

    if (packet->abandons) count(header->job, TACIT_COUNT_ABANDONED);
    if (packet->saturates) count(header->job, TACIT_COUNT_SATURATED);
    if (completed) count(header->job, TACIT_COUNT_COMPLETED);
    if (completed) packet->answer = TACIT_KIND_RESULT | TO_ALL;
    if (verdict == TACIT_COUNT_REPEATED) packet->answer = TACIT_KIND_RESULT;
    if (verdict == TACIT_COUNT_STALE) packet->answer = TACIT_KIND_STALE;
    return verdict;
}

static __always_inline enum tacit_count judge_member(struct job* job, struct packet* packet,
                                                     struct where where) {
    struct tacit_header* const header = &packet->head.frame.tacit;
    enum tacit_count fault = tacit_check_member(header, &job->terms);
    if (fault == TACIT_COUNT_COOKIE) packet->answer = TACIT_KIND_UNKNOWN;
    if (fault) return fault;
    struct member* const member = member_of(job, packet);
    if (!comes_from(packet, member)) return TACIT_COUNT_SOURCE;
    fault = tacit_check_kind(header, &job->terms);
    if (fault) return fault;
    learn_path(&member->path, packet);
    __sync_fetch_and_add(&member->packets, 1);
    __sync_fetch_and_add(&member->nbytes, TACIT_HEADER_NBYTES + packet->payload_nbytes);
    member->last_ns = bpf_ktime_get_coarse_ns();
    if (header->kind == TACIT_KIND_PROBE) {
        packet->answer = TACIT_KIND_ECHO;
        return TACIT_COUNT_ECHOED;
    }
    if (header->kind == TACIT_KIND_ROWS) {
        // Whoever has not joined, or not sent anything yet, cannot be found.
        if (!receiver_of(job, packet)->path.ifindex) return TACIT_COUNT_UNREACHED;
        packet->answer = TACIT_KIND_ROWS;
        return TACIT_COUNT_FORWARDED;
    }
    if (header->kind == TACIT_KIND_DATA) learn_newest(member, header);
    const enum tacit_count verdict = sum_up(job, packet, where);
    if (!packet->answer && header->kind == TACIT_KIND_DATA && take_owed(member, &job->terms, header))
        packet->answer = TACIT_KIND_RESULT | OWED;
    return verdict;
}

// Counts the packet, adds what is to be added, and leaves in packet->answer what is to be said. A payload
// that fits a cell is whole and in one piece.
static __always_inline void judge(struct packet* packet, struct where where) {
    const struct tacit_header* const header = &packet->head.frame.tacit;
    __u32 counted = NO_JOB;
    enum tacit_count verdict = tacit_check_packet(header, packet->payload_nbytes);
    if (!verdict) {
        struct job* const job = find_job(header->job);
        if (job) {
            counted = header->job;
            verdict = judge_member(job, packet, where);
        } else {
            verdict = TACIT_COUNT_JOB;
            packet->answer = TACIT_KIND_UNKNOWN;  // the same words as for a wrong cookie
        }
    }
    count(counted, verdict);
}

// Functions that are not inlined the verifier walks through once, and not once for every way to them.

__noinline int judge_skb(struct __sk_buff* skb, struct packet* packet) {
    if (packet) judge(packet, (struct where){skb, false});
    return 0;
}

__noinline int judge_xdp(struct xdp_md* context, struct packet* packet) {
    if (packet) judge(packet, (struct where){context, true});
    return 0;
}

// ---- answers, by tc

struct sk_buff {
    __u8 ip_summed : 2;
} __attribute__((preserve_access_index));

extern void* bpf_cast_to_kern_ctx(void* context) __ksym __weak;

// Whether the last device is to finish the checksum (CHECKSUM_PARTIAL), as with packets from virtual links.
static __always_inline bool checksum_is_left(struct __sk_buff* skb) {
    if (!bpf_cast_to_kern_ctx) return false;
    const struct sk_buff* const kernel = bpf_cast_to_kern_ctx(skb);
    return BPF_CORE_READ_BITFIELD(kernel, ip_summed) == 3;
}

static __always_inline __u16 fold(__u32 sum) {
    sum = (sum & 0xffff) + (sum >> 16);
    return (sum & 0xffff) + (sum >> 16);
}

static __always_inline __u32 halves(__u32 word) { return (word & 0xffff) + (word >> 16); }

// Turns the head of a packet into that of an answer, apart from what address_to() fills in.
static __always_inline void turn_round(struct frame* frame) {
    struct lower* const lower = &frame->lower;
    const __u32 udp_nbytes = sizeof(struct udphdr) + TACIT_HEADER_NBYTES +
                             tacit_extra_nbytes(frame->tacit.kind) + frame->tacit.nbytes;
    lower->ip.tos = 0;
    lower->ip.tot_len = bpf_htons(sizeof(struct iphdr) + udp_nbytes);
    lower->ip.id = 0;
    lower->ip.frag_off = bpf_htons(0x4000);  // not to be cut
    lower->ip.ttl = 64;
    lower->ip.saddr = settings.ip;
    lower->udp.source = settings.port;
    lower->udp.len = bpf_htons(udp_nbytes);
}

static __always_inline void address_to(struct frame* frame, const struct path* path, __u32 ip, __u16 port,
                                       bool checksum_left) {
    struct lower* const lower = &frame->lower;
    __builtin_memcpy(lower->eth.h_dest, path->its_mac, ETH_ALEN);
    __builtin_memcpy(lower->eth.h_source, path->our_mac, ETH_ALEN);
    lower->ip.daddr = ip;
    lower->udp.dest = port;
    const __u32 addresses = halves(settings.ip) + halves(ip);
    lower->ip.check = ~fold(bpf_htons(0x4500) + lower->ip.tot_len + lower->ip.frag_off +
                            bpf_htons(64 << 8 | IPPROTO_UDP) + addresses);
    // UDP over IPv4 may do without. A device that is to finish the sum wants to find the addresses' part.
    lower->udp.check = checksum_left ? fold(addresses + bpf_htons(IPPROTO_UDP) + lower->udp.len) : 0;
}

static __always_inline bool write_head(struct __sk_buff* skb, const union head* head) {
    void* const data = (void*)(long)skb->data;
    if (data + FRAME_NBYTES > (void*)(long)skb->data_end) return false;
    copy_head(data, head);
    return true;
}

// Turns the packet into the result, if the cell still holds it: a later chunk may have come in between.
__noinline int write_result(struct __sk_buff* skb, struct packet* packet) {
    if (!packet) return 0;
    struct tacit_header* const header = &packet->head.frame.tacit;
    const struct job* const job = find_job(header->job);
    if (!job) return 0;
    const __u32 at = 2 * (__u32)job->terms.first_slot + tacit_cell_of(&job->terms, header->chunk);
    const __u32 chunk = header->chunk;
    struct cell* const cell = bpf_map_lookup_elem(&cells, &at);
    const void* const sums = bpf_map_lookup_elem(&lanes, &at);
    if (!cell || !sums) return 0;
    void* const payload = (void*)(long)skb->data + FRAME_NBYTES;
    void* const end = (void*)(long)skb->data_end;
    struct tacit_cell state;
    bpf_spin_lock(&cell->lock);
    state = cell->state;
    const bool stands = state.done && state.chunk == chunk;
    if (stands) copy_sums(job, sums, payload, end);
    bpf_spin_unlock(&cell->lock);
    tacit_make_result(header, &job->terms, &state);
    turn_round(&packet->head.frame);
    return stands;
}

static __always_inline int fail(struct counters* own) {
    own->failures++;
    return TC_ACT_SHOT;
}

__noinline int send_copy(struct __sk_buff* skb, struct packet* packet, struct member* member) {
    if (!packet || !member) return 0;
    const struct tacit_header* const header = &packet->head.frame.tacit;
    struct counters* const own = counters_of(header->job);
    if (!own) return 0;
    if (!member->path.ifindex) {
        own->unsent++;
        return 0;
    }
    address_to(&packet->head.frame, &member->path, member->address.ip, member->address.port,
               packet->checksum_left);
    if (!write_head(skb, &packet->head) || bpf_clone_redirect(skb, member->path.ifindex, 0))
        own->failures++;
    else
        own->answered_nbytes += TACIT_HEADER_NBYTES + header->nbytes;
    return 0;
}

// In a copy, what the member is owed longest; the packet's payload is gone then.
__noinline int send_owed(struct __sk_buff* skb, struct packet* packet, struct member* member) {
    if (!packet || !member) return 0;
    struct tacit_header* const header = &packet->head.frame.tacit;
    struct job* const job = find_job(header->job);
    const struct tacit_header own = *header;
    if (!job || !take_owed(member, &job->terms, header)) return 0;
    if (write_result(skb, packet)) send_copy(skb, packet, member);
    *header = own;
    return 0;
}

// All that is to be done for one member is done here, lest the loop below have a fork in it.
__noinline int give(struct __sk_buff* skb, struct packet* packet, struct member* member) {
    if (!packet || !member || !packet->answer) return 0;
    const struct tacit_header* const header = &packet->head.frame.tacit;
    const struct job* const job = find_job(header->job);
    if (!job) return 0;
    // Not before older ones: to a rank, what is overtaken is lost.
    for (int i = 0; i < MOST_OWED; ++i) {
        if (owe(member, &job->terms, header->chunk)) return 0;
        if (!member->owed) break;
        send_owed(skb, packet, member);
        if (!write_result(skb, packet)) {
            packet->answer = 0;  // ranks have gone on without it; what the packet holds now is another chunk
            return 0;
        }
    }
    return send_copy(skb, packet, member);
}

// To all members but the sender, who gets the packet itself afterwards instead of a copy.
static __always_inline void copy_to_others(struct __sk_buff* skb, struct job* job, struct packet* packet) {
    const __u32 world = job->terms.world, sender = packet->head.frame.tacit.rank;
    for (__u32 rank = 0; rank < TACIT_MOST_RANKS; ++rank) {
        if (rank >= world) break;
        if (rank != sender) give(skb, packet, &job->members[rank]);
    }
}

__noinline int answer(struct __sk_buff* skb, struct packet* packet) {
    if (!packet) return TC_ACT_SHOT;
    struct frame* const frame = &packet->head.frame;
    struct tacit_header* const header = &frame->tacit;
    const __u32 kind = packet->answer & ~(TO_ALL | OWED), sender_ip = frame->lower.ip.saddr;
    const __u16 sender_port = frame->lower.udp.source;
    const bool known = kind != TACIT_KIND_UNKNOWN;
    const struct path back = path_of(packet);

    struct job* const job = find_job(header->job);
    struct counters* const own = counters_of(known ? header->job : NO_JOB);
    if (!own) return TC_ACT_SHOT;
    // Again, because XDP's mark on a packet is no proof of anything.
    if (known && (!job || tacit_check_member(header, &job->terms))) return TC_ACT_SHOT;
    if (known && !comes_from(packet, member_of(job, packet))) return TC_ACT_SHOT;

    const bool result = known && kind == TACIT_KIND_RESULT;
    const __u32 nbytes = FRAME_NBYTES + (result ? job->terms.result_nbytes : 0);
    if (skb->len != nbytes && bpf_skb_change_tail(skb, nbytes, 0)) return fail(own);
    packet->checksum_left = checksum_is_left(skb);
    // Who completes a chunk needs its packet for that.
    if (result && packet->answer & TO_ALL) send_owed(skb, packet, member_of(job, packet));
    if (result && !write_result(skb, packet)) return TC_ACT_SHOT;
    if (!result) {
        tacit_make_reply(header, kind);
        turn_round(frame);
    }
    if (result && packet->answer & TO_ALL) copy_to_others(skb, job, packet);
    if (!packet->answer) return TC_ACT_SHOT;
    address_to(frame, &back, sender_ip, sender_port, packet->checksum_left);
    if (!write_head(skb, &packet->head)) return fail(own);
    if (known) own->answered_nbytes += TACIT_HEADER_NBYTES + header->nbytes;
    if (packet->answer & OWED) own->carried++;
    return bpf_redirect(packet->ifindex, 0);
}

// The checksum of a packet of which nothing but addresses and ports has changed. What the sender has computed
// protects the rows until they are there: nobody in between computes it anew.
static __always_inline __u16 adjusted(__u16 check, const struct lower* before, const struct lower* after) {
    const __u32 old = halves(~before->ip.saddr) + halves(~before->ip.daddr) + (__u16)~before->udp.source +
                      (__u16)~before->udp.dest;
    const __u32 new = halves(after->ip.saddr) + halves(after->ip.daddr) + after->udp.source + after->udp.dest;
    const __u16 found = ~fold((__u16)~check + old + new);
    return found ? found : 0xffff;  // 0 says that there is none
}

// Rows go to their receiver in the packet that they came in.
__noinline int pass_on(struct __sk_buff* skb, struct packet* packet) {
    if (!packet) return TC_ACT_SHOT;
    struct frame* const frame = &packet->head.frame;
    struct job* const job = find_job(frame->tacit.job);
    struct counters* const own = counters_of(frame->tacit.job);
    if (!job || !own) return TC_ACT_SHOT;  // it has just been removed
    const struct member* const to = receiver_of(job, packet);
    const __u32 nbytes = TACIT_HEADER_NBYTES + TACIT_ROWS_NBYTES + frame->tacit.nbytes;
    if (skb->len != TACIT_LOWER_NBYTES + nbytes && bpf_skb_change_tail(skb, TACIT_LOWER_NBYTES + nbytes, 0))
        return fail(own);
    const struct lower before = frame->lower;
    const bool left = checksum_is_left(skb);
    turn_round(frame);
    address_to(frame, &to->path, to->address.ip, to->address.port, left);
    if (!left && before.udp.check) {
        const struct iphdr* const ip = &frame->lower.ip;
        frame->lower.udp.check = adjusted(before.udp.check, &before, &frame->lower);
        // Of a device's own sum over the packet, if it came with one.
        bpf_csum_update(skb, halves(before.ip.saddr) + halves(before.ip.daddr) + halves(~ip->saddr) +
                                 halves(~ip->daddr));
    }
    if (!write_head(skb, &packet->head)) return fail(own);
    own->answered_nbytes += nbytes;
    return bpf_redirect(to->path.ifindex, 0);
}

// ---- entry points

// Whether the first `nbytes` can be read.
static __always_inline bool reach(struct __sk_buff* skb, __u32 nbytes) {
    return skb->data_end - skb->data >= nbytes || !bpf_skb_pull_data(skb, nbytes);
}

SEC("tc")
int tacit_tc(struct __sk_buff* skb) {
    if (skb->data + sizeof(struct lower) > skb->data_end) bpf_skb_pull_data(skb, sizeof(struct lower));
    const void *data = (void*)(long)skb->data, *end = (void*)(long)skb->data_end;
    if (!is_ours(data, end)) return TC_ACT_UNSPEC;

    const __u32 udp_nbytes = bpf_ntohs(((const struct lower*)data)->udp.len);
    const __u32 nbytes = ETH_HLEN + sizeof(struct iphdr) + udp_nbytes;
    enum tacit_count verdict = TACIT_FINE;
    if (udp_nbytes < sizeof(struct udphdr) + TACIT_HEADER_NBYTES) verdict = TACIT_COUNT_SHORT;
    if (nbytes > skb->len) verdict = TACIT_COUNT_TRUNCATED;
    if (skb->gso_segs > 1) {
        struct counters* const own = counters_of(NO_JOB);
        if (own) own->segmented++;
        verdict = TACIT_COUNT_OVERSIZED;
    }
    if (verdict) {
        count(NO_JOB, verdict);
        return TC_ACT_SHOT;
    }
    if (!reach(skb, FRAME_NBYTES)) return TC_ACT_SHOT;
    data = (void*)(long)skb->data;
    end = (void*)(long)skb->data_end;
    if (data + FRAME_NBYTES > end) return TC_ACT_SHOT;
    const __u32 most = FRAME_NBYTES + settings.most_nbytes;
    const bool rows = ((const struct frame*)data)->tacit.kind == TACIT_KIND_ROWS;
    // The payload of rows may stay where it is.
    if (!rows && !reach(skb, nbytes < most ? nbytes : most)) return TC_ACT_SHOT;
    data = (void*)(long)skb->data;
    end = (void*)(long)skb->data_end;
    if (data + FRAME_NBYTES > end) return TC_ACT_SHOT;

    struct packet packet = {.ifindex = skb->ifindex, .payload_nbytes = nbytes - FRAME_NBYTES};
    copy_head(&packet.head, data);
    const __u8 kind = packet.head.frame.tacit.kind;
    if (settings.behind_xdp && kind & JUDGED && kind != (JUDGED | TACIT_KIND_ROWS)) {
        packet.answer = kind & ~JUDGED;
        packet.head.frame.tacit.kind = packet.answer == TACIT_KIND_ECHO ? TACIT_KIND_PROBE : TACIT_KIND_DATA;
    } else {
        judge_skb(skb, &packet);
    }
    if (packet.answer == TACIT_KIND_ROWS) return pass_on(skb, &packet);
    return packet.answer ? answer(skb, &packet) : TC_ACT_SHOT;
}

SEC("xdp.frags")
int tacit_xdp(struct xdp_md* context) {
    void *const data = (void*)(long)context->data, *const end = (void*)(long)context->data_end;
    if (!is_ours(data, end)) return XDP_PASS;
    const __u32 nbytes = ETH_HLEN + sizeof(struct iphdr) + bpf_ntohs(((const struct lower*)data)->udp.len);
    // What is short, or not whole in this buffer, is for tc to look at.
    if (nbytes < FRAME_NBYTES || nbytes > end - data || data + FRAME_NBYTES > end) return XDP_PASS;
    if (((const struct frame*)data)->tacit.kind == TACIT_KIND_ROWS) return XDP_PASS;  // who sends it, judges it

    struct packet packet = {.ifindex = context->ingress_ifindex, .payload_nbytes = nbytes - FRAME_NBYTES};
    copy_head(&packet.head, data);
    judge_xdp(context, &packet);
    if (!packet.answer) return XDP_DROP;
    struct tacit_header* const header = &((struct frame*)data)->tacit;
    *header = packet.head.frame.tacit;  // the chunk that it is to carry home
    header->kind = JUDGED | packet.answer;
    return XDP_PASS;
}
