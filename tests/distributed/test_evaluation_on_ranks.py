"""Evaluation and prediction over ranks: each sample once, exact values, the network's own structure in order."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from closed_form import Line, Ramp, mean_output, prepared, ramp
from ranks import alone, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hapi
from hapi.distributed import group
from hapi.metrics import Accuracy

SIZES = [(n, batch) for n in range(1, 10) for batch in range(1, 5)]


def evaluate_sizes(kind: str) -> list[float]:
    """The mean of 0 ... n-1, for many n and batch sizes."""
    model = prepared()
    losses = []
    for n, batch in SIZES:
        x, y = ramp(n)
        data, options = {
            "tensors": ((x, y), {"batch_size": batch}),
            "data set": (Ramp(n), {"batch_size": batch}),
            "loader": (DataLoader(Ramp(n), batch_size=batch), {}),
            "list": (list(zip(x.split(batch), y.split(batch), strict=True)), {}),
        }[kind]
        losses.append(model.evaluate(data, verbose=0, **options)["loss"])
    return losses


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["tensors", "data set", "loader", "list"])
def test_no_sample_is_padded_in_lost_or_weighed_twice(ranks, kind, world):
    assert same(ranks(world).run(evaluate_sizes, kind)) == pytest.approx([(n - 1) / 2 for n, _ in SIZES], rel=1e-6)


class Extent(hapi.metrics.Metric):
    """One state of each kind."""

    def __init__(self) -> None:
        super().__init__(name="extent")
        self.add_state("total", torch.tensor(1.0))
        self.add_state("count", 0)
        self.add_state("highest", torch.tensor(-torch.inf), reduce="max")
        self.add_state("lowest", torch.tensor(torch.inf), reduce="min")
        self.add_state("pieces", torch.empty(0), reduce="cat")

    def update(self, outputs: Tensor, labels: Any) -> None:
        values = outputs[:, 0]
        self.total += values.sum()
        self.count += len(values)
        self.highest = torch.maximum(self.highest, values.max())
        self.lowest = torch.minimum(self.lowest, values.min())
        self.pieces.append(values)

    def compute(self) -> float:
        values = self.concatenated("pieces")
        assert len(values) == self.count
        # The default, 1, counts once.
        return float(self.total + 100 * self.highest + 10_000 * self.lowest + 1_000_000 * values.median())


def first_positive(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs[:, 0] > 0) == (labels > 0)


def built_in() -> list[Any]:
    return [
        hapi.metrics.Accuracy(topk=(1, 2)),
        hapi.metrics.F1(num_classes=3),
        first_positive,
        Extent(),
    ]


def of_torchmetrics() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchmetrics
        from torchmetrics import classification as of
    return [
        torchmetrics.MetricCollection(
            {
                "acc": of.MulticlassAccuracy(3, average="micro"),
                "macro": of.MulticlassF1Score(3, average="macro"),
                # Its states are lists, of unequal length on the ranks.
                "auroc": of.MulticlassAUROC(3),
            }
        ),
        of.MulticlassMatthewsCorrCoef(3),
    ]


def evaluate_metrics(which: Callable[[], list[Any]], n: int, batch: int) -> dict[str, float]:
    net = nn.Linear(3, 3)
    generator = torch.Generator().manual_seed(n)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x, y = torch.randn(n, 3, generator=generator), torch.arange(n) % 3
    model = hapi.Model(net).prepare(loss=nn.CrossEntropyLoss(), metrics=which())
    with warnings.catch_warnings():
        # torchmetrics warns of classes without samples.
        warnings.simplefilter("ignore")
        return model.evaluate((x, y), batch_size=batch, verbose=0)


@pytest.mark.parametrize("which", [built_in, of_torchmetrics])
@pytest.mark.parametrize(("n", "batch"), [(3, 1), (3, 3), (7, 2), (14, 5), (20, 1)])
def test_metrics_are_those_of_one_process_with_ranks_that_saw_nothing_too(ranks, which, n, batch):
    wanted = alone(evaluate_metrics, which, n, batch)
    assert len(wanted) >= 5
    # 3 samples in a batch of 3 leave two of three ranks without an update.
    assert same(ranks(3).run(evaluate_metrics, which, n, batch)) == pytest.approx(wanted, rel=1e-5)


def binary_metrics(n: int) -> dict[str, float]:
    net = nn.Linear(1, 1)
    metrics = [
        hapi.metrics.Precision(),
        hapi.metrics.Recall(),
        hapi.metrics.Auc(),
        hapi.metrics.MeanAbsoluteError(),
        hapi.metrics.MeanSquaredError(),
    ]
    nn.init.constant_(net.weight, 0.05)
    nn.init.constant_(net.bias, 0.1)
    x = torch.linspace(0, 15, n)[:, None]
    y = ((torch.arange(n) * 7) % 3 > 0).float()[:, None]
    return hapi.Model(net).prepare(metrics=metrics).evaluate((x, y), batch_size=2, verbose=0)


@pytest.mark.parametrize("n", [2, 3, 5, 9, 24])
def test_binary_metrics_are_those_of_one_process(ranks, n):
    wanted = alone(binary_metrics, n)
    assert len(wanted) == 5
    assert same(ranks(4).run(binary_metrics, n)) == pytest.approx(wanted, rel=1e-6)


class OneSided(IterableDataset):
    """All on the first rank; on the second nothing at all."""

    sharded = True

    def __iter__(self) -> Any:
        if group.get_rank() == 0:
            for number in range(5):
                yield torch.tensor([float(number)]), torch.zeros(1)


def evaluate_one_sided() -> tuple[dict[str, float], list[float], int]:
    model = prepared(metrics=[Extent(), hapi.metrics.MeanAbsoluteError()])
    result = model.evaluate(OneSided(), batch_size=2, verbose=0)
    history = model.fit(OneSided(), OneSided(), batch_size=2, verbose=0)
    return result, [history.history[name][0] for name in ("loss", "val_loss", "extent")], model.steps_trained


def test_a_rank_without_any_batch_reports_the_same_values(ranks):
    result, (loss, val_loss, _), steps = same(ranks(2).run(evaluate_one_sided))
    assert result == {"loss": 2.0, "extent": 1 + 10 + 400 + 0 + 2_000_000, "mae": 2.0}
    assert steps == 3
    # Weights 1, 1 - 0.5, 0.5 - 2.5, and after the last batch -2 - 4.
    assert loss == pytest.approx((1 * 1 + 5 * 0.5 + 4 * -2) / 5)
    assert val_loss == pytest.approx(2.0 * -6)


Pair = namedtuple("Pair", "first second")


class Structured(nn.Module):
    """Outputs of one structure or another; x: (N, 1), the number of each sample."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Any:
        makers = {
            "tensor": lambda: x * 2,
            "tuple": lambda: (x, x.long().flatten()),
            "named": lambda: Pair(x, {"half": x.half(), "brain": x.bfloat16(), "double": x.double()}),
            "dict": lambda: {"a": x, "b": [x > 2, torch.complex(x, -x)], "empty": x[:, :0], "name": "constant"},
            "wide": lambda: x[:, :, None].expand(-1, 2, 3),
            "ragged": lambda: x.expand(-1, int(x[0]) + 1),
            "scalar": lambda: x.sum(),
        }
        return makers[self.kind]()


