"""Scripts that end without close(), with threads in the middle of something and forked workers beside them: they end, with 0."""

import os
from pathlib import Path

import pytest
from forked import Forked

from tacit.launch import reserved_port

_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.utils.data import DataLoader, TensorDataset
from toys import WIDTH, deep
import tacit
from tacit.gossip.members import Members

torch.set_num_threads(1)
Members.__init__.__kwdefaults__["beat_s"] = 0.0005  # always inside torch's store
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = deep(seed=rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
handle = tacit.attach(model, optimizer, "every / none / gossip")
data = TensorDataset(torch.randn(100, WIDTH), torch.randint(0, 4, (100,)))
workers = int(sys.argv[2])
options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
for epoch in range(3 if workers else 1):
    for x, y in DataLoader(data, batch_size=10, **options):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
torch.distributed.barrier()
print("trained", flush=True)
"""


@pytest.mark.parametrize(("world", "workers"), [(12, 0), (2, 2)])
def test_processes_that_do_not_close_end_with_zero(world, workers):
    here = str(Path(__file__).parents[1])
    with reserved_port() as port:
        processes = [
            Forked(
                ["-c", _SCRIPT, here, str(workers)],
                env=os.environ | {
                    "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                },
            )
            for rank in range(world)
        ]  # fmt: skip
        try:
            found = [process.communicate(timeout=180) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    assert [process.returncode for process in processes] == [0] * world, [err[-500:] for _, err in found]
    assert all(out == "trained\n" for out, _ in found)
