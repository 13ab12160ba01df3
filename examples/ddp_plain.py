"""A small model trained on several ranks. Run this file with: torchrun --nproc-per-node 2"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    torch.manual_seed(0)  # the same data and the same start on every rank
    x = torch.randn(4096, 32)
    y = (x @ torch.randn(32, 10)).argmax(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    rng = torch.Generator().manual_seed(dist.get_rank())  # other batches on every rank
    for _ in range(200):
        pick = torch.randint(3072, (64,), generator=rng)
        optimizer.zero_grad()
        cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()

    with torch.no_grad():
        logits = model.module(x[3072:])  # held out
    accuracy = (logits.argmax(1) == y[3072:]).float().mean().item()
    if dist.get_rank() == 0:
        print(f"loss {cross_entropy(logits, y[3072:]).item():.4f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()  # when the model is gone: a DDP model that outlives its group can hang gloo
