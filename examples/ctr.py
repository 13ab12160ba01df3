"""A click model with large tables. Run: torchrun --nproc-per-node 2 examples/ctr.py [shards | a codec]

`shards` (the default): each row lives on one rank. A codec: tables are on every rank, their sparse gradients travel in it.
"""

import sys

import tacit
import torch
import torch.distributed as dist
from click_log import KEYS, NUMBERS, ClickLog, auc
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, STEPS, RATE = 8, 2048, 400, 0.05


class Clicks(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        first = [0.01 * torch.randn(n, WIDTH) for n in KEYS]
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(w, freeze=False, sparse=sparse) for w in first
        )
        self.top = nn.Sequential(nn.Linear(len(KEYS) * WIDTH + NUMBERS, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        rows = [table(own) for table, own in zip(self.tables, keys.unbind(1), strict=True)]
        return self.top(torch.cat([*rows, numbers], 1)).squeeze(1)


def by_table(keys: torch.Tensor, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"tables.{i}": own for i, own in enumerate(keys.unbind(1))}


def train(how: str, seed: int = 0, steps: int = STEPS) -> float:
    """The AUC on samples that were not trained on; ranks share a batch of BATCH samples."""
    torch.manual_seed(seed)
    shards = how == "shards"
    log, model = ClickLog(), Clicks(sparse=not shards)
    if shards:
        tables = tacit.rows.shard(model, optimizer=tacit.rows.Adagrad(lr=RATE), keys=by_table)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    handle = tacit.attach(model, optimizer, "bf16" if shards else how)
    for step in range(steps):
        drawn = log.draw(BATCH, torch.Generator().manual_seed(1000 * seed + step + 1))
        keys, numbers, clicked = (part[dist.get_rank() :: dist.get_world_size()] for part in drawn)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(keys, numbers), clicked).backward()
        optimizer.step()
        if shards:
            tables.step()
    keys, numbers, clicked = log.draw(20_000, torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, best = auc(model(keys, numbers), clicked), log.best(keys, numbers, clicked)
    sent = handle.stats.sent_nbytes + (tables.stats.sent_nbytes if shards else 0)
    print(
        f"rank {dist.get_rank()}, {how}: AUC {found:.4f} of at most {best:.4f}, sent {sent // steps} bytes a step"
    )
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1] if len(sys.argv) > 1 else "shards")
    dist.destroy_process_group()  # when the model is gone: a DDP model that outlives its group can hang gloo
