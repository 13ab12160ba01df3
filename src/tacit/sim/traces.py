"""The popularity of rows as a command line names it: a law, a file with a trace of look-ups, or real text that every machine has.

`ngrams` is Python's own standard library, as a text model with hashed features sees it: every run of letters, every run of
digits and every other character but spaces is a word; each word, each pair and each triple of neighbours is one look-up, of a
row chosen by a hash among `rows`. Python 3.11.7 as its source distribution has it, tests included: 21.9 M look-ups of 1.98 M
rows, skew 0.99. A system that leaves the tests out has about a third of it.
"""

import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.errors import ConfigError
from tacit.grammar import check_names, read, unfit, value
from tacit.registry import unknown_name
from tacit.sim.popularity import ZIPF_ROWS, Popularity, criteo, of_counts, zipf
from tacit.units import size_text

MOST_TRACE_NBYTES = 4 * 10**9
MOST_HASHED_ROWS = 10**8
_WAY = "write zipf(s=1.05, rows=5000000), criteo(s=1.05), ngrams, or a .txt or .npy file of keys"
_WORD = re.compile(r"[A-Za-z_]+|[0-9]+|[^A-Za-z0-9_\s]")
_LEFT_OUT = ("site-packages", "dist-packages")  # what somebody installed: another machine has others
_LAWS: dict[str, dict[str, float]] = {
    "zipf": {"s": 1.05, "rows": ZIPF_ROWS},
    "criteo": {"s": 1.05},
    "ngrams": {"rows": ZIPF_ROWS},
}

Advance = Callable[[int, int], None]  # how much is done, of how much


def parse_popularity(text: str, advance: Advance = lambda done, total: None) -> Popularity:
    """The popularity that `text` names. `advance` is called while a long one is made."""
    if text.strip().endswith((".txt", ".npy")):
        return _of_file(Path(text.strip()))
    call = read(text, "popularity", _WAY)
    if call.name not in _LAWS:
        raise unknown_name("popularity", call.name, [*_LAWS, "a .txt or .npy file"])
    known = _LAWS[call.name]
    if call.args:
        raise unfit("popularity", text, known, f"{call.args[0]!r} is without its option's name and =")
    check_names("popularity", text, known, call.options)
    options = known | {name: _number(name, written, text) for name, written in call.options.items()}
    if call.name == "ngrams":
        return ngrams(int(options["rows"]), advance)
    return criteo(options["s"]) if call.name == "criteo" else zipf(options["s"], int(options["rows"]))


def ngrams(rows: int = ZIPF_ROWS, advance: Advance = lambda done, total: None) -> Popularity:
    """Hashed 1-, 2- and 3-grams of the Python standard library; some seconds, and about 600 MB while it works."""
    if not 1 <= rows <= MOST_HASHED_ROWS:
        raise ConfigError(f"rows={rows}: ngrams are hashed to 1 to {MOST_HASHED_ROWS:,} rows")
    files = list(_sources(Path(sysconfig.get_path("stdlib"))))
    known: dict[str, int] = {}
    words = []
    for done, path in enumerate(files):
        found = _WORD.findall(path.read_bytes().decode("utf8", "ignore"))
        words.append(
            np.fromiter((known.setdefault(word, len(known)) for word in found), np.uint64, len(found))
        )
        advance(done, len(files))
    if not known:
        raise ConfigError(
            "ngrams: this Python has its standard library not as .py files; give a file of keys"
        )
    counts = np.zeros(rows, np.int64)
    for grams in _hashed(np.concatenate(words)):
        counts += np.bincount((grams % np.uint64(rows)).astype(np.int64), minlength=rows)
    return of_counts(f"ngrams(rows={rows})", counts)


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if path.is_file() and not set(path.relative_to(folder).parts) & set(_LEFT_OUT):
            yield path


def _hashed(words: NDArray[np.uint64]) -> Iterator[NDArray[np.uint64]]:
    """A hash for every word, every pair and every triple; the same on every machine with the same text."""
    grams = _mix(words + np.uint64(1))
    yield grams
    for length in (2, 3):
        if len(words) >= length:
            grams = _mix(grams[:-1] * np.uint64(31) + words[length - 1 :])
            yield grams


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _of_file(path: Path) -> Popularity:
    try:
        nbytes = path.stat().st_size if path.is_file() else None
        if nbytes is None:
            raise ConfigError(f"popularity {path}: this is no file; give a .txt or .npy file of keys")
        if nbytes > MOST_TRACE_NBYTES:
            raise ConfigError(
                f"popularity {path}: {size_text(nbytes)} is more than the {size_text(MOST_TRACE_NBYTES)} that are read; give a part of it"
            )
        return of_counts(str(path), _array_counts(path) if path.suffix == ".npy" else _text_counts(path))
    except OSError as cause:
        raise ConfigError(
            f"popularity {path}: cannot be read ({cause.strerror}); give a .txt or .npy file of keys"
        ) from cause


def _text_counts(path: Path) -> list[int]:
    """Keys may be any words between spaces or line ends."""
    counts: Counter[bytes] = Counter()
    with path.open("rb") as file:
        rest = b""
        while part := file.read(1 << 20):
            *words, rest = (rest + part).split() if not part[-1:].isspace() else [*(rest + part).split(), b""]
            if len(rest) > 1000:
                raise ConfigError(
                    f"popularity {path}: a key has more than 1,000 bytes; put spaces or line ends between keys"
                )
            counts.update(words)
        if rest:
            counts[rest] += 1
    return list(counts.values())


def _array_counts(path: Path) -> NDArray[np.int64]:
    try:
        keys: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as cause:
        raise ConfigError(f"popularity {path}: no .npy file of numbers; write it with numpy.save") from cause
    if not isinstance(keys, np.ndarray) or keys.dtype.kind not in "iu":
        raise ConfigError(
            f"popularity {path}: keys are whole numbers; write an array of integers with numpy.save"
        )
    return np.unique(keys, return_counts=True)[1].astype(np.int64)


def _number(name: str, written: str, text: str) -> float:
    found = value(written, f"popularity {text!r}")
    whole = name == "rows"
    if isinstance(found, bool) or not isinstance(found, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"popularity {text!r}: {name}={written} is not {kind}; {_WAY}")
    return found
