"""FSDP2 inside of each host, int8 between hosts. Run this file with: torchrun --nproc-per-node 4"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import tacit


def train() -> None:
    replicate = {"dp_replicate": tacit.mesh_backend("int8(block=256)")}
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=replicate)
    torch.manual_seed(0)
    x = torch.randn(4096, 32)
    y = (x @ torch.randn(32, 10)).argmax(1)
    model = fully_shard(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10)), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    rng = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(200):
        pick = torch.randint(3072, (64,), generator=rng)
        optimizer.zero_grad()
        cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()

    with torch.no_grad():
        accuracy = (model(x[3072:]).argmax(1) == y[3072:]).float().mean().item()
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f}\n{tacit.mesh_handle(mesh['dp_replicate']).stats}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
