"""What a tensor holds, as bytes in memory: backends know few dtypes, and nothing is computed on the way."""

from __future__ import annotations

from contextlib import nullcontext

import torch


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is numbers in memory that may be written: not sparse, quantised, nested, or of inference mode."""
    return not (tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_inference())


def lying_once(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """What of a tensor lies in memory: of a dimension that `expand` has made, one entry stands for all.

    Args:
        tensor: The tensor.
        like: One of the same shape, whose memory decides; None: its own.
    """
    laid_out = tensor if like is None else like
    for dimension in reversed(range(laid_out.dim())):
        if laid_out.shape[dimension] > 1 and laid_out.stride(dimension) == 0:
            tensor = tensor.select(dimension, 0)
    return tensor


def lies_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether its `raw` is its own memory."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor's bytes. A view as conjugate or negative has none of its own."""
    # The dimension that is added leaves a step of one behind, also where a single number has another.
    return tensor.resolve_conj().resolve_neg().contiguous().unsqueeze(-1).flatten().view(torch.uint8)


def write_raw(tensor: torch.Tensor, piece: torch.Tensor) -> None:
    """Fill a plain tensor from bytes."""
    # A clone starts where any dtype may start.
    tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is not plain, as it can be pickled."""
    return (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).cpu()


def write_whole(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Fill a tensor that is not plain from such a one; how many entries they have may differ."""
    with torch.inference_mode() if tensor.is_inference() else nullcontext():
        other = other.to(tensor.device)
        if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            tensor.resize_as_sparse_(other)
        tensor.copy_(other)
