"""fit against the loop that one would write by hand: the same numbers, to the bit where nothing forbids it."""

import random
from functools import partialmethod

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hapi
from hapi.callbacks import Callback


def make_data(n: int = 50, features: int = 6, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    return x, (x @ torch.randn(features, classes, generator=generator)).argmax(1)


def make_net(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def by_hand(net, batches, epochs=1, make=lambda p: torch.optim.Adam(p, lr=1e-2), accumulate=1, clip=None):
    """The plain loop: windows of `accumulate` batches, each the mean over its samples."""
    optimizer = make(net.parameters())
    losses = []
    for _ in range(epochs):
        total, seen = 0.0, 0
        for first in range(0, len(batches), accumulate):
            window = batches[first : first + accumulate]
            samples = sum(len(y) for _, y in window)
            optimizer.zero_grad()
            for x, y in window:
                loss = nn.functional.cross_entropy(net(x), y)
                total, seen = total + loss.double().item() * len(y), seen + len(y)
                (loss if len(window) == 1 else loss * (len(y) / samples)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        losses.append(total / seen)
    return losses


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def prepared(net: nn.Module, **options) -> hapi.Model:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    return hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss(), hapi.metrics.Accuracy(), **options)


def batches_of(x, y, size):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


class Samples(Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.read = x, y, []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.read.append(index)
        return self.x[index], self.y[index]


@pytest.mark.parametrize(
    "kind", ["tensors", "arrays", "tensor data set", "data set", "loader", "list", "dict", "re-iterable"]
)
def test_every_kind_of_data_trains_to_the_bits_of_the_plain_loop(kind):
    x, y = make_data()
    reference = make_net()
    losses = by_hand(reference, batches_of(x, y, 8), epochs=2)
    options = {"batch_size": 8, "shuffle": False}
    if kind == "tensors":
        data = (x, y)
    elif kind == "arrays":
        data = (x.double().numpy(), y.numpy())
    elif kind == "tensor data set":
        data = TensorDataset(x, y)
    elif kind == "data set":
        data = Samples(x, y)
    elif kind == "loader":
        data, options = DataLoader(TensorDataset(x, y), batch_size=8), {}
    elif kind == "dict":
        data = {"input": x, "label": y}
    elif kind == "list":
        data, options = batches_of(x, y, 8), {}
    else:

        class Again:
            def __iter__(self):
                return iter(batches_of(x, y, 8))

        data, options = Again(), {}
    net = make_net()
    model = prepared(net)
    history = model.fit(data, epochs=2, verbose=0, **options)
    assert torch.equal(weights(net), weights(reference))
    assert history.history["loss"] == pytest.approx(losses, rel=1e-12)
    assert model.steps_trained == 14 and model.epochs_trained == 2


@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.05}, {"compile": False}])
def test_accumulation_equals_one_large_batch_and_clips_once(options):
    x, y = make_data(n=43)
    reference, large = make_net(), make_net()
    by_hand(reference, batches_of(x, y, 5), accumulate=3, clip=options.get("clip_grad_norm"))
    by_hand(large, batches_of(x, y, 15), clip=options.get("clip_grad_norm"))
    net = make_net()
    prepared(net, **options).fit(
        (x, y), batch_size=5, shuffle=False, accumulate_grad_batches=3, verbose=0, num_iters=None
    )
    # 9 batches, the last of 3 samples: windows of 15, 15 and 13 samples.
    torch.testing.assert_close(weights(net), weights(reference), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weights(net), weights(large), rtol=1e-5, atol=1e-6)


def test_accumulation_tail_in_closed_form():
    # Five batches in windows of four, gradient one each, learning rate one: two optimizer steps, weight -2.
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model = hapi.Model(net).prepare(
        optimizer, lambda output, label: output.mean(), scheduler=scheduler, scheduler_interval="step"
    )
    model.fit((torch.ones(5, 1), torch.ones(5)), batch_size=1, accumulate_grad_batches=4, verbose=0)
    assert net.weight.item() == pytest.approx(-2.0)
    assert scheduler.last_epoch == 2


def test_num_iters_ends_inside_a_window_and_an_epoch_and_evaluates():
    x, y = make_data(n=40)
    reference = make_net()
    by_hand(reference, batches_of(x, y, 5)[:7], accumulate=3)
    net = make_net()
    model = prepared(net)
    history = model.fit(
        (x, y), (x, y), batch_size=5, shuffle=False, accumulate_grad_batches=3, num_iters=7, epochs=9, verbose=0
    )
    torch.testing.assert_close(weights(net), weights(reference), rtol=1e-6, atol=1e-7)
    assert model.steps_trained == 7 and history.epoch == [1] and "val_loss" in history.history
    model.fit((x, y), batch_size=5, num_iters=11, epochs=9, verbose=0)
    assert model.steps_trained == 18 and model.epochs_trained == 3


