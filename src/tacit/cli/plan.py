"""`tacit plan`: which exchange pays here, with this model, before anything is trained."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit import environment
from tacit.cli.sim import common
from tacit.errors import ConfigError
from tacit.units import parse_rate, parse_time, size_text, time_text

if TYPE_CHECKING:
    from tacit.plan import Advice, BucketSizes, Prediction, Probe, RecordedStep
    from tacit.plan.what_if import WhatIf

log = logging.getLogger("tacit")
EXAMPLES = """examples:
  torchrun --nproc-per-node=4 -m tacit plan --model mymodule:build     # build() returns the model and the inputs of a forward pass
  TACIT_PLAN=record torchrun --nproc-per-node=4 train.py               # or: records the steps of your own script, which attaches tacit
  torchrun --nproc-per-node=4 -m tacit plan --from tacit-plan.jsonl    # and probes with them
  tacit plan --from runs/plan.jsonl --what-if 'link=25Gbit world=64 switch=aggregator'
  tacit plan --model vgg16 --link 100Mbit --world 4                    # no machines at all: links by formula, codecs timed here"""


def add_parser(subparsers: Any) -> None:
    """Adds `plan` and its options to the command."""
    made: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="which exchange pays here: probe, predict, advise",
        description="Measures links, codecs and the model's own step in some ten seconds, predicts the step under DDP, its hooks and every "
        "strategy, and advises: also to use nothing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--model",
        "--workload",
        help="module:name, a known model (VGG16, see tacit sim models), or a .json of layers",
    )
    made.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        type=Path,
        help="a probe, a recorded step, or both, of an earlier run",
    )
    made.add_argument("--elsewhere", action="store_true", help="take a probe of another machine")
    made.add_argument(
        "--what-if",
        metavar="TEXT",
        help="link=25Gbit world=64 latency=5us switch=aggregator: as it would be there",
    )
    made.add_argument("--link", metavar="RATE", help="without ranks: the rate of every link, 100Mbit")
    made.add_argument("--world", metavar="N", help="without ranks: how many there would be")
    made.add_argument(
        "--latency", metavar="TIME", default="0us", help="without ranks: the links' latency (default 0us)"
    )
    made.add_argument(
        "--strategies", nargs="+", metavar="TEXT", help="compare these, and DDP (default: every valid one)"
    )
    made.add_argument(
        "--bucket",
        help="bytes of tacit's buckets (default: 4MiB, as attach, and others where a step gains by them)",
    )
    made.add_argument(
        "--ddp-bucket",
        help="bytes of DDP's, bucket_cap_mb (default: 25MiB as DDP, or another size where a step gains by it)",
    )
    made.add_argument(
        "--budget",
        default="30s",
        help="the longest that a probe may go on beginning things, up to 60s (default 30s)",
    )
    made.add_argument(
        "--lossless", action="store_true", help="advise nothing that loses more than a cast to bf16 or fp16"
    )
    made.add_argument("--out", type=Path, help="add the probe, the step and the advice to a record file")
    made.add_argument("--html", type=Path, metavar="FILE", help="write the advice as a page")
    common.add_json(made)


def run(args: argparse.Namespace) -> int:
    """Probes or reads, predicts, advises; rank 0 alone prints."""
    from tacit.plan import advise, predict
    from tacit.plan.predicting import tuned

    if args.html is not None and args.html.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html {args.html}: the page is HTML; name it {args.html.with_suffix('.html')}")
    asked = _asked(args)
    with _probed(args) as (probe, step):
        if environment.rank() != 0:
            return 0
        sizes = _sizes(args)
        if asked is not None:
            from tacit.plan.candidates import is_valid
            from tacit.plan.what_if import elsewhere

            probe = elsewhere(probe, asked, is_valid)
        predictions = predict(probe, step, buckets=sizes)
        if args.bucket is None and args.ddp_bucket is None:
            predictions = [tuned(probe, step, each) for each in predictions]
        advice = advise(probe, predictions, lossy=not args.lossless)
        _write(args, probe, step, advice)
        if args.json:
            from tacit.plan.files import as_record

            common.print_json({**as_record(advice), "probe_s": probe.took_s, "world": probe.world})
        else:
            _print(probe, step, advice)
    return 0


def _asked(args: argparse.Namespace) -> WhatIf | None:
    if args.what_if is None:
        return None
    from tacit.plan.what_if import parsed_what_if

    return parsed_what_if(args.what_if)


def _sizes(args: argparse.Namespace) -> BucketSizes:
    from tacit.plan import BucketSizes

    usual = BucketSizes(common.size_of(args.bucket or "4MiB", "--bucket"), ddp_first_nbytes=1 << 20)
    if args.ddp_bucket is None:
        return usual
    return replace(usual, ddp_nbytes=common.size_of(args.ddp_bucket, "--ddp-bucket"), ddp_first_nbytes=None)


