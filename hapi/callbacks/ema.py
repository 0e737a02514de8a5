"""The average of the weights over training, beside the weights themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hapi import checkpoint, kinds
from hapi.callbacks.base import Callback, Logs
from hapi.distributed import group

_NARROW = (torch.float16, torch.bfloat16)


class EMA(Callback):
    """Keeps an exponential moving average of the weights, and evaluates with it.

    After each optimizer step, on the device, ``average = decay * average + (1 - decay) * weight``, for every parameter
    that the optimizer holds and for BatchNorm's running mean and variance (InstanceNorm's too); other buffers have no
    average and stay the network's own. Averages of float16 and bfloat16 weights are float32. A step that fp16 skips
    moves nothing (a fused optimizer's counts as one of ``updates``). Each fit starts anew from the weights that it
    finds.

    Training goes on with the weights. The evaluations of a fit use the averages, so that ``val_`` values are theirs. A
    checkpoint holds both: ``path.pt`` the weights, ``path.opt.pt`` the averages, and a resumed fit goes on with them::

        ema = EMA(0.999)
        model.fit(train, val, epochs=5, callbacks=ema, save_dir="checkpoints")
        model.evaluate(test, callbacks=ema)  # with the averages, as predict(..., callbacks=ema)
        model.evaluate(test)  # with the weights
        with ema.applied():
            model.save("averaged")  # its averaged.pt is what inference wants
        ema.load("checkpoints/best_model")  # the averages of a checkpoint

    Args:
        decay: How much of the average stays in each step, between 0 and 1.
        warmup: Start with a smaller decay, ``min(decay, (1 + n) / (10 + n))`` in the n-th step, so that the first
            weights are soon forgotten.
        in_evaluation: Whether the evaluations of a fit use the averages.

    Attributes:
        updates: Optimizer steps that the averages have seen.

    Raises:
        ValueError: ``decay`` is not between 0 and 1.
    """

    # All ranks average, and evaluate with it.
    _on_all_ranks = True

    def __init__(self, decay: float = 0.999, warmup: bool = True, in_evaluation: bool = True) -> None:
        kinds.check(EMA, {"warmup": warmup, "in_evaluation": in_evaluation})
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay < 1:
            raise ValueError(
                f"EMA received decay={decay!r}: it is the part of the average that stays in a step, above 0 and below "
                "1. Write decay=0.999."
            )
        self.decay, self.warmup, self.in_evaluation = decay, warmup, in_evaluation
        self.updates = 0
        self._averages: dict[str, Tensor] = {}
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._held = 0
        self._training = False
        # Evaluations, predictions and `applied` may lie within each other: the outermost puts the averages in.
        self._uses = 0
        self._applied = 0
        self._network: nn.Module | None = None
        self._weights: dict[str, Tensor] = {}
        self._handles: dict[str, Any] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew from the weights."""
        self._leave()
        self.updates, self._averages, self._training = 0, {}, True
        self._refuse_another()
        self._match()
        self._handles["step"] = self.model.optimizer.register_step_post_hook(self._update)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Stop averaging."""
        self._share()
        self._leave()

    def on_exception(self, exc: BaseException) -> None:
        """Stop averaging, and put the weights back; not within `applied`, which does so itself."""
        self._leave(self._applied)

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Put the averages in."""
        if self._training and not self.in_evaluation:
            return
        if self._training:
            self._share()
        self._refuse_another()
        self._apply(self.model.network)
        if "saving" not in self._handles:
            # A save that comes within an evaluation, when a signal ends it, is one of the weights.
            # (torch marks the hook, which a bound method does not allow.)
            hook = partial(self._give_weights)
            self._handles["saving"] = self.model.network.register_state_dict_post_hook(hook)

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """Put the weights back."""
        if self._training and not self.in_evaluation:
            return
        self._restore()

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Put the averages in."""
        self._refuse_another()
        self._apply(self.model.network)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Put the weights back."""
        self._restore()

    @contextmanager
    def _as_evaluated(self) -> Iterator[None]:
        self.on_eval_begin()
        try:
            yield
        finally:
            self.on_eval_end()

    @contextmanager
    def applied(self, model: Any = None) -> Iterator[None]:
        """Within, the network has the averages; afterwards its weights again.

        Args:
            model: The `hapi.Model`; None: that of the last call.

        Raises:
            RuntimeError: There are no averages yet.
            TypeError: It is no `hapi.Model`.
            ValueError: They are of another network.
        """
        owner = self.model if model is None else model
        if owner is not None and not hasattr(owner, "network"):
            raise TypeError(
                f"EMA.applied received {owner!r:.80}, of type {type(owner).__name__}, which is no hapi.Model. Write "
                "ema.applied(hapi.Model(network)), or leave it out after a fit."
            )
        self._apply(None if owner is None else owner.network)
        self._applied += 1
        try:
            yield
        finally:
            self._applied = max(self._applied - 1, 0)
            self._restore()

    def load(self, path: str | os.PathLike[str], number: int = 0) -> None:
        """Take the averages of a checkpoint. Called on every rank.

        Args:
            path: As it was given to `Model.save`: ``"checkpoints/best_model"``.
            number: Which of several such callbacks of that fit, from 0.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            TypeError: An argument is of another kind.
            ValueError: It has no such averages, or it is damaged.
        """
        kinds.check(EMA.load, {"path": path, "number": number})
        kinds.count("number", number, 0, 0, owner="EMA.load", what="callbacks")
        group.barrier()
        _, training = checkpoint.read_pair(os.fspath(path))
        name = type(self).__name__
        states = {} if training is None else training["callbacks"]
        state = states.get(f"{name}.{number}")
        if not state:
            count = sum(key.rpartition(".")[0] == name for key in states)
            raise ValueError(
                f"EMA.load received {os.fspath(path)!r}, whose training state holds no averages of number {number}: "
                f"that fit had {count or 'no'} {name} callback{'s' if count > 1 else ''}. Name a checkpoint of a "
                "fit(..., callbacks=EMA()), and a number below theirs."
            )
        self.updates, self._averages = state["updates"], dict(state["averages"])

    def state_dict(self) -> dict[str, Any]:
        """The averages, and how many steps they have seen."""
        return {"updates": self.updates, "averages": dict(self._averages)} if self._averages else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""
        self.updates = state["updates"]
        live = _tensors(self.model.network)
        _refuse_others(state["averages"], live)
        self._averages = {name: value.to(live[name].device, copy=True) for name, value in state["averages"].items()}
        self._match()

    def _refuse_another(self) -> None:
        """Two would take each other's averages for the weights."""
        others = [each for each in self.params.get("callbacks", ()) if isinstance(each, EMA) and each is not self]
        if any((self.in_evaluation and other.in_evaluation) or not self._training for other in others):
            raise ValueError(
                f"callbacks holds {len(others) + 1} of EMA that are to evaluate, but the network can have the averages "
                "of one at a time. Write EMA(decay, in_evaluation=False) for the others, and evaluate(..., "
                "callbacks=ema) for each."
            )

    @torch.no_grad()
    def _match(self) -> None:
        """See which tensors are averaged now: a callback may have added layers, or given the optimizer more of them."""
        optimizer = self.model.optimizer
        held = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
        live = {
            name: tensor
            for name, tensor in _tensors(self.model.network).items()
            if id(tensor) in held or not isinstance(tensor, nn.Parameter)
        }
        for name, tensor in live.items():
            if name not in self._averages:
                self._averages[name] = tensor.detach().to(_wide(tensor.dtype), copy=True)
        self._held = _count(optimizer)
        self._pairs = [self._averages[name] for name in live], [tensor.detach() for tensor in live.values()]
        self._is_narrow = any(tensor.dtype in _NARROW for tensor in live.values())

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called by the optimizer after each step."""
        if _count(optimizer) != self._held:
            self._match()
        self.updates += 1
        averages, live = self._pairs
        if self._is_narrow:
            live = [tensor.to(average.dtype) for average, tensor in zip(averages, live, strict=True)]
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        # Fused optimizers are called for a skipped step too, and leave it to the device whether they move.
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is None:
            torch._foreach_lerp_(averages, live, 1 - decay)
            return
        moves = torch._foreach_sub(live, averages)
        torch._foreach_mul_(moves, (1 - decay) * (skipped == 0).to(torch.float32))
        torch._foreach_add_(averages, moves)

    def _share(self) -> None:
        """Give every rank rank 0's average of the statistics, which are each rank's own while it trains."""
        parameters = dict(self.model.network.named_parameters())
        group.broadcast_tensors([self._averages[name] for name in self._averages if name not in parameters])

    @torch.no_grad()
    def _apply(self, network: nn.Module | None) -> None:
        if not self._averages or network is None:
            raise RuntimeError(
                "EMA was to put averages into the network, but has none yet. Write model.fit(..., callbacks=ema) "
                'before it, or ema.load("checkpoints/final") and ema.applied(model).'
            )
        if not self._uses:
            live = _tensors(network)
            _refuse_others(self._averages, live)
            targets = [live[name].detach() for name in self._averages]
            self._weights = {name: target.clone() for name, target in zip(self._averages, targets, strict=True)}
            self._network = network
            torch._foreach_copy_(targets, list(self._averages.values()))
        elif network is not self._network:
            raise RuntimeError(
                "EMA was to put averages into a second network, but it holds the weights of a first one, and can do so "
                "for one at a time. Leave ema.applied() or the evaluation of the first before, or write "
                "another = EMA() and another.load(path) for the second."
            )
        # What was refused above is no use that anything would end.
        self._uses += 1

    @torch.no_grad()
    def _restore(self) -> None:
        self._uses = max(self._uses - 1, 0)
        if self._uses or self._network is None:
            return
        live = _tensors(self._network)
        torch._foreach_copy_([live[name].detach() for name in self._weights], list(self._weights.values()))
        self._weights, self._network = {}, None
        self._let_go("saving")

    def _leave(self, uses: int = 0) -> None:
        """Stop averaging; of the uses under way so many stay."""
        if self._uses and not uses:
            self._uses = 1
            self._restore()
        self._uses = self._applied = uses
        self._let_go("step")
        self._training = False

    def _let_go(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.remove()

    def _give_weights(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """A state dict's hook: of each averaged tensor, under all its names, the weight that training goes on with."""
        if self._applied:
            # It is the averages that are to be saved.
            return
        weights = {id(tensor): self._weights.get(name) for name, tensor in _tensors(module).items()}
        named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        for name, tensor in named:
            weight = weights.get(id(tensor))
            if weight is not None and prefix + name in state:
                state[prefix + name] = weight


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """What can be averaged, by name: weights, and the statistics of normalization layers."""
    found: dict[str, Tensor] = {
        name: p for name, p in network.named_parameters() if p.is_floating_point() or p.is_complex()
    }
    for prefix, module in network.named_modules():
        if isinstance(module, _NormBase):
            for leaf in ("running_mean", "running_var"):
                buffer = getattr(module, leaf)
                if buffer is not None:
                    found[f"{prefix}.{leaf}".lstrip(".")] = buffer
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Half precision would round small changes of an average away."""
    return torch.float32 if dtype in _NARROW else dtype


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(entry["params"]) for entry in optimizer.param_groups)


def _refuse_others(averages: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    wrong = [name for name, value in averages.items() if name not in live or live[name].shape != value.shape]
    if wrong:
        raise ValueError(
            f"EMA holds averages of {', '.join(wrong[:5])}, which this network does not have in that shape: they are "
            "of another network. Pass the model that the averages were made with."
        )
