"""What a step of sparse tables takes, scheme by scheme, and whether hot rows added in the network pay. START HERE: `rows_cost`.

Rows are coalesced before anything is sent. With q_i, U_i, Q and U of popularity.py, W ranks, S servers, rows of d float32, keys of k
bytes, n look-ups a rank and step, and Q_h, U_h, Q_c = Q - Q_h the parts of the hot rows and the cold ones, a link carries

    DDP's own sparse all-gather       (W-1) Q (8 + 4 d)                          both ways
    replicated, a codec over sharded  (W-1) Q g + 2 (W-1)/W U d c                g: a coded key, c: the codec's bytes an element
    replicated, thc over star         (W-1) Q g + U d                            down, one lane of 8 bits an element (16 from 9 ranks on)
    row-wise look-ups without dedup   (W-1)/W n (8 + 4 d + 4 d)                  ids, rows, gradients
    shards on the ranks               (W-1)/W Q (k + 4 d + k + 4 d)              pull keys, values; push keys and values
    shards on S servers               Q (k + 4 d + k + 4 d) on a rank's link, W/S of it on a server's
    + hot rows                        Q_c instead of Q, and on a rank's link U_h 4 d for lanes and 4 bits (8 from 16 ranks on) a hot row

A scheme is a sequence of legs. In a leg both directions of a link are busy at once, legs follow one another, and hot and cold rows use
different links at the same time: a step takes as long as the busiest link, max over links of sum over legs of max(out, in) / rate.

    r = max(1, W/S x rank's rate / server's rate)            how much busier a server's link is than a rank's
    gain <= min(1/(1 - h), 2 r Q b_cold / (U_h b_hot + 2 Q_c b_cold)),  h = Q_h/Q         the ceiling
    row i alone is better hot if U_i b_hot < 2 r q_i b_cold           b_hot = 4 d, b_cold = k + 4 d, and headers

With b_hot = b_cold, which leaves keys out, the ceiling is min(1/(1 - h), 2 r Q / (U_h + 2 Q_c)): "in rows".

Round trips, computing, the optimizer and loss are not in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from tacit.errors import ConfigError
from tacit.sim.popularity import Popularity, Touched
from tacit.sim.row_packets import RowFraming, SwitchNeed, switch_need
from tacit.units import parse_rate, time_text

TOFINO_ROWS = 32_768  # the hot rows of the paper (Libra), as many as a Tofino's registers hold
PAYS_FROM = 1.1  # below, what a hot set costs (agreement, memory on every rank, drift) is more than it brings
MOST_WORLD = 2184  # thc's table reaches 30, and 16-bit lanes hold 65,535
_DDP_KEY_NBYTES = 8  # torch's indices
_CODECS = {"none": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}  # bytes an element, known without torch
_DRIVEN_ELEMENTS = 1 << 20
_MANY = 1 << 20  # rows, so that what one takes on the wire does not depend on the last packet


@dataclass(frozen=True, slots=True)
class RowsJob:
    """A training with sparse tables, and the links it has. Rates are in bits a second."""

    world: int = 8
    servers: int = 2
    batch: int = 4096
    features: int = 26
    width: int = 16  # d
    rate_bps: float = 200e6
    server_rate_bps: float = 200e6
    key_nbytes: int = 4  # k
    union_key_nbytes: float = 1.2  # g: sorted, coded as differences
    framing: RowFraming = field(default_factory=RowFraming)

    def __post_init__(self) -> None:
        _whole("world", self.world, 2, MOST_WORLD, "ranks")
        _whole("servers", self.servers, 1, 1_000_000, "servers")
        _whole("batch", self.batch, 1, 10**9, "samples a rank")
        _whole("features", self.features, 1, 10**6, "look-ups a sample")
        _whole("mtu", self.framing.mtu, 576, 65_535, "bytes")
        if self.key_nbytes not in (4, 8):
            raise ConfigError(f"key_nbytes={self.key_nbytes}: a key on the wire has 4 or 8 bytes")
        if not 0 < self.union_key_nbytes <= 16:
            raise ConfigError(f"union_key_nbytes={self.union_key_nbytes}: give a number above 0, up to 16")
        for name, rate in (("rate", self.rate_bps), ("server rate", self.server_rate_bps)):
            if not (isfinite(rate) and rate >= 1):
                raise ConfigError(f"{name} {rate:g} bit/s: give 1bit or more")
        most = (self.framing.rows_nbytes - self.key_nbytes) // 4
        _whole(
            "width",
            self.width,
            1,
            most,
            f"numbers a row (a row and its key fit into a packet at MTU {self.framing.mtu})",
        )

    @property
    def look_ups(self) -> int:
        """n, of one rank in a step."""
        return self.batch * self.features

    @property
    def row_nbytes(self) -> int:
        return 4 * self.width

    @property
    def cold_nbytes(self) -> float:
        """b_cold on the wire: half of what a cold row is pulled and pushed with."""
        return sum(self.framing.rows(_MANY, nbytes, 1) for nbytes in _cold_parts(self).values()) / _MANY / 2

    @property
    def hot_nbytes(self) -> float:
        """b_hot on the wire: a row's lanes."""
        return self.framing.lanes(_MANY * self.width, unit=self.width) / _MANY

    @property
    def ratio(self) -> float:
        """r: how much busier a server's link is than a rank's."""
        return max(1.0, self.world * self.rate_bps / (self.servers * self.server_rate_bps))

    @property
    def touch_bits(self) -> int:
        """Of a hot row, in the sum that counts the ranks that touched it."""
        return 4 if self.world < 16 else 8 if self.world < 256 else 16


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of a step, after the one before: bytes on the wire of one rank's link and of one server's."""

    name: str
    rank_out_nbytes: float
    rank_in_nbytes: float
    server_out_nbytes: float = 0.0
    server_in_nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RowsTime:
    """What one scheme takes a step."""

    scheme: str
    hot: int  # rows
    legs: tuple[Leg, ...]
    rank_s: float  # a rank's link is busy
    server_s: float  # a server's link is; 0 where there is none

    @property
    def time_s(self) -> float:
        return max(self.rank_s, self.server_s)

    @property
    def limit(self) -> str:
        return "a server's link" if self.server_s > self.rank_s else "a rank's link"

    def nbytes(self, column: str) -> float:
        """The sum over legs of `rank_out`, `rank_in`, `server_out` or `server_in`."""
        return sum(float(getattr(leg, f"{column}_nbytes")) for leg in self.legs)

    def as_record(self) -> dict[str, Any]:
        """The values for JSON, every leg included."""
        return {
            "scheme": self.scheme,
            "hot": self.hot,
            "time_s": self.time_s,
            "limit": self.limit,
            "rank_s": self.rank_s,
            "server_s": self.server_s,
            "legs": [{name: getattr(leg, name) for name in Leg.__slots__} for leg in self.legs],
        }


@dataclass(frozen=True, slots=True, eq=False)
class HotChoice:
    """Hot rows over one placement of the shards: none, a given number, and the best one."""

    plain: RowsTime
    given: RowsTime
    best: RowsTime
    ceiling: float  # of the gain, with the best number
    ceiling_in_rows: float  # the same without keys
    given_ceiling: float
    given_ceiling_in_rows: float
    rule_rows: int  # rows that the rule for one row alone makes hot: a limit, not a choice
    where: str

    @property
    def gain(self) -> float:
        """Of the best number of hot rows over none."""
        return _ratio(self.plain.time_s, self.best.time_s)

    @property
    def given_gain(self) -> float:
        return _ratio(self.plain.time_s, self.given.time_s)

    @property
    def pays(self) -> bool:
        return self.gain >= PAYS_FROM

    @property
    def chosen(self) -> RowsTime:
        """What to do: the best number of hot rows, or none where they do not pay."""
        return self.best if self.pays else self.plain

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.pays:
            return (
                f"{self.where}: {self.best.hot:,} hot rows take a step from {time_text(self.plain.time_s)} to "
                f"{time_text(self.best.time_s)} ({self.gain:.2f}x); {self.best.limit} limits"
            )
        best = (
            f"the best number, {self.best.hot:,}, gains {self.gain:.2f}x"
            if self.best.hot
            else "no number gains"
        )
        return f"{self.where}: hot rows do not pay (H = 0): {best}, and less than {PAYS_FROM:g}x is not worth them"

    def as_record(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "pays": self.pays,
            "chosen_hot": self.chosen.hot,
            "verdict": self.verdict,
            "best_hot": self.best.hot,
            "gain": self.gain,
            "ceiling": self.ceiling,
            "ceiling_in_rows": self.ceiling_in_rows,
            "given_hot": self.given.hot,
            "given_gain": self.given_gain,
            "given_ceiling": self.given_ceiling,
            "given_ceiling_in_rows": self.given_ceiling_in_rows,
            "rows_hot_by_the_rule_for_one_row": self.rule_rows,
        }


@dataclass(frozen=True, slots=True, eq=False)
class RowsEstimate:
    """What a step of sparse tables takes, scheme by scheme."""

    popularity: Popularity
    job: RowsJob
    codec: str
    touched: Touched
    ddp: RowsTime
    replicated: RowsTime
    star: RowsTime
    looked_up: RowsTime
    on_ranks: HotChoice
    on_servers: HotChoice
    switch: SwitchNeed

    @property
    def times(self) -> tuple[RowsTime, ...]:
        """Every scheme, in the order of the docs."""
        placed = [
            time
            for choice in (self.on_ranks, self.on_servers)
            for time in (choice.plain, choice.given, choice.best)
        ]
        return (self.ddp, self.replicated, self.star, self.looked_up, *placed)

    def as_record(self) -> dict[str, Any]:
        """The values for JSON, every leg of every scheme included.

        Returns:
            A dict of numbers, text and lists; times in seconds, sizes in bytes.
        """
        job, law, touched = self.job, self.popularity, self.touched
        share, unique, union = touched.of_hottest(self.on_servers.given.hot)
        plain = {name: getattr(job, name) for name in RowsJob.__slots__ if name != "framing"}
        return {
            "popularity": {
                "text": law.text,
                "rows": law.row_count,
                "tables": law.tables,
                "skew": law.skew,
                "look_ups": law.look_ups,
            },
            "job": plain | {"mtu": job.framing.mtu, "headers": job.framing.headers, "codec": self.codec},
            "ratio": job.ratio,
            "look_ups": job.look_ups,
            "unique_rows": float(touched.unique[-1]),
            "union_rows": float(touched.union[-1]),
            "given_hot": {
                "rows": self.on_servers.given.hot,
                "look_ups_share": share,
                "unique_rows": unique,
                "union_rows": union,
            },
            "schemes": [time.as_record() for time in self.times],
            "hot_on_ranks": self.on_ranks.as_record(),
            "hot_on_servers": self.on_servers.as_record(),
            "switch": {name: getattr(self.switch, name) for name in SwitchNeed.__slots__},
        }


def rows_cost(
    popularity: str | Path | Popularity = "zipf(s=1.05, rows=5000000)",
    *,
    world: int = 8,
    servers: int | None = None,
    rate: str | float = "200Mbit",
    server_rate: str | float | None = None,
    mtu: int = 1500,
    batch: int = 4096,
    features: int = 26,
    width: int = 16,
    key_nbytes: int = 4,
    union_key_nbytes: float = 1.2,
    codec: str = "int8",
    hot: int = TOFINO_ROWS,
    headers: bool = True,
    hot_steps: int = 1,
    arrays: int = 64,
) -> RowsEstimate:
    """What a step of sparse tables takes, scheme by scheme, and whether hot rows added in the network pay.

    Args:
        popularity: How often rows are looked up: `"zipf(s=1.05, rows=5000000)"`, `"criteo(s=1.05)"`, `"ngrams"`, a .txt or .npy file with one
            key a look-up, or a `Popularity`.
        world: Ranks, 2 to 2,184.
        servers: Hosts that hold the shards and do not train; by default a quarter of the ranks.
        rate: A rank's link, each way, as text with a unit or in bits a second.
        server_rate: A server's link; by default as a rank's.
        mtu: Bytes of a packet without its Ethernet header.
        batch: Samples a rank and step.
        features: Look-ups a sample.
        width: Numbers a row, d.
        key_nbytes: Of a key in packets of rows: 4 or 8.
        union_key_nbytes: Of a key when replicated tables agree which rows were touched: sorted and coded as differences.
        codec: Of the replicated tables over sharded, as in a strategy. Another one than int8, bf16 and none imports torch.
        hot: A number of hot rows to look at, beside the best one.
        hot_steps: Numbers of hot rows that are tried in every doubling: 1 tries powers of two.
        headers: Count the headers of every packet; without, payload alone.
        arrays: Register arrays of a switch that reaches each once a packet.

    Returns:
        A `RowsEstimate`: `times`, `on_servers.best.hot`, `on_servers.gain`, `on_servers.verdict`, `as_record()` for JSON.

    Raises:
        ConfigError: A value cannot be read, or lies outside of its limits.
        PairingError: The codec's payloads cannot be added by sharded.

    Example:
        >>> from tacit import sim
        >>> found = sim.rows_cost("zipf(s=1.05)", world=8, servers=2)
        >>> print(found.on_servers.verdict)
        shards on 2 servers: 262,144 hot rows take a step from 862 ms to 348 ms (2.48x); a rank's link limits
    """
    rank_bps = parse_rate(rate) if isinstance(rate, str) else rate
    server_bps = (
        rank_bps
        if server_rate is None
        else parse_rate(server_rate)
        if isinstance(server_rate, str)
        else server_rate
    )
    count = max(1, world // 4) if servers is None else servers
    framing = RowFraming(mtu, headers)
    job = RowsJob(
        world, count, batch, features, width, rank_bps, server_bps, key_nbytes, union_key_nbytes, framing
    )
    _whole("hot", hot, 0, 10**12, "rows")
    _whole("arrays", arrays, 1, 10**6, "register arrays")
    _whole("hot_steps", hot_steps, 1, 1000, "numbers")
    return _estimate(_popularity(popularity), job, codec, hot, hot_steps, arrays)


def gains(popularity: Popularity, job: RowsJob, servers: list[int], hot_steps: int = 1) -> list[float]:
    """The gain of the best number of hot rows over none, for each number of servers."""
    touched = popularity.touched(job.look_ups, job.world)
    jobs = [replace(job, servers=count) for count in servers]
    return [_choice(_on_servers, each, touched, 0, hot_steps, "").gain for each in jobs]


def times_of_touched(job: RowsJob, unique: float, union: float) -> tuple[RowsTime, RowsTime]:
    """DDP's sparse all-gather, and shards on the ranks, where a step was seen to touch so many rows of a rank and of all ranks."""
    places = np.array([0.0, max(1.0, union)])
    touched = Touched(places, np.array([0.0, 1.0]), np.array([0.0, unique]), np.array([0.0, union]))
    return _ddp(job, touched), _on_ranks(job, touched, 0)


