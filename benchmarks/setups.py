"""Set-ups of a benchmark: links of the lab, or loopback, on each of which ranks measure some models and print a figure set for each."""

import argparse
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tacit import lab, launch
from tacit.topology import star
from tacit.units import parse_rate

RANKS = 4
Row = dict[str, Any]


def measured(
    node: str,
    rate: str,
    order: Mapping[str, Any],
    folder: Path,
    show: Callable[[Row], None],
    *,
    realtime: bool,
) -> list[Row]:
    """What rank 0 of `python -m node` has found about each of the order's models on one link; `show` gets each as it comes."""
    rate_bps = None if rate == "loopback" else parse_rate(rate)
    found: list[Row] = []
    raised: list[bool] = []
    with ExitStack() as stack:
        env = {"PYTHONPATH": str(Path(__file__).parent)}
        specs = [launch.RankSpec((), {**env, "GLOO_SOCKET_IFNAME": "lo"})] * RANKS
        network = None
        if rate_bps is not None:
            network = stack.enter_context(lab.up(star(RANKS, rate_bps=rate_bps, latency_s=0.0)))
            specs = [launch.RankSpec(s.prefix, {**s.env, **env}) for s in network.rank_specs()]

        def heard(rank: int, message: launch.Message) -> None:
            if network is not None and realtime and not raised:
                raised.append(network.raise_priority())
            if message.get("kind") == "setup":
                message.pop("kind")
                found.append({"network": rate, **message})
                show(found[-1])

        launch.run(
            node,
            [json.dumps({"rate_bps": rate_bps, **order})],
            ranks=RANKS,
            on_message=heard,
            log_dir=folder / rate,
            rank_specs=specs,
        )
    return found


def add_setup_arguments(
    parser: argparse.ArgumentParser, *, rates: tuple[str, ...], models: tuple[str, ...]
) -> None:
    """Which set-ups, and how ranks run."""
    parser.add_argument(
        "--rates", nargs="+", default=list(rates), help="links, with their units, or loopback"
    )
    parser.add_argument(
        "--models", nargs="+", default=list(models), help="known models, replayed; tasks of the demo, trained"
    )
    parser.add_argument(
        "--realtime", action="store_true", help="ranks before all other processes of this machine (root)"
    )
