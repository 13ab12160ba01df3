"""Rules that merge models between islands inside of which FSDP2 shards one: CPU ranks over gloo."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toys import deep, loss_of, own_state

import tacit
from tacit.errors import ConfigError

RULES = ("diloco(4) / none", "streaming(8, parts=2, delay=1) / int8", "sparseloco(4) / topk(0.1)")


def _built(mesh, seed):
    model = deep(layers=3, seed=seed)
    for layer in list(model)[:-1]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(model, optimizer, losses, steps):
    for step in steps:
        optimizer.zero_grad()
        sum(loss(model, step) for loss in losses).div(len(losses)).backward()
        optimizer.step()


def _losses(*ranks):
    return [lambda model, step, rank=rank: loss_of(model, rank, step) for rank in ranks]


def _islands(rank, world, rules):
    """Two islands of two: the whole model and what this rank keeps of anchors, for each rule."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    found = []
    for text in rules:
        model = _built(
            mesh["shard"], seed=rank // 2
        )  # islands start differently, and take the first one's model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        handle = tacit.attach(model, optimizer, text, group=mesh.get_group("island"))
        _train(model, optimizer, _losses(rank), range(13))
        apart = handle.divergence()
        handle.merge()
        state = own_state(handle)
        anchors = sum(t.numel() for t in state["memory"]["anchor"].values())
        found.append(
            (torch.cat([p.full_tensor().view(-1) for p in model.parameters()]).detach(), anchors, apart)
        )
        handle.close()
    return found


def _plain(rank, world, rules):
    """Two ranks, each with the batches of one island."""
    found = []
    for text in rules:
        model = deep(layers=3, seed=0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        handle = tacit.attach(model, optimizer, text)
        _train(model, optimizer, _losses(2 * rank, 2 * rank + 1), range(13))
        handle.merge()
        found.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
        handle.close()
    return found


def _loss(flat):
    model = deep(layers=3)
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    with torch.no_grad():
        return sum(loss_of(model, 9, 1000 + step).item() for step in range(8)) / 8


def test_islands_merge_as_plain_ranks_do_and_nobody_holds_a_whole_anchor(ranks):
    plain, islands = ranks.run(2, _plain, RULES)[0], ranks.run(4, _islands, RULES)
    start = torch.cat([p.detach().view(-1) for p in deep(layers=3, seed=0).parameters()])
    for place, text in enumerate(RULES):
        first, _, _ = islands[0][place]
        assert all(torch.equal(first, found[place][0]) for found in islands)
        assert [found[place][1] for found in islands] == [start.numel() // 2] * 4, text
        assert all(found[place][2] > 0 for found in islands)
        if "none" in text:
            assert (first - plain[place]).norm() <= 0.01 * (plain[place] - start).norm()
        # a codec has other blocks, and finds other numbers to be the largest
        assert _loss(first) < _loss(start) and abs(_loss(first) - _loss(plain[place])) < 0.1 * _loss(start), (
            text
        )


def _resumed(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))

    def start():
        model = _built(mesh["shard"], seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        text = "streaming(8, parts=2, delay=1) / ef(int4)"
        return model, optimizer, tacit.attach(model, optimizer, text, group=mesh.get_group("island"))

    model, optimizer, handle = start()
    _train(model, optimizer, _losses(rank), range(7))
    state = handle.state_dict()
    _train(model, optimizer, _losses(rank), range(7, 14))
    whole = [p.detach().to_local().clone() for p in model.parameters()]
    handle.close()
    model, optimizer, handle = start()
    handle.load_state_dict(state)  # its shards of the model too
    _train(model, optimizer, _losses(rank), range(7, 14))
    return all(torch.equal(a, p.to_local()) for a, p in zip(whole, model.parameters(), strict=True))


def test_an_island_resumes_to_the_same_bits(ranks):
    assert ranks.run(4, _resumed) == [True] * 4


def _refused(rank, world):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("island", "shard"))
    group, said = mesh.get_group("island"), []
    for where, text, group_of in (
        (mesh["shard"], "diloco(4) / none", None),
        (mesh["shard"], "diloco(4, after=8) / none", group),
        (mesh, "diloco(4) / none", group),
    ):
        model = _built(where, seed=0)
        with pytest.raises(ConfigError) as error:
            tacit.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), text, group=group_of)
        said.append(str(error.value))
    return said


def test_models_that_have_nothing_to_merge_say_what_to_do(ranks):
    for alone, gradients, hsdp in ranks.run(2, _refused):
        assert "give attach() the same place of all islands as group" in alone
        assert "FSDP2 keeps them to an island; train those steps first" in gradients
        assert "build FSDP2 on a 1-D mesh of one island's ranks" in hsdp
