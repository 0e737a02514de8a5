"""A run that was ended within an epoch and resumed ends with the bits of one that was not."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset, default_collate
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import hapi
from hapi.distributed import group

sys.path.insert(0, str(Path(__file__).parent / "distributed"))
import resume_within
from resume_within import EPOCHS, ROWS, Ended, EndsAt, Kept, Noisy, X, Y, compare, trained

# What differs little from another kind.
LONGER = (
    "stateful batches",
    "weighted sampler",
    "loader with generator",
    "capped",
    "stateful, asks workers",
    "stateful rows, own collate",
    "stateful start",
    "stateful stream in a loader",
    "stateful part",
    "stateful rows in a loader",
    "compiled",
)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow) if kind in LONGER else kind
        for kind in (*resume_within.KINDS, "compiled")
    ],
)
def test_the_same_bits(tmp_path, kind):
    resume_within.check(kind, tmp_path)


def test_what_was_trained_on_is_not_loaded_again(tmp_path):
    data = Noisy()
    with pytest.raises(Ended):
        trained("dataset", tmp_path, EndsAt(17), data=data)
    data.given = 0
    trained("dataset", tmp_path, data=data, resume=True)
    assert data.given == EPOCHS * ROWS - ROWS - 4 * 5


def test_a_state_that_loads_again_nothing(tmp_path):
    data = resume_within.Stateful()
    with pytest.raises(Ended):
        trained("stateful", tmp_path, EndsAt(8), data=data)
    fresh = resume_within.Stateful()
    trained("stateful", tmp_path, data=fresh, resume=True)
    assert fresh.read == 3 * 6 - 8


@pytest.mark.parametrize("in_loader", [False, True])
def test_an_iterable_data_set_is_asked_for_its_state_once_a_pass(tmp_path, in_loader):
    asked = []

    class Counts(resume_within.Remembering):
        def state_dict(self):
            asked.append(self.read)
            return super().state_dict()

    data = Counts()
    reading = DataLoader(data, batch_size=4) if in_loader else data
    net = torch.nn.Linear(6, 3)
    model = hapi.Model(net).prepare("sgd", torch.nn.CrossEntropyLoss())
    model.fit(reading, epochs=EPOCHS, verbose=0, **({} if in_loader else {"batch_size": 4}))
    assert asked[:EPOCHS] == [0, ROWS, 2 * ROWS] and len(asked) <= EPOCHS + 2


def test_a_finished_run_that_is_called_again_keeps_the_state_of_its_data(tmp_path):
    """Nothing is left to train: what is saved anew must not be the state of data that nobody has read."""
    straight = trained("stateful stream", tmp_path / "straight", Kept(), epochs=3)
    for epochs in (2, 2, 3):
        resumed = trained("stateful stream", tmp_path / "cut", Kept(), epochs=epochs, resume=True)
    compare("stateful stream", straight, resumed)


@pytest.mark.parametrize("kind", ["stateful stream", "tensors"])
def test_a_save_before_a_resumed_epoch_reads_on_is_one_within_it(tmp_path, kind):
    class SavesAtEpoch(hapi.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if self.model.steps_trained % 12:
                self.model.save(tmp_path / "again")

    straight = trained(kind, tmp_path / "straight", Kept())
    with pytest.raises(Ended):
        trained(kind, tmp_path / "cut", EndsAt(17))
    trained(kind, tmp_path / "cut", SavesAtEpoch(), resume=True)
    compare(kind, straight, trained(kind, tmp_path / "more", Kept(), resume=str(tmp_path / "again")))


@pytest.mark.parametrize("one", [True, False], ids=["one for both", "two"])
@pytest.mark.parametrize("stop", [EndsAt(17), EndsAt(12, in_evaluation=True)], ids=["training", "evaluation"])
def test_evaluation_data_with_a_state_goes_on_too(tmp_path, one, stop):
    def run(folder, *callbacks, resume=False):
        torch.manual_seed(1)
        net = torch.nn.Linear(6, 3)
        train = resume_within.Remembering()
        evaluation = train if one else resume_within.Remembering()
        model = hapi.Model(net).prepare("adam", torch.nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
        keep = hapi.callbacks.ModelCheckpoint(every_n_steps=1)
        history = model.fit(
            train, evaluation, batch_size=4, epochs=EPOCHS, save_dir=folder, verbose=0, seed=3, resume=resume,
            callbacks=[keep, *callbacks],
        )  # fmt: skip
        return [*net.parameters()], history.history

    weights, history = run(tmp_path / "straight")
    with pytest.raises(Ended):
        run(tmp_path / "cut", stop)
    again, resumed = run(tmp_path / "cut", resume=True)
    assert all(map(torch.equal, weights, again)) and resumed == history


def test_a_state_that_wants_to_be_told_more_is_not_asked(tmp_path):
    class Told(resume_within.StartsAt):
        def state_dict(self, samples, from_beginning):
            raise AssertionError("asked")

    trained("stream", tmp_path, data=Told())


def test_the_state_of_other_data_is_refused_in_words(tmp_path):
    with pytest.raises(Ended):
        trained("stateful stream", tmp_path, EndsAt(5))
    with pytest.raises(ValueError, match=r"given to StartsAt.load_state_dict, which refused it: KeyError: 'at'"):
        trained("stateful start", tmp_path, resume=True)


def test_a_restart_goes_on_from_what_it_has_saved_since_the_checkpoint_that_was_named(tmp_path, monkeypatch):
    straight = trained("tensors", tmp_path / "straight", Kept())
    with pytest.raises(Ended):
        trained("tensors", tmp_path / "first", EndsAt(5))
    named = str(tmp_path / "first" / "step_5")
    monkeypatch.setattr(group, "run_name", lambda: "job")
    with pytest.raises(Ended):
        trained("tensors", tmp_path / "cut", EndsAt(20), resume=named)
    monkeypatch.setattr(group, "was_restarted", lambda: True)
    began = []

    class Notes(hapi.callbacks.Callback):
        def on_train_begin(self, logs=None):
            began.append(self.model.steps_trained)

    compare("tensors", straight, trained("tensors", tmp_path / "cut", Kept(), Notes(), resume=named))
    assert began == [20]


def test_a_batch_without_samples_moves_no_state(tmp_path):
    class Gapped(resume_within.Stateful):
        def __iter__(self):
            for batch in super().__iter__():
                yield tuple(part[: len(part) * (self.at != 2)] for part in batch)

    with pytest.raises(Ended):
        trained("stateful", tmp_path, EndsAt(8), data=Gapped())
    fresh = Gapped()
    trained("stateful", tmp_path, data=fresh, resume=True)
    # Five of six batches have samples: eight steps are six batches and, past the gap, four.
    assert fresh.read == 3 * 6 - 10


def test_a_save_that_another_rank_had_no_part_in_resumes_with_a_warning(tmp_path):
    """As if rank 0 alone had called save within an epoch."""
    with pytest.raises(Ended):
        trained("dataset", tmp_path, EndsAt(5))
    path = hapi.checkpoint.training_path(tmp_path / "step_5")
    content = torch.load(path, weights_only=True)
    content["position"]["cursor"]["ranks"] = None
    torch.save(content, path)
    with pytest.warns(UserWarning, match="logs will be those of its rest"):
        resumed = trained("dataset", tmp_path, Kept(), resume=True)
    assert resumed.kept[0] == [1, 2, 3]


def without(path, *keys, value=None):
    """Take a state out of a checkpoint."""
    file = hapi.checkpoint.training_path(path)
    content = torch.load(file, weights_only=True)
    place = content
    for key in keys[:-1]:
        place = place[key]
    assert place[keys[-1]] not in (None, {}), "it was not there"
    place[keys[-1]] = value
    torch.save(content, file)


@pytest.mark.filterwarnings("ignore:The run to resume had no scheduler")
@pytest.mark.parametrize(
    ("kind", "keys", "value"),
    [
        ("tensors", ("optimizer", "state"), {}),
        ("tensors", ("scheduler",), None),
        ("fp16", ("scaler",), {}),
        ("tensors", ("buffers",), {}),
        ("tensors", ("counters", "epochs_trained"), 0),
        ("tensors", ("counters", "steps_trained"), 0),
        ("tensors", ("callbacks", "History.0"), {"epoch": [], "history": {}}),
        ("tensors", ("position", "seed"), 8),
        ("tensors", ("position", "cursor", "within"), None),
        ("tensors", ("position", "cursor", "within", "step"), 1),
        ("tensors", ("position", "cursor", "within", "taken"), 0),
        ("accumulating", ("position", "cursor", "within", "learning_rate"), 0.0),
        ("tensors", ("position", "cursor", "ranks", 0, "values", "loss_sum"), torch.zeros((), dtype=torch.float64)),
        ("tensors", ("position", "cursor", "ranks", 0, "values", "metrics"), [{"correct": 0, "count": 0}]),
        ("loader with generator", ("position", "cursor", "ranks", 0, "data"), None),
        ("stateful", ("position", "cursor", "ranks", 0, "data"), {"at": 0}),
        ("stateful stream", ("position", "cursor", "ranks", 0, "data"), None),
        ("stateful rows", ("position", "cursor", "ranks", 0, "dataset"), None),
        ("capped", ("position", "cursor", "iterations"), 0),
    ],
)
@pytest.mark.slow
def test_each_state_is_needed(tmp_path, kind, keys, value):
    straight = trained(kind, tmp_path / "straight", Kept())
    last = int(straight.steps_trained * 0.55)
    in_evaluation = "learning_rate" in keys
    resume_within.end(kind, tmp_path / "cut", EndsAt(last, in_evaluation=in_evaluation))
    newest, _ = hapi.checkpoint.newest(tmp_path / "cut", straight.network)
    if "metrics" in keys:
        cursor = torch.load(f"{newest}.opt.pt", weights_only=True)["position"]["cursor"]
        states = cursor["ranks"][0]["values"]["metrics"][0]
        value = [{name: torch.zeros_like(tensor) for name, tensor in states.items()}]
    without(newest, *keys, value=value)
    with pytest.raises(AssertionError, match=kind):
        resume_within.compare(kind, straight, trained(kind, tmp_path / "cut", Kept(), resume=newest))


class NoisyLoader(DataLoader):
    """Adds noise on the way, in an __iter__ of its own."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield x + 0.1 * torch.randn(6), y


