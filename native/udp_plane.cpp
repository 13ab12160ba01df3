#include "udp_plane.h"

#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>

namespace tacit {
namespace {

using std::size_t;
using std::uint64_t;
using std::uint8_t;

constexpr size_t batch =
    64;  // packets a call: half a megabyte at most, so that they stay in the second cache
constexpr size_t frame = (TACIT_LOWER_NBYTES + TACIT_HEADER_NBYTES + TACIT_MOST_PAYLOAD + 63) / 64 * 64;
constexpr size_t frames_nbytes = frame * batch;
constexpr timeval tick{0, 1000};        // while there are lossy jobs, which have deadlines
constexpr size_t most_messages = 1024;  // sendmmsg() takes no more at a time (UIO_MAXIOV)

}  // namespace

struct UdpPlane::Worker {
    Fd socket;
    uint64_t receive_buffer_nbytes, last_overrun = 0;
    bool ticks = false;
    std::mutex receiving;  // held while a batch is judged: jobs come and go in between
    std::atomic<uint64_t> unsent = 0, failures = 0;

    std::unique_ptr<uint8_t, decltype(&std::free)> frames{
        static_cast<uint8_t*>(std::aligned_alloc(64, frames_nbytes)), std::free};
    sockaddr_in from[batch];
    iovec room[batch];
    mmsghdr incoming[batch];
    Outbox out{batch, batch};
    std::vector<size_t> order;  // of the answers; what follows is in this order
    std::vector<sockaddr_in> to;
    std::vector<iovec> pieces;
    std::vector<SegmentSize> controls;
    std::vector<mmsghdr> outgoing;

    explicit Worker(Fd&& fd) : socket(std::move(fd)) {
        if (!frames) throw std::bad_alloc();
        for (size_t i = 0; i < batch; ++i) {
            room[i] = {frames.get() + i * frame + TACIT_LOWER_NBYTES,
                       TACIT_HEADER_NBYTES + TACIT_MOST_PAYLOAD};
            incoming[i].msg_hdr = {&from[i], sizeof from[i], &room[i], 1, nullptr, 0, 0};
        }
        receive_buffer_nbytes = memory(SK_MEMINFO_RCVBUF);
    }

    uint64_t memory(int which) const {
        std::uint32_t found[SK_MEMINFO_VARS] = {};
        socklen_t nbytes = sizeof found;
        ::getsockopt(socket, SOL_SOCKET, SO_MEMINFO, found, &nbytes);
        return found[which];
    }

    uint64_t overrun() const { return socket < 0 ? last_overrun : memory(SK_MEMINFO_DROPS); }

    void close() {
        last_overrun = overrun();
        socket.reset();
    }

    // Waits for a packet and takes those that are there too: how many, or -1.
    int receive() {
        for (auto& message : incoming) message.msg_hdr.msg_namelen = sizeof(sockaddr_in);
        return ::recvmmsg(socket, incoming, batch, MSG_WAITFORONE, nullptr);
    }

    // Whether receive() returns in time to look at deadlines.
    void tick_if(bool lossy) {
        if (lossy != std::exchange(ticks, lossy))
            set_option(socket, SOL_SOCKET, SO_RCVTIMEO, lossy ? tick : timeval{});
    }

    // Ends the wait of receive(), now and later. It is an error on a UDP socket without a peer, and does what
    // it should all the same: inet_shutdown() wakes whoever waits.
    void wake() { ::shutdown(socket, SHUT_RD); }

    void judge(Plane& plane, size_t packets) {
        const std::lock_guard lock(receiving);
        const uint64_t now = now_ns();
        for (size_t i = 0; i < packets; ++i) {
            const auto& message = incoming[i];
            if (message.msg_hdr.msg_flags & MSG_TRUNC) {
                plane.receive_oversized();
                continue;
            }
            plane.receive({static_cast<const uint8_t*>(room[i].iov_base), message.msg_len},
                          {from[i].sin_addr.s_addr, from[i].sin_port, 0}, now, out);
        }
        if (ticks) plane.expire(now, out);
    }

    // Answers of one size to one rank go as one message, which the kernel cuts into packets as late as it
    // can: 0.6 to 0.8 of the time a packet (docs/decisions/0008-aggregator-wire.md).
    void gather(std::span<const Answer> answers) {
        const auto key = [&](size_t i) {
            return std::tuple(answers[i].to.ip, answers[i].to.port, answers[i].packet.size());
        };
        order.resize(answers.size());
        std::iota(order.begin(), order.end(), size_t(0));
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
        to.resize(answers.size());
        pieces.resize(answers.size());
        controls.resize(answers.size());
        outgoing.clear();
        for (size_t i = 0, end; i < order.size(); i = end) {
            const size_t nbytes = answers[order[i]].packet.size(),
                         most = answers[order[i]].segment ? std::min(most_pieces, most_udp / nbytes) : 1;
            for (end = i; end < order.size() && end - i < most && key(order[end]) == key(order[i]); ++end)
                pieces[end] = {const_cast<uint8_t*>(answers[order[end]].packet.data()), nbytes};
            to[i] = sockaddr_of(answers[order[i]].to);
            msghdr message{&to[i], sizeof to[i], &pieces[i], end - i, nullptr, 0, 0};
            if (end - i > 1) controls[i].attach(message, std::uint16_t(nbytes));
            outgoing.push_back({message, 0});
        }
    }

