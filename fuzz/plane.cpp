// Mutated packets through the user-space plane, under ASan and UBSan: fuzz/run [packets] [seed].
//
// Ranks and shards of some jobs, and parents of some, send what they should, rows among it; most packets are
// then spoiled, cut, stretched, replayed or sent from elsewhere. Each lies at the very end of its memory, so
// that a byte read too far is caught. Jobs of all lane types and sizes come and go. The same seed gives the
// same packets.
#include "../native/plane.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

namespace {

using namespace tacit;
using std::size_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr size_t most_udp = 65507;
constexpr size_t plane_slots = 1024;
constexpr int job_ids[] = {0, 7, 100, 254, 255};

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
    template <class T, size_t N>
    T one_of(const T (&choices)[N]) {
        return choices[below(N)];
    }
};

// A job, and where its members are.
struct Playing {
    Job job;
    uint32_t chunk;

    tacit_address member(size_t rank) const { return job.members[rank % job.members.size()]; }
};

// Parents have numbers of their own: here each is another job's.
void add_upstream(Random& random, size_t index, Job& job) {
    job.terms.upward = 1;
    job.terms.quorum = uint8_t(job.members.size());
    const uint32_t slots = uint32_t(job.terms.slots) << random.below(2);
    job.above = {random.next(),
                 {uint32_t(0x0a630001 + index), 4800, 0},
                 __u16(random.below(TACIT_MOST_SLOTS - slots)),
                 __u16(slots),
                 uint8_t(job_ids[(index + 1) % std::size(job_ids)]),
                 uint8_t(1 + random.below(TACIT_MOST_RANKS)),
                 0,
                 uint8_t(job.members.size())};
}

