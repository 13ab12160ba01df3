#include "plane.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>

#include "blocks.h"
#include "lossy.h"
#include "plane_kernels.h"
#include "refuse.h"
#include "rotated_kernels.h"

namespace tacit {
namespace {

using std::size_t;
using std::uint64_t;
using std::uint8_t;

constexpr size_t line = 64;  // of the cache
// The longest packet, from the start of the line in which its header ends.
constexpr size_t most_packet = 2 * line + TACIT_MOST_PAYLOAD;

size_t round_up(size_t nbytes) { return (nbytes + line - 1) / line * line; }

void count(std::atomic<uint64_t>& counter, uint64_t by = 1) {
    counter.fetch_add(by, std::memory_order_relaxed);
}

Counts read(const std::array<std::atomic<uint64_t>, TACIT_COUNTS>& counters) {
    Counts found;
    std::transform(counters.begin(), counters.end(), found.begin(),
                   [](const auto& counter) { return counter.load(std::memory_order_relaxed); });
    return found;
}

std::span<const uint8_t> reply(tacit_header header, tacit_kind kind, Outbox& out) {
    tacit_make_reply(&header, kind);
    return out.packet(header, {});
}

// Nobody is at an address of zeros.
bool same(tacit_address a, tacit_address b) { return tacit_is_there(&a) && a.ip == b.ip && a.port == b.port; }

struct Cell {
    tacit_cell state{};
    mutable std::atomic_flag busy;  // also guards the lanes
};

struct LossyJob : Lossy {
    using Lossy::Lossy;
    std::atomic_flag busy;  // taken before that of a cell
};

// Held for as long as a packet's lanes take: a tenth of a microsecond. Threads meet here only where packets
// of one chunk come in through different sockets.
class Lock {
  public:
    explicit Lock(const Cell& cell) : Lock(cell.busy) {}
    explicit Lock(std::atomic_flag& busy) : busy_(busy) {
        for (int tries = 0; busy_.test_and_set(std::memory_order_acquire); ++tries)
            if (tries > 100) std::this_thread::yield();  // its holder may wait for our core
    }
    ~Lock() { busy_.clear(std::memory_order_release); }
    Lock(const Lock&) = delete;

  private:
    std::atomic_flag& busy_;
};

}  // namespace

// ---- outbox

Outbox::Outbox(size_t packets, size_t spare) : bytes_((packets + spare) * most_packet + line), spare_(spare) {
    answers_.reserve(packets * TACIT_MOST_RANKS);
    clear();
}

void Outbox::clear() {
    answers_.clear();
    spare_used_ = 0;
    used_ = round_up(reinterpret_cast<std::uintptr_t>(bytes_.data())) -
            reinterpret_cast<std::uintptr_t>(bytes_.data());
}

std::span<const uint8_t> Outbox::packet(const tacit_header& header, std::span<const uint8_t> payload) {
    uint8_t* const at = bytes_.data() + used_ + TACIT_LOWER_NBYTES;
    const size_t nbytes = sizeof header + payload.size();
    used_ += round_up(TACIT_LOWER_NBYTES + nbytes);
    std::memcpy(at, &header, sizeof header);
    if (!payload.empty()) std::memcpy(at + sizeof header, payload.data(), payload.size());
    return {at, nbytes};
}

bool Outbox::take_spare() { return spare_used_ < spare_ && ++spare_used_; }

// ---- jobs

struct Plane::Active {
    struct Member {
        tacit_address address;
        std::atomic<uint64_t> packets = 0, last_ns = 0, left_out = 0;
    };

    uint8_t id;
    tacit_job terms;
    tacit_upstream above;
    bool segment_above;
    std::vector<Member> members;
    std::vector<Cell> cells;
    std::unique_ptr<LossyJob> lossy;  // if it is one
    size_t stride;                    // bytes from the lanes of one cell to those of the next
    std::unique_ptr<uint8_t, decltype(&std::free)> lanes;
    std::array<std::atomic<uint64_t>, TACIT_COUNTS> counts{};
    std::atomic<uint64_t> received_nbytes = 0, answered_nbytes = 0;

