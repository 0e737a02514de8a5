"""The epoch values as a table in a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hapi import kinds
from hapi.callbacks import tracking
from hapi.callbacks.base import Callback, Logs
from hapi.distributed import get_rank
from hapi.metrics.base import OPEN


class CSVLogger(Callback):
    """Writes a row for each epoch, on rank 0, complete on disk before the next epoch starts.

    A resumed fit goes on with the file: rows of epochs that it trains again are replaced.

    Args:
        path: The file; its folder is made.
        append: Go on with a file that is there instead of starting a new one.
        separator: The character between two columns.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: ``separator`` is not one character; when a fit begins: the file that is to be gone on with is
            another table, or none can be written there.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool = False, separator: str = ",") -> None:
        kinds.check(CSVLogger, locals())
        if len(separator) != 1 or separator in '\r\n"':
            raise ValueError(
                f"CSVLogger received separator={separator!r}, but one character stands between two columns, which is "
                'neither a quotation mark nor the end of a line. Write separator=";", or leave it out.'
            )
        self.path, self.append, self.separator = Path(path), append, separator
        self._columns: list[str] = []
        self._started = False
        self._resumed = False
        # Rows of earlier fits, which a resumed one must not take for its own.
        self._before = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew; the file is touched when the first epoch ends."""
        self._columns, self._started, self._resumed = [], False, False
        self._before = len(self._look())

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch's row."""
        if get_rank() != 0:
            return
        row = {"epoch": str(epoch + 1)} | {name: repr(float(value)) for name, value in (logs or {}).items()}
        rows = [] if self._started else self._rows_to_keep(epoch + 1)
        new = [name for name in row if name not in self._columns]
        if self._started and new:
            rows = self._read()
        rewrite = bool(new) or not self._started
        if rewrite:
            told = [] if self._started else ["epoch", *self.params.get("metrics", ())]
            # Names that a metric cannot tell beforehand get their columns when they come.
            announced = [name for name in told if not name.endswith(OPEN)]
            self._columns = list(dict.fromkeys([*self._columns, *announced, *row]))
        self._write([*rows, row], rewrite)
        self._started = True

    def state_dict(self) -> dict[str, Any]:
        """The columns, and how many rows there were before this fit."""
        return {"columns": list(self._columns), "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the file's rows of the epochs before."""
        self._resumed = True
        self._before = state.get("before", 0)
        self._look()

    def _look(self) -> list[dict[str, str]]:
        """See before the first epoch that there can be a log, and that what is to be gone on with is one; its rows."""
        if get_rank() != 0:
            return []
        tracking.check_place("CSVLogger", "path", self.path, is_file=True)
        return self._read() if self.append or self._resumed else []

    def _rows_to_keep(self, epoch: int) -> list[dict[str, str]]:
        rows = self._look()
        # Rows at the end that the interrupted run wrote after the checkpoint from which this one goes on.
        while self._resumed and len(rows) > self._before and (_epoch(rows[-1]) or 0) >= epoch:
            rows.pop()
        return rows

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                lines = file.readlines()
            # What a full disk or a power cut has torn has no end; nor has what some editors save, which is whole.
            is_open = bool(lines) and not lines[-1].endswith(("\n", "\r"))
            reader = csv.DictReader(lines[:-1] if is_open and len(lines) == 1 else lines, delimiter=self.separator)
            rows = list(reader)
            if is_open and rows and None in rows[-1].values():
                rows.pop()
        except (UnicodeDecodeError, csv.Error) as error:
            raise self._no_log(f"which cannot be read ({error}): it is another file") from error
        columns = list(reader.fieldnames or ())
        if columns and "epoch" not in columns:
            raise self._no_log(
                f"whose columns are {', '.join(columns)}: there is no epoch, so it is another table, or one with "
                "another separator"
            )
        for place, row in enumerate(rows, 1):
            # What a row has more than columns DictReader puts under None.
            if None in row or (self._resumed and place > self._before and _epoch(row) is None):
                raise self._no_log(
                    f"whose row {place} begins with {next(iter(row.values()))!r} and has {_width(row)} of "
                    f"{len(columns)} cells or no epoch's number: it was changed by hand, or it is another table"
                )
        self._columns = columns
        return rows

    def _no_log(self, why: str) -> ValueError:
        return ValueError(
            f"CSVLogger was to go on with {str(self.path)!r}, {why}. Give the log a path of its own, or move that file "
            "away."
        )

    def _write(self, rows: list[dict[str, str]], rewrite: bool) -> None:
        if not rewrite:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, delimiter=self.separator).writerows(rows)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and put in its place: the rows that are there already are never lost.
        beside = self.path.with_name(self.path.name + ".part")
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, delimiter=self.separator)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(beside, self.path)


def _epoch(row: Mapping[str, str | None]) -> int | None:
    """A row's epoch, also as a table's program has written it (1.0); None: it has none."""
    try:
        return int(float(row["epoch"] or ""))
    except (ValueError, OverflowError):
        return None


def _width(row: Mapping[str | None, Any]) -> int:
    return sum(len(cell) if isinstance(cell, list) else cell is not None for cell in row.values())
