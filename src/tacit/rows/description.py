"""What row servers need to know of the tables that ranks shard, as a text: JSON, which holds values and runs nothing."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tacit import environment
from tacit.errors import ConfigError
from tacit.rows.adding import RULES
from tacit.rows.hot import Hot
from tacit.rows.optimizers import FTRL, SGD, Adagrad, LazyAdam, RowAdagrad, RowOptimizer
from tacit.rows.table import DTYPES, Table
from tacit.rows.through import Through
from tacit.rows.values import Normal, Uniform

_OPTIMIZERS = {each.__name__: each for each in (SGD, Adagrad, RowAdagrad, FTRL, LazyAdam)}
_VALUES = {each.__name__: each for each in (Normal, Uniform)}
_DTYPES = {str(each): each for each in DTYPES}
_HOT = ("rows", "every", "mtu", "slots", "half_life_touches")  # not where the aggregator is, nor its secret


@dataclass(frozen=True, slots=True)
class TablesDescription:
    """The tables in the order of all members, and every option that their owners need."""

    tables: Sequence[Table]
    optimizer: RowOptimizer
    adding: str
    hot: Hot | None
    in_the_network: bool  # whether an aggregator adds hot rows
    begins: Sequence[str]  # tables whose rows ranks have
    through: Through | None = None

    def as_text(self) -> str:
        """JSON."""
        hot = {name: getattr(self.hot, name) for name in _HOT} if self.hot else None
        path = self.through
        through = [path.where, path.mtu, path.window_nbytes] if path else None
        return json.dumps(
            {
                "tables": [_table_as_json(table) for table in self.tables],
                "optimizer": _named(self.optimizer),
                "adding": self.adding,
                "hot": hot,
                "in_the_network": self.in_the_network,
                "begins": list(self.begins),
                "through": through,
            }
        )


def described(text: str) -> TablesDescription:
    """What rank 0 has described; raises ConfigError where it is none."""
    try:
        given = json.loads(text)
        if given["adding"] not in RULES:
            raise KeyError(given["adding"])
        return TablesDescription(
            [_table(each) for each in given["tables"]],
            _made(_OPTIMIZERS, given["optimizer"]),
            given["adding"],
            Hot(**given["hot"]) if given["hot"] else None,
            bool(given["in_the_network"]),
            [str(name) for name in given["begins"]],
            _through(*given["through"]) if given["through"] else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ConfigError(
            f"rank 0 describes its tables in a way that this tacit does not know ({type(cause).__name__}: {cause!s:.100}); run the same "
            f"version on ranks and row servers"
        ) from cause


def check_known(optimizer: RowOptimizer) -> None:
    """Raises ConfigError for an optimizer that row servers do not have."""
    if type(optimizer) not in _OPTIMIZERS.values():
        raise ConfigError(
            f"row servers know the optimizers {', '.join(_OPTIMIZERS)} and not {type(optimizer).__name__}; use one of them, or leave servers= out"
        )


def _through(where: str, mtu: int, window_nbytes: int) -> Through:
    """A row server's way to the same aggregator: its own environment comes first, and has the secret."""
    at = environment.aggregator_address() or where
    return Through(at, mtu=mtu, window_nbytes=window_nbytes)


def _named(value: Any) -> dict[str, Any]:
    return {"name": type(value).__name__, "options": asdict(value)}


def _made(known: dict[str, Any], given: dict[str, Any]) -> Any:
    return known[given["name"]](**given["options"])


def _table_as_json(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "width": table.width,
        "keys": table.keys,
        "dtype": str(table.dtype),
        "padding": table.padding,
        "init": _named(table.init),
        "seed": table.seed,
    }


def _table(given: dict[str, Any]) -> Table:
    dtype: torch.dtype = _DTYPES[given["dtype"]]
    return Table(**{**given, "dtype": dtype, "init": _made(_VALUES, given["init"])})
