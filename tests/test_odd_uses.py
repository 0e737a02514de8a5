"""Legitimate uses that are not the usual ones: each gives plain torch's numbers, or says what to write instead."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, Subset, TensorDataset
from torchvision import transforms

import hapi
from hapi.callbacks import Callback
from hapi.datasets import FashionMNIST
from hapi.metrics import F1, Accuracy, Metric

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(53, 6, generator=GENERATOR)
Y = torch.randint(5, (53,), generator=GENERATOR)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5))


def prepared(net: nn.Module | None = None, loss: Any = None, kind: Any = hapi.Model, **options: Any) -> hapi.Model:
    net = net if net is not None else network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    return kind(net).prepare(optimizer, loss or nn.CrossEntropyLoss(), **options)


def stepped(loss: Any, lr: float = 1.0) -> nn.Module:
    """The network after one plain step."""
    net = network()
    loss(net).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= lr * parameter.grad
    return net


def close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Masked(hapi.Model):
    """Leaves labels out by itself: in those of the data there are none to ignore."""

    def train_step(self, inputs: Any, labels: Any) -> Any:
        return super().train_step(inputs, torch.where(labels < 2, labels, -100))

    eval_step = train_step


def test_labels_that_a_step_masks_are_weighed() -> None:
    x, y = X[:48], Y[:48]
    masked = torch.where(y < 2, y, -100)
    subject = prepared(kind=Masked)
    subject.fit((x, y), batch_size=4, accumulate_grad_batches=12, shuffle=False, verbose=0)
    close(subject.network, stepped(lambda net: cross_entropy(net(x), masked)))
    values = [subject.evaluate((x, y), batch_size=size, verbose=0)["loss"] for size in (4, 7, 48)]
    with torch.no_grad():
        assert values == pytest.approx([float(cross_entropy(subject.network(x), masked))] * 3)


class Change(Callback):
    """A layer more, or another one, from the second epoch on."""

    def __init__(self, change: Callable[[Any, Any], None]) -> None:
        self.change = change

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.change(self.model.network, self.model.optimizer)


def grow(net: Any, optimizer: Any) -> None:
    torch.manual_seed(7)
    layer = nn.Linear(5, 5)
    net.append(layer)
    optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.1})


def replace(net: Any, optimizer: Any) -> None:
    """As many parameters as before, of the same shapes."""
    torch.manual_seed(7)
    net[0] = nn.Linear(6, 5)
    optimizer.param_groups[0]["params"] = list(net.parameters())


def changed(change: Callable[[Any, Any], None]) -> nn.Module:
    subject = prepared()
    subject.fit((X, Y), batch_size=53, epochs=3, callbacks=Change(change), verbose=0)
    return subject.network


@pytest.mark.parametrize("change", [grow, replace])
def test_layers_added_or_replaced_while_training_train_as_in_torch(change: Callable[[Any, Any], None]) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for epoch in range(3):
        if epoch == 1:
            change(net, optimizer)
        optimizer.zero_grad()
        cross_entropy(net(X), Y).backward()
        optimizer.step()
    close(changed(change), net)
    by_hand = prepared()
    for epoch in range(3):
        if epoch == 1:
            change(by_hand.network, by_hand.optimizer)
        by_hand.train_batch(X, Y)
    close(by_hand.network, net)


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("network", nn.Linear(6, 5), r"hapi\.Model\(network\)"),
        ("loss", nn.MSELoss(), r"model\.prepare\(optimizer, loss\)"),
        ("optimizer", None, r"model\.prepare\(optimizer, loss\)"),
    ],
)
def test_what_was_prepared_is_not_assigned(name: str, value: Any, cure: str) -> None:
    subject = prepared()
    with pytest.raises(AttributeError, match=rf"Model\.{name} was assigned.*{cure}"):
        setattr(subject, name, value)


def test_a_head_replaced_after_prepare_is_found() -> None:
    subject = prepared()
    subject.network[0] = nn.Linear(6, 5)
    with pytest.raises(ValueError, match=r"2 parameters, of which 2 .* not of the network"):
        subject.fit((X, Y), verbose=0)


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs * self.scale, labels) + self.scale.square()


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.Adam, lambda parameters: torch.optim.SGD(parameters, 0.1)])
def test_an_optimizer_made_here_trains_the_losss_parameters_too(optimizer: Any) -> None:
    loss = Scaled()
    hapi.Model(network()).prepare(optimizer, loss).fit((X, Y), verbose=0)
    assert float(loss.scale.detach()) < 1.0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), self.layer(-x)


def test_a_list_of_losses_refuses_labels_that_one_of_them_leaves_out() -> None:
    net = Two()
    losses = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss()]
    subject = hapi.Model(net, labels=2).prepare("sgd", losses)
    expected = float(cross_entropy(net(X)[0], Y).detach() + cross_entropy(net(X)[1], Y.flip(0)).detach())
    assert subject.evaluate((X, Y, Y.flip(0)), batch_size=7, verbose=0)["loss"] == pytest.approx(expected)
    ignored = torch.where(torch.arange(53) == 50, -100, Y)
    with pytest.raises(ValueError, match=r"labels -100, which it leaves out.*one callable"):
        subject.evaluate((X, Y, ignored), batch_size=7, verbose=0)


def test_a_loss_that_is_changed_after_prepare_is_obeyed() -> None:
    labels = torch.where(torch.arange(53) % 4 == 0, -100, Y)
    loss = nn.CrossEntropyLoss(label_smoothing=0.2)
    subject = prepared(loss=loss)
    loss.label_smoothing = 0.0
    with torch.no_grad():
        outputs = subject.network(X)
        assert subject.evaluate((X, labels), batch_size=7, verbose=0)["loss"] == pytest.approx(
            float(cross_entropy(outputs, labels))
        )
        loss.ignore_index = 1
        expected = float(cross_entropy(outputs, Y, ignore_index=1))
    assert subject.evaluate((X, Y), batch_size=7, verbose=0)["loss"] == pytest.approx(expected)
    assert loss.reduction == "mean"


@pytest.mark.parametrize("batch_size", [1, 2, 7, 53])
def test_classes_of_weight_zero_keep_their_part_of_the_smoothing(batch_size: int) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), label_smoothing=0.2)
    subject = prepared(loss=loss)
    with torch.no_grad():
        expected = float(loss(subject.network(X), Y))
    assert subject.evaluate((X, Y), batch_size=batch_size, verbose=0)["loss"] == pytest.approx(expected)


def test_uint8_labels_hold_no_number_to_ignore() -> None:
    """-100 would be class 156 to them."""
    torch.manual_seed(0)
    net = nn.Linear(6, 200)
    labels = (torch.arange(53) % 3 + 155).to(torch.uint8)
    subject = hapi.Model(net).prepare(loss=nn.CrossEntropyLoss(), metrics=Accuracy())
    with torch.no_grad():
        expected = float(cross_entropy(net(X), labels.long()))
        right = float((net(X).argmax(1) == labels).double().mean())
    assert subject.evaluate((X, labels), batch_size=7, verbose=0) == pytest.approx({"loss": expected, "acc": right})


class Mine(nn.CrossEntropyLoss):
    """Another name for the same."""


def test_a_subclass_that_computes_the_same_is_weighed_the_same() -> None:
    weight = torch.tensor([1.0, 5.0, 0.2, 1.0, 3.0])
    subject = prepared(loss=Mine(weight=weight))
    with torch.no_grad():
        expected = float(cross_entropy(subject.network(X), Y, weight))
    assert subject.evaluate((X, Y), batch_size=7, verbose=0)["loss"] == pytest.approx(expected)


@pytest.mark.parametrize("metric", [Accuracy(), F1(num_classes=5)])
def test_several_classes_at_once_are_refused_by_metrics_of_one(metric: Any) -> None:
    labels = (X[:, :5] > 0).float()
    subject = prepared(loss=nn.BCEWithLogitsLoss(), metrics=metric)
    with pytest.raises(ValueError, match=r"rows do not add up to 1: several classes at once.*Multilabel"):
        subject.evaluate((X, labels), verbose=0)
    one_hot = nn.functional.one_hot(Y, 5).float()
    assert subject.evaluate((X, one_hot), verbose=0)[metric.name] >= 0


class Forever(Sampler[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(53)


def test_samplers_without_a_length() -> None:
    data = TensorDataset(X, Y)
    for loader in (
        DataLoader(data, batch_size=4, sampler=Forever()),
        DataLoader(data, batch_sampler=BatchSampler(Forever(), 4, drop_last=False)),
    ):
        subject = prepared()
        subject.fit(loader, num_iters=20, verbose=0)
        assert subject.steps_trained == 20


def test_indices_that_count_from_the_end() -> None:
    predicted = prepared().predict(Subset(TensorDataset(X, Y), [-1, 3, -2]), verbose=0)
    assert torch.equal(predicted, prepared().predict(X[[52, 3, 51]], verbose=0))


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, image: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(image if other is None else image + other)


@pytest.mark.parametrize(
    ("options", "data", "count"),
    [
        ({"labels": ["label"]}, {"image": X}, 1),
        ({"inputs": ["image"], "labels": ["label"]}, {"image": X}, 1),
        ({"inputs": 1, "labels": 1}, TensorDataset(X), 1),
        ({"labels": 1}, (X,), 1),
        ({"inputs": 2, "labels": 1}, (X, X), 2),
        ({"inputs": 2, "labels": 1}, (X, X, Y), 2),
    ],
)
def test_predict_needs_no_labels(options: Any, data: Any, count: int) -> None:
    net = Image()
    predicted = hapi.Model(net, **options).predict(data, verbose=0)
    assert torch.equal(predicted, net(count * X).detach())
    with pytest.raises((ValueError, TypeError)):
        hapi.Model(net, labels=["label"]).prepare("sgd", nn.CrossEntropyLoss()).fit({"image": X}, verbose=0)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


class Copies(Callback):
    """Keeps a copy of the whole model, in the middle of a fit with workers."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.kept = copy.deepcopy(self.model)