class PlainWay(DataLoader):
    """An __iter__ of its own that changes nothing."""

    def __iter__(self):
        yield from super().__iter__()


def picked(items):
    """A batch that has its samples, or none, by chance."""
    x, y = default_collate(items)
    kept = len(y) if torch.rand(()) < 0.7 else 0
    return x[:kept] + 0.1 * torch.randn(6), y[:kept]


LOADERS = {
    "noise in __iter__": lambda: NoisyLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    "noise behind": lambda: PlainWay(Noisy(), batch_size=4, shuffle=True),
    "noise behind, left alone": lambda: sharded(PlainWay(Noisy(), batch_size=4, shuffle=True)),
    "batches without samples": lambda: PlainWay(Noisy(), batch_size=4, shuffle=True, collate_fn=picked),
    "workers": lambda: NoisyLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1),
    "stateful": lambda: NoisyStateful(),
}


class NoisyStateful(resume_within.Stateful):
    """Knows its place, and one of its batches has no samples."""

    def __iter__(self):
        for x, y in super().__iter__():
            kept = len(y) * (self.at != 3)
            yield x[:kept] + 0.1 * torch.randn(6), y[:kept]


def sharded(loader):
    loader.sharded = True
    return loader


@pytest.mark.parametrize("kind", LOADERS)
def test_what_is_read_as_it_is_has_streams_of_its_own_for_each_batch(tmp_path, kind):
    straight = trained("loader", tmp_path / "straight", Kept(), data=LOADERS[kind]())
    per_epoch = straight.steps_trained // EPOCHS
    for stop in (EndsAt(per_epoch - 2), EndsAt(per_epoch + 3)):
        with pytest.raises(Ended):
            trained("loader", tmp_path / "cut", stop, data=LOADERS[kind](), resume=True)
    compare(kind, straight, trained("loader", tmp_path / "cut", Kept(), data=LOADERS[kind](), resume=True))