    void send() {
        gather(out.answers());
        for (size_t sent = 0; sent < outgoing.size();) {
            const size_t some = std::min(outgoing.size() - sent, most_messages);
            const int done = ::sendmmsg(socket, outgoing.data() + sent, unsigned(some), 0);
            if (done > 0)
                sent += size_t(done);
            else if (errno != EINTR)
                send_apart(outgoing[sent++].msg_hdr);
        }
        out.clear();
    }

    // Packet by packet, where a device or a path of a smaller MTU would not have them cut.
    void send_apart(const msghdr& message) {
        for (size_t i = 0; i < message.msg_iovlen; ++i) {
            const msghdr one{message.msg_name, message.msg_namelen, message.msg_iov + i, 1, nullptr, 0, 0};
            if (::sendmsg(socket, &one, MSG_DONTWAIT) < 0)
                unsent.fetch_add(1, std::memory_order_relaxed);  // its rank will ask again
        }
    }
};

UdpPlane::UdpPlane(tacit_address listen, size_t slots, int threads, int buffer_nbytes)
    : plane_(slots), address_(listen) {
    if (threads < 1 || threads > 64)
        throw std::invalid_argument("threads=" + std::to_string(threads) + ": from 1 to 64");
    for (int i = 0; i < threads; ++i) {
        workers_.push_back(
            std::make_unique<Worker>(open_udp(address_, buffer_nbytes, timeval{1, 0}, threads > 1)));
        address_ = address_of(workers_.back()->socket);  // the first has picked a port
    }
}

UdpPlane::~UdpPlane() { stop(); }

void UdpPlane::start() {
    const std::lock_guard lock(control_);
    if (stopping_ || !threads_.empty()) throw std::logic_error("a plane starts once");
    for (auto& worker : workers_) threads_.emplace_back([this, &worker] { serve(*worker); });
}

void UdpPlane::stop() {
    const std::lock_guard lock(control_);
    stopping_ = true;
    for (auto& worker : workers_) worker->wake();
    threads_.clear();  // joins
    for (auto& worker : workers_) worker->close();
}

void UdpPlane::serve(Worker& worker) {
    ::pthread_setname_np(::pthread_self(), "tacit-plane");  // for `top -H`
    while (true) {
        const int packets = worker.receive();
        if (stopping_) return;
        if (packets > 0 || errno == EAGAIN) {
            worker.judge(plane_, size_t(std::max(packets, 0)));
            worker.send();
        } else if (errno != EINTR) {
            worker.failures.fetch_add(1, std::memory_order_relaxed);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));  // whatever it is, it may not spin
        }
    }
}

// ---- jobs and figures

void UdpPlane::add_job(const Job& job) {
    const std::lock_guard lock(control_);
    const auto still = between_batches();
    plane_.add_job(job);
    for (auto& worker : workers_) worker->tick_if(plane_.has_lossy_jobs());
}

void UdpPlane::remove_job(int id) {
    const std::lock_guard lock(control_);
    const auto still = between_batches();
    plane_.remove_job(id);
    for (auto& worker : workers_) worker->tick_if(plane_.has_lossy_jobs());
}

std::vector<std::unique_lock<std::mutex>> UdpPlane::between_batches() {
    std::vector<std::unique_lock<std::mutex>> locks;
    for (auto& worker : workers_) locks.emplace_back(worker->receiving);
    return locks;
}

std::vector<int> UdpPlane::jobs() const {
    const std::lock_guard lock(control_);
    return plane_.jobs();
}

JobStats UdpPlane::stats(int id) const {
    const std::lock_guard lock(control_);
    return plane_.stats(id);
}

SocketStats UdpPlane::sockets() const {
    const std::lock_guard lock(control_);
    SocketStats found;
    for (const auto& worker : workers_) {
        found.overrun += worker->overrun();
        found.unsent += worker->unsent;
        found.failures += worker->failures;
    }
    found.receive_buffer_nbytes = workers_.front()->receive_buffer_nbytes;
    return found;
}

uint64_t UdpPlane::now_ns() {
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

}  // namespace tacit
