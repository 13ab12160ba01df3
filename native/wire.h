// A packet of the aggregator, laid out once. C++ and the kernel plane (BPF C) include this file; Python reads
// format, names and numbers from tacit._core. Plain C, no library. Why it is so:
// docs/decisions/0008-aggregator-wire.md.
//
// Little-endian. 22 bytes, so that the payload starts at byte 64 of an Ethernet frame (14 + 20 + 8 + 22), and
// in the frame every field stands at a multiple of its own size. The payload is lanes, little-endian, packed.
#pragma once

#ifndef __VMLINUX_H__
#include <linux/types.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "fields and lanes go to the wire as they lie in memory"
#endif

#define TACIT_INLINE static inline __attribute__((always_inline))
#ifdef __cplusplus
#define TACIT_ASSERT static_assert
#else
#define TACIT_ASSERT _Static_assert
#endif

// X(type, name, its letter in Python's struct)
#define TACIT_FIELDS(X)                                                                 \
    X(__u8, magic, "B")   /* TACIT_MAGIC | TACIT_LAYOUT */                              \
    X(__u8, kind, "B")    /* enum tacit_kind */                                         \
    X(__u32, chunk, "I")  /* counts on from step to step and wraps: tacit_after() */    \
    X(__u64, cookie, "Q") /* the job's key, which nobody can guess */                   \
    X(__u8, job, "B")     /* */                                                         \
    X(__u8, world, "B")   /* ranks in the job; in a result, ranks in the sum */         \
    X(__u8, rank, "B")    /* who sends; in a result, whose packet called it up */       \
    X(__u8, lanes, "B")   /* enum tacit_lanes, maybe | TACIT_SATURATED or TACIT_MORE */ \
    X(__u16, place, "H")  /* slot, | TACIT_VERSION if the chunk's phase is odd */       \
    X(__u16, nbytes, "H") /* of payload */

struct tacit_header {
#define TACIT_FIELD(type, name, letter) type name;
    TACIT_FIELDS(TACIT_FIELD)
#undef TACIT_FIELD
} __attribute__((packed, aligned(2)));  // 2, since a frame's header starts at byte 42

enum {
    TACIT_MAGIC = 0xa0,   // the high nibble says: tacit
    TACIT_LAYOUT = 0x01,  // the low one: which version of this file
    TACIT_HEADER_NBYTES = 22,
    TACIT_LOWER_NBYTES = 42,  // Ethernet, IPv4, UDP
    TACIT_MOST_JOBS = 256,
    TACIT_MOST_RANKS = 64,         // bits of a cell's `seen`
    TACIT_MOST_SLOTS = 1 << 15,    // bits of `place`
    TACIT_MOST_PAYLOAD = 8944,     // what an MTU of 9000 takes
    TACIT_VERSION = 1 << 15,       // in `place`
    TACIT_SATURATED = 0x80,        // in `lanes` of a result: at least one lane met its limit
    TACIT_MORE = 0x40,             // in `lanes` of data: the vector has at least ...
    TACIT_MORE_CHUNKS = 8,         // ... so many chunks after this one
    TACIT_TABLE_ENTRIES = 16,      // an index has 4 bits
    TACIT_ELEMENTS_MULTIPLE = 8,   // so that every payload is whole 32-bit words
    TACIT_IP_UDP_NBYTES = 20 + 8,  // what counts against the MTU beside the header
    TACIT_ROWS_NBYTES = 16,        // struct tacit_rows
    TACIT_MOST_ROWS = TACIT_MOST_PAYLOAD - TACIT_ROWS_NBYTES,
    TACIT_ROWS_ACK = 0x01,  // in `lanes` of rows: an acknowledgement alone, without a payload
};

TACIT_ASSERT(sizeof(struct tacit_header) == TACIT_HEADER_NBYTES, "the header");
TACIT_ASSERT((TACIT_LOWER_NBYTES + TACIT_HEADER_NBYTES) % 64 == 0, "the payload");

// X(name, number, its name in Python)
#define TACIT_KINDS(X)                                                                          \
    X(DATA, 1, "data")       /* rank to plane: one chunk's lanes or indices */                  \
    X(RESULT, 2, "result")   /* plane to rank: the sum's lanes */                               \
    X(PROBE, 3, "probe")     /* rank to plane: are you there? No payload */                     \
    X(ECHO, 4, "echo")       /* plane to rank: a probe, returned */                             \
    X(SETTLE, 5, "settle")   /* rank to plane: sum up those who came, if they are a quorum */   \
    X(UNKNOWN, 6, "unknown") /* plane to sender: who are you? No such job, or not its cookie */ \
    X(STALE, 7, "stale")     /* plane to rank: its chunk has made way for a later one */        \
    X(ROWS, 8, "rows")       /* member to member, passed on by the plane as it is */

