// A rank's way to the aggregator: sends a vector in chunks, collects their sums, repairs what the network
// loses. Linux.
//
// A window over the job's S slots that clocks itself: chunk k + S is sent when the result of chunk k is here.
// What is lost shows in one of two ways:
//   - results of chunks sent later are here already: sent again at once;
//   - nothing comes for longer than measured round trips allow: a few are sent again, and a probe asks
//   whether
//     the plane is there. Then the pause doubles: most likely another rank is late, and copies would only
//     cost.
// So a rank that is seconds late costs its peers some packets, and a gap that its lateness hid is found when
// the results behind it come.
//
// In a lossy job (lossy.h) what a rank has sent need not arrive. The window is `window` chunks without a
// result, in order, so that one that is repaired holds up no later one; a chunk without a result is asked for
// with a settle, and sent again only if that does not help; after the last chunk, a settle says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "plane.h"
#include "udp_plane.h"

namespace tacit {

// X(name, its name in Python)
#define TACIT_OUTCOMES(X)                                                               \
    X(running, "running") /* never leaves the core */                                   \
    X(done, "done")                                                                     \
    X(silent, "silent")   /* the plane does not answer, although probed */              \
    X(stalled, "stalled") /* it answers, but the sum does not come: somebody is late */ \
    X(unknown, "unknown") /* it does not know the job: it has been restarted */         \
    X(behind, "behind")   /* the others have gone on without this rank */

enum class Outcome {
#define TACIT_OUTCOME(name, text) name,
    TACIT_OUTCOMES(TACIT_OUTCOME)
#undef TACIT_OUTCOME
};

// Smooths durations as RFC 6298 does, and says how long to wait for the next one.
class RoundTrips {
  public:
    void add(std::uint64_t sample_ns);
    std::uint64_t timeout_ns() const;
    std::uint64_t smoothed_ns() const { return smoothed_ns_; }
    std::uint64_t samples() const { return samples_; }

  private:
    std::uint64_t smoothed_ns_ = 0, spread_ns_ = 0, samples_ = 0;
};

struct ClientStats {
    std::uint64_t reduces = 0, chunks = 0;                          // finished
    std::uint64_t data_nbytes = 0, result_nbytes = 0, busy_ns = 0;  // of finished reduces: payloads, time
    std::uint64_t sent = 0;                                         // packets with data, copies too
    std::uint64_t repaired = 0;  // of them, sent again because later chunks had results
    std::uint64_t timeouts = 0;  // of them, because nothing came
    std::uint64_t settles = 0;   // in a lossy job, of the repaired and the timeouts too
    std::uint64_t probes = 0, echoes = 0;
    std::uint64_t received = 0;  // packets of this job
    std::uint64_t late = 0;      // of them, results that were here already
    std::uint64_t foreign = 0;   // packets that are not of this job
    std::uint64_t refused = 0;   // times that the plane's host said: nobody listens there
    std::uint64_t unsent = 0;    // packets that the kernel would not take
};

// Bound when built, so that its port is known. One thread at a time.
class Client {
  public:
    // Port 0 picks one.
    Client(tacit_address bind, int buffer_nbytes);
    ~Client();

    tacit_address address() const { return address_; }

    // From now on `rank` of this job; the next vector's first chunk is `chunk`, the same on all ranks.
    // `segment`: the plane takes runs of packets that the kernel is to cut (UDP_SEGMENT). A kernel plane does
    // not: where a virtual link leads to it nobody has cut them yet, and it drops them.
    // `window`: the job is lossy, and so many chunks may be without a result; 0: it is not.
    void start(const Job& job, int rank, tacit_address plane, std::uint32_t chunk, bool segment,
               std::uint32_t window = 0);

    // A vector to be summed: packed as the job's lanes say; both spans must live until done or abandon().
    void begin(std::span<const std::uint8_t> data, std::span<std::uint8_t> out, std::size_t numel);
    // The caller's patience starts here, anew each time.
    void attend();
    // Works until it knows an outcome, for `slice_ns` at most. `settle_ns` without a result: whoever came is
    // summed up, if they are a quorum; 0: never.
    Outcome run(std::uint64_t patience_ns, std::uint64_t settle_ns, std::uint64_t slice_ns);
    // Gives the vector up; chunk numbers go on behind it.
    void abandon();
    void close();

