"""Networks as values, shared by the simulator, the lab and the planner.

- `Network`: hosts and switches joined by links, each with a rate and a latency (electrical, packet-switched);
- `OpticalRing`: nodes on a two-way fibre ring, `wavelengths` a direction; light paths are set up before every stage.

Rates are bits a second, times are seconds: text such as "10Gbit" or "40GB/s" is parsed at the edge (units.py).
"""

from dataclasses import dataclass

from tacit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OpticalRing:
    """`nodes` on a ring of two fibres, one a direction; a wavelength can be used again on a disjoint arc.

    A node sends and receives on any number of wavelengths at the same time, as a ring of micro-resonators lets it.
    """

    nodes: int
    wavelengths: int = 64  # a direction
    rate_bps: float = 40e9 * 8  # of one wavelength
    setup_s: float = 25e-6  # before every stage: reconfiguration and conversion
    most_hops: int | None = None  # the longest light path that the power budget allows; None: unlimited

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"optical ring of {self.nodes} nodes; give 1 or more")
        if self.wavelengths < 1:
            raise ConfigError(f"wavelengths={self.wavelengths}: an optical ring needs at least 1 a direction")
        if self.rate_bps <= 0 or self.setup_s < 0:
            raise ConfigError(
                f"rate {self.rate_bps:g} bit/s and set-up {self.setup_s:g} s must not be negative, the rate not zero"
            )
