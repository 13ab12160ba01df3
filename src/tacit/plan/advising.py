"""What to use, from predictions: the fastest, unless what loses less is as fast within the intervals.

    level 0   DDP as it is          1   none, bf16 (and bf16 as DDP's hook)          2   fp16          3   codecs that lose more
    level 4   rules that exchange less often, and gossip: predicted, never advised, since what they learn is another matter

A choice of a lower level wins where its step is at most 5 % longer, or 10 % where the intervals overlap. Within a level what torch has
itself wins where it is at most 5 % slower.
"""

from __future__ import annotations

from collections.abc import Sequence

from tacit.errors import ConfigError
from tacit.plan.values import BASELINES, Advice, BucketSizes, Prediction, Probe, TouchedTable
from tacit.sim.rows import RowsJob, times_of_touched
from tacit.units import size_text, time_text

_WORTH = 1.10  # a shorter step than that is worth a level, however wide the intervals
_DRIFT = 1.3  # a computation that has changed by so much is noted
_SAME = 1.05  # a step that is no longer than that is as good: predictions are hardly better, whatever their intervals
_SLOW_PAIR = 1.5  # times that a link is slower than most
_HIDDEN = 1.03  # a step that is so little longer than its computation has nothing to win
_SHOWN = {  # by codec: what our own trainings ended with, docs/lab.md
    "int8": "86.92 % against 86.93 % for fp32 (CNN, 400 steps, 3 seeds)",
    "int4": "a loss of 1.466 and 1.449 against 1.469 and 1.450 for fp32 (transformer, 1,200 steps, 2 seeds)",
    "thc": "87.07 % against 86.93 % for fp32 (CNN, 400 steps, 3 seeds)",
    "hush": "86.92 % against 86.93 % for fp32 (CNN, 400 steps, 3 seeds)",
    "lowrank": "a loss 4.9 to 5.7 % above fp32's (rank 8, transformer, 1,200 steps, 3 seeds)",
}
_HOOKS = {"DDP bf16": "bf16_compress_hook", "DDP fp16": "fp16_compress_hook"}


def advise(
    probe: Probe, predictions: Sequence[Prediction], *, lossy: bool = True, notes: Sequence[str] = ()
) -> Advice:
    """The choice to make.

    Args:
        probe: What the predictions were made from.
        predictions: A choice each, as `predict` returns them.
        lossy: Whether codecs that lose more than a cast may win.
        notes: Sentences to hand on.

    Returns:
        The advice.

    Raises:
        ConfigError: There is no prediction to choose from.

    Example:
        >>> # advise(probe, predict(probe, step)).verdict
    """
    order = sorted(predictions, key=lambda each: each.step_s)
    allowed = [each for each in order if level(each.choice) < (4 if lossy else 3)]
    if not allowed:
        raise ConfigError(
            "there is no choice to advise on; predict DDP, and a strategy that loses no more than bf16, too"
        )
    allowed = _trained(allowed)
    fastest = allowed[0]
    winner = _winner(allowed)
    runner_up = next((each for each in allowed if each.choice != winner.choice), None)
    margin, low, high = _margin(winner, runner_up)
    return Advice(
        _verdict(probe, winner, allowed),
        winner,
        runner_up,
        fastest,
        margin,
        low,
        high,
        risk_of(winner),
        line_of(probe, winner),
        tuple(order),
        (*notes, *_notes(probe)),
    )


def _trained(order: list[Prediction]) -> list[Prediction]:
    """Without codecs whose trainings nobody has on file, unless there are no others: a fast step is no reason to be the first who tries."""
    known = [each for each in order if level(each.choice) < 3 or codec_of(each.choice) in _SHOWN]
    return known if any(level(each.choice) == 3 for each in known) else order


def level(choice: str) -> int:
    """How much a choice gives up: 0 nothing, 1 and 2 a cast, 3 more, 4 gradients of all ranks in every step."""
    codec = codec_of(choice)
    if choice == "DDP":
        return 0
    if choice not in BASELINES and not choice.startswith("every /"):
        return 4
    return {"none": 1, "bf16": 1, "fp16": 2}.get(codec, 3)


def codec_of(choice: str) -> str:
    """The codec's bare name; of DDP's hooks, their dtype's."""
    if choice in BASELINES:
        return choice.removeprefix("DDP").strip() or "none"
    return choice.split(" / ")[1].partition("(")[0].strip()


def _winner(order: Sequence[Prediction]) -> Prediction:
    fastest = order[0]
    as_fast = [
        each
        for each in order
        if each.step_s <= _SAME * fastest.step_s
        or (each.low_s <= fastest.high_s and each.step_s <= _WORTH * fastest.step_s)
    ]
    least = min(level(each.choice) for each in as_fast)
    first, *others = [each for each in as_fast if level(each.choice) == least]
    torchs = (e for e in (first, *others) if e.choice in BASELINES and e.step_s <= _SAME * first.step_s)
    return next(torchs, first)


def _margin(winner: Prediction, other: Prediction | None) -> tuple[float, float, float]:
    """How much longer the other's step is: middle, least, most."""
    if other is None:
        return 0.0, 0.0, 0.0
    return (
        other.step_s / winner.step_s - 1,
        other.low_s / winner.high_s - 1,
        other.high_s / winner.low_s - 1,
    )