def predict_structure(kind: str, n: int, stacked: bool = True) -> Any:
    model = hapi.Model(Structured(kind))
    try:
        return model.predict(ramp(n)[0], batch_size=2, stack_outputs=stacked, verbose=0)
    except ValueError as error:
        return str(error)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, tuple | list):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return first == second


@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("kind", ["tensor", "tuple", "named", "dict", "wide"])
def test_predictions_keep_the_network_s_structure_in_the_order_of_the_data(ranks, kind, n):
    with torch.no_grad():
        wanted = Structured(kind)(ramp(n)[0])
    for predicted in [*ranks(4).run(predict_structure, kind, n), alone(predict_structure, kind, n)]:
        assert equal(predicted, wanted)


@pytest.mark.parametrize("n", [1, 3, 6])
def test_unstacked_predictions_are_the_batches_of_one_process(ranks, n):
    wanted = [Structured("ragged")(batch) for batch in ramp(n)[0].split(2)]
    for predicted in [
        *ranks(2).run(predict_structure, "ragged", n, False),
        alone(predict_structure, "ragged", n, False),
    ]:
        assert equal(predicted, wanted)


@pytest.mark.parametrize(
    ("kind", "n", "said"), [("ragged", 4, "Rows differ in shape"), ("scalar", 1, "not one row each")]
)
def test_what_cannot_be_stacked_is_refused_on_all_ranks(ranks, kind, n, said):
    for text in ranks(2).run(predict_structure, kind, n):
        assert said in text
        assert "stack_outputs=False" in text


def tokens() -> list[float]:
    """Ragged rows of tokens, padded with labels that do not count; one row has none that does."""
    lengths = [4, 1, 0, 3, 2]
    x = torch.arange(20.0).reshape(5, 4, 1)
    y = torch.tensor([[n % 2 if place < length else -100 for place in range(4)] for n, length in enumerate(lengths)])
    net = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.1], [-0.05]]))
    model = hapi.Model(Transposed(net)).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss())
    evaluated = model.evaluate((x, y), batch_size=1, verbose=0)["loss"]
    trained = model.fit((x, y), global_batch_size=5, verbose=0).history["loss"][0]
    return [evaluated, trained, *net.weight.detach().flatten().tolist()]