    explicit Active(const Job& job)
        : id(job.id),
          terms(job.terms),
          above(job.above),
          segment_above(job.segment_above),
          members(job.members.size()),
          cells(2 * size_t(terms.slots)),
          lossy(job.deadline_ns ? new LossyJob(terms.world, terms.slots, job.deadline_ns) : nullptr),
          stride(round_up(terms.result_nbytes)),
          // Not filled: the first packet of a chunk writes, and only then does another read.
          lanes(static_cast<uint8_t*>(std::aligned_alloc(line, cells.size() * stride)), std::free) {
        if (!lanes) throw std::bad_alloc();
        for (size_t i = 0; i < members.size(); ++i) members[i].address = job.members[i];
    }

    uint8_t* lanes_of(size_t cell) { return lanes.get() + cell * stride; }

    void answer(std::span<const uint8_t> packet, tacit_address to, Outbox& out) {
        out.add(packet, to);
        count(answered_nbytes, packet.size());
    }

    void answer_all(std::span<const uint8_t> packet, Outbox& out) {
        for (size_t rank = 0; rank < terms.world; ++rank) answer(packet, members[rank].address, out);
    }
};

struct Plane::Kernels {
    const PlaneKernels& plane;
    const RotatedKernels& rotated;

    // blocks.cpp picks the instruction set.
    static Kernels chosen() {
#ifdef TACIT_X86
        const std::string name = simd();
        if (name == avx512::plane_kernels.name) return {avx512::plane_kernels, avx512::rotated_kernels};
        if (name == avx2::plane_kernels.name) return {avx2::plane_kernels, avx2::rotated_kernels};
#endif
        return {baseline::plane_kernels, baseline::rotated_kernels};
    }

    void write(const tacit_job& job, std::span<const uint8_t> payload, uint8_t* lanes) const {
        if (job.lanes == TACIT_LANES_TABLE_U8)
            rotated.u8.lookup_table(payload.data(), job.elements, job.table, lanes);
        else if (job.lanes == TACIT_LANES_TABLE_U16)
            rotated.u16.lookup_table(payload.data(), job.elements, job.table,
                                     reinterpret_cast<std::uint16_t*>(lanes));
        else
            std::memcpy(lanes, payload.data(), payload.size());
    }

