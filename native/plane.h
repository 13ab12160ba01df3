// The aggregator's user-space plane, without sockets: a packet in, packets out. Lays out nothing and decides
// nothing itself: wire.h and slot.h do.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "slot.h"

namespace tacit {

// What control tells a plane: `data_nbytes`, `result_nbytes`, `world` and `members` of the terms follow from
// the rest.
struct Job {
    std::uint8_t id;
    tacit_job terms;
    std::vector<tacit_address> members;  // the ranks, then the shards; all zeros: has not joined
    tacit_upstream above{};              // if terms.upward
    bool segment_above = false;          // the parent takes runs of packets (UDP_SEGMENT)
    std::size_t shards = 0;              // how many of the members
    std::uint64_t deadline_ns = 0;       // of a lossy job (lossy.h); 0: it waits for all of its ranks
};

struct Answer {
    std::span<const std::uint8_t> packet;
    tacit_address to;
    bool segment = true;  // may leave in one message with others of its size to the same address
};

// The answers to a batch of packets. Sums are copies, so that they may be sent while other threads go on.
// Rows are the packets themselves, which stay where they are until clear().
class Outbox {
  public:
    // `packets` may be received between two clear(). Each may call up one chunk, and `spare` others together:
    // of lossy jobs, whose packets may close many.
    explicit Outbox(std::size_t packets, std::size_t spare = 0);
    std::span<const Answer> answers() const { return answers_; }
    void clear();
    bool take_spare();  // whether there is room for another one of those

    // A copy of header and payload, the payload at a multiple of 64 bytes.
    std::span<const std::uint8_t> packet(const tacit_header& header, std::span<const std::uint8_t> payload);
    void add(std::span<const std::uint8_t> packet, tacit_address to, bool segment = true) {
        answers_.push_back({packet, to, segment});
    }

  private:
    std::vector<std::uint8_t> bytes_;
    std::size_t used_ = 0, spare_, spare_used_ = 0;
    std::vector<Answer> answers_;
};

using Counts = std::array<std::uint64_t, TACIT_COUNTS>;  // by tacit_count

struct RankStats {
    std::uint64_t packets;   // that were let in
    std::uint64_t last_ns;   // when the last one came; 0: never
    std::uint32_t missing;   // unfinished chunks that wait for this rank
    std::uint64_t left_out;  // chunks that were closed without it
};

struct JobStats {
    Counts counts;
    std::uint64_t received_nbytes, answered_nbytes;  // headers and payloads of members' packets
    std::uint32_t unfinished;                        // chunks that wait for somebody
    std::uint32_t above;                             // of them, those that wait for the parent
    std::vector<RankStats> ranks;                    // and shards, behind them
};

class Plane {
  public:
    // `slots` are shared out among the jobs.
    explicit Plane(std::size_t slots);
    ~Plane();

    // Not while receive() or stats() runs. std::invalid_argument if the job contradicts itself, the plane or
    // another job.
    void add_job(const Job& job);
    void remove_job(int id);

    // The verdict on one packet; what is to be sent is added to `out`. Any number of threads at a time, each
    // with its own `out`. `now_ns` is any clock that does not go back.
    tacit_count receive(std::span<const std::uint8_t> packet, tacit_address from, std::uint64_t now_ns,
                        Outbox& out);
    // Closes what lossy jobs have waited for long enough; to be called often while there are any.
    void expire(std::uint64_t now_ns, Outbox& out);
    bool has_lossy_jobs() const { return lossy_jobs_ > 0; }
    // A packet that came without its end: more than TACIT_MOST_PAYLOAD.
    tacit_count receive_oversized();

    std::vector<int> jobs() const;
    Counts counts() const;
    JobStats stats(int id) const;

  private:
    struct Active;  // a job with its cells and counters
    struct Kernels;

    tacit_count judge(std::span<const std::uint8_t> packet, tacit_address from, std::uint64_t now_ns,
                      Outbox& out);
    tacit_count judge(Active& job, tacit_header& header, std::span<const std::uint8_t> payload,
                      tacit_address from, std::uint64_t now_ns, Outbox& out);
    tacit_count sum_up(Active& job, tacit_header& header, std::span<const std::uint8_t> payload, Outbox& out);
    tacit_count sum_up_lossy(Active& job, tacit_header& header, std::span<const std::uint8_t> payload,
                             std::uint64_t now_ns, Outbox& out);
    tacit_count take_lossy(Active& job, tacit_header& header, std::span<const std::uint8_t> payload,
                           std::uint64_t now_ns, Outbox& out);
    void close_unless_it_waits(Active& job, std::uint32_t chunk, std::uint8_t rank, Outbox& out);
    void close(Active& job, tacit_cell& cell, std::uint8_t rank, Outbox& out);
    tacit_count pass_on(Active& job, const tacit_header& header, std::span<const std::uint8_t> payload,
                        Outbox& out);
    tacit_count judge_result(Active& job, tacit_header& header, std::span<const std::uint8_t> payload,
                             tacit_address from, Outbox& out);
    void event(Active& job, tacit_count what);
    Active& find(int id) const;

    std::size_t slots_;
    std::unique_ptr<const Kernels> kernels_;
    std::array<std::unique_ptr<Active>, TACIT_MOST_JOBS> jobs_;
    std::array<Active*, TACIT_MOST_JOBS> by_parent_{};  // by the number that their parent gave them
    std::array<std::atomic<std::uint64_t>, TACIT_COUNTS> counts_{};
    std::atomic<int> lossy_jobs_ = 0;
};

}  // namespace tacit
