"""The lab's part of a page: a section a workload, with its figures over all rates and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from statistics import median

from tacit.record_types import LeftOutRecord, ReplayCheckRecord, TuningRecord
from tacit.report.figures import frontier
from tacit.report.figures import lab as draw
from tacit.report.model import comparisons as ct
from tacit.report.model import tables
from tacit.report.model.comparisons import Comparison, Standing
from tacit.report.model.frontier import placed
from tacit.report.model.runs import Run
from tacit.report.pages import html, side_sections
from tacit.report.pages.cards import WHY, ink_of, kind_badges
from tacit.report.pages.figure_set import FigureSet
from tacit.report.pages.html import Section, TableCell, figure_cell
from tacit.report.text import (
    NOTHING,
    counted,
    duration_text,
    listed,
    metric_text,
    more_text,
    percent_text,
    rate_text,
    times_text,
)
from tacit.units import size_text, time_text

MANY = 8  # configurations, from which on they are also compared by bytes and time to the target
PREDICTION = (
    "The prediction is the simulator's: layers compute, buckets cross the wire one after another while backward goes on, at "
    "the payload's share of the rate, with the codec's time as measured. It knows no latency, no shared cores and nothing of "
    "what torch's hooks compute, so most steps take longer than it says."
)


def families(runs: Sequence[Run], found: Sequence[Comparison], figure_set: FigureSet) -> list[Section]:
    """A section for each workload of each run."""
    ink, of = ink_of(found), {run.label: run for run in runs}
    return [
        _family(of[family[0].run], family, ink, figure_set, len(runs) > 1) for family in ct.families(found)
    ]


def _family(
    run: Run, family: Sequence[Comparison], ink: dict[str, str], figure_set: FigureSet, several: bool
) -> Section:
    first = family[0].first
    shown = [figure for comparison in family for figure in _over_time(comparison, ink, figure_set)]
    shown += [figure for comparison in family for figure in _against_bytes(comparison, ink, figure_set)]
    shown += [_steps(comparison, figure_set) for comparison in family]
    shown += [
        *_bytes(family[0], ink, figure_set),
        *_speedups(family, ink, figure_set),
        *_predicted(family, ink, figure_set),
    ]
    title = f"{first.workload}, {family[0].run}" if several else first.workload
    if family[0].job_named:
        title = f"{title}, {first.job}"
    refused = [comparison.link for comparison in family if not comparison.trusted]
    said = f"at {listed(refused)}: the network was not what it claims there, so its figures decide nothing."
    warning = (
        f"<p>{html.badge('calibration refused', WHY['calibration refused'])}{escape(said)}</p>"
        if refused
        else ""
    )
    body = f'<p>{escape(_about(family))}</p>{warning}<div class="figures">{"".join(shown)}</div>'
    return Section(
        title,
        body + _time_table(family, ink) + _byte_table(family, ink) + _notes(run, family),
        kind_badges(family[0]),
    )


def _about(family: Sequence[Comparison]) -> str:
    first = family[0].first
    counts = sorted(
        {s.timing.step_n for comparison in family for s in comparison.standings if s.timing.step_n}
    )
    steps = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}" if counts else "?"
    parts = [
        counted(first.ranks, "rank") if first.ranks else "",
        first.network_text if len({comparison.first.network_text for comparison in family}) == 1 else "",
        f"at {listed([comparison.link for comparison in family])}" if first.shaped else "unshaped",
        f"medians over {steps} steps a configuration, taken in turn",
    ]
    told = ", ".join(filter(None, parts))
    if first.replayed:
        told += f". Replayed: {WHY['replayed']}"
    if first.scale != 1:
        told += f". {ct.scale_text(first.scale).capitalize()}: {WHY['scaled']}"
    if family[0].target is not None:
        told += ". Time to accuracy is steps to the target, from training, times the median step at that rate; steps "
        told += "between two judged points are read off the line that joins them"
    return f"{told}."


def _over_time(comparison: Comparison, ink: dict[str, str], figure_set: FigureSet) -> Iterator[str]:
    if comparison.trained and any(seed.points for s in comparison.standings for seed in s.seeds):
        caption = (
            f"{comparison.trained.metric.capitalize()} against time {_at(comparison)}: median of the seeds thick, each seed "
            "thin; the dot is the median time to the target."
        )
        words = (comparison.workload, "accuracy", comparison.link)
        yield figure_set.show(words, lambda name: draw.accuracy_over_time(comparison, ink, name), caption)


def _against_bytes(comparison: Comparison, ink: dict[str, str], figure_set: FigureSet) -> Iterator[str]:
    """What many configurations are compared by: where they end for their bytes, and how soon they arrive."""
    if len(placed(comparison)) < MANY or comparison.trained is None:
        return
    caption = (
        f"{comparison.trained.metric.capitalize()} at the end against the bytes a rank sends in a step, counted {_at(comparison)}. Green: nobody "
        "ends better with as few bytes or fewer. An arrow: the end lies beyond the figure."
    )
    words = (comparison.workload, "frontier", comparison.link)
    yield figure_set.show(words, lambda name: frontier.accuracy_against_bytes(comparison, name), caption)
    if comparison.target is not None:
        caption = f"Time to the target {_at(comparison)}: steps to it, from training, times the median step."
        words = (comparison.workload, "target", comparison.link)
        yield figure_set.show(words, lambda name: frontier.time_to_target(comparison, ink, name), caption)


def _at(comparison: Comparison) -> str:
    where = f"at {comparison.link}" if comparison.first.shaped else f"over {comparison.link}"
    return where if comparison.trusted else f"{where} (calibration refused)"


def _steps(comparison: Comparison, figure_set: FigureSet) -> str:
    caption = (
        f"A step {_at(comparison)}. Upper lane: the training thread computes, waits for the others, and does the rest (the "
        "optimizer). Lower lane: tacit's own threads beside it. × is against fp32 DDP."
    )
    return figure_set.show(
        (comparison.workload, "step", comparison.link), lambda name: draw.step_bars(comparison, name), caption
    )


def _bytes(comparison: Comparison, ink: dict[str, str], figure_set: FigureSet) -> Iterator[str]:
    if any(s.timing.sent_nbytes_a_step is not None for s in comparison.standings):
        caption = f"Bytes a rank sends in a step, counted as they leave, against the interface's own count ({_at(comparison)})."
        yield figure_set.show(
            (comparison.workload, "bytes"), lambda name: draw.byte_bars(comparison, ink, name), caption
        )


def _speedups(family: Sequence[Comparison], ink: dict[str, str], figure_set: FigureSet) -> Iterator[str]:
    told = [comparison for comparison in family if comparison.first.rate_bps and comparison.trusted]
    if len({comparison.first.rate_bps for comparison in told}) > 1 and any(
        s.speedup for c in told for s in c.standings
    ):
        caption = "Step-time speed-up against fp32 DDP by link rate; whiskers p10 to p90; below the dashed line it loses."
        words = (family[0].workload, "speedup")
        yield figure_set.show(words, lambda name: draw.speedup_by_rate(told, ink, name), caption)


def _predicted(family: Sequence[Comparison], ink: dict[str, str], figure_set: FigureSet) -> Iterator[str]:
    rows = tables.prediction_rows(family)
    if rows:
        off = [abs(row["error"]) for row in rows]
        caption = (
            f"Predicted against measured steps: off by {100 * median(off):.1f} % (median; at most {100 * max(off):.1f} %, "
            f"{counted(len(rows), 'step time')}); the band is 10 %. {PREDICTION}"
        )
        words = (family[0].workload, "predicted")
        yield figure_set.show(words, lambda name: draw.predicted_against_measured(rows, ink, name), caption)


def _time_table(family: Sequence[Comparison], ink: dict[str, str]) -> str:
    trained = family[0].trained
    heads = ["configuration", "link", "median step", "step against fp32", "step against bf16"]
    if trained:
        goal = "target" if trained.target is None else metric_text(trained.target, trained.higher_is_better)
        heads += [f"time to {goal}", "time against fp32", "time against bf16", f"final {trained.metric}"]
    timings = [s.timing for comparison in family for s in comparison.standings]
    predicted = any(timing.predicted_step_s for timing in timings)
    heads += ["predicted step"] if predicted else []
    scaled = any(timing.scale != 1 and timing.codec_s is not None for timing in timings)
    heads += ["codec time", "codec time at full size"] if scaled else []
    rows = [_time_cells(c, s, ink, bool(trained), predicted, scaled) for c in family for s in c.standings]
    small = "steps with p10 to p90, " + (
        "times to accuracy with the seeds' range" if trained else "n steps each"
    )
    return html.table(heads, rows, f"{family[0].workload}: times ({small})")


def _time_cells(
    comparison: Comparison,
    standing: Standing,
    ink: dict[str, str],
    trained: bool,
    predicted: bool,
    scaled: bool,
) -> list[TableCell]:
    timing = standing.timing
    span = _span(timing.step_p10_s, timing.step_p90_s, time_text)
    n = f"n={timing.step_n}" if timing.step_n else ""
    ratios = _span(timing.speedup_p10, timing.speedup_p90, times_text)
    cells = [
        html.code(standing.name, ink[standing.name]),
        TableCell(escape(comparison.link), timing.rate_bps),
        figure_cell(timing.step_p50_s, time_text, " ".join(filter(None, (span, n)))),
        figure_cell(standing.speedup, times_text, ratios),
        figure_cell(comparison.step_ratio(standing, comparison.bf16), times_text),
    ]
    if trained:
        cells += _trained_cells(comparison, standing)
    if predicted:
        guess = timing.predicted_step_s
        cells.append(figure_cell(guess, time_text, more_text(guess / timing.step_p50_s - 1) if guess else ""))
    if scaled:
        cells += [figure_cell(value, time_text) for value in (timing.codec_s, timing.codec_full_s)]
    return cells


def _trained_cells(comparison: Comparison, standing: Standing) -> list[TableCell]:
    spread, final, seeds = standing.to_target, standing.final, standing.seeds
    if spread:
        small = f"{_span(spread.least, spread.most, duration_text)} n={spread.n}"
        first = figure_cell(spread.p50, duration_text, small)
    else:
        told = f"reached by {standing.reached} of {counted(len(seeds), 'seed')}" if seeds else "not trained"
        first = TableCell(f'<span class="worse">{told}</span>')
    if comparison.target is None:
        first = TableCell(NOTHING)
    ratios = [
        comparison.ratio(standing, rival) if spread else None for rival in (comparison.fp32, comparison.bf16)
    ]

    def show(value: float) -> str:
        return metric_text(value, seeds[0].higher_is_better)

    last = figure_cell(final.p50, show, _span(final.least, final.most, show)) if final else TableCell(NOTHING)
    return [first, *(figure_cell(ratio, times_text) for ratio in ratios), last]


def _span(low: float | None, high: float | None, show: Callable[[float], str]) -> str:
    return "" if low is None or high is None else f"{show(low)} – {show(high)}"


def _byte_table(family: Sequence[Comparison], ink: dict[str, str]) -> str:
    heads = ["configuration", "link", "sent", "at the interface", "difference", "goodput", "share of link"]
    heads += ["CPU time", "compute", "waiting", "encode", "wire", "decode", "buckets of"]
    rows = [
        _byte_cells(comparison, standing, ink) for comparison in family for standing in comparison.standings
    ]
    kept = [place for place in range(len(heads)) if any(row[place].html != NOTHING for row in rows)]
    rows = [[row[place] for place in kept] for row in rows]
    caption = f"{family[0].workload}: bytes, and where the time goes, a step a rank"
    return html.table([heads[place] for place in kept], rows, caption)


def _byte_cells(comparison: Comparison, standing: Standing, ink: dict[str, str]) -> list[TableCell]:
    t = standing.timing
    sent, seen = t.sent_nbytes_a_step, t.interface_nbytes_a_step
    times = (t.cpu_s_a_step, t.compute_s, t.split.wait_s, t.split.encode_s, t.split.wire_s, t.split.decode_s)
    return [
        html.code(standing.name, ink[standing.name]),
        TableCell(escape(comparison.link), t.rate_bps),
        figure_cell(sent, size_text, t.sent_is),
        figure_cell(seen, size_text),
        figure_cell(seen / sent - 1 if sent and seen else None, more_text),
        figure_cell(t.goodput_bps, rate_text),
        figure_cell(t.link_share, percent_text),
        *(figure_cell(value, time_text) for value in times),
        figure_cell(t.bucket_nbytes, size_text),
    ]


def _notes(run: Run, family: Sequence[Comparison]) -> str:
    """What the records hold beside their figures: how the baseline was tuned, whether the replay was right, who is missing,
    what was dropped on the way."""
    notes = {s.name: s.timing.note for comparison in family for s in comparison.standings if s.timing.note}
    items = [f"<code>{escape(name)}</code>: {escape(note)}" for name, note in notes.items()]
    jobs = {comparison.first.job for comparison in family}
    items += [_left_out(record) for record in run.typed(LeftOutRecord) if record.job in jobs]
    items += [
        _tuned(record) for record in run.typed(TuningRecord) if record.job in jobs and record.best_nbytes
    ]
    items += [
        _checked(record) for record in run.typed(ReplayCheckRecord) if record.job in jobs and record.ratio
    ]
    cases = dict.fromkeys((comparison.first.job, comparison.first.rate_bps) for comparison in family)
    items += [escape(sentence) for sentence in side_sections.dropped(run, cases)]
    listed_items = "".join(f"<li>{item}</li>" for item in dict.fromkeys(items))
    return f"<ul>{listed_items}</ul>" if items else ""


def _left_out(record: LeftOutRecord) -> str:
    return f"<code>{escape(record.configuration)}</code> is missing: {escape(record.why)}"


def _tuned(record: TuningRecord) -> str:
    tried = [
        f"{size_text(row.bucket_nbytes)} {time_text(row.step_p50_s)}"
        for row in record.rows
        if row.bucket_nbytes and row.step_p50_s
    ]
    best = size_text(record.best_nbytes or 0)
    return f"Plain DDP's buckets were tuned to {best} (a step with {listed(tried)})"


def _checked(record: ReplayCheckRecord) -> str:
    wrong = "" if record.passed else '<span class="worse">, which is not right</span>'
    ratio = times_text(record.ratio or 0)
    return f"Replay: without communication, a step takes {ratio} of the recorded times{wrong}"