    // Whether a lane met its limit.
    bool add(const tacit_job& job, std::span<const uint8_t> payload, uint8_t* lanes) const {
        auto* const halves = reinterpret_cast<std::uint16_t*>(lanes);
        auto* const words = reinterpret_cast<std::int32_t*>(lanes);
        switch (job.lanes) {
            case TACIT_LANES_U8:
                return plane.add_u8(payload.data(), job.elements, lanes);
            case TACIT_LANES_U16:
                return plane.add_u16(payload.data(), job.elements, halves);
            case TACIT_LANES_I32:
                return plane.add_i32(payload.data(), job.elements, words);
            case TACIT_LANES_F32:
                return plane.add_f32(payload.data(), job.elements, reinterpret_cast<float*>(lanes));
            case TACIT_LANES_TABLE_U8:
                return rotated.u8.add_table(payload.data(), job.elements, job.table, lanes) != 0;
            default:
                return rotated.u16.add_table(payload.data(), job.elements, job.table, halves) != 0;
        }
    }
};

Plane::Plane(size_t slots) : slots_(slots), kernels_(new Kernels(Kernels::chosen())) {
    if (slots < 1 || slots > TACIT_MOST_SLOTS)
        refuse("slots=", slots, ": a plane has 1 to ", int(TACIT_MOST_SLOTS));
}

Plane::~Plane() = default;

namespace {

void check_upstream(const Job& job) {
    const tacit_job& terms = job.terms;
    const tacit_upstream& above = job.above;
    if (job.shards)
        refuse("shards=", job.shards, ": a job with a parent has none, since rows go through one plane");
    if (terms.quorum != job.members.size())
        refuse("quorum=", int(terms.quorum), ": a job with a parent waits for all of its ",
               job.members.size(), " ranks");
    if (above.world < 1 || above.world > TACIT_MOST_RANKS || above.rank >= above.world)
        refuse("rank ", int(above.rank), " of ", int(above.world), " at the parent: a slot knows 1 to ",
               int(TACIT_MOST_RANKS), " ranks");
    if (!std::has_single_bit(above.slots) || above.slots < terms.slots ||
        size_t(above.first_slot) + above.slots > TACIT_MOST_SLOTS)
        refuse("slots=", above.slots, " at the parent: a power of two, and not less than the ", terms.slots,
               " here");
    if (above.ranks < job.members.size())
        refuse("ranks=", int(above.ranks), " in the parent's sum: not less than the ", job.members.size(),
               " here");
}

}  // namespace

void Plane::add_job(const Job& job) {
    const tacit_job& terms = job.terms;
    const size_t members = job.members.size(), world = members - std::min(job.shards, members);
    const size_t first = terms.first_slot, end = first + terms.slots;
    if (jobs_[job.id]) refuse("job=", int(job.id), " is there already; remove it first");
    if (world < 1 || members > TACIT_MOST_RANKS)
        refuse("a job of ", members, " members, ", job.shards, " of them shards: 1 to ",
               int(TACIT_MOST_RANKS), ", and at least one rank");
    if (terms.below && (terms.below < world || terms.quorum != world))
        refuse("ranks=", int(terms.below), " below ", world, " planes, quorum=", int(terms.quorum),
               ": not less ranks than planes, and all planes are waited for");
    if (terms.quorum < 1 || terms.quorum > world)
        refuse("quorum=", int(terms.quorum), ": from 1 to the ", world, " ranks of the job");
    if (!tacit_bits_up(terms.lanes)) refuse("lanes=", int(terms.lanes), ": no such lane type");
    if (!std::has_single_bit(terms.slots))
        refuse("slots=", terms.slots, ": a power of two, lest chunks lose their place when they wrap");
    if (end > slots_) refuse("slots ", first, " to ", end - 1, ": the plane has ", slots_);
    for (const int id : jobs()) {
        const tacit_job& other = jobs_[id]->terms;
        if (first < size_t(other.first_slot) + other.slots && other.first_slot < end)
            refuse("slots ", first, " to ", end - 1, " meet those of job ", id, ", ", other.first_slot,
                   " to ", other.first_slot + other.slots - 1);
    }
    const size_t most = TACIT_MOST_PAYLOAD * size_t(8) / tacit_bits_down(terms.lanes);
    if (terms.elements < 1 || terms.elements > most || terms.elements % TACIT_ELEMENTS_MULTIPLE)
        refuse("elements=", terms.elements, ": a multiple of ", int(TACIT_ELEMENTS_MULTIPLE), " up to ",
               most);
    const size_t top = *std::max_element(std::begin(terms.table), std::end(terms.table));
    const size_t holds = (size_t(1) << tacit_bits_down(terms.lanes)) - 1;
    const size_t ranks = terms.upward ? job.above.ranks : world;
    if (tacit_bits_up(terms.lanes) == 4 && ranks * top > holds)
        refuse("table up to ", top, " from ", ranks, " ranks: the lanes hold ", holds, "; use wider ones");
    if (job.deadline_ns && (terms.upward || terms.below || terms.quorum != world || terms.slots < 8))
        refuse("deadline_ns=", job.deadline_ns,
               ": a lossy job has 8 slots or more, no quorum, and no plane above or below");
    if (terms.upward) check_upstream(job);
    if (terms.upward && by_parent_[job.above.job])
        refuse("job=", int(job.above.job), " of the parent is that of job ",
               int(by_parent_[job.above.job]->id), " already");
    Job whole = job;
    whole.terms.world = uint8_t(world);
    whole.terms.members = uint8_t(members);
    whole.terms.data_nbytes = __u16(terms.elements * tacit_bits_up(terms.lanes) / 8);
    whole.terms.result_nbytes = __u16(terms.elements * tacit_bits_down(terms.lanes) / 8);
    jobs_[job.id] = std::make_unique<Active>(whole);
    if (terms.upward) by_parent_[job.above.job] = jobs_[job.id].get();
    lossy_jobs_ += job.deadline_ns != 0;
}

void Plane::remove_job(int id) {
    const Active& job = find(id);
    if (job.terms.upward) by_parent_[job.above.job] = nullptr;
    lossy_jobs_ -= job.lossy != nullptr;
    jobs_[size_t(id)].reset();
}

Plane::Active& Plane::find(int id) const {
    if (id < 0 || id >= TACIT_MOST_JOBS || !jobs_[size_t(id)]) refuse("job=", id, ": there is no such job");
    return *jobs_[size_t(id)];
}

// ---- packets

tacit_count Plane::receive(std::span<const uint8_t> packet, tacit_address from, uint64_t now_ns,
                           Outbox& out) {
    const tacit_count verdict = judge(packet, from, now_ns, out);
    count(counts_[verdict]);
    return verdict;
}

tacit_count Plane::receive_oversized() {
    count(counts_[TACIT_COUNT_OVERSIZED]);
    return TACIT_COUNT_OVERSIZED;
}

tacit_count Plane::judge(std::span<const uint8_t> packet, tacit_address from, uint64_t now_ns, Outbox& out) {
    tacit_header header;
    if (packet.size() < sizeof header) return TACIT_COUNT_SHORT;
    std::memcpy(&header, packet.data(), sizeof header);
    const auto payload = packet.subspan(sizeof header);
    const auto fault = tacit_check_packet(&header, __u32(payload.size()));
    if (fault == TACIT_COUNT_KIND && header.kind == TACIT_KIND_RESULT)
        if (Active* const below = by_parent_[header.job]) {
            const auto verdict = judge_result(*below, header, payload, from, out);
            count(below->counts[verdict]);
            return verdict;
        }
    if (fault) return fault;
    Active* const job = jobs_[header.job].get();
    const auto verdict = job ? judge(*job, header, payload, from, now_ns, out) : TACIT_COUNT_JOB;
    if (job) count(job->counts[verdict]);
    // The same words for both, lest a stranger find out which jobs there are.
    if (verdict == TACIT_COUNT_JOB || verdict == TACIT_COUNT_COOKIE)
        out.add(reply(header, TACIT_KIND_UNKNOWN, out), from);
    return verdict;
}

tacit_count Plane::judge(Active& job, tacit_header& header, std::span<const uint8_t> payload,
                         tacit_address from, uint64_t now_ns, Outbox& out) {
    if (const auto fault = tacit_check_member(&header, &job.terms)) return fault;
    auto& sender = job.members[header.rank];
    if (!same(from, sender.address)) return TACIT_COUNT_SOURCE;
    if (const auto fault = tacit_check_kind(&header, &job.terms)) return fault;
    count(sender.packets);
    sender.last_ns.store(now_ns, std::memory_order_relaxed);
    count(job.received_nbytes, sizeof header + payload.size());
    if (header.kind == TACIT_KIND_ROWS) return pass_on(job, header, payload, out);
    const auto verdict = header.kind == TACIT_KIND_PROBE ? TACIT_COUNT_ECHOED
                         : job.lossy                     ? sum_up_lossy(job, header, payload, now_ns, out)
                                                         : sum_up(job, header, payload, out);
    if (verdict == TACIT_COUNT_ECHOED) job.answer(reply(header, TACIT_KIND_ECHO, out), from, out);
    if (verdict == TACIT_COUNT_STALE) job.answer(reply(header, TACIT_KIND_STALE, out), from, out);
    return verdict;
}

void Plane::event(Active& job, tacit_count what) {
    count(counts_[what]);
    count(job.counts[what]);
}

tacit_count Plane::sum_up(Active& job, tacit_header& header, std::span<const uint8_t> payload, Outbox& out) {
    const size_t at = tacit_cell_of(&job.terms, header.chunk);
    uint8_t* const lanes = job.lanes_of(at);
    const Lock lock(job.cells[at]);
    tacit_cell& cell = job.cells[at].state;

    const bool data = header.kind == TACIT_KIND_DATA;
    if (data && tacit_abandons(&cell, header.chunk)) event(job, TACIT_COUNT_ABANDONED);
    const auto verdict = data ? tacit_take(&cell, &job.terms, header.chunk, header.rank)
                              : tacit_settle(&cell, &job.terms, header.chunk);
    if (verdict == TACIT_COUNT_WROTE) kernels_->write(job.terms, payload, lanes);
    if (verdict == TACIT_COUNT_ADDED && kernels_->add(job.terms, payload, lanes)) {
        cell.saturated = 1;
        event(job, TACIT_COUNT_SATURATED);
    }
    const bool summed = verdict == TACIT_COUNT_WROTE || verdict == TACIT_COUNT_ADDED;
    if (summed && header.lanes & TACIT_SATURATED) cell.saturated = 1;  // at a plane below
    if (cell.full && (summed || verdict == TACIT_COUNT_DUPLICATE)) {
        tacit_make_upward(&header, &job.terms, &job.above, &cell);
        out.add(out.packet(header, {lanes, job.terms.result_nbytes}), job.above.parent, job.segment_above);
        return verdict;
    }
    const bool completed = verdict == TACIT_COUNT_SETTLED || (summed && cell.done);
    if (!completed && verdict != TACIT_COUNT_REPEATED) return verdict;

    tacit_make_result(&header, &job.terms, &cell);
    const auto result = out.packet(header, {lanes, job.terms.result_nbytes});
    if (completed) {
        event(job, TACIT_COUNT_COMPLETED);
        job.answer_all(result, out);
    } else {
        job.answer(result, job.members[header.rank].address, out);
    }
    return verdict;
}

// ---- lossy jobs: the rule is in lossy.h

tacit_count Plane::sum_up_lossy(Active& job, tacit_header& header, std::span<const uint8_t> payload,
                                uint64_t now_ns, Outbox& out) {
    LossyJob& lossy = *job.lossy;
    const Lock turn(lossy.busy);
    const auto verdict = take_lossy(job, header, payload, now_ns, out);
    if (verdict == TACIT_COUNT_HELD || verdict == TACIT_COUNT_STALE) return verdict;
    const bool data = header.kind == TACIT_KIND_DATA;
    const auto gone = data ? lossy.sent(header.rank, header.chunk) : lossy.passed(header.rank, header.chunk);
    for (std::uint32_t chunk = gone.from; chunk != gone.to;)
        close_unless_it_waits(job, ++chunk, header.rank, out);
    if (data) close_unless_it_waits(job, header.chunk, header.rank, out);
    return verdict;
}

// What the packet does to its own cell.
tacit_count Plane::take_lossy(Active& job, tacit_header& header, std::span<const uint8_t> payload,
                              uint64_t now_ns, Outbox& out) {
    const size_t at = tacit_cell_of(&job.terms, header.chunk);
    uint8_t* const lanes = job.lanes_of(at);
    const Lock lock(job.cells[at]);
    tacit_cell& cell = job.cells[at].state;
    const bool later = !cell.seen || tacit_after(header.chunk, cell.chunk);
    const bool data = header.kind == TACIT_KIND_DATA;
    if (later && job.lossy->holds(header.chunk)) return TACIT_COUNT_HELD;
    if (data && tacit_abandons(&cell, header.chunk)) event(job, TACIT_COUNT_ABANDONED);

    auto verdict = TACIT_COUNT_PASSED;
    if (data)
        verdict = tacit_take(&cell, &job.terms, header.chunk, header.rank);
    else if (!later && header.chunk != cell.chunk)
        verdict = TACIT_COUNT_STALE;
    else if (!later && cell.done)
        verdict = TACIT_COUNT_REPEATED;

    if (verdict == TACIT_COUNT_WROTE) {
        kernels_->write(job.terms, payload, lanes);
        job.lossy->opened(header.chunk, now_ns);
    }
    if (verdict == TACIT_COUNT_ADDED && kernels_->add(job.terms, payload, lanes)) {
        cell.saturated = 1;
        event(job, TACIT_COUNT_SATURATED);
    }
    if (data && verdict != TACIT_COUNT_STALE) job.lossy->came(header.rank, header.chunk, now_ns);
    if ((verdict == TACIT_COUNT_WROTE || verdict == TACIT_COUNT_ADDED) && cell.done)
        close(job, cell, header.rank, out);
    if (verdict == TACIT_COUNT_REPEATED) {
        tacit_make_result(&header, &job.terms, &cell);
        const auto result = out.packet(header, {lanes, job.terms.result_nbytes});
        job.answer(result, job.members[header.rank].address, out);
        header.kind = data ? TACIT_KIND_DATA : TACIT_KIND_SETTLE;
    }
    return verdict;
}

void Plane::close_unless_it_waits(Active& job, std::uint32_t chunk, uint8_t rank, Outbox& out) {
    Cell& cell = job.cells[tacit_cell_of(&job.terms, chunk)];
    const Lock lock(cell);
    const bool is_open = cell.state.seen && !cell.state.done && cell.state.chunk == chunk;
    if (is_open && !job.lossy->waits(cell.state) && out.take_spare()) close(job, cell.state, rank, out);
}

// The sum goes to all, as if `rank` had called it up. The cell is locked.
void Plane::close(Active& job, tacit_cell& cell, uint8_t rank, Outbox& out) {
    cell.done = 1;
    event(job, TACIT_COUNT_COMPLETED);
    if (cell.count < job.terms.world) {
        event(job, TACIT_COUNT_PARTIAL);
        for (uint64_t left = job.lossy->missing(cell); left; left &= left - 1)
            count(job.members[size_t(std::countr_zero(left))].left_out);
    }
    tacit_header header{};
    header.magic = TACIT_MAGIC | TACIT_LAYOUT;
    header.chunk = cell.chunk;
    tacit_make_downward(&header, job.id, &job.terms, &cell);
    header.rank = rank;
    const uint8_t* const lanes = job.lanes_of(tacit_cell_of(&job.terms, cell.chunk));
    job.answer_all(out.packet(header, {lanes, job.terms.result_nbytes}), out);
}

void Plane::expire(uint64_t now_ns, Outbox& out) {
    for (const auto& each : jobs_) {
        if (!each || !each->lossy) continue;
        Active& job = *each;
        LossyJob& lossy = *job.lossy;
        const Lock turn(lossy.busy);
        const auto is_closed = [&](const Lossy::Open& open) {
            const Cell& cell = job.cells[tacit_cell_of(&job.terms, open.chunk)];
            const Lock lock(cell);
            return cell.state.done || cell.state.chunk != open.chunk;
        };
        std::erase_if(lossy.open, is_closed);
        for (const auto& open : lossy.open) {
            const Cell& cell = job.cells[tacit_cell_of(&job.terms, open.chunk)];
            if (lossy.is_over(open.since_ns, now_ns)) {
                const Lock lock(cell);
                if (size_t(std::popcount(cell.state.seen)) >= lossy.least()) lossy.late(cell.state);
            }
        }
        for (const auto& open : lossy.open) close_unless_it_waits(job, open.chunk, 0, out);
    }
}

tacit_count Plane::pass_on(Active& job, const tacit_header& header, std::span<const uint8_t> payload,
                           Outbox& out) {
    const tacit_address to = job.members[header.world].address;
    if (!tacit_is_there(&to)) return TACIT_COUNT_UNREACHED;
    job.answer({payload.data() - sizeof header, sizeof header + payload.size()}, to, out);
    return TACIT_COUNT_FORWARDED;
}

// From the parent, says its header. No answer to what is wrong: two planes must not talk for ever.
tacit_count Plane::judge_result(Active& job, tacit_header& header, std::span<const uint8_t> payload,
                                tacit_address from, Outbox& out) {
    if (header.cookie != job.above.cookie) return TACIT_COUNT_COOKIE;
    if (!same(from, job.above.parent)) return TACIT_COUNT_SOURCE;
    if (const auto fault = tacit_check_result(&header, &job.terms, &job.above)) return fault;
    const size_t at = tacit_cell_of(&job.terms, header.chunk);
    const Lock lock(job.cells[at]);
    tacit_cell& cell = job.cells[at].state;
    const auto verdict = tacit_answer(&cell, &header);
    if (verdict != TACIT_COUNT_ANSWERED) return verdict;
    std::memcpy(job.lanes_of(at), payload.data(), payload.size());
    event(job, TACIT_COUNT_COMPLETED);
    tacit_make_downward(&header, job.id, &job.terms, &cell);
    job.answer_all(out.packet(header, payload), out);
    return verdict;
}

// ---- figures

std::vector<int> Plane::jobs() const {
    std::vector<int> ids;
    for (int id = 0; id < TACIT_MOST_JOBS; ++id)
        if (jobs_[size_t(id)]) ids.push_back(id);
    return ids;
}

Counts Plane::counts() const { return read(counts_); }

JobStats Plane::stats(int id) const {
    const Active& job = find(id);
    JobStats found{read(job.counts), job.received_nbytes, job.answered_nbytes, 0, 0, {}};
    for (const auto& member : job.members)
        found.ranks.push_back({member.packets, member.last_ns, 0, member.left_out});
    for (const Cell& cell : job.cells) {
        const Lock lock(cell);
        if (!cell.state.seen || cell.state.done) continue;
        ++found.unfinished;
        found.above += cell.state.full;
        for (size_t rank = 0; rank < job.terms.world; ++rank)
            found.ranks[rank].missing += !(cell.state.seen >> rank & 1);
    }
    return found;
}

}  // namespace tacit
