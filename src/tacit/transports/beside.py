"""What a link beside a process group needs of it: a group of its own, and a name that no other run has."""

import secrets
from datetime import timedelta

import torch
import torch.distributed as dist


def group_beside(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """The same ranks, on the CPU: what is sent there waits for nothing that `group` is doing."""
    ranks = dist.get_process_group_ranks(group)
    whole = len(ranks) == dist.get_world_size()
    made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=not whole)
    assert isinstance(made, dist.ProcessGroup)
    return made


def name_for(group: dist.ProcessGroup) -> str:
    """Rank 0's choice, so that two runs with one aggregator never meet in one job."""
    name = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
    dist.broadcast(name, group_src=0, group=group)
    return bytes(name.tolist()).hex()
