"""What the lab predicts of a step, worked out by hand; and that every timing on a limited link has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import nn

from tacit.lab.experiments.baselines import ConnectedModel, connect, named
from tacit.lab.experiments.jobs.common import Contender, WorkerNetwork, predicted, timing
from tacit.lab.experiments.jobs.replay import ReplayLayer, ReplaySetup
from tacit.sim.workloads import Layer

LAYERS = [
    Layer("a", 100, 1.0, 2.0),
    Layer("b", 300, 1.0, 2.0),
]  # b's gradients are there after 4 s, a's after 6 s
LINK = WorkerNetwork("star", 1e8, True, "lo")
NBYTES = 1_000_000.0
COMPUTE_S = 0.03


@pytest.mark.parametrize(
    ("wire_s", "encode_s", "decode_s", "bucket_nbytes", "step_s"),
    [
        (0.0, 0.0, 0.0, 4, 6.0),
        (0.4, 0.0, 0.0, 4, 6.1),  # b hides, a does not
        (8.0, 0.0, 0.0, 4, 12.0),  # b from 4 to 10, then a
        (8.0, 0.0, 0.0, 4000, 14.0),  # one bucket, sent after backward
        (8.0, 4.0, 0.0, 4, 15.0),  # b encoded from 4 to 7
        (8.0, 0.0, 4.0, 4, 14.0),  # b decoded from 10 to 13, a from 13 to 14
    ],
)
def test_a_predicted_step_hides_what_backward_covers(
    wire_s: float, encode_s: float, decode_s: float, bucket_nbytes: int, step_s: float
) -> None:
    found = predicted(
        LAYERS, wire_s=wire_s, encode_s=encode_s, decode_s=decode_s, bucket_nbytes=bucket_nbytes
    )
    assert found == pytest.approx(step_s)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this rank alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def timed(link: ConnectedModel, network: WorkerNetwork, **facts: object) -> float | None:
    """The prediction for a contender whose ranks send `NBYTES` a step over `link`."""
    seen = Contender("x", lambda: None, replace(link, counted=None, computed_nbytes=NBYTES))
    seen.step_s, seen.cpu_s, seen.interface_nbytes = [0.2, 0.2], [0.1, 0.1], [1, 1]
    seen.split_s = [{"encode_s": 0.002, "wait_s": 0.1, "decode_s": 0.001, "wire_s": 0.08}] * 2
    record = timing(seen, seen, network=network, compute_s=COMPUTE_S, **facts)
    link.close()
    found: float | None = record["predicted_step_s"]
    return found


def link_of(text: str) -> ConnectedModel:
    return connect(nn.Linear(8, 8, bias=False), None, named(text), bucket_nbytes=1 << 20)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("text", "codec_s"), [("fp32", 0.0), ("bf16", 0.0), ("int8 / sharded", 0.003)])
def test_peers_and_strategies_have_a_prediction_on_a_limited_link(text: str, codec_s: float) -> None:
    wire_s = 8 * NBYTES / (LINK.payload_share * 1e8)
    assert timed(link_of(text), LINK) == pytest.approx(COMPUTE_S + wire_s + codec_s)


@pytest.mark.usefixtures("group")
def test_a_replay_is_predicted_from_the_times_of_its_layers() -> None:
    stage = ReplaySetup(
        [
            ReplayLayer("a", (10, 10), 0.01, 0.02),
            ReplayLayer("b", (10, 30), 0.01, 0.02),
            ReplayLayer("c", (), 0.0, 0.01),
        ],
        0,
        0,
    )
    link = stage.contender(named("fp32"), 4).link
    assert link is not None
    wire_s = 8 * NBYTES / (LINK.payload_share * 1e8)
    assert timed(link, LINK, replayed=True) == pytest.approx(0.05 + wire_s)  # b is there after 50 ms, a hides


@pytest.mark.usefixtures("group")
def test_where_bytes_and_rate_do_not_make_a_step_nothing_is_predicted() -> None:
    assert timed(link_of("fp32"), WorkerNetwork()) is None  # no rate
    assert timed(link_of("fp32"), replace(LINK, interface=None)) is None  # ranks share a link
    assert timed(link_of("none / tree"), LINK) is None  # ranks take turns
    assert timed(link_of("none / ring"), LINK) is not None
