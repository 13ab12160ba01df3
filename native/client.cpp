#include "client.h"

#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>

#include "refuse.h"

namespace tacit {
namespace {

using std::size_t;
using std::uint64_t;
using std::uint8_t;

constexpr uint64_t ms = 1'000'000;
constexpr uint64_t unmeasured_ns = 50 * ms;    // the first time-out, until there are round trips
constexpr uint64_t least_timeout_ns = 2 * ms;  // below it, the scheduler of a busy machine looks like loss
constexpr uint64_t longest_pause_ns = 250 * ms;
constexpr size_t least_budget =
    8;  // packets sent again at a time-out, until one of them has got something moving
constexpr uint64_t reordered = 3;  // results that may overtake a chunk's before it counts as lost

constexpr size_t most_received = 64, most_sent = 512;  // messages, packets a call
constexpr size_t room_nbytes = 65536;                  // what one message may hold with UDP_GRO

Fd open_socket(tacit_address address, int buffer_nbytes) {
    Fd fd = open_udp(address, buffer_nbytes, timeval{0, 100'000});
    set_option(fd, SOL_UDP, UDP_GRO, 1);  // runs of results come as one message, if they can
    return fd;
}

}  // namespace

void RoundTrips::add(uint64_t sample_ns) {
    if (samples_++ == 0) {
        smoothed_ns_ = sample_ns;
        spread_ns_ = sample_ns / 2;
        return;
    }
    const uint64_t off = sample_ns > smoothed_ns_ ? sample_ns - smoothed_ns_ : smoothed_ns_ - sample_ns;
    // Up at once, down slowly: round trips come by the thousand a second, and a busy machine's are slow in
    // bursts.
    spread_ns_ = off > spread_ns_ ? (3 * spread_ns_ + off) / 4 : (63 * spread_ns_ + off) / 64;
    smoothed_ns_ = (7 * smoothed_ns_ + sample_ns) / 8;
}

uint64_t RoundTrips::timeout_ns() const {
    return samples_ ? std::max(smoothed_ns_ + 4 * spread_ns_, least_timeout_ns) : unmeasured_ns;
}

// What calls to the kernel point to. A packet of a batch has a header of its own, whatever its slot.
struct Client::Buffers {
    std::unique_ptr<uint8_t, decltype(&std::free)> room{
        static_cast<uint8_t*>(std::aligned_alloc(64, most_received* room_nbytes)), std::free};
    iovec rooms[most_received];
    SegmentSize sizes[most_received];
    mmsghdr incoming[most_received];

    tacit_header headers[most_sent];
    iovec pieces[2 * most_sent];
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
};

Client::Client(tacit_address bind, int buffer_nbytes)
    : socket_(open_socket(bind, buffer_nbytes)),
      address_(address_of(socket_)),
      buffers_(std::make_unique<Buffers>()) {}

Client::~Client() = default;

void Client::start(const Job& job, int rank, tacit_address plane, std::uint32_t chunk, bool segment,
                   std::uint32_t window) {
    const tacit_job& terms = job.terms;
    const size_t world = job.members.size();
    if (rank < 0 || size_t(rank) >= world)
        refuse("rank=", rank, ": the job has ranks 0 to ", std::int64_t(world) - 1);
    if (!std::has_single_bit(terms.slots)) refuse("slots=", terms.slots, ": a power of two");
    const size_t down_nbytes = size_t(terms.elements) * tacit_bits_down(terms.lanes) / 8;
    if (!down_nbytes || down_nbytes > TACIT_MOST_PAYLOAD || terms.elements % TACIT_ELEMENTS_MULTIPLE)
        refuse("elements=", terms.elements, ": a multiple of ", int(TACIT_ELEMENTS_MULTIPLE),
               " whose lanes take up to ", int(TACIT_MOST_PAYLOAD), " bytes");
    abandon();
    const sockaddr_in to = sockaddr_of(plane);
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0)
        fail("connect to the plane");
    started_ = true;
    id_ = job.id;
    rank_ = uint8_t(rank);
    terms_ = terms;
    terms_.world = uint8_t(world);
    terms_.data_nbytes = std::uint16_t(size_t(terms.elements) * tacit_bits_up(terms.lanes) / 8);
    terms_.result_nbytes = std::uint16_t(down_nbytes);
    next_ = chunk;
    lossy_ = window > 0;
    places_ = lossy_ ? terms.slots / 2u : terms.slots;
    window_ = lossy_ ? std::min(window, places_) : terms.slots;
    newest_result_ = chunk - 1;
    slots_.assign(places_, Slot{});
    segment_ = segment;
    moving_ = starting_ = RoundTrips();
    drain_ns_ = 0;
    short_ = false;
}

void Client::begin(std::span<const uint8_t> data, std::span<uint8_t> out, size_t numel) {
    if (!started_) refuse("start() comes before a vector");
    if (active_) refuse("a vector is on its way already; resume() or abandon() it");
    const size_t up = (numel * tacit_bits_up(terms_.lanes) + 7) / 8,
                 down = numel * tacit_bits_down(terms_.lanes) / 8;
    if (data.size() != up) refuse(data.size(), " bytes of data: ", numel, " elements have ", up);
    if (out.size() != down) refuse(out.size(), " bytes for the sum: ", numel, " elements have ", down);
    active_ = true;
    data_ = data;
    out_ = out;
    first_ = next_;
    chunks_ = (numel + terms_.elements - 1) / terms_.elements;
    finished_ = 0;
    counts_.assign(chunks_, 0);
    saturated_ = unknown_ = behind_ = false;
    tail_.assign(terms_.data_nbytes, 0);
    if (const size_t rest = up - (up ? (chunks_ - 1) * terms_.data_nbytes : 0); rest)
        std::memcpy(tail_.data(), data.data() + data.size() - rest, rest);
    slots_.assign(places_, Slot{});
    flights_.clear();
    to_send_.clear();
    said_all_ = false;
    oldest_ = 0;
    begun_ = std::min<uint64_t>(chunks_, window_);
    for (uint64_t i = 0; i < begun_; ++i) queue_next(i);
    began_ns_ = UdpPlane::now_ns();
    epoch_ns_ = heard_ns_ = progress_ns_ = fired_ns_ = settled_ns_ = 0;
    backoff_ = 0;
    budget_ = least_budget;
    moved_ = fresh_ = false;
    newest_ = order_;
}

void Client::attend() {
    attended_ns_ = UdpPlane::now_ns();
    unknown_ = behind_ = false;
}

std::uint32_t Client::ahead() {
    if (!active_)
        for (int messages; (messages = buffers_->receive(socket_)) > 0;)
            receive_all(size_t(messages), UdpPlane::now_ns());
    return tacit_after(newest_result_ + 1, next_) ? newest_result_ + 1 - next_ : 0;
}

void Client::close() {
    active_ = started_ = false;
    socket_.reset();
}

void Client::abandon() {
    if (active_) next_ = first_ + std::uint32_t(chunks_);
    active_ = false;
}

Outcome Client::run(uint64_t patience_ns, uint64_t settle_ns, uint64_t slice_ns) {
    if (!active_) refuse("there is no vector on its way");
    patience_ns_ = patience_ns;
    settle_ns_ = terms_.quorum < terms_.world ? settle_ns : 0;
    uint64_t now = UdpPlane::now_ns();
    const uint64_t until = now + slice_ns;
    while (finished_ < chunks_) {
        const int messages = buffers_->receive(socket_);
        if (messages < 0 && errno == ECONNREFUSED) ++stats_.refused;
        now = UdpPlane::now_ns();
        if (messages > 0) receive_all(size_t(messages), now);
        if (unknown_) return Outcome::unknown;
        if (behind_) return Outcome::behind;
        if (finished_ == chunks_) break;
        repair();
        if (front() && now >= due_ns()) fire(now);
        if (now >= settle_due_ns()) settle(now);
        send_all();
        if (const Outcome outcome = judge(now); outcome != Outcome::running) return outcome;
        if (now >= until) return Outcome::running;
        if (messages > 0) continue;
        const uint64_t wake = std::min({due_ns(), settle_due_ns(), until});
        const uint64_t pause = wake > now ? wake - now : 0;
        const timespec wait{time_t(pause / 1'000'000'000), long(pause % 1'000'000'000)};
        pollfd ready{socket_, POLLIN, 0};
        ::ppoll(&ready, 1, &wait, nullptr);
    }
    ++stats_.reduces;
    stats_.chunks += chunks_;
    stats_.data_nbytes += data_.size();
    stats_.result_nbytes += out_.size();
    stats_.busy_ns += now - std::min(now, began_ns_);
    abandon();
    return Outcome::done;
}

// ---- what comes

void Client::receive_all(size_t messages, uint64_t now) {
    worst_ns_ = came_ = 0;
    for (size_t i = 0; i < messages; ++i) {
        const mmsghdr& message = buffers_->incoming[i];
        const uint8_t* const start = buffers_->room.get() + i * room_nbytes;
        const size_t nbytes = message.msg_len, size = SegmentSize::read(message.msg_hdr, nbytes);
        if (message.msg_hdr.msg_flags & MSG_TRUNC) continue;
        for (size_t at = 0; at < nbytes; at += size) take({start + at, std::min(size, nbytes - at)}, now);
    }
    if (came_) learn(now);
}

void Client::take(std::span<const uint8_t> packet, uint64_t now) {
    tacit_header header;
    if (packet.size() < sizeof header) {
        ++stats_.foreign;
        return;
    }
    std::memcpy(&header, packet.data(), sizeof header);
    const auto lanes = packet.subspan(sizeof header);
    if (header.magic != (TACIT_MAGIC | TACIT_LAYOUT) || header.cookie != terms_.cookie || header.job != id_ ||
        header.nbytes != lanes.size()) {
        ++stats_.foreign;
        return;
    }
    ++stats_.received;
    if (header.kind == TACIT_KIND_UNKNOWN) {
        unknown_ = true;  // it knows our cookie, so it is the answer to a packet of ours
        return;
    }
    heard_ns_ = now;
    if (header.kind == TACIT_KIND_RESULT && tacit_after(header.chunk, newest_result_))
        newest_result_ = header.chunk;
    const Slot& slot = slots_[header.chunk & (places_ - 1)];
    const bool awaited = slot.waiting && std::uint32_t(first_ + slot.index) == header.chunk;
    if (header.kind == TACIT_KIND_ECHO)
        ++stats_.echoes;
    else if (!awaited)
        ++stats_.late;
    else if (header.kind == TACIT_KIND_STALE)
        behind_ = true;
    else if (header.kind == TACIT_KIND_RESULT)
        take_result(header, lanes, now);
}

void Client::take_result(const tacit_header& header, std::span<const uint8_t> lanes, uint64_t now) {
    if (header.place != tacit_place_of(&terms_, header.chunk) || lanes.size() != terms_.result_nbytes ||
        (header.lanes & ~TACIT_SATURATED) != terms_.lanes) {
        ++stats_.foreign;
        return;
    }
    const size_t at = header.chunk & (places_ - 1);
    Slot& slot = slots_[at];
    const size_t start = slot.index * terms_.result_nbytes;
    std::memcpy(out_.data() + start, lanes.data(), std::min(lanes.size(), out_.size() - start));
    counts_[slot.index] = header.world;
    saturated_ |= (header.lanes & TACIT_SATURATED) != 0;
    short_ = header.world < terms_.world;
    slot.waiting = slot.queued = false;
    ++finished_;
    if (came_++ == 0 && (!progress_ns_ || fired_ns_ > progress_ns_)) epoch_ns_ = now;  // things move (again)
    if (!slot.again) {  // else it may be the answer to either packet: no evidence, no sample (Karn)
        fresh_ = true;
        newest_ = std::max(newest_, slot.order);
        worst_ns_ = std::max(worst_ns_, now - std::max(slot.sent_ns, epoch_ns_));
    }
    slot.again = slot.asked = false;
    if (lossy_)
        go_on();
    else if (slot.index + terms_.slots < chunks_)
        queue_next(slot.index + terms_.slots);
}

// The next chunks of a lossy job, in order. A result counts one rank at least.
void Client::go_on() {
    while (oldest_ < begun_ && counts_[oldest_]) ++oldest_;
    for (; begun_ < chunks_ && begun_ - finished_ < window_ && begun_ - oldest_ < places_; ++begun_)
        queue_next(begun_);
}

// From the new results of a batch: one sample, its slowest.
void Client::learn(uint64_t now) {
    if (!progress_ns_)
        starting_.add(std::min(now - began_ns_, longest_pause_ns));
    else if (epoch_ns_ != now) {
        const std::int64_t apart = std::int64_t((now - progress_ns_) / came_);
        drain_ns_ = uint64_t(std::int64_t(drain_ns_) + (apart - std::int64_t(drain_ns_)) / 8);
        if (worst_ns_) moving_.add(worst_ns_);
    }
    progress_ns_ = now;
    moved_ = true;
    if (fresh_) backoff_ = 0;  // else our own copies may fill the queue, and hide that we are too hasty
}

// ---- what is lost

bool Client::front() {
    const auto answered = [&](const Flight& flight) {
        const Slot& slot = slots_[flight.slot];
        return !slot.waiting || slot.queued || slot.order != flight.order;
    };
    while (!flights_.empty() && answered(flights_.front())) flights_.pop_front();
    return !flights_.empty();
}

void Client::queue(size_t slot) {
    if (slots_[slot].queued) return;
    slots_[slot].queued = true;
    to_send_.push_back(slot);
}

void Client::queue_next(uint64_t index) {
    const size_t slot = (first_ + index) & (places_ - 1);
    slots_[slot].index = index;
    queue(slot);
}

// Chunks that results of later ones have overtaken. Ranks differ in what they lose, and so in what they send
// first: an eighth of the window is no sign of loss.
void Client::repair() {
    const uint64_t allowed = std::max<uint64_t>(reordered, window_ / 8);
    while (front() && flights_.front().order + allowed < newest_) {
        slots_[flights_.front().slot].again = true;
        queue(flights_.front().slot);
        ++stats_.repaired;
    }
}

// How long to wait before a chunk is sent again; never less than the window takes to drain.
uint64_t Client::timeout_ns() const {
    if (!progress_ns_ || !moving_.samples()) return starting_.timeout_ns();  // short vectors never move
    const uint64_t outstanding = std::min<uint64_t>(chunks_ - finished_, window_);
    return std::max(moving_.timeout_ns(), 2 * outstanding * drain_ns_);
}

uint64_t Client::pause_ns() const {
    return std::max(std::min(longest_pause_ns, patience_ns_ / 4), least_timeout_ns);
}

// When the transmission that has waited longest has waited too long.
uint64_t Client::expires_ns() const {
    return std::max(flights_.front().sent_ns, epoch_ns_) + std::min(timeout_ns(), pause_ns());
}

uint64_t Client::due_ns() const {
    if (flights_.empty()) return UINT64_MAX;
    return std::max(expires_ns(), fired_ns_ + std::min(timeout_ns() << backoff_, pause_ns()));
}

void Client::fire(uint64_t now) {
    const bool still = !moved_;
    const bool again = now - fired_ns_ < 8 * timeout_ns();  // we have just been here
    budget_ = still || !again ? least_budget : std::min<size_t>(2 * budget_, window_);
    if (still) {
        ++stats_.probes;
        send_header(TACIT_KIND_PROBE, std::uint32_t(stats_.probes));
    }
    if (!fresh_) backoff_ = std::min(backoff_ + 1, 16u);
    for (size_t i = 0; i < budget_ && front() && now >= expires_ns(); ++i) {
        slots_[flights_.front().slot].again = true;
        queue(flights_.front().slot);
        ++stats_.timeouts;
    }
    fired_ns_ = now;
    moved_ = fresh_ = false;
}

// ---- quorum

// Who missed the last sum is likely to miss the next one too: then a few time-outs are enough.
uint64_t Client::settle_due_ns() const {
    if (!settle_ns_) return UINT64_MAX;
    const uint64_t wait = short_ ? std::min(settle_ns_, 2 * timeout_ns()) : settle_ns_;
    return std::max({began_ns_, progress_ns_, settled_ns_}) + wait;
}

// Data first: who asks for the sum should be in it.
void Client::settle(uint64_t now) {
    settled_ns_ = now;
    for (size_t slot = 0; slot < slots_.size(); ++slot)
        if (slots_[slot].waiting) {
            slots_[slot].again = true;
            queue(slot);
        }
    const auto asked = to_send_;
    send_all();
    for (const size_t slot : asked) {
        ++stats_.settles;
        send_header(TACIT_KIND_SETTLE, std::uint32_t(first_ + slots_[slot].index));
    }
}

Outcome Client::judge(uint64_t now) const {
    const auto since = [&](uint64_t then) { return now - std::min(now, std::max(then, attended_ns_)); };
    if (since(heard_ns_) >= patience_ns_) return Outcome::silent;
    if (since(progress_ns_) >= patience_ns_ && since(heard_ns_) < patience_ns_ / 2) return Outcome::stalled;
    return Outcome::running;
}

// ---- what goes

tacit_header Client::header(tacit_kind kind, std::uint32_t chunk) const {
    tacit_header made{};
    made.magic = TACIT_MAGIC | TACIT_LAYOUT;
    made.kind = uint8_t(kind);
    made.chunk = chunk;
    made.cookie = terms_.cookie;
    made.job = id_;
    made.world = terms_.world;
    made.rank = rank_;
    made.lanes = terms_.lanes;
    made.place = kind == TACIT_KIND_PROBE ? 0 : std::uint16_t(tacit_place_of(&terms_, chunk));
    made.nbytes = kind == TACIT_KIND_DATA ? terms_.data_nbytes : 0;
    return made;
}

std::span<const uint8_t> Client::payload(uint64_t index) const {
    if (index + 1 == chunks_) return tail_;
    return data_.subspan(index * terms_.data_nbytes, terms_.data_nbytes);
}

void Client::send_header(tacit_kind kind, std::uint32_t chunk) {
    const tacit_header made = header(kind, chunk);
    if (::send(socket_, &made, sizeof made, 0) < 0) ++stats_.unsent;
}

// What is sent again goes packet by packet: a run may be what the path would not have.
void Client::send_all() {
    if (lossy_) send_asks();
    const auto copies = std::stable_partition(to_send_.begin(), to_send_.end(),
                                              [&](size_t slot) { return !slots_[slot].again; });
    const size_t nbytes = sizeof(tacit_header) + terms_.data_nbytes;
    const size_t most = segment_ ? std::clamp<size_t>(most_udp / nbytes, 1, most_pieces) : 1;
    send_data({to_send_.begin(), copies}, most);
    send_data({copies, to_send_.end()}, 1);
    to_send_.clear();
    if (!lossy_ || said_all_ || begun_ < chunks_) return;
    said_all_ = true;  // twice: if both are lost, the deadline says it
    for (int i = 0; i < 2; ++i) send_header(TACIT_KIND_SETTLE, std::uint32_t(first_ + chunks_ - 1));
}

// In place of data that are sent for the second time.
void Client::send_asks() {
    const auto asks = std::stable_partition(to_send_.begin(), to_send_.end(),
                                            [&](size_t at) { return !slots_[at].again || slots_[at].asked; });
    const uint64_t now = UdpPlane::now_ns();
    std::for_each(asks, to_send_.end(), [&](size_t at) {
        Slot& slot = slots_[at];
        send_header(TACIT_KIND_SETTLE, std::uint32_t(first_ + slot.index));
        ++stats_.settles;
        slot.asked = true;
        slot.queued = false;
        slot.sent_ns = now;
        slot.order = ++order_;
        flights_.push_back({at, order_, now});
    });
    to_send_.erase(asks, to_send_.end());
}

// In messages of up to `most` packets.
void Client::send_data(std::span<const size_t> slots, size_t most) {
    for (; slots.size() > most_sent; slots = slots.subspan(most_sent))
        send_data(slots.first(most_sent), most);
    if (slots.empty()) return;
    Buffers& to = *buffers_;
    const size_t nbytes = sizeof(tacit_header) + terms_.data_nbytes;
    const uint64_t now = UdpPlane::now_ns();
    size_t messages = 0, packets = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
        Slot& slot = slots_[slots[i]];
        to.headers[i] = header(TACIT_KIND_DATA, std::uint32_t(first_ + slot.index));
        if (slot.index + TACIT_MORE_CHUNKS < chunks_) to.headers[i].lanes |= TACIT_MORE;
        const auto bytes = payload(slot.index);
        to.pieces[2 * i] = {&to.headers[i], sizeof to.headers[i]};
        to.pieces[2 * i + 1] = {const_cast<uint8_t*>(bytes.data()), bytes.size()};
        if (i % most == 0) {
            packets = std::min(most, slots.size() - i);
            msghdr& message = to.outgoing[messages].msg_hdr;
            message = {nullptr, 0, &to.pieces[2 * i], 2 * packets, nullptr, 0, 0};
            if (packets > 1) to.controls[messages].attach(message, std::uint16_t(nbytes));
            ++messages;
        }
        slot.waiting = true;
        slot.queued = slot.asked = false;
        slot.sent_ns = now;
        slot.order = ++order_;
        flights_.push_back({slots[i], order_, now});
    }
    stats_.sent += slots.size();
    for (size_t sent = 0, refused = 0; sent < messages;) {
        const int done = ::sendmmsg(socket_, to.outgoing + sent, unsigned(messages - sent), 0);
        if (done > 0) {
            sent += size_t(done);
        } else if (errno == ECONNREFUSED && refused < 2) {
            ++refused;  // said of an earlier packet; this one has not been tried
            ++stats_.refused;
        } else if (errno != EINTR) {
            const msghdr& message = to.outgoing[sent++].msg_hdr;
            if (message.msg_control && (errno == EINVAL || errno == EIO || errno == EMSGSIZE)) {
                segment_ = false;  // the device or the path's MTU would not have it; nor later, on this path
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
