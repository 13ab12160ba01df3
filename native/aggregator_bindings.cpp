#include "aggregator_bindings.h"

#include <arpa/inet.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "client.h"
#include "plane.h"
#include "row_flows.h"
#include "slot.h"
#include "udp_plane.h"
#include "wire.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tacit;

namespace {

using Address = std::pair<std::string, int>;  // as Python's sockets have it

tacit_address from_python(const Address& address) {
    const auto& [host, port] = address;
    tacit_address found{};
    if (::inet_pton(AF_INET, host.c_str(), &found.ip) != 1)
        throw nb::value_error(("host '" + host + "': four numbers with dots between, as 10.0.0.1").c_str());
    if (port < 0 || port > 65535)
        throw nb::value_error(("port=" + std::to_string(port) + ": from 0 to 65535").c_str());
    found.port = htons(std::uint16_t(port));
    return found;
}

Address to_python(tacit_address address) {
    char text[INET_ADDRSTRLEN];
    ::inet_ntop(AF_INET, &address.ip, text, sizeof text);
    return {text, ntohs(address.port)};
}

const char* const count_names[] = {"",
#define TACIT_COUNT(name, text) text,
                                   TACIT_VERDICTS(TACIT_COUNT) TACIT_EVENTS(TACIT_COUNT)
#undef TACIT_COUNT
};

nb::dict counts_to_python(const Counts& counts) {
    nb::dict found;
    for (int what = TACIT_FINE + 1; what < TACIT_COUNTS; ++what)
        found[count_names[what]] = counts[std::size_t(what)];
    return found;
}

nb::dict stats_to_python(const JobStats& stats) {
    nb::list ranks;
    for (const auto& rank : stats.ranks)
        ranks.append(nb::make_tuple(rank.packets, rank.last_ns, rank.missing, rank.left_out));
    nb::dict found;
    found["counts"] = counts_to_python(stats.counts);
    found["received_nbytes"] = stats.received_nbytes;
    found["answered_nbytes"] = stats.answered_nbytes;
    found["unfinished"] = stats.unfinished;
    found["above"] = stats.above;
    found["ranks"] = ranks;
    return found;
}

// A field of the wire that would be cut is refused; the plane checks the rest.
template <class Narrow>
Narrow narrow(const char* name, std::int64_t value) {
    if (std::in_range<Narrow>(value)) return Narrow(value);
    throw nb::value_error((std::string(name) + "=" + std::to_string(value) + ": from 0 to " +
                           std::to_string(std::numeric_limits<Narrow>::max()))
                              .c_str());
}

Job make_job(std::int64_t id, std::uint64_t cookie, const std::vector<Address>& members, std::int64_t lanes,
             std::int64_t elements, std::int64_t first_slot, std::int64_t slots, std::int64_t quorum,
             const nb::bytes& table) {
    Job job{narrow<std::uint8_t>("id", id), {}, {}};
    job.terms.cookie = cookie;
    job.terms.lanes = narrow<std::uint8_t>("lanes", lanes);
    job.terms.elements = narrow<std::uint16_t>("elements", elements);
    job.terms.first_slot = narrow<std::uint16_t>("first_slot", first_slot);
    job.terms.slots = narrow<std::uint16_t>("slots", slots);
    job.terms.quorum = narrow<std::uint8_t>("quorum", quorum);
    if (table.size() != sizeof job.terms.table)
        throw nb::value_error(("table has " + std::to_string(table.size()) + " entries: exactly " +
                               std::to_string(sizeof job.terms.table))
                                  .c_str());
    std::memcpy(job.terms.table, table.data(), sizeof job.terms.table);
    for (const auto& member : members) job.members.push_back(from_python(member));
    return job;
}

// parent, job, cookie, world, rank, first_slot, slots, ranks, segment
using Upstream = std::tuple<Address, std::int64_t, std::uint64_t, std::int64_t, std::int64_t, std::int64_t,
                            std::int64_t, std::int64_t, bool>;

tacit_upstream from_python(const Upstream& upstream) {
    const auto& [parent, job, cookie, world, rank, first_slot, slots, ranks, segment] = upstream;
    return {cookie,
            from_python(parent),
            narrow<std::uint16_t>("first_slot", first_slot),
            narrow<std::uint16_t>("slots", slots),
            narrow<std::uint8_t>("job", job),
            narrow<std::uint8_t>("world", world),
            narrow<std::uint8_t>("rank", rank),
            narrow<std::uint8_t>("ranks", ranks)};
}

template <class SomePlane>
void add_job(SomePlane& plane, std::int64_t id, std::uint64_t cookie, const std::vector<Address>& members,
             std::int64_t lanes, std::int64_t elements, std::int64_t first_slot, std::int64_t slots,
             std::int64_t quorum, nb::bytes table, std::int64_t below,
             const std::optional<Upstream>& upstream, std::int64_t shards, std::uint64_t deadline_ns) {
    Job job = make_job(id, cookie, members, lanes, elements, first_slot, slots, quorum, table);
    job.terms.below = narrow<std::uint8_t>("below", below);
    job.terms.upward = upstream.has_value();
    job.shards = narrow<std::uint8_t>("shards", shards);
    job.deadline_ns = deadline_ns;
    if (upstream) {
        job.above = from_python(*upstream);
        job.segment_above = std::get<bool>(*upstream);
    }
    nb::gil_scoped_release unlocked;
    plane.add_job(job);
}

// A plane and the answers to its last packet.
struct OnePacketPlane : Plane {
    Outbox out{1, 64};
    using Plane::Plane;

