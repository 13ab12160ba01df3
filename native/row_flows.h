// Messages between the members of a job, passed on by its plane: a rank's light host stack for rows. Linux.
//
// One socket and one thread a member, whatever the number of members. Exchanges are numbered: in number k
// each member has one message for every other one, and it is over here when all of theirs have come and all
// of ours are acknowledged. So nobody is more than one number ahead of another, and messages of a flow never
// overlap.
//
// A flow, from one member to another, numbers its packets.
//   - Exactly once: the receiver keeps `next`, before which all have come, and a bitmap of 1024 behind it.
//   - No incast: towards one receiver a sender has window / (members - 1) bytes on their way, so all senders
//     together have no more than `window` there, whatever their number.
//   - Repaired one by one: what three packets that left later have overtaken is sent again at once, else
//     after a time-out as in RFC 6298, which doubles while nothing moves.
//   - Acknowledged with whatever goes the other way; alone at least every second packet (of a batch: once),
//     at the end of a message, and after a short delay.
// What comes before the receiver has begun its number is kept, up to the sender's credit, and acknowledged
// when it begins; until then it answers that it is there.
#pragma once

#include <array>
#include <bitset>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "client.h"
#include "udp.h"
#include "wire.h"

namespace tacit {

// X(name, its name in Python)
#define TACIT_FLOW_OUTCOMES(X)                                                               \
    X(running, "running")                                                                    \
    X(done, "done")                                                                          \
    X(silent, "silent")         /* nothing at all has come for a while, although probed */   \
    X(unknown, "unknown")       /* the plane does not know the job: it has been restarted */ \
    X(narrow, "narrow")         /* a member answers, but our packets do not reach it */      \
    X(mismatched, "mismatched") /* a message has another length than is expected here */

enum class FlowOutcome {
#define TACIT_OUTCOME(name, text) name,
    TACIT_FLOW_OUTCOMES(TACIT_OUTCOME)
#undef TACIT_OUTCOME
};

// X(name): counted since the socket was opened. Of a packet with a message, copies too: sent.
#define TACIT_FLOW_COUNTS(X)                                                            \
    X(exchanges)                                                                        \
    X(sent)                                                                             \
    X(sent_nbytes) /* of messages, copies too */                                        \
    X(repaired)    /* of those sent: again, because later ones had arrived */           \
    X(timeouts)    /* of those sent: again, because nothing came */                     \
    X(acks)        /* acknowledgements alone */                                         \
    X(probes)                                                                           \
    X(received)        /* packets of this job */                                        \
    X(received_nbytes) /* of messages, each byte once */                                \
    X(repeated)        /* of those received: here already */                            \
    X(early)           /* of those received: before this member had begun the number */ \
    X(foreign)         /* packets that are not of this job, or contradict themselves */ \
    X(refused)         /* times that the plane's host reported: nobody listens there */ \
    X(unsent)          /* packets that the kernel would not take */                     \
    X(wakes)           /* of the thread */

struct FlowStats {
#define TACIT_COUNT(name) std::uint64_t name = 0;
    TACIT_FLOW_COUNTS(TACIT_COUNT)
#undef TACIT_COUNT
};

struct FlowTerms {
    std::uint8_t job, world, lanes;  // world and lanes as the plane wants them in a probe
    std::uint64_t cookie;
    std::size_t members, own;
    tacit_address plane;
    std::size_t room_nbytes;    // of a message in a packet
    std::size_t window_nbytes;  // on their way to one receiver, from all senders
    std::uint32_t first;        // number of the first packet of every flow, and behind the first exchange
    bool segment;               // the plane takes runs of packets that the kernel is to cut (UDP_SEGMENT)
};

// All functions but address() are for one thread at a time, which is not the one inside.
class RowFlows {
  public:
    // Bound when built, so that its port is known; port 0 picks one.
    RowFlows(tacit_address bind, int buffer_nbytes);
    ~RowFlows();

    tacit_address address() const { return address_; }

    // Once: is this member from now on.
    void start(const FlowTerms& terms);
    // The next exchange: what goes to each member, and where what it has for us is to come to. The place of
    // this member is not looked at. Both must live until it is done or abandoned.
    void begin(std::vector<std::span<const std::uint8_t>> parts, std::vector<std::span<std::uint8_t>> rooms);
    // Waits for an outcome, for `slice_ns` at most.
    FlowOutcome wait(std::uint64_t slice_ns);
    // Gives the exchange up, and all later ones.
    void abandon();
    // Ends the thread and frees the port.
    void close();

    // Of the current exchange: whether a member's message is here, and whether it has acknowledged ours.
    std::vector<bool> here() const;
    std::vector<bool> acknowledged() const;
    // What a mismatch is about: the member, its message's length, the expected one.
    std::array<std::uint64_t, 3> mismatch() const;
    FlowStats stats() const;
    std::uint64_t round_trip_ns() const;  // smoothed, of the slowest flow

