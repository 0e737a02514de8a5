"""What a metric is: states that are updated batch by batch, and how the ranks' states become one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hapi import kinds

State = Tensor | int | float
M = TypeVar("M", bound="Metric")

OPEN = "*"
"""Among the names of a metric: there may be others, which nobody can tell before they come."""

_ONE_NUMBER = "Return a float from compute; several values as a dict, whose keys the property `names` announces."
_REDUCTIONS = ("sum", "max", "min", "cat")


class Metric:
    """A value over all samples of a pass, built up batch by batch. Subclass it for your own.

    A subclass declares what it keeps with `add_state`; each state is then an attribute, set to its default
    at the start of each pass. On several ranks each keeps its own states; at the end of the pass the ranks'
    states are reduced as declared and `compute` is called once on the result.

    Example:
        >>> class ErrorRate(Metric):
        ...     def __init__(self):
        ...         super().__init__(name="error_rate")
        ...         self.add_state("wrong", torch.tensor(0))
        ...         self.add_state("seen", 0)
        ...
        ...     def update(self, outputs, labels):
        ...         self.wrong += outputs.argmax(1).ne(labels).sum()
        ...         self.seen += len(labels)
        ...
        ...     def compute(self):
        ...         return float(self.wrong) / self.seen

    Args:
        name: The key in logs. None: the class's name in snake case.

    Attributes:
        name: The key in logs.
    """

    name: str
    _defaults: dict[str, State]
    _reduce: dict[str, str]
    _device: torch.device
    label_span: tuple[int, int] | None
    """Between which numbers all labels of the pass lie, ignored ones included, where that is known beforehand."""
    joins_batches = False
    """Whether one update with several batches, joined, leaves states of exactly the values that an update with each
    gives, and keeps nothing of what it is given, whose memory is used again."""

    def __new__(cls: type[M], *args: Any, **kwargs: Any) -> M:
        """Set what every metric has, also one that does not call ``super().__init__()``."""
        metric = super().__new__(cls)
        metric.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        metric._defaults, metric._reduce, metric._device = {}, {}, torch.device("cpu")
        metric.label_span = None
        return metric

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            kinds.check(Metric, locals())
            if not name:
                raise ValueError(
                    f"{type(self).__name__} received name='', but the name is its key in the logs. Write "
                    f"name={self.name!r}, or leave it out."
                )
            self.name = name

    @property
    def names(self) -> list[str]:
        """The keys in logs: ``[name]``; to be overridden where `compute` returns a dict, with its keys."""
        return [self.name]

    def add_state(self, name: str, default: State, reduce: str = "sum") -> None:
        """Declare a state: the attribute ``name``, reset to ``default`` at the start of each pass.

        Args:
            name: The attribute's name.
            default: A tensor of any shape, or a Python number, which stays one (counting on the host costs no
                device operation). For ``"cat"`` an empty tensor, whose dtype is that of no data at all.
            reduce: How the ranks' states become one: ``"sum"``, ``"max"``, ``"min"``, or ``"cat"``: the
                attribute is a list, to which tensors of shape (n, ...) are appended; `concatenated` joins
                them.

        Raises:
            ValueError: The name is not a free attribute name, the reduction is unknown, or the default does
                not fit it.
        """
        if not isinstance(name, str) or not name.isidentifier() or hasattr(self, name):
            raise ValueError(
                f"{type(self).__name__}.add_state received the name {name!r}, which is not a free attribute name: "
                "each state becomes an attribute of the metric. Choose another name."
            )
        if reduce not in _REDUCTIONS:
            raise ValueError(
                f"State {name!r} of {type(self).__name__} is to be reduced by {reduce!r}, which is unknown. Write one "
                f"of {', '.join(map(repr, _REDUCTIONS))}."
            )
        if reduce == "cat" and not (isinstance(default, Tensor) and default.numel() == 0):
            raise ValueError(
                f"State {name!r} of {type(self).__name__} is concatenated but starts as {default!r}, which would be "
                "counted once a rank. Write an empty tensor: torch.empty(0)."
            )
        self._defaults[name] = default.detach().clone() if isinstance(default, Tensor) else default
        self._reduce[name] = reduce
        setattr(self, name, self._fresh(name))

    def reset(self) -> None:
        """Set every state to its default."""
        for name in self._defaults:
            setattr(self, name, self._fresh(name))

    def update(self, outputs: Any, labels: Any) -> None:
        """Take in one batch.

        Args:
            outputs: What the network returned: a tensor (N, ...), or a tuple or dict of them.
            labels: The batch's labels: a tensor (N, ...), a tuple of them where there are several, or None.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say how it takes in a batch. Define update(self, outputs, labels)."
        )

    def compute(self) -> float | dict[str, float]:
        """The value over all that was taken in since `reset`; several as a dict with the keys `names`."""
        result = self.result()
        if isinstance(result, Mapping):
            return {name: float(value) for name, value in result.items()}
        return float(result)

    def result(self) -> Tensor | dict[str, Tensor]:
        """What `compute` returns, as 0-dim tensors that nobody has read: no device need be waited for.

        Defining it instead of `compute` is enough, and the other way round.
        """
        if type(self).compute is Metric.compute:
            raise NotImplementedError(
                f"{type(self).__name__} does not say what its value is. Define compute(self), which returns a float."
            )
        computed = self.compute()
        if isinstance(computed, Mapping):
            return {name: _as_value(name, value) for name, value in computed.items()}
        return _as_value(self.name, computed)

    def values(self) -> dict[str, Tensor]:
        """The values as logs hold them: name -> 0-dim tensor. What the trainer calls; nothing to override.

        Raises:
            TypeError: A value is no number.
            ValueError: The keys are not those that `names` announced, or a value is several numbers.
        """
        # Whichever of the two the most derived class defines: a subclass of a built-in metric may override
        # either.
        definer = next(cls for cls in type(self).__mro__ if "result" in vars(cls) or "compute" in vars(cls))
        result = self.result() if "result" in vars(definer) else Metric.result(self)
        values = result if isinstance(result, dict) else {self.names[0]: result}
        if list(values) != self.names:
            raise ValueError(
                f"{type(self).__name__} computed the values {list(values)} but announced {self.names}: callbacks that "
                "monitor a value look for the announced names. Override the property `names` to return the dict's "
                "keys."
            )
        return {name: _as_value(name, value) for name, value in values.items()}

    def to(self: M, device: torch.device | str) -> M:
        """Move the states to a device, in place. float64 becomes float32 where the device has none (MPS).

        Returns:
            The metric itself.
        """
        self._device = torch.device(device)
        for name in self._defaults:
            setattr(self, name, self._placed(getattr(self, name)))
        return self

    def concatenated(self, name: str) -> Tensor:
        """All that was appended to a ``"cat"`` state as one tensor (n, ...); the default if nothing was."""
        pieces: list[Tensor] = getattr(self, name)
        if not pieces:
            default = self._defaults[name]
            assert isinstance(default, Tensor)
            return default.to(self._device)
        if len(pieces) > 1 or pieces[0].ndim == 0:
            # Kept joined, so that asking again does not join everything again.
            pieces[:] = [torch.cat([piece.reshape(-1) if piece.ndim == 0 else piece for piece in pieces])]
        return pieces[0]

    def states(self) -> dict[str, Any]:
        """The states by name, as tensors; those of ``"cat"`` are concatenated."""
        return {
            name: self.concatenated(name) if reduce == "cat" else _as_tensor(getattr(self, name))
            for name, reduce in self._reduce.items()
        }

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Set the states from what `states` returned.

        Raises:
            ValueError: They are those of another metric.
        """
        if set(states) != set(self._defaults):
            raise ValueError(
                f"{type(self).__name__} ({self.name!r}) received the states {sorted(states)}, but keeps "
                f"{sorted(self._defaults)}: they are those of another metric. Pass the metrics that were saved."
            )
        for name, value in states.items():
            setattr(self, name, self._restored(name, value))

    def merge(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Set the states to what they would be had this metric taken in everything that the ranks took in.

        Args:
            ranks: What `states` returned on each rank, in rank order; a rank that took in nothing changes
                nothing.
        """
        self.load_states({name: self._reduced(name, [states[name] for states in ranks]) for name in self._defaults})

    def _reduced(self, name: str, parts: list[Tensor]) -> Tensor:
        reduce = self._reduce[name]
        if reduce == "cat":
            parts = [part for part in parts if part.numel()] or parts[:1]
            return torch.cat(parts)
        total = parts[0]
        for part in parts[1:]:
            if reduce == "sum":
                # Each rank started from the default, which counts once.
                total = total + (part - _as_tensor(self._defaults[name]).to(part.device))
            else:
                total = torch.maximum(total, part) if reduce == "max" else torch.minimum(total, part)
        return total

    def _fresh(self, name: str) -> State | list[Tensor]:
        default = self._defaults[name]
        if self._reduce[name] == "cat":
            return []
        placed = self._placed(default)
        return placed.clone() if isinstance(placed, Tensor) else placed

    def _restored(self, name: str, value: Tensor) -> State | list[Tensor]:
        if self._reduce[name] == "cat":
            return [self._placed(value)] if value.numel() else []
        default = self._defaults[name]
        if not isinstance(default, Tensor):
            # Of a number that began as 0 and was added to as 0.5, too.
            return value.item()
        copied: Tensor = self._placed(value.clone())
        return copied

    def _placed(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._placed(piece) for piece in value]
        if not isinstance(value, Tensor):
            return value
        if self._device.type == "mps" and value.dtype == torch.float64:
            value = value.float()
        return value.to(self._device)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _as_value(name: str, computed: Any) -> Tensor:
    """What a metric has computed, as logs hold it. Nothing is read from the device."""
    try:
        value = torch.as_tensor(computed, dtype=torch.float64 if isinstance(computed, float) else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"The metric {name!r} computed {computed!r:.60}, of type {type(computed).__name__}: logs hold one number "
            f"per name. {_ONE_NUMBER}"
        ) from error
    if value.numel() != 1 or value.is_complex():
        raise ValueError(
            f"The metric {name!r} computed a value of shape {tuple(value.shape)} and dtype {value.dtype}: logs hold "
            f"one number per name. {_ONE_NUMBER}"
        )
    return value.reshape(())


def as_exact(value: Tensor) -> Tensor:
    """The value in float64, or in float32 where the device has no float64 (MPS)."""
    return value.float() if value.device.type == "mps" else value.double()