// Rows: a flow of messages from one member of a job to another. Members are the ranks, and behind them
// shards, which are in no sum. `chunk` is the packet's number in its flow (of an acknowledgement alone:
// unused), `world` the member that receives it, `rank` the one that sends it, `lanes` 0 or TACIT_ROWS_ACK,
// `place` the number of the message in its flow, mod 2^16. Then these 16 bytes, then `nbytes` of payload.
//
// The plane passes a packet on as it is, or drops it. Packets of one flow may overtake each other: those that
// come in together leave sorted by length.
#define TACIT_ROWS_FIELDS(X)                                                                      \
    X(__u32, length, "I") /* of the whole message, in bytes */                                    \
    X(__u32, offset, "I") /* of this payload in it */                                             \
    X(__u32, next, "I")   /* whose sender has all packets of the opposite flow before this one */ \
    X(__u32, also, "I")   /* bit i: and number next + 1 + i */

struct tacit_rows {
#define TACIT_FIELD(type, name, letter) type name;
    TACIT_ROWS_FIELDS(TACIT_FIELD)
#undef TACIT_FIELD
} __attribute__((packed, aligned(2)));

TACIT_ASSERT(sizeof(struct tacit_rows) == TACIT_ROWS_NBYTES, "rows");
// In a frame, what is 16-aligned in the message is 16-aligned here.
TACIT_ASSERT((TACIT_LOWER_NBYTES + TACIT_HEADER_NBYTES + TACIT_ROWS_NBYTES) % 16 == 0, "rows' payload");

enum tacit_kind {
#define TACIT_KIND(name, number, text) TACIT_KIND_##name = number,
    TACIT_KINDS(TACIT_KIND)
#undef TACIT_KIND
};

// What a packet of this kind has between its header and what `nbytes` counts.
TACIT_INLINE __u32 tacit_extra_nbytes(__u32 kind) { return kind == TACIT_KIND_ROWS ? TACIT_ROWS_NBYTES : 0; }

#define TACIT_LANE_TYPES(X)                                                                    \
    X(U8, 1, "u8")               /* unsigned, saturating */                                    \
    X(U16, 2, "u16")             /* */                                                         \
    X(I32, 3, "i32")             /* two's complement, wrapping: exact if the whole sum fits */ \
    X(TABLE_U8, 4, "table_u8")   /* 4-bit indices into the job's table, added as u8 */         \
    X(TABLE_U16, 5, "table_u16") /* the same as u16; the even element in the low nibble */     \
    X(F32, 6, "f32")             /* added in order of arrival: user plane only */

enum tacit_lanes {
#define TACIT_LANE_TYPE(name, number, text) TACIT_LANES_##name = number,
    TACIT_LANE_TYPES(TACIT_LANE_TYPE)
#undef TACIT_LANE_TYPE
};

// Bits of an element on the way up, and on the way down; 0 if there is no such lane type.
TACIT_INLINE __u32 tacit_bits_up(__u32 lanes) {
    switch (lanes) {
        case TACIT_LANES_U8:
            return 8;
        case TACIT_LANES_U16:
            return 16;
        case TACIT_LANES_I32:
        case TACIT_LANES_F32:
            return 32;
        case TACIT_LANES_TABLE_U8:
        case TACIT_LANES_TABLE_U16:
            return 4;
        default:
            return 0;
    }
}

TACIT_INLINE __u32 tacit_bits_down(__u32 lanes) {
    switch (lanes) {
        case TACIT_LANES_TABLE_U8:
            return 8;
        case TACIT_LANES_TABLE_U16:
            return 16;
        default:
            return tacit_bits_up(lanes);
    }
}

// Elements that fit both ways into a packet on a path of this MTU: 1448 bytes at 1500, 3448 at 3500, 8944 at
// 9000. 0 if nothing does.
TACIT_INLINE __u32 tacit_elements(__u32 lanes, __u32 mtu) {
    const __u32 overhead = TACIT_IP_UDP_NBYTES + TACIT_HEADER_NBYTES, bits = tacit_bits_down(lanes);
    __u32 nbytes = mtu > overhead ? mtu - overhead : 0;
    if (nbytes > TACIT_MOST_PAYLOAD) nbytes = TACIT_MOST_PAYLOAD;
    return bits ? nbytes * 8 / bits / TACIT_ELEMENTS_MULTIPLE * TACIT_ELEMENTS_MULTIPLE : 0;
}

// Bytes of a message that fit into a packet of rows on a path of this MTU: 1424 at 1500, 3424 at 3500, 8928
// at 9000. 0 if nothing does.
TACIT_INLINE __u32 tacit_rows_room(__u32 mtu) {
    const __u32 overhead = TACIT_IP_UDP_NBYTES + TACIT_HEADER_NBYTES + TACIT_ROWS_NBYTES;
    const __u32 nbytes = mtu > overhead ? (mtu - overhead) / 16 * 16 : 0;
    return nbytes < TACIT_MOST_ROWS ? nbytes : TACIT_MOST_ROWS;
}

// Whether chunk a comes after chunk b. Right as long as they are less than 2^31 apart.
TACIT_INLINE int tacit_after(__u32 a, __u32 b) { return (__s32)(a - b) > 0; }

// An IPv4 address and a UDP port, both in network order: as they stand in the packet and in sockaddr_in.
struct tacit_address {
    __u32 ip;
    __u16 port;
    __u16 unused;
};
