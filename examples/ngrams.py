"""The next byte of Python's own library from hashed n-grams before it: a large table of which a step touches little, on real data.

Run it with: torchrun --nproc-per-node 2 examples/ngrams.py
"""

import tacit
import torch
import torch.distributed as dist
from tacit.demo.tasks import stdlib_text
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

ROWS, WIDTH, ORDERS, BATCH, STEPS = 1 << 20, 16, 6, 4096, 200


def keys_of(text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Of each place the hashes of the 1 to ORDERS bytes before it, as rows of one table."""
    found, value = [], torch.zeros_like(places)
    for order in range(1, ORDERS + 1):
        value = (value * 1_000_003 + text[places - order] + order) % (1 << 40)
        found.append(value % ROWS)
    return torch.stack(found, 1)


def train() -> None:
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(stdlib_text()), dtype=torch.uint8).long()
    table, top = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True), nn.Linear(WIDTH, 256)
    nn.init.normal_(table.weight, std=0.1)
    model = DistributedDataParallel(nn.Sequential(table, top))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    handle = tacit.attach(model, optimizer, "int4 / sharded")
    rng = torch.Generator().manual_seed(1 + dist.get_rank())  # other places on every rank
    for _ in range(STEPS):
        places = torch.randint(ORDERS, len(text) - 200_000, (BATCH,), generator=rng)
        optimizer.zero_grad()
        cross_entropy(model(keys_of(text, places)), text[places]).backward()
        optimizer.step()
    places = torch.arange(len(text) - 200_000, len(text), 10)  # held out
    with torch.no_grad():
        loss = cross_entropy(model(keys_of(text, places)), text[places]).item()
    print(f"rank {dist.get_rank()}: loss {loss:.4f}, sent {handle.stats.sent_nbytes // STEPS} bytes a step")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()  # when the model is gone: a DDP model that outlives its group can hang gloo
