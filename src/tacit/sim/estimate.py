"""What an exchange takes on a network, in one call: `tacit.sim.cost`, the function behind `tacit sim cost`."""

from dataclasses import dataclass, replace
from typing import Any

from tacit.errors import ConfigError
from tacit.schedules.schedule import Schedule
from tacit.sim.costs import Cost
from tacit.sim.fabric import Fabric, parse_fabric
from tacit.sim.payloads import PayloadSize, costs, of_codec, plain
from tacit.sim.texts import is_file, parse_schedule
from tacit.sim.workloads import Workload
from tacit.topology import Network, OpticalRing
from tacit.units import parse_size


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """What one schedule takes on a fabric: a cost for every collective (one, unless a codec requests more)."""

    name: str  # the schedule as it was given
    schedule: Schedule
    fabric: Fabric
    codec: str | None
    payloads: tuple[PayloadSize, ...]
    costs: tuple[Cost, ...]
    alpha_beta_s: float | None  # by formula, as a check; None where a payload changes its size on the way
    lower_bound_s: float | None  # no all-reduce of these bytes is faster; None where no bound is known

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

    def as_record(self) -> dict[str, Any]:
        """The values for JSON, every stage included.

        Returns:
            A dict of numbers, text and lists; times in seconds, sizes in bytes.
        """
        return {
            "schedule": self.name,
            "world": self.schedule.world,
            "network": self.fabric.as_record(),
            "codec": self.codec,
            "time_s": self.time_s,
            "latency_s": self.latency_s,
            "stage_count": self.stage_count,
            "vectors_sent_by_busiest_rank": self.vectors,
            "alpha_beta_s": self.alpha_beta_s,
            "lower_bound_s": self.lower_bound_s,
            "light_proven": self.fabric.ring is not None,
            "requests": [
                {"kind": payload.kind, "up_nbytes": payload.up_nbytes, "down_nbytes": payload.down_nbytes}
                | cost.as_record()
                for payload, cost in zip(self.payloads, self.costs, strict=True)
            ],
        }


def cost(
    schedule: str | Schedule,
    topology: str | Fabric | Network | OpticalRing,
    size: str | float | Workload,
    *,
    world: int | None = None,
    codec: str | None = None,
    stripe: bool = False,
    aggregators_on: str = "switches",
) -> Estimate:
    """The time of one schedule on a network, with every stage and what limits it.

    On an optical ring the light of every stage is first proven free of collisions.

    Args:
        schedule: A name with options (`"wrht(group=5)"`), a .json or .toml file, or a `Schedule`.
        topology: A network as text (`"star(rate=10Gbit, latency=5us)"`, `"optical(wavelengths=64)"`), a .toml file, or a value.
        size: Bytes of the vector, as text with a unit (`"100MB"`) or as a number; or a `Workload`, for its float32 gradients.
        world: Ranks. By default those of the schedule's file or value, else as many as the network has hosts.
        codec: A codec as a strategy spells it (`"hush"`): its requests are costed, not its own time. Imports torch.
        stripe: Spread transfers over idle wavelengths (optical rings only).
        aggregators_on: Where nodes that only add are: `"switches"`, `"hosts"`, or the name of a node.

    Returns:
        An `Estimate`: `time_s`, `latency_s`, `stage_count`, `lower_bound_s`, `costs` (stage by stage), `as_record()` for JSON.

    Raises:
        ConfigError: A text cannot be read, the ranks do not fit, or a path is longer than light reaches.
        PairingError: The codec's payloads cannot be added in flight by this schedule.
        ScheduleError: A file's schedule is wrong, or two transfers use one wavelength on one arc.

    Example:
        >>> from tacit import sim
        >>> found = sim.cost("ring", "star(rate=10Gbit, latency=5us)", "100MB", world=4)
        >>> f"{found.time_s:.5f} s in {found.stage_count} stages"
        '0.12006 s in 6 stages'
    """
    name = schedule if isinstance(schedule, str) else schedule.name
    if isinstance(schedule, str) and is_file(schedule):
        schedule = parse_schedule(schedule, world)
    if isinstance(schedule, Schedule):
        if world not in (None, schedule.world):
            raise ConfigError(f"{name} is for {schedule.world} ranks, not {world}; leave world out")
        world = schedule.world
    fabric = _fabric(topology, world, stripe, aggregators_on)
    if isinstance(schedule, str):
        schedule = parse_schedule(schedule, fabric.nodes if world is None else world, fabric.ring)
    return _estimate(name, schedule, fabric, _nbytes(size), codec)


def _fabric(
    topology: str | Fabric | Network | OpticalRing, world: int | None, stripe: bool, aggregators_on: str
) -> Fabric:
    if isinstance(topology, str):
        return parse_fabric(topology, world, stripe=stripe, aggregators_on=aggregators_on)
    fabric = topology if isinstance(topology, Fabric) else Fabric(topology)
    if stripe and fabric.ring is None:
        raise ConfigError(f"striping is over wavelengths, and {fabric.network} has none; give an OpticalRing")
    if not isinstance(topology, Fabric):
        return replace(fabric, stripe=stripe, aggregators_on=aggregators_on)
    if stripe or aggregators_on != "switches":
        raise ConfigError("a Fabric has stripe and aggregators_on of its own; set them there")
    return fabric


def _nbytes(size: str | float | Workload) -> float:
    if isinstance(size, Workload):
        return 4 * size.parameters
    return parse_size(size) if isinstance(size, str) else size


def _estimate(name: str, schedule: Schedule, fabric: Fabric, nbytes: float, codec: str | None) -> Estimate:
    payloads = plain(nbytes) if codec is None else of_codec(codec, int(nbytes) // 4, schedule)
    fabric.prove(schedule)
    found = costs(schedule, payloads, fabric)
    even = all(p.up_nbytes == p.down_nbytes for p in payloads)
    check_s = sum(fabric.alpha_beta_s(schedule, cost) for cost in found) if even else None
    bounds = [fabric.lower_bound_s(schedule, p.up_nbytes) for p in payloads]
    bound_s = sum(b for b in bounds if b is not None) if even and None not in bounds else None
    return Estimate(name, schedule, fabric, codec, payloads, found, check_s, bound_s)