    std::uint32_t next_chunk() const { return next_; }
    // Between two vectors: chunks from the next one on whose results have come already, without this rank.
    std::uint32_t ahead();
    std::span<const std::uint8_t> counts() const { return counts_; }  // ranks in each chunk's sum
    bool saturated() const { return saturated_; }

    const ClientStats& stats() const { return stats_; }
    const RoundTrips& round_trips() const { return moving_; }
    std::uint64_t timeout_ns() const;

  private:
    struct Buffers;
    struct Slot {
        std::uint64_t index = 0, order = 0, sent_ns = 0;
        bool waiting = false, queued = false, again = false;
        bool asked = false;  // since its data were sent
    };
    struct Flight {  // one transmission; void once its slot has another order or its result
        std::size_t slot;
        std::uint64_t order, sent_ns;
    };

    void receive_all(std::size_t messages, std::uint64_t now);
    void take(std::span<const std::uint8_t> packet, std::uint64_t now);
    void take_result(const tacit_header& header, std::span<const std::uint8_t> lanes, std::uint64_t now);
    void learn(std::uint64_t now);

    bool front();  // drops void flights; whether one is left
    void queue(std::size_t slot);
    void queue_next(std::uint64_t index);
    void go_on();
    void repair();
    void fire(std::uint64_t now);
    std::uint64_t pause_ns() const;
    std::uint64_t expires_ns() const;
    std::uint64_t due_ns() const;
    std::uint64_t settle_due_ns() const;
    void settle(std::uint64_t now);
    Outcome judge(std::uint64_t now) const;

    void send_all();
    void send_data(std::span<const std::size_t> slots, std::size_t most);
    void send_asks();
    void send_header(tacit_kind kind, std::uint32_t chunk);
    tacit_header header(tacit_kind kind, std::uint32_t chunk) const;
    std::span<const std::uint8_t> payload(std::uint64_t index) const;

    Fd socket_;
    tacit_address address_;
    bool segment_ = false;
    std::unique_ptr<Buffers> buffers_;
    ClientStats stats_;

    // The job.
    bool started_ = false;
    std::uint8_t id_ = 0, rank_ = 0;
    tacit_job terms_{};
    std::uint32_t next_ = 0;
    bool lossy_ = false;
    std::uint32_t window_ = 0, places_ = 0;  // chunks without a result; from the first of them to the last
    std::uint32_t newest_result_ = 0;        // of any chunk of the job

    // The vector on its way.
    bool active_ = false;
    std::span<const std::uint8_t> data_;
    std::span<std::uint8_t> out_;
    std::vector<std::uint8_t> tail_;  // the last chunk's data, filled up with zeros
    std::uint32_t first_ = 0;
    std::uint64_t chunks_ = 0, finished_ = 0;
    std::uint64_t begun_ = 0, oldest_ = 0;  // of a lossy job: chunks sent; the first without a result
    bool said_all_ = false;                 // that its last chunk is sent
    std::vector<std::uint8_t> counts_;
    bool saturated_ = false, unknown_ = false, behind_ = false;

    // The window.
    std::vector<Slot> slots_;
    std::deque<Flight> flights_;  // in the order they were sent
    std::vector<std::size_t> to_send_;
    std::uint64_t order_ = 0, newest_ = 0;  // of the last transmission; of the last one with a result

    // Clocks. `moving_`: from when a chunk was sent (or, if later, the first result came after a pause) to
    // its result. `starting_`: from a vector's first packet to its first result, which is how late others may
    // be.
    RoundTrips moving_, starting_;
    std::uint64_t drain_ns_ = 0;  // from one result to the next, smoothed
    std::uint64_t patience_ns_ = 0, settle_ns_ = 0;
    std::uint64_t began_ns_ = 0, attended_ns_ = 0, epoch_ns_ = 0, heard_ns_ = 0, progress_ns_ = 0;
    std::uint64_t fired_ns_ = 0, settled_ns_ = 0, worst_ns_ = 0, came_ = 0;
    unsigned backoff_ = 0;
    std::size_t budget_ = 0;
    bool moved_ = false, fresh_ = false;  // since the last time-out, a result; one of a chunk sent only once
    bool short_ = false;                  // the last sum missed somebody
};

}  // namespace tacit
