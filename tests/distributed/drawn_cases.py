"""One drawn case: data of some kind, trained on, evaluated and predicted by W processes; and what must come out.

Every sample carries its number, and the network notes which numbers it sees in which step. From these notes a plain
torch loop computes losses and weights anew: it knows nothing of ranks, and takes the mean over the union of all ranks'
samples of a step.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import hapi
from hapi.distributed import group

MAP_STYLE = ("columns", "arrays", "dict", "tensor dataset", "dataset", "subset", "subset of dataset", "workers")
"""Data whose order hapi decides: the same samples per step at any world size."""
LOADERS = (
    "loader", "loader shuffle", "loader generator", "loader sampler", "loader batch sampler", "loader subset random",
    "loader weighted", "loader unbatched", "loader of batches", "loader collate", "loader workers", "batches",
    "reshuffled batches",
)  # fmt: skip
"""Data with batches of its own: step s takes batches sW ... sW+W-1."""
STREAMS = (
    "iterable", "iterable shuffled", "iterable loader", "iterable workers", "iterable shuffled workers",
    "iterable sharding workers", "iterable sharding ranks",
    "loader distributed",
)  # fmt: skip
"""Data without indices, or whose order is every rank's own."""
KINDS = (*MAP_STYLE, *LOADERS, *STREAMS)
SLOW_KINDS = tuple(kind for kind in KINDS if "workers" in kind)
LOSSES = ("ce", "ce weight", "ce ignore", "ce smooth", "mse", "pair", "bce")

CLASSES = 3
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.25])


@dataclass(frozen=True)
class Case:
    """What is trained on what, and how."""

    number: int
    world: int
    samples: int
    kind: str
    loss: str
    batch: int
    """Of a process (of a loader, where there is one); the whole step's, if `divided`."""
    divided: bool
    accumulate: int
    drop_last: bool
    shuffle: bool
    epochs: int
    num_iters: int | None
    clip: float | None
    workers: int

    @property
    def global_batch(self) -> int:
        return self.batch if self.divided else self.batch * self.world


def draw(seed: int, number: int, world: int | None = None) -> Case:
    """The case of this number; kinds and world sizes come in turn, edges more often than by chance."""
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    world = world or (2, 3, 4, 2)[number // len(KINDS) % 4]
    if kind in SLOW_KINDS and rng.random() < 0.6:
        kind = rng.choice([kind for kind in KINDS if kind not in SLOW_KINDS])
    samples = rng.choice((rng.randint(1, 5), rng.randint(1, 40), rng.randint(1, 40)))
    divided = kind in MAP_STYLE and rng.random() < 0.5
    batch = rng.randint(1, 14 if divided else 7)
    workers = rng.choice((1, 2)) if kind in SLOW_KINDS else 0
    # What shards itself is read in so many parts, and drop_last leaves out the end of each.
    parts = world * max(1, workers) if kind in STREAMS else world if kind in MAP_STYLE and not divided else 1
    return Case(
        number=number,
        world=world,
        samples=samples,
        kind=kind,
        loss=rng.choice(LOSSES),
        batch=batch,
        divided=divided,
        accumulate=rng.choice((1, 1, 2, 3)),
        drop_last=rng.random() < 0.25 and samples >= 2 * batch * parts,
        shuffle=rng.random() < 0.7,
        epochs=rng.choice((1, 2)),
        num_iters=rng.choice((None, None, rng.randint(1, 8))),
        clip=rng.choice((None, None, 0.1)),
        workers=workers,
    )


@dataclass
class Notes(hapi.callbacks.Callback):
    """Which samples this rank has seen, by phase, epoch and step."""

    seen: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    start: list[Tensor] = field(default_factory=list)
    """The weights before training."""
    _epoch: int = 0
    _now: tuple[str, int, int] = ("", 0, 0)

    def on_train_begin(self, logs=None):
        self.start = [parameter.detach().clone() for parameter in self.model.network.parameters()]

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, step, logs=None):
        self._now = ("train", self._epoch, step)

    def on_eval_batch_begin(self, step, logs=None):
        self._now = ("eval", 0, step)

    def on_predict_batch_begin(self, step, logs=None):
        self._now = ("predict", 0, step)

    def take(self, numbers: Tensor) -> None:
        assert self._now not in self.seen, f"two batches in step {self._now}"
        self.seen[self._now] = [int(number) for number in numbers]