    nb::list receive_one(nb::bytes packet, const Address& source, std::uint64_t now_ns) {
        out.clear();
        receive({static_cast<const std::uint8_t*>(packet.data()), packet.size()}, from_python(source), now_ns,
                out);
        return answers();
    }

    nb::list expire_now(std::uint64_t now_ns) {
        out.clear();
        expire(now_ns, out);
        return answers();
    }

    nb::list answers() const {
        nb::list answers;
        for (const auto& answer : out.answers())
            answers.append(
                nb::make_tuple(nb::bytes(answer.packet.data(), answer.packet.size()), to_python(answer.to)));
        return answers;
    }

    // Answers, and nanoseconds without what Python costs.
    std::pair<std::size_t, std::uint64_t> receive_rows(
        nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu> packets,
        const std::vector<Address>& sources) {
        if (sources.size() != packets.shape(0) || packets.stride(1) != 1)
            throw nb::value_error("packets: rows of bytes that lie together, and a source for each");
        std::vector<tacit_address> from;
        for (const auto& source : sources) from.push_back(from_python(source));
        nb::gil_scoped_release unlocked;
        std::size_t answers = 0;
        const std::uint64_t start = UdpPlane::now_ns();
        for (std::size_t i = 0; i < from.size(); ++i) {
            out.clear();
            receive({packets.data() + std::int64_t(i) * packets.stride(0), packets.shape(1)}, from[i], 0,
                    out);
            answers += out.answers().size();
        }
        return {answers, UdpPlane::now_ns() - start};
    }
};

// ---- a rank's side

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const char* const outcome_names[] = {
#define TACIT_OUTCOME(name, text) text,
    TACIT_OUTCOMES(TACIT_OUTCOME)
#undef TACIT_OUTCOME
};

constexpr std::uint64_t between_signals_ns = 100'000'000;

std::uint64_t to_ns(double seconds) { return std::uint64_t(std::clamp(seconds, 0.0, 1e6) * 1e9); }

// Without the GIL; Ctrl-C comes through.
const char* wait_for(Client& client, double patience_s, double settle_s) {
    client.attend();
    while (true) {
        Outcome outcome;
        {
            nb::gil_scoped_release unlocked;
            outcome = client.run(to_ns(patience_s), to_ns(settle_s), between_signals_ns);
        }
        if (outcome != Outcome::running) return outcome_names[std::size_t(outcome)];
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

nb::dict client_stats_to_python(const Client& client) {
    const ClientStats& stats = client.stats();
    nb::dict found;
    found["reduces"] = stats.reduces;
    found["chunks"] = stats.chunks;
    found["data_nbytes"] = stats.data_nbytes;
    found["result_nbytes"] = stats.result_nbytes;
    found["busy_s"] = double(stats.busy_ns) / 1e9;
    found["sent"] = stats.sent;
    found["repaired"] = stats.repaired;
    found["timeouts"] = stats.timeouts;
    found["settles"] = stats.settles;
    found["probes"] = stats.probes;
    found["echoes"] = stats.echoes;
    found["received"] = stats.received;
    found["late"] = stats.late;
    found["foreign"] = stats.foreign;
    found["refused"] = stats.refused;
    found["unsent"] = stats.unsent;
    found["round_trips"] = client.round_trips().samples();
    found["round_trip_s"] = double(client.round_trips().smoothed_ns()) / 1e9;
    found["timeout_s"] = double(client.timeout_ns()) / 1e9;
    return found;
}

void bind_client(nb::module_& m) {
    nb::class_<Client>(m, "AggregatorClient", "A rank's UDP socket to an aggregator.")
        .def(
            "__init__",
            [](Client* self, const Address& bind, int buffer_nbytes) {
                new (self) Client(from_python(bind), buffer_nbytes);
            },
            "bind"_a, "buffer_nbytes"_a)
        .def(
            "address", [](const Client& self) { return to_python(self.address()); }, "Where it is bound.")
        .def(
            "start",
            [](Client& self, std::int64_t id, std::uint64_t cookie, const std::vector<Address>& members,
               std::int64_t lanes, std::int64_t elements, std::int64_t first_slot, std::int64_t slots,
               std::int64_t quorum, nb::bytes table, int rank, const Address& plane, std::uint32_t chunk,
               bool segment, std::uint32_t window) {
                self.start(make_job(id, cookie, members, lanes, elements, first_slot, slots, quorum, table),
                           rank, from_python(plane), chunk, segment, window);
            },
            "id"_a, "cookie"_a, "members"_a, "lanes"_a, "elements"_a, "first_slot"_a, "slots"_a, "quorum"_a,
            "table"_a, "rank"_a, "plane"_a, "chunk"_a, "segment"_a, "window"_a = 0,
            "Is `rank` of this job from now on.")
        .def(
            "begin",
            [](Client& self, Bytes data, WritableBytes out, std::size_t numel) {
                self.begin({data.data(), data.size()}, {out.data(), out.size()}, numel);
            },
            "data"_a.noconvert(), "out"_a.noconvert(), "numel"_a,
            nb::sig("def begin(self, data: numpy.typing.NDArray[numpy.uint8], out: "
                    "numpy.typing.NDArray[numpy.uint8], numel: int) -> None"),
            "A vector to be summed; the caller keeps both arrays until it is done or abandoned.")
        .def("wait", &wait_for, "patience_s"_a, "settle_s"_a,
             "Works on the vector until an outcome is known, and names it.")
        .def("abandon", &Client::abandon, "Gives the vector up; chunk numbers go on behind it.")
        .def("close", &Client::close, "Frees the port, for good.")
        .def_prop_ro("next_chunk", &Client::next_chunk)
        .def("ahead", &Client::ahead,
             "Between two vectors: chunks from the next one on that others have closed already.")
        .def_prop_ro("saturated", &Client::saturated, "Whether a lane of the last sum met its limit.")
        .def(
            "counts",
            [](const Client& self) { return nb::bytes(self.counts().data(), self.counts().size()); },
            "Ranks in the sum of each chunk of the last vector.")
        .def("stats", &client_stats_to_python, nb::sig("def stats(self) -> dict[str, typing.Any]"),
             "Figures since it was built.");
}

const char* const flow_outcome_names[] = {
#define TACIT_OUTCOME(name, text) text,
    TACIT_FLOW_OUTCOMES(TACIT_OUTCOME)
#undef TACIT_OUTCOME
};

nb::dict flow_stats_to_python(const RowFlows& flows) {
    const FlowStats stats = flows.stats();
    nb::dict found;
#define TACIT_COUNT(name) found[#name] = stats.name;
    TACIT_FLOW_COUNTS(TACIT_COUNT)
#undef TACIT_COUNT
    found["round_trip_s"] = double(flows.round_trip_ns()) / 1e9;
    return found;
}

void bind_row_flows(nb::module_& m) {
    nb::class_<RowFlows>(m, "RowFlows", "A member's UDP socket to all others, through an aggregator.")
        .def(
            "__init__",
            [](RowFlows* self, const Address& bind, int buffer_nbytes) {
                new (self) RowFlows(from_python(bind), buffer_nbytes);
            },
            "bind"_a, "buffer_nbytes"_a)
        .def(
            "address", [](const RowFlows& self) { return to_python(self.address()); }, "Where it is bound.")
        .def(
            "start",
            [](RowFlows& self, std::int64_t id, std::uint64_t cookie, std::int64_t world, std::int64_t lanes,
               std::size_t members, std::size_t own, const Address& plane, std::size_t room_nbytes,
               std::size_t window_nbytes, std::uint32_t first, bool segment) {
                self.start({narrow<std::uint8_t>("id", id), narrow<std::uint8_t>("world", world),
                            narrow<std::uint8_t>("lanes", lanes), cookie, members, own, from_python(plane),
                            room_nbytes, window_nbytes, first, segment});
            },
            "id"_a, "cookie"_a, "world"_a, "lanes"_a, "members"_a, "own"_a, "plane"_a, "room_nbytes"_a,
            "window_nbytes"_a, "first"_a, "segment"_a, "Is member `own` of this job from now on.")
        .def(
            "begin",
            [](RowFlows& self, const std::vector<Bytes>& parts, const std::vector<WritableBytes>& rooms) {
                std::vector<std::span<const std::uint8_t>> from;
                std::vector<std::span<std::uint8_t>> to;
                for (const auto& part : parts) from.emplace_back(part.data(), part.size());
                for (const auto& room : rooms) to.emplace_back(room.data(), room.size());
                nb::gil_scoped_release unlocked;
                self.begin(std::move(from), std::move(to));
            },
            "parts"_a, "rooms"_a,
            nb::sig("def begin(self, parts: list[numpy.typing.NDArray[numpy.uint8]], rooms: "
                    "list[numpy.typing.NDArray[numpy.uint8]]) -> None"),
            "The next exchange; the caller keeps all arrays until it is done or abandoned.")
        .def(
            "wait",
            [](RowFlows& self, double slice_s) {
                nb::gil_scoped_release unlocked;
                return flow_outcome_names[std::size_t(self.wait(to_ns(slice_s)))];
            },
            "slice_s"_a, "The outcome of the exchange; 'running' if there is none in time.")
        .def("abandon", &RowFlows::abandon, nb::call_guard<nb::gil_scoped_release>(),
             "Gives the exchange up, and all later ones; the arrays are the caller's again.")
        .def("close", &RowFlows::close, nb::call_guard<nb::gil_scoped_release>(),
             "Ends the thread and frees the port. A second call does nothing.")
        .def("here", &RowFlows::here, "By member, whether its message of this exchange has come.")
        .def("acknowledged", &RowFlows::acknowledged, "By member, whether it has acknowledged ours.")
        .def(
            "mismatch",
            [](const RowFlows& self) {
                const auto found = self.mismatch();
                return std::tuple(found[0], found[1], found[2]);
            },
            "Whose message has another length than expected here, its length, and the expected one.")
        .def("stats", &flow_stats_to_python, nb::sig("def stats(self) -> dict[str, typing.Any]"),
             "Figures since it was built.");
}

using Field = std::tuple<std::string, std::size_t, std::size_t>;
using Numbered = std::vector<std::pair<std::string, int>>;
using Names = std::vector<std::string>;

void describe_the_wire(nb::module_& m) {
#define TACIT_FIELD(type, name, letter) letter
    m.attr("WIRE_FORMAT") = "<" TACIT_FIELDS(TACIT_FIELD);
#undef TACIT_FIELD
#define TACIT_FIELD(type, name, letter) {#name, offsetof(tacit_header, name), sizeof(type)},
    m.def(
        "wire_fields", [] { return std::vector<Field>{TACIT_FIELDS(TACIT_FIELD)}; },
        "Name, offset and bytes of every field of the header.");
#undef TACIT_FIELD
#define TACIT_FIELD(type, name, letter) letter
    m.attr("WIRE_ROWS_FORMAT") = "<" TACIT_ROWS_FIELDS(TACIT_FIELD);
#undef TACIT_FIELD
#define TACIT_FIELD(type, name, letter) {#name, offsetof(tacit_rows, name), sizeof(type)},
    m.def(
        "wire_rows_fields", [] { return std::vector<Field>{TACIT_ROWS_FIELDS(TACIT_FIELD)}; },
        "Name, offset and bytes of every field behind the header of a packet of rows.");
#undef TACIT_FIELD
#define TACIT_NUMBERED(name, number, text) {text, number},
    m.def("wire_kinds", [] { return Numbered{TACIT_KINDS(TACIT_NUMBERED)}; }, "Kinds of packets.");
    m.def("wire_lanes", [] { return Numbered{TACIT_LANE_TYPES(TACIT_NUMBERED)}; }, "Lane types.");
#undef TACIT_NUMBERED
#define TACIT_COUNT(name, text) text,
    m.def(
        "wire_verdicts", [] { return Names{TACIT_VERDICTS(TACIT_COUNT)}; },
        "What is counted, one for each packet.");
    m.def("wire_events", [] { return Names{TACIT_EVENTS(TACIT_COUNT)}; }, "What is counted beside it.");
#undef TACIT_COUNT
    m.attr("WIRE_MAGIC") = int(TACIT_MAGIC | TACIT_LAYOUT);
    m.attr("WIRE_VERSION") = int(TACIT_VERSION);
    m.attr("WIRE_SATURATED") = int(TACIT_SATURATED);
    m.attr("WIRE_MORE") = int(TACIT_MORE);
    m.attr("WIRE_LOWER_NBYTES") = int(TACIT_LOWER_NBYTES);
    m.attr("WIRE_MOST_JOBS") = int(TACIT_MOST_JOBS);
    m.attr("WIRE_MOST_RANKS") = int(TACIT_MOST_RANKS);
    m.attr("WIRE_MOST_SLOTS") = int(TACIT_MOST_SLOTS);
    m.attr("WIRE_MOST_PAYLOAD") = int(TACIT_MOST_PAYLOAD);
    m.attr("WIRE_MOST_ROWS") = int(TACIT_MOST_ROWS);
    m.attr("WIRE_ROWS_ACK") = int(TACIT_ROWS_ACK);
    m.def(
        "wire_bits",
        [](std::uint32_t lanes) { return std::pair(tacit_bits_up(lanes), tacit_bits_down(lanes)); },
        "lanes"_a, "Bits of an element on the way up and on the way down; 0, 0 for no lane type.");
    m.def(
        "wire_elements", [](std::uint32_t lanes, std::uint32_t mtu) { return tacit_elements(lanes, mtu); },
        "lanes"_a, "mtu"_a, "Elements that fit into one packet both ways.");
    m.def("wire_rows_room", &tacit_rows_room, "mtu"_a,
          "Bytes of a message that fit into one packet of rows.");
}

// What both planes have. `stats` and `add_job` wait for packets in hand, without the GIL.
template <class SomePlane, class Class>
void define_common(Class& plane) {
    plane
        .def("add_job", &add_job<SomePlane>, "id"_a, "cookie"_a, "members"_a, "lanes"_a, "elements"_a,
             "first_slot"_a, "slots"_a, "quorum"_a, "table"_a, "below"_a = 0, "upstream"_a = nb::none(),
             "shards"_a = 0, "deadline_ns"_a = 0,
             "Packets of the job are summed from now on; ValueError if it contradicts itself or another job.")
        .def("remove_job", &SomePlane::remove_job, "id"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Forgets the job and its sums; its packets are answered with 'unknown'.")
        .def("jobs", &SomePlane::jobs, nb::call_guard<nb::gil_scoped_release>(), "Ids of the jobs.")
        .def(
            "counts", [](const SomePlane& self) { return counts_to_python(self.counts()); },
            nb::sig("def counts(self) -> dict[str, int]"),
            "Packets by verdict, and events, of all jobs and of none.")
        .def(
            "stats",
            [](const SomePlane& self, int id) {
                JobStats found;
                {
                    nb::gil_scoped_release unlocked;
                    found = self.stats(id);
                }
                return stats_to_python(found);
            },
            "id"_a, nb::sig("def stats(self, id: int) -> dict[str, typing.Any]"),
            "One job: counts, bytes, unfinished chunks, and (packets, last_ns, missing, left_out) by "
            "member.");
}

}  // namespace

void tacit::bind_aggregator(nb::module_& m) {
    describe_the_wire(m);

    nb::class_<OnePacketPlane> plane(m, "Plane", "The aggregator's user-space plane, without sockets.");
    plane.def(nb::init<std::size_t>(), "slots"_a)
        .def("receive", &OnePacketPlane::receive_one, "packet"_a, "source"_a, "now_ns"_a = 0,
             nb::sig("def receive(self, packet: bytes, source: tuple[str, int], now_ns: int = 0) -> "
                     "list[tuple[bytes, tuple[str, int]]]"),
             "The answers to one packet, and where they go.")
        .def("expire", &OnePacketPlane::expire_now, "now_ns"_a,
             nb::sig("def expire(self, now_ns: int) -> list[tuple[bytes, tuple[str, int]]]"),
             "What goes out because deadlines of lossy jobs are over.")
        .def("receive_rows", &OnePacketPlane::receive_rows, "packets"_a.noconvert(), "sources"_a,
             nb::sig("def receive_rows(self, packets: numpy.typing.NDArray[numpy.uint8], sources: "
                     "list[tuple[str, int]]) -> tuple[int, int]"),
             "How many answers there were to a packet a row, and the nanoseconds they took; for benchmarks.");
    define_common<OnePacketPlane>(plane);

    nb::class_<UdpPlane> udp(m, "UdpPlane", "The user-space plane on UDP sockets, in threads of its own.");
    udp.def(
           "__init__",
           [](UdpPlane* self, const Address& listen, std::size_t slots, int threads, int buffer_nbytes) {
               new (self) UdpPlane(from_python(listen), slots, threads, buffer_nbytes);
           },
           "listen"_a, "slots"_a, "threads"_a, "buffer_nbytes"_a)
        .def(
            "address", [](const UdpPlane& self) { return to_python(self.address()); }, "Where it listens.")
        .def("start", &UdpPlane::start, "Serves until stop().")
        .def("stop", &UdpPlane::stop, nb::call_guard<nb::gil_scoped_release>(),
             "Returns when the threads have ended and the port is free. A second call does nothing.")
        .def(
            "sockets",
            [](const UdpPlane& self) {
                const SocketStats stats = self.sockets();
                nb::dict found;
                found["overrun"] = stats.overrun;
                found["unsent"] = stats.unsent;
                found["failures"] = stats.failures;
                found["receive_buffer_nbytes"] = stats.receive_buffer_nbytes;
                return found;
            },
            nb::sig("def sockets(self) -> dict[str, int]"),
            "Packets that found the receive buffer full, answers that could not be sent, failed calls.")
        .def_static("now_ns", &UdpPlane::now_ns, "The clock of `last_ns`.");
    define_common<UdpPlane>(udp);

    bind_client(m);
    bind_row_flows(m);

    // A port that is taken is Python's OSError, with its number.
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const std::system_error& error) {
            nb::object args = nb::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, args.ptr());
        }
    });
}
