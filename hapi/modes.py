"""Train and eval modes of modules, set for a while and given back; and whether compiled ones compute as such."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from hapi.compiling import ByPiece
    from hapi.data import Feed


@contextmanager
def training(network: nn.Module) -> Iterator[None]:
    """Train mode. Layers that the user froze with `.eval()` inside a network in train mode stay frozen.

    A network that comes in eval mode as a whole is trained as a whole, and is in eval mode again afterwards.
    """
    if network.training:
        yield
        return
    before = _modes(network)
    network.train()
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Eval mode for every layer; afterwards each has the mode that it had."""
    before = _modes(network)
    network.eval()
    try:
        yield
    finally:
        _restore(before)


def by_piece(network: nn.Module, feed: Feed) -> ByPiece | None:
    """Asked once a pass, how its pieces are computed: see `hapi.compiling.by_piece`."""
    if network._compiled_call_impl is None:
        return None
    # Only for a process that compiles.
    from hapi import compiling

    return compiling.by_piece(network, feed)


def _modes(network: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(module, module.training) for module in network.modules()]


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, mode in modes:
        module.training = mode