class CountsItself(Sampler):
    """Its order depends on how often it was asked for one, which it tells."""

    def __init__(self):
        self.passes = {"begun": 0}

    def __len__(self):
        return ROWS

    def __iter__(self):
        self.passes["begun"] += 1
        generator = torch.Generator().manual_seed(self.passes["begun"])
        yield from torch.randperm(ROWS, generator=generator).tolist()

    def state_dict(self):
        return self.passes

    def load_state_dict(self, state):
        self.passes = dict(state)


class CountsBatches(BatchSampler):
    """The same of batches."""

    def state_dict(self):
        return self.sampler.state_dict()

    def load_state_dict(self, state):
        self.sampler.load_state_dict(state)


SAMPLERS = {
    "a sampler": lambda: {"batch_size": 4, "sampler": CountsItself()},
    "a sampler of samples": lambda: {"batch_size": None, "sampler": CountsBatches(CountsItself(), 4, False)},
    "a batch sampler": lambda: {"batch_sampler": CountsBatches(CountsItself(), 4, False)},
    "torchdata's": lambda: {"batch_size": 4, "sampler": StatefulDistributedSampler(range(ROWS), 1, 0)},
}


class Listed(Noisy):
    def __getitem__(self, index):
        if not isinstance(index, list):
            return super().__getitem__(index)
        x, y = zip(*map(super().__getitem__, index), strict=True)
        return torch.stack(x), torch.stack(y)


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("last", [pytest.param(12, marks=pytest.mark.slow), 17])
def test_samplers_are_asked_where_they_are(tmp_path, kind, last):
    """Resumed after the first epoch of 12 steps, and within the second."""

    def data():
        return DataLoader(Listed(), **SAMPLERS[kind]())

    straight = trained("loader", tmp_path / "straight", Kept(), data=data())
    with pytest.raises(Ended):
        trained("loader", tmp_path / "cut", EndsAt(last), data=data())
    compare(kind, straight, trained("loader", tmp_path / "cut", Kept(), data=data(), resume=True))
