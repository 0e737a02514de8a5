"""The epoch values as a table in a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hapi import kinds
from hapi.callbacks.base import Callback, Logs
from hapi.distributed import get_rank


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
            another table.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool = False, separator: str = ",") -> None:
        kinds.check(CSVLogger, locals())
        if len(separator) != 1:
            raise ValueError(
                f"CSVLogger received separator={separator!r}, but one character stands between two columns. Write "
                'separator=";", or leave it out.'
            )
        self.path, self.append, self.separator = Path(path), append, separator
        self._columns: list[str] = []
        self._started = False
        self._resumed = False
        # Rows of earlier runs, which stay whatever becomes of this one.
        self._rows_before = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew; the file is touched when the first epoch ends."""
        self._columns, self._started, self._resumed = [], False, False
        self._rows_before = len(self._look())

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
            announced = [] if self._started else ["epoch", *self.params.get("metrics", ())]
            self._columns = list(dict.fromkeys([*self._columns, *announced, *row]))
        self._write([*rows, row], rewrite)
        self._started = True

    def state_dict(self) -> dict[str, Any]:
        """How many rows are earlier runs'."""
        return {"rows_before": self._rows_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the file's rows of the epochs before."""
        self._resumed = True
        self._rows_before = state.get("rows_before", 0)
        self._look()

    def _look(self) -> list[dict[str, str]]:
        """The rows that are gone on with; seen before the first epoch to be those of a log."""
        return self._read() if get_rank() == 0 and (self.append or self._resumed) else []

    def _rows_to_keep(self, epoch: int) -> list[dict[str, str]]:
        rows = self._look()
        # Rows at the end that the interrupted run wrote after the checkpoint from which this one goes on.
        while self._resumed and len(rows) > self._rows_before and int(rows[-1]["epoch"]) >= epoch:
            rows.pop()
        return rows

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            lines = file.readlines()
        if lines and not lines[-1].endswith(("\n", "\r")):
            # A row that a full disk or a power cut has torn.
            lines.pop()
        reader = csv.DictReader(lines, delimiter=self.separator)
        rows = list(reader)
        columns = list(reader.fieldnames or ())
        if columns and "epoch" not in columns:
            raise ValueError(
                f"CSVLogger was to go on with {str(self.path)!r}, whose columns are {', '.join(columns)}: there is no "
                "epoch, so it is another table, or one with another separator. Give the log a path of its own."
            )
        self._columns = columns
        return rows

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
