"""Pull and push: what travels between the ranks that look rows up and those that own them, several tables at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import pack, unpack
from typing import Protocol

import torch
from torch import Tensor

from tacit.rows.adding import Adder
from tacit.rows.owners import Kind, Owners
from tacit.rows.shard import Shard

ABSENT = -1  # in a header, in the place of a number of keys


@dataclass(frozen=True, slots=True)
class Incoming:
    """What an owner was asked for: the keys of one table that came from each rank, in rank order."""

    keys: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """One pull: the different keys of each table, in order, with their positions by owner, their rows, and what this rank was asked for."""

    keys: Mapping[str, Tensor]
    order: Mapping[str, Tensor]
    counts: Mapping[str, Sequence[int]]
    rows: Mapping[str, Tensor]
    asked: Mapping[str, Incoming]


@dataclass(frozen=True, slots=True)
class TouchReport:
    """What row servers receive from ranks about hot rows: bytes for each member, and how many come from each."""

    parts: Sequence[Tensor]
    nbytes: Sequence[int]


class Beside(Protocol):
    """What goes on beside the rows of pulls and pushes: hot rows."""

    def report(self) -> TouchReport | None:
        """What a pull takes along to row servers; None where there is nothing to report, on all members alike."""

    def take_report(self, received: Sequence[Tensor]) -> None:
        """What has come of it from each member."""

    def train(self, cold: Mapping[str, Tensor], lr: float) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Once exponents are agreed. By table keys that this rank owns, none of them in `cold`, and the means of their gradients."""


def pull(
    owners: Owners,
    shards: Mapping[str, Shard],
    keys: Mapping[str, Tensor],
    kind: Kind,
    beside: Beside | None = None,
) -> Pulled:
    """The rows of `keys` (of each table: all different) from their owners."""
    names, order, counts = _routed(owners, shards, keys)
    asked = _ask(owners, shards, names, keys, order, counts, kind)
    report = beside.report() if beside else None
    beside_rows = report or TouchReport([_joined([])] * owners.members, [0] * owners.members)
    given = [
        [
            part.view(torch.uint8).view(-1)
            for part in shards[name].read(asked[name].keys).split(asked[name].counts)
        ]
        for name in names
    ]
    row_nbytes = [shards[name].table.row_nbytes for name in names]
    nbytes = [
        sum(counts[name][rank] * size for name, size in zip(names, row_nbytes, strict=True))
        for rank in range(owners.members)
    ]
    both = [
        _joined([*(part[rank] for part in given), beside_rows.parts[rank]]) for rank in range(owners.members)
    ]
    sizes = [a + b for a, b in zip(nbytes, beside_rows.nbytes, strict=True)]
    received = owners.send_rows(both, sizes, sum(map(len, beside_rows.parts)))
    if beside and report:
        beside.take_report([each[size:] for each, size in zip(received, nbytes, strict=True)])
    received = [each[:size] for each, size in zip(received, nbytes, strict=True)]
    rows = {}
    for name, parts in _by_table(received, names, counts, row_nbytes).items():
        table = shards[name].table
        by_owner = _joined(parts).view(table.dtype).view(-1, table.width)
        rows[name] = torch.empty_like(by_owner)
        rows[name][order[name]] = by_owner
    owners.traffic.pulls += 1
    owners.traffic.pulled += sum(len(each) for each in keys.values())
    return Pulled(keys, order, counts, rows, asked)


def push(
    owners: Owners,
    shards: Mapping[str, Shard],
    adders: Mapping[str, Adder],
    keys: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    lr: float,
    beside: Beside | None = None,
) -> None:
    """Gradients (float32, a row a key) to the owners, who take the mean over ranks and a step of the optimizer."""
    names, order, counts = _routed(owners, shards, keys)
    asked = _ask(owners, shards, names, keys, order, counts, Kind.PUSH, adders, lr)
    _send(owners, shards, adders, order, counts, gradients, asked, lr, beside)


def push_pulled(
    owners: Owners,
    shards: Mapping[str, Shard],
    adders: Mapping[str, Adder],
    pulled: Pulled,
    gradients: Mapping[str, Tensor],
    lr: float,
    beside: Beside | None = None,
) -> None:
    """Gradients of the rows of one pull, whose keys the owners know. A table without gradients here is left out by this rank."""
    names = [name for name in shards if name in pulled.keys]
    counts = {name: pulled.counts[name] if name in gradients else [0] * owners.members for name in names}
    numbers = _numbers(owners, shards, counts, adders, lr)
    headers = owners.announce(Kind.PUSH_PULLED, (names, lr), numbers)
    _agree(adders, headers, len(shards))
    sent = _counts_by_table(headers, shards, names)
    asked = {}
    for name in names:
        parts = pulled.asked[name].keys.split(pulled.asked[name].counts)
        kept = [part[:count] for part, count in zip(parts, sent[name], strict=True)]
        asked[name] = Incoming(_joined(kept), tuple(sent[name]))
    _send(owners, shards, adders, pulled.order, counts, gradients, asked, lr, beside)