def _verdict(probe: Probe, winner: Prediction, order: Sequence[Prediction]) -> str:
    """One sentence: what to use, why, and what else there was."""
    plain = next((each for each in order if each.choice == "DDP"), None)
    codec = next((each for each in order if level(each.choice) == 3), None)
    name = _named(winner)
    if level(winner.choice) == 3:
        casts = [each for each in order if level(each.choice) < 3]
        against = f", {casts[0].step_s / winner.step_s:.2f} x as fast as {_named(casts[0])}" if casts else ""
        return f"use {name}: {_where(winner)} a step takes {time_text(winner.step_s)}{against}"
    if codec is None or codec.step_s >= winner.step_s:
        gain = "no codec would be faster"
    else:
        share = 100 * (1 - codec.step_s / winner.step_s)
        why = (
            "too little for what it may cost in accuracy"
            if winner.step_s <= _SAME * codec.step_s
            else "which the probe cannot tell from none, and cost accuracy risk"
        )
        gain = f"the best codec ({codec.choice}) would bring {share:.0f} %, {why}"
    if winner.choice == "DDP" and winner.step_s <= _HIDDEN * winner.compute_s:
        return f"use plain DDP: its communication hides behind the computation, and {gain}"
    faster = (
        f" ({plain.step_s / winner.step_s:.2f} x as fast as plain DDP)"
        if plain and winner is not plain
        else ""
    )
    return f"use {name}{faster}: {_where(winner)} a step takes {time_text(winner.step_s)}; {gain}"


def _named(prediction: Prediction) -> str:
    return {"DDP": "plain DDP", "DDP bf16": "DDP's bf16 hook", "DDP fp16": "DDP's fp16 hook"}.get(
        prediction.choice, prediction.choice
    )


def _where(prediction: Prediction) -> str:
    return {
        "compute": "limited by its computation,",
        "wire": "limited by the wire,",
        "codec": "limited by the codec's own time,",
    }[prediction.limited_by]


def risk_of(prediction: Prediction) -> str:
    """What it may cost in accuracy: measured error, and trainings of ours; never one turned into the other."""
    codec, lost = codec_of(prediction.choice), level(prediction.choice)
    if lost == 0 or codec == "none":
        return "none: the numbers are sent as they are"
    error = (
        ""
        if prediction.nmse is None
        else f"; error on this model's gradients {prediction.nmse:.2g} (NMSE, one step)"
    )
    if lost == 1:
        return f"a cast to bf16, as mixed precision has it{error}"
    if lost == 2:
        return f"a cast to fp16: gradients above 65,504 overflow, so use it with a GradScaler{error}"
    shown = _SHOWN.get(codec)
    trained = f"in our trainings it ended at {shown}; " if shown else ""
    return f"lossy: {trained}not judged on your task{error}"


def line_of(probe: Probe, prediction: Prediction) -> str:
    """Python to paste, with the bucket sizes that were predicted."""
    sizes = prediction.buckets
    ddp = f"model = DistributedDataParallel(model{_cap(sizes)})"
    if prediction.choice == "DDP":
        return ddp
    if prediction.choice in _HOOKS:
        hook = f"default_hooks.{_HOOKS[prediction.choice]}"
        if probe.backend != "nccl" and prediction.choice == "DDP bf16":
            hook = f"lambda state, bucket: {hook}(state, bucket)"  # torch refuses its name without NCCL
        module = "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks"
        return f"{module}\n{ddp}\nmodel.register_comm_hook(None, {hook})"
    return (
        f'{ddp}\nhandle = tacit.attach(model, optimizer, "{prediction.choice}", bucket={_size(sizes.nbytes)})'
    )


def _cap(sizes: BucketSizes) -> str:
    usual = sizes.ddp_nbytes == 25 << 20 and sizes.ddp_first_nbytes is not None
    return "" if usual else f", bucket_cap_mb={sizes.ddp_nbytes / 2**20:g}"


def _size(nbytes: int) -> str:
    return f'"{nbytes >> 20}MiB"' if nbytes % 2**20 == 0 else str(nbytes)


def _notes(probe: Probe) -> list[str]:
    found = []
    if probe.assumed:
        found.append(f"not measured: {probe.assumed}")
    if not 1 / _DRIFT < probe.drift < _DRIFT:
        found.append(
            f"the machine is busy: the model's computation took {probe.drift:.1f} x as long at the end of the probe as when it was recorded; "
            f"predictions are of the recorded one"
        )
    if probe.alone_bps > 1.5 * probe.at_once_bps > 0:
        found.append(
            f"one message alone is {probe.alone_bps / probe.at_once_bps:.1f} x as fast as the same from all ranks at once: "
            f"they share an uplink or a machine ({size_text(probe.at_once_bps / 8)}/s each)"
        )
    if probe.pairs is not None and probe.pairs.typical_bps > _SLOW_PAIR * probe.pairs.slowest_bps:
        pairs = probe.pairs
        found.append(
            f"from rank {pairs.sender} to rank {pairs.receiver} go {size_text(pairs.slowest_bps / 8)}/s and between most pairs "
            f"{size_text(pairs.typical_bps / 8)}/s: every exchange waits for that link"
        )
    return [*found, *(_on_table(probe, table) for table in probe.tables)]


def _on_table(probe: Probe, table: TouchedTable) -> str:
    """What a sparse table costs as DDP exchanges it, and in shards: by the rows model, which knows links alone."""
    about = (
        f"table {table.name} ({table.rows:,} rows of {table.width}) is in no step above: a rank touches {table.unique:,.0f} rows a step, and "
        f"all ranks {table.union:,}"
    )
    try:
        job = RowsJob(probe.world, 1, width=table.width, rate_bps=probe.at_once_bps)
    except ConfigError as cause:
        return f"{about}; the rows model has no time for it: {cause}"
    ddp, shards = times_of_touched(job, table.unique, table.union)
    return (
        f"{about}; by the links alone DDP's sparse all-gather takes {time_text(ddp.time_s)} and rows in shards {time_text(shards.time_s)} a step "
        f"(tacit.rows.shard)"
    )
