"""Who sees which sample: every kind of loader and data set as the user gave it, each sample once over the ranks."""

from __future__ import annotations

import contextlib
import io
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import closed_form
import pytest
import torch
from closed_form import Line, Ramp, mean_output, prepared
from ranks import alone, same
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import hapi
from hapi.data import Request, make_feed
from hapi.distributed import group


def seen_in(data: Any, epochs: int = 1, fits: int = 1, **options: Any) -> list[list[int]]:
    """The samples that this rank trains on, an entry for each epoch of each fit."""
    model = prepared()
    seen: list[list[int]] = []

    class Cut(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([int(value) for value in model.network.seen])
            model.network.seen.clear()

    for _ in range(fits):
        model.fit(data, epochs=epochs, callbacks=Cut(), verbose=0, **options)
    return seen


def of_ranks(results: list[list[list[int]]]) -> list[list[int]]:
    """All ranks' samples of each epoch, sorted."""
    return [sorted(number for rank in epoch for number in rank) for epoch in zip(*results, strict=True)]


class Buckets(Sampler[list[int]]):
    """A batch sampler whose constructor no library can guess."""

    made = 0

    def __init__(self, boundaries: list[int], *, secret: str) -> None:
        Buckets.made += 1
        self.boundaries, self.secret = boundaries, secret

    def __iter__(self) -> Iterator[list[int]]:
        for first, last in zip(self.boundaries, self.boundaries[1:], strict=False):
            yield list(range(first, last))

    def __len__(self) -> int:
        return len(self.boundaries) - 1


def with_buckets() -> tuple[list[list[int]], int]:
    Buckets.made = 0
    loader = DataLoader(Ramp(10), batch_sampler=Buckets([0, 1, 4, 6, 10], secret="s"))
    return seen_in(loader), Buckets.made


def test_a_batch_sampler_with_its_own_constructor_is_used_as_it_is(ranks):
    (first, made), (second, _) = ranks(2).run(with_buckets)
    assert first == [[0, 4, 5]]
    assert second == [[1, 2, 3, 6, 7, 8, 9]]
    assert made == 1


def with_weights() -> list[list[int]]:
    weights = [1.0 if n % 5 == 2 else 0.0 for n in range(20)]
    return seen_in(DataLoader(Ramp(20), batch_size=3, sampler=WeightedRandomSampler(weights, 12)))


def test_sampling_weights_are_kept(ranks):
    (numbers,) = of_ranks(ranks(2).run(with_weights))
    assert len(numbers) == 12
    assert set(numbers) <= {2, 7, 12, 17}
    assert len(set(numbers)) > 1


def with_random_subset() -> list[list[int]]:
    return seen_in(DataLoader(Ramp(24), batch_size=2, sampler=SubsetRandomSampler(range(0, 24, 2))), epochs=3)


def test_an_unseeded_random_subset_is_drawn_once_for_all_ranks(ranks):
    results = ranks(2).run(with_random_subset)
    assert of_ranks(results) == [list(range(0, 24, 2))] * 3
    assert results[0][0] != results[0][1]


def with_distributed_sampler() -> tuple[list[list[int]], list[int]]:
    sampler = DistributedSampler(Ramp(8), group.get_world_size(), group.get_rank(), shuffle=True, seed=4)
    seen = seen_in(DataLoader(Ramp(8), batch_size=2, sampler=sampler), epochs=2)
    own = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        own.append(list(sampler))
    return seen, own


def test_a_distributed_sampler_is_left_alone_and_told_the_epoch(ranks):
    results = ranks(2).run(with_distributed_sampler)
    assert all(seen == own for seen, own in results)
    assert of_ranks([seen for seen, _ in results]) == [list(range(8))] * 2


class HandMade(Sampler[int]):
    """Shuffles all of the data, from the global generator, and takes every W-th sample: at once, or on the way."""

    def __init__(self, n: int, at_once: bool) -> None:
        self.n, self.at_once = n, at_once
        self.num_replicas, self.rank = group.get_world_size(), group.get_rank()

    def __iter__(self) -> Iterator[int]:
        return (
            iter(torch.randperm(self.n).tolist()[self.rank :: self.num_replicas]) if self.at_once else self.on_the_way()
        )

    def on_the_way(self) -> Iterator[int]:
        remaining = list(range(self.n))
        for number in range(self.n):
            drawn = remaining.pop(random.randrange(len(remaining)))
            if number % self.num_replicas == self.rank:
                yield drawn


def with_hand_made_sampler(at_once: bool, workers: int) -> list[list[int]]:
    return seen_in(DataLoader(Ramp(13), batch_size=2, sampler=HandMade(13, at_once), num_workers=workers), epochs=3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_hand_made_sampler_may_count_on_equal_generators(ranks, at_once, workers):
    results = ranks(2).run(with_hand_made_sampler, at_once, workers)
    assert of_ranks(results) == [list(range(13))] * 3
    assert len({tuple(epoch) for epoch in results[0]}) == 3


class Dice(Sampler[int]):
    """Draws each index when it is asked for."""

    def __len__(self) -> int:
        return 450

    def __iter__(self) -> Iterator[int]:
        for _ in range(450):
            yield random.randrange(1000)


def with_dice() -> list[list[int]]:
    return seen_in(DataLoader(Ramp(1000), batch_size=1, sampler=Dice()))


def test_an_order_drawn_on_the_way_is_the_same_at_any_world_size(ranks):
    ((wanted),) = alone(with_dice)
    for world in (2, 3):
        results = [seen for (seen,) in ranks(world).run(with_dice)]
        assert [number for step in zip(*results, strict=True) for number in step] == wanted


class Paddles(hapi.distributed.DistributedBatchSampler):
    """Paddle's, or what a script makes of it."""


def with_distributed_batch_sampler() -> list[list[int]]:
    return seen_in(DataLoader(Ramp(9), batch_sampler=Paddles(Ramp(9), batch_size=2, shuffle=True)), epochs=2)


def test_hapis_own_batch_sampler_is_left_alone(ranks):
    results = ranks(2).run(with_distributed_batch_sampler)
    # It pads, as Paddle's does: nothing is lost, and the ranks have equally many.
    assert all(set(numbers) == set(range(9)) for numbers in of_ranks(results))
    assert results[0][0] != results[0][1]


def orders(kind: str) -> list[list[int]]:
    makers: dict[str, Callable[[], Any]] = {
        "tensors": lambda: closed_form.ramp(16),
        "data set": lambda: Ramp(16),
        "loader": lambda: DataLoader(Ramp(16), batch_size=2, shuffle=True),
        "generator": lambda: DataLoader(Ramp(16), 2, sampler=RandomSampler(Ramp(16), generator=torch.Generator())),
    }
    return seen_in(makers[kind](), epochs=2, fits=2)


@pytest.mark.parametrize("kind", ["tensors", "data set", "loader", "generator"])
def test_the_order_moves_on_each_epoch_and_each_fit(ranks, kind):
    results = ranks(2).run(orders, kind)
    assert of_ranks(results) == [list(range(16))] * 4
    for seen in results:
        assert len({tuple(epoch) for epoch in seen}) == 4, "an order came twice"


class Told:
    """Something around the data that wants to know the epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class ToldSampler(Told, RandomSampler):
    """A sampler."""


class ToldBuckets(Told, Buckets):
    """A batch sampler."""


class ToldRows(Told, Ramp):
    """A map-style data set; shows in its samples which epoch it was told."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index + 100 * self.epochs[-1])]), torch.zeros(1)


class ToldStream(Told, IterableDataset):
    """An iterable data set, likewise."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(8):
            yield torch.tensor([float(index + 100 * self.epochs[-1])]), torch.zeros(1)


class ToldBatches(Told):
    """A re-iterable of batches, likewise."""

    def __iter__(self) -> Iterator[Any]:
        for first in (0, 4):
            yield torch.arange(first, first + 4.0)[:, None] + 100 * self.epochs[-1], torch.zeros(4, 1)


def tell_epochs(kind: str, workers: int) -> tuple[list[int], list[list[int]]]:
    rows, stream = ToldRows(8), ToldStream()
    sampler, buckets, batches = ToldSampler(range(8)), ToldBuckets([0, 3, 5, 8], secret="s"), ToldBatches()
    wanting, data, options = {
        "sampler": (sampler, DataLoader(Ramp(8), batch_size=2, sampler=sampler), {}),
        "batch sampler": (buckets, DataLoader(Ramp(8), batch_sampler=buckets), {}),
        "data set": (rows, rows, {"num_workers": workers}),
        "loader's data set": (rows, DataLoader(rows, batch_size=2, num_workers=workers), {}),
        "persistent loader's data set": (
            rows, DataLoader(rows, batch_size=2, num_workers=workers, persistent_workers=workers > 0), {},
        ),
        "iterable": (stream, stream, {"num_workers": workers}),
        "loader's iterable": (stream, DataLoader(stream, batch_size=2, num_workers=workers), {}),
        "batches": (batches, batches, {}),
    }[kind]  # fmt: skip
    seen = seen_in(data, epochs=2, fits=2, **options)
    return wanting.epochs, seen


@pytest.mark.parametrize("kind", ["sampler", "batch sampler"])
def test_samplers_are_told_the_epoch_where_the_order_is_drawn(ranks, kind):
    (epochs, _), _ = ranks(2).run(tell_epochs, kind, 0)
    assert epochs == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "kind",
    ["data set", "loader's data set", "persistent loader's data set", "iterable", "loader's iterable", "batches"],
)
def test_data_sets_are_told_the_epoch_wherever_they_are_read(ranks, kind, workers):
    results = ranks(2).run(tell_epochs, kind, workers)
    assert of_ranks([seen for _, seen in results]) == [[100 * epoch + n for n in range(8)] for epoch in range(4)]


class Special(DataLoader):
    """A subclass with an argument of its own."""

    def __init__(self, *args: Any, tag: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tag = tag


def tenfold(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return 10 * x, y


_started: list[int] = []


def start_worker(number: int) -> None:
    dataset = get_worker_info().dataset
    dataset.offset = 1000


class Offset(Ramp):
    """Shows what the workers' set-up has done to it."""

    offset = 0

    def __getitem__(self, index: int) -> Any:
        assert self.offset == 1000
        return super().__getitem__(index)


def keep_the_loader() -> tuple[list[list[int]], dict[str, Any]]:
    dataset, generator = Offset(9), torch.Generator().manual_seed(3)
    loader = Special(
        dataset, 2, tag="mine", shuffle=True, generator=generator, num_workers=1, collate_fn=tenfold, drop_last=True,
        worker_init_fn=start_worker, prefetch_factor=3, timeout=60,
    )  # fmt: skip
    sampler = loader.batch_sampler
    seen = seen_in(loader)
    kept = {
        "class and tag": (type(loader) is Special, loader.tag),
        "parts": loader.dataset is dataset and loader.batch_sampler is sampler and loader.generator is generator,
        "functions": (loader.collate_fn is tenfold, loader.worker_init_fn is start_worker),
        "numbers": (loader.num_workers, loader.prefetch_factor, loader.timeout, loader.drop_last),
        "still reads": sum(len(x) for x, _ in loader),
    }
    return seen, kept


def test_a_loader_of_a_subclass_keeps_all_that_it_was_given(ranks):
    results = ranks(2).run(keep_the_loader)
    (numbers,) = of_ranks([seen for seen, _ in results])
    assert len(numbers) == 8
    assert set(numbers) <= set(range(0, 90, 10))
    assert results[0][1] == {
        "class and tag": (True, "mine"),
        "parts": True,
        "functions": (True, True),
        "numbers": (1, 3, 60, True),
        "still reads": 8,
    }


class Stream(IterableDataset):
    """Knows nothing of ranks and workers; may shuffle, seeded by nobody."""

    def __init__(self, n: int, shuffled: bool = False) -> None:
        self.n, self.shuffled = n, shuffled

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self.n))
        if self.shuffled:
            random.shuffle(numbers)
        for number in numbers:
            yield torch.tensor([float(number)]), torch.zeros(1)


