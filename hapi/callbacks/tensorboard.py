"""The values of a fit for TensorBoard."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hapi import kinds
from hapi.callbacks import tracking
from hapi.callbacks.base import Logs
from hapi.distributed import get_rank
from hapi.metrics.base import OPEN


class TensorBoard(tracking.Curves):
    """Writes scalars on rank 0: ``epoch/...`` after each epoch, ``batch/...`` every so many training steps.

    Both are drawn over the steps trained, the learning rate among them. ``batch/...`` are rank 0's running values
    within the epoch, ``epoch/...`` those of all ranks. A resumed fit goes on in the same folder: what the ended run
    wrote after the checkpoint is hidden, and so is what an earlier run has written there where a fit starts anew. Runs
    that are to be compared get a folder each. Needs the extra ``tensorboard``; show it with ``tensorboard --logdir``.

    Args:
        log_dir: The folder of this run; it is made when the first values are there.
        log_freq: Steps from one ``batch/...`` to the next. None: fit's.
        graph: Write the network's graph, as a trace of a copy finds it.
        hparams: Hyper-parameters for the table of runs, besides those that fit knows (batch size, optimizer, ...):
            ``{"width": 128}``. None: no table.
        images: Images with their labels, as a data set or as two tensors: the first of them are drawn once, and
            after each epoch the first that the network, as the evaluation sees it, takes for something else. All of
            them are predicted for that: pass a part of a large data set.
        image_count: How many are drawn at most.
        classes: The names of the classes. None: ``images.classes`` where it has them.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError: An argument is of another kind; ``hparams`` or ``images`` cannot be shown.
        ValueError: ``log_freq`` or ``image_count`` is below 1; when a fit begins: ``log_dir`` cannot be written.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "tensorboard",
        log_freq: int | None = None,
        *,
        graph: bool = False,
        hparams: Mapping[str, Any] | None = None,
        images: Any = None,
        image_count: int = 16,
        classes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(log_freq)
        kinds.check(TensorBoard, locals())
        tracking.require("TensorBoard", "tensorboard")
        if classes is not None and (isinstance(classes, str) or not isinstance(classes, Sequence)):
            raise TypeError(
                f"TensorBoard received classes={classes!r:.60}, of type {type(classes).__name__}, which is no list of "
                'names. Write classes=["cat", "dog"], or leave it out to take those of the data.'
            )
        kinds.count("image_count", image_count, 16, owner="TensorBoard", what="images")
        self.log_dir, self.graph, self.image_count = Path(log_dir), graph, image_count
        self.hparams = None
        if hparams is not None:
            from hapi.callbacks import settings

            self.hparams = settings.checked("TensorBoard", "hparams", hparams)
        self._images: Any = None
        if images is not None:
            from hapi.callbacks import pictures

            self._images = pictures.Labelled("TensorBoard", images, classes)
            # They are predicted by all ranks together.
            self._on_all_ranks = True
        self._writer: Any = None
        self._begun_at = 0
        self._introduced = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew; nothing is touched before there are values."""
        self._close()
        if get_rank() == 0:
            tracking.check_place("TensorBoard", "log_dir", self.log_dir)
        self._begun_at = self.model.steps_trained
        self._introduced = False

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch's values, and see that they are on the disk."""
        outputs = None
        if self._images is not None:
            batch_size = self.params.get("batch_size") or 32
            # As the values of the epoch's evaluation: with EMA the averages.
            with ExitStack() as stack:
                for callback in self.params["callbacks"]:
                    stack.enter_context(callback._as_evaluated())
                outputs = self.model.predict(self._images.data, batch_size=batch_size, verbose=0)
        super().on_epoch_end(epoch, logs)
        if outputs is not None and get_rank() == 0:
            self._draw("wrong", self._images.wrong(outputs, self.image_count), self.model.steps_trained)
        self._flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the file."""
        if self._writer is not None and self.hparams is not None:
            from hapi.callbacks import board

            board.end_hparams(self._writer)
        self._close()

    def on_exception(self, exc: BaseException) -> None:
        """Close the file."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch has started. What was written up to this checkpoint is on the disk."""
        self._flush()
        return super().state_dict() | {"introduced": self._introduced}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self._introduced = state.get("introduced", False)

    def _write(self, group: str, values: Mapping[str, Any], step: int) -> None:
        if self._writer is None:
            # Only here: it takes a second to import.
            summary_writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            self._writer = summary_writer(str(self.log_dir), purge_step=self._begun_at + 1)
        if not self._introduced:
            self._introduced = True
            self._introduce(step)
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", float(value), step)

    def _introduce(self, step: int) -> None:
        """What is written once in a run."""
        from hapi.callbacks import board, settings

        if self.graph:
            board.add_graph(self._writer, self.model)
        if self.hparams is not None:
            chosen = settings.known(self.model, self.params) | self.hparams
            known = [f"epoch/{name}" for name in self.params["metrics"] if not name.endswith(OPEN)]
            board.begin_hparams(self._writer, chosen, known)
        if self._images is not None:
            self._draw("samples", self._images.samples(self.image_count), step)

    def _draw(self, name: str, captioned: Any, step: int) -> None:
        from hapi.callbacks import pictures

        if captioned:
            self._writer.add_image(f"images/{name}", pictures.draw(captioned), step)

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
