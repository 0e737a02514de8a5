"""Copies of batches to a card, beside what it computes. Imported where the network computes on one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from hapi.batch import map_tensors


class SideStream:
    """Copies batches on a CUDA stream of its own: the next one goes to the card while the card computes a step.

    The host is ahead of the card, which works off what it was told in turn. On the stream that computes, a copy would
    wait for the steps before it. Its price is memory: the card gives a batch's place away again once it has computed
    with it, so that as many batches lie there as the host is ahead.

    Args:
        device: The card.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def move(self, batch: Any, floats: torch.dtype | None) -> Any:
        """As `hapi.batch.move`; what the card is told from now on comes after the copies."""
        stream, computing = _stream_of(self._device), torch.cuda.current_stream(self._device)
        copied: list[torch.Tensor] = []

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            # What lies on a card may be computed there still, in the order of the stream that computes. Of the rare
            # kinds torch cannot be told who uses their memory.
            is_usual = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
            if tensor.device.type != "cpu" or not is_usual:
                return tensor.to(self._device, non_blocking=is_usual and tensor.is_pinned())
            with torch.cuda.stream(stream):
                copied.append(tensor.to(self._device, non_blocking=tensor.is_pinned()))
            return copied[-1]

        moved = map_tensors(copy, batch, floats)
        if copied:
            computing.wait_stream(stream)
        for tensor in copied:
            # Their memory is the side stream's, which would use it anew as soon as Python has let go of them.
            tensor.record_stream(computing)
        return moved


@lru_cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all data that this process reads: torch keeps what was freed for the stream that it was made on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
