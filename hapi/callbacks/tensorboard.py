"""The values of a fit for TensorBoard."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hapi import kinds
from hapi.callbacks.base import Callback, Logs
from hapi.distributed import get_rank


class TensorBoard(Callback):
    """Writes scalars on rank 0: ``epoch/...`` after each epoch, ``batch/...`` every so many training steps.

    Both are drawn over the steps trained. ``batch/...`` are rank 0's running values within the epoch, ``epoch/...``
    those of all ranks. A resumed fit goes on in the same folder: what the ended run wrote after the checkpoint is
    hidden. Needs the extra ``tensorboard``; show the folder with ``tensorboard --logdir``.

    Args:
        log_dir: The folder of this run; it is made when the first values are there.
        log_freq: Steps from one ``batch/...`` to the next. None: fit's.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError: An argument is of another kind.
        ValueError: ``log_freq`` is below 1.
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "tensorboard", log_freq: int | None = None) -> None:
        # Known before the first epoch, and on every rank.
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "TensorBoard needs the package tensorboard, which is not installed, to write its files. "
                'Run `pip install "torch-hapi[tensorboard]"`, or use CSVLogger.'
            )
        if log_freq is not None and (isinstance(log_freq, bool) or not isinstance(log_freq, int) or log_freq < 1):
            raise ValueError(
                f"TensorBoard received log_freq={log_freq!r}: it counts steps from 1. Write log_freq=10, or leave it "
                "out to take fit's."
            )
        kinds.check(TensorBoard, locals())
        self.log_dir, self.log_freq = Path(log_dir), log_freq
        self._writer: Any = None
        self._steps_before = 0
        self._resumed_at: int | None = None

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Take fit's ``log_freq`` where there is none of its own."""
        super().set_params(params)
        self.batch_freq = self.log_freq or params.get("log_freq") or 10

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew; nothing is touched before there are values."""
        self._close()
        self._resumed_at = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note where the epoch starts."""
        self._steps_before = self.model.steps_trained

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Write the running values."""
        self._write("batch", logs, self._steps_before + step + 1)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch's values, and see that they are on the disk."""
        self._write("epoch", logs, self.model.steps_trained)
        self._flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the file."""
        self._close()

    def on_exception(self, exc: BaseException) -> None:
        """Close the file."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch has started. What was written up to this checkpoint is on the disk."""
        self._flush()
        return {"steps_before": self._steps_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._steps_before = state["steps_before"]
        self._resumed_at = self.model.steps_trained

    def _write(self, group: str, logs: Logs | None, step: int) -> None:
        if get_rank() != 0:
            return
        if self._writer is None:
            # Only here: it takes a second to import.
            summary_writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            hidden_from = None if self._resumed_at is None else self._resumed_at + 1
            self._writer = summary_writer(str(self.log_dir), purge_step=hidden_from)
        for name, value in (logs or {}).items():
            self._writer.add_scalar(f"{group}/{name}", float(value), step)

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
