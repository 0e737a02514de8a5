"""What a callback is, and when its hooks are called.

``fit``::

    set_params(params); set_model(model)
    on_train_begin()
    for epoch in range(first_epoch, last_epoch):            # numbered from 0
        on_epoch_begin(epoch)
        for step, batch in enumerate(train batches):        # a step is one batch a rank
            on_train_batch_begin(step)
            ...                                             # forward, backward, optimizer step if due
            on_train_batch_end(step, logs)                  # every batch_freq-th step; batch_values adds to the logs
        if evaluation is due:
            on_eval_begin({"steps": ...})
            for step, batch in enumerate(eval batches):
                on_eval_batch_begin(step)
                ...
                on_eval_batch_end(step, logs)
            on_eval_end(logs)                               # {"loss": ..., "acc": ...}
        on_epoch_end(epoch, logs)                           # {"loss": ..., "lr": ..., "val_loss": ...}
        if model.stop_training on any rank: break
    on_train_end(logs)                                      # those of the last epoch

``evaluate`` calls the ``on_eval_`` hooks, ``predict`` the ``on_predict_`` hooks likewise. An exception,
Ctrl-C included, calls ``on_exception`` in place of what was still to come, and goes on to the caller.

All hooks are called on every rank. Epoch and evaluation values are floats, reduced over the ranks and equal
on all. Batch values are this rank's running ones, 0-dim tensors: reading one (``float(logs["loss"])``) waits
for the device. Each hook gets a dict of its own, which it may change.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Logs = dict[str, Any]

# The places of callbacks: the history knows an epoch before anybody acts on it, and a checkpoint holds what
# the others have made of it.
FIRST, PROGRESS, OTHERS, SAVING, LAST = range(5)


class Callback:
    """What happens at given moments of training, evaluation or prediction: subclass it and override hooks.

    An object may serve several calls of ``fit``: reset what it gathers during one in `on_train_begin`.

    Attributes:
        model: The `hapi.Model`; ``model.network``, ``model.optimizer``, ``model.stop_training = True``,
            ``model.save(path)``.
        params: What is known of the call before it starts. In fit: ``batch_size``, ``global_batch`` (samples
            of a step over all ranks; None: the data decides), ``eval_global_batch``, ``epochs``,
            ``first_epoch`` and ``last_epoch`` (as in ``range``), ``steps`` (of an epoch; None: unknown),
            ``samples``, ``verbose``, ``log_freq``, ``metrics`` (the names that epoch logs will have),
            ``save_dir``, ``save_freq``, ``eval_freq``, ``num_iters``, ``accumulate_grad_batches``,
            ``clip_grad_norm``. In evaluate and predict: ``steps``,
            ``samples``, ``global_batch``, ``verbose``, ``log_freq``, ``metrics``. In all: ``callbacks``, those
            of the call in their order.
        batch_freq: The ``on_..._batch_end`` hooks are called on every so many-th step: nothing is gathered
            between.
    """

    batch_freq: int = 1
    _place: int = OTHERS
    # Whether it meets the other ranks or moves what they share, so that all of them need it.
    _on_all_ranks: bool = False
    model: Any = None
    params: Mapping[str, Any] = {}

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Called once before each fit, evaluate or predict."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Called once before each fit, evaluate or predict."""
        self.model = model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Before the first epoch of a fit."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """After the last epoch of a fit; ``logs`` are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Before an epoch, numbered from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """After an epoch and its evaluation; ``logs`` hold both, the latter's names with ``val_``."""

    def on_train_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Before a training step, numbered from 0 in each epoch."""

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """After a training step; ``logs`` are this rank's running values, as unread tensors."""

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Before an evaluation; ``logs`` hold ``steps`` (None: unknown)."""

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """After an evaluation; ``logs`` are its values, without ``val_``."""

    def on_eval_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Before an evaluation step."""

    def on_eval_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """After an evaluation step; ``logs`` are this rank's running values, as unread tensors."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Before a prediction; ``logs`` hold ``steps`` (None: unknown)."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """After a prediction."""

    def on_predict_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Before a prediction step."""

    def on_predict_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """After a prediction step."""

    def on_exception(self, exc: BaseException) -> None:
        """When the call ends with an exception; no other hook follows."""

    def batch_values(self, step: int) -> Logs:
        """More values for the logs of a training step, which all `on_train_batch_end` hooks get: unread tensors."""
        return {}

    def _needs(self, hook: str) -> bool:
        """Whether a batch hook that it has would do something in this call; asked once, before the call."""
        return True

    def _looks_at(self, step: int) -> bool:
        """Whether this one, of every ``batch_freq``-th steps, is looked at; once it is, until the hook is called."""
        return True

    def _as_evaluated(self) -> AbstractContextManager[None]:
        """Within, the network is what the evaluations of this fit see; entered on every rank."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart: tensors, numbers, texts, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; when a fit resumes, right after `on_train_begin`.

        Within an epoch it comes once more after that epoch's `on_epoch_begin`, which may have set things back.
        """


