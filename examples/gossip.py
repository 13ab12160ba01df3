"""A small model whose ranks gossip. Each is a process of its own, and any of them may die and be started again:

tacit store &
for r in 0 1 2 3; do RANK=$r WORLD_SIZE=4 TACIT_STORE=127.0.0.1:29400 python examples/gossip.py & done; wait
"""

import tacit
import torch
from torch import nn
from torch.nn.functional import cross_entropy


def main() -> None:
    torch.manual_seed(0)  # the same data on every rank
    x = torch.randn(4096, 32)
    y = (x @ torch.randn(32, 10)).argmax(1)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Takes the others' model, if they are there.
    handle = tacit.attach(model, optimizer, "adaptive / hush / gossip")

    rng = torch.Generator().manual_seed(handle.rank)  # other batches on every rank
    while handle.step < 400:  # who comes late goes on where the others are
        pick = torch.randint(3072, (64,), generator=rng)
        optimizer.zero_grad()
        cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()

    handle.merge()  # the mean of all that live
    with torch.no_grad():
        accuracy = (model(x[3072:]).argmax(1) == y[3072:]).float().mean().item()  # held out
    print(f"rank {handle.rank}: accuracy {accuracy:.3f}, sent {handle.stats.sent_nbytes} bytes")
    handle.close()


if __name__ == "__main__":
    main()
