"""Which device this process computes on. No device context is created before it is needed."""

from __future__ import annotations

import torch

_chosen: torch.device | None = None

_ALIASES = {"gpu": "cuda"}


def set_device(name: str | torch.device) -> torch.device:
    """Choose the device of this process for every Model that is used from now on.

    Args:
        name: ``"cpu"``, ``"gpu"`` (or ``"cuda"``), ``"gpu:1"``, ``"mps"``, or another accelerator that torch knows.

    Returns:
        The device.

    Raises:
        ValueError: The name is unknown, or the device is not there.
    """
    global _chosen
    _chosen = parse_device(name)
    return _chosen


def get_device() -> str:
    """The device that a Model would use now, in Paddle's words: ``"cpu"``, ``"gpu:0"``, ``"mps:0"``."""
    device = current_device()
    if device.type == "cpu":
        return "cpu"
    kind = "gpu" if device.type == "cuda" else device.type
    return f"{kind}:{device.index or 0}"


def parse_device(name: str | torch.device) -> torch.device:
    """Turn a name into a device that exists on this machine.

    Raises:
        ValueError: The name is unknown, or the device is not there.
    """
    text = str(name)
    kind, _, index = text.partition(":")
    try:
        device = torch.device(":".join(filter(None, (_ALIASES.get(kind, kind), index))))
    except RuntimeError:
        raise ValueError(
            f'Unknown device {text!r}: torch knows no such kind of device. Write "cpu", "gpu", "gpu:1" or "mps".'
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    count = _device_count(device.type)
    if count == 0:
        raise ValueError(
            f"Device {text!r} was asked for, but this machine (or this build of torch) has no {device.type} device. "
            'Write hapi.set_device("cpu"), or leave the choice to hapi.'
        )
    if (device.index or 0) >= count:
        raise ValueError(
            f"Device {text!r} was asked for, but there are only {count} of this kind, numbered from 0. "
            f'Write "{kind}:{count - 1}" or a smaller number.'
        )
    return device if device.index is not None else torch.device(device.type, _default_index(device.type, count))


def current_device() -> torch.device:
    """The chosen device, else the launcher's card for this process, else torch's current accelerator, else the CPU.

    The current one is the first, unless the script has called ``torch.cuda.set_device``.
    """
    if _chosen is not None:
        return _chosen
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, _default_index(accelerator.type, _device_count(accelerator.type)))


def _default_index(kind: str, count: int) -> int:
    from hapi.distributed.launchers import told

    launch = told()
    if launch is not None:
        return launch.local_rank % count
    module = torch.get_device_module(kind)
    # torch.cuda.set_device initializes; before that it is the first one, and asking would create a context.
    is_initialized = getattr(module, "is_initialized", None)
    return int(module.current_device()) if is_initialized is not None and is_initialized() else 0


def _device_count(kind: str) -> int:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator is not None and accelerator.type == kind else 0