@contextmanager
def _probed(args: argparse.Namespace) -> Iterator[tuple[Probe, RecordedStep]]:
    """The probe and the step: measured with all ranks, read, or assumed."""
    probe, step = _read(args)
    if environment.world_size_text().isdecimal() and environment.world_size() > 1 and probe is None:
        from tacit.cli.plan_ranks import measured

        with measured(args, step, _sizes(args)) as found:
            yield found
        return
    if probe is None:
        probe = _assumed(args)
    if args.model is not None or step is None:
        step = _modelled(args)
    if probe.model and step is not None:
        from tacit.plan.models import digest_of_model

        if digest_of_model(step.workload) != probe.model:
            probe = probe.without_model()
    yield probe, step


def _read(args: argparse.Namespace) -> tuple[Probe | None, RecordedStep | None]:
    if args.source is None:
        return None, None
    from tacit.plan import load
    from tacit.plan.models import machine_here

    if args.link or args.world:
        raise ConfigError(
            "--link and --world are for plans without a probe; with --from write --what-if 'link=... world=...'"
        )
    return load(args.source, here=None if args.elsewhere else machine_here())


def _modelled(args: argparse.Namespace) -> RecordedStep:
    from tacit.plan import RecordedStep

    if args.model is None:
        raise ConfigError(
            "there is no model to plan for; name one with --model vgg16, a .json of layers, or module:name"
        )
    return RecordedStep(common.model_of(args.model))


def _assumed(args: argparse.Namespace) -> Probe:
    """No ranks: codecs are timed in this process, links follow from their rate."""
    if args.link is None or args.world is None:
        raise ConfigError(
            "there are no ranks to probe: start them, as torchrun --nproc-per-node=4 -m tacit plan --model module:name does, read a probe "
            "with --from, or give --link and --world"
        )
    from tacit.plan.candidates import every_choice, with_baselines
    from tacit.plan.costs import cost_of, measurable
    from tacit.plan.models import machine_here
    from tacit.plan.what_if import assumed, parsed_what_if

    asked = parsed_what_if(f"link={args.link} world={args.world}")
    assert asked.world is not None
    named = args.strategies
    choices = every_choice(asked.world) if named is None else with_baselines(named, asked.world)
    with common.waiting("timing codecs"):
        left_out = measurable(choices, asked.world) if named is None else {}
        costs = tuple(cost_of(choice, asked.world) for choice in choices if not left_out.get(choice))
    for note in filter(None, left_out.values()):
        log.warning("%s", note)
    machine = machine_here()
    return assumed(
        asked.world, parse_rate(args.link), parse_time(args.latency), costs, float(machine.cores), machine
    )


def _write(args: argparse.Namespace, probe: Probe, step: RecordedStep, advice: Advice) -> None:
    if args.out is not None:
        from tacit.plan import save

        save(args.out, probe, step, advice)
    if args.html is not None:
        from tacit.plan.files import as_record
        from tacit.report.pages.plan import build

        records = [{"kind": "probe", **as_record(probe)}, {"kind": "advice", **as_record(advice)}]
        common.write_whole(args.html, build(records))


def _print(probe: Probe, step: RecordedStep, advice: Advice) -> None:
    out = common.console()
    out.print(f"{advice.verdict}\n", style="bold")
    work = step.workload
    common.print_facts(
        [
            ("model", f"{work.name}, {work.parameters:,} parameters, {work.source}"),
            ("step alone", time_text(step.compute_s)),
            ("ranks", f"{probe.world}, {probe.backend}, {probe.device}"),
            (
                "link",
                f"{size_text(probe.at_once_bps / 8)}/s from each rank at once, {time_text(probe.latency_s)} a message",
            ),
            ("probe", f"{probe.took_s:.1f} s" if probe.took_s else "none"),
        ]
    )
    rows = [_row(each, advice) for each in advice.predictions]
    heads = ["choice", "step", "interval", "against DDP", "wire", "codec", "sent", "limited by", "error"]
    common.print_table(out, heads, rows)
    facts = [("winner", f"{advice.winner.choice}, limited by {advice.winner.limited_by}")]
    if advice.runner_up is not None:
        margin = f"{100 * advice.margin:+.0f} % ({100 * advice.margin_low:+.0f} to {100 * advice.margin_high:+.0f})"
        facts.append(("runner-up", f"{advice.runner_up.choice}, {margin}"))
    common.print_facts([*facts, ("accuracy", advice.risk)])
    print(f"\n{advice.line}")
    cautions = dict.fromkeys(each.caution for each in advice.predictions if each.caution)
    for note in dict.fromkeys((*advice.notes, *cautions)):
        out.print(f"\n{note}", style="dim")


def _row(each: Prediction, advice: Advice) -> list[str]:
    plain = next((other for other in advice.predictions if other.choice == "DDP"), None)
    mark = " *" if each.choice == advice.winner.choice else ""
    return [
        each.choice + mark,
        time_text(each.step_s),
        f"{time_text(each.low_s)} to {time_text(each.high_s)}",
        f"{plain.step_s / each.step_s:.2f}x" if plain is not None else "",
        time_text(each.wire_s),
        time_text(each.codec_s),
        size_text(each.sent_nbytes),
        each.limited_by,
        "" if not each.nmse else f"{each.nmse:.2g}",
    ]
