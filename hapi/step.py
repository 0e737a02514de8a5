"""One optimizer step: forward, loss, backward, precision, accumulation, clipping, update.

Scaling, in one place. A window is the batches of one optimizer step. The gradient must be that of the mean over its
samples on all ranks, while DDP averages over ranks. Where the window's total is known beforehand, a batch's mean loss
is multiplied by `size * W / total`. Where it is not (the loss knows its own weight), sums are accumulated, their
weights travel with the gradients, in that of `Replica.marks`, and gradients are divided by their sum at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hapi import checks
from hapi.arguments import Switches
from hapi.batch import Inputs, call_network, map_tensors
from hapi.distributed import group
from hapi.distributed.parallel import GradientExchange, Replica
from hapi.objective import Loss, Objective, as_loss
from hapi.outcome import Form, Outcome, divisor, outcome_if_plain, without_rows, zero_of
from hapi.precision import Precision
from hapi.scheduling import Schedule, rate_of

_EXPLAINED = TypeError, ValueError, AttributeError

StepFunction = Callable[[Any, Any], tuple[Any, Any]]
"""`train_step` or `eval_step`: (inputs, labels) -> (loss, outputs)."""


@dataclass
class Prepared:
    """What `Model.prepare` was given, checked."""

    optimizer: torch.optim.Optimizer | None
    objective: Objective
    metrics: list[Any]
    precision: Precision
    schedule: Schedule | None
    clip_grad_norm: float | None
    switches: Switches
    ddp_options: dict[str, Any] | None
    scaler: torch.amp.GradScaler | None = None
    scaler_state: dict[str, Any] | None = None
    """Of a loaded checkpoint, until the scaler is made."""
    replaced: bool = False
    """Whether `prepare` was called again: a call under way goes on with this, but `loss_of` knows the new loss."""


class Stepper:
    """Computes steps of one network: training through the gradient exchange, evaluation on the bare network.

    Args:
        network: The network, on its device.
        prepared: Optimizer, loss and the rest.
        train_step: The user's or the default computation of a training loss.
        eval_step: The same for evaluation.
        device: Where inputs lie.
        looked_at: The kinds of steps, True training, whose first batch in the call under way was looked at closely.
    """

    def __init__(
        self,
        network: nn.Module,
        prepared: Prepared,
        train_step: StepFunction,
        eval_step: StepFunction,
        device: torch.device,
        looked_at: set[bool],
    ) -> None:
        self.network = network
        self.prepared = prepared
        self.device = device
        self.computes = {"train": train_step, "eval": eval_step}
        self._overrides_step = checks.is_overridden(train_step)
        self._world_size = group.get_world_size()
        plain = prepared.precision.dtype is None and prepared.objective.single is not None
        # Of which kinds `_directly` may compute steps.
        self._direct = {kind for kind, step in self.computes.items() if plain and not checks.is_overridden(step)}
        self._looked_at = looked_at
        self._has_graph = False
        self._last_rate: float | torch.Tensor = 0.0
        self._form: Form | None = None
        self._divides = False
        self._weight: torch.Tensor | None = None
        """What this rank's part of the window weighs, where losses tell; in the end, the mean over the ranks."""
        self.window_open = False
        """Whether gradients lie there that no update has taken yet."""
        self.replica = Replica(network, prepared.objective.module, self._compute)
        alone = self._world_size == 1
        self._exchange = None if alone else GradientExchange(self.replica, prepared.ddp_options)
        self._take_parameters()
        if prepared.scaler is None:
            prepared.scaler = prepared.precision.make_scaler(device)
        if prepared.scaler is not None and prepared.scaler_state:
            prepared.scaler.load_state_dict(prepared.scaler_state)
            prepared.scaler_state = None

    def begin(self, form: list[Any] | None) -> None:
        """Called before each fit: how losses weigh is found anew.

        Args:
            form: What `form` gave in the process that a resumed run goes on from, else None.
        """
        self._form = None
        if form is not None and form[2] == self.prepared.objective.counts:
            self._form = Form(*form[:2])
        self._take_parameters()
        self.clear()

    def _take_parameters(self) -> None:
        """See what the network has now; at its making too, for batches that belong to no fit."""
        self._held = self._held_now()
        if self._exchange is not None:
            self._exchange.begin()
        # Walking the modules takes longer than clearing the gradients.
        self._parameters = self.replica.own()
        synced = any(isinstance(module, nn.SyncBatchNorm) for module in self.network.modules())
        self._meets_in_forward = synced and self._world_size > 1
        self._without_samples: Inputs | None = None

    def _held_now(self) -> list[int]:
        """Which parameters the optimizer holds. Their ids are no others' as long as `_parameters` keeps them alive."""
        optimizer = self.prepared.optimizer
        ids: list[int] = []
        for held in () if optimizer is None else optimizer.param_groups:
            ids += map(id, held["params"])
        return ids

    def begin_at(self, learning_rate: float) -> None:
        """Called where a run goes on within an epoch: the rate that its last step was taken with."""
        self._last_rate = learning_rate

    def forget_form(self) -> None:
        """Called before a batch that belongs to no fit: what a fit has found of its losses does not hold for it."""
        self._form = None

    @property
    def form(self) -> list[Any] | None:
        """How losses weigh, as this run has found out, for `begin` after a restart."""
        return None if self._form is None else [*self._form, self.prepared.objective.counts]

    def backward(
        self, inputs: Inputs | None, labels: Any, size: int, window_total: int | None, last: bool
    ) -> Outcome | None:
        """Forward and backward of one batch of a window.

        Args:
            inputs: The network's inputs on the device; None for a rank without samples in this step.
            labels: None, one, or a tuple.
            size: Samples in this batch.
            window_total: Samples of the whole window over all ranks; None if they are not known yet.
            last: Whether the window ends here. Then `update` has to follow, on every rank.

        Returns:
            Loss and outputs, or None for a rank without samples.
        """
        if not self.window_open:
            if self._held_now() != self._held:
                # A callback has added or replaced layers: they are exchanged and cleared with the others from here on.
                self._take_parameters()
                self.sync(parameters=True)
            if self._exchange is not None:
                self._exchange.begin_window()
        if self._meets_in_forward and self._without_samples is None:
            self._agree_on_empty_inputs(inputs)
        outcome = None
        if inputs is None:
            self._pass_without_samples(last, window_total)
        else:
            run = self._compute if self._exchange is None else partial(self._exchange.forward, last)
            value, weight, outcome = run(inputs, labels, size, window_total)
            if self._form is None or isinstance(outcome.weight, torch.Tensor) != self._form.counted:
                self._agree_on_form(outcome, window_total)
            self._backpropagate(value, weight, outcome, size, window_total, last)
        self.window_open = True
        self._divides |= window_total is None or (self._form is not None and self._form.counted)
        if last and self._exchange is not None:
            marks = self._exchange.complete(self._weight)
            if self._divides:
                self._weight = marks[-1]
        return outcome

    def _directly(self, kind: str, inputs: Inputs, labels: Any, size: int) -> tuple[Any, Any] | None:
        """What `Model.train_step` or `eval_step` computes, without thirty calls: 1 us each, of some hundreds.

        Those look closely at a first batch, and serve all forms of losses and other precisions: None where they must.
        """
        objective = self.prepared.objective
        is_known = kind in self._direct and (kind == "train") in self._looked_at and isinstance(labels, torch.Tensor)
        if not is_known or self.prepared.replaced or objective.counts:
            return None
        try:
            outputs = call_network(self.network, inputs)
            # Several outputs are spread.
            loss = objective.single if isinstance(outputs, torch.Tensor) else objective
            return checks.explained(loss, objective, outputs, labels), outputs
        except _EXPLAINED as error:
            self._raise_cause(error, self.computes[kind], size)
            raise

    def _pass_without_samples(self, last: bool, window_total: int | None) -> None:
        assert self._exchange is not None
        if self.prepared.scaler is not None:
            # It makes its scale when it first scales something.
            self.prepared.scaler.scale(torch.zeros((), device=self.device))
        # Each rank's first pass of a window exchanges buffers: all ranks make it, and in this order.
        if not self._meets_in_forward:
            self._exchange.forward(last)
            self._agree_on_form(None, window_total)
            return
        # SyncBatchNorm waits for every rank, forward and backward.
        nothing = self._exchange.forward(last, self._without_samples, None, 0, window_total)
        self._agree_on_form(None, window_total)
        if nothing.requires_grad:
            nothing.backward()

    def _agree_on_empty_inputs(self, inputs: Inputs | None) -> None:
        """Before the first forward of a fit: inputs without samples, for ranks that have had none yet too."""
        own = None if inputs is None else map_tensors(without_rows, inputs)
        ranks = group.gather_objects(own)
        empty = next(entry for entry in ranks if entry is not None)
        self._without_samples = map_tensors(lambda tensor: tensor.to(self.device), empty)

    def _backpropagate(
        self, value: torch.Tensor, weight: torch.Tensor | None, outcome: Outcome, size: int,
        window_total: int | None, last: bool,
    ) -> None:  # fmt: skip
        if self._form is not None and self._form.counted:
            factor = weight_factor = 1 / self._form.scale if weight is not None else 1.0
        elif window_total is not None:
            factor, weight_factor = size * self._world_size / window_total, self._world_size / window_total
        else:
            # A loss that knows its weight is a sum already.
            factor, weight_factor = (1.0 if isinstance(outcome.weight, torch.Tensor) else float(size)), 1.0
        objective = value if factor == 1 else value * factor
        if self.prepared.scaler is not None:
            objective = self.prepared.scaler.scale(objective)
        if weight is not None:
            weight = weight * weight_factor
            self._weight = weight if self._weight is None else self._weight + weight
        if self._exchange is None:
            torch.autograd.backward(objective)
        else:
            self._exchange.backward(objective, last, self._weight)

    def _agree_on_form(self, outcome: Outcome | None, window_total: int | None) -> None:
        """Before the first backward of a fit: whether the loss knows its own weight, and how large that is.

        All ranks have to know it, those without samples too: who divides by the weights must not differ.
        """
        if window_total is None:
            return
        if self._form is None:
            self._form = Form.agreed(outcome)
        if outcome is not None and isinstance(outcome.weight, torch.Tensor) != self._form.counted:
            raise ValueError(
                "The loss gave a mean for some batches and (sum, count) for others, so they cannot be weighed against "
                "each other. Let it return one of the two for every batch."
            )

    def update(self) -> None:
        """One optimizer step on the window's gradients: unscale, divide by weights, clip, step, schedule, clear."""
        prepared = self.prepared
        optimizer, scaler = prepared.optimizer, prepared.scaler
        if optimizer is None:
            raise RuntimeError("hapi's own fault: an update without an optimizer")
        self._last_rate = rate_of(optimizer)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self._divides:
            self._divide_by_weights()
        if prepared.clip_grad_norm is not None:
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(parameters, prepared.clip_grad_norm)
        if scaler is None:
            optimizer.step()
            stepped = True
        else:
            counts_steps = prepared.schedule is not None and prepared.schedule.interval == "step"
            stepped = prepared.precision.step(scaler, optimizer, tell=counts_steps)
        if prepared.schedule is not None and stepped:
            prepared.schedule.after_step()
        self.clear()

    def clear(self) -> None:
        """Drop gradients, those of parameters that no optimizer holds included."""
        for parameter in self._parameters:
            parameter.grad = None
        self._weight, self._divides, self.window_open = None, False, False

    def evaluate(self, inputs: Inputs, labels: Any, size: int) -> Outcome:
        """Loss and outputs of one batch by the bare network, without any collective, gradients turned off before."""
        if (computed := self._directly("eval", inputs, labels, size)) is not None:
            value, outputs = computed
            if (outcome := outcome_if_plain(value, outputs, size)) is not None:
                return outcome
            loss, outputs = checks.loss_and_outputs((as_loss(value), outputs))
            return Outcome.of(loss, size, outputs)
        loss, outputs = self.prepared.precision.run(self.device, self._evaluated, inputs, labels, size)
        return Outcome(None, size, outputs) if loss is None else Outcome.of(loss, size, outputs)

    def _evaluated(self, inputs: Inputs, labels: Any, size: int) -> tuple[Loss | None, Any]:
        value, outputs = checks.loss_and_outputs(self._explained(self.computes["eval"], inputs, labels, size))
        return None if value is None else as_loss(value), outputs

    def predict(self, inputs: Inputs) -> Any:
        """The bare network's outputs."""
        with torch.set_grad_enabled(False):
            return self.prepared.precision.run(self.device, call_network, self.network, inputs)

    @property
    def learning_rate(self) -> float:
        """That of the optimizer's first group in the last step."""
        return float(self._last_rate)

    def end_epoch(self, logs: dict[str, float]) -> None:
        """Called after each epoch and its evaluation: move a scheduler that counts epochs."""
        if self.prepared.schedule is not None:
            self.prepared.schedule.after_epoch(logs)

    def sync(self, parameters: bool) -> None:
        """Give every rank rank 0's buffers, and its parameters too if asked."""
        if self._world_size == 1:
            return
        tensors = [p.data for p in self.replica.own()] if parameters else []
        group.broadcast_tensors([*tensors, *self.replica.buffers()])

    def _compute(self, inputs: Inputs, labels: Any, size: int, window_total: int | None) -> Any:
        """The forward pass of training, inside DDP's: what `_backpropagate` takes; without samples a zero."""
        run = self.prepared.precision.run
        if size == 0 and self._meets_in_forward:
            return zero_of(run(self.device, call_network, self.network, inputs))
        computed = None if window_total is None else self._directly("train", inputs, labels, size)
        if computed is not None:
            value, outputs = computed
            outcome = outcome_if_plain(value, outputs, size)
            if outcome is not None and value.requires_grad:
                return value, None, outcome
            loss, outputs = self._checked((as_loss(value), outputs))
        else:
            loss, outputs = run(self.device, self._trained, inputs, labels, size)
        outcome = Outcome.of(loss, size, outputs)
        if loss.weight is None and window_total is not None:
            return loss.value, None, outcome
        # Alone and with nothing to wait for, a batch's own mean is the window's.
        if loss.weight is not None and self._world_size == 1 and window_total == size:
            return loss.value / divisor(loss.weight), None, outcome
        like = self.replica.marks
        weight = like.new_full((), size) if loss.weight is None else loss.weight.detach().to(like)
        return loss.value, weight, outcome

    def _trained(self, inputs: Inputs, labels: Any, size: int) -> tuple[Loss, Any]:
        returned = self._explained(self.computes["train"], inputs, labels, size)
        if self._overrides_step and not self._has_graph and not self.window_open:
            checks.own_backward(self._parameters)
        return self._checked(returned)

    def _explained(self, step: StepFunction, inputs: Inputs, labels: Any, size: int) -> Any:
        try:
            return step(inputs, labels)
        except _EXPLAINED as error:
            self._raise_cause(error, step, size)
            raise

    def _raise_cause(self, error: Exception, step: StepFunction, size: int) -> None:
        cause = checks.why_step_failed(error, self.network, size, checks.is_overridden(step))
        if cause is not None:
            raise cause from error

    def _checked(self, returned: Any) -> tuple[Loss, Any]:
        """What a step of training returned."""
        value, outputs = checks.loss_and_outputs(returned)
        loss = as_loss(value)
        if torch.is_grad_enabled():
            checks.check_loss_has_graph(loss.value, self.network)
            self._has_graph = True
        return loss, outputs

    def _divide_by_weights(self) -> None:
        if self._weight is None:
            return
        # A window in which nothing counts (all labels ignored) has zero sums: they stay zero.
        weight = divisor(self._weight)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight.to(parameter.grad.device))
