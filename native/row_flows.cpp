#include "row_flows.h"

#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "refuse.h"
#include "udp_plane.h"

namespace tacit {
namespace {

using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr uint64_t ms = 1'000'000;
constexpr uint64_t longest_pause_ns =
    250 * ms;  // between two copies of a packet, unless round trips are longer
constexpr uint64_t longest_sample_ns = 2000 * ms;
constexpr uint64_t acknowledge_within_ns = ms / 2;
constexpr uint64_t remind_after_ns = 100 * ms;  // without progress, a member is told what we lack
constexpr uint64_t probe_after_ns = 100 * ms;   // without any packet, the plane is asked
constexpr unsigned most_probes = 20;            // unanswered: it is silent
constexpr uint64_t narrow_after_ns = 2000 * ms;
constexpr uint8_t narrow_copies = 8;
constexpr size_t burst = 8;  // packets to one member before the next one's turn; copies after one time-out

constexpr size_t most_received = 32, most_sent = 256;  // messages, packets a call
constexpr size_t room_nbytes = 65536;                  // what one message may hold with UDP_GRO

// Whether number a is before number b in a flow.
bool before(uint32_t a, uint32_t b) { return tacit_after(b, a); }

// A header and what is behind it, as they go to the wire.
struct __attribute__((packed, aligned(2))) Head {
    tacit_header header;
    tacit_rows rows;
};
static_assert(sizeof(Head) == TACIT_HEADER_NBYTES + TACIT_ROWS_NBYTES);

Fd open_socket(tacit_address address, int buffer_nbytes) {
    Fd fd = open_udp(address, buffer_nbytes, timeval{0, 100'000});
    set_option(fd, SOL_UDP, UDP_GRO, 1);  // runs of packets come as one message, if they can
    return fd;
}

}  // namespace

// What calls to the kernel point to.
struct RowFlows::Buffers {
    std::unique_ptr<uint8_t, decltype(&std::free)> room{
        static_cast<uint8_t*>(std::aligned_alloc(64, most_received* room_nbytes)), std::free};
    iovec rooms[most_received];
    SegmentSize sizes[most_received];
    mmsghdr incoming[most_received];

    size_t packets = 0;  // to be sent
    Head heads[most_sent];
    iovec pieces[2 * most_sent];
    bool alone[most_sent];  // sent again: a run may be what the path would not have
    SegmentSize controls[most_sent];
    mmsghdr outgoing[most_sent];

    Buffers() {
        if (!room) throw std::bad_alloc();
        for (size_t i = 0; i < most_received; ++i) rooms[i] = {room.get() + i * room_nbytes, room_nbytes};
    }

    // Messages that are there, without waiting.
    int receive(int fd) {
        for (size_t i = 0; i < most_received; ++i)
            incoming[i].msg_hdr = {nullptr, 0, &rooms[i], 1, sizes[i].bytes, sizeof sizes[i].bytes, 0};
        return ::recvmmsg(fd, incoming, most_received, MSG_DONTWAIT, nullptr);
    }

    size_t nbytes(size_t packet) const { return sizeof(Head) + pieces[2 * packet + 1].iov_len; }
};

RowFlows::RowFlows(tacit_address bind, int buffer_nbytes)
    : socket_(open_socket(bind, buffer_nbytes)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      address_(address_of(socket_)),
      buffers_(std::make_unique<Buffers>()) {
    if (wake_ < 0) fail("eventfd");
}

RowFlows::~RowFlows() { close(); }

void RowFlows::start(const FlowTerms& terms) {
    if (thread_.joinable() || socket_ < 0) refuse("start() comes once, before close()");
    if (terms.members < 2 || terms.members > TACIT_MOST_RANKS || terms.own >= terms.members)
        refuse("member ", terms.own, " of ", terms.members, ": from 2 to ", int(TACIT_MOST_RANKS),
               " members");
    if (!terms.room_nbytes || terms.room_nbytes > TACIT_MOST_ROWS || terms.room_nbytes % 16)
        refuse("room_nbytes=", terms.room_nbytes, ": a multiple of 16 up to ", int(TACIT_MOST_ROWS));
    const sockaddr_in to = sockaddr_of(terms.plane);
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0)
        fail("connect to the plane");
    terms_ = terms;
    const size_t credit_nbytes = terms.window_nbytes / (terms.members - 1);
    credit_ = uint32_t(std::clamp<size_t>(credit_nbytes / terms.room_nbytes, 2, most_ahead));
    flows_ = std::vector<Flow>(terms.members);
    for (auto& [out, in] : flows_) out.first = out.oldest = out.fresh = in.first = in.next = terms.first;
    number_ = uint16_t(terms.first);
    send_header(TACIT_KIND_PROBE);  // a kernel plane learns from it where we are
    thread_ = std::thread([this] { serve(); });
}

void RowFlows::begin(std::vector<std::span<const uint8_t>> parts, std::vector<std::span<uint8_t>> rooms) {
    const std::lock_guard lock(state_);
    if (!thread_.joinable()) refuse("start() comes before an exchange");
    if (active()) refuse("an exchange is on its way already; wait for it or abandon() it");
    if (broken_) refuse("an exchange was given up; close() and join anew");
    if (parts.size() != terms_.members || rooms.size() != terms_.members)
        refuse(parts.size(), " parts and ", rooms.size(), " rooms: the job has ", terms_.members, " members");
    for (size_t member = 0; member < terms_.members; ++member)
        if (std::max(parts[member].size(), rooms[member].size()) > UINT32_MAX)
            refuse("a message to or from member ", member, " is longer than ", UINT32_MAX, " bytes");
    const uint64_t now = UdpPlane::now_ns();
    ++number_;
    outcome_ = FlowOutcome::running;
    heard_ns_ = probed_ns_ = now;
    unanswered_ = 0;
    const auto packets = [&](size_t nbytes) {
        return uint32_t(std::max<size_t>(1, (nbytes + terms_.room_nbytes - 1) / terms_.room_nbytes));
    };
    for (size_t member = 0; member < terms_.members; ++member) {
        if (member == terms_.own) continue;
        Outward& out = flows_[member].out;
        Inward& in = flows_[member].in;
        out.part = parts[member];
        out.first = out.oldest = out.fresh;
        out.count = packets(out.part.size());
        out.progress_ns = now;
        out.backoff = 0;
        out.begun = out.held = false;
        in.room = rooms[member];
        in.first = in.next;
        in.count = packets(in.room.size());
        in.progress_ns = in.reminded_ns = now;
        for (const auto& [number, packet] : std::exchange(in.early, {})) {
            Head head;
            std::memcpy(&head, packet.data(), sizeof head);
            take_message(member, head.header, head.rows, std::span(packet).subspan(sizeof head), now);
        }
    }
    if (unknown_) settle(FlowOutcome::unknown);
    wake();
}

void RowFlows::wake() const {
    const uint64_t one = 1;
    (void)!::write(wake_, &one, sizeof one);
}

FlowOutcome RowFlows::wait(uint64_t slice_ns) {
    std::unique_lock lock(state_);
    changed_.wait_for(lock, std::chrono::nanoseconds(slice_ns), [&] { return !active(); });
    return outcome_;
}

void RowFlows::abandon() {
    const std::lock_guard lock(state_);
    if (outcome_ != FlowOutcome::done) broken_ = true;
    if (active()) settle(FlowOutcome::silent);
}

void RowFlows::close() {
    {
        const std::lock_guard lock(state_);
        stopping_ = true;
    }
    wake();
    if (thread_.joinable()) thread_.join();
    socket_.reset();
}

std::vector<bool> RowFlows::here() const {
    const std::lock_guard lock(state_);
    std::vector<bool> found;
    for (const Flow& flow : flows_) found.push_back(flow.in.complete());
    return found;
}

std::vector<bool> RowFlows::acknowledged() const {
    const std::lock_guard lock(state_);
    std::vector<bool> found;
    for (const Flow& flow : flows_) found.push_back(flow.out.complete());
    return found;
}

std::array<uint64_t, 3> RowFlows::mismatch() const {
    const std::lock_guard lock(state_);
    return mismatch_;
}

FlowStats RowFlows::stats() const {
    const std::lock_guard lock(state_);
    return stats_;
}

uint64_t RowFlows::round_trip_ns() const {
    const std::lock_guard lock(state_);
    uint64_t slowest = 0;
    for (const Flow& flow : flows_) slowest = std::max(slowest, flow.out.round_trips.smoothed_ns());
    return slowest;
}

// ---- the thread

void RowFlows::serve() {
    ::pthread_setname_np(::pthread_self(), "tacit-rows");  // for `top -H`
    uint64_t wake = UINT64_MAX;
    bool more = false;
    while (true) {
        if (!more) {
            const uint64_t before_ns = UdpPlane::now_ns(), pause = wake > before_ns ? wake - before_ns : 0;
            const timespec limit{time_t(pause / 1'000'000'000), long(pause % 1'000'000'000)};
            pollfd ready[] = {{socket_, POLLIN, 0}, {wake_, POLLIN, 0}};
            ::ppoll(ready, 2, wake == UINT64_MAX ? nullptr : &limit, nullptr);
            uint64_t count;
            if (ready[1].revents) (void)!::read(wake_, &count, sizeof count);
        }
        const int messages = buffers_->receive(socket_);
        const bool refused = messages < 0 && errno == ECONNREFUSED;
        const std::lock_guard lock(state_);
        if (stopping_) return;
        ++stats_.wakes;
        stats_.refused += refused;
        const uint64_t now = UdpPlane::now_ns();
        if (messages > 0) receive_all(size_t(messages), now);
        if (active()) {
            for (Flow& flow : flows_)
                if (now >= due_ns(flow.out)) fire(flow.out, now);
            more = send_messages(now);
        }
        if (!broken_) send_acknowledgements(now);
        judge(now);
        more = (more && active()) || messages == int(most_received);
        wake = wake_ns();
    }
}

// ---- what comes

void RowFlows::receive_all(size_t messages, uint64_t now) {
    for (size_t i = 0; i < messages; ++i) {
        const mmsghdr& message = buffers_->incoming[i];
        const uint8_t* const start = buffers_->room.get() + i * room_nbytes;
        const size_t nbytes = message.msg_len, size = SegmentSize::read(message.msg_hdr, nbytes);
        if (message.msg_hdr.msg_flags & MSG_TRUNC) continue;
        for (size_t at = 0; at < nbytes; at += size) take({start + at, std::min(size, nbytes - at)}, now);
    }
}

void RowFlows::take(std::span<const uint8_t> packet, uint64_t now) {
    tacit_header header{};
    if (packet.size() >= sizeof header) std::memcpy(&header, packet.data(), sizeof header);
    if (header.magic != (TACIT_MAGIC | TACIT_LAYOUT) || header.cookie != terms_.cookie ||
        header.job != terms_.job) {
        ++stats_.foreign;
        return;
    }
    heard_ns_ = now;
    unanswered_ = 0;
    if (header.kind == TACIT_KIND_UNKNOWN) {
        if (active()) settle(FlowOutcome::unknown);  // it knows our cookie: the answer to a packet of ours
        unknown_ = true;
    } else if (header.kind == TACIT_KIND_ROWS) {
        take_rows(header, packet, now);
    }
}

void RowFlows::take_rows(const tacit_header& header, std::span<const uint8_t> packet, uint64_t now) {
    const bool alone = header.lanes & TACIT_ROWS_ACK;
    if (packet.size() != sizeof(Head) + header.nbytes || header.world != terms_.own ||
        header.rank >= terms_.members || header.rank == terms_.own || (alone && header.nbytes)) {
        ++stats_.foreign;
        return;
    }
    ++stats_.received;
    if (broken_) return;
    Head head;
    std::memcpy(&head, packet.data(), sizeof head);
    Outward& out = flows_[header.rank].out;
    out.heard_ns = now;
    if (active()) take_acknowledgement(out, head.rows, std::int16_t(header.place - number_) >= 0, now);
    if (alone) return;
    Inward& in = flows_[header.rank].in;
    if (uint16_t(header.place - number_) == 1 && in.complete())
        keep(in, header.chunk, packet, now);
    else
        take_message(header.rank, header, head.rows, packet.subspan(sizeof head), now);
}

// Before we have begun its number: as much as its sender may have on the way.
void RowFlows::keep(Inward& in, uint32_t number, std::span<const uint8_t> packet, uint64_t now) {
    ++stats_.early;
    if (number - in.next < credit_) in.early.try_emplace(number, packet.begin(), packet.end());
    acknowledge(in, now);  // of nothing new: that we are there, and where
}

void RowFlows::take_message(size_t from, const tacit_header& header, const tacit_rows& rows,
                            std::span<const uint8_t> payload, uint64_t now) {
    Inward& in = flows_[from].in;
    const uint32_t number = header.chunk, ahead = number - in.next, index = number - in.first;
    if (before(number, in.next) || (ahead < most_ahead && in.ahead[number % most_ahead])) {
        ++stats_.repeated;
        acknowledge(in, now);  // ours has been lost, or was late
        return;
    }
    if (header.place != number_ || in.complete() || ahead >= most_ahead || !active()) {
        ++stats_.foreign;
        return;
    }
    if (rows.length != in.room.size()) {
        mismatch_ = {from, rows.length, in.room.size()};
        settle(FlowOutcome::mismatched);
        return;
    }
    const size_t offset = size_t(index) * terms_.room_nbytes;
    if (index >= in.count || rows.offset != offset ||
        payload.size() != std::min(terms_.room_nbytes, in.room.size() - offset)) {
        ++stats_.foreign;
        return;
    }
    if (!payload.empty()) std::memcpy(in.room.data() + offset, payload.data(), payload.size());
    stats_.received_nbytes += payload.size();
    in.ahead[number % most_ahead] = true;
    for (; in.ahead[in.next % most_ahead]; ++in.next) in.ahead[in.next % most_ahead] = false;
    in.progress_ns = now;
    const bool now_due = ++in.unacknowledged >= 2 || ahead || in.complete();
    acknowledge(in, now_due ? now : now + acknowledge_within_ns);
}

void RowFlows::acknowledge(Inward& in, uint64_t due_ns) {
    in.acknowledge_ns = in.acknowledge_ns ? std::min(in.acknowledge_ns, due_ns) : due_ns;
}

// `begun`: the receiver has begun our number. What came there before was kept, and is acknowledged now: no
// evidence of the path's time.
void RowFlows::take_acknowledgement(Outward& out, const tacit_rows& rows, bool begun, uint64_t now) {
    if (rows.next - out.oldest > out.fresh - out.oldest) return;  // an earlier one, overtaken
    if (!begun) out.held = true;
    if (begun && !out.begun) {
        out.begun = true;
        out.begun_ns = now;
        out.backoff = 0;
    }
    bool moved = false;
    uint64_t order = 0, sample_ns = 0;
    const auto arrived = [&](uint32_t number) {
        Sent& sent = out.sent[number % most_ahead];
        if (std::exchange(sent.arrived, true)) return;
        moved = true;
        if (sent.copies || (out.held && sent.sent_ns <= out.begun_ns)) return;  // no evidence (Karn)
        out.note(sent.order);
        if (sent.order > order)
            order = sent.order, sample_ns = std::min(now - sent.sent_ns, longest_sample_ns);
    };
    for (; out.oldest != rows.next; ++out.oldest) arrived(out.oldest);
    for (uint32_t bit = 0; bit < 32; ++bit)
        if (rows.also >> bit & 1 && before(rows.next + 1 + bit, out.fresh)) arrived(rows.next + 1 + bit);
    if (!moved) return;
    out.progress_ns = now;
    if (order) {
        out.round_trips.add(sample_ns);
        out.backoff = 0;
    }
    repair(out);
}

// ---- what is lost

// What three packets that left later have overtaken.
void RowFlows::repair(Outward& out) {
    for (uint32_t number = out.oldest; number != out.fresh && number - out.oldest <= 33; ++number) {
        Sent& sent = out.sent[number % most_ahead];
        if (sent.arrived || sent.queued || sent.order >= out.newest[2]) continue;
        sent.queued = true;
        out.again.push_back(number);
        ++stats_.repaired;
    }
}

uint64_t RowFlows::due_ns(const Outward& out) const {
    if (out.oldest == out.fresh) return UINT64_MAX;
    const Sent& sent = out.sent[out.oldest % most_ahead];
    if (sent.queued) return UINT64_MAX;
    const uint64_t timeout_ns = out.round_trips.timeout_ns();
    const uint64_t pause_ns = std::min(timeout_ns << out.backoff, std::max(timeout_ns, longest_pause_ns));
    return std::max(sent.sent_ns, out.progress_ns) + pause_ns;
}

void RowFlows::fire(Outward& out, uint64_t now) {
    const uint64_t since_ns = now - std::min(now, out.round_trips.timeout_ns());
    size_t budget = out.begun && !out.backoff ? burst : 1;
    for (uint32_t number = out.oldest; number != out.fresh && budget; ++number) {
        Sent& sent = out.sent[number % most_ahead];
        if (sent.arrived || sent.queued || sent.sent_ns > since_ns) continue;
        sent.queued = true;
        out.again.push_back(number);
        ++stats_.timeouts;
        --budget;
    }
    out.backoff = std::min(out.backoff + 1, 16u);
}

uint64_t RowFlows::Inward::remind_ns() const { return std::max(progress_ns, reminded_ns) + remind_after_ns; }

uint64_t RowFlows::wake_ns() const {
    uint64_t wake = UINT64_MAX;
    for (const Flow& flow : flows_) {
        if (flow.in.acknowledge_ns && !broken_) wake = std::min(wake, flow.in.acknowledge_ns);
        if (!active()) continue;
        wake = std::min(wake, due_ns(flow.out));
        if (!flow.in.complete()) wake = std::min(wake, flow.in.remind_ns());
    }
    return active() ? std::min(wake, std::max(heard_ns_, probed_ns_) + probe_after_ns) : wake;
}

void RowFlows::judge(uint64_t now) {
    if (!active()) return;
    bool over = true;
    for (const Flow& flow : flows_) {
        const Outward& out = flow.out;
        over &= out.complete() && flow.in.complete();
        if (out.complete() || !out.begun || now - out.heard_ns > 5 * remind_after_ns) continue;
        const uint8_t copies = out.sent[out.oldest % most_ahead].copies;
        if (copies >= narrow_copies && now - out.progress_ns > narrow_after_ns)
            return settle(FlowOutcome::narrow);
    }
    if (over) {
        ++stats_.exchanges;
        return settle(FlowOutcome::done);
    }
    if (now < std::max(heard_ns_, probed_ns_) + probe_after_ns) return;
    if (unanswered_ >= most_probes) return settle(FlowOutcome::silent);
    ++unanswered_;
    ++stats_.probes;
    probed_ns_ = now;
    send_header(TACIT_KIND_PROBE);
}

void RowFlows::settle(FlowOutcome outcome) {
    outcome_ = outcome;
    changed_.notify_all();
}

// ---- what goes

tacit_header RowFlows::header(tacit_kind kind, size_t to) const {
    tacit_header made{};
    made.magic = TACIT_MAGIC | TACIT_LAYOUT;
    made.kind = uint8_t(kind);
    made.cookie = terms_.cookie;
    made.job = terms_.job;
    made.world = kind == TACIT_KIND_ROWS ? uint8_t(to) : terms_.world;
    made.rank = uint8_t(terms_.own);
    made.lanes = kind == TACIT_KIND_ROWS ? 0 : terms_.lanes;
    made.place = kind == TACIT_KIND_ROWS ? number_ : 0;
    return made;
}

tacit_rows RowFlows::rows_to(size_t to) const {
    const Inward& in = flows_[to].in;
    tacit_rows made{};
    made.next = in.next;
    for (uint32_t bit = 0; bit < 32; ++bit)
        made.also |= uint32_t(in.ahead[(in.next + 1 + bit) % most_ahead]) << bit;
    return made;
}

std::span<const uint8_t> RowFlows::payload(const Outward& out, uint32_t number) const {
    const size_t offset = size_t(number - out.first) * terms_.room_nbytes;
    return out.part.subspan(offset, std::min(terms_.room_nbytes, out.part.size() - offset));
}

void RowFlows::send_header(tacit_kind kind) {
    const tacit_header made = header(kind, 0);
    if (::send(socket_, &made, sizeof made, 0) < 0) ++stats_.unsent;
}

// Copies first, then the members in turn.
bool RowFlows::send_messages(uint64_t now) {
    const size_t members = flows_.size();
    bool more = false;
    for (size_t to = 0; to < members; ++to) {
        Outward& out = flows_[to].out;
        size_t sent = 0;
        for (; sent < out.again.size() && buffers_->packets < most_sent; ++sent) {
            const uint32_t number = out.again[sent];
            out.sent[number % most_ahead].queued = false;
            if (!before(number, out.oldest) && !out.sent[number % most_ahead].arrived)
                add_packet(to, number, now);
        }
        out.again.erase(out.again.begin(), out.again.begin() + std::ptrdiff_t(sent));
        more |= !out.again.empty();
    }
    for (bool moved = true; moved && !more;) {
        moved = false;
        order_by_what_is_left();
        for (const size_t to : turns_) {
            Outward& out = flows_[to].out;
            for (size_t n = 0; n < burst && out.left() && out.fresh - out.oldest < credit_; ++n) {
                if (buffers_->packets == most_sent) {
                    more = true;
                    break;
                }
                out.sent[out.fresh % most_ahead] = Sent{};
                add_packet(to, out.fresh++, now);
                moved = true;
            }
        }
    }
    flush();
    return more;
}

// Whoever lacks most comes first, lest one flow be left alone at the end; then each sender has another order,
// lest all begin with the same receiver.
void RowFlows::order_by_what_is_left() {
    turns_.clear();
    for (size_t i = 1; i < flows_.size(); ++i) turns_.push_back((terms_.own + i) % flows_.size());
    std::stable_sort(turns_.begin(), turns_.end(),
                     [&](size_t a, size_t b) { return flows_[a].out.left() > flows_[b].out.left(); });
}

void RowFlows::add_packet(size_t to, uint32_t number, uint64_t now) {
    Buffers& buffers = *buffers_;
    Flow& flow = flows_[to];
    Sent& sent = flow.out.sent[number % most_ahead];
    const auto bytes = payload(flow.out, number);
    const size_t i = buffers.packets++;
    buffers.alone[i] = sent.order;
    if (sent.order) sent.copies = uint8_t(std::min(sent.copies + 1, 255));
    Head& head = buffers.heads[i];
    head = {header(TACIT_KIND_ROWS, to), rows_to(to)};
    head.header.chunk = number;
    head.header.nbytes = uint16_t(bytes.size());
    head.rows.length = uint32_t(flow.out.part.size());
    head.rows.offset = uint32_t(size_t(number - flow.out.first) * terms_.room_nbytes);
    buffers.pieces[2 * i] = {&head, sizeof head};
    buffers.pieces[2 * i + 1] = {const_cast<uint8_t*>(bytes.data()), bytes.size()};
    sent.order = ++flow.out.order;
    sent.sent_ns = now;
    ++stats_.sent;
    stats_.sent_nbytes += bytes.size();
    flow.in.acknowledge_ns = 0;
    flow.in.unacknowledged = 0;
}

void RowFlows::send_acknowledgements(uint64_t now) {
    for (size_t to = 0; to < flows_.size(); ++to) {
        Inward& in = flows_[to].in;
        const bool remind = active() && to != terms_.own && !in.complete() && now >= in.remind_ns();
        if (!remind && (!in.acknowledge_ns || in.acknowledge_ns > now)) continue;
        if (remind) in.reminded_ns = now;
        in.acknowledge_ns = 0;
        in.unacknowledged = 0;
        Buffers& buffers = *buffers_;
        const size_t i = buffers.packets++;
        buffers.heads[i] = {header(TACIT_KIND_ROWS, to), rows_to(to)};
        buffers.heads[i].header.lanes = TACIT_ROWS_ACK;
        buffers.pieces[2 * i] = {&buffers.heads[i], sizeof buffers.heads[i]};
        buffers.pieces[2 * i + 1] = {nullptr, 0};
        buffers.alone[i] = false;
        ++stats_.acks;
    }
    flush();
}

// What was added, in messages of up to 64 packets of one size, whoever they are for.
void RowFlows::flush() {
    Buffers& to = *buffers_;
    size_t messages = 0;
    for (size_t i = 0, end; i < to.packets; i = end) {
        const size_t nbytes = to.nbytes(i);
        const size_t most =
            terms_.segment && !to.alone[i] ? std::clamp<size_t>(most_udp / nbytes, 1, most_pieces) : 1;
        for (end = i + 1; end < to.packets && end - i < most && !to.alone[end] && to.nbytes(end) == nbytes;)
            ++end;
        msghdr& message = to.outgoing[messages].msg_hdr;
        message = {nullptr, 0, &to.pieces[2 * i], 2 * (end - i), nullptr, 0, 0};
        if (end - i > 1) to.controls[messages].attach(message, uint16_t(nbytes));
        ++messages;
    }
    to.packets = 0;
    for (size_t sent = 0, refused = 0; sent < messages;) {
        const int done = ::sendmmsg(socket_, to.outgoing + sent, unsigned(messages - sent), 0);
        if (done > 0) {
            sent += size_t(done);
        } else if (errno == ECONNREFUSED && refused < 2) {
            ++refused;  // of an earlier packet; this one has not been tried
            ++stats_.refused;
        } else if (errno != EINTR) {
            const msghdr& message = to.outgoing[sent++].msg_hdr;
            if (message.msg_control && (errno == EINVAL || errno == EIO || errno == EMSGSIZE)) {
                terms_.segment = false;  // the device or the path's MTU would not have it; nor later
                for (size_t i = 0; i < message.msg_iovlen; i += 2) {
                    const msghdr one{nullptr, 0, message.msg_iov + i, 2, nullptr, 0, 0};
                    if (::sendmsg(socket_, &one, 0) < 0) ++stats_.unsent;
                }
            } else {
                stats_.unsent += message.msg_iovlen / 2;  // as good as lost on the way
            }
        }
    }
}

}  // namespace tacit