def test_history_names_order_and_numbering_over_two_calls():
    x, y = make_data()
    model = prepared(make_net())
    first = model.fit((x, y), (x, y), batch_size=8, epochs=3, eval_freq=2, verbose=0)
    assert first.epoch == [1, 2, 3]
    assert set(first.history) == {"loss", "acc", "lr", "val_loss", "val_acc"}
    assert all(isinstance(value, float) for values in first.history.values() for value in values)
    second = model.fit((x, y), batch_size=8, epochs=1, verbose=0)
    assert second.epoch == [4]


def test_shuffle_order_differs_between_epochs_goes_on_and_repeats_by_seed():
    def orders(seeds):
        data = Samples(*make_data(n=20))
        model = prepared(make_net())
        seen = []
        for seed in seeds:
            data.read = []
            model.fit(data, batch_size=4, epochs=2, verbose=0, seed=seed)
            seen += [data.read[:20], data.read[20:]]
        return seen

    first = orders([7, 7])
    assert all(sorted(order) == list(range(20)) for order in first)
    assert len({tuple(order) for order in first}) == 4
    assert orders([7, 7]) == first
    torch.manual_seed(3)
    drawn = orders([None])
    torch.manual_seed(3)
    assert orders([None]) == drawn
    assert orders([None]) == drawn, "make_net seeds torch"


def test_the_scripts_random_state_does_not_depend_on_what_fit_drew():
    x, y = make_data()

    def after(epochs):
        hapi.seed(5)
        prepared(make_net_without_seed(dropout=0.5)).fit((x, y), (x, y), batch_size=8, epochs=epochs, verbose=0)
        return torch.rand(1).item(), np.random.rand(), random.random()

    assert after(1) == after(3)


def make_net_without_seed(dropout):
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(dropout), nn.Linear(16, 3))


def test_dropout_repeats_by_seed_and_evaluation_does_not_disturb_it():
    x, y = make_data()

    def trained(seed, **options):
        net = make_net(dropout=0.5)
        prepared(net).fit((x, y), batch_size=8, epochs=3, verbose=0, seed=seed, **options)
        return weights(net)

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))
    assert torch.equal(trained(1), trained(1, eval_data=(x, y), eval_freq=1))


def test_augmentation_is_the_same_with_and_without_workers_and_differs_between_epochs():
    class Augmented(Samples):
        def __getitem__(self, index):
            noise = torch.rand(()) + float(np.random.rand()) + random.random()
            return torch.full((6,), noise.item()), self.y[index]

    seen = []

    class Watch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            seen.append(x[:, 0].tolist())
            return self.layer(x)

    def epochs_with(workers):
        seen.clear()
        torch.manual_seed(0)
        net = Watch()
        model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss())
        model.fit(Augmented(*make_data(n=16)), batch_size=4, epochs=2, num_workers=workers, verbose=0, seed=3)
        return list(seen)

    alone = epochs_with(0)
    assert len({tuple(batch) for batch in alone}) == 8
    assert epochs_with(2) == alone


def test_modes_come_back_and_frozen_layers_stay_frozen():
    x, y = make_data()
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    net[1].eval()
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, step, logs=None):
            seen.append([module.training for module in net])

        def on_eval_batch_end(self, step, logs=None):
            seen.append([module.training for module in net])

    before = net[1].running_mean.clone()
    prepared(net).fit((x, y), (x, y), batch_size=25, epochs=2, verbose=0, callbacks=Watch())
    assert (
        seen
        == [[True, False, True, True]] * 2 + [[False] * 4] * 2 + [[True, False, True, True]] * 2 + [[False] * 4] * 2
    )
    assert torch.equal(net[1].running_mean, before)
    assert [module.training for module in net] == [True, False, True, True]
    net.eval()
    prepared(net).fit((x, y), batch_size=25, verbose=0)
    assert not any(module.training for module in net.modules())
    assert not torch.equal(net[1].running_mean, before)