  private:
    static constexpr std::uint32_t most_ahead = 1024;  // packets of a flow that may be on their way

    struct Sent {  // a packet; `order` counts transmissions of its flow
        std::uint64_t order = 0, sent_ns = 0;
        bool arrived = false, queued = false;
        std::uint8_t copies = 0;
    };
    struct Outward {  // our flow to a member
        std::span<const std::uint8_t> part;
        std::uint32_t first = 0, count = 0;                      // packets of the message
        std::uint32_t oldest = 0;                                // not acknowledged
        std::uint32_t fresh = 0;                                 // the next that has never been sent
        std::vector<Sent> sent = std::vector<Sent>(most_ahead);  // by number
        std::vector<std::uint32_t> again;                        // numbers to send once more
        std::array<std::uint64_t, 3> newest{};  // orders of the last transmissions known to have arrived
        std::uint64_t order = 0, progress_ns = 0, heard_ns = 0, begun_ns = 0;
        unsigned backoff = 0;
        bool begun = false, held = false;  // the receiver has begun this number; it had not when packets came
        RoundTrips round_trips;
        bool complete() const { return oldest == first + count; }
        std::uint32_t left() const { return first + count - fresh; }  // packets that were never sent
        void note(std::uint64_t arrived) {
            for (auto& each : newest)
                if (arrived > each) std::swap(arrived, each);
        }
    };
    struct Inward {  // a member's flow to us
        std::span<std::uint8_t> room;
        std::uint32_t first = 0, count = 0;
        std::uint32_t next = 0;                                    // all before it have come
        std::bitset<most_ahead> ahead;                             // by number: of those behind it
        std::map<std::uint32_t, std::vector<std::uint8_t>> early;  // packets of the exchange after this one
        std::uint32_t unacknowledged = 0;                          // packets since our last acknowledgement
        std::uint64_t acknowledge_ns = 0;                          // when it is due; 0: none is
        std::uint64_t progress_ns = 0, reminded_ns = 0;
        bool complete() const { return next == first + count; }
        std::uint64_t remind_ns() const;
    };
    struct Flow {
        Outward out;
        Inward in;
    };
    struct Buffers;

    void serve();
    void wake() const;
    void receive_all(std::size_t messages, std::uint64_t now);
    void take(std::span<const std::uint8_t> packet, std::uint64_t now);
    void take_rows(const tacit_header& header, std::span<const std::uint8_t> packet, std::uint64_t now);
    void take_message(std::size_t from, const tacit_header& header, const tacit_rows& rows,
                      std::span<const std::uint8_t> payload, std::uint64_t now);
    void keep(Inward& in, std::uint32_t number, std::span<const std::uint8_t> packet, std::uint64_t now);
    void take_acknowledgement(Outward& out, const tacit_rows& rows, bool begun, std::uint64_t now);
    void repair(Outward& out);
    void fire(Outward& out, std::uint64_t now);
    std::uint64_t due_ns(const Outward& out) const;
    std::uint64_t wake_ns() const;
    void judge(std::uint64_t now);
    void settle(FlowOutcome outcome);

    bool send_messages(std::uint64_t now);  // whether there is more to send
    void send_acknowledgements(std::uint64_t now);
    void order_by_what_is_left();
    void add_packet(std::size_t to, std::uint32_t number, std::uint64_t now);
    void flush();
    void send_header(tacit_kind kind);
    tacit_header header(tacit_kind kind, std::size_t to) const;
    tacit_rows rows_to(std::size_t to) const;
    void acknowledge(Inward& in, std::uint64_t due_ns);
    std::span<const std::uint8_t> payload(const Outward& out, std::uint32_t number) const;
    bool active() const { return outcome_ == FlowOutcome::running; }

    Fd socket_, wake_;
    tacit_address address_;
    std::unique_ptr<Buffers> buffers_;

    mutable std::mutex state_;  // guards what follows, but for `thread_`
    std::condition_variable changed_;
    FlowTerms terms_{};
    std::uint32_t credit_ = 0;  // packets
    std::vector<Flow> flows_;   // by member
    FlowStats stats_;
    FlowOutcome outcome_ = FlowOutcome::done;
    bool stopping_ = false, broken_ = false, unknown_ = false;
    std::uint16_t number_ = 0;  // of the current exchange, or of the last one
    std::uint64_t heard_ns_ = 0, probed_ns_ = 0;
    unsigned unanswered_ = 0;  // probes
    std::array<std::uint64_t, 3> mismatch_{};
    std::vector<std::size_t> turns_;

    std::thread thread_;
};

}  // namespace tacit
