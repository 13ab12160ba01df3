"""A server that does not train: real processes, the last of which only adds."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, flat, train

import tacit
from tacit.errors import ConfigError, PairingError
from tacit.strategy import Strategy

CODECS = ("none", "bf16", "thc", "hush", "ef(hush)")
WORKERS = [0, 1, 2]


def _train_with(rank, world, codec, who):
    """What the workers hold after a few steps; what the server answered."""
    server = world - 1
    if who == "dedicated" and rank == server:
        return tacit.serve(WORKERS)
    if rank not in WORKERS:
        return None
    group = dist.new_group(WORKERS, use_local_synchronization=True)
    model = DDP(deep(), process_group=group)
    text = f"every / {codec} / dedicated(rank={server})" if who == "dedicated" else f"every / {codec} / {who}"
    with tacit.attach(model, None, text, bucket="20kB") as handle:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))
        return flat(model), handle.stats.as_dict()["sent_by_group"]["0"]


@pytest.mark.parametrize("codec", CODECS)
def test_a_dedicated_server_gives_the_bits_of_a_training_one(ranks, codec):
    found = ranks.run(4, _train_with, codec, "dedicated")
    expected = ranks.run(4, _train_with, codec, "server")
    assert found[3] >= 3 * 5  # three steps of at least five buckets
    for (own, _), (other, _) in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(own, other)


def test_a_worker_sends_its_payload_once(ranks):
    (_, header_too), (_, sent), _, _ = ranks.run(4, _train_with, "none", "dedicated")
    numel = sum(p.numel() for p in deep().parameters())
    assert sent == 3 * 4 * numel
    assert sent < header_too < sent + 3 * 50 * 8 * 260  # worker 0 also says what comes


def test_pairings_that_cannot_work_are_refused_in_one_sentence():
    with pytest.raises(PairingError, match="write 'int8"):
        Strategy.parse("int8 / dedicated(rank=3)")
    with pytest.raises(ConfigError, match="rank of the whole job"):
        Strategy.parse("none / dedicated(rank=-1)")
    assert str(Strategy.parse("thc / dedicated(rank=4)")).endswith("/ dedicated(rank=4)")


def _wrong_server(rank, world):
    try:
        tacit.attach(deep(), None, "none / dedicated(rank=1)")
    except ConfigError as error:
        dist.barrier()  # who is refused first and leaves would cut the other's connecting short
        return str(error)


def test_a_server_among_the_workers_is_refused(ranks):
    for said in ranks.run(2, _wrong_server):
        assert "none of those who train (0, 1)" in said


def _dies(rank, world):
    if rank == 2:
        try:
            return tacit.serve([0, 1])
        except tacit.TacitError as error:
            return str(error)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    handle = tacit.attach(deep(), None, "none / dedicated(rank=2)", group=group)
    # closes the sockets, as a process that ends does
    object.__setattr__(handle._attachment.channel.scheme, "link", None)
    return None


def test_a_server_whose_workers_went_away_says_so(ranks):
    assert "lost the dedicated server or one of its workers" in ranks.run(3, _dies)[2]
