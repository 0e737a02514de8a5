"""The norm of the gradient among the values that are logged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hapi import kinds
from hapi.callbacks import tracking
from hapi.callbacks.base import Callback, Logs


class GradientNorm(Callback):
    """Adds the norm of the gradient to the logs of training steps, where bars, lines and TensorBoard show it.

    It is the 2-norm over all parameters that the optimizer holds, of the gradient that an optimizer step gets: over all
    processes and accumulated batches, unscaled under fp16, before clipping. Steps that fp16 skips have none; with a
    fused optimizer theirs is infinite or NaN. It is computed on the device for every ``log_freq``-th step alone, and
    nothing is read: whoever shows it does that. (With ``clip_grad_norm`` it is computed in each step anyway; clipping
    is then done here, to the same bits.) Between two optimizer steps it is that of the last one.

    Args:
        log_freq: Steps from one value to the next. None: fit's.
        name: The key in the logs.

    Raises:
        ValueError: ``log_freq`` is below 1; when a fit begins: the logs have a value of that name.
    """

    def __init__(self, log_freq: int | None = None, name: str = "grad_norm") -> None:
        kinds.check(GradientNorm, {"name": name})
        tracking.check_log_freq("GradientNorm", log_freq)
        self.log_freq, self.name = log_freq, name
        self._step = 0
        self._norm: Tensor | None = None
        self._handle: Any = None
        self._prepared: Any = None
        self._largest: float | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Come between the backward pass and clipping."""
        self._leave()
        others = [
            one.name for one in self.params.get("callbacks", ()) if isinstance(one, type(self)) and one is not self
        ]
        if self.name in others or self.name in self.params.get("metrics", ()):
            raise ValueError(
                f"GradientNorm received name={self.name!r}, under which the logs hold another value: one would hide "
                'the other. Write name="grad_norm", or another name that is free.'
            )
        self._norm = None
        optimizer, self._prepared = self.model.optimizer, self.model._engine.prepared
        self._largest, self._prepared.clip_grad_norm = self._prepared.clip_grad_norm, None
        self._handle = optimizer.register_step_pre_hook(self._measure)
        # Before the script's own hooks, which are called after clipping.
        optimizer._optimizer_step_pre_hooks.move_to_end(self._handle.id, last=False)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Leave clipping as it was."""
        self._leave()

    def on_exception(self, exc: BaseException) -> None:
        """Leave clipping as it was."""
        self._leave()

    def on_train_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Note which step it is."""
        self._step = step

    def batch_values(self, step: int) -> Logs:
        """See `Callback.batch_values`."""
        if self._norm is None or (step + 1) % self._frequency():
            return {}
        return {self.name: self._norm}

    def _measure(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called by the optimizer before each step."""
        if self._largest is None and not self._is_shown():
            return
        parameters = [p for entry in optimizer.param_groups for p in entry["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._largest is not None:
            self._norm = nn.utils.get_total_norm(gradients)
            nn.utils.clip_grads_with_norm_(parameters, self._largest, self._norm)
        else:
            self._norm = nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])

    def _is_shown(self) -> bool:
        """Whether a value is due before the next optimizer step."""
        done, frequency = self._step + 1, self._frequency()
        until = done + (self.params.get("accumulate_grad_batches") or 1) - 1
        return until // frequency > (done - 1) // frequency

    def _frequency(self) -> int:
        return self.log_freq or self.params.get("log_freq") or 10

    def _leave(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            # Of several the first does the clipping, and gives it back.
            if self._largest is not None:
                self._prepared.clip_grad_norm = self._largest
        self._handle = None
