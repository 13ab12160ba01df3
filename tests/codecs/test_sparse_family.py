"""The sparse family on four real ranks with many buckets: one model on all, and a checkpoint goes on to the same bits."""

import io

import torch
import toys

import tacit

TEXTS = {  # and the learning rate
    "every / ef(threshold(0.02)) / sharded": 0.5,
    "every / ef(randomk(0.25) > hush) / tree": 0.5,
    "every / dgc(0.02, momentum=0.5, clip=4, warmup=4) > bf16 / sharded": 0.5,
    "every / ef(gtopk(0.02)) / sharded": 0.5,
    "every / ef(scalecom(0.05) > bf16) / ring": 0.5,
    "every / omnireduce(16) / recursive_doubling": 0.5,
}
STEPS = 2


def _attached(text, rate):
    model = toys.deep(layers=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return model, optimizer, tacit.attach(model, optimizer, text, bucket="20kB", seed=3)


def _all(rank, world):
    found = {}
    for text, rate in TEXTS.items():
        model, optimizer, handle = _attached(text, rate)
        before, file = toys.loss_of(model, 0, 99).item(), io.BytesIO()
        with handle:
            buckets = len(handle._attachment._backward.buckets)
            toys.train(model, optimizer, rank, range(STEPS))
            torch.save([model.state_dict(), handle.state_dict()], file)
            toys.train(model, optimizer, rank, range(STEPS, 2 * STEPS))
        whole, after = toys.flat(model), toys.loss_of(model, 0, 99).item()
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        model, optimizer, handle = _attached(text, rate)
        model.load_state_dict(weights)
        with handle:
            handle.load_state_dict(state)
            toys.train(model, optimizer, rank, range(STEPS, 2 * STEPS))
        found[text] = whole, toys.flat(model), before, after, buckets
    return found


def test_four_ranks_stay_one_model_and_resume_to_the_same_bits(ranks):
    found = ranks.run(4, _all)
    for text in TEXTS:
        for whole, resumed, before, after, buckets in (own[text] for own in found):
            assert torch.equal(whole, found[0][text][0]), text
            assert torch.equal(whole, resumed), text
            assert after != before and buckets >= 5, (text, before, after)


def _sharded(rank, world):
    from torch.distributed.fsdp import fully_shard

    found = {}
    for text in (
        "dgc(0.05, momentum=0.5, warmup=0)",
        "ef(randomk(0.3) > hush)",
        "ef(scalecom(0.2))",
        "ef(gtopk(0.1))",
        "ef(threshold(0.01))",
        "omnireduce(8)",
    ):
        model = toys.deep(layers=2)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        first = toys.loss_of(model, 0, 99).item()
        with tacit.attach(model, optimizer, f"{text} / sharded"):
            toys.train(model, optimizer, rank, range(5))
            flat = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
            found[text] = flat, first, toys.loss_of(model, 0, 99).item()
    return found


def test_fsdp2_takes_all_of_them(ranks):
    found = ranks.run(3, _sharded)
    for text, (flat, first, last) in found[0].items():
        assert all(torch.equal(flat, other[text][0]) for other in found), text
        assert last < first, (text, first, last)
