"""Names of installed packages: read late, one broken package breaks no other name, built-in names stay."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from tacit.errors import ConfigError
from tacit.registry import Registry


def _registry(monkeypatch, **entries):
    asked = []

    def entry_points(group):
        asked.append(group)
        return [EntryPoint(name, value, group) for name, value in entries.items()]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    return Registry("codec", "tacit.codecs", {"plain": dict, "short": list}), asked


def test_a_built_in_name_reads_no_package(monkeypatch):
    names, asked = _registry(monkeypatch, added="collections:OrderedDict")
    assert names.find("plain") is dict and names["short"] is list and not asked
    assert names.find("added").__name__ == "OrderedDict"
    assert list(names) == ["plain", "short", "added"] and asked == ["tacit.codecs"]


def test_an_unknown_name_gets_the_nearest_of_all_names(monkeypatch):
    names, _ = _registry(monkeypatch, added="collections:OrderedDict")
    with pytest.raises(
        ConfigError, match="unknown codec 'aded'; did you mean 'added'. known are plain, short, added"
    ):
        names.find("aded")


def test_a_broken_package_is_named_and_breaks_no_other(monkeypatch):
    names, _ = _registry(
        monkeypatch, bad="no_such_module_here:x", number="math:pi", good="collections:Counter"
    )
    with pytest.raises(
        ConfigError, match="codec 'bad' of the package .*no_such_module_here.* cannot be loaded"
    ):
        names.find("bad")
    with pytest.raises(ConfigError, match="it is a float"):
        names.find("number")
    assert names.find("good").__name__ == "Counter"


def test_a_package_does_not_replace_a_built_in_name(monkeypatch):
    names, _ = _registry(monkeypatch, plain="collections:Counter")
    with pytest.warns(UserWarning, match="'plain' of the package .* is ignored: that name is built in"):
        assert list(names) == ["plain", "short"]
    assert names["plain"] is dict


def test_a_name_is_registered_once():
    names = Registry("codec", "tacit.none", {"plain": dict})
    names.register("own", list)
    assert names.find("own") is list
    with pytest.raises(ConfigError, match="codec name 'own' is taken"):
        names.register("own", dict)


def test_no_import_of_tacit_reads_entry_points():
    code = (
        "import importlib.metadata as m\n"
        "real = m.entry_points\n"
        "def spy(**how):\n"
        "    assert not str(how.get('group')).startswith('tacit.'), how\n"
        "    return real(**how)\n"
        "m.entry_points = spy\n"
        "import tacit.strategy, tacit.sim.texts, tacit.lab.experiments.jobs\n"
        "tacit.strategy.Strategy.parse('every / int8 / sharded')\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