def gain_on_ranks(popularity: Popularity, job: RowsJob, hot_steps: int = 1) -> float:
    """The gain of the best number of hot rows over none, with a shard on every rank."""
    touched = popularity.touched(job.look_ups, job.world)
    return _choice(_on_ranks, job, touched, 0, hot_steps, "").gain


def ceiling(touched: Touched, ratio: float, hot: int, cold_to_hot: float = 1.0) -> float:
    """The most that `hot` hot rows gain: min(1/(1-h), 2 r Q / (U_h + 2 Q_c)); `cold_to_hot` is b_cold / b_hot."""
    _, unique, union = touched.of_hottest(hot)
    total = float(touched.unique[-1])
    cold = total - unique
    links = 2 * ratio * total / (union / cold_to_hot + 2 * cold)
    return min(total / cold, links) if cold > 0 else links


def _estimate(
    popularity: Popularity, job: RowsJob, codec: str, hot: int, hot_steps: int, arrays: int
) -> RowsEstimate:
    touched = popularity.touched(job.look_ups, job.world)
    hot = min(hot, popularity.row_count)
    return RowsEstimate(
        popularity=popularity,
        job=job,
        codec=codec,
        touched=touched,
        ddp=_ddp(job, touched),
        replicated=_replicated(job, touched, codec),
        star=_star(job, touched),
        looked_up=_looked_up(job),
        on_ranks=_choice(_on_ranks, job, touched, hot, hot_steps, "a shard on every rank"),
        on_servers=_choice(_on_servers, job, touched, hot, hot_steps, _shards(job)),
        switch=switch_need(job.framing, job.width, arrays),
    )


