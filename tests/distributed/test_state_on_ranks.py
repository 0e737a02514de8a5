"""Weights, buffers, modes, random states: where ranks must agree or differ, and what a script gets back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from closed_form import Line, mean_output, prepared, ramp
from ranks import alone, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

import hapi
from hapi.distributed import group


class Buffered(nn.Module):
    """Weights and a buffer that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("offset", torch.tensor([10.0 * group.get_rank()]))
        self.register_buffer("count", torch.tensor(group.get_rank()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.offset


def start(call: str) -> tuple[list[float], list[list[float]]]:
    """State before a call that must not change rank 0's; at its first hook, and after it."""

    class Look(hapi.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.append(flat(net))

        on_eval_begin = on_predict_begin = on_train_begin

    seen: list[list[float]] = []
    net = Buffered()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output)
    before = flat(net)
    data = torch.ones(4, 2), torch.zeros(4)
    calls: dict[str, Callable[[], Any]] = {
        "fit": lambda: model.fit(data, batch_size=1, callbacks=Look(), verbose=0),
        "evaluate": lambda: model.evaluate(data, callbacks=Look(), verbose=0),
        "predict": lambda: model.predict(data, callbacks=Look(), verbose=0),
    }
    calls[call]()
    return before, [*seen, flat(net)]


def flat(net: nn.Module) -> list[float]:
    return [float(value) for tensor in net.state_dict().values() for value in tensor.flatten()]


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_ranks_start_from_rank_0_s_weights_and_buffers(ranks, call):
    results = ranks(3).run(start, call)
    befores, states = zip(*results, strict=True)
    assert len({tuple(before) for before in befores}) == 3
    assert same(states) == [befores[0]] * 2


class Odd(nn.Module):
    """Buffers of all sorts, other ones on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        numbers = torch.arange(5) + 3 * group.get_rank()
        dtypes = (
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
            torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
        )  # fmt: skip
        for dtype in dtypes:
            self.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", numbers.to(dtype))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("scalar", torch.tensor(1.5 + group.get_rank(), dtype=torch.float64))
        self.register_buffer("transposed", (torch.arange(6.0) * (1 + group.get_rank())).reshape(2, 3).T)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def odd_buffers(fits: bool) -> list[Any]:
    net = Odd()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output)
    if fits:
        model.fit(ramp(5), batch_size=1, verbose=0)
    else:
        model.evaluate(ramp(5), batch_size=1, verbose=0)
    return [buffer.to(torch.complex128).tolist() for buffer in net.buffers()]


@pytest.mark.parametrize("fits", [False, True])
def test_buffers_of_any_dtype_and_layout_are_rank_0_s(ranks, fits):
    results = ranks(2).run(odd_buffers, fits)
    assert same(results) == [buffer.to(torch.complex128).tolist() for buffer in Odd().buffers()]


def seeded_apart() -> tuple[dict[str, list[float]], list[float]]:
    """The script has seeded each rank differently, and made its network after that."""
    hapi.seed(5 + group.get_rank())
    net = nn.Linear(1, 1)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.001), lambda o, y: (o - y).square().mean())
    x, _ = ramp(9)
    return model.fit((x, 2 * x), global_batch_size=4, epochs=2, verbose=0).history, flat(net)


def test_a_script_that_seeds_each_rank_differently_trains_as_rank_0_would(ranks):
    history, weights = same(ranks(2).run(seeded_apart))
    wanted, wanted_weights = alone(seeded_apart)
    assert weights == pytest.approx(wanted_weights, rel=1e-5)
    assert history["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def normalised() -> dict[str, list[list[float]]]:
    """The running mean of a BatchNorm on this rank, at several moments."""
    net = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 1))
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output)
    seen: dict[str, list[list[float]]] = {}

    class Look(hapi.callbacks.Callback):
        def look(self, moment):
            seen.setdefault(moment, []).append(flat(net[0]))

        def on_train_batch_end(self, step, logs=None):
            self.look("step")
            if step == 0:
                self.model.evaluate(ramp(3), batch_size=1, callbacks=Within(), verbose=0)

        def on_eval_batch_end(self, step, logs=None):
            self.look("evaluation")

        def on_epoch_end(self, epoch, logs=None):
            self.look("epoch")

        def on_train_end(self, logs=None):
            self.look("end")

    class Within(Look):
        def on_eval_batch_end(self, step, logs=None):
            self.look("evaluation in a step")

    x, y = ramp(8)
    model.fit((x, y), (x, y), batch_size=2, epochs=3, eval_freq=2, shuffle=False, callbacks=Look(), verbose=0)
    seen["fit"] = [flat(net[0])]
    model.fit((x, y), batch_size=2, num_iters=1, shuffle=False, verbose=0)
    seen["cut fit"] = [flat(net[0])]
    return seen


def test_batchnorm_s_buffers_are_rank_0_s_whenever_anybody_may_use_them(ranks):
    first, second = ranks(2).run(normalised)
    # Weight, bias, running mean, running variance, batches; the last batch of the first rank is 4, 5.
    assert first["step"] != second["step"]
    assert first["end"] == [[1.0, 0.0, 4.5, 0.5, 6.0]]
    for moment in ("evaluation", "evaluation in a step", "epoch", "end", "fit", "cut fit"):
        assert first[moment] == second[moment], moment
    assert first["cut fit"] == [[1.0, 0.0, 0.5, 0.5, 7.0]]


def short_ends() -> list[int]:
    """BatchNorm on data sets of many lengths: it cannot train on one sample. Which batches this rank had."""
    sizes: list[int] = []
    for n in (5, 6, 7, 11, 13):
        net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        net[0].register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
        model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), mean_output)
        model.fit(ramp(n), global_batch_size=8 if n % 2 else 4, verbose=0, num_iters=2)
    return sizes


def test_a_short_last_batch_is_cut_so_that_batchnorm_can_train(ranks):
    # Batches of 5 | 4 and 2 | 7 | 8 and 3 | 8 and 5 samples.
    first, second = ranks(2).run(short_ends)
    assert first == [3, *(2, 2), 4, *(4, 3), *(4, 3)]
    assert second == [2, 2, 3, 4, *(4, 2)]


def frozen_layers() -> tuple[list[float], list[float], list[bool], list[bool]]:
    """A frozen layer under weight decay, a BatchNorm in eval mode, within a network in train mode."""
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    net[1].eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5, momentum=0.9)
    model = hapi.Model(net).prepare(optimizer, mean_output)
    model.evaluate(ramp(4), verbose=0)
    before, modes = flat(net[:2]), [module.training for module in net.modules()]
    model.fit(ramp(9), ramp(3), batch_size=2, epochs=2, verbose=0)
    after = [*flat(net[:1]), *net[1].running_mean.tolist(), *net[1].running_var.tolist()]
    # The BatchNorm's own weights train all the same.
    moved = float(net[1].weight[0].detach()) != 1.0
    return after, [*before[:4], 0.0, 0.0, 1.0, 1.0], [*(m.training for m in net.modules()), moved], [*modes, True]


def test_what_is_frozen_stays_as_it_is(ranks):
    for after, wanted, modes, wanted_modes in ranks(2).run(frozen_layers):
        assert after == wanted
        assert modes == wanted_modes
        assert modes[:4] == [True, True, False, True]


def in_eval_mode() -> list[bool]:
    """A network that comes in eval mode trains, dropout included, and is in eval mode again."""
    net = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5)).eval()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output)
    zeros: list[bool] = []
    net.register_forward_hook(lambda module, args, output: zeros.append(bool((output == 0).any())))
    model.fit(ramp(4), batch_size=1, verbose=0)
    return [all(zeros), *(module.training for module in net.modules())]


def test_a_network_in_eval_mode_is_trained_as_a_whole_and_given_back(ranks):
    assert same(ranks(2).run(in_eval_mode)) == [True, False, False, False]


def drawn_numbers() -> list[float]:
    return [float(torch.rand(())), random.random(), float(numpy.random.rand())]


def states_of_the_script(seeded: bool, samples: int) -> tuple[list[float], list[float]]:
    """What the script draws after fit, evaluate and predict on so many samples."""
    if seeded:
        hapi.seed(11)
    net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5))
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), mean_output)
    model.fit(ramp(samples), ramp(3), batch_size=1, verbose=0)
    after_fit = drawn_numbers()
    model.evaluate(ramp(samples), batch_size=1, verbose=0)
    model.predict(ramp(samples), batch_size=1, verbose=0)
    return after_fit, drawn_numbers()


def test_the_script_s_random_state_stays_in_step_and_knows_nothing_of_what_fit_drew(ranks):
    short = same(ranks(2).run(states_of_the_script, True, 3))
    assert short == same(ranks(2).run(states_of_the_script, True, 8))
    assert short == alone(states_of_the_script, True, 5)
    assert short[0] != short[1]


def dropout_masks() -> list[list[float]]:
    """The mask of each step: the script has seeded all ranks alike."""
    hapi.seed(3)
    net = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    masks: list[list[float]] = []
    net[1].register_forward_hook(lambda module, args, output: masks.append((output != 0).float().flatten().tolist()))
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output)
    model.fit((torch.ones(64 * 2 * 2, 1), torch.zeros(64 * 2 * 2)), batch_size=64, epochs=2, verbose=0)
    return masks


def test_dropout_differs_between_ranks_steps_and_epochs_and_repeats_with_the_seed(ranks):
    results = ranks(2).run(dropout_masks)
    masks = [tuple(mask) for result in results for mask in result]
    assert len(masks) == 8
    assert len(set(masks)) == 8
    assert ranks(2).run(dropout_masks) == results


class Noise:
    """Draws from all three generators for each sample."""

    n = 8

    def draw(self) -> Tensor:
        return torch.tensor([float(torch.rand(())), random.random(), float(numpy.random.rand())])


class NoisyRows(Noise, Dataset):
    """Sample by sample."""

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.draw(), torch.zeros(1)


class NoisyBatches(Noise):
    """A batch at a time, some of it drawn when the batch is fetched and some on the device."""

    batched = True

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def fetch_batch(self, indices: Tensor) -> Any:
        return torch.stack([self.draw() for _ in indices])

    def finish_batch(self, batch: Tensor) -> Any:
        return batch + torch.stack([self.draw() for _ in batch]), torch.zeros(len(batch), 1)


class NoisyStream(Noise, IterableDataset):
    """Item by item."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.n):
            yield self.draw(), torch.zeros(1)


class NoisyShard(NoisyStream):
    """A data set that shards itself: half of the items on each rank."""

    sharded = True
    n = 4


class NoisyByWorker(NoisyStream):
    """Takes its share by worker."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        return ((self.draw(), torch.zeros(1)) for _ in range(part, self.n, parts))


class NoisyByRank(NoisyStream):
    """Takes its share by rank."""

    def __iter__(self) -> Iterator[Any]:
        return ((self.draw(), torch.zeros(1)) for _ in range(group.get_rank(), self.n, group.get_world_size()))


def noisy_batch(items: list[Any]) -> Any:
    """A collate function that draws."""
    noise = Noise()
    return torch.stack([noise.draw() for _ in items]), torch.zeros(len(items), 1)


NOISY: dict[str, Callable[[int], Any]] = {
    "data set": lambda workers: (NoisyRows(), {"num_workers": workers, "batch_size": 2}),
    "batches": lambda workers: (NoisyBatches(), {"batch_size": 2}),
    "iterable": lambda workers: (NoisyStream(), {"num_workers": workers, "batch_size": 2}),
    "sharded iterable": lambda workers: (NoisyShard(), {"num_workers": workers, "batch_size": 2}),
    "iterable by worker": lambda workers: (NoisyByWorker(), {"num_workers": workers, "batch_size": 2}),
    "iterable by rank": lambda workers: (NoisyByRank(), {"num_workers": workers, "batch_size": 2}),
    "loader": lambda workers: (DataLoader(NoisyRows(), batch_size=2, shuffle=True, num_workers=workers), {}),
    "loader's iterable": lambda workers: (DataLoader(NoisyStream(), batch_size=2, num_workers=workers), {}),
    "loader's sharded iterable": lambda workers: (DataLoader(NoisyShard(), batch_size=2, num_workers=workers), {}),
    "collate": lambda workers: (DataLoader(NoisyRows(), 2, collate_fn=noisy_batch, num_workers=workers), {}),
    "iterable collate": lambda workers: (DataLoader(NoisyStream(), 2, collate_fn=noisy_batch, num_workers=workers), {}),
    "distributed sampler": lambda workers: (
        DataLoader(NoisyRows(), 2, sampler=DistributedSampler(NoisyRows(), group.get_world_size(), group.get_rank()),
                   num_workers=workers), {}),
}  # fmt: skip


def noise_seen(kind: str, workers: int) -> list[tuple[float, ...]]:
    """All samples that this rank trains on in two epochs; the script has seeded all ranks alike."""
    hapi.seed(3)
    seen: list[tuple[float, ...]] = []

    class Keep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            seen.extend(tuple(row) for row in x.tolist())
            return self.layer(x)

    net = Keep()
    data, options = NOISY[kind](workers)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output)
    model.fit(data, epochs=2, verbose=0, **options)
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", NOISY)
def test_augmentations_differ_between_ranks_workers_and_epochs_and_repeat_with_the_seed(ranks, kind, workers):
    results = ranks(2).run(noise_seen, kind, workers)
    seen = [sample for result in results for sample in result]
    copies = workers if "sharded" in kind and workers else 1
    assert len(seen) == 2 * Noise.n * copies
    # Iterables that shard themselves start from equal generators, so that they may shuffle before they shard: the first
    # items of their parts are alike, one a rank and worker and epoch.
    alike = 2 * (2 * max(1, workers) - 1) if "sharded" in kind or "iterable by" in kind else 0
    for generator in range(3):
        values = {sample[generator] for sample in seen}
        assert len(values) >= len(seen) - alike, "a number was drawn twice"
    assert ranks(2).run(noise_seen, kind, workers) == results


@pytest.mark.parametrize("kind", ["data set", "loader", "collate"])
def test_augmentations_do_not_depend_on_the_number_of_workers(ranks, kind):
    alone_in_process = ranks(2).run(noise_seen, kind, 0)
    for workers in (1, 2):
        assert ranks(2).run(noise_seen, kind, workers) == alone_in_process


def evaluate_in_callbacks(really: bool) -> tuple[list[float], dict[str, list[float]]]:
    """A run with dropout, with and without evaluations and predictions in its midst."""
    hapi.seed(2)
    net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    class Evaluate(hapi.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            if really:
                self.model.evaluate(ramp(5), batch_size=1, verbose=0)

        def on_epoch_end(self, epoch, logs=None):
            if really:
                self.model.predict(ramp(5), batch_size=1, verbose=0)

    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.01), lambda o, _: (o - 1).square().mean())
    data = ramp(7)
    history = model.fit(data, batch_size=2, epochs=2, callbacks=Evaluate(), verbose=0).history
    again = model.fit(data, batch_size=2, callbacks=Evaluate(), verbose=0).history
    return flat(net), {"first": history["loss"], "second": again["loss"]}


def test_evaluating_within_a_fit_changes_nothing_of_it(ranks):
    assert same(ranks(2).run(evaluate_in_callbacks, True)) == same(ranks(2).run(evaluate_in_callbacks, False))


def fit_evaluate_fit_predict() -> tuple[float, list[float]]:
    model = prepared()
    model.fit(ramp(4), global_batch_size=4, verbose=0)
    between = model.evaluate(ramp(4), verbose=0)["loss"]
    model.fit(ramp(4), global_batch_size=4, verbose=0)
    return between, model.predict(ramp(3), verbose=0).flatten().tolist()


def test_one_script_may_fit_evaluate_fit_and_predict(ranks):
    # One weight: 1, then 1 - 1.5, then -0.5 - 1.5.
    assert same(ranks(2).run(fit_evaluate_fit_predict)) == (-0.5 * 1.5, [0.0, -2.0, -4.0])


def save_and_load(folder: str, by_all: bool) -> tuple[list[float], list[str]]:
    """Save, change the weights, load at once; twenty times."""
    values = []
    path = Path(folder) / "model"
    for number in range(20):
        model = prepared(weight=float(number))
        model.fit(ramp(2), global_batch_size=2, verbose=0)
        if by_all or group.get_rank() == 0:
            model.save(path)
        with torch.no_grad():
            model.network.layer.weight.fill_(-100.0)
        model.load(path)
        values.append(model.network.value)
    return values, sorted(entry.name for entry in Path(folder).iterdir())


@pytest.mark.parametrize("by_all", [True, False])
def test_what_was_saved_can_be_loaded_at_once_on_all_ranks(ranks, tmp_path, by_all):
    values, files = same(ranks(2).run(save_and_load, str(tmp_path), by_all))
    assert values == [number - 0.5 for number in range(20)]
    assert files == ["model.opt.pt", "model.pt"]


def save_while_fitting(folder: str) -> list[tuple[list[float], dict[str, Any]]]:
    """Checkpoints of fit, read back on each rank."""
    net = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), Line())
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output)
    model.fit(ramp(8), batch_size=2, epochs=2, shuffle=False, save_dir=folder, verbose=0)
    files = sorted(Path(folder).glob("*[0-9l].pt"))
    return [
        (file.name, {key: value.flatten().tolist() for key, value in torch.load(file, weights_only=True).items()})
        for file in files
    ]


def test_checkpoints_hold_the_bare_network_with_rank_0_s_buffers(ranks, tmp_path):
    saved = same(ranks(2).run(save_while_fitting, str(tmp_path)))
    assert [name for name, _ in saved] == ["1.pt", "2.pt", "final.pt"]
    for _, state in saved:
        assert list(state) == list(nn.Sequential(nn.BatchNorm1d(1), Line()).state_dict())
        assert state["0.running_mean"] == [4.5]
