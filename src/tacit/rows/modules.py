"""nn.Embedding and nn.EmbeddingBag whose rows are in shards: the same forward, and no parameter for DDP or an optimizer to hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LookUp:
    """Rows of one table on this rank: the different keys in order, and a leaf with their rows in float32."""

    keys: Tensor
    leaf: Tensor

    def places(self, ids: Tensor, table: str) -> Tensor:
        """Where each of `ids` is among the keys, in the shape of `ids`."""
        if not ids.numel():
            return ids
        found = torch.searchsorted(self.keys, ids.contiguous()).clamp_max(max(0, len(self.keys) - 1))
        if not len(self.keys) or not torch.equal(self.keys[found], ids):
            missing = ids.flatten()[0] if not len(self.keys) else ids[self.keys[found] != ids][0]
            raise ConfigError(
                f"key {int(missing)} of table {table!r} is looked up, but was not pulled before; give all ids of the batch to pull(), or to "
                f"shard(keys=...)"
            )
        return found


class Source(Protocol):
    """Where a module finds its rows: `Tables`."""

    def look_up(self, name: str, ids: Tensor, training: bool) -> tuple[LookUp, Tensor]:
        """The rows of all `ids`, and the place of each among them."""


class ShardedEmbedding(nn.Module):
    """nn.Embedding whose rows are in shards; `shard` puts it in the place of one.

    Args:
        source: the tables.
        table: the name of this one.
        plain: the nn.Embedding whose place it takes; its weight is not kept.

    Example:
        >>> model.user
        ShardedEmbedding('user', 1000000, 16)
    """

    def __init__(self, source: Source, table: str, plain: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.padding_idx, self.table, self.dtype = plain.padding_idx, table, plain.weight.dtype
        self._look_up = torch.compiler.disable(source.look_up)  # torch.compile breaks its graph there
        self.training = plain.training

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids`, in their order; a collective: every rank calls it, if with no id."""
        found, places = self._look_up(self.table, ids, self.training)
        return F.embedding(places, found.leaf).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.table!r}, {self.num_embeddings}, {self.embedding_dim}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ConfigError(
            f"table {self.table!r} is in shards and cannot be copied with its model; tables.gather() makes plain tables of it"
        )

    def plain(self, weight: Tensor) -> nn.Embedding:
        """The nn.Embedding of all rows."""
        return nn.Embedding(
            self.num_embeddings, self.embedding_dim, padding_idx=self.padding_idx, _weight=weight
        )


class ShardedEmbeddingBag(nn.Module):
    """nn.EmbeddingBag whose rows are in shards; `shard` puts it in the place of one.

    Args:
        source: the tables.
        table: the name of this one.
        plain: the nn.EmbeddingBag whose place it takes; its weight is not kept.

    Example:
        >>> model.words
        ShardedEmbeddingBag('words', 50000, 64, mode='mean')
    """

    def __init__(self, source: Source, table: str, plain: nn.EmbeddingBag) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.padding_idx, self.table, self.dtype = plain.padding_idx, table, plain.weight.dtype
        self.mode, self.include_last_offset = plain.mode, plain.include_last_offset
        self._look_up = torch.compiler.disable(source.look_up)
        self.training = plain.training

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Sums, means or maxima of bags of rows; a collective: every rank calls it, if with no id."""
        found, places = self._look_up(self.table, ids, self.training)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.float()
        bags = F.embedding_bag(
            places,
            found.leaf,
            offsets.long() if offsets is not None else None,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self._padding_place(found),
        )
        return bags.to(self.dtype)

    def _padding_place(self, found: LookUp) -> int | None:
        if self.padding_idx is None:
            return None
        at = int(torch.searchsorted(found.keys, self.padding_idx))
        return at if at < len(found.keys) and int(found.keys[at]) == self.padding_idx else None

    def extra_repr(self) -> str:
        return f"{self.table!r}, {self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"

    __deepcopy__ = ShardedEmbedding.__deepcopy__

    def plain(self, weight: Tensor) -> nn.EmbeddingBag:
        """The nn.EmbeddingBag of all rows."""
        return nn.EmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
            _weight=weight,
        )


Sharded = ShardedEmbedding | ShardedEmbeddingBag


def flat_ids(ids: Tensor | Sequence[Tensor]) -> Tensor:
    """All ids of one table in one vector on the CPU."""
    parts = [ids] if isinstance(ids, Tensor) else list(ids)
    if not parts:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([part.detach().reshape(-1).cpu() for part in parts])
