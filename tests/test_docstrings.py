"""The public functions and methods document their arguments and results, and the examples in their docstrings run."""

import ast
import doctest
import inspect
import io
import re
import tokenize
import warnings
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

import tacit
import tacit.rows
import tacit.testing
from tacit import sim

ROOT = Path(tacit.__file__).parent
NO_CALL = {
    "tacit.Codec",
    "tacit.TacitError",
}  # a protocol, which nobody calls; an error, which takes its text
NO_TEXT = {"tacit.Conversation"}  # an alias of a type


def _public():
    for room in (tacit, tacit.rows, tacit.testing):
        for name in room.__all__:
            found, called = getattr(room, name), f"{room.__name__}.{name}"
            if isinstance(found, FunctionType | type) and called not in NO_TEXT:
                yield called, found
    yield "tacit.sim.cost", sim.cost
    yield "tacit.sim.rows_cost", sim.rows_cost
    for owner in (
        tacit.Handle,
        tacit.Strategy,
        sim.Estimate,
        sim.RowsEstimate,
        tacit.rows.Tables,
        tacit.rows.Store,
    ):
        for name, found in vars(owner).items():
            found = found.__func__ if isinstance(found, classmethod) else found
            if isinstance(found, FunctionType) and not name.startswith("_"):
                yield f"{owner.__name__}.{name}", found


PUBLIC = dict(_public())


def _lacks(function):
    """The sections that a function needs by its signature, and that its docstring has not."""
    signature, text = inspect.signature(function), inspect.getdoc(function) or ""
    takes = any(name not in ("self", "cls") for name in signature.parameters)
    returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    return [
        section
        for section, needed in (("Args:", takes), ("Returns:", returns))
        if needed and section not in text.split()
    ]


def test_the_list_holds_what_users_call():
    assert {"tacit.attach", "tacit.sim.cost", "tacit.testing.check", "Handle.load_state_dict"} <= set(PUBLIC)
    assert {f"tacit.{name}" for name in tacit.__all__} - set(PUBLIC) == NO_TEXT


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - NO_CALL))
def test_arguments_and_results_are_documented(name):
    assert _lacks(PUBLIC[name]) == []


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - NO_CALL))
def test_every_argument_is_named_in_the_docstring(name):
    signature, text = inspect.signature(PUBLIC[name]), inspect.getdoc(PUBLIC[name]) or ""
    assert [p for p in signature.parameters if p not in ("self", "cls") and f"\n    {p}:" not in text] == []


@pytest.mark.parametrize("name", sorted(name for name in PUBLIC if name.startswith("tacit.")))
def test_public_names_have_an_example(name):
    assert "Example:" in (inspect.getdoc(PUBLIC[name]) or "").split()


def test_a_missing_section_is_found():
    def undocumented(x: int) -> int:
        """Has neither."""
        return x

    assert _lacks(undocumented) == ["Args:", "Returns:"]


@pytest.mark.parametrize(
    "module",
    [
        "attachments.handle",
        "errors",
        "requests",
        "sim.rows",
        "strategy",
        "testing.conformance",
        "testing.vectors",
    ],
)
def test_the_examples_run(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, about a checkpoint of a single process
        found = doctest.testmod(import_module(f"tacit.{module}"))
    assert found.attempted > 0
    assert found.failed == 0


DIALECT = re.compile(
    r"\b(say|says|said|tell|tells|told|hear|hears|heard|speak|speaks|spoken)\b", re.IGNORECASE
)


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_docstrings_and_comments_send_receive_and_report(path):
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    docstrings = [found for node in nodes if (found := ast.get_docstring(node))]
    assert [found for found in [*comments, *docstrings] if DIALECT.search(found)] == []
