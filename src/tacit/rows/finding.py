"""The public line: finds a model's tables, by type or by name, and puts them into shards on the ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit.errors import ConfigError, did_you_mean
from tacit.rows.adding import RULES
from tacit.rows.description import TablesDescription, check_known
from tacit.rows.hot import Hot
from tacit.rows.modules import Sharded, ShardedEmbedding, ShardedEmbeddingBag
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.owners import Kind, owners_of
from tacit.rows.table import DTYPES, Table
from tacit.rows.tables import Tables
from tacit.rows.through import Through
from tacit.rows.values import NORMAL, Normal, Uniform

Plain = nn.Embedding | nn.EmbeddingBag
Ids = Mapping[str, Tensor | Sequence[Tensor]]


def shard(
    model: nn.Module,
    tables: Sequence[str] | None = None,
    *,
    optimizer: RowOptimizer,
    keys: Callable[..., Ids] | None = None,
    adding: str | None = None,
    hot: Hot | None = None,
    through: Through | str | None = None,
    init: Normal | Uniform | None = None,
    unbounded: Collection[str] = (),
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    servers: int = 0,
) -> Tables:
    """Puts a model's tables into shards: each rank keeps the rows it owns, and a forward looks rows up where they are.

    Call it on all ranks alike, before DDP wraps the rest of the model and before its optimizer is made. A table that has weights
    begins with them (each owner's own: seed all ranks alike); one on the meta device begins with `init`, row by row, and takes memory
    for the rows that are trained alone.

    Args:
        model: its nn.Embedding and nn.EmbeddingBag modules are replaced, in place.
        tables: the names of those to shard, as in model.named_modules(); None for all that can be trained.
        optimizer: of their rows.
        keys: takes what the model's forward takes, and returns by table all ids that it looks up. All tables are then looked up in one
            exchange; without it each module makes its own, unless `tables.pull` is called before.
        adding: how owners add gradients: "rank order", or "exact", the same bits in any order; left out, "exact" with hot rows.
        hot: rows that many ranks touch are copied to all ranks, if that pays; None for none.
        through: the aggregator that passes rows on between ranks, or its address; None for the process group.
        init: the first values of rows of tables on the meta device; None for Normal(1.0), as nn.Embedding.
        unbounded: names of tables on the meta device that take any 64-bit integer as a key.
        seed: of first values.
        group: the ranks among which rows are shared; None for all.
        servers: the last so many ranks of the job train nothing and keep all rows; they call `tacit.rows.serve`, or are `tacit serve-rows`.

    Returns:
        The tables: `step`, `pull`, `state_dict`, `gather`, `stats`.

    Raises:
        ConfigError: a table that cannot be sharded, no such table, ranks that differ, or a launch without a process group.

    Example:
        >>> tables = tacit.rows.shard(model, optimizer=tacit.rows.RowAdagrad(lr=0.05))
        >>> model = DistributedDataParallel(model)

    docs/rows.md has the whole loop.
    """
    owners = owners_of(group, servers)
    if owners.serves:
        raise ConfigError(
            f"rank {owners.rank} is one of the last {servers}, which serve rows: call tacit.rows.serve(servers={servers}) there"
        )
    with owners.refusing():
        adding = adding or ("exact" if hot else RULES[0])
        _check_options(model, optimizer, adding)
        if hot is not None:
            hot.check(adding, owners.world)
        path = Through(through) if isinstance(through, str) else through
        if path is not None:
            path.check(owners.members)
        if servers:
            check_known(optimizer)
        found = _found(model, tables)
        values = [
            _table(name, modules[0], init or NORMAL, name in unbounded, seed)
            for name, modules in found.items()
        ]
        if strangers := sorted(set(unbounded) - set(found)):
            raise ConfigError(
                f"unbounded={strangers[0]!r} is no table that is sharded; the tables are {', '.join(found)}"
            )
    about = (
        [str(each) for each in values],
        str(optimizer),
        adding,
        hot.about if hot else None,
        path.about if path else None,
    )
    owners.announce(Kind.AGREE, about, [[servers]] * owners.members)
    if servers:
        begins = [name for name, plain in found.items() if not plain[0].weight.is_meta]
        network = hot is not None and hot.in_the_network
        described = TablesDescription(values, optimizer, adding, hot, network, begins, path)
        owners.texts(described.as_text())
    owners.go_through(path)
    owners.numbers = 2 * len(values) + 1  # keys and an exponent of each, and a learning rate
    modules: dict[str, dict[str, Sharded]] = {}
    made = Tables(values, owners, optimizer, adding, modules, hot)
    for name, plain in found.items():
        if not plain[0].weight.is_meta:
            made.put(name, plain[0].weight)
        modules[name] = _named(model, [_replaced(model, made, name, each) for each in plain])
    owners.hold_job()
    if keys is not None:
        asked, pull = keys, torch.compiler.disable(made.pull)
        model.register_forward_pre_hook(
            lambda _, args, kwargs: pull(asked(*args, **kwargs)), with_kwargs=True
        )
    return made


def _check_options(model: nn.Module, optimizer: RowOptimizer, adding: str) -> None:
    if not isinstance(optimizer, RowOptimizer):
        raise ConfigError(
            f"optimizer={optimizer!r} is no row optimizer; use one of tacit.rows, for example tacit.rows.RowAdagrad(lr=0.05)"
        )
    if adding not in RULES:
        raise ConfigError(
            f"adding={adding!r}; {did_you_mean(adding, RULES)}it is one of {', '.join(map(repr, RULES))}"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped by DDP, which holds its tables already; shard them first, then wrap the rest"
        )


def _found(model: nn.Module, names: Sequence[str] | None) -> dict[str, list[Plain]]:
    """The tables by name; modules that share a weight are one table, under the first one's name."""
    every = {
        name: each for name, each in model.named_modules(remove_duplicate=False) if isinstance(each, Plain)
    }
    if names is None:
        chosen = {
            n: each
            for n, each in every.items()
            if type(each) in (nn.Embedding, nn.EmbeddingBag) and each.weight.requires_grad
        }
        if not chosen:
            raise ConfigError(
                "the model has no nn.Embedding or nn.EmbeddingBag that is trained; there is nothing to shard"
            )
    else:
        for name in names:
            if name not in every:
                raise ConfigError(
                    f"there is no table {name!r} in the model; {did_you_mean(name, every)}its tables are {', '.join(map(repr, every)) or 'none'}"
                )
        weights = {id(every[name].weight) for name in names}
        chosen = {name: each for name, each in every.items() if id(each.weight) in weights}
    by_weight: dict[int, list[tuple[str, Plain]]] = {}
    for name, each in chosen.items():
        _check_plain(name, each)
        by_weight.setdefault(id(each.weight), []).append((name, each))
    _refuse_shared(model, by_weight)
    return {some[0][0]: list({id(each): each for _, each in some}.values()) for some in by_weight.values()}


def _check_plain(name: str, plain: Plain) -> None:
    if not name:
        raise ConfigError(
            "the model itself is a table and cannot be replaced in place; put it into a module, such as nn.Sequential"
        )
    if type(plain) not in (nn.Embedding, nn.EmbeddingBag):
        raise ConfigError(
            f"{name!r} is a {type(plain).__name__}, whose forward may differ from nn.Embedding's; leave it out with tables=..."
        )
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(plain, option):
            raise ConfigError(
                f"{name!r} has {option}={getattr(plain, option)}, which shards do not know; leave it out with tables=..."
            )
    if plain.weight.dtype not in DTYPES:
        raise ConfigError(
            f"{name!r} is {plain.weight.dtype}; rows are stored as torch.float32 or torch.bfloat16"
        )
    if not plain.weight.requires_grad:
        raise ConfigError(f"{name!r} is not trained (requires_grad=False); leave it out with tables=...")


def _refuse_shared(model: nn.Module, by_weight: Mapping[int, Sequence[tuple[str, Plain]]]) -> None:
    """A weight that another module uses too, such as a language model's head, must stay whole."""
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in by_weight and not isinstance(module, Plain):
                table = by_weight[id(parameter)][0][0]
                raise ConfigError(
                    f"the weight of {table!r} is also {f'{name}.{own}'!r}, which needs all of its rows; leave it out with tables=..."
                )


def _table(name: str, plain: Plain, init: Normal | Uniform, unbounded: bool, seed: int) -> Table:
    weight = plain.weight
    if unbounded and not weight.is_meta:
        raise ConfigError(f"{name!r} has weights and cannot be unbounded; build it with device='meta'")
    keys = None if unbounded else plain.num_embeddings
    return Table(name, plain.embedding_dim, keys, weight.dtype, plain.padding_idx, init, seed)


def _named(model: nn.Module, made: Sequence[Sharded]) -> dict[str, Sharded]:
    """Every name in the model under which one of `made` is found."""
    return {
        name: each
        for name, module in model.named_modules(remove_duplicate=False)
        for each in made
        if each is module
    }


def _replaced(model: nn.Module, tables: Tables, name: str, plain: Plain) -> Sharded:
    """A sharded module in every place where `plain` was."""
    made: Sharded
    if isinstance(plain, nn.EmbeddingBag):
        made = ShardedEmbeddingBag(tables, name, plain)
    else:
        made = ShardedEmbedding(tables, name, plain)
    for place, module in list(model.named_modules(remove_duplicate=False)):
        if module is plain:
            model.set_submodule(place, made)
    return made
