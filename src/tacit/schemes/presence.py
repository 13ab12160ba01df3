"""Who is in a sum that may lack some ranks, chunk by chunk, as a part of the sum itself.

Each packet of float lanes begins with a few in which rank r adds 2^(r mod 22) to the lane r / 22: every rank adds once, so the sum's bits
are the ranks that are in it, exactly, in whatever order they came. No plane need know, and all ranks read the same.

What came is scaled up to the world, mean by mean: x_i n / c, of the c ranks that are in. A rank's share of that is what it sent times
n / c if it is in, and nothing if not. The shares add up to the total, so error feedback keeps the rest, whichever sign it has: who was
left out sends all of it later, and who was in takes back what it stood in with.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_A_LANE = 22  # ranks; float32 has 24 bits
LANES = 4  # 64 ranks, and what follows is aligned


def framed(x: Tensor, elements: int, rank: int) -> Tensor:
    """`x` as rows of packets of `elements` lanes, this rank's presence in front of each; the last one is filled up with zeros."""
    room = elements - LANES
    rows = -(-x.numel() // room)
    made = torch.zeros(rows, elements, dtype=torch.float32, device=x.device)
    made[:, rank // _A_LANE] = 2.0 ** (rank % _A_LANE)
    whole = x.numel() // room
    made[:whole, LANES:] = x[: whole * room].view(whole, room)
    if whole < rows:
        made[whole, LANES : LANES + x.numel() - whole * room] = x[whole * room :]
    return made


@dataclass(frozen=True, slots=True)
class PartialSum:
    """What all ranks received, and what of it is this rank's: `lost` is its payload less that, None where nobody was left out."""

    value: Tensor
    lost: Tensor | None
    present: Tensor  # bool, a row a chunk, a column a rank


def read(total: Tensor, own: Tensor, world: int, rank: int) -> PartialSum:
    """The sum in `total`, of rows as `framed` makes them of all ranks' vectors; `own` is this rank's."""
    numel, room = own.numel(), total.shape[1] - LANES
    bits = total[:, :LANES].cpu().long()
    present = torch.stack([bits[:, r // _A_LANE] >> r % _A_LANE & 1 for r in range(world)], dim=1).bool()
    partial = (~present.all(1)).nonzero().reshape(-1)
    value = total[:, LANES:].clone(
        memory_format=torch.contiguous_format
    )  # others may need what came as it is
    if not partial.numel():
        return PartialSum(value.view(-1)[:numel], None, present)
    scale = (world / present[partial].sum(1)).float()
    share = torch.where(present[partial, rank], scale, 0.0)
    value[partial.to(value.device)] *= scale.to(value.device)[:, None]
    lost = torch.zeros_like(own)
    for row, part in zip(partial.tolist(), share.tolist(), strict=True):
        chunk = slice(row * room, (row + 1) * room)
        lost[chunk] = own[chunk] * (1.0 - part)
    return PartialSum(value.view(-1)[:numel], lost, present)
