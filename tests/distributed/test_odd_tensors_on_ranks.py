"""Networks that hold more than dense numbers of common types: each trains on ranks as in one process.

What a network holds beside its layers differs between the ranks at first: after it all have rank 0's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from ranks import alone, same
from torch import Tensor, nn

import hapi
from hapi.distributed import group

HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda v: v,
    "sparse": lambda v: v.tril(-group.get_rank()).to_sparse(),  # other entries, and not as many
    "not coalesced": lambda v: torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [0, 0, 2]]), v[0], (3, 3)),
    "csr": lambda v: v.tril(-group.get_rank()).to_sparse_csr(),
    "csc": lambda v: v.tril(-group.get_rank()).to_sparse_csc(),
    "rows expanded": lambda v: v[:1].expand(3, 3),
    "columns expanded": lambda v: v[:, :1].expand(3, 3),
    "a number expanded": lambda v: v[1, 1].expand(3, 3),
    "all expanded": lambda v: v[:1, :1].expand(3, 3),
    "windows": lambda v: v.flatten()[:5].unfold(0, 3, 1),
    "a column": lambda v: v[:, 1],
    "a number of a column": lambda v: v[:1, 1],
    "conjugate": lambda v: (v + 1j).conj(),
    "negative": lambda v: (v * 1j).conj().imag,
    "quantised": lambda v: torch.quantize_per_tensor(v, 0.5, 0, torch.qint8),
    "nested": lambda v: torch.nested.nested_tensor([v[0], v[1, :2]]),
    "none": lambda v: v[:0, :1].expand(0, 3),
    **{str(dtype): lambda v, dtype=dtype: v.to(dtype) for dtype in (
        torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    )},
}  # fmt: skip
FROZEN = ["plain", "rows expanded", "columns expanded", "conjugate", *(kind for kind in HELD if "torch." in kind)]


class Holding(nn.Module):
    """x: (N, 3) -> (N, 3), with a tensor of such a kind beside its layer."""

    def __init__(self, kind: str, frozen: bool, inference: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        with torch.inference_mode(inference):
            held = HELD[kind](torch.arange(1.0, 10).reshape(3, 3) * (1 + group.get_rank()))
        if frozen:
            self.held = nn.Parameter(held, requires_grad=False)
        else:
            self.register_buffer("held", held)

    def numbers(self) -> Tensor:
        """Of what is held, in plain memory."""
        held = self.held.detach().clone()
        if held.is_nested:
            return torch.cat([part.flatten() for part in held.unbind()])
        held = held.dequantize() if held.is_quantized else held.to_dense()
        held = held.resolve_conj()
        return held.real.float() + 2 * (held.imag if held.is_complex() else 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.1 * self.numbers().sum()


def fit_holding(kind: str, frozen: bool = False, inference: bool = False) -> tuple[list[float], list[float]]:
    """Losses, and what is held in the end with the layer's weights."""
    warnings.simplefilter("ignore")  # of CSR tensors and quantised ones that they may change
    net = Holding(kind, frozen, inference)
    x = torch.randn(13, 3, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(net.layer.parameters(), lr=0.1)
    model = hapi.Model(net).prepare(optimizer, nn.MSELoss())
    losses = model.fit((x, x.cumsum(1)), global_batch_size=4, epochs=2, verbose=0).history["loss"]
    warnings.simplefilter("error")
    return losses, [*net.numbers().flatten().tolist(), *net.layer.weight.flatten().tolist()]


def check(ranks, *arguments) -> None:
    with warnings.catch_warnings():
        wanted = alone(fit_holding, *arguments)
    losses, numbers = same(ranks(2).run(fit_holding, *arguments))
    assert losses == pytest.approx(wanted[0], rel=1e-5)
    assert numbers == pytest.approx(wanted[1], rel=1e-5, abs=1e-6)


def few(kinds, quick) -> list:
    """In `make test` some of each sort."""
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@pytest.mark.parametrize("kind", few(HELD, ("sparse", "csr", "columns expanded", "quantised", "torch.int16")))
def test_buffers_of_all_kinds_are_those_of_the_first_rank(ranks, kind):
    check(ranks, kind)


@pytest.mark.parametrize("kind", few(FROZEN, ("rows expanded", "torch.int16", "torch.float8_e4m3fn")))
def test_frozen_parameters_of_all_kinds_are_those_of_the_first_rank(ranks, kind):
    check(ranks, kind, True)


def test_a_buffer_that_was_made_in_inference_mode(ranks):
    check(ranks, "plain", False, True)


class Words(nn.Module):
    """Numbers of words: (N,) -> (N, 1). The embedding's weight has a second use, in one way or another."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        if use == "held before":
            self.other = nn.Linear(4, 7, bias=False)
        self.words = nn.Embedding(7, 4, sparse=True)
        if use in ("held after", "for some words"):
            self.other = nn.Linear(4, 7, bias=False)
        if use in ("held after", "for some words", "held before"):
            self.other.weight = self.words.weight
        self.last = nn.Linear(7, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        own = self.words(numbers)
        once, twice = nn.functional.pad(own, (0, 3)), self.use != "none"
        if self.use == "for some words":
            # Of few batches: on the other ranks, and in other steps, the gradient has rows only.
            chosen = (numbers == 6)[:, None]
            twice = bool(chosen.any())
            return self.last(torch.where(chosen, own @ self.words.weight.T, once) if twice else once)
        return self.last(own @ self.words.weight.T if twice else once)


def fit_words(use: str, accumulate: int) -> tuple[list[float], list[float], bool]:
    """Losses, weights, and whether the last gradient had rows only."""
    net, kinds = Words(use), []
    numbers = torch.arange(13) % 7
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    optimizer.register_step_pre_hook(lambda *_: kinds.append(net.words.weight.grad.is_sparse))
    model = hapi.Model(net).prepare(optimizer, nn.MSELoss())
    for _ in range(2):
        losses = model.fit(
            (numbers, numbers[:, None] * 0.3), global_batch_size=4, epochs=2, shuffle=False, verbose=0,
            accumulate_grad_batches=accumulate,
        ).history["loss"]  # fmt: skip
    return losses, [float(value) for p in net.parameters() for value in p.detach().flatten()], any(kinds)


@pytest.mark.parametrize("accumulate", few((1, 2), (2,)))
@pytest.mark.parametrize("use", ["none", "held before", "held after", "for some words"])
def test_a_sparse_embedding_whose_weight_has_another_use(ranks, use, accumulate):
    wanted = alone(fit_words, use, accumulate)
    losses, weights, sparse = same(ranks(2).run(fit_words, use, accumulate))
    assert losses == pytest.approx(wanted[0], rel=1e-4)
    assert weights == pytest.approx(wanted[1], rel=1e-4, abs=1e-5)
    if "some" not in use:
        assert sparse == wanted[2] == (use == "none")
