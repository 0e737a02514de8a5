"""The arguments of Model's methods, checked before anything is started or written, and compared between ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi import kinds
from hapi.distributed import group

_STRATEGIES = ("auto", "ddp")
_NAN_POLICIES = ("stop", "ignore")


class SetBy:
    """An attribute that may be read only; assigning it says what sets it.

    Args:
        cure: What to write instead.
    """

    def __init__(self, cure: str) -> None:
        self._cure = cure

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        try:
            return owner.__dict__[self._name]
        except KeyError:
            raise AttributeError(
                f"{type(owner).__name__}.{self._name} is not there yet, since {kind.__name__}.__init__ did not call "
                "Model's. Write super().__init__(network) in it first."
            ) from None

    def __set__(self, owner: Any, value: Any) -> None:
        raise AttributeError(
            f"{type(owner).__name__}.{self._name} was assigned {value!r:.80}, but the parts that are made of it would "
            f"go on with the former one. {self._cure}"
        )


def refuse_unknown(model: Any, method: str, unknown: Mapping[str, Any]) -> None:
    """Raise if a method of a Model was given keywords that it does not have.

    They arrive in its `**unknown`, which no keyword fits for a type checker. What is around a method would be a further
    frame between a warning and the user's line.

    Raises:
        TypeError: It was; the message names what to write instead.
    """
    if unknown:
        from hapi import elsewhere

        raise elsewhere.keywords(model, method, unknown)


def missing_attribute(model: Any, name: str) -> Any:
    """`Model.__getattr__`: an attribute is not there, or could not be computed."""
    if hasattr(type(model), name):
        # Its own error says more.
        return object.__getattribute__(model, name)
    from hapi import elsewhere

    raise elsewhere.model_attribute(model, name)


def refuse_call(model: Any, *inputs: Any, **named: Any) -> Any:
    """`Model.__call__`: a Model is no module."""
    raise TypeError(
        f"{type(model).__name__} was called like a network, which it is not: it has one. Write model.network(x) for "
        "outputs with a graph, model.predict_batch(x) or model.predict(data) for those of a trained network."
    )


_ENDINGS = (".pth", ".ckpt", ".bin", ".h5", ".hdf5", ".keras", ".pkl", ".pickle", ".pdparams", ".pt2", ".onnx")


def tell_of_ending(path: Any) -> None:
    """Warn where a checkpoint's path ends as its file would elsewhere, and its name is another one here."""
    text = str(path)
    ending = next((ending for ending in _ENDINGS if text.endswith(ending)), None)
    if ending is not None and isinstance(path, str | PathLike):
        name = text.removesuffix(ending)
        program = f"; an inference program is written by export({text!r})" if ending in (".pt2", ".onnx") else ""
        warnings.warn(
            f"save received {text!r}, but a checkpoint is two files, whose endings are added: the weights are in "
            f"{text}.pt, a plain state dict, and what else training needs in {text}.opt.pt. Write save({name!r}) for "
            f"{name}.pt and {name}.opt.pt{program}.",
            stacklevel=4,
        )


