"""Runs that are ended within an epoch and resumed, against one that is not; alone and on ranks."""

import contextlib
import copy
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import hapi
from hapi.callbacks import Callback, EarlyStopping, ModelCheckpoint

ROWS, EPOCHS = 46, 3
torch.manual_seed(5)
X, Y = torch.randn(ROWS, 6), torch.randint(3, (ROWS,))


class Noisy(Dataset):
    """Draws for each sample, as an augmentation does; counts what it gives."""

    def __init__(self):
        self.given = 0

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.given += 1
        return X[index] + 0.1 * torch.randn(6), Y[index]


class Stream(IterableDataset):
    """Rows in a drawn order, with noise."""

    def __iter__(self):
        for index in torch.randperm(ROWS).tolist():
            yield X[index] + 0.1 * torch.randn(6), Y[index]


class Stateful:
    """Batches that know where they are; reading one again would show."""

    sharded = True

    def __init__(self):
        self.at, self.read = 0, 0

    def __iter__(self):
        while self.at < 6 + hapi.distributed.get_rank():
            rows = slice(7 * self.at, 7 * self.at + 7)
            self.at += 1
            self.read += 1
            yield X[rows], Y[rows]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Remembering(IterableDataset):
    """Rows in an order of a generator of its own, with noise; knows which are left, and counts what it gives."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(4)
        self.left, self.read = None, 0

    def drawn(self):
        return torch.randperm(ROWS, generator=self.generator).tolist()

    def __iter__(self):
        if self.left is None:
            self.left = self.drawn()
        while self.left:
            index = self.left.pop(0)
            self.read += 1
            yield X[index] + 0.1 * torch.randn(6), Y[index]
        self.left = None

    def state_dict(self):
        return {"left": self.left, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.left = copy.copy(state["left"])
        self.generator.set_state(state["generator"])


class RememberingItsPart(Remembering):
    """Shards itself, unequally."""

    sharded = True

    def drawn(self):
        rank, world_size = hapi.distributed.get_rank(), hapi.distributed.get_world_size()
        return super().drawn()[rank::world_size][4 * rank :]


class RememberingItsNoise(RememberingItsPart):
    """Draws noise for each row from its own generator, which then is another on each rank."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield x + 0.1 * torch.randn(6, generator=self.generator), y


