// The user-space plane on real sockets: threads that receive, add and send in batches. Linux.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "plane.h"
#include "udp.h"

namespace tacit {

struct SocketStats {
    std::uint64_t overrun = 0;   // packets that found the receive buffer full; the kernel counts them
    std::uint64_t unsent = 0;    // answers that the kernel would not take
    std::uint64_t failures = 0;  // calls to receive that failed
    std::uint64_t receive_buffer_nbytes = 0;  // of one socket, as granted
};

// Bound when built, so that its port is known; serves from start() to stop(). All functions may be called
// from any thread at any time.
class UdpPlane {
  public:
    // Port 0 picks one. More than one thread: a socket each, and the kernel keeps a rank's packets on one of
    // them. `buffer_nbytes` is asked for; without CAP_NET_ADMIN, net.core.rmem_max is granted at most.
    // std::system_error if the address cannot be had.
    UdpPlane(tacit_address listen, std::size_t slots, int threads, int buffer_nbytes);
    ~UdpPlane();

    tacit_address address() const { return address_; }
    void start();
    void stop();  // for good: returns when the threads have ended and the port is free

    void add_job(const Job& job);
    void remove_job(int id);
    std::vector<int> jobs() const;
    Counts counts() const { return plane_.counts(); }
    JobStats stats(int id) const;
    SocketStats sockets() const;

    static std::uint64_t now_ns();  // the clock of JobStats

  private:
    struct Worker;
    void serve(Worker& worker);
    std::vector<std::unique_lock<std::mutex>> between_batches();

    Plane plane_;
    tacit_address address_;
    std::vector<std::unique_ptr<Worker>> workers_;
    mutable std::mutex control_;  // one caller at a time where jobs come, go or are looked at
    std::atomic<bool> stopping_ = false;
    std::vector<std::jthread> threads_;
};

}  // namespace tacit