@dataclass
class FitOptions:
    """What `Model.fit` was given, data and callbacks aside."""

    batch_size: int | Sequence[int] | None
    global_batch_size: int | None
    epochs: int
    eval_freq: int
    log_freq: int
    save_dir: str | Path | None
    save_freq: int
    verbose: int
    drop_last: bool | None
    shuffle: bool | None
    num_workers: int | None
    accumulate_grad_batches: int
    num_iters: int | None
    resume: bool | str | Path | None
    seed: int | None
    nan_policy: str

    def __post_init__(self) -> None:
        for name in ("epochs", "eval_freq", "log_freq", "save_freq", "accumulate_grad_batches"):
            setattr(self, name, kinds.count(name, getattr(self, name), 1))
        for name in ("num_iters", "global_batch_size"):
            if getattr(self, name) is not None:
                setattr(self, name, kinds.count(name, getattr(self, name), 100))
        if isinstance(self.batch_size, tuple | list):
            self.batch_size = [kinds.count("batch_size", size, 32) for size in self.batch_size]
        elif self.batch_size is not None:
            self.batch_size = kinds.count("batch_size", self.batch_size, 32)
        self.num_workers = check_reading(self.num_workers, self.verbose)
        self._check_switches()
        self._check_names()

    @property
    def train_batch(self) -> int | None:
        """Samples per process and training step; None: not given."""
        return self.batch_size[0] if isinstance(self.batch_size, Sequence) else self.batch_size

    @property
    def eval_batch(self) -> int | None:
        """Samples per process and evaluation step; None: not given."""
        return self.batch_size[1] if isinstance(self.batch_size, Sequence) else self.batch_size

    def alike(self) -> dict[str, Any]:
        """What has to be the same on every rank: not how much is said, how data is loaded, or where rank 0 saves."""
        free = ("log_freq", "verbose", "num_workers", "seed", "save_dir", "resume")
        values = {name: value for name, value in vars(self).items() if name not in free}
        # Folders may have other names on other hosts.
        named = {name: getattr(self, name) for name in ("save_dir", "resume")}
        return values | {name: v if v is None or isinstance(v, bool) else "a path" for name, v in named.items()}

    def _check_switches(self) -> None:
        for name in ("shuffle", "drop_last"):
            if getattr(self, name) is not None:
                check_switch(name, getattr(self, name))
        if self.save_dir is not None and (not isinstance(self.save_dir, str | PathLike) or not str(self.save_dir)):
            raise TypeError(
                f"save_dir received {self.save_dir!r}, which names no folder. "
                'Write save_dir="checkpoints", or leave it out to save nothing.'
            )

    def _check_names(self) -> None:
        if isinstance(self.batch_size, Sequence) and len(self.batch_size) != 2:
            raise ValueError(
                f"batch_size received {self.batch_size!r}, a list of {len(self.batch_size)}, but there are two sizes, "
                "of training and of evaluation. Write batch_size=32 or batch_size=[32, 256]."
            )
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError(
                f"batch_size={self.batch_size!r} (per process) and global_batch_size={self.global_batch_size} (over "
                "all processes) were both given, and only one can decide. Leave one of them out."
            )
        if self.nan_policy not in _NAN_POLICIES:
            raise ValueError(f'nan_policy received {self.nan_policy!r}, which is unknown. Write "stop" or "ignore".')
        if self.seed is not None:
            self.seed = kinds.count("seed", self.seed, 0, None)
        if self.resume == "" or not isinstance(self.resume, bool | str | PathLike | None):
            raise TypeError(
                f"resume received {self.resume!r}, of type {type(self.resume).__name__}, which names no checkpoint. "
                'Write resume=True for the newest in save_dir, or the path of one, resume="checkpoints/3".'
            )
        if self.resume is True and self.save_dir is None:
            raise ValueError(
                "resume=True was given without save_dir, so there is no folder to look for checkpoints in. "
                'Write fit(..., save_dir="checkpoints", resume=True), or resume="checkpoints/3".'
            )


def alike(prepared: Any) -> dict[str, Any]:
    """What of `Model.prepare` has to be the same on every rank, in plain values: each moves its own weights."""
    optimizer, schedule = prepared.optimizer, prepared.schedule
    groups = optimizer.param_groups if optimizer is not None else []
    return {
        # By class: a name may well be the rank's own.
        "metrics": [type(metric).__name__ for metric in prepared.metrics],
        "loss": prepared.objective.described(),
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "scheduler": None if schedule is None else type(schedule.scheduler).__name__,
        "optimizer.param_groups": [
            {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in held.items() if _is_setting(v)}
            for held in groups
        ],
        "amp_configs": prepared.precision.dtype,
        "clip_grad_norm": prepared.clip_grad_norm,
        "sync_batchnorm": prepared.switches.sync_batchnorm,
        "channels_last": prepared.switches.channels_last,
    }