class Net(nn.Module):
    """Two layers on the features of (number, features...)."""

    def __init__(self, outputs: int, notes: Notes | None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        if self.notes is not None:
            self.notes.take(x[:, 0])
        return self.body(x[:, 1:])


def data_of(case: Case) -> tuple[Tensor, Tensor]:
    """Numbers and features (n, 4), and labels."""
    generator = torch.Generator().manual_seed(case.number)
    numbers = torch.arange(case.samples, dtype=torch.float32)[:, None]
    x = torch.cat([numbers, torch.randn(case.samples, 3, generator=generator)], 1)
    if case.loss in ("mse", "pair"):
        return x, torch.randn(case.samples, 2, generator=generator)
    if case.loss == "bce":
        return x, torch.randint(2, (case.samples, 2), generator=generator).float()
    y = torch.randint(CLASSES, (case.samples,), generator=generator)
    if case.loss == "ce ignore":
        y[torch.rand(case.samples, generator=generator) < 0.4] = -100
    return x, y


def pair(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that knows its own weight: squared errors where the label is positive."""
    mask = labels > 0
    return ((outputs - labels).square() * mask).sum(), mask.sum()


def loss_of(name: str) -> Any:
    return {
        "ce": nn.CrossEntropyLoss(),
        "ce weight": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone()),
        "ce ignore": nn.CrossEntropyLoss(),
        "ce smooth": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone(), label_smoothing=0.1),
        "mse": nn.MSELoss(),
        "pair": pair,
        "bce": nn.BCEWithLogitsLoss(),
    }[name]


def sum_and_weight(name: str, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The same loss for the plain loop: what is summed up, and what the sum is divided by."""
    if name == "mse":
        return (outputs - y).square().mean(1).sum(), torch.tensor(float(len(y)))
    if name == "bce":
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="sum") / 2, torch.tensor(float(len(y)))
    if name == "pair":
        return pair(outputs, y)
    smoothing = 0.1 if name == "ce smooth" else 0.0
    if name in ("ce weight", "ce smooth"):
        weights = CLASS_WEIGHTS
        total = F.cross_entropy(outputs, y, weight=weights, reduction="sum", label_smoothing=smoothing)
        return total, weights[y].sum()
    return F.cross_entropy(outputs, y, reduction="sum"), (y != -100).sum().float()


class Rows(Dataset[Any]):
    """A map-style data set that is read sample by sample."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        assert isinstance(index, int) and 0 <= index < len(self.x)
        return self.x[index], self.y[index]


class Slices(Rows):
    """A data set that is asked for whole batches: lists of indices, or one."""

    def __getitem__(self, index: Any) -> Any:
        rows = torch.tensor([index] if isinstance(index, int) else index)
        return self.x[rows], self.y[rows]


class Backwards(Sampler[int]):
    """A sampler with a constructor of its own."""

    def __init__(self, first: int, *, last: int) -> None:
        self.first, self.last = first, last

    def __len__(self) -> int:
        return self.first - self.last + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last - 1, -1))


class Buckets(Sampler[list[int]]):
    """A batch sampler with a constructor of its own, and batches of unequal size."""

    def __init__(self, *, length: int, boundaries: list[int]) -> None:
        self.boundaries = [0, *boundaries, length]

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def __iter__(self) -> Iterator[list[int]]:
        for first, last in zip(self.boundaries, self.boundaries[1:], strict=False):
            yield list(range(first, last))


class Reshuffled:
    """Batches in an order of their own, drawn from the global generators: at once, or one by one on the way."""

    def __init__(self, batches: list[Any], at_once: bool) -> None:
        self.batches, self.at_once = batches, at_once

    def __iter__(self) -> Iterator[Any]:
        if self.at_once:
            return iter([self.batches[index] for index in torch.randperm(len(self.batches))])
        return self.one_by_one()

    def one_by_one(self) -> Iterator[Any]:
        remaining = list(self.batches)
        while remaining:
            yield remaining.pop(random.randrange(len(remaining)))


class Stream(IterableDataset[Any]):
    """Knows nothing of ranks and workers."""

    def __init__(self, x: Tensor, y: Tensor, shuffled: bool = False) -> None:
        self.rows = Rows(x, y)
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for index in range(len(self.rows)):
            waiting.append(self.rows[index])
            # A shuffle buffer, which draws all along.
            if not self.shuffled or len(waiting) > 3:
                yield waiting.pop(random.randrange(len(waiting)) if self.shuffled else 0)
        while waiting:
            yield waiting.pop(random.randrange(len(waiting)))


class WorkerShards(Stream):
    """Takes its own share by worker, as torch's documentation shows."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info is not None else (0, 1)
        return (self.rows[index] for index in range(part, len(self.rows), parts))


class RankShards(Stream):
    """Takes its own share by rank, and says so; shares are of very unequal length."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.rank, self.num_replicas = group.get_rank(), group.get_world_size()

    def __iter__(self) -> Iterator[Any]:
        length = len(self.rows)
        cuts = [0, *(length * (rank + 1) // (self.num_replicas**2) for rank in range(self.num_replicas - 1)), length]
        return (self.rows[index] for index in range(cuts[self.rank], cuts[self.rank + 1]))


def shorter(items: list[Any]) -> Any:
    """A collate function that leaves samples out."""
    return default_collate(items[: max(1, len(items) - 1)])


def make_data(case: Case) -> Any:
    x, y = data_of(case)
    rows, tensors = Rows(x, y), TensorDataset(x, y)
    keep = {"batch_size": case.batch, "drop_last": case.drop_last}
    boundaries = sorted(random.Random(case.number).sample(range(1, len(x)), min(len(x) - 1, 4)))
    buckets = Buckets(length=len(x), boundaries=boundaries)
    batches = [(x[rows], y[rows]) for rows in buckets]
    makers = {
        "columns": lambda: (x, y),
        "arrays": lambda: (x.numpy(), y.numpy()),
        "dict": lambda: {"x": x, "y": y},
        "tensor dataset": lambda: tensors,
        "dataset": lambda: rows,
        "subset": lambda: Subset(tensors, chosen(case)),
        "subset of dataset": lambda: Subset(rows, chosen(case)),
        "workers": lambda: rows,
        "loader": lambda: DataLoader(tensors, **keep),
        "loader shuffle": lambda: DataLoader(rows, shuffle=True, **keep),
        "loader generator": lambda: DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(5), **keep),
        "loader sampler": lambda: DataLoader(rows, sampler=Backwards(len(x) - 1, last=0), **keep),
        "loader batch sampler": lambda: DataLoader(rows, batch_sampler=buckets),
        "loader subset random": lambda: DataLoader(rows, sampler=SubsetRandomSampler(chosen(case)), **keep),
        "loader weighted": lambda: DataLoader(
            rows, sampler=WeightedRandomSampler([1.0 + n % 3 for n in range(len(x))], len(x)), **keep
        ),
        "loader unbatched": lambda: DataLoader(Slices(x, y), batch_size=None, shuffle=True),
        "loader of batches": lambda: DataLoader(
            Slices(x, y), batch_size=None, sampler=BatchSampler(RandomSampler(rows), case.batch, case.drop_last)
        ),
        "loader collate": lambda: DataLoader(rows, collate_fn=shorter, **keep),
        "loader workers": lambda: DataLoader(
            rows, shuffle=True, num_workers=case.workers, persistent_workers=case.samples % 2 == 0, **keep
        ),
        "batches": lambda: batches,
        "reshuffled batches": lambda: Reshuffled(batches, at_once=case.number % 2 == 0),
        "iterable": lambda: Stream(x, y),
        "iterable shuffled": lambda: Stream(x, y, shuffled=True),
        "iterable loader": lambda: DataLoader(Stream(x, y, shuffled=True), **keep),
        "iterable workers": lambda: Stream(x, y),
        "iterable shuffled workers": lambda: Stream(x, y, shuffled=True),
        "iterable sharding workers": lambda: WorkerShards(x, y),
        "iterable sharding ranks": lambda: RankShards(x, y),
        "loader distributed": lambda: DataLoader(
            rows,
            batch_size=case.batch,
            sampler=DistributedSampler(rows, num_replicas=group.get_world_size(), rank=group.get_rank(), seed=3),
        ),
    }
    return makers[case.kind]()


def chosen(case: Case) -> list[int]:
    """The indices of a subset: more than half, not in order."""
    return random.Random(case.number).sample(range(case.samples), case.samples // 2 + 1)


def expected_numbers(case: Case) -> list[int] | None:
    """The samples of one epoch without drop_last, sorted; None where chance or padding decides."""
    if case.kind in ("loader weighted", "loader distributed", "loader collate"):
        return None
    return sorted(chosen(case) if "subset" in case.kind else range(case.samples))


@dataclass
class Result:
    """What one rank saw and got. Cases evaluate and predict by turns."""

    seen: dict[tuple[str, int, int], list[int]]
    start: list[Tensor]
    """The weights before training."""
    evaluated: dict[str, float] | None
    predicted: Tensor | None
    in_batches: list[Tensor] | None
    """In every second case that predicts."""
    history: dict[str, list[float]]
    weights: list[Tensor]


def square(outputs: Tensor, labels: Any) -> Tensor:
    """A metric function: a continuous value of each sample."""
    return outputs.square().sum(1)


def run(case: Case, alone: bool = False) -> Result:
    """Evaluate, predict and train on this rank; `alone`: as one process, for the order and for comparison."""
    notes = Notes()
    outputs = 2 if case.loss in ("mse", "pair", "bce") else CLASSES
    net = Net(outputs, notes)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    model = hapi.Model(net)
    model.prepare(optimizer, loss_of(case.loss), square, clip_grad_norm=case.clip)
    ours = case.kind in MAP_STYLE or (case.kind in STREAMS and "loader" not in case.kind)
    reading: dict[str, Any] = {"num_workers": case.workers} if ours and case.workers else {}
    quiet = {"verbose": 0, "callbacks": [notes]}
    data = make_data(case)
    sized = {"batch_size": case.batch} if ours else {}
    evaluated, predicted, in_batches = None, None, None
    if case.number % 2:
        evaluated = model.evaluate(data, **reading, **sized, **quiet)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "predict received data that shards itself")
            predicted = model.predict(data, **reading, **sized, **quiet)
            if case.number % 4:
                net.notes = None
                in_batches = model.predict(data, stack_outputs=False, verbose=0, **sized)
                net.notes = notes
    if ours:
        reading["drop_last"] = case.drop_last
        divided = case.divided or alone
        reading["global_batch_size" if divided else "batch_size"] = case.global_batch if divided else case.batch
    if case.kind in MAP_STYLE:
        reading["shuffle"] = case.shuffle
    if not (alone and case.kind in LOADERS):
        # Of a loader one process shows the order alone: its batches, one a step.
        reading |= {"accumulate_grad_batches": case.accumulate, "num_iters": case.num_iters}
    history = model.fit(data, epochs=case.epochs, **reading, **quiet)
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    return Result(notes.seen, notes.start, evaluated, predicted, in_batches, history.history, weights)


def union(results: Iterable[Result], phase: str, epoch: int) -> list[list[int]]:
    """The samples of each step over all ranks."""
    steps: dict[int, list[int]] = {}
    for result in results:
        for (seen_phase, seen_epoch, step), numbers in result.seen.items():
            if (seen_phase, seen_epoch) == (phase, epoch):
                steps.setdefault(step, []).extend(numbers)
    assert sorted(steps) == list(range(len(steps))), f"steps without any sample: {sorted(steps)}"
    return [steps[step] for step in range(len(steps))]


def flat(steps: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(steps))


@dataclass
class Followed:
    """What the plain loop got."""

    losses: list[float | None]
    """Of each epoch; None where nothing counts."""
    squares: list[float]
    weights: list[Tensor]


def follow(case: Case, start: list[Tensor], epochs: list[list[list[int]]]) -> Followed:
    """Train in plain torch on the same samples: one mean over all samples of a window, one optimizer step."""
    x, y = data_of(case)
    net = Net(y.shape[1] if y.dim() > 1 else CLASSES, None)
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), start, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    losses, squares = [], []
    for steps in epochs:
        total, weight, square_sum, count = 0.0, 0.0, 0.0, 0
        for first in range(0, len(steps), case.accumulate):
            rows = torch.tensor(flat(steps[first : first + case.accumulate]))
            outputs = net(x[rows])
            loss, part = sum_and_weight(case.loss, outputs, y[rows])
            optimizer.zero_grad()
            (loss / part if part > 0 else loss).backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), case.clip)
            optimizer.step()
            total, weight = total + float(loss.detach()), weight + float(part)
            square_sum, count = square_sum + float(square(outputs.detach(), None).sum()), count + len(rows)
        losses.append(total / weight if weight else None)
        squares.append(square_sum / count)
    return Followed(losses, squares, [parameter.detach() for parameter in net.parameters()])


def once(case: Case, start: list[Tensor], numbers: list[int]) -> tuple[float | None, float, Tensor]:
    """Loss, metric and outputs of these samples in one batch."""
    x, y = data_of(case)
    net = Net(y.shape[1] if y.dim() > 1 else CLASSES, None)
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), start, strict=True):
            parameter.copy_(value)
        rows = torch.tensor(numbers)
        outputs = net(x[rows])
        loss, weight = sum_and_weight(case.loss, outputs, y[rows])
        return float(loss / weight) if weight else None, float(square(outputs, None).mean()), outputs