class Transposed(nn.Module):
    """Classes in the second dimension, as cross-entropy wants them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).transpose(1, 2)


def tokens_by_hand() -> list[float]:
    lengths = [4, 1, 0, 3, 2]
    x = torch.arange(20.0).reshape(5, 4, 1)
    weight = torch.tensor([[0.1], [-0.05]], requires_grad=True)
    kept = torch.cat([x[n, :length] for n, length in enumerate(lengths)])
    labels = torch.cat([torch.full((length,), n % 2) for n, length in enumerate(lengths)])
    loss = nn.functional.cross_entropy(kept @ weight.T, labels)
    loss.backward()
    return [loss.item(), loss.item(), *(weight - 0.1 * weight.grad).flatten().tolist()]


@pytest.mark.parametrize("world", [2, 4])
def test_tokens_that_do_not_count_weigh_nothing(ranks, world):
    assert same(ranks(world).run(tokens)) == pytest.approx(tokens_by_hand(), rel=1e-5)
    assert alone(tokens) == pytest.approx(tokens_by_hand(), rel=1e-5)


def nothing_counts() -> str:
    """All labels are ignored: the logs, as text since NaN equals nothing, and the weights."""
    net = nn.Linear(1, 2, bias=False)
    nn.init.constant_(net.weight, 0.5)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), Accuracy())
    data = torch.ones(4, 1), torch.full((4,), -100)
    history = model.fit(data, data, batch_size=1, verbose=0).history
    return repr((history, model.evaluate(data, batch_size=1, verbose=0)["loss"], net.weight.flatten().tolist()))


def test_where_nothing_counts_the_loss_is_nan_and_there_is_no_step(ranks):
    text = same(ranks(2).run(nothing_counts))
    assert text.startswith("({'loss': [nan], 'acc': ") and "'val_loss': [nan]" in text
    assert text.endswith("nan, [0.5, 0.5])")
    assert text == alone(nothing_counts)


def dict_batches() -> float:
    model = hapi.Model(Line()).prepare(loss=mean_output)
    x, y = ramp(5)
    return model.evaluate({"x": x, "target": y}, batch_size=2, verbose=0)["loss"]


def test_dict_batches_are_counted_by_their_samples(ranks):
    assert same(ranks(2).run(dict_batches)) == 2.0


def rank_dependent() -> tuple[dict[str, list[float]], dict[str, float], list[dict[str, float]]]:
    """A loss of its own on each rank; what history, evaluate and callbacks get."""
    rank = group.get_rank()
    net = Line()

    def loss(outputs, labels):
        return outputs.mean() * 0 + rank

    seen: list[dict[str, float]] = []

    class Keep(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(logs)

        def on_eval_end(self, logs=None):
            seen.append(logs)

    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=1.0), loss, lambda o, _: o[:, 0] + rank)
    data = ramp(3)
    history = model.fit(data, data, global_batch_size=4, epochs=2, shuffle=False, callbacks=Keep(), verbose=0)
    return history.history, model.evaluate(data, batch_size=2, verbose=0), seen


def test_values_of_epochs_and_evaluations_are_the_same_floats_on_all_ranks(ranks):
    history, evaluated, seen = same(ranks(2).run(rank_dependent))
    # 3 samples train on the first rank alone; evaluation fills the first rank's batch of two.
    assert history["loss"] == [0.0, 0.0]
    assert history["val_loss"] == [1 / 3] * 2
    assert evaluated["loss"] == 1 / 3
    assert evaluated["lambda"] == pytest.approx((0 + 1 + 3) / 3)
    assert all(isinstance(value, float) for logs in seen for value in logs.values())


def equal_epochs() -> dict[str, list[float]]:
    model = prepared(metrics=[Extent()], weight=1.0)
    model.optimizer.param_groups[0]["lr"] = 0.0
    data = ramp(5)
    return model.fit(data, data, batch_size=1, epochs=2, verbose=0).history


def test_an_epoch_s_values_are_means_over_its_samples_and_start_anew(ranks):
    history = same(ranks(2).run(equal_epochs))
    assert history["loss"] == history["val_loss"] == [2.0, 2.0]
    assert history["extent"] == history["val_extent"] == [1 + 10 + 400 + 2_000_000] * 2


def read_on_rank_0() -> list[float]:
    """A callback that reads, on the first rank alone, whatever it is given."""
    read: list[float] = []

    class Read(hapi.callbacks.Callback):
        def look(self, logs):
            if group.get_rank() == 0:
                read.extend(float(value) for value in (logs or {}).values() if value is not None)

        def on_train_batch_end(self, step, logs=None):
            self.look(logs)

        def on_eval_batch_end(self, step, logs=None):
            self.look(logs)

        def on_epoch_end(self, epoch, logs=None):
            self.look(logs)

    data = ramp(5)
    prepared(metrics=[Extent()]).fit(data, data, batch_size=1, callbacks=Read(), verbose=0)
    return read


def test_one_rank_may_read_running_values_alone(ranks):
    first, second = ranks(2).run(read_on_rank_0)
    assert len(first) > 10
    assert second == []
