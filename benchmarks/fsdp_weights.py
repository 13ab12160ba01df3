"""FSDP2 with packed weights: bytes a step and the loss of the byte-level transformer, beside FSDP2 in mixed precision. One JSON record a line.

python benchmarks/fsdp_weights.py --ranks 2 --steps 200 --seeds 3

All configurations of a seed start from one model and see the same batches; each takes a step in turn. Bytes are payload that leaves a rank, as
a ring sends it; those of plain FSDP2 are counted at the same two calls, all-gather and reduce-scatter.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.nn import functional as F

import tacit
from tacit.demo.tasks import learning_rates, source_bytes
from tacit.records import host_facts

PLAIN = "FSDP2, bf16 parameters, fp32 gradients"
CONFIGURATIONS: dict[str, tuple[str, str | None]] = {
    "int8 gradients": ("int8(block=256)", None),
    "int8 weights, int8 gradients": ("int8(block=256)", "int8(block=256)"),
    "int4 weights, ef(int4) gradients": ("ef(int4(block=64))", "int4(block=32)"),
}


class _Counted:
    """Bytes that plain FSDP2 sends."""

    def __init__(self) -> None:
        self.nbytes = 0

    def gather(self) -> DefaultAllGather:
        counts = self

        class Gather(DefaultAllGather):
            def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: object, **options: object):
                counts.nbytes += output_tensor.nbytes - input_tensor.nbytes
                return super().__call__(output_tensor, input_tensor, *args, **options)

        return Gather()

    def scatter(self) -> DefaultReduceScatter:
        counts = self

        class Scatter(DefaultReduceScatter):
            def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: object, **options: object):
                counts.nbytes += input_tensor.nbytes - output_tensor.nbytes
                return super().__call__(output_tensor, input_tensor, *args, **options)

        return Scatter()


class _Training:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, name: str):
        self.model, self.optimizer, self.name = model, optimizer, name
        self.rates, self.counted = learning_rates(optimizer, steps), _Counted()
        self.handle = None
        if name == PLAIN:
            for module in (model, *model.blocks):
                module.set_custom_all_gather(self.counted.gather())
                module.set_custom_reduce_scatter(self.counted.scatter())
        else:
            strategy, weights = CONFIGURATIONS[name]
            self.handle = tacit.attach(model, optimizer, strategy, weights=weights)
            if weights is None:
                for module in (model, *model.blocks):
                    module.set_custom_all_gather(self.counted.gather())

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x).float(), y).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.rates.step()

    @property
    def sent_nbytes(self) -> int:
        return self.counted.nbytes + (self.handle.stats.sent_nbytes if self.handle else 0)


def _model(mesh: DeviceMesh, seed: int, make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    model, policy = make(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def work(rank: int, world: int, store: str, steps: int, seeds: Sequence[int]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    task, mesh = source_bytes(), init_device_mesh("cpu", (world,))
    finals: dict[str, list[float]] = {}
    shares: dict[str, float] = {}
    for seed in seeds:
        trainings = []
        for name in (PLAIN, *CONFIGURATIONS):
            model = _model(mesh, seed, task.model)
            trainings.append(_Training(model, task.optimizer(model), steps, name))
        rng = torch.Generator().manual_seed(1000 * seed + rank)
        for _ in range(steps):
            x, y = task.batch(rng)
            for training in trainings:
                training.step(x, y)
        sent = {training.name: training.sent_nbytes for training in trainings}
        for training in trainings:
            with torch.no_grad():
                loss = task.evaluate(lambda x, model=training.model: model(x).float())
            if training.handle is not None:
                training.handle.close()
            finals.setdefault(training.name, []).append(loss)
            shares[training.name] = sent[training.name] / sent[PLAIN]
            if rank == 0:
                row = {"configuration": training.name, "seed": seed, "steps": steps, "ranks": world}
                row |= {"held_out_loss": round(loss, 4), "sent_nbytes_a_step": sent[training.name] // steps}
                print(json.dumps({"benchmark": "FSDP2 weights", **row}), flush=True)
    if rank == 0:
        _report(finals, shares)
    dist.barrier()
    dist.destroy_process_group()


def _report(finals: dict[str, list[float]], shares: dict[str, float]) -> None:
    for name, losses in finals.items():
        gaps = [100 * (loss / plain - 1) for loss, plain in zip(losses, finals[PLAIN], strict=True)]
        row = {"configuration": name, "seeds": len(losses), "mean_loss": round(mean(losses), 4)}
        row |= {"against_plain_percent": round(mean(gaps), 2), "each_percent": [round(g, 2) for g in gaps]}
        row |= {"bytes_of_plain": round(shares[name], 4), "host": host_facts()["cpu"]}
        print(json.dumps({"benchmark": "FSDP2 weights, summary", **row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        mp.spawn(work, (args.ranks, store, args.steps, range(args.seeds)), nprocs=args.ranks)


if __name__ == "__main__":
    main()
