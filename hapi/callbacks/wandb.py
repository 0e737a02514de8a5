"""The values of a fit for Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from hapi import kinds
from hapi.callbacks import settings, tracking

_MODES = ("online", "offline", "disabled", "shared")


class WandbCallback(tracking.Tracker):
    """Writes a run of Weights & Biases on rank 0: ``epoch/...`` after each epoch, ``batch/...`` every so many steps.

    Both are logged with the steps trained as wandb's step. What the fit was set to goes into the run's config. Each fit
    is a run of its own; one that resumes goes on with its run. A run that the script has begun by ``wandb.init`` is
    used, and left open. Without a network, ``mode="offline"`` writes files for ``wandb sync``. wandb writes them late:
    of a run that was killed (SIGKILL) values may be missing in them, and what came after its checkpoint may stand
    twice. What wandb raises on the way or at the end costs values, not the training. Needs the extra ``wandb``.

    Args:
        project: The project's name.
        entity: Whose project it is.
        name: The run's name.
        dir: The folder for its files.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``. None: wandb's own setting.
        job_type: The kind of the run.
        log_freq: Steps from one ``batch/...`` to the next. None: fit's.
        kwargs: Whatever else ``wandb.init`` takes; ``config`` is added to what the fit knows.

    Raises:
        ImportError: wandb is not installed.
        ValueError: ``log_freq`` is below 1.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        dir: str | None = None,
        mode: str | None = None,
        job_type: str | None = None,
        *,
        log_freq: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(log_freq)
        kinds.check(WandbCallback, locals())
        if mode not in (None, *_MODES):
            raise ValueError(
                f"WandbCallback received mode={mode!r}, which is unknown. Write mode={' or '.join(map(repr, _MODES))}, "
                "or leave it out."
            )
        tracking.require("WandbCallback", "wandb")
        given = {"project": project, "entity": entity, "name": name, "dir": dir, "mode": mode, "job_type": job_type}
        self._options = {key: value for key, value in given.items() if value is not None} | kwargs
        self._is_ours = True

    def _start(self, known: str | None) -> tuple[Any, str]:
        wandb = importlib.import_module("wandb")
        run = wandb.run
        self._is_ours = run is None
        config = settings.known(self.model, self.params)
        if run is None:
            # One id, given or of the run that is gone on with; where there is no such run it is begun.
            same = {} if known is None else {"id": known, "resume": "allow"}
            run = wandb.init(**{**self._options, "config": config | dict(self._options.get("config") or {})} | same)
        else:
            run.config.update(config, allow_val_change=True)
        return run, run.id

    def _log(self, values: Mapping[str, float], step: int) -> None:
        # Of a run that is gone on with the service may know later steps: the same ones come once more.
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def _end(self, run: Any, how: str) -> None:
        if self._is_ours:
            run.finish(exit_code=0 if how == "finished" else 1)