def test_a_model_is_pickled_and_copied_without_its_data() -> None:
    data = Rows()
    subject = hapi.Model(network()).prepare("adam", nn.CrossEntropyLoss(), Accuracy())
    copies = Copies()
    subject.fit(DataLoader(data, batch_size=4, num_workers=1), epochs=2, callbacks=copies, verbose=0)
    for other in (pickle.loads(pickle.dumps(subject)), copy.deepcopy(subject), copies.kept):
        assert other._engine.cursor is None and other.epochs_trained >= 1
        close(other.network, subject.network)
        other.fit((X, Y), verbose=0)
        assert other.network is not subject.network and other.epochs_trained >= 2
    gone = weakref.ref(data)
    del data, copies, other
    gc.collect()
    assert gone() is None


def test_what_super_gives_can_be_looked_at() -> None:
    seen = []

    class Looks(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            loss, outputs = super().train_step(inputs, labels)
            seen.append((loss.item(), float(loss), float(loss.detach()), float(loss.mean.detach())))
            return -(1 - loss) + 1, outputs

    labels = torch.where(torch.arange(53) % 4 == 0, -100, Y)
    subject = prepared(kind=Looks)
    with torch.no_grad():
        expected = float(cross_entropy(subject.network(X), labels))
    subject.fit((X, labels), batch_size=53, verbose=0)
    assert seen == [pytest.approx((expected,) * 4)]
    close(subject.network, stepped(lambda net: cross_entropy(net(X), labels)))

    class Stacks(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            loss, outputs = super().train_step(inputs, labels)
            return torch.stack([loss, outputs.mean()]).sum(), outputs

    with pytest.raises(TypeError, match=r"stack received the loss of super.*loss\.mean"):
        prepared(kind=Stacks).fit((X, Y), verbose=0)


def test_a_later_loss_without_a_graph_is_said() -> None:
    class Skips(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            loss, outputs = super().train_step(inputs, labels)
            return (torch.zeros(()) if self.steps_trained == 2 else loss), outputs

    with pytest.raises(ValueError, match="does not depend on any parameter"):
        prepared(kind=Skips).fit((X, Y), batch_size=10, verbose=0)


class Maxima(Metric):
    """Keeps a number of each batch."""

    def __init__(self) -> None:
        super().__init__("maxima")
        self.add_state("all", torch.empty(0), reduce="cat")

    def update(self, outputs: Any, labels: Any) -> None:
        self.all.append(outputs.max())

    def result(self) -> torch.Tensor:
        return self.concatenated("all").sum()


@pytest.mark.parametrize("batch_size", [53, 20])
def test_numbers_kept_in_a_state_that_is_joined(batch_size: int) -> None:
    subject = prepared(metrics=Maxima())
    expected = sum(float(part.max()) for part in subject.predict(X, verbose=0).split(batch_size))
    assert subject.evaluate((X, Y), batch_size=batch_size, verbose=0)["maxima"] == pytest.approx(expected)


def test_reversed_arrays() -> None:
    x, y = X.numpy()[::-1], Y.numpy()[::-1]
    assert np.array_equal(prepared().predict(x, verbose=0), prepared().predict(X.flip(0), verbose=0))
    assert prepared().evaluate((x, y), verbose=0) == prepared().evaluate((X.flip(0), Y.flip(0)), verbose=0)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_mask_as_the_message_says(kind: Any) -> None:
    mask = kind([number % 3 == 0 for number in range(53)])
    part = Subset(TensorDataset(X, Y), np.flatnonzero(mask))
    assert torch.equal(prepared().predict(part, verbose=0), prepared().predict(X[::3], verbose=0))


def test_each_entry_of_a_prediction_by_batches_may_be_written_to() -> None:
    weight = torch.ones((), requires_grad=True)
    entries = prepared().predict(X, batch_size=8, stack_outputs=False, verbose=0)
    storages = {entry.untyped_storage().data_ptr() for entry in entries}
    assert len(storages) == len(entries) == 7
    for entry in entries:
        entry += weight
    assert [entry.requires_grad for entry in entries] == [True] * 7


class Mixup(hapi.Model):
    """The loss of the usual recipe: both labels of a mixed sample, by two calls of super."""

    def train_step(self, inputs: Any, labels: Any) -> Any:
        one, outputs = super().train_step(inputs, labels)
        two, _ = super().train_step(inputs, labels.flip(0))
        return 0.25 * one + 0.75 * two, outputs


def test_two_losses_of_super_that_count_as_much_add_up() -> None:
    subject = prepared(kind=Mixup)
    subject.fit([(X[:20], Y[:20]), (X[20:], Y[20:])], accumulate_grad_batches=2, verbose=0)

    def plain(net: nn.Module) -> torch.Tensor:
        parts = [(X[:20], Y[:20]), (X[20:], Y[20:])]
        sums = [
            0.25 * cross_entropy(net(x), y, reduction="sum") + 0.75 * cross_entropy(net(x), y.flip(0), reduction="sum")
            for x, y in parts
        ]
        return sum(sums) / 53

    close(subject.network, stepped(plain))


class Unlike(hapi.Model):
    """Two losses of which one leaves labels out; each of the forms in which they may meet."""

    form: Any = None

    def train_step(self, inputs: Any, labels: Any) -> Any:
        one, outputs = super().train_step(inputs, labels)
        two, _ = super().train_step(inputs, torch.where(labels == labels[0], -100, labels))
        return type(self).form(one, two), outputs


def test_two_losses_of_super_that_count_unlike_say_how_they_are_weighed() -> None:
    class Added(Unlike):
        form = staticmethod(lambda one, two: one + two)

    class Weighed(Unlike):
        form = staticmethod(lambda one, two: one + two.mean)

    class Multiplied(Unlike):
        form = staticmethod(lambda one, two: one * two)

    with pytest.raises(ValueError, match=r"summed over 53 and one that.*first \+ second\.mean"):
        prepared(kind=Added).fit((X, Y), batch_size=53, verbose=0)
    with pytest.raises(TypeError, match=r"multiplied with.*loss \* other\.mean"):
        prepared(kind=Multiplied).fit((X, Y), batch_size=53, verbose=0)
    subject = prepared(kind=Weighed)
    subject.fit((X, Y), batch_size=53, shuffle=False, verbose=0)
    masked = torch.where(Y[0] == Y, -100, Y)
    close(subject.network, stepped(lambda net: cross_entropy(net(X), Y) + cross_entropy(net(X), masked)))


def test_a_penalty_with_a_shape_of_one_element() -> None:
    class Penalized(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            loss, outputs = super().train_step(inputs, labels)
            return loss + self.network[0].weight.square().sum().reshape(1), outputs

    labels = torch.where(torch.arange(53) % 4 == 0, -100, Y)
    for target in (Y, labels):
        subject = prepared(kind=Penalized)
        subject.fit((X, target), batch_size=53, shuffle=False, verbose=0)
        wanted = target
        close(subject.network, stepped(lambda net, y=wanted: cross_entropy(net(X), y) + net[0].weight.square().sum()))


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (lambda loss, outputs: loss, "Loss, not a pair"),
        (lambda loss, outputs: loss.mean, "Tensor, not a pair"),
        (lambda loss, outputs: (loss.value, loss.weight), "second part is one number"),
        (lambda loss, outputs: (loss.mean, 53), "second part is one number"),
        (lambda loss, outputs: None, "NoneType, not a pair"),
    ],
)
@pytest.mark.parametrize("step", ["train_step", "eval_step"])
def test_a_step_without_outputs_is_refused(step: str, returned: Any, shown: str) -> None:
    """A sum would be trained on as a mean, and its count be taken for outputs."""

    def own(self: Any, inputs: Any, labels: Any) -> Any:
        return returned(*getattr(hapi.Model, step)(self, inputs, labels))

    kind = type("Own", (hapi.Model,), {step: own})
    subject = prepared(kind=kind)
    with pytest.raises(ValueError, match=rf"{shown}.*\(sum, count\), outputs"):
        (subject.fit if step == "train_step" else subject.evaluate)((X, Y), verbose=0)


def test_a_network_that_is_its_own_loss() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = network()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self.layer(x), y)

    class Own(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            loss = self.network(*inputs)
            return loss, loss

    net = Scored()
    subject = Own(net, inputs=2).prepare(torch.optim.SGD(net.parameters(), lr=1.0))
    subject.fit((X, Y), batch_size=53, verbose=0)
    close(net.layer, stepped(lambda plain: cross_entropy(plain(X), Y)))


class Cut(Callback):
    """Ends a fit in the middle of a window."""

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if step == 1:
            raise KeyboardInterrupt


def test_train_batch_starts_from_no_gradients() -> None:
    subject = prepared()
    with pytest.raises(KeyboardInterrupt):
        subject.fit((X, Y), batch_size=10, accumulate_grad_batches=3, verbose=0, callbacks=Cut())
    # Of a loop of the script's own.
    cross_entropy(subject.network(X[:7]), Y[:7]).backward()
    subject.train_batch(X, Y)
    close(subject.network, stepped(lambda net: cross_entropy(net(X), Y)))


class Brightest(hapi.Model):
    """Keeps the brightest pixel of each batch that it trains on."""

    def train_step(self, inputs: Any, labels: Any) -> Any:
        BRIGHTEST.append(float(inputs[0].max()))
        return super().train_step(inputs, labels)


BRIGHTEST: list[float] = []


def twice(image: torch.Tensor) -> torch.Tensor:
    """A transform that is known to nobody, so that it is called for each sample."""
    return 2 * image


def test_a_transform_that_is_changed_in_place_holds_from_the_next_epoch() -> None:
    pipeline = transforms.Compose([transforms.ToTensor()])
    data = Subset(FashionMNIST(sample=True, transform=pipeline), range(64))
    more = iter([transforms.Normalize((0.5,), (0.25,)), twice, transforms.Normalize((1.0,), (1.0,))])

    class Changes(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            pipeline.transforms.append(next(more))

    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    BRIGHTEST.clear()
    prepared(net, kind=Brightest).fit(data, batch_size=64, epochs=3, verbose=0, callbacks=Changes())
    assert BRIGHTEST == [1.0, 2.0, 4.0]


def test_numpys_numbers_are_numbers() -> None:
    hapi.seed(np.int64(3))
    first = torch.rand(3)
    hapi.seed(3)
    assert torch.equal(first, torch.rand(3))
    subject = prepared(clip_grad_norm=np.float32(1e-3))
    subject.fit((X, Y), seed=np.int64(0), num_workers=np.int64(0), verbose=0)
    assert subject.evaluate((X, Y), num_workers=np.int64(0), verbose=0)["loss"] > 0


def some_ignored() -> torch.Tensor:
    return torch.where(Y > 3, -100, Y)


@pytest.mark.parametrize("labels", [Y, some_ignored()], ids=["all count", "some are ignored"])
def test_a_cross_entropy_with_a_hook_may_give_one_number_in_any_shape(labels):
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda module, given, loss: loss.reshape(1))
    for method in ("fit", "train_batch"):
        model = prepared(loss=hooked)
        if method == "fit":
            model.fit((X, labels), batch_size=53, verbose=0)
        else:
            model.train_batch(X, labels)
        close(model.network, stepped(lambda net: cross_entropy(net(X), labels)))
    expected = cross_entropy(network()(X), labels).item()
    assert prepared(loss=hooked).evaluate((X, labels), verbose=0)["loss"] == pytest.approx(expected)
    assert prepared(loss=hooked).eval_batch(X, labels)["loss"] == pytest.approx(expected)


@pytest.mark.parametrize("labels", [Y, some_ignored()], ids=["all count", "some are ignored"])
def test_a_cross_entropy_with_a_hook_that_gives_a_number_a_sample_is_refused(labels):
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda module, given, loss: loss * torch.ones(len(labels)))
    model = prepared(loss=hooked)
    for call in (
        lambda: model.fit((X, labels), verbose=0),
        lambda: model.evaluate((X, labels), verbose=0),
        lambda: model.train_batch(X, labels),
        lambda: model.eval_batch(X, labels),
    ):
        with pytest.raises(ValueError, match="not one number to minimize"):
            call()