def _shards(job: RowsJob) -> str:
    return "shards on 1 server" if job.servers == 1 else f"shards on {job.servers:,} servers"


def _ddp(job: RowsJob, touched: Touched) -> RowsTime:
    nbytes = (job.world - 1) * job.framing.stream(touched.unique[-1] * (_DDP_KEY_NBYTES + job.row_nbytes))
    return _time(job, "DDP, sparse all-gather", 0, [_even("all-gather", nbytes)])


def _replicated(job: RowsJob, touched: Touched, codec: str) -> RowsTime:
    up, down = _codec_nbytes(codec, job.world)
    elements = touched.union[-1] * job.width * (job.world - 1) / job.world
    legs = [
        _union_keys(job, touched),
        _even("to the owners", job.framing.stream(elements * up)),
        _even("from the owners", job.framing.stream(elements * down)),
    ]
    return _time(job, f"replicated, {codec} / sharded", 0, legs)


def _star(job: RowsJob, touched: Touched) -> RowsTime:
    elements, down = touched.union[-1] * job.width, 8 if 30 * job.world <= 255 else 16
    up_nbytes = job.framing.lanes(elements, bits=4, bits_down=down)
    lanes = Leg("lanes", up_nbytes, job.framing.lanes(elements, bits=down, bits_down=down))
    return _time(job, "replicated, thc / star", 0, [_union_keys(job, touched), lanes])