class ByWorker(Stream):
    """torch's documented way to share out among workers."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor([float(n)]) for n in range(part, self.n, parts))


class ByRank(Stream):
    """Asks for its rank, and shares out among its workers if told to."""

    def __init__(self, n: int, workers_too: bool) -> None:
        super().__init__(n)
        self.workers_too = workers_too

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.workers_too else None
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, world = group.get_rank(), group.get_world_size()
        return (torch.tensor([float(n)]) for n in range(rank + world * worker, self.n, world * workers))


class SetUp(Stream):
    """Its workers' parts are set by `worker_init_fn`, as torch documents; then it shuffles."""

    first, last = 0, 20

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self.first, self.last))
        random.shuffle(numbers)
        return (torch.tensor([float(number)]) for number in numbers)


def set_up_part(number: int) -> None:
    info = get_worker_info()
    info.dataset.first, info.dataset.last = (0, 7) if number == 0 else (7, 20)


def set_up_by_workers() -> list[list[int]]:
    return seen_in(DataLoader(SetUp(20), batch_size=2, num_workers=2, worker_init_fn=set_up_part), epochs=2)


def test_parts_set_up_in_workers_are_shared_out_among_the_ranks(ranks):
    assert of_ranks(ranks(2).run(set_up_by_workers)) == [list(range(20))] * 2
    assert of_ranks([alone(set_up_by_workers)]) == [list(range(20))] * 2