def test_callback_order_is_the_contracts():
    x, y = make_data(n=12)
    events = []

    hooks = [name for name in dir(Callback) if name.startswith("on_") and name != "on_exception"]
    watch = type("All", (Callback,), {name: _recorder(name, events) for name in hooks})()
    model = prepared(make_net())
    model.fit((x, y), (x, y), batch_size=6, epochs=2, eval_freq=2, verbose=0, callbacks=watch)
    train = ["on_train_batch_begin 0", "on_train_batch_end 0", "on_train_batch_begin 1", "on_train_batch_end 1"]
    evaluation = ["on_eval_begin", *(event.replace("train", "eval") for event in train), "on_eval_end"]
    assert events == [
        "on_train_begin",
        *("on_epoch_begin 0", *train, "on_epoch_end 0"),
        *("on_epoch_begin 1", *train, *evaluation, "on_epoch_end 1"),
        "on_train_end",
    ]
    events.clear()
    model.predict(x, batch_size=6, verbose=0, callbacks=watch)
    assert events == ["on_predict_begin", *(event.replace("train", "predict") for event in train), "on_predict_end"]


def _recorder(name, events):
    if "batch" in name or "epoch" in name:
        return lambda self, number, logs=None: events.append(f"{name} {number}")
    return lambda self, logs=None: events.append(name)


def test_batch_logs_are_unread_tensors_of_running_values_and_fresh_dicts():
    x, y = make_data(n=20)
    kept = []

    class Keep(Callback):
        def on_train_batch_end(self, step, logs=None):
            kept.append(dict(logs))
            logs["loss"] = "changed"

    class Look(Callback):
        def on_train_batch_end(self, step, logs=None):
            assert isinstance(logs["loss"], torch.Tensor)

    net = make_net()
    history = prepared(net).fit((x, y), batch_size=8, shuffle=False, verbose=0, callbacks=[Keep(), Look()])
    assert [set(logs) for logs in kept] == [{"loss", "acc"}] * 3
    assert float(kept[-1]["loss"]) == pytest.approx(history.history["loss"][0])
    first = nn.functional.cross_entropy(make_net()(x[:8]), y[:8]).item()
    assert float(kept[0]["loss"]) == pytest.approx(first)


def test_stop_training_ends_at_the_edge_and_starts_false_again():
    x, y = make_data()

    class Stop(Callback):
        def on_train_batch_end(self, step, logs=None):
            self.model.stop_training = step == 2

    model = prepared(make_net())
    model.fit((x, y), batch_size=8, epochs=5, verbose=0, callbacks=Stop())
    assert (model.steps_trained, model.epochs_trained, model.stop_training) == (3, 1, True)
    model.fit((x, y), batch_size=8, epochs=2, verbose=0)
    assert model.epochs_trained == 3


def test_exceptions_reach_callbacks_and_the_caller():
    x, y = make_data()
    told = []

    class Fail(Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyError("boom")

        def on_exception(self, exc):
            told.append(exc)

    model = prepared(make_net().eval())
    with pytest.raises(KeyError, match="boom"):
        model.fit((x, y), verbose=0, callbacks=Fail())
    assert len(told) == 1 and not model.network.training
    model.fit((x, y), verbose=0)


def test_nothing_is_read_between_log_points(monkeypatch):
    x, y = make_data(n=400)
    reads = []
    original = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or original(self))
    as_float = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: reads.append(1) or as_float(self))

    def reads_of(batch_size):
        # Adam reads its own step counters, SGD nothing.
        net = make_net()
        model = hapi.Model(net).prepare(
            torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), hapi.metrics.Accuracy()
        )
        reads.clear()
        model.fit((x, y), batch_size=batch_size, verbose=0)
        return len(reads)

    # 200 steps and 50 steps read as much: what is read is read per epoch, not per step.
    assert abs(reads_of(2) - reads_of(8)) <= 6 and reads_of(2) < 40


def test_data_in_memory_is_kept_from_what_a_network_writes_in_place():
    x, y = make_data(n=64)
    before = x.clone()
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss())
    model.fit((x, y), (x, y), batch_size=8, epochs=2, verbose=0)
    model.predict(x, verbose=0)
    assert torch.equal(x, before)