def _looked_up(job: RowsJob) -> RowsTime:
    rows = job.look_ups * (job.world - 1) / job.world
    parts = {"ids": _DDP_KEY_NBYTES, "rows": job.row_nbytes, "gradients": job.row_nbytes}
    legs = [_even(name, job.framing.stream(rows * nbytes)) for name, nbytes in parts.items()]
    return _time(job, "row-wise look-ups, no dedup (TorchRec)", 0, legs)


def _on_ranks(job: RowsJob, touched: Touched, hot: int) -> RowsTime:
    _, unique, union = touched.of_hottest(hot)
    cold = (touched.unique[-1] - unique) * (job.world - 1) / job.world
    legs = [
        _even(name, job.framing.rows(cold, nbytes, job.world - 1))
        for name, nbytes in _cold_parts(job).items()
    ]
    return _time(job, _named("shards on ranks", hot), hot, [*_hot_legs(job, hot, union), *legs])


def _on_servers(job: RowsJob, touched: Touched, hot: int) -> RowsTime:
    _, unique, union = touched.of_hottest(hot)
    cold, legs = touched.unique[-1] - unique, []
    for name, unit_nbytes in _cold_parts(job).items():
        nbytes = job.framing.rows(cold, unit_nbytes, job.servers)
        at_server = nbytes * job.world / job.servers
        outward = name == "values"
        legs.append(Leg(name, 0, nbytes, at_server, 0) if outward else Leg(name, nbytes, 0, 0, at_server))
    return _time(job, _named(_shards(job), hot), hot, [*_hot_legs(job, hot, union), *legs])