class SaysSo(Stream):
    """Shares itself out by what nobody can watch, and says so; ranks have very unequal parts."""

    sharded = True

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.numbers = range(1) if group.get_rank() == 0 else range(1, n)

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([float(n)]) for n in self.numbers)


STREAMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Stream(20),
    "shuffled": lambda: Stream(20, shuffled=True),
    "by worker": lambda: ByWorker(20),
    "by rank": lambda: ByRank(20, workers_too=False),
    "by rank and worker": lambda: ByRank(20, workers_too=True),
    "empty": lambda: Stream(1),
}


def stream(kind: str, workers: int, in_loader: bool) -> list[list[int]]:
    dataset = STREAMS[kind]()
    if in_loader:
        return seen_in(DataLoader(dataset, batch_size=3, num_workers=workers), epochs=2)
    return seen_in(dataset, batch_size=3, num_workers=workers, epochs=2)


@pytest.mark.parametrize("in_loader", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", STREAMS)
def test_an_iterable_gives_each_item_once_over_ranks_and_workers(ranks, kind, workers, in_loader):
    wanted = [list(range(1 if kind == "empty" else 20))] * 2
    assert of_ranks(ranks(2).run(stream, kind, workers, in_loader)) == wanted
    assert of_ranks([alone(stream, kind, workers, in_loader)]) == wanted


def says_so(in_loader: bool) -> tuple[list[list[int]], int]:
    dataset = SaysSo(12)
    model = prepared()
    model.fit(DataLoader(dataset, batch_size=2) if in_loader else dataset, verbose=0, epochs=2)
    return model.network.seen, model.steps_trained


@pytest.mark.parametrize("in_loader", [False, True])
def test_what_says_that_it_shards_itself_is_left_alone_and_ends_together(ranks, in_loader):
    (first, steps), (second, other_steps) = ranks(2).run(says_so, in_loader)
    assert first == [0, 0]
    assert sorted(second) == sorted([*range(1, 12)] * 2)
    assert steps == other_steps == (12 if in_loader else 2)


class LocalPart(Dataset):
    """A map-style data set that holds this rank's part alone: 3 samples on the first rank, 8 on the second."""

    sharded = True

    def __init__(self) -> None:
        self.numbers = range(3) if group.get_rank() == 0 else range(3, 11)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.numbers[index])]), torch.zeros(1)


