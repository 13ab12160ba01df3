"""What attach() was given, checked and named: one value for whichever kind attaches it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tacit.codecs import Int8


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A model and how to exchange for it; `module` is the model without torch.compile's wrapper."""

    module: Any  # DistributedDataParallel, an FSDP2 module or a plain one, see `kind`
    kind: str  # ddp, fsdp2 or plain
    optimizer: torch.optim.Optimizer | None
    parameters: Mapping[str, nn.Parameter]
    groups: Mapping[str, str]  # parameter name -> label of its optimizer group
    bucket_nbytes: int | None  # None: measured, by kinds that can
    group: dist.ProcessGroup | None
    timeout: timedelta | None
    check_every: int
    overlap: str = "backward"  # or "forward": what an exchange may go on beside
    weights: Int8 | None = None  # how FSDP2's parameters are gathered; None: as FSDP2 does
    asked: object = ""  # what the user wrote, where that is no strategy (`auto`)

    @property
    def inside(self) -> dist.ProcessGroup | None:
        """DDP's own process group: for rules that exchange between hosts, the ranks of one host."""
        return self.module.process_group if self.kind == "ddp" else None