def _cold_parts(job: RowsJob) -> dict[str, int]:
    """What a cold row sends in a step, one after the other, in bytes."""
    return {"pull keys": job.key_nbytes, "values": job.row_nbytes, "push": job.key_nbytes + job.row_nbytes}


def _hot_legs(job: RowsJob, hot: int, union: float) -> list[Leg]:
    if not hot:
        return []
    touch = job.framing.lanes(hot * job.touch_bits / 32)
    return [_even("touch", touch), _even("lanes", job.framing.lanes(union * job.width, unit=job.width))]


def _union_keys(job: RowsJob, touched: Touched) -> Leg:
    return _even("keys", (job.world - 1) * job.framing.stream(touched.unique[-1] * job.union_key_nbytes))


def _even(name: str, nbytes: float) -> Leg:
    return Leg(name, nbytes, nbytes)


def _named(where: str, hot: int) -> str:
    return f"{where}, {hot:,} hot rows" if hot else where


def _time(job: RowsJob, scheme: str, hot: int, legs: list[Leg]) -> RowsTime:
    rank = sum(max(leg.rank_out_nbytes, leg.rank_in_nbytes) for leg in legs)
    server = sum(max(leg.server_out_nbytes, leg.server_in_nbytes) for leg in legs)
    return RowsTime(
        scheme, hot, tuple(legs), float(8 * rank / job.rate_bps), float(8 * server / job.server_rate_bps)
    )


