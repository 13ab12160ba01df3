"""Buckets: flat runs of parameters that travel together.

tacit cuts its own, from the order of the parameters alone: the plan is the same on every rank, in every step and
after a restart. DDP's buckets change after the first step; what depended on them would not resume to the same bits. Where tacit's are as large,
they are cut where DDP's will be from the second step on, so that they lie in DDP's memory as they are: from sizes that are known before.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.errors import ConfigError
from tacit.layout import Layout


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one dtype, device and parameter group, in the order in which backward reaches them. `sparse`: tables, of whose
    gradients only the rows that were used are exchanged."""

    index: int
    layout: Layout
    group: str
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters under the names their owner gave them, without the prefixes of DDP and torch.compile."""
    found = {clean_name(name, model): p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ConfigError("the model has no trainable parameter; attach it after requires_grad is set")
    for name, parameter in found.items():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}; only real floating point gradients can be exchanged"
            )
    return found


def clean_name(name: str, model: nn.Module) -> str:
    """A parameter's own name, whatever wraps the model."""
    clean = ".".join(part for part in name.split(".") if part != "_orig_mod")
    return clean.removeprefix("module.") if _is_ddp(model) else clean


def _is_ddp(model: nn.Module) -> bool:
    return isinstance(getattr(model, "_orig_mod", model), nn.parallel.DistributedDataParallel)


def group_names(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, str]:
    """Parameter name -> label of its optimizer group ("0", "1", ... or the group's own "name")."""
    labels: dict[int, str] = {}
    for index, group in enumerate(optimizer.param_groups if optimizer else ()):
        labels.update({id(p): str(group.get("name", index)) for p in group["params"]})
    return {name: labels.get(id(p), "0") for name, p in parameters.items()}


def outer_names(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Embeddings, and a language model's head: the last linear layer, if it has as many outputs as an embedding has rows.

    Their gradients touch few rows, and are far from low rank.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    heads = [m for m in linears[-1:] if m.out_features in {table.num_embeddings for table in tables}]
    outer = {id(module.weight) for module in (*tables, *heads)}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) in outer)


def has_sparse_tables(model: nn.Module) -> bool:
    """Whether a module of it makes sparse gradients, be it frozen or not."""
    return any(map(makes_sparse, model.modules()))


def sparse_names(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The tables with sparse gradients. ConfigError for one that another kind of module uses too: autograd would make its gradient dense."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), []).append(module)
    found = set()
    for name, parameter in parameters.items():
        shared = users.get(id(parameter), [])
        if any(map(makes_sparse, shared)):
            other = next((module for module in shared if not makes_sparse(module)), None)
            if other is not None:
                raise ConfigError(
                    f"table {name!r} has sparse gradients and is shared with {type(other).__name__}, whose gradients are dense; build the "
                    f"table with sparse=False"
                )
            found.add(name)
    return frozenset(found)


def makes_sparse(module: nn.Module) -> bool:
    """Whether the gradient of its table is sparse."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


@dataclass(frozen=True, slots=True)
class DdpSizes:
    """DDP closes its first bucket as soon as it holds `first_nbytes`, each other one with `nbytes`."""

    first_nbytes: int
    nbytes: int

    def follows(self, bucket_nbytes: int) -> bool:
        """Whether buckets of so many bytes are DDP's own: larger ones would only be copied together from several of those."""
        return bucket_nbytes >= self.nbytes


Kind = tuple[str, torch.dtype, torch.device]


def plan(
    parameters: Mapping[str, Tensor],
    groups: Mapping[str, str],
    bucket_nbytes: int,
    outer: Collection[str] = (),
    sparse: Collection[str] = (),
    ddp: DdpSizes | None = None,
) -> list[Bucket]:
    """Buckets of at most `bucket_nbytes` (a larger parameter has one of its own), last parameter first; after them a bucket for all
    tables in `sparse` of a kind, whose size no step knows before. Where DDP's own are no larger, those that it will cut after its first step.

    `outer` names embeddings and the head, for codecs that treat them in another way.
    """
    kinds: dict[str, Kind] = {
        name: (groups[name], p.dtype, p.device) for name, p in reversed(list(parameters.items()))
    }
    dense = {name: kind for name, kind in kinds.items() if name not in sparse}
    if ddp is not None and ddp.follows(bucket_nbytes):
        runs = _as_ddp(parameters, dense, ddp)
    else:
        runs = _of_at_most(bucket_nbytes, parameters, dense)
    tables: dict[Kind, list[str]] = {}
    for name, kind in kinds.items():
        if name in sparse:
            tables.setdefault(kind, []).append(name)
    buckets = []
    for index, names in enumerate([*runs, *tables.values()]):
        first = parameters[names[0]]
        layout = Layout.of({name: parameters[name].shape for name in names}, outer)
        buckets.append(Bucket(index, layout, groups[names[0]], first.dtype, first.device, names[0] in sparse))
    return buckets


def _of_at_most(nbytes: int, parameters: Mapping[str, Tensor], kinds: Mapping[str, Kind]) -> list[list[str]]:
    open_runs: dict[Kind, list[str]] = {}
    closed: list[list[str]] = []
    for name, kind in kinds.items():
        run = open_runs.setdefault(kind, [])
        if run and sum(parameters[n].nbytes for n in run) + parameters[name].nbytes > nbytes:
            closed.append(run)
            run = open_runs[kind] = []
        run.append(name)
    return [*closed, *open_runs.values()]


def _as_ddp(parameters: Mapping[str, Tensor], kinds: Mapping[str, Kind], sizes: DdpSizes) -> list[list[str]]:
    """DDP knows dtypes and devices, not groups: where its bucket closes, those of all groups in it do."""
    open_runs: dict[Kind, list[str]] = {}
    closed: list[list[str]] = []
    held: dict[tuple[torch.dtype, torch.device], int] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, kind in kinds.items():
        open_runs.setdefault(kind, []).append(name)
        of = kind[1:]
        held[of] = held.get(of, 0) + parameters[name].nbytes
        if held[of] >= limits.get(of, sizes.first_nbytes):
            held[of], limits[of] = 0, sizes.nbytes
            closed += [open_runs.pop(each) for each in list(open_runs) if each[1:] == of]
    return [*closed, *open_runs.values()]


def cutter(
    parameters: Callable[[], Mapping[str, nn.Parameter]],
    groups: Mapping[str, str],
    outer: Collection[str],
    sparse: Collection[str],
    ddp: DdpSizes | None = None,
) -> Callable[[int], list[Bucket]]:
    """`plan` of the same parameters, for any size of buckets; it keeps none of them alive."""
    return lambda bucket_nbytes: plan(parameters(), groups, bucket_nbytes, outer, sparse, ddp)


def flat_view(parts: Sequence[Tensor]) -> Tensor | None:
    """The 1-D tensors `parts` as one, without a copy, if they lie one behind the other in memory."""
    solid = [part for part in parts if part.numel()] or list(parts[:1])
    storage, end = solid[0].untyped_storage().data_ptr(), solid[0].data_ptr()
    for part in solid:
        if part.untyped_storage().data_ptr() != storage or part.data_ptr() != end:
            return None
        end += part.nbytes
    return solid[0].as_strided((sum(p.numel() for p in solid),), (1,))


def digest_of(buckets: Iterable[Bucket]) -> str:
    """What must be the same on every rank before the first exchange."""
    return ";".join(f"{b.group}:{b.dtype}:{b.layout.spans}{':sparse' * b.sparse}" for b in buckets)