def test_step_outputs_are_not_kept_alive():
    import gc
    import weakref

    x, y = make_data(n=12)
    alive = []

    class Watch(Callback):
        def on_train_batch_end(self, step, logs=None):
            gc.collect()
            alive.append(sum(ref() is not None for ref in graphs))

    graphs = []

    class Model(hapi.Model):
        def train_step(self, inputs, labels):
            loss, outputs = super().train_step(inputs, labels)
            graphs.append(weakref.ref(outputs))
            return loss, outputs

    net = make_net()
    model = Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss())
    model.fit((x, y), batch_size=2, verbose=0, callbacks=Watch())
    assert max(alive) <= 1


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_penalty_is_added_to_the_loss_of_super(ignored, accumulate):
    """Half of the mean over the window's counted labels and a penalty that each batch has, weighed as the batch is."""
    x, y = make_data(n=12)
    if ignored:
        y = torch.where(torch.arange(12) % 5 == 0, torch.full_like(y, -100), y)

    class Penalized(hapi.Model):
        def train_step(self, inputs, labels):
            loss, outputs = super().train_step(inputs, labels)
            return 0.5 * (loss - 1.0) + 0.1 * outputs.square().mean(), outputs

    net, plain = make_net(), make_net()
    model = Penalized(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss())
    model.fit((x, y), batch_size=4, shuffle=False, accumulate_grad_batches=accumulate, verbose=0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    for window in (batches[i : i + accumulate] for i in range(0, 3, accumulate)):
        counts = [int((labels >= 0).sum()) for _, labels in window]
        for (inputs, labels), count in zip(window, counts, strict=True):
            outputs = plain(inputs)
            loss = 0.5 * (nn.functional.cross_entropy(outputs, labels) - 1.0) + 0.1 * outputs.square().mean()
            (loss * count / sum(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(net), weights(plain))


# To build machine code takes half a minute where nothing of it is kept.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_gives_the_eager_numbers_and_keeps_names(monkeypatch, backend):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    x, y = make_data(n=24)
    eager, compiled = make_net(), make_net()
    prepared(eager).fit((x, y), batch_size=8, verbose=0, seed=0)
    model = prepared(compiled, compile=True)
    model.fit((x, y), batch_size=8, verbose=0, seed=0)
    torch.testing.assert_close(weights(compiled), weights(eager), rtol=1e-5, atol=1e-6)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    assert model.evaluate((x, y), verbose=0)["acc"] == prepared(eager).evaluate((x, y), verbose=0)["acc"]


def test_evaluate_inside_a_callback_leaves_the_training_as_it_was():
    # Ignored labels make the loss of the inner evaluation weigh otherwise than that of the training around it.
    x, y = make_data()
    odd = torch.where(torch.arange(50) % 3 == 0, torch.full_like(y, -100), y)

    class Evaluate(Callback):
        def on_train_batch_end(self, step, logs=None):
            if step == 1:
                self.model.evaluate((x, odd), verbose=0)
                self.model.predict(x, verbose=0)

    plain, nested = make_net(dropout=0.5), make_net(dropout=0.5)
    prepared(plain).fit((x, y), batch_size=8, epochs=2, verbose=0, seed=0)
    history = prepared(nested).fit((x, y), batch_size=8, epochs=2, verbose=0, seed=0, callbacks=Evaluate())
    assert torch.equal(weights(plain), weights(nested)) and len(history.history["acc"]) == 2


def test_batch_size_is_meant_for_the_data_that_can_follow_it():
    x, y = make_data()
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    model = prepared(make_net())
    model.fit((x, y), loader, batch_size=25, verbose=0)
    assert model.steps_trained == 2
    model.fit(loader, (x, y), batch_size=25, verbose=0)
    assert model.steps_trained == 7
    with pytest.raises(ValueError, match="to the DataLoader"):
        model.fit(loader, loader, batch_size=25, verbose=0)


def test_ignored_and_weighted_labels_accumulate_as_one_large_batch():
    x, y = make_data(n=40)
    y = torch.where(torch.arange(40) % 7 < 3, torch.full_like(y, -100), y)
    y[:5] = -100  # a whole batch in which nothing counts
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]), label_smoothing=0.1)

    def trained(**options):
        net = make_net()
        model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.5), loss)
        history = model.fit((x, y), shuffle=False, verbose=0, **options)
        return weights(net), history.history["loss"][0]

    small, _ = trained(batch_size=5, accumulate_grad_batches=4)
    large, loss_large = trained(batch_size=20)
    torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-6)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    losses = []
    for part in (slice(0, 20), slice(20, 40)):
        counted = y[part][y[part] >= 0]
        losses.append((loss(net(x[part]), y[part]), loss.weight[counted].sum()))
        losses[-1][0].backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(net), large, rtol=1e-5, atol=1e-6)
    total = sum(value.item() * weight.item() for value, weight in losses)
    assert loss_large == pytest.approx(total / sum(weight.item() for _, weight in losses), rel=1e-5)


def test_evaluate_without_anything_to_compute_says_so():
    x, y = make_data()
    with pytest.raises(ValueError, match="or use"):
        hapi.Model(make_net()).evaluate((x, y), verbose=0)
