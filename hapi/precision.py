"""Automatic mixed precision: what `amp_configs` means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_SCALER_OPTIONS = {
    "init_loss_scaling": "init_scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "growth_interval",
}
_OPTIONS = ("level", "dtype", "use_dynamic_loss_scaling", *_SCALER_OPTIONS)


class Precision:
    """The dtype that forward passes run under, and the loss scaler of fp16.

    Args:
        amp_configs: None, "bf16", "fp16", Paddle's "O0", "O1", "O2" (fp16), or a dict with `level`, `dtype`,
            `use_dynamic_loss_scaling`, `init_loss_scaling`, `incr_ratio`, `decr_ratio`, `incr_every_n_steps`.
            "O2" runs as "O1": torch keeps float32 weights and casts them in each forward.

    Raises:
        ValueError: A name or option is unknown.
        TypeError: It is none of these types.
    """

    def __init__(self, amp_configs: str | dict[str, Any] | None) -> None:
        options = _as_options(amp_configs)
        level = options.pop("level", "O1")
        if level not in ("O0", "O1", "O2"):
            raise ValueError(
                f"amp_configs received the level {level!r}, which is unknown: there are O0 (off), O1 and O2. "
                'Write amp_configs="bf16" or "fp16".'
            )
        dtype = _as_dtype(options.pop("dtype", "float16"))
        self.dtype = None if level == "O0" else dtype
        self._dynamic = options.pop("use_dynamic_loss_scaling", True)
        self._scaler_options = {_SCALER_OPTIONS[name]: _above_zero(name, value) for name, value in options.items()}

    def run(self, device: torch.device, forward: Callable[..., T], *args: Any) -> T:
        """What a forward pass gives, computed in this precision."""
        if self.dtype is None:
            return forward(*args)
        with torch.autocast(device.type, self.dtype):
            return forward(*args)

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """The loss scaler, where the dtype's range needs one: fp16 only."""
        if self.dtype is not torch.float16:
            return None
        options = dict(self._scaler_options)
        if not self._dynamic:
            options["growth_interval"] = 2**31 - 1
        return torch.amp.GradScaler(device.type, **options)

    def step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, tell: bool) -> bool:
        """Take an optimizer step unless gradients have overflowed, and adapt the scale.

        Args:
            scaler: Of `make_scaler`.
            optimizer: Its gradients may be unscaled already.
            tell: Whether the result matters: to know it costs a wait for the device.

        Returns:
            Whether a step was taken; True if nobody asks.
        """
        before = scaler.get_scale() if tell or not self._dynamic else 0.0
        scaler.step(optimizer)
        scaler.update()
        stepped = not tell or scaler.get_scale() >= before
        if not self._dynamic:
            scaler.update(before)
        return stepped


def _as_options(amp_configs: Any) -> dict[str, Any]:
    if amp_configs is None:
        return {"level": "O0"}
    if isinstance(amp_configs, str):
        if amp_configs in ("O0", "O1", "O2"):
            return {"level": amp_configs}
        return {"dtype": amp_configs}
    if isinstance(amp_configs, dict):
        unknown = sorted(set(amp_configs) - set(_OPTIONS))
        if unknown:
            raise ValueError(
                f"amp_configs received the options {unknown}, which are unknown. Known ones: {', '.join(_OPTIONS)}."
            )
        return dict(amp_configs)
    raise TypeError(
        f"amp_configs received {amp_configs!r}, of type {type(amp_configs).__name__}, which names no precision. "
        'Write amp_configs="bf16", "fp16", "O1", or a dict such as {"dtype": "float16", "init_loss_scaling": 1024}.'
    )


def _as_dtype(name: Any) -> torch.dtype:
    if isinstance(name, torch.dtype) and name in _DTYPES.values():
        return name
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise ValueError(
        f"amp_configs received {name!r}, which is unknown: mixed precision computes in bfloat16 or float16. "
        'Write amp_configs="bf16" or amp_configs="fp16".'
    )


def _above_zero(name: str, value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError(
        f"amp_configs received {name}={value!r}, but the loss is scaled by numbers above 0. "
        'Leave it out, or write {"dtype": "float16", "init_loss_scaling": 1024}.'
    )