_Placed = Callable[[RowsJob, Touched, int], RowsTime]


def _choice(
    placed: _Placed, job: RowsJob, touched: Touched, hot: int, hot_steps: int, where: str
) -> HotChoice:
    """The best of no hot row and `hot_steps` numbers in every doubling; of equals the smallest."""
    timed = partial(placed, job, touched)
    ratio = job.ratio if placed is _on_servers else 1.0
    best = min(map(timed, _tried(int(touched.rows[-1]), hot_steps)), key=lambda time: time.time_s)
    plain, cold_to_hot = timed(0), job.cold_nbytes / job.hot_nbytes
    away = 1.0 if placed is _on_servers else 1 - 1 / job.world
    full_s = 16 * away * float(touched.unique[-1]) * job.cold_nbytes / job.rate_bps
    unfilled = max(
        1.0, plain.rank_s / full_s
    )  # packets that are not full take longer than the ceiling's rows
    return HotChoice(
        plain=plain,
        given=timed(hot),
        best=best,
        ceiling=unfilled * ceiling(touched, ratio, best.hot, cold_to_hot),
        ceiling_in_rows=ceiling(touched, ratio, best.hot),
        given_ceiling=unfilled * ceiling(touched, ratio, hot, cold_to_hot),
        given_ceiling_in_rows=ceiling(touched, ratio, hot),
        rule_rows=_rule_rows(touched, ratio, cold_to_hot),
        where=where,
    )


def _tried(rows: int, steps: int) -> list[int]:
    """0, and numbers up to `rows`, `steps` to a doubling; powers of two are among them."""
    powers = np.arange(steps * rows.bit_length()) / steps
    numbers = {int(number) for number in np.rint(2**powers) if number <= rows}
    return [0, *sorted(numbers)]


def _rule_rows(touched: Touched, ratio: float, cold_to_hot: float) -> int:
    """Rows i with U_i b_hot < 2 r q_i b_cold."""
    rows, unique, union = (np.diff(part) for part in (touched.rows, touched.unique, touched.union))
    return int(rows[union < 2 * ratio * unique * cold_to_hot].sum())


def _codec_nbytes(codec: str, world: int) -> tuple[float, float]:
    """Bytes an element on the way to its owner, and back."""
    if codec in _CODECS:
        return _CODECS[codec], _CODECS[codec]
    from tacit.schedules import build
    from tacit.sim.payloads import of_codec

    asked = of_codec(codec, _DRIVEN_ELEMENTS, build("sharded", world))
    up, down = sum(a.up_nbytes for a in asked), sum(a.down_nbytes for a in asked)
    return up / _DRIVEN_ELEMENTS, down / _DRIVEN_ELEMENTS


def _popularity(given: str | Path | Popularity) -> Popularity:
    from tacit.sim.traces import parse_popularity

    return given if isinstance(given, Popularity) else parse_popularity(str(given))


def _ratio(before_s: float, after_s: float) -> float:
    return before_s / after_s if after_s else 1.0


def _whole(name: str, number: int, least: int, most: int, unit: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise ConfigError(f"{name}={number}: give a whole number of {unit}, from {least:,} to {most:,}")