def local_parts(in_loader: bool) -> tuple[list[list[int]], float, list[float], int, int]:
    data = LocalPart()
    options = {} if in_loader else {"batch_size": 2}
    if in_loader:
        data = DataLoader(data, batch_size=2)
    evaluated = prepared().evaluate(data, verbose=0)["loss"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        predicted = [prepared().predict(data, verbose=0).flatten().tolist() for _ in range(2)][1]
    model = prepared()
    seen = seen_in(data, epochs=2, **options)
    model.fit(data, verbose=0, **options)
    return seen, evaluated, predicted, model.steps_trained, len(caught)


@pytest.mark.parametrize("in_loader", [False, True])
def test_a_map_style_data_set_that_holds_its_rank_s_part_is_left_alone(ranks, in_loader):
    results = ranks(2).run(local_parts, in_loader)
    assert of_ranks([seen for seen, *_ in results]) == [list(range(11))] * 2
    assert [rest for _, *rest in results] == [[5.0, list(range(11)), 4, warned] for warned in (1, 0)]


def iterable_with_drop_last(workers: int, in_loader: bool) -> list[list[int]]:
    options = {"batch_size": 4, "num_workers": workers, "drop_last": True}
    return seen_in(DataLoader(Stream(22), **options)) if in_loader else seen_in(Stream(22), **options)


@pytest.mark.parametrize("in_loader", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_drop_last_of_an_iterable_leaves_out_the_end_alone(ranks, workers, in_loader):
    assert of_ranks(ranks(2).run(iterable_with_drop_last, workers, in_loader)) == [list(range(20))]
    assert of_ranks([alone(iterable_with_drop_last, workers, in_loader)]) == [list(range(20))]


def batches_of_iterable(workers: int) -> list[list[float]]:
    dataset = Stream(22)
    batches = prepared().predict(dataset, batch_size=4, num_workers=workers, stack_outputs=False, verbose=0)
    return [batch.flatten().tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_predictions_of_an_iterable_come_in_the_batches_of_one_process(ranks, workers):
    wanted = [list(range(first, min(first + 4, 22))) for first in range(0, 22, 4)]
    for batches in [*ranks(2).run(batches_of_iterable, workers), alone(batches_of_iterable, workers)]:
        assert batches == wanted


def announced() -> tuple[str, Any]:
    written = io.StringIO()
    model = prepared()
    with contextlib.redirect_stdout(written):
        model.fit(closed_form.ramp(10), batch_size=3, verbose=2)
    return written.getvalue(), model.network.value


def test_the_start_line_tells_both_batch_sizes_and_rank_0_alone_writes(ranks):
    (written, _), (other, _) = ranks(2).run(announced)
    assert "batch 3 per process, 6 global; 10 samples; 2 steps per epoch" in written
    assert other == ""


def different_lengths() -> str:
    try:
        prepared().fit(closed_form.ramp(6 + group.get_rank()), verbose=0)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_data_that_differs_between_ranks_is_refused_everywhere(ranks):
    assert all("train_data" in text for text in ranks(2).run(different_lengths))


def unseeded_split() -> tuple[list[list[int]], bool]:
    data = Ramp(12)
    train, _ = torch.utils.data.random_split(data, [8, 4])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = seen_in(train)
    return seen, bool(caught)


def test_an_unseeded_split_is_repaired_from_rank_0(ranks):
    results = ranks(2).run(unseeded_split)
    (numbers,) = of_ranks([seen for seen, _ in results])
    assert len(set(numbers)) == len(numbers) == 8
    assert any(warned for _, warned in results)


def pids_of_workers() -> list[list[int]]:
    class Pids(Ramp):
        def __getitem__(self, index):
            # Outside of workers a few samples are compared between ranks.
            return torch.tensor([float(os.getpid() if get_worker_info() else 0)]), torch.zeros(1)

    net = Line()
    seen: list[list[int]] = []

    class Cut(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(sorted({int(value) for value in net.seen}))
            net.seen.clear()

    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output)
    model.fit(Pids(8), epochs=3, batch_size=1, num_workers=2, callbacks=Cut(), verbose=0)
    return seen


def test_workers_live_on_over_epochs(ranks):
    for seen in ranks(2).run(pids_of_workers):
        assert seen[0] == seen[1] == seen[2]
        assert len(seen[0]) == 2


def with_torchdatas(workers: int, stays: bool) -> tuple[list[list[int]], list[float], dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*set_vital")
        kind, options = StatefulDataLoader, {"num_workers": workers, "persistent_workers": stays}
        loader = kind(Ramp(13), batch_size=2, shuffle=True, **options)
        # As in the middle of a pass: its state says nothing of the order of those that follow.
        loader.load_state_dict(kind(Ramp(13), batch_size=2, shuffle=True, **options).state_dict())
        seen = seen_in(loader, epochs=3)
        unshuffled = kind(Ramp(13), batch_size=2, **options)
        predicted = prepared().predict(unshuffled, verbose=0).flatten().tolist()
        return seen, predicted, prepared().evaluate(unshuffled, verbose=0)


@pytest.mark.parametrize(("workers", "stays"), [(0, False), (1, False), (1, True)])
def test_a_stateful_loader_of_map_style_data_is_shared_out_as_a_plain_one(ranks, workers, stays):
    results = ranks(2).run(with_torchdatas, workers, stays)
    assert of_ranks([seen for seen, *_ in results]) == [list(range(13))] * 3
    assert len({tuple(epoch) for epoch in results[0][0]}) == 3
    assert same([rest for _, *rest in results]) == [list(range(13)), {"loss": 6.0}]


class Reordering(StatefulDataLoader[Any]):
    """Reads batches in its own way."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


def refuse_own_iteration() -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*set_vital")
        with pytest.raises(TypeError) as caught:
            prepared().fit(Reordering(Ramp(13), batch_size=2), verbose=0)
    return str(caught.value)


def test_a_subclass_of_it_that_reads_in_its_own_way_is_refused(ranks):
    text = same(ranks(2).run(refuse_own_iteration))
    assert "A Reordering arrived" in text and "sharded = True" in text


def stack_three_in_four(items: list[Any]) -> Any:
    """A batch that holds the first sample of a multiple of eight is left without any."""
    x, y = default_collate(items)
    kept = len(y) * (int(x[0]) % 8 > 0)
    return x[:kept], y[:kept]


def steps_of_evaluation(n: int) -> tuple[bool, list[int], list[bool], dict[str, Any]]:
    loader = DataLoader(Ramp(n), batch_size=2, collate_fn=stack_three_in_four)
    feed = make_feed(loader, Request("eval_data", lockstep=False), torch.device("cpu"))
    pieces = list(feed.pieces(0))
    evaluated = prepared().evaluate(loader, verbose=0)
    return feed.aligned, [piece.size for piece in pieces], [piece.batch is None for piece in pieces], evaluated


def test_an_evaluation_with_a_collate_function_takes_as_many_steps_on_each_rank(ranks):
    """So that within fit the ranks can agree between any two of them to stop."""
    first, second = ranks(2).run(steps_of_evaluation, 10)
    # Batches 0 and 4 are left without samples, and a sixth there is none.
    assert first[:3] == (True, [0, 2, 0], [True, False, True])
    assert second[:3] == (True, [2, 2, 0], [False, False, True])
    assert first[3] == second[3] == alone(steps_of_evaluation, 10)[3] == {"loss": 4.5}
