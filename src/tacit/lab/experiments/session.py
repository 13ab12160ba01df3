"""An experiment run: the network brought up, calibrated at every rate, jobs run on it, all of it recorded.

Records, in order: `start`; then for every job and rate `calibration`, what the ranks reported, and `counters`; at last `end`.
Where the calibration does not pass the job is not run at that rate, and a record of kind `refused` has the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tacit import launch
from tacit.lab.errors import GateError
from tacit.lab.experiments import jobs
from tacit.lab.experiments.aggregating import aggregating
from tacit.lab.experiments.experiment import Experiment, ExperimentJob
from tacit.lab.network.calibration import calibrate
from tacit.lab.network.lab import Counters, Lab, up
from tacit.lab.network.theory import path_mtu
from tacit.records import Record, Recorder, host_facts
from tacit.units import rate_text

OnRecord = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """What was recorded, the sentences about what was refused, and whether all that was held to a limit kept it."""

    records: tuple[Record, ...]
    refused: tuple[str, ...]
    shaped: bool

    @property
    def passed(self) -> bool:
        return not self.refused and all(record.get("passed") is not False for record in self.records)


@dataclass(slots=True)
class Session:
    """One run of one experiment, in one lab. `on_record` receives every record, and progress, as it comes."""

    experiment: Experiment
    lab: Lab
    out: Path
    recorder: Recorder
    on_record: OnRecord
    records: list[Record]
    refused: list[str]
    found: dict[str, str]  # what ranks need to find the aggregator
    launches: int = 0

    def record(self, kind: str, **fields: Any) -> None:
        written = self.recorder.record(kind, **fields)
        self.records.append(written)
        self.on_record(written)

    def run(self, job: ExperimentJob) -> None:
        """The job at each of its rates, or once on the network as it is; once, too, where nothing can be shaped."""
        for rate_bps in (job.rates_bps if self.lab.shaped else ()) or (None,):
            self.lab.set_rate(rate_bps)
            try:
                self._calibrate(job)
            except GateError as cause:
                self.refused.append(f"{job.name} at {rate_text(self.lab.rate_bps)}: {cause}")
                self.record("refused", job=job.name, rate_bps=self.lab.rate_bps, why=str(cause))
                continue
            self._launch(job)

    def _calibrate(self, job: ExperimentJob) -> None:
        if not self.lab.shaped or not job.spec.timed:
            return
        self.on_record({"kind": "progress", "job": job.name, "phase": "calibration", "step": 0, "steps": 1})
        realtime = self.experiment.run.realtime  # as the ranks that follow
        found = calibrate(self.lab, self.out / "logs" / "calibration", realtime=realtime)
        self.record("calibration", job=job.name, **found.as_dict())
        found.check()

    def _launch(self, job: ExperimentJob) -> None:
        self.launches += 1
        run, before = self.experiment.run, self.lab.counters()
        hurried: list[bool] = []

        def heard(rank: int, message: launch.Message) -> None:
            if run.realtime and job.spec.timed and not hurried:  # all have imported torch and joined
                hurried.append(self.lab.raise_priority())
            if message.get("kind") == "progress":
                self.on_record(message)
            elif isinstance(message.get("kind"), str):
                self.record(**message)

        launch.run(
            jobs.KINDS[job.kind].worker,
            ["--spec", json.dumps(job.spec.as_table()), "--network", json.dumps(self._network())],
            ranks=self.experiment.ranks,
            on_message=heard,
            log_dir=self.out / "logs" / f"{self.launches:02}-{job.name.replace('/', '-')}",
            limit_s=run.limit_s,
            rank_specs=[replace(place, env={**place.env, **self.found}) for place in self._places()],
        )
        if self.lab.shaped:
            nodes = difference(self.lab.counters(), before)
            facts = {"job": job.name, "rate_bps": self.lab.rate_bps, "realtime": hurried == [True]}
            self.record("counters", **facts, nodes=nodes)

    def _places(self) -> list[launch.RankSpec]:
        """Of the ranks; not on the aggregator's own host."""
        run, aggregator = self.experiment.run, self.experiment.aggregator
        places = self.lab.rank_specs(run.ranks_per_host)
        own = next((i for i, h in enumerate(self.lab.hosts) if aggregator and h.name == aggregator.at), None)
        if own is not None:
            del places[own * run.ranks_per_host : (own + 1) * run.ranks_per_host]
        return places

    def _network(self) -> dict[str, Any]:
        """What a worker receives about its network."""
        if not self.lab.shaped:
            return {}
        alone = self.experiment.run.ranks_per_host == 1 and all(h.device == "eth0" for h in self.lab.hosts)
        return {
            "text": str(self.lab.network),
            "rate_bps": self.lab.rate_bps,
            "shaped": True,
            "interface": "eth0" if alone else None,
            "mtu": path_mtu(list(self.lab.plan.cables)),
        }


def run(
    experiment: Experiment,
    *,
    out: Path,
    recorder: Recorder,
    command: str,
    on_record: OnRecord,
    folder: Path | None = None,
) -> SessionOutcome:
    """Runs all jobs of an experiment. The lab is gone when this returns, whatever happened; so are all ranks."""
    for job in experiment.jobs:
        jobs.check_here(job.spec, experiment.ranks)
    outcome, records, refused = "failed", list[Record](), list[str]()
    log = out / "logs" / "aggregator.log"
    with (
        up(experiment.network, fallback=True, folder=folder) as lab,
        aggregating(experiment.aggregator, lab, log, realtime=experiment.run.realtime) as found,
    ):
        session = Session(experiment, lab, out, recorder, on_record, records, refused, found)
        session.record(
            "start", command=command, experiment=experiment.name, ranks=experiment.ranks, host=host_facts(),
            network=lab.facts(),
        )  # fmt: skip
        try:
            for job in experiment.jobs:
                session.run(job)
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            session.record("end", outcome=outcome)
        return SessionOutcome(tuple(records), tuple(refused), lab.shaped)


def difference(after: Counters, before: Counters) -> dict[str, dict[str, dict[str, int]]]:
    """What was counted between two readings, by node and device."""
    return {
        node: {
            device: {name: value - before[node][device][name] for name, value in counted.items()}
            for device, counted in devices.items()
        }
        for node, devices in after.items()
    }