class Saver(Callback):
    """A callback that saves at edges of optimizer steps, within an epoch too. All ranks decide alike.

    Attributes:
        is_due: In `save_within`: whether all ranks have agreed that what `wants_save` asked for is done.
    """

    _on_all_ranks = True
    is_due: bool = False

    def saves_at(self, steps_trained: int) -> bool:
        """Whether it saves after so many steps; asked after each optimizer step."""
        return False

    def wants_save(self) -> bool:
        """Whether it is time to save; asked on every rank, about twice a second."""
        return False

    def save_within(self, stopping: bool) -> None:
        """Save, if it was due for this one, or the run is told to stop."""


_KINDS = ("train", "eval", "predict")
_BATCH_END = {kind: f"on_{kind}_batch_end" for kind in _KINDS}
_BATCH_HOOKS = tuple(f"on_{kind}_batch_{edge}" for kind in _KINDS for edge in ("begin", "end"))


class CallbackList:
    """Calls the hooks of callbacks, on every rank.

    The order: `History`, `ProgBarLogger`, the others as they were given, `ModelCheckpoint` last, so that a
    checkpoint holds the others' state of the same moment.

    Args:
        callbacks: The callbacks; each is told ``params`` and ``model``.
        model: The `hapi.Model`.
        params: What is known before the call starts; see `Callback`.

    Raises:
        TypeError: One of them is no callback.
        ValueError: A ``batch_freq`` is below 1.
    """

    def __init__(self, callbacks: Iterable[Callback], model: Any, params: Mapping[str, Any]) -> None:
        # Here, since it imports this one.
        from hapi.callbacks import hooks

        callbacks = list(callbacks)
        for callback in callbacks:
            hooks.check(callback)
        self.callbacks = sorted(callbacks, key=lambda callback: callback._place)
        params = {**params, "callbacks": tuple(self.callbacks)}
        for callback in self.callbacks:
            callback.set_params(dict(params))
            callback.set_model(model)
        self.savers = [callback for callback in self.callbacks if isinstance(callback, Saver)]
        # Most callbacks leave most batch hooks alone: those cost nothing in a step.
        self.batch_hooks = {
            hook: [cb for cb in self.callbacks if hooks.overrides(cb, hook) and cb._needs(hook)]
            for hook in _BATCH_HOOKS
        }
        self.adding = [callback for callback in self.callbacks if hooks.overrides(callback, "batch_values")]
        self.act_between_epochs = hooks.act_between_epochs(self.callbacks)
        self.act_before_an_epoch = hooks.act_before_an_epoch(self.callbacks)

    def call(self, hook: str, *args: Any, logs: Mapping[str, Any] | None = None) -> None:
        """Call a hook of all callbacks, each with a dict of its own.

        Args:
            hook: The hook's name.
            args: Its arguments before ``logs``: epoch or step; for ``on_exception`` the exception. What an
                ``on_exception`` raises becomes a warning.
            logs: The values.
        """
        if hook in self.batch_hooks:
            if hook == "on_train_batch_end":
                for callback in self.adding:
                    logs = {**(logs or {}), **callback.batch_values(*args)}
            for callback in self.batch_hooks[hook]:
                if hook.endswith("begin") or _is_due(callback, args[0]):
                    getattr(callback, hook)(*args, dict(logs or {}))
            return
        if hook == "on_exception":
            self._tell(*args)
            return
        for callback in self.callbacks:
            getattr(callback, hook)(*args, dict(logs or {}))

    def end_epoch(self, epoch: int, logs: Mapping[str, Any], agree: Callable[[], None]) -> None:
        """Call ``on_epoch_end`` of all callbacks.

        Args:
            epoch: The epoch's number, from 0.
            logs: Its values.
            agree: Called before those that save: what the others have asked for is then known to all ranks. A
                collective: once an epoch, and once more for each `EarlyStopping`, which saves and asks itself.
        """
        agreed = False
        for callback in self.callbacks:
            # All ranks have these: nothing that a rank alone may have is among them.
            if not agreed and callback._on_all_ranks and callback._place >= SAVING:
                agree()
                # Those that are left ask for nothing.
                agreed = isinstance(callback, Saver)
            callback.on_epoch_end(epoch, dict(logs))
        if not agreed:
            agree()

    def wants_batch_logs(self, kind: str, step: int) -> bool:
        """Whether any callback looks at the values after this step.

        Args:
            kind: ``"train"``, ``"eval"`` or ``"predict"``.
            step: The step's number, from 0.
        """
        # Plainly, here and below, and not by `_is_due`: these run in each step.
        due = False
        for callback in self.batch_hooks[_BATCH_END[kind]]:
            due |= (step + 1) % callback.batch_freq == 0 and callback._looks_at(step)
        return due

    def saves_at(self, steps_trained: int) -> bool:
        """Whether any callback saves after so many steps."""
        return any([saver.saves_at(steps_trained) for saver in self.savers])

    def wants_save(self, agreed: Sequence[bool] | None = None) -> Sequence[bool]:
        """Whether it is time to save, for each saver.

        Args:
            agreed: What all ranks have made of it, for `save`; None: ask each saver, as this rank sees it.
        """
        if agreed is None:
            return [saver.wants_save() for saver in self.savers]
        for saver, is_due in zip(self.savers, agreed, strict=True):
            saver.is_due = is_due
        return agreed

    def save(self, stopping: bool) -> None:
        """Let them save at the edge of an optimizer step."""
        for saver in self.savers:
            saver.save_within(stopping)
            saver.is_due = False

    def state_dict(self) -> dict[str, Any]:
        """The callbacks' states, by class and number within the class: ``"EarlyStopping.0"``."""
        states = {key: callback.state_dict() for key, callback in self._named().items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give the callbacks their states back, after `on_train_begin`. One not there before starts anew."""
        for key, callback in self._named().items():
            if key in states:
                callback.load_state_dict(states[key])

    def _tell(self, error: BaseException) -> None:
        """Call all `on_exception`: one that fails keeps neither the others nor `error` from going on."""
        failed: list[str] = []
        for callback in self.callbacks:
            try:
                callback.on_exception(error)
            except Exception as another:
                failed.append(f"{type(callback).__name__}.on_exception failed: {type(another).__name__}: {another}")
        for text in failed:
            warnings.warn(text, stacklevel=2)

    def _named(self) -> dict[str, Callback]:
        counts: Counter[str] = Counter()
        named: dict[str, Callback] = {}
        for callback in self.callbacks:
            cls = type(callback).__name__
            named[f"{cls}.{counts[cls]}"] = callback
            counts[cls] += 1
        return named


def default_callbacks(
    callbacks: Callback | Sequence[Callback] | None,
    *,
    verbose: int,
    log_freq: int,
    save_dir: str | os.PathLike[str] | None,
    save_freq: int,
) -> list[Callback]:
    """The callbacks of a fit: the user's, and those that it has by itself.

    Added are a `History`; with ``verbose`` a `ProgBarLogger`; with ``save_dir`` a `ModelCheckpoint`; each
    unless the user passed one (a `ModelCheckpoint`: one that saves there).

    Raises:
        ValueError: A `ModelCheckpoint` has no ``save_dir``, and there is none here.
    """
    # Here, since their modules import this one.
    from hapi.callbacks.checkpoint import ModelCheckpoint
    from hapi.callbacks.history import History
    from hapi.callbacks.progress import ProgBarLogger

    given = as_list(callbacks)
    for callback in given:
        if isinstance(callback, ModelCheckpoint) and callback.save_dir is None and save_dir is None:
            raise ValueError(
                "ModelCheckpoint was passed without a save_dir, and fit has none: there is nowhere to save to. Write "
                'fit(..., save_dir="checkpoints") or ModelCheckpoint(save_dir="checkpoints").'
            )
    kinds = {cls for cls in (History, ProgBarLogger) if any(isinstance(cb, cls) for cb in given)}
    added: list[Callback] = []
    if History not in kinds:
        added.append(History())
    if verbose and ProgBarLogger not in kinds:
        added.append(ProgBarLogger(log_freq, verbose))
    if save_dir is not None and not any(isinstance(cb, ModelCheckpoint) and cb._saves_in(save_dir) for cb in given):
        added.append(ModelCheckpoint(save_freq))
    return [*added, *given]


def callbacks_alike(callbacks: Iterable[Callback]) -> list[str]:
    """Those that all ranks need, with what they were set to; loggers may be one rank's alone."""
    # What is no callback is refused later on.
    return [_set_to(each) for each in callbacks if isinstance(each, Callback) and each._on_all_ranks]


def _set_to(callback: Callback) -> str:
    """A callback as it was made. What a subclass adds is left out: it may well be the rank's own."""
    ours = next(kind for kind in type(callback).__mro__ if kind.__module__.startswith("hapi."))
    names = [name for name in inspect.signature(ours).parameters if name not in ("save_dir", "verbose")]
    chosen = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
    plain = [f"{k}={v!r}" for k, v in chosen.items() if v is None or isinstance(v, bool | int | float | str)]
    return f"{type(callback).__name__}({', '.join(plain)})"


def as_list(callbacks: Callback | Sequence[Callback] | None) -> list[Callback]:
    """The callbacks that the user passed: none, one, or several."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]


def _is_due(callback: Callback, step: int) -> bool:
    return (step + 1) % callback.batch_freq == 0 and callback._looks_at(step)