class StartsAt(IterableDataset):
    """Its state is where its next pass starts, at the end of one too."""

    def __init__(self):
        self.at = self.start = self.read = 0

    def __iter__(self):
        first, self.start = self.start, 0
        for self.at in range(first + 1, ROWS + 1):
            self.read += 1
            yield X[self.at - 1] + 0.1 * torch.randn(6), Y[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


class DrawnOrder(StartsAt):
    """Its order is drawn from torch's generator in each pass; its state is a place in it."""

    def __iter__(self):
        order = torch.randperm(ROWS).tolist()
        first, self.start = self.start, 0
        for self.at in range(first + 1, ROWS + 1):
            self.read += 1
            yield X[order[self.at - 1]] + 0.1 * torch.randn(6), Y[order[self.at - 1]]


class AsksRank(StartsAt):
    """Takes each so many-th row of its own accord, which shows when it is watched."""

    def __iter__(self):
        rank, world_size = hapi.distributed.get_rank(), hapi.distributed.get_world_size()
        yield from (pair for row, pair in enumerate(super().__iter__()) if row % world_size == rank)


class AsksWorkers(StartsAt):
    """Looks whether it is in a worker, as torch's documentation does."""

    def __iter__(self):
        torch.utils.data.get_worker_info()
        yield from super().__iter__()


class RememberingBatches:
    """Batches of `Remembering`, without saying who shards."""

    def __init__(self):
        self.rows = Remembering()

    def __iter__(self):
        yield from DataLoader(self.rows, batch_size=4)

    def state_dict(self):
        return self.rows.state_dict()

    def load_state_dict(self, state):
        self.rows.load_state_dict(state)


def collated(items):
    return torch.utils.data.default_collate(items)


def leaving_out(items):
    """No batch at all where the first label is 0."""
    return collated(items) if items[0][1] else None


class Drifting(Noisy):
    """Each sample depends on how many were given before it, which it can tell."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.01 * self.given, y

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def part_of_rank():
    ranks = {"num_replicas": hapi.distributed.get_world_size(), "rank": hapi.distributed.get_rank()}
    return DistributedSampler(range(ROWS), **ranks, drop_last=True)


def loader(**options):
    return DataLoader(Noisy(), batch_size=4, **options)


def data_of(kind: str):
    """The data, and what goes with it to fit."""
    ours = {"batch_size": 4}
    weighted = WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS, generator=torch.Generator().manual_seed(2))
    return {
        "tensors": lambda: ((X, Y), ours),
        "dataset": lambda: (Noisy(), ours),
        "workers": lambda: (Noisy(), ours | {"num_workers": 2}),
        "accumulating": lambda: ((X, Y), ours | {"accumulate_grad_batches": 3}),
        "bf16": lambda: (Noisy(), ours),
        "fp16": lambda: ((X, Y), ours),
        "compiled": lambda: ((X, Y), {"batch_size": 4 if hapi.distributed.get_world_size() == 1 else 2}),
        "capped": lambda: ((X, Y), ours | {"num_iters": 27 // hapi.distributed.get_world_size()}),
        "loader": lambda: (loader(shuffle=True), {}),
        "loader of workers": lambda: (loader(shuffle=True, num_workers=2), {}),
        "loader with generator": lambda: (loader(shuffle=True, generator=torch.Generator().manual_seed(9)), {}),
        "loader that leaves batches out": lambda: (loader(shuffle=True, collate_fn=leaving_out), {}),
        "own order that leaves batches out": lambda: (loader(sampler=part_of_rank(), collate_fn=leaving_out), {}),
        "weighted sampler": lambda: (loader(sampler=weighted), {}),
        "list": lambda: (list(DataLoader(TensorDataset(X, Y), batch_size=4)), {}),
        "stream": lambda: (Stream(), ours),
        "stateful": lambda: (Stateful(), {}),
        "stateful stream": lambda: (Remembering(), ours),
        "stateful stream in a loader": lambda: (DataLoader(Remembering(), batch_size=4), {}),
        "stateful part": lambda: (RememberingItsPart(), ours),
        "stateful start": lambda: (StartsAt(), ours),
        "stateful order": lambda: (DrawnOrder(), ours),
        "stateful, asks workers": lambda: (AsksWorkers(), ours),
        "stateful batches": lambda: (RememberingBatches(), {}),
        "stateful rows, own collate": lambda: (
            DataLoader(Drifting(), batch_size=4, shuffle=True, collate_fn=collated),
            {},
        ),
        "stateful rows": lambda: (Drifting(), ours),
        "stateful rows in a loader": lambda: (DataLoader(Drifting(), batch_size=4, shuffle=True), {}),
    }[kind]()


KINDS = (
    "tensors", "dataset", "workers", "accumulating", "bf16", "fp16", "capped", "loader", "loader of workers",
    "loader with generator", "loader that leaves batches out", "own order that leaves batches out", "weighted sampler",
    "list", "stream", "stateful", "stateful stream",
    "stateful stream in a loader", "stateful part", "stateful start", "stateful order",
    "stateful, asks workers", "stateful batches", "stateful rows, own collate", "stateful rows",
    "stateful rows in a loader",
)  # fmt: skip


class Counting(nn.Module):
    """Its scale depends on how often it was called in training, which no state dict holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Ended(Exception):
    """In place of a kill."""


class EndsAt(Callback):
    """Ends the run after so many training steps, or in the first step of an evaluation."""

    def __init__(self, steps: int, in_evaluation: bool = False):
        self.steps, self.in_evaluation = steps, in_evaluation

    def on_train_batch_begin(self, step, logs=None):
        if not self.in_evaluation and self.model.steps_trained >= self.steps:
            raise Ended

    def on_eval_batch_begin(self, step, logs=None):
        if self.in_evaluation and self.model.steps_trained >= self.steps:
            raise Ended


class SavesAt(Callback):
    """Saves as a script of one's own does, in the middle of an epoch and on every rank, and ends the run there."""

    def __init__(self, path: Path, epoch: int, step: int):
        self.path, self.at = path, (epoch, step)

    def on_train_batch_end(self, step, logs=None):
        if (self.model.epochs_trained, step) == self.at:
            self.model.save(self.path)
            raise Ended


def trained(kind: str, save_dir: Path, *callbacks, data=None, every=1, **options):
    """A fresh network, optimizer and Model, as a new process would make them, trained for EPOCHS or to its end."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Dropout(0.3), Counting(), nn.Linear(60, 3))
    if kind == "compiled":
        net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = hapi.Model(net).prepare(
        optimizer,
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        hapi.metrics.Accuracy(),
        {"bf16": "bf16", "fp16": {"level": "O1", "dtype": "float16", "init_loss_scaling": 2.0**24}}.get(kind),
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=200),
        # torch compiles for buckets of at least a megabyte.
        ddp_options=None if kind == "compiled" else {"bucket_cap_mb": 0.002},
        compile=kind == "compiled",
    )
    given, reading = data_of(kind)
    keep = ModelCheckpoint(monitor="val_loss", every_n_steps=every)
    options = {"epochs": EPOCHS} | options
    model.fit(
        given if data is None else data, (X, Y), save_dir=save_dir, verbose=0, seed=3, log_freq=1,
        callbacks=[keep, EarlyStopping(patience=100), *callbacks], **reading, **options,
    )  # fmt: skip
    return model


def bits(model) -> list[torch.Tensor]:
    states = [s for state in model.optimizer.state.values() for s in state.values() if isinstance(s, torch.Tensor)]
    return [tensor.clone() for tensor in (*model.network.state_dict().values(), *states)]


class Kept(Callback):
    """Keeps the history where another Model can read it."""

    def on_train_end(self, logs=None):
        history = next(cb for cb in self.params["callbacks"] if isinstance(cb, hapi.callbacks.History))
        self.model.kept = (history.epoch, history.history)


def check(kind: str, folder: Path) -> None:
    """Ended three times: within an epoch, right at the end of its steps, and in an evaluation."""
    # It saves at other steps, which changes nothing.
    straight = trained(kind, folder / "straight", Kept(), every=9)
    per_epoch = straight.steps_trained / len(straight.kept[0])
    first, second = int(per_epoch * 0.4), int(per_epoch * 1.7)
    for stop in (EndsAt(first), EndsAt(second), EndsAt(second + 1, in_evaluation=True)):
        end(kind, folder / "cut", stop)
    compare(kind, straight, trained(kind, folder / "cut", Kept(), resume=True))


def evaluated_part(folder: Path) -> bool:
    """Whether the evaluation of each rank's own part, which has a state, goes on as it would have."""

    def run(name: str, stop: EndsAt | None, resume: bool) -> list[float]:
        torch.manual_seed(1)
        model = hapi.Model(nn.Linear(6, 3)).prepare("sgd", nn.CrossEntropyLoss())
        with contextlib.suppress(Ended):
            return model.fit(
                (X, Y), RememberingItsNoise(), batch_size=4, epochs=3, seed=3, verbose=0, save_dir=folder / name,
                resume=resume, callbacks=[] if stop is None else [stop],
            ).history["val_loss"]  # fmt: skip
        return []

    straight = run("straight", None, False)
    run("cut", EndsAt(8), False)
    return run("cut", None, True) == straight


class Rows(nn.Module):
    """Notes the rows that it is given in training."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 3), []

    def forward(self, x):
        self.seen += [int((X - row).abs().sum(1).argmin()) for row in x]
        return self.layer(x)


def rows_of_who_asks(epochs: int) -> list[int]:
    """The rows that this rank trains on of data that asks for its rank and has a state."""
    net = Rows()
    hapi.Model(net).prepare("sgd", nn.CrossEntropyLoss()).fit(AsksRank(), epochs=epochs, batch_size=4, verbose=0)
    return net.seen


def without_a_rank(folder: Path) -> bool:
    """Whether the history of a run differs that is resumed without what rank 1 had seen of its epoch."""
    straight = trained("tensors", folder / "straight", Kept())
    end("tensors", folder / "cut", EndsAt(straight.steps_trained // 2))
    newest, _ = hapi.checkpoint.newest(folder / "cut", straight.network)
    hapi.distributed.barrier()
    if hapi.distributed.get_rank() == 0:
        file = hapi.checkpoint.training_path(newest)
        content = torch.load(file, weights_only=True)
        content["position"]["cursor"]["ranks"][1]["values"]["loss_sum"] = torch.zeros((), dtype=torch.float64)
        torch.save(content, file)
    hapi.distributed.barrier()
    resumed = trained("tensors", folder / "cut", Kept(), resume=newest)
    assert all(torch.equal(a, b) for a, b in zip(bits(straight), bits(resumed), strict=True)), "other bits"
    return bool(resumed.kept != straight.kept)


def end(kind: str, folder: Path, stop: EndsAt) -> None:
    """Start or go on, and be ended."""
    try:
        trained(kind, folder, stop, resume=True)
    except Ended:
        return
    raise RuntimeError("the run was not ended")


def compare(kind: str, straight, resumed) -> None:
    """Raises AssertionError unless the two runs have ended alike."""
    assert all(torch.equal(a, b) for a, b in zip(bits(straight), bits(resumed), strict=True)), f"{kind}: other bits"
    assert resumed.kept == straight.kept, f"{kind}: another history"
    counts = [(model.epochs_trained, model.steps_trained) for model in (resumed, straight)]
    assert counts[0] == counts[1], f"{kind}: {counts}"


class Notes(nn.Module):
    """A network that notes which rows it is trained on: their numbers are the first feature."""

    def __init__(self):
        super().__init__()
        self.linear, self.rows = nn.Linear(2, 3), []

    def forward(self, x):
        if self.training:
            self.rows += x[:, 0].int().tolist()
        return self.linear(x)


def read_part(kind: str, folder: Path, rest: bool) -> list[int]:
    """Train the first two steps of an epoch, or all that is left of it; the rows that this rank was given."""
    numbered = torch.stack([torch.arange(ROWS).float(), torch.zeros(ROWS)], 1), Y
    loader = DataLoader(TensorDataset(*numbered), batch_size=4, shuffle=True)
    data, reading = (numbered, {"batch_size": 4}) if kind == "tensors" else (loader, {})
    net = Notes()
    model = hapi.Model(net).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    keep = ModelCheckpoint(every_n_steps=1)
    with contextlib.suppress(Ended):
        model.fit(
            data, epochs=1, save_dir=folder, verbose=0, seed=3, resume=rest,
            callbacks=[keep] if rest else [keep, EndsAt(2)], **reading,
        )  # fmt: skip
    return net.rows
