"""`tacit sim cost`: the time of one schedule, stage by stage, or of several, side by side."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tacit.cli.sim import common
from tacit.units import size_text, time_text

if TYPE_CHECKING:
    from tacit.schedules import Schedule
    from tacit.sim.cost import Cost, StageCost
    from tacit.sim.payloads import Payload
    from tacit.sim.place import Place


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What one schedule takes: a cost for every collective (one, unless a codec asks for more)."""

    text: str
    schedule: Schedule
    payloads: tuple[Payload, ...]
    costs: tuple[Cost, ...]
    alpha_beta_s: float | None
    bound_s: float | None

    @property
    def time_s(self) -> float:
        return sum(cost.time_s for cost in self.costs)

    @property
    def latency_s(self) -> float:
        return sum(cost.latency_s for cost in self.costs)

    @property
    def stage_count(self) -> int:
        return sum(cost.stage_count for cost in self.costs)

    @property
    def vectors(self) -> float:
        """What leaves the busiest rank, in vectors."""
        return float(self.schedule.sent_chunks()[: self.schedule.world].max(initial=0)) / self.schedule.chunks


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "cost",
        "the time of a schedule on a network, stage by stage; of several, side by side",
        "tacit sim cost wrht ring --on 'optical(wavelengths=64, rate=40GB/s, setup=25us)' --world 1024 --model VGG16",
    )
    parser.add_argument(
        "schedules", metavar="SCHEDULE", nargs="+", help="a name, name(option=value), or a file of your own"
    )
    common.add_where(parser)
    common.add_vector(parser)
    parser.add_argument(
        "--codec", help="say it with a codec, as in a strategy: hush, bf16 (this imports torch)"
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    schedules, place = common.schedules_on(args, args.schedules)
    nbytes, vector = common.vector_of(args)
    answers = [
        answer(text, schedule, place, nbytes, args.codec)
        for text, schedule in zip(args.schedules, schedules, strict=True)
    ]
    answers.sort(key=lambda found: found.time_s)
    if args.json:
        common.print_json([record(found, place, args.codec) for found in answers])
    elif len(answers) == 1:
        _print_one(answers[0], place, vector, args.codec)
    else:
        _print_many(answers, place, vector, args.codec)
    return 0


def answer(text: str, schedule: Schedule, place: Place, nbytes: float, codec: str | None = None) -> Answer:
    """The cost of one schedule. On an optical ring the light of every stage is proven free of collisions first."""
    from tacit.sim.payloads import costs, of_codec, plain

    payloads = plain(nbytes) if codec is None else of_codec(codec, int(nbytes) // 4, schedule)
    place.prove(schedule)
    found = costs(schedule, payloads, place)
    even = [p.up_nbytes == p.down_nbytes for p in payloads]
    check_s = sum(place.alpha_beta_s(schedule, cost) for cost in found) if all(even) else None
    bounds = [place.lower_bound_s(schedule, p.up_nbytes) for p in payloads]
    bound_s = sum(b for b in bounds if b is not None) if all(even) and None not in bounds else None
    return Answer(text, schedule, payloads, found, check_s, bound_s)


def record(found: Answer, place: Place, codec: str | None) -> dict[str, Any]:
    """One schedule's answer as JSON."""
    whole: dict[str, Any] = {
        "schedule": found.text,
        "world": found.schedule.world,
        "network": place.as_record(),
        "codec": codec,
        "time_s": found.time_s,
        "latency_s": found.latency_s,
        "stage_count": found.stage_count,
        "vectors_sent_by_busiest_rank": found.vectors,
        "alpha_beta_s": found.alpha_beta_s,
        "lower_bound_s": found.bound_s,
        "light_proven": place.ring is not None,
    }
    return whole | {
        "requests": [
            {"kind": payload.kind, "up_nbytes": payload.up_nbytes, "down_nbytes": payload.down_nbytes}
            | cost.as_record()
            for payload, cost in zip(found.payloads, found.costs, strict=True)
        ]
    }


def _print_one(found: Answer, place: Place, vector: str, codec: str | None) -> None:
    out = common.console()
    common.print_facts(_facts(found, place, vector, codec))
    light = place.ring is not None
    heads = ["stages", "times", "parts", "transfers", "bytes each", "latency", "transfer", "time", "share"]
    heads += ["wave-\nlengths", "stripes", "hops"] if light else ["hops"]
    rows, number = [], 0
    for payload, cost in zip(found.payloads, found.costs, strict=True):
        for stage in cost.stages:
            rows.append(
                _row(stage, number, found.time_s, light, payload.kind if len(found.payloads) > 1 else "")
            )
            number += stage.times
    common.print_table(out, [*heads, "what limits"], rows, left=(0, len(heads)))


def _facts(found: Answer, place: Place, vector: str, codec: str | None) -> list[tuple[str, str]]:
    schedule = found.schedule
    said = [("codec", _codec_words(found, codec))] if codec else []
    facts = [
        (
            "schedule",
            f"{found.text} among {schedule.world:,} ranks, {common.some(schedule.chunks, 'chunk')}, {common.some(schedule.transfer_count, 'transfer')}",
        ),
        ("on", place.text),
        ("vector", vector),
        *said,
        ("", ""),
        (
            "total",
            f"{time_text(found.time_s)} in {found.stage_count:,} stages; {time_text(found.latency_s)} of it is latency",
        ),
    ]
    if found.alpha_beta_s:
        model = (
            "stages x (set-up + longest transfer on one wavelength)"
            if place.ring
            else "stages x latency + busiest rank's bytes over its link"
        )
        ratio = found.time_s / found.alpha_beta_s
        facts.append(
            (
                "alpha-beta",
                f"{time_text(found.alpha_beta_s)}: {model}; the total is {ratio:.3g}x{_why(ratio, place)}",
            )
        )
    if found.bound_s:
        facts.append(
            (
                "lower bound",
                f"{time_text(found.bound_s)}: no all-reduce of these bytes is faster here{_assumption(place)}; the total is {found.time_s / found.bound_s:.3g}x",
            )
        )
    facts.append(("busiest rank", f"sends {found.vectors:.4g} vectors"))
    if place.ring is not None:
        facts.append(("light", "proven: no wavelength is used twice on an arc of one direction"))
    return facts


def _assumption(place: Place) -> str:
    """What the bound rests on, where there is light."""
    if place.ring is None:
        return ""
    from tacit.sim.bounds import ASSUMES

    return f" ({ASSUMES})"


def _why(ratio: float, place: Place) -> str:
    if place.ring is not None:
        return ": sub-stages" if ratio > 1.005 else ": striped" if ratio < 0.995 else ""
    return ": links are shared" if ratio > 1.005 else ": adding in the path" if ratio < 0.995 else ""


def _codec_words(found: Answer, codec: str | None) -> str:
    asked = [f"{p.kind} of {_both(p.up_nbytes, p.down_nbytes)}" for p in found.payloads]
    return f"{codec}: {', '.join(asked)}; its own time is not counted"


def _both(up_nbytes: float, down_nbytes: float) -> str:
    if up_nbytes == down_nbytes:
        return size_text(up_nbytes)
    return f"{size_text(up_nbytes)} up and {size_text(down_nbytes)} down"


def _row(stage: StageCost, number: int, total_s: float, light: bool, kind: str) -> list[str]:
    last = number + stage.times - 1
    name = f"{number}" if stage.times == 1 else f"{number}..{last}"
    optical = [str(stage.wavelengths), str(stage.stripes)] if light else []
    return [
        f"{name} {kind}".strip(),
        f"{stage.times:,}",
        str(stage.parts),
        f"{stage.transfers:,}",
        size_text(stage.nbytes),
        time_text(stage.latency_s),
        time_text(stage.transfer_s),
        time_text(stage.time_s),
        f"{100 * stage.time_s / total_s:.1f}%" if total_s else "-",
        *optical,
        str(stage.hops),
        stage.limit,
    ]


def _print_many(answers: list[Answer], place: Place, vector: str, codec: str | None) -> None:
    out, best_s = common.console(), answers[0].time_s
    common.print_facts([("on", place.text), ("vector", vector), *([("codec", codec)] if codec else [])])
    rows = [
        [
            found.text,
            time_text(found.time_s),
            f"{found.time_s / best_s:.2f}x" if best_s else "-",
            f"{found.time_s / found.bound_s:.2f}x" if found.bound_s else "-",
            f"{found.stage_count:,}",
            time_text(found.latency_s),
            f"{found.vectors:.4g}",
            time_text(found.alpha_beta_s) if found.alpha_beta_s is not None else "-",
        ]
        for found in answers
    ]
    heads = [
        "schedule",
        "time",
        "to the\nfastest",
        "to the\nbound",
        "stages",
        "latency",
        "vectors of\nbusiest rank",
        "alpha-beta",
    ]
    common.print_table(out, heads, rows)
    out.print("Name one schedule alone to see its stages.", style="dim")
