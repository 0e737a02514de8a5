"""The values of a fit for MLflow."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from typing import Any

from hapi import kinds
from hapi.callbacks import settings, tracking

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# What MLflow takes in names.
_FOREIGN = re.compile(r"[^\w\-. /]")


class MLflowCallback(tracking.Tracker):
    """Writes a run of MLflow on rank 0: ``epoch/...`` after each epoch, ``batch/...`` every so many training steps.

    Both are logged over the steps trained. What the fit was set to becomes the run's parameters. Each fit is a run of
    its own; one that resumes goes on with its run, and what stands there already is not written again. A run that the
    script has begun by ``mlflow.start_run`` is used, and left open. A server that cannot be reached on the way costs
    values, not the training. Needs the extra ``mlflow``.

    Args:
        experiment: The experiment's name; it is made if there is none. None: MLflow's own setting.
        run_name: The run's name.
        tracking_uri: Where to: ``"http://host:5000"``; a database, ``"sqlite:///mlflow.db"``; a folder,
            ``"file:./mlruns"``, for which MLflow asks for ``MLFLOW_ALLOW_FILE_STORE=true`` in the environment. None:
            MLflow's own setting; where there is none, newer ones make a database, ``mlflow.db``.
        log_freq: Steps from one ``batch/...`` to the next. None: fit's.
        params: Parameters besides those that the fit knows: ``{"width": 128}``.
        tags: The run's tags.

    Raises:
        ImportError: mlflow is not installed.
        ValueError: ``log_freq`` is below 1.
        TypeError: ``params`` holds what is no plain value, or ``tags`` a name that is no text.
    """

    def __init__(
        self,
        experiment: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        *,
        log_freq: int | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(log_freq)
        kinds.check(MLflowCallback, locals())
        tracking.require("MLflowCallback", "mlflow")
        unnamed = [key for key in tags or {} if not isinstance(key, str)]
        if unnamed:
            raise TypeError(
                f"MLflowCallback received tags with the key {unnamed[0]!r}, of type {type(unnamed[0]).__name__}, but a "
                'tag has a text for a name. Write tags={"who": "me"}.'
            )
        self.experiment, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri
        self._chosen = settings.checked("MLflowCallback", "params", params)
        self._tags = dict(tags or {})
        self._is_ours = True
        self._written: dict[str, int] = {}

    def _start(self, known: str | None) -> tuple[Any, str]:
        try:
            return self._begin(known)
        except Exception as error:
            raise RuntimeError(
                f"MLflowCallback received tracking_uri={self.tracking_uri!r} and experiment={self.experiment!r}, with "
                f"which no run can be begun: {type(error).__name__}: {error}. Write "
                'MLflowCallback("digits", tracking_uri="sqlite:///mlflow.db"), or leave the callback out.'
            ) from error

    def _begin(self, known: str | None) -> tuple[Any, str]:
        mlflow = importlib.import_module("mlflow")
        client = mlflow.MlflowClient(self.tracking_uri)
        self._written = {}
        active = mlflow.active_run()
        self._is_ours = active is None
        if active is not None:
            run_id = active.info.run_id
            known = run_id if known == run_id else None
        elif known is not None:
            run_id = known
            client.update_run(run_id, status="RUNNING")
        else:
            run_id = client.create_run(self._experiment_id(mlflow, client), run_name=self.run_name, tags=self._tags)
            run_id = run_id.info.run_id
        if known is not None:
            for key in client.get_run(run_id).data.metrics:
                self._written[key] = max(point.step for point in client.get_metric_history(run_id, key))
        else:
            chosen = settings.known(self.model, self.params) | self._chosen
            there = client.get_run(run_id).data.params
            entities = mlflow.entities
            new = [entities.Param(key, str(value)) for key, value in chosen.items() if key not in there]
            client.log_batch(run_id, params=new)
        return (client, mlflow.entities.Metric), run_id

    def _experiment_id(self, mlflow: Any, client: Any) -> str:
        if self.experiment is None:
            chosen: str = mlflow.tracking.fluent._get_experiment_id()
            return chosen
        found = client.get_experiment_by_name(self.experiment)
        made: str = client.create_experiment(self.experiment) if found is None else found.experiment_id
        return made

    def _log(self, values: Mapping[str, float], step: int) -> None:
        client, metric = self._run
        now = int(time.time() * 1000)
        named = {_FOREIGN.sub("_", name): value for name, value in values.items()}
        new = [metric(key, value, now, step) for key, value in named.items() if step > self._written.get(key, -1)]
        client.log_batch(self._run_id, metrics=new)

    def _end(self, run: Any, how: str) -> None:
        if self._is_ours:
            run[0].set_terminated(self._run_id, _STATUS[how])