Playing some_job(Random& random, size_t index) {
    Playing playing{{}, random.one_in(2) ? uint32_t(-int(random.below(64))) : uint32_t(random.next())};
    Job& job = playing.job;
    tacit_job& terms = job.terms;
    job.id = uint8_t(job_ids[index]);
    terms.cookie = random.next();
    const bool lossy = index == 3 && !random.one_in(4);
    terms.lanes = uint8_t(lossy ? int(TACIT_LANES_F32) : 1 + int(index % 5));
    const uint32_t most = TACIT_MOST_PAYLOAD * 8 / tacit_bits_down(terms.lanes);
    const uint32_t sizes[] = {8, 16, 40, 136, tacit_elements(terms.lanes, 1500), most / 8 * 8};
    terms.elements = __u16(random.one_of(sizes));
    terms.slots = __u16(1u << (lossy ? 3 + random.below(4) : random.below(7)));
    terms.first_slot = __u16(index * 128 + random.below(64));
    const int worlds[] = {1, 2, 3, 4, 8, 64};
    const int world = random.one_of(worlds);
    terms.quorum = uint8_t(random.one_in(2) ? world : 1 + int(random.below(uint64_t(world))));
    for (auto& entry : terms.table)
        entry = uint8_t(random.below(terms.lanes == 4 ? 256u / unsigned(world) : 256u));
    if (random.one_in(2)) job.shards = random.below(1 + TACIT_MOST_RANKS - uint64_t(world));
    for (int member = 0; member < world + int(job.shards); ++member)
        job.members.push_back(
            {uint32_t(0x0a000001 + 256 * index + unsigned(member)), __u16(4000 + member), 0});
    if (job.shards && random.one_in(2)) job.members.back() = {};  // has not joined
    if (lossy) {
        terms.quorum = uint8_t(world);
        job.deadline_ns = 1 + random.below(10'000);  // its clock counts packets
        playing.chunk = 0;
        return playing;
    }
    if (index > 1 && random.one_in(4)) {
        terms.below = uint8_t(world + int(random.below(uint64_t(256 - world))));
        terms.quorum = uint8_t(world);
    }
    if (index == 0 || (index > 1 && random.one_in(3))) {
        job.members.resize(size_t(world));
        job.shards = 0;
        add_upstream(random, index, job);
    }
    return playing;
}

struct Packet {
    std::vector<uint8_t> bytes;
    tacit_address from;
};

// What a member should send to another.
void good_rows(Random& random, Playing& playing, const std::vector<uint8_t>& noise, Packet& packet) {
    const Job& job = playing.job;
    const uint32_t members = uint32_t(job.members.size());
    tacit_header header{};
    header.magic = TACIT_MAGIC | TACIT_LAYOUT;
    header.kind = TACIT_KIND_ROWS;
    header.chunk = uint32_t(random.next());
    header.cookie = job.terms.cookie;
    header.job = job.id;
    header.rank = uint8_t(random.below(members));
    header.world = uint8_t((header.rank + 1 + random.below(std::max(1u, members - 1))) % members);
    if (!job.members.back().port && random.one_in(4)) header.world = uint8_t(members - 1);
    header.lanes = random.one_in(4) ? TACIT_ROWS_ACK : 0;
    header.place = __u16(random.next());
    const uint32_t sizes[] = {0, 1, 16, 24, tacit_rows_room(1500), TACIT_MOST_ROWS};
    header.nbytes = header.lanes ? __u16(0) : __u16(random.one_of(sizes));
    packet.from = playing.member(header.rank);
    const size_t nbytes = TACIT_ROWS_NBYTES + header.nbytes;
    packet.bytes.resize(sizeof header + nbytes);
    std::memcpy(packet.bytes.data(), &header, sizeof header);
    std::memcpy(packet.bytes.data() + sizeof header, noise.data() + random.below(noise.size() - nbytes),
                nbytes);
}

// What a rank should send.
void good_packet(Random& random, Playing& playing, const std::vector<uint8_t>& noise, Packet& packet) {
    const Job& job = playing.job;
    const tacit_job& terms = job.terms;
    const uint32_t window = terms.slots, world = uint32_t(job.members.size() - job.shards);
    if (random.one_in(5)) return good_rows(random, playing, noise, packet);
    if (random.one_in(2 * world)) ++playing.chunk;
    tacit_header header{};
    header.magic = TACIT_MAGIC | TACIT_LAYOUT;
    header.kind =
        random.one_in(16) ? (random.one_in(2) ? TACIT_KIND_PROBE : TACIT_KIND_SETTLE) : TACIT_KIND_DATA;
    header.chunk = playing.chunk - random.below(random.one_in(8) ? 3 * window : 2);
    header.cookie = terms.cookie;
    header.job = job.id;
    header.world = uint8_t(world);
    header.rank = uint8_t(random.below(header.kind == TACIT_KIND_PROBE ? job.members.size() : world));
    header.lanes = terms.lanes;
    header.place = __u16(tacit_place_of(&terms, header.chunk));
    header.nbytes =
        header.kind == TACIT_KIND_DATA ? __u16(terms.elements * tacit_bits_up(terms.lanes) / 8) : __u16(0);
    packet.from = playing.member(header.rank);
    if (terms.upward && random.one_in(1 + world)) {  // or what the parent should
        tacit_job above = terms;
        above.result_nbytes = __u16(terms.elements * tacit_bits_down(terms.lanes) / 8);
        const tacit_cell cell{};
        tacit_make_upward(&header, &above, &job.above, &cell);
        header.kind = TACIT_KIND_RESULT;
        header.world = job.above.ranks;
        packet.from = job.above.parent;
    }
    packet.bytes.resize(sizeof header + header.nbytes);
    std::memcpy(packet.bytes.data(), &header, sizeof header);
    std::memcpy(packet.bytes.data() + sizeof header,
                noise.data() + random.below(noise.size() - header.nbytes), header.nbytes);
}

template <class Change>
void change_header(Packet& packet, Change change) {
    if (packet.bytes.size() < sizeof(tacit_header)) return;
    tacit_header header;
    std::memcpy(&header, packet.bytes.data(), sizeof header);
    change(header);
    std::memcpy(packet.bytes.data(), &header, sizeof header);
}

void change_field(Random& random, tacit_header& h, uint64_t edge) {
    switch (random.below(9)) {
        case 0:
            h.magic = uint8_t(edge);
            break;
        case 1:
            h.kind = uint8_t(edge);
            break;
        case 2:
            h.chunk = uint32_t(edge);
            break;
        case 3:  // often right in its place, far away in time
            h.chunk ^= 1u << random.below(32);
            break;
        case 4:
            h.world = uint8_t(edge);
            break;
        case 5:
            h.rank = uint8_t(edge);
            break;
        case 6:
            h.lanes = uint8_t(edge);
            break;
        case 7:
            h.place = __u16(edge);
            break;
        default:
            h.nbytes = __u16(edge);
    }
}

void spoil(Random& random, Packet& packet, const std::vector<Playing>& jobs) {
    constexpr uint64_t edges[] = {0,      1,      2,          3,          4,          5,           7,
                                  8,      21,     22,         63,         64,         127,         128,
                                  255,    1023,   1024,       8943,       8944,       8945,        0x7fff,
                                  0x8000, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, ~uint64_t(0)};
    const uint64_t edge = random.one_of(edges);
    auto& bytes = packet.bytes;
    switch (random.below(10)) {
        case 0:
            if (!bytes.empty()) bytes[random.below(bytes.size())] ^= uint8_t(1u << random.below(8));
            break;
        case 1:
            if (!bytes.empty())
                bytes[random.below(std::min<size_t>(bytes.size(), 22))] = uint8_t(random.next());
            break;
        case 2:
            bytes.resize(random.below(bytes.size() + 1));
            break;
        case 3:
            bytes.resize(random.one_in(8) ? random.below(most_udp + 1)
                                          : std::min(bytes.size() + random.below(100), most_udp));
            break;
        case 4:
            bytes.resize(std::min<size_t>(edge, most_udp));
            [[fallthrough]];
        case 5:  // the header agrees with the size
            change_header(packet, [&](tacit_header& h) {
                h.nbytes = __u16(bytes.size() - sizeof h - tacit_extra_nbytes(h.kind));
            });
            break;
        case 6:
            packet.from = random.one_in(2) ? jobs[random.below(jobs.size())].member(random.next())
                                           : tacit_address{uint32_t(random.next()), __u16(random.next()), 0};
            break;
        case 7:  // as if it were another job's
            change_header(packet, [&](tacit_header& h) {
                const Job& job = jobs[random.below(jobs.size())].job;
                h.job = job.id;
                h.cookie = job.terms.cookie;
                h.world = uint8_t(job.members.size() - job.shards);
                if (random.one_in(2)) h.lanes = job.terms.lanes;
                if (random.one_in(2)) h.place = __u16(tacit_place_of(&job.terms, h.chunk));
            });
            break;
        default:
            change_header(packet, [&](tacit_header& h) { change_field(random, h, edge); });
    }
}

[[noreturn]] void fail(const char* what, uint64_t number, const Packet& packet) {
    std::fprintf(stderr, "packet %llu of %zu bytes: %s\n", (unsigned long long)number, packet.bytes.size(),
                 what);
    for (size_t i = 0; i < std::min<size_t>(packet.bytes.size(), TACIT_HEADER_NBYTES); ++i)
        std::fprintf(stderr, "%02x", packet.bytes[i]);
    std::fprintf(stderr, "\n");
    std::exit(1);
}

// Rows leave as they came, for the member that they name.
bool is_passed_on(const Answer& answer, const Packet& packet, const std::vector<Playing>& jobs) {
    tacit_header h;
    std::memcpy(&h, packet.bytes.data(), sizeof h);
    for (const auto& [job, chunk] : jobs) {
        if (job.id != h.job) continue;
        const tacit_address to = job.members.at(h.world), from = job.members.at(h.rank);
        return h.world != h.rank && h.cookie == job.terms.cookie && to.port && to.ip == answer.to.ip &&
               to.port == answer.to.port && from.ip == packet.from.ip && from.port == packet.from.port &&
               std::equal(answer.packet.begin(), answer.packet.end(), packet.bytes.begin(),
                          packet.bytes.end());
    }
    return false;
}

// Whether an answer may go there: to a rank or the parent of the job that the packet names, or back where it
// came from.
bool may_go(const Answer& answer, const Packet& packet, const std::vector<Playing>& jobs) {
    const auto same = [&](tacit_address to) { return to.ip == answer.to.ip && to.port == answer.to.port; };
    if (answer.packet.size() == sizeof(tacit_header)) return same(packet.from);
    const bool from_above = packet.bytes[offsetof(tacit_header, kind)] == TACIT_KIND_RESULT;
    for (const auto& [job, chunk] : jobs) {
        if (from_above && !job.terms.upward) continue;
        if ((from_above ? job.above.job : job.id) != packet.bytes[offsetof(tacit_header, job)]) continue;
        if (!from_above && job.terms.upward && same(job.above.parent)) return true;
        for (const auto& member : job.members)
            if (same(member)) return true;
    }
    return false;
}

// The ranks follow a chunk that was spoiled into the future, lest all they send from now on be stale.
void go_on(std::vector<Playing>& jobs, const Packet& packet) {
    tacit_header header;
    std::memcpy(&header, packet.bytes.data(), sizeof header);
    for (auto& playing : jobs)
        if (playing.job.id == header.job && tacit_after(header.chunk, playing.chunk))
            playing.chunk = header.chunk;
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t packets = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10'000'000;
    Random random{argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1};

    Plane plane(plane_slots);
    std::vector<Playing> jobs;
    for (size_t index = 0; index < std::size(job_ids); ++index) {
        jobs.push_back(some_job(random, index));
        plane.add_job(jobs.back().job);
    }
    std::vector<uint8_t> noise(1 << 16);
    for (auto& byte : noise) byte = uint8_t(random.next());
    std::vector<Packet> past(256);
    Packet packet;
    packet.bytes.reserve(most_udp);
    const std::unique_ptr<uint8_t[]> memory(new uint8_t[most_udp]);
    std::vector<uint8_t> sent(most_udp);
    Outbox out(1, 16);  // few to spare, so that some chunks have to wait
    uint64_t answers = 0, mutated = 0;
    const auto start = std::chrono::steady_clock::now();

    for (uint64_t number = 0; number < packets; ++number) {
        if (random.one_in(20'000)) {
            const size_t index = random.below(jobs.size());
            plane.remove_job(jobs[index].job.id);
            jobs[index] = some_job(random, index);
            plane.add_job(jobs[index].job);
        }
        if (random.one_in(50)) {  // the clock
            out.clear();
            plane.expire(number, out);
            for (const auto& answer : out.answers())
                std::memcpy(sent.data(), answer.packet.data(), answer.packet.size());
        }
        const bool replayed = random.one_in(8);
        if (replayed)
            packet = past[random.below(past.size())];
        else
            good_packet(random, jobs[random.below(jobs.size())], noise, packet);
        if (!random.one_in(4)) {
            ++mutated;
            for (uint32_t changes = 1 + random.below(3); changes > 0; --changes) spoil(random, packet, jobs);
        }
        if (!replayed) past[random.below(past.size())] = packet;

        uint8_t* const at = memory.get() + most_udp - packet.bytes.size();
        if (!packet.bytes.empty()) std::memcpy(at, packet.bytes.data(), packet.bytes.size());
        out.clear();
        const tacit_count verdict = plane.receive({at, packet.bytes.size()}, packet.from, number, out);
        if (verdict <= TACIT_FINE || verdict >= TACIT_COUNT_COMPLETED) fail("no verdict", number, packet);
        for (const auto& answer : out.answers()) {
            if (answer.packet.size() > TACIT_HEADER_NBYTES + TACIT_MOST_PAYLOAD)
                fail("long answer", number, packet);
            if (verdict == TACIT_COUNT_FORWARDED ? !is_passed_on(answer, packet, jobs)
                                                 : !may_go(answer, packet, jobs))
                fail("an answer to a stranger", number, packet);
        }
        if (verdict == TACIT_COUNT_FORWARDED && out.answers().size() != 1)
            fail("rows to many", number, packet);
        if (!out.answers().empty()) {  // read it all, too
            const auto answer = out.answers().front().packet;
            std::memcpy(sent.data(), answer.data(), answer.size());
        }
        if (verdict == TACIT_COUNT_WROTE) go_on(jobs, packet);
        answers += out.answers().size();
    }

    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const Counts counts = plane.counts();
    const char* const names[] = {"",
#define TACIT_COUNT(name, text) text,
                                 TACIT_VERDICTS(TACIT_COUNT) TACIT_EVENTS(TACIT_COUNT)
#undef TACIT_COUNT
    };
    uint64_t judged = 0;
    std::printf("%llu packets, %llu of them mutated, %llu answers, %.1f s, %.0f packets a second\n",
                (unsigned long long)packets, (unsigned long long)mutated, (unsigned long long)answers,
                seconds, double(packets) / seconds);
    for (int what = 1; what < TACIT_COUNTS; ++what) {
        std::printf("%s %llu\n", names[what], (unsigned long long)counts[size_t(what)]);
        if (what < TACIT_COUNT_COMPLETED) judged += counts[size_t(what)];
    }
    if (judged != packets) {
        std::fprintf(stderr, "%llu verdicts on %llu packets\n", (unsigned long long)judged,
                     (unsigned long long)packets);
        return 1;
    }
    return 0;
}
