"""What stands behind a Model between its calls: the prepared parts, the stepper, and the call that is running."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hapi import checkpoint, checks, setup
from hapi.batch import Inputs, Splitter, map_tensors
from hapi.callbacks.base import CallbackList
from hapi.cursor import Cursor
from hapi.data import Feed
from hapi.distributed import group
from hapi.optimizers import load_optimizer
from hapi.step import Prepared, StepFunction, Stepper


class Engine:
    """Prepares the network at the first call that needs it, and keeps what lasts from call to call.

    Args:
        network: The user's network.
        splitter: How batches split into inputs and labels.
        train_step: The Model's, or its subclass's.
        eval_step: The same for evaluation.
    """

    def __init__(
        self, network: nn.Module, splitter: Splitter, train_step: StepFunction, eval_step: StepFunction
    ) -> None:
        self.network = network
        self.splitter = splitter
        self._shapes: Inputs | None = None
        self.running: list[CallbackList] = []
        """The callbacks of the calls under way: evaluate may be called from a callback of fit."""
        self.seed: int | None = None
        self.begun = 0.0
        """When the last run was begun, in seconds since 1970; one that is resumed keeps it. 0: there was none."""
        self.cursor: Cursor | None = None
        """Of the fit under way."""
        self.fits = 0
        """Calls of fit in this process."""
        self.left: tuple[dict[str, Any], int] | None = None
        """The cursor's state at the end of the last fit, or of a checkpoint that was loaded since, and of how many
        ranks it is; the data itself is let go."""
        self._steps = (train_step, eval_step)
        self._overrides_steps = any(map(checks.is_overridden, self._steps))
        self._stepper: Stepper | None = None
        self._label_span: tuple[int, int] | None = None
        self._looked_at: set[bool] = set()
        """Of training (True) and of evaluation, in the call under way: whether a batch was compared with the loss."""
        self._shapes_known = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a Model, pickled or deep, takes no part in the call under way, and leaves the data where it is.
        return {**vars(self), "cursor": None, "left": self._place(), "running": [], "_stepper": None}

    def end_fit(self) -> None:
        """After a fit: what a later save has to know of it is kept."""
        self.left, self.cursor = self._place(), None

    def _place(self) -> tuple[dict[str, Any], int] | None:
        """How far the run has come, and of how many ranks that is told."""
        return self.left if self.cursor is None else (self.cursor.state(), group.get_world_size())

    def move_to(self, position: Mapping[str, Any] | None) -> None:
        """After a load: a later save tells of the run that was loaded, and no longer of the fit before it.

        Within a call nothing changes: a fit under way is where it is, whatever its callbacks load.

        Args:
            position: Of `training_state`; None: weights alone were loaded, which have no place in a run.
        """
        if self.running:
            return
        self.cursor = self.left = None
        if position is not None:
            self.seed = position["seed"]
            if position["cursor"] is not None:
                self.left = position["cursor"], position["world_size"]

    def prepare(self, prepared: Prepared) -> None:
        """Take over what `Model.prepare` was given; the network is wrapped anew at the next call."""
        if self._stepper is not None:
            self._stepper.prepared.replaced = True
        self.prepared = prepared
        self._stepper = None

    def ready(self) -> Stepper:
        """The stepper, with the process group joined and the network on its device."""
        device = setup.start(self.network, self.prepared)
        if self._stepper is None or self._stepper.device != device:
            self._stepper = Stepper(self.network, self.prepared, *self._steps, device, self._looked_at)
        return self._stepper

    @property
    def learning_rate(self) -> float:
        """That of the last training step."""
        return 0.0 if self._stepper is None else self._stepper.learning_rate

    def split(self, batch: Any, needs_labels: bool = True) -> tuple[Inputs, Any]:
        """A batch on the device into inputs and labels; see `Splitter`."""
        inputs, labels = self.splitter(batch, needs_labels)
        if self.prepared.switches.channels_last:
            inputs = self.laid_out(inputs)
        if not self._shapes_known:
            self.remember(inputs)
        return inputs, labels

    def laid_out(self, inputs: Inputs) -> Inputs:
        """Inputs in the layout that was asked for."""
        return map_tensors(_channels_last, inputs) if self.prepared.switches.channels_last else inputs

    def remember(self, inputs: Inputs) -> None:
        """Keep the shapes and dtypes of inputs, for `example`; their values are let go."""
        self._shapes_known = True
        self._shapes = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), inputs)

    def example(self) -> Inputs | None:
        """Zeros like the inputs of the last call's first batch; None before there was one."""
        if self._shapes is None:
            return None
        example: Inputs = map_tensors(lambda tensor: torch.zeros_like(tensor, device="cpu"), self._shapes)
        return example

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        """The prepared loss, with the first batch of a call, of training and of evaluation, looked at more closely.

        Raises:
            ValueError: The labels do not fit the loss.
        """
        objective = self.prepared.objective
        training = torch.is_grad_enabled()
        if training not in self._looked_at:
            is_first = not self._looked_at
            self._looked_at.add(training)
            for loss, output, label in objective.pairs(outputs, labels):
                checks.element_labels(loss, output, label)
                if is_first:
                    # Only for a process that computes a loss.
                    from hapi import scores

                    scores.tell_of_another_form(loss, output)
            if objective.classifies:
                checks.class_labels(labels, outputs)
                if self._label_span is not None:
                    classes = outputs.shape[1 if outputs.dim() > 1 else 0]
                    checks.label_range(*self._label_span, classes)
        loss = checks.explained(objective, objective, outputs, labels)
        # An overridden step computes with it, as with any tensor.
        return loss.value if loss.weight is None and self._overrides_steps else loss

    def look_at_labels(self, feeds: Iterable[Feed | None]) -> tuple[int, int] | None:
        """Before a call: see in labels that lie in memory whether any is ignored, and how far they range.

        Returns:
            Between which numbers all of them lie; None where that is not known, or some are ignored.
        """
        objective = self.prepared.objective
        ignored = objective.ignored_label
        if ignored is None:
            return None
        # An overridden step may leave out labels of its own choice.
        if self._overrides_steps:
            objective.counts = True
            return None
        columns = [feed.labels() if self.splitter.is_default else None for feed in feeds if feed is not None]
        ours = [None if column is None else _span(column, ignored) for column in columns]
        # What one rank has in memory, another may read sample by sample, and all have to count alike.
        ranks = group.gather_objects(ours)
        found = [None if any([other[i] != each for other in ranks]) else each for i, each in enumerate(ours)]
        holes = any([each is None or each[1] for each in found])
        objective.counts = objective.weighs_classes or holes
        spans = [each[0] for each in found if each is not None and each[0] is not None]
        if spans:
            self._label_span = min([low for low, _ in spans]), max([high for _, high in spans])
        return None if holes else self._label_span

    def look_again(self, feeds: Iterable[Feed | None], stepper: Stepper) -> tuple[int, int] | None:
        """As `look_at_labels`, between two windows of this stepper: callbacks may have changed labels since."""
        counted = self.prepared.objective.counts
        span = self.look_at_labels(feeds)
        if self.prepared.objective.counts != counted:
            stepper.forget_form()
        return span

    @contextmanager
    def in_call(self, callbacks: CallbackList) -> Iterator[None]:
        """A call of fit, evaluate or predict, maybe within another: its callbacks are told of an exception.

        What was found out about the labels holds for this call's data alone.
        """
        objective = self.prepared.objective
        outer = self._label_span, objective.counts, self._looked_at.copy()
        self._shapes_known, self._label_span = False, None
        self._looked_at.clear()
        self.running.append(callbacks)
        try:
            yield
        except BaseException as error:
            callbacks.call("on_exception", error)
            raise
        finally:
            self.running.pop()
            self._label_span, objective.counts, looked_at = outer
            # Steppers hold it too.
            self._looked_at.clear()
            self._looked_at |= looked_at

    def training_state(self, counters: dict[str, int]) -> dict[str, Any]:
        """What goes into `path.opt.pt`: one entry for each of `checkpoint.TRAINING_STATES`."""
        prepared, place = self.prepared, self._place()
        return {
            "loss": prepared.objective.learned(),
            "buffers": checkpoint.passing_buffers(self.network),
            "optimizer": _state_of(prepared.optimizer),
            "scheduler": _state_of(prepared.schedule.scheduler if prepared.schedule else None),
            "scaler": prepared.scaler_state or _state_of(prepared.scaler),
            "counters": counters,
            "position": {
                "seed": self.seed,
                "begun": self.begun,
                "run": group.run_name(),
                "world_size": group.get_world_size() if place is None else place[1],
                "threads": torch.get_num_threads(),
                "cursor": None if place is None else place[0],
                "form": None if self._stepper is None else self._stepper.form,
                "fit": self.fits,
                "frozen": [name for name, p in self.network.named_parameters() if not p.requires_grad],
            },
            "callbacks": self.running[0].state_dict() if self.running else {},
        }

    def restore_training(self, state: dict[str, Any]) -> None:
        """Put back what `training_state` gave, counters aside.

        Raises:
            ValueError: The scheduler or the optimizer is another one; then nothing was changed.
        """
        prepared = self.prepared
        before = None
        if prepared.schedule is not None and state["scheduler"] is not None:
            before = prepared.schedule.scheduler.state_dict()
            prepared.schedule.restore(state["scheduler"])
        if prepared.optimizer is not None and state["optimizer"] is not None:
            try:
                load_optimizer(prepared.optimizer, state["optimizer"])
            except ValueError:
                if prepared.schedule is not None and before is not None:
                    prepared.schedule.scheduler.load_state_dict(before)
                raise
        prepared.objective.restore(state["loss"])
        checkpoint.restore_passing_buffers(self.network, state["buffers"])
        if prepared.scaler is not None and state["scaler"]:
            prepared.scaler.load_state_dict(state["scaler"])
        elif prepared.scaler is None:
            prepared.scaler_state = state["scaler"]


def _span(labels: torch.Tensor, ignored: int) -> tuple[tuple[int, int] | None, bool]:
    """Between which numbers labels lie, those to be ignored aside, None if there are none; whether there are such."""
    if not labels.numel():
        return None, False
    low, high = map(int, labels.aminmax())
    if not low <= ignored <= high:
        return (low, high), False
    counted = labels[labels != ignored]
    if not counted.numel():
        return None, True
    low, high = map(int, counted.aminmax())
    return (low, high), len(counted) < len(labels)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _state_of(part: Any) -> dict[str, Any] | None:
    return part.state_dict() if part is not None else None
