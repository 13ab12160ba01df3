"""What a schedule costs on a network, stage by stage: the answer to "why did this number come out"."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StageCost:
    """`times` stages alike, each in `parts` (sub-stages, where one stage needs more wavelengths than there are).

    Time = times x parts x (latency_s + transfer_s).
    """

    times: int
    transfers: int
    nbytes: float  # the longest transfer
    latency_s: float  # set-up, propagation, per message
    transfer_s: float  # bytes over the rate that the slowest transfer gets
    limit: str  # what sets the time: a link, a wavelength, a node; as text for people
    parts: int = 1
    wavelengths: int | None = None  # on the fullest arc, stripes counted (optical)
    stripes: int | None = None  # wavelengths a transfer is spread over (optical)
    hops: int | None = None  # the longest path

    @property
    def time_s(self) -> float:
        return self.times * self.parts * (self.latency_s + self.transfer_s)


@dataclass(frozen=True, slots=True)
class Cost:
    """A schedule's time for one vector on one network, with its breakdown."""

    schedule: str
    world: int
    nbytes: float
    stages: tuple[StageCost, ...]

    @property
    def time_s(self) -> float:
        return sum(stage.time_s for stage in self.stages)

    @property
    def latency_s(self) -> float:
        return sum(stage.times * stage.parts * stage.latency_s for stage in self.stages)

    @property
    def stage_count(self) -> int:
        """Stages as the network runs them: sub-stages counted."""
        return sum(stage.times * stage.parts for stage in self.stages)

    def as_record(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "world": self.world,
            "nbytes": self.nbytes,
            "time_s": self.time_s,
            "latency_s": self.latency_s,
            "stage_count": self.stage_count,
            "stages": [{**asdict(stage), "time_s": stage.time_s} for stage in self.stages],
        }