def _send(
    owners: Owners,
    shards: Mapping[str, Shard],
    adders: Mapping[str, Adder],
    order: Mapping[str, Tensor],
    counts: Mapping[str, Sequence[int]],
    gradients: Mapping[str, Tensor],
    asked: Mapping[str, Incoming],
    lr: float,
    beside: Beside | None,
) -> None:
    """The gradients by owner, all tables in one exchange; then every owner takes its step."""
    names = list(asked)
    parts: list[list[Tensor]] = [[] for _ in range(owners.members)]
    for name in names:
        if name in gradients:
            for rank, part in enumerate(gradients[name][order[name]].split(list(counts[name]))):
                parts[rank].append(part.contiguous().view(torch.uint8).view(-1))
    widths = [4 * shards[name].table.width for name in names]
    nbytes = [
        sum(asked[name].counts[rank] * size for name, size in zip(names, widths, strict=True))
        for rank in range(owners.members)
    ]
    hot = beside.train({name: asked[name].keys for name in names}, lr) if beside else {}
    received = owners.send_gradients([_joined(each) for each in parts], nbytes)
    incoming = _by_table(received, names, {name: asked[name].counts for name in names}, widths)
    for name in names:
        received_rows = _joined(incoming[name])
        _step(shards[name], adders[name], asked[name].keys, received_rows, owners.world, lr, hot.get(name))
    owners.traffic.pushes += 1
    owners.traffic.pushed += sum(sum(counts[name]) for name in names)


def _step(
    shard: Shard,
    adder: Adder,
    keys: Tensor,
    gradients: Tensor,
    world: int,
    lr: float,
    hot: tuple[Tensor, Tensor] | None,
) -> None:
    """The mean over ranks of each row's gradient, and the optimizer's step with it and with those of hot rows."""
    different, targets = keys.unique(return_inverse=True)
    rows = gradients.view(torch.float32).view(-1, shard.table.width)
    means = adder.means(rows, targets, len(different), world)
    if hot is not None:
        different, means = torch.cat([different, hot[0]]), torch.cat([means, hot[1]])
    shard.train(different, means, lr)


# ---- routes and headers


def _routed(
    owners: Owners, shards: Mapping[str, Shard], keys: Mapping[str, Tensor]
) -> tuple[list[str], dict[str, Tensor], dict[str, list[int]]]:
    """The tables in the order of all ranks; positions of their keys by owner; how many each member gets."""
    names = [name for name in shards if name in keys]
    routes = {name: shards[name].table.by_owner(keys[name], len(owners.holders)) for name in names}
    return (
        names,
        {n: order for n, (order, _) in routes.items()},
        {n: owners.by_member(counts) for n, (_, counts) in routes.items()},
    )


def _ask(
    owners: Owners,
    shards: Mapping[str, Shard],
    names: Sequence[str],
    keys: Mapping[str, Tensor],
    order: Mapping[str, Tensor],
    counts: Mapping[str, Sequence[int]],
    kind: Kind,
    adders: Mapping[str, Adder] | None = None,
    lr: float | None = None,
) -> dict[str, Incoming]:
    """Sends keys to their owners; back come those that this rank owns. With `adders` the ranks agree on exponents."""
    about = names if lr is None else (names, lr)
    headers = owners.announce(kind, about, _numbers(owners, shards, counts, adders, lr))
    if adders is not None:
        _agree(adders, headers, len(shards))
    asked = _counts_by_table(headers, shards, names)
    by_owner = {name: keys[name][order[name]].split(list(counts[name])) for name in names}
    parts = [_joined([by_owner[name][rank] for name in names], torch.int64) for rank in range(owners.members)]
    numels = [sum(asked[name][rank] for name in names) for rank in range(owners.members)]
    received = owners.send_keys(parts, numels)
    found = _by_table(received, names, asked, [1] * len(names))
    return {name: Incoming(_joined(found[name], torch.int64), tuple(asked[name])) for name in names}


def _numbers(
    owners: Owners,
    shards: Mapping[str, Shard],
    counts: Mapping[str, Sequence[int]],
    adders: Mapping[str, Adder] | None,
    lr: float | None,
) -> list[list[int]]:
    """For each member how many keys of each table follow (ABSENT: it is not in the exchange), what this rank knows of the exponents, and the
    learning rate: a row server knows nothing else of the exchange."""
    absent = [ABSENT] * owners.members
    owns = [adder.own for adder in adders.values()] if adders else []
    rate = [bits_of(lr)] if lr is not None else []
    return [
        [*(counts.get(name, absent)[member] for name in shards), *owns, *rate]
        for member in range(owners.members)
    ]


def bits_of(lr: float) -> int:
    """A float64 as the integer with the same bits."""
    return int.from_bytes(pack("<d", lr), "little", signed=True)


def float_of(bits: int) -> float:
    """The float64 with these bits."""
    found: float = unpack("<d", bits.to_bytes(8, "little", signed=True))[0]
    return found


def _agree(adders: Mapping[str, Adder], headers: Sequence[Sequence[int]], tables: int) -> None:
    for at, adder in enumerate(adders.values()):
        adder.agree(header[tables + at] for header in headers)


def _counts_by_table(
    headers: Sequence[Sequence[int]], shards: Mapping[str, Shard], names: Sequence[str]
) -> dict[str, list[int]]:
    places = {name: at for at, name in enumerate(shards)}
    return {name: [header[places[name]] for header in headers] for name in names}


def _by_table(
    received: Sequence[Tensor],
    names: Sequence[str],
    counts: Mapping[str, Sequence[int]],
    sizes: Sequence[int],
) -> dict[str, list[Tensor]]:
    """What came from each rank, all tables one behind the other, by table; a key of a table has sizes[table] elements."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for rank, whole in enumerate(received):
        cuts = [counts[name][rank] * size for name, size in zip(names, sizes, strict=True)]
        for name, part in zip(names, whole.split(cuts), strict=True):
            found[name].append(part)
    return found


def _joined(parts: Sequence[Tensor], dtype: torch.dtype = torch.uint8) -> Tensor:
    """The parts one behind the other, in memory that is aligned for any dtype; of `dtype` where there is none."""
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype)
