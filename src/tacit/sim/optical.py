"""What a schedule takes on an optical ring: light paths are set up, then all transfers of the stage run at full rate.

    part  = set-up + longest path x time a hop + max over transfers of (bytes / (wavelengths of the transfer x rate))
    stage = parts x part            total = sum over phases of times x stage

Nothing is shared: each transfer has its own wavelengths from source to destination (wavelengths.py finds them). Stages of a
phase are alike and are costed once, so a ring of 4096 nodes is two stages to compute.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import floor, inf

import numpy as np

from tacit.errors import ConfigError
from tacit.schedules.schedule import Schedule, Stage
from tacit.sim.costs import Cost, StageCost
from tacit.sim.wavelengths import Assignment, Colours, assign, loads, optical_notes, route
from tacit.topology import OpticalRing


@dataclass(frozen=True, slots=True)
class PowerBudget:
    """Why light goes only so far: what the laser and the receiver leave for losses, and what takes it.

    fixed + hops x (resonators x pass + propagation) <= budget.
    """

    budget_db: float  # laser power less the receiver's sensitivity and margin
    fixed_db: float  # couplers, modulator, drop at the end
    pass_db: float  # of one micro-ring resonator passed by
    resonators: int  # that a path passes at every node on its way
    propagation_db: float = 0.0  # of the fibre or waveguide between two nodes

    def __post_init__(self) -> None:
        losses = (self.fixed_db, self.pass_db, self.propagation_db)
        if (
            not all(0 <= loss < inf for loss in losses)
            or self.resonators < 0
            or not -inf < self.budget_db < inf
        ):
            raise ConfigError(
                f"losses of {losses} dB over {self.resonators} resonators a node, of {self.budget_db} dB: none may be negative or infinite"
            )
        if self.most_hops is not None and self.most_hops < 1:
            raise ConfigError(
                f"power budget {self.budget_db:g} dB: {self.fixed_db:g} dB are lost at the ends and {self.hop_db:g} dB a hop, so no light reaches a neighbour; raise the budget"
            )

    @property
    def hop_db(self) -> float:
        return self.resonators * self.pass_db + self.propagation_db

    @property
    def most_hops(self) -> int | None:
        """The longest path, for `OpticalRing.most_hops`; None if a hop costs nothing."""
        left = self.budget_db - self.fixed_db
        if self.hop_db == 0:
            return None if left >= 0 else 0
        return floor(left / self.hop_db + 1e-9)


def cost(schedule: Schedule, nbytes: float, ring: OpticalRing, *, stripe: bool = False) -> Cost:
    """The time of `schedule` for one vector of `nbytes`, stage by stage.

    `stripe` spreads transfers over idle wavelengths. A path beyond the ring's `most_hops` is refused, by name. O(transfers), by
    symmetry of the phases.
    """
    if not 0 <= nbytes < inf:
        raise ConfigError(f"{nbytes} bytes: give a finite size that is not negative")
    if schedule.nodes > ring.nodes:
        raise ConfigError(
            f"{schedule.name} has {schedule.nodes} nodes, the optical ring {ring.nodes}; give the ring as many"
        )
    for fault in too_long(schedule, ring):
        raise ConfigError(
            f"{fault}; use a schedule with shorter paths, such as ring or braid with more stages"
        )
    chunk_nbytes, known, stages = nbytes / max(1, schedule.chunks), Colours(), []
    for i, phase in enumerate(schedule.phases):
        if phase.times and len(phase.stage):
            clockwise, wavelength = optical_notes(schedule, i)
            light = assign(
                phase.stage, ring, clockwise=clockwise, wavelength=wavelength, stripe=stripe, known=known
            )
            stages.append(_stage_cost(phase.stage, phase.times, light, chunk_nbytes, ring))
    return Cost(schedule.name, schedule.world, nbytes, tuple(stages))


def rescaled(found: Cost, nbytes: float, was: OpticalRing, ring: OpticalRing) -> Cost:
    """`found`, costed on the ring `was`, for another vector, rate, set-up and time a hop. O(stages).

    The light depends on none of these, so a sweep over models and rates assigns wavelengths once. Nodes, wavelengths and
    transceivers must be the same.
    """
    if (was.nodes, was.wavelengths, was.senders) != (
        ring.nodes,
        ring.wavelengths,
        ring.senders,
    ) or not found.nbytes > 0:
        raise ConfigError(
            "a cost can be rescaled on a ring of as many nodes, wavelengths and transceivers, from a vector that is not empty"
        )
    bigger, faster = nbytes / found.nbytes, ring.rate_bps / was.rate_bps
    stages = (
        replace(
            stage, nbytes=stage.nbytes * bigger, latency_s=ring.setup_s + (stage.hops or 0) * ring.hop_s,
            transfer_s=stage.transfer_s * bigger / faster,
        )
        for stage in found.stages
    )  # fmt: skip
    return Cost(found.schedule, found.world, nbytes, tuple(stages))


def too_long(schedule: Schedule, ring: OpticalRing) -> Iterator[str]:
    """One sentence for every stage whose longest path exceeds the power budget; nothing if the schedule is feasible."""
    number = 0
    for i, phase in enumerate(schedule.phases):
        paths = route(phase.stage, ring, optical_notes(schedule, i)[0])
        far = int(paths.hops.argmax()) if len(phase.stage) else -1
        if ring.most_hops is not None and far >= 0 and paths.hops[far] > ring.most_hops:
            yield (
                f"{schedule.name}: stage {number}: the path {phase.stage.src[far]} -> {phase.stage.dst[far]} is {paths.hops[far]} hops long; "
                f"the power budget allows {ring.most_hops}"
            )
        number += phase.times


def _stage_cost(
    stage: Stage, times: int, light: Assignment, chunk_nbytes: float, ring: OpticalRing
) -> StageCost:
    stripes = light.stripes
    slow, hops = int((stage.count / stripes).argmax()), int(light.paths.hops.max())
    return StageCost(
        times=times,
        transfers=len(stage),
        nbytes=float(stage.count.max()) * chunk_nbytes,
        latency_s=ring.setup_s + hops * ring.hop_s,
        transfer_s=8 * float(stage.count[slow]) * chunk_nbytes / (float(stripes[slow]) * ring.rate_bps),
        limit=_limit(light, ring, int(stripes[slow])),
        parts=light.parts,
        wavelengths=light.most_wavelengths,
        stripes=int(stripes[slow]),
        hops=hops,
    )


def _limit(light: Assignment, ring: OpticalRing, stripes: int) -> str:
    """What sets the time, as text: the fullest arc."""
    load = loads(light.paths, ring.nodes)
    way, arc = (int(i) for i in np.unravel_index(int(load.argmax()), load.shape))
    each = "1 wavelength" if stripes == 1 else f"{stripes} wavelengths"
    return f"{load[way, arc]} paths {('clockwise', 'counter-clockwise')[way]} between nodes {arc} and {(arc + 1) % ring.nodes}, {each} each"
