"""torch.compile: which networks are compiled here, and which batches they compute uncompiled.

A compiled network has a kernel for each shape. To make one takes longer than a short batch, of which a pass has one,
is worth: that one is computed uncompiled. What decides is how the pass cuts its data, which is known before its first
batch, and never what was compiled before: a resumed run computes the bits of one that was not ended.

Imported with the first network that is compiled, not by `import hapi`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from torch import nn

if TYPE_CHECKING:
    from hapi.data import Feed, Piece

F = TypeVar("F", bound=Callable[..., Any])

# Not those that the user has compiled.
_compiled_here: WeakSet[nn.Module] = WeakSet()


def set_up(network: nn.Module, wanted: bool) -> None:
    """Compile a network, or undo it; one that the user has compiled is left as it is."""
    if not wanted and network in _compiled_here:
        network._compiled_call_impl = None
        _compiled_here.discard(network)
    elif wanted and network._compiled_call_impl is None:
        # In place, so that the names of the state dict stay. One static kernel for each shape: a kernel for any shape
        # would depend on which shapes came first, and a resumed run would compute other bits.
        network.compile(dynamic=False)
        _compiled_here.add(network)


class ByPiece:
    """Chooses how pieces are computed: those that are cut as usual by the compiled network, others uncompiled.

    Args:
        network: Which was compiled here.
        is_usual: Of a piece; see `Feed.is_usual`.
    """

    def __init__(self, network: nn.Module, is_usual: Callable[[Piece], bool]) -> None:
        self._network = network
        self._is_usual = is_usual

    def __call__(self, piece: Piece, compute: F) -> F:
        """The computation itself, or one that does the same uncompiled."""
        return compute if self._is_usual(piece) else cast(F, partial(self._uncompiled, compute))

    def _uncompiled(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        # Of the network alone: what else the user has compiled, a loss or a layer, is called as the user wants it.
        compiled, self._network._compiled_call_impl = self._network._compiled_call_impl, None
        try:
            return compute(*arguments)
        finally:
            self._network._compiled_call_impl = compiled


def by_piece(network: nn.Module, feed: Feed) -> ByPiece | None:
    """How the pieces of a feed are computed; None: all of them alike.

    That is where the network is not compiled, or by the user, whose choice it is for which shapes, and where nothing
    is known of the batches beforehand.
    """
    return None if network not in _compiled_here or feed.is_usual is None else ByPiece(network, feed.is_usual)
