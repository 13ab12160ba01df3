"""One number for each row of all tables of an owner, so that one array counts them all and their counts fade alike."""

from collections.abc import Iterator

import numpy as np

from tacit.rows.hot_counts import Ints

_BITS = 12  # a page has 4096 rows


class Slots:
    """A table takes a page of numbers whenever its shard has grown by one: 4096 rows."""

    def __init__(self, tables: int) -> None:
        self._pages: list[list[int]] = [[] for _ in range(tables)]
        self._tables: list[int] = []  # of each page
        self._firsts: list[int] = []  # the place of its first row

    def of(self, table: int, places: Ints) -> Ints:
        """The slots of rows of a table, by their places in its shard."""
        pages = self._pages[table]
        while len(places) and len(pages) <= int(places.max()) >> _BITS:
            self._firsts.append(len(pages) << _BITS)
            pages.append(len(self._tables))
            self._tables.append(table)
        found: Ints = np.asarray(pages, np.int64)[places >> _BITS] << _BITS | places & (1 << _BITS) - 1
        return found

    def by_table(self, slots: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """For each table which of `slots` are its rows, and their places in its shard."""
        pages = slots >> _BITS
        tables = np.asarray(self._tables, np.int64)[pages]
        places = np.asarray(self._firsts, np.int64)[pages] | slots & (1 << _BITS) - 1
        for table in range(len(self._pages)):
            which = np.flatnonzero(tables == table)
            yield table, which, places[which]
