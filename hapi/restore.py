"""Giving tensors and other things their values of before again, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hapi.distributed import contents


def in_full(calls: Iterable[Callable[[], Any]]) -> None:
    """Make all calls, whatever one of them raises; the first error goes on afterwards."""
    failed: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:  # Ctrl-C, too: a model that is half put back is of no use.
            failed.append(error)
    if failed:
        raise failed[0]


def put_back(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor its value again. Memory that has it already is not written to: it may be a read-only map."""
    now = tensor.detach()
    if type(now) is Tensor and now.layout is torch.strided and not (now.is_nested or now.is_quantized):
        # What expand() has made lies in memory once, and torch writes there by a view of one entry alone.
        now, value = contents.lying_once(now), contents.lying_once(value, like=now)
        # Of bytes NaN and the sign of zero have their own.
        if now.is_meta or torch.equal(contents.raw(now.cpu()), contents.raw(value.cpu())):
            return
    now.copy_(value)