def _is_setting(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def same_call(call: str, values: Mapping[str, Any]) -> None:
    """Called first in each call of fit, evaluate and predict, on every rank: all make the same call.

    Args:
        call: The method's name.
        values: By name, what decides how many steps are taken, what they compute, and where ranks meet. Plain values.

    Raises:
        RuntimeError: Ranks have called different methods.
        ValueError: A value differs.
    """
    ranks = group.gather_objects((call, dict(values)))
    calls = [other for other, _ in ranks]
    if len(set(calls)) > 1:
        places = ", ".join(f"rank {rank} has called {name}" for rank, name in enumerate(calls))
        raise RuntimeError(
            f"The ranks have made different calls: {places}. Each has to be made by all ranks alike. Call fit, "
            "evaluate and predict on every rank, not under a condition that holds on some of them."
        )
    first = ranks[0][1]
    for rank, (_, other) in enumerate(ranks):
        for name in [*first, *(name for name in other if name not in first)]:
            ours, theirs = first.get(name), other.get(name)
            # NaN is the same as NaN here.
            if repr(ours) != repr(theirs):
                raise ValueError(
                    f"{call} was called with {name}={ours!r} on rank 0 and {name}={theirs!r} on rank {rank}, but all "
                    "ranks share one order of samples, one set of weights and the same steps. Give all ranks the same "
                    "value; what only rank 0 is to do belongs into a callback of your own that asks for "
                    "hapi.distributed.get_rank()."
                )


def check_reading(num_workers: Any, verbose: Any) -> int | None:
    """The arguments that fit, evaluate and predict share.

    Returns:
        num_workers as an int.

    Raises:
        TypeError: num_workers is no whole number.
        ValueError: One of them is out of range.
    """
    number = None if num_workers is None else kinds.count("num_workers", num_workers, 2, 0, what="processes")
    if verbose not in (0, 1, 2):
        raise ValueError(
            f"verbose received {verbose!r}, which is no way of reporting. "
            "Write 0 (silent), 1 (a bar) or 2 (a line every log_freq steps)."
        )
    return number


def check_model(network: Any, *steps: Callable[..., Any]) -> None:
    """What Model is made of: a network, and the methods that a subclass may override.

    Raises:
        TypeError: The network is no module, or a method cannot be called with inputs and labels.
    """
    _check_steps(steps)
    for wrapper, inner, cure in (
        ("torch.compile", "_orig_mod", "give the network itself, and write prepare(..., compile=True)"),
        ("DistributedDataParallel or DataParallel", "module", "give the network itself: hapi wraps it where needed"),
    ):
        wrapped = type(network).__name__ in ("OptimizedModule", "DistributedDataParallel", "DataParallel")
        if wrapped and isinstance(getattr(network, inner, None), nn.Module):
            raise TypeError(
                f"Model received a network wrapped by {wrapper}, whose state dict would carry the wrapper's names. "
                f"Unwrap it: {cure}."
            )
    if isinstance(network, nn.Module):
        return
    hint = f"Model({network.__name__}())" if isinstance(network, type) else "Model(nn.Sequential(...))"
    raise TypeError(
        f"Model received {network!r:.100}, of type {type(network).__name__}, which is no torch.nn.Module. Write {hint}."
    )


# Lightning's names, which nothing here would call.
_NEVER_CALLED = {"training_step": "train_step", "validation_step": "eval_step", "test_step": "eval_step"}


def _check_steps(steps: Sequence[Callable[..., Any]]) -> None:
    owner: Any = getattr(steps[0], "__self__", None)
    for name, ours in _NEVER_CALLED.items():
        if hasattr(type(owner), name):
            raise TypeError(
                f"{type(owner).__name__} has a method {name}, which is never called. Write "
                f"def {ours}(self, inputs, labels) and `return loss, outputs`."
            )
    for step in steps:
        signature = inspect.signature(step)
        try:
            signature.bind(None, None)
            # Lightning's parameters, which would be filled with inputs and labels.
            fits = "batch_idx" not in signature.parameters
        except TypeError:
            fits = False
        if not fits:
            raise TypeError(
                f"{step.__qualname__}{signature} cannot be called as it is for each batch, with inputs and labels. "
                f"Write def {step.__name__}(self, inputs, labels) and `return loss, outputs`."
            )


def check_switch(name: str, value: Any) -> None:
    """An argument that is True or False.

    Raises:
        TypeError: It is neither.
    """
    # 0 and 1, and NumPy's, are as good.
    if value not in (True, False):
        raise TypeError(f"{name} received {value!r:.60}, which is neither True nor False. Write {name}=True.")


def check_switches(**switches: Any) -> None:
    """Several of them, by name."""
    for name, value in switches.items():
        check_switch(name, value)


@dataclass(frozen=True)
class Switches:
    """What of `Model.prepare` is on or off."""

    compile: bool
    sync_batchnorm: bool
    channels_last: bool

    def __post_init__(self) -> None:
        check_switches(**vars(self))


def check_prepare(loss: Any, strategy: Any, clip_grad_norm: Any) -> None:
    """The arguments of prepare that no other part checks.

    Raises:
        TypeError: The loss is nothing that can be called, or the norm is no number.
        ValueError: The strategy is unknown, or the norm is not above zero.
    """
    _check_loss(loss)
    if strategy not in _STRATEGIES:
        raise ValueError(f'strategy received {strategy!r}, which is unknown. Write "auto" or "ddp".')
    if clip_grad_norm is not None and (isinstance(clip_grad_norm, bool) or not isinstance(clip_grad_norm, Real)):
        raise TypeError(
            f"clip_grad_norm received {clip_grad_norm!r}, of type {type(clip_grad_norm).__name__}, which is no number. "
            "Write clip_grad_norm=1.0."
        )
    if clip_grad_norm is not None and not float(clip_grad_norm) > 0:
        raise ValueError(
            f"clip_grad_norm received {clip_grad_norm!r}, but a norm to clip at is above 0. Write clip_grad_norm=1.0."
        )


def _check_loss(loss: Any) -> None:
    parts = loss if isinstance(loss, list | tuple) else [loss]
    if not parts:
        raise ValueError(
            f"loss received {loss!r}, which holds no loss. Write loss=nn.CrossEntropyLoss(), or leave it out where the "
            "network's output has a loss of its own."
        )
    for part in parts:
        if isinstance(part, type) and issubclass(part, nn.Module):
            written = f"nn.{part.__name__}" if part.__module__.startswith("torch.") else part.__name__
            raise TypeError(
                f"loss received the class {part.__name__}, which makes losses and is none. Write loss={written}()."
            )
        if isinstance(part, torch.optim.Optimizer):
            raise TypeError(
                f"loss received an optimizer, {type(part).__name__}, which cannot be called on (outputs, labels). The "
                "order is prepare(optimizer, loss, metrics); or write loss=nn.CrossEntropyLoss()."
            )
        if part is not None and not callable(part):
            raise TypeError(
                f"loss received {part!r}, of type {type(part).__name__}, which cannot be called on (outputs, labels). "
                "Write loss=nn.CrossEntropyLoss(), or a function of the two."
            )
