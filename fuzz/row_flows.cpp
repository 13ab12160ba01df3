// Mutated packets into the ends of row flows, under ASan and UBSan: fuzz/run row_flows [packets] [seed].
//
// Three members, and a plane between them that spoils what it passes on: fields of both headers, lengths,
// order, copies, losses, refusals. Every other life of a job is spared, and must deliver every byte. In the
// others nothing is promised but that a member neither reads nor writes where it should not, and that it
// answers.
#include "../native/row_flows.h"

#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

using namespace tacit;
using std::size_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr size_t members = 3, exchanges = 12, room_nbytes = 1424;
constexpr uint64_t cookie = 0x0123456789abcdef;
constexpr size_t header_nbytes = sizeof(tacit_header) + sizeof(tacit_rows);

struct Random {  // splitmix64
    uint64_t state;
    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    uint32_t below(uint64_t n) { return uint32_t(next() % n); }
    bool one_in(uint64_t n) { return below(n) == 0; }
};

// Passes packets on, spoiled if it is told to.
class Path {
  public:
    Path(uint64_t seed, bool spoils)
        : random_{seed}, spoils_(spoils), socket_(open_udp(here(), 1 << 22, timeval{0, 100'000})) {}
    ~Path() { stop(); }
    static tacit_address here() { return {htonl(INADDR_LOOPBACK), 0, 0}; }
    tacit_address address() const { return address_of(socket_); }
    void start(std::vector<tacit_address> to) {
        to_ = std::move(to);
        thread_ = std::thread([this] { serve(); });
    }
    void stop() {
        stopping_ = true;
        if (thread_.joinable()) thread_.join();
    }
    uint64_t packets() const { return packets_; }

  private:
    void serve() {
        std::vector<uint8_t> packet(65536);
        while (!stopping_) {
            pollfd ready{socket_, POLLIN, 0};
            if (::poll(&ready, 1, 5) <= 0) continue;
            const ssize_t nbytes = ::recv(socket_, packet.data(), packet.size(), MSG_DONTWAIT);
            if (nbytes > 0) pass({packet.data(), size_t(nbytes)});
        }
    }

    void pass(std::span<uint8_t> packet) {
        tacit_header header;
        if (packet.size() < sizeof header) return;
        std::memcpy(&header, packet.data(), sizeof header);
        ++packets_;
        if (random_.one_in(50)) return;
        if (header.kind == TACIT_KIND_PROBE) {
            header.kind = TACIT_KIND_ECHO;
            return send({reinterpret_cast<const uint8_t*>(&header), sizeof header}, header.rank);
        }
        const size_t to = header.world;
        for (int copies = random_.one_in(20) ? 2 : 1; copies; --copies) {
            if (!spoils_ || random_.one_in(3)) {
                send(packet, to);
                continue;
            }
            std::vector<uint8_t> spoiled(packet.begin(), packet.end());
            spoil(spoiled);
            send(spoiled, random_.one_in(30) ? random_.below(members) : to);
        }
        if (random_.one_in(30)) kept_.assign(packet.begin(), packet.end());
        if (random_.one_in(30) && !kept_.empty()) send(kept_, random_.below(members));
    }

    void spoil(std::vector<uint8_t>& packet) {
        const uint32_t how = random_.below(8);
        if (how == 0) packet.resize(random_.below(packet.size() + 1));
        if (how == 1) packet.resize(packet.size() + random_.below(64));
        if (how == 2 && packet.size() > 1) packet[1] = uint8_t(random_.below(12));  // the kind
        if (how < 3) return;
        for (uint32_t n = 1 + random_.below(3); n;
             --n) {  // behind the cookie, mostly: else it is a stranger's
            const size_t low = random_.one_in(20) ? 0 : random_.one_in(2) ? 2 : 14;
            const size_t at = low + random_.below(header_nbytes - low);
            if (at < packet.size() && (at < 6 || at >= 14))
                packet[at] = random_.one_in(2) ? uint8_t(packet[at] + 1 - 2 * random_.below(2))
                                               : uint8_t(random_.next());
        }
    }

    void send(std::span<const uint8_t> packet, size_t to) {
        if (to >= to_.size()) return;
        const sockaddr_in there = sockaddr_of(to_[to]);
        (void)::sendto(socket_, packet.data(), packet.size(), 0, reinterpret_cast<const sockaddr*>(&there),
                       sizeof there);
    }

    Random random_;
    bool spoils_;
    Fd socket_;
    std::vector<tacit_address> to_;
    std::vector<uint8_t> kept_;
    std::atomic<bool> stopping_ = false;
    std::atomic<uint64_t> packets_ = 0;
    std::thread thread_;
};

// A message whose memory ends where it does, so that a byte too far is caught.
using Message = std::unique_ptr<uint8_t[]>;

uint8_t byte_of(size_t exchange, size_t from, size_t to, size_t at) {
    return uint8_t(exchange * 31 + from * 7 + to * 3 + at * 13);
}

[[noreturn]] void wrong(const char* what, uint64_t seed) {
    std::fprintf(stderr, "%s; seed %llu\n", what, static_cast<unsigned long long>(seed));
    std::exit(1);
}

// One job from its start to its end. Packets that passed.
uint64_t live(uint64_t seed, bool spoils) {
    Random random{seed};
    Path path(seed + 1, spoils);
    std::vector<std::unique_ptr<RowFlows>> ends;
    std::vector<tacit_address> where;
    for (size_t own = 0; own < members; ++own) {
        ends.push_back(std::make_unique<RowFlows>(Path::here(), 1 << 22));
        where.push_back(ends.back()->address());
    }
    path.start(where);
    const uint32_t first = uint32_t(random.next());
    for (size_t own = 0; own < members; ++own)
        ends[own]->start({7, members, TACIT_LANES_I32, cookie, members, own, path.address(), room_nbytes,
                          1 << 16, first, false});
    size_t sizes[members][members];
    bool good = true;
    for (size_t number = 0; number < exchanges && good; ++number) {
        Message parts[members][members], rooms[members][members];
        for (size_t a = 0; a < members; ++a)
            for (size_t b = 0; b < members; ++b) {
                const size_t nbytes = sizes[a][b] =
                    random.one_in(4) ? 0 : random.below(random.one_in(3) ? 60'000 : 3000);
                parts[a][b] = std::make_unique<uint8_t[]>(nbytes);
                rooms[b][a] = std::make_unique<uint8_t[]>(nbytes);
                for (size_t i = 0; i < nbytes; ++i) parts[a][b][i] = byte_of(number, a, b, i);
            }
        for (size_t own = 0; own < members && good; ++own) {
            std::vector<std::span<const uint8_t>> from;
            std::vector<std::span<uint8_t>> to;
            for (size_t other = 0; other < members; ++other) {
                from.emplace_back(parts[own][other].get(), sizes[own][other]);
                to.emplace_back(rooms[own][other].get(), sizes[other][own]);
            }
            ends[own]->begin(from, to);
            if (random.one_in(4)) std::this_thread::sleep_for(std::chrono::milliseconds(random.below(4)));
        }
        for (size_t own = 0; own < members; ++own)
            good &= ends[own]->wait(spoils ? 60'000'000 : 30'000'000'000) == FlowOutcome::done;
        if (!good && !spoils) wrong("an exchange did not end", seed);
        for (size_t a = 0; !spoils && a < members; ++a)
            for (size_t b = 0; b < members; ++b)
                for (size_t i = 0; a != b && i < sizes[a][b]; ++i)
                    if (rooms[b][a][i] != byte_of(number, a, b, i))
                        wrong("a byte is not what was sent", seed);
        for (const auto& end : ends) {
            if (!good) end->abandon();
            (void)end->here();
            (void)end->acknowledged();
        }
    }
    for (const auto& end : ends) end->close();
    path.stop();
    return path.packets();
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t wanted = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 300'000;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    uint64_t packets = 0, lives = 0;
    for (; packets < wanted; ++lives) packets += live(seed * 1'000'003 + lives, lives % 2);
    std::printf("%llu packets in %llu lives of a job of %zu members: no finding\n",
                static_cast<unsigned long long>(packets), static_cast<unsigned long long>(lives), members);
}
