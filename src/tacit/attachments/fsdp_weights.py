"""FSDP2's all-gather of parameters in blocks of integers: `attach(..., weights="int8(block=256)")`.

    owner:      packs its fp32 shard, block by block, to the nearest integers
    everybody:  gathers the packed shards and computes with what they decode to, the owner too

So all ranks, and the forward and the backward pass, use the same bits, while steps are taken on the owner's fp32 shard: nothing is lost from step
to step, and nothing is remembered. As in QSDP (Markov 2023) and SDP4Bit (Jia 2024) norms and biases, which are short and sensitive,
travel as they are: what has fewer than two dimensions, or fewer numbers in a shard than one block.

Bytes that leave a rank in an all-gather: (n - 1) x its packed shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from tacit.codecs import Int8
from tacit.codecs.blocks import Blocks
from tacit.errors import ConfigError
from tacit.stats import Stats
from tacit.strategy import parse_codec

_all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name since torch 2.13


def weights_codec(text: str) -> Int8:
    """The codec that `weights=` names; its rounding is to the nearest, so that the backward pass finds the bits of the forward pass."""
    codec = parse_codec(text)
    if not isinstance(codec, Int8):
        raise ConfigError(
            f"weights={text!r}: parameters travel as int8(block=256) or int4(block=32); for bf16 use FSDP2's own "
            f"MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    return replace(codec, rounding="nearest")


def check_gathers(module: FSDPModule) -> None:
    """Raises ConfigError where FSDP2 gathers something else than the shards as they are stored."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        name = group._module_fqn or type(module).__name__
        if not hasattr(group.mesh_info, "shard_process_group"):
            raise ConfigError(
                "replicate() gathers no parameters, so weights= has nothing to send; leave it out"
            )
        after = group.post_forward_mesh_info
        if after is not None and after != group.mesh_info:
            raise ConfigError(
                f"unit {name!r} has reshard_after_forward={after.shard_mesh_size}, and weights= gathers the shards of the whole mesh; write True or "
                f"False"
            )
        if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in group.fsdp_params):
            raise ConfigError(
                f"unit {name!r} has parameters that pack themselves (fsdp_pre_all_gather); leave weights= out"
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """One parameter in a row: where its numbers and its bytes lie, and how they are packed; None: as they are."""

    numbers: slice
    bytes: slice
    format: Blocks | None


class WeightGather(AllGather):
    """FSDP2's all-gather of one unit."""

    def __init__(self, module: FSDPModule, codec: Int8, stats: Stats):
        (self._group,) = module._get_fsdp_state()._fsdp_param_groups
        self._format, self._stats = codec.format, stats

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if not input_tensor.is_floating_point():
            raise ConfigError(
                "weights= needs the parameters of a unit in one dtype; give MixedPrecisionPolicy a param_dtype, or shard them apart"
            )
        pieces, world = self._pieces(input_tensor), group.size()
        with self._stats.timed("encode"):
            shards = zip(self._shards(), pieces, strict=True)
            row = torch.cat([_packed(shard, piece, input_tensor) for shard, piece in shards])
        rows = row.new_empty(world * row.numel())
        with self._stats.timed("wire"):
            _all_gather(rows, row, group=group)
        self._stats.sent("weights", "weights", (world - 1) * row.numel())
        with self._stats.timed("decode"):
            for piece in pieces:
                into = output_tensor.view(world, -1)[:, piece.numbers]
                into.copy_(_unpacked(rows.view(world, -1)[:, piece.bytes], piece, into))
        return None

    def _shards(self) -> list[Tensor]:
        """As they are stored: in fp32, where the optimizer has them so."""
        return [p._sharded_param_data for p in self._group.fsdp_params]

    def _pieces(self, input_tensor: Tensor) -> list[_Piece]:
        pieces, number, byte = [], 0, 0
        for p, shard in zip(self._group.fsdp_params, self._shards(), strict=True):
            numel = shard.numel()
            coded = len(p._orig_size) > 1 and numel >= self._format.block
            nbytes = self._format.nbytes(numel) if coded else numel * input_tensor.element_size()
            here, there = slice(number, number + numel), slice(byte, byte + nbytes)
            pieces.append(_Piece(here, there, self._format if coded else None))
            number, byte = number + numel, byte + nbytes
        return pieces


def _packed(shard: Tensor, piece: _Piece, cast: Tensor) -> Tensor:
    """The bytes of this rank's part of one parameter; `cast` has all parts in the dtype in which FSDP2 would send them."""
    if piece.format is None:
        return cast[piece.numbers].view(torch.uint8)
    return piece.format.pack(shard.to(cast.device, torch.float32), 0)


def _unpacked(rows: Tensor, piece: _Piece, like: Tensor) -> Tensor:
    """What all ranks sent of one parameter, a row a rank."""
    if piece.format is None:
        return rows.contiguous().view(like.dtype)
    world, numel = like.shape
    if numel % piece.format.block == 0:  # whole blocks, one behind the other
        return piece.format.unpack(rows.reshape(-1), world * numel).view(world, numel)
    return torch.stack([piece.format.unpack(row, numel) for row in rows])
