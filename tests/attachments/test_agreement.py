"""Ranks that attach different things: one error on all of them, at once, whatever they attached."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, flat, loss_of, train

import tacit
from tacit.attachments.agreement import Agreement
from tacit.errors import PairingError, TacitError
from tacit.requests import seed_of
from tacit.strategy import Strategy

STAR = "every / thc / star(at='127.0.0.1:9', secret='sesame')"


def _attach(rank, world, texts, wraps=("plain", "plain", "plain")):
    """What a rank is told, and after how many seconds."""
    model = deep()
    if "ddp" in wraps:
        wrapped = DDP(model)  # which all ranks build together
        model = wrapped if wraps[rank] == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    start = time.monotonic()
    try:
        tacit.attach(model, optimizer, texts[rank])
    except TacitError as error:
        return type(error).__name__, str(error), time.monotonic() - start


@pytest.mark.parametrize(
    "texts",
    [
        (STAR, "every / thc / sharded"),
        ("every / thc / sharded", STAR),
        ("every / none / allreduce", "adaptive / none / gossip"),
        ("adaptive / none / gossip", "every / none / allreduce"),
        ("local(4) / none / allreduce", "every / none / allreduce"),
        ("diloco(4) / none / allreduce", "adaptive / none / gossip"),
        ("adaptive / hush / gossip", "adaptive / int8 / gossip"),
        ("every / none / sharded", "every / none / dedicated(rank=0)"),
    ],
    ids=lambda texts: " against ".join(text.split(" /")[0] + text.split("/")[-1] for text in texts),
)
def test_different_strategies_are_one_pairing_error_on_all_ranks_at_once(ranks, texts):
    found = ranks.run(2, _attach, texts)
    assert [kind for kind, *_ in found] == ["PairingError"] * 2
    assert found[0][1] == found[1][1]
    assert "rank 0 attached " in found[0][1] and "and rank 1 attached " in found[0][1]
    assert "give all ranks one strategy" in found[0][1] and "sesame" not in found[0][1]
    assert max(seconds for *_, seconds in found) < 10  # a fraction of a second; time-outs take 60 and more


def test_the_rank_that_differs_is_named_among_many(ranks):
    found = ranks.run(3, _attach, ("adaptive / none", "adaptive / none", "every / none / allreduce"))
    assert {text for _, text, _ in found} == {found[0][1]}
    assert "rank 0 attached 'adaptive" in found[0][1] and "rank 2 attached 'every" in found[0][1]


def test_a_ddp_module_and_a_plain_one_do_not_wait_for_each_other(ranks):
    for kind, text, seconds in ranks.run(2, _attach, ("int8", "int8"), ("ddp", "plain")):
        assert kind == "PairingError" and "kinds of module" in text and seconds < 10


def _hosts(rank, world, texts):
    """Two hosts of two ranks: DDP inside, and in one host ranks that want different things of the others."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    places = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = DDP(deep(), process_group=inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = places if texts[rank].startswith("local") else None
    try:
        tacit.attach(model, optimizer, texts[rank], group=group)
    except PairingError as error:
        return str(error)


def test_ranks_of_one_host_are_compared_before_hosts_are(ranks):
    found = ranks.run(4, _hosts, ("every / none", "local(2) / none", "adaptive / none", "local(2) / none"))
    assert "rank 0 attached 'every" in found[0] and found[0] == found[1]
    assert "rank 2 attached 'adaptive" in found[2] and found[2] == found[3]


def _twice(rank, world):
    """Several attachments, of all ranks and of some; and what is left of them in the store."""
    some = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    handles = [tacit.attach(deep(), None, "int8")]
    if rank != 1:
        handles.append(tacit.attach(deep(), None, "int4", group=some))
    handles.append(tacit.attach(deep(), None, "bf16 / allreduce"))
    for handle in handles:
        handle.close()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    keys = [
        f"tacit/attach/{seed_of(*members):x}/{count}/{key}"
        for members in ((0, 1, 2), (0, 2))
        for count in (1, 2)
        for key in ("0", "1", "2", "arrived", "all", "left")
    ]
    return [key for key in keys if store.check([key])]


def test_several_attachments_of_all_ranks_or_of_some_leave_nothing_in_the_store(ranks):
    assert ranks.run(3, _twice) == [[], [], []]


def _alone(rank, world):
    if rank == 1:
        dist.barrier()
        return None
    try:
        tacit.attach(deep(), None, "int8", timeout=timedelta(seconds=0.5))
    except TacitError as error:
        return type(error).__name__, str(error)
    finally:
        dist.barrier()


def test_a_rank_that_does_not_attach_is_named_after_the_time_out(ranks):
    kind, text = ranks.run(2, _alone)[0]
    assert kind == "TransportError" and "waited 0 s for ranks [1] to attach" in text


def _again(rank, world):
    """Rank 1 gossips, ends, and comes back with the same and with another strategy; rank 0 has gone on and does not attach again."""
    text = "local(2) / none / gossip"
    first = Agreement.about([0, 1], Strategy.parse(text), ["models"])
    dist.barrier()
    first.look()
    if rank == 0:
        return
    from tacit.attachments import agreement

    agreement._attached = (None, None)  # as in a new process
    Agreement.about([0, 1], Strategy.parse(text), ["models"]).look()
    agreement._attached = (None, None)
    with pytest.raises(PairingError, match="rank 0 attached .* and rank 1 attached 'local\\(3\\)"):
        Agreement.about([0, 1], Strategy.parse("local(3) / none / gossip"), ["models"]).look()


def test_a_gossiping_rank_that_comes_back_is_compared_with_those_that_are_there(ranks):
    ranks.run(2, _again)


def _train(rank, world, text):
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tacit.attach(model, optimizer, text) as handle:
        train(model, optimizer, rank, range(2))
        return handle.step


def test_ranks_that_agree_train(ranks):
    assert ranks.run(3, _train, "local(2) / none / sharded") == [2, 2, 2]


def _one_refuses(rank, world, folder):
    """Rank 1 cannot write its records; then all try again."""
    model, found = deep(), None
    try:
        tacit.attach(model, None, "int8", records=f"{folder}/file/{rank}" if rank == 1 else None)
    except TacitError as error:
        found = type(error).__name__, str(error)
    handle = tacit.attach(model, None, "int8")
    loss_of(model, rank, 0).backward()
    handle.close()
    return found, flat(model)


def test_what_one_rank_refuses_is_known_to_all_at_once_and_the_next_attach_succeeds(ranks, tmp_path):
    (tmp_path / "file").write_text("no folder")
    found = ranks.run(3, _one_refuses, str(tmp_path), timeout_s=30)
    for rank, ((kind, text), model) in enumerate(found):
        assert (
            kind == ("ConfigError" if rank == 1 else "PairingError")
            and "name a file that can be written" in text
        )
        assert rank == 1 or text.startswith("rank 1 cannot attach: records=")
        assert torch.equal(model, found[0][1])
