"""The gradient of a step is that of the mean over the samples of all ranks, in closed form."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from closed_form import Line, mean_output, ones, prepared, ramp
from ranks import alone, same
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

import hapi
from hapi.distributed import group
from hapi.distributed.parallel import GradientExchange


def fit_batches(sizes: list[int], accumulate: int, in_loader: bool = False) -> tuple[float, list[float], int]:
    """Train on batches of 0, 1, 2, ... of these sizes; the weight, the losses and the optimizer steps taken."""
    model = prepared()
    steps: list[int] = []
    model.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    x, y = ramp(sum(sizes))
    batches: Any = list(zip(x.split(sizes), y.split(sizes), strict=True))
    if in_loader:
        batches = DataLoader(
            TensorDataset(x, y), batch_sampler=[rows.tolist() for rows in torch.arange(len(x)).split(sizes)]
        )
    history = model.fit(batches, accumulate_grad_batches=accumulate, verbose=0)
    return model.network.value, history.history["loss"], len(steps)


def test_batches_of_two_and_one_weigh_by_their_samples(ranks):
    # Samples 0, 1 | 2: mean 1, where the mean of the ranks' means would be 1.25.
    weight, losses, steps = same(ranks(2).run(fit_batches, [2, 1], 1))
    assert (weight, losses, steps) == (0.0, [1.0], 1)


@pytest.mark.parametrize("in_loader", [False, True])
def test_a_rank_without_batch_counts_nothing(ranks, in_loader):
    # 0, 1, 2 | 3, 4 | 5 | 6, and then 7 on the first rank alone.
    weight, losses, steps = same(ranks(4).run(fit_batches, [3, 2, 1, 1, 1], 1, in_loader))
    first, second = (0 + 1 + 2 + 3 + 4 + 5 + 6) / 7, 7.0
    assert weight == pytest.approx(1 - first - second)
    assert losses == pytest.approx([(first * 7 + (1 - first) * second) / 8])
    assert steps == 2


def test_accumulated_batches_of_unequal_size_are_one_batch(ranks):
    # One window of 1 + 3 + 2 + 2 samples on two ranks: the mean of 0..7.
    weight, _, steps = same(ranks(2).run(fit_batches, [1, 3, 2, 2], 2))
    assert (weight, steps) == (1 - 3.5, 1)
    assert alone(fit_batches, [1, 3, 2, 2], 4)[0] == 1 - 3.5


def accumulate_ones(samples: int, per_step: int, accumulate: int, num_iters: int | None) -> tuple[float, int, float]:
    model = prepared(weight=0.0, scheduler=lambda optimizer: StepLR(optimizer, 1, gamma=1.0), scheduler_interval="step")
    steps: list[int] = []
    model.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    model.fit(
        ones(samples), global_batch_size=per_step, accumulate_grad_batches=accumulate, num_iters=num_iters, verbose=0
    )
    return model.network.value, len(steps), model.scheduler.last_epoch


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("num_iters", "steps"), [(None, 2), (1, 1), (3, 1), (4, 1), (5, 2), (7, 2)], ids=lambda value: str(value)
)
def test_a_short_window_is_a_step_of_its_own(ranks, world, num_iters, steps):
    # 5 batches of ones in windows of 4: each optimizer step takes off 1, whether its window is whole or not; cut by
    # num_iters too.
    run = ranks(world).run if world > 1 else lambda *args: [alone(*args)]
    weight, taken, scheduled = same(run(accumulate_ones, 10, 2, 4, num_iters))
    assert (weight, taken, scheduled) == (-steps, steps, steps)


def clip(accumulate: int, amp: Any) -> tuple[float, list[float]]:
    """Gradients of 10 everywhere, clipped to a norm of 1."""
    net = Line()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    norms: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(float(net.layer.weight.grad)))
    model = hapi.Model(net).prepare(optimizer, mean_output, clip_grad_norm=1.0, amp_configs=amp)
    x, y = ones(8)
    model.fit((10 * x, y), global_batch_size=2, accumulate_grad_batches=accumulate, verbose=0)
    return net.value, norms


@pytest.mark.parametrize("amp", [None, "bf16", {"dtype": "float16", "init_loss_scaling": 1024.0}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_clipping_comes_once_a_step_after_the_scale_is_taken_off(ranks, accumulate, amp):
    weight, norms = same(ranks(2).run(clip, accumulate, amp))
    assert norms == pytest.approx([1.0] * (4 // accumulate), rel=1e-4)
    assert weight == pytest.approx(1 - 4 // accumulate, abs=4e-4)


def clip_unequal() -> float:
    """One rank's gradient alone is large."""
    model = prepared(clip_grad_norm=2.0)
    x, y = torch.tensor([[0.0], [0.0], [6.0], [6.0]]), torch.zeros(4, 1)
    model.fit((x, y), batch_size=2, shuffle=False, verbose=0)
    return model.network.value


def test_the_norm_is_that_of_the_gradient_of_all_ranks(ranks):
    # The mean is 3, clipped to 2; clipping each rank's own (0 and 6) first would give 1.
    assert same(ranks(2).run(clip_unequal)) == pytest.approx(-1.0)


def skipped_step() -> tuple[float, float, int, float]:
    """The second of three steps overflows, on the second rank alone."""
    net = Line()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = hapi.Model(net).prepare(
        optimizer,
        mean_output,
        amp_configs={"dtype": "float16", "init_loss_scaling": 4.0},
        scheduler=lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
        scheduler_interval="step",
    )

    class Spoil(hapi.callbacks.Callback):
        def on_train_batch_begin(self, step, logs=None):
            hook.armed = step == 1 and group.get_rank() == 1

    class Hook:
        armed = False

        def __call__(self, gradient):
            return gradient * math.inf if self.armed else gradient

    hook = Hook()
    net.layer.weight.register_hook(hook)
    model.fit(ones(6), global_batch_size=2, callbacks=Spoil(), verbose=0)
    return (
        net.value,
        optimizer.param_groups[0]["lr"],
        model.scheduler.last_epoch,
        model._engine.prepared.scaler.get_scale(),
    )


def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(ranks):
    # Two steps of 1 and 0.5 are left, and the scheduler has moved twice.
    assert same(ranks(2).run(skipped_step)) == (1 - 1 - 0.5, 0.25, 2, 2.0)


def schedule(kind: str) -> tuple[list[float], float, int]:
    makers = {
        "epoch": lambda optimizer: StepLR(optimizer, 1, gamma=0.1),
        "step": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=6),
        "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.1, patience=0),
    }
    model = prepared(scheduler=makers[kind])
    data = ramp(6)
    history = model.fit(data, data if kind == "plateau" else None, global_batch_size=2, epochs=2, verbose=0)
    return history.history["lr"], model.optimizer.param_groups[0]["lr"], model.scheduler.last_epoch


@pytest.mark.parametrize("kind", ["epoch", "step", "plateau"])
def test_the_scheduler_moves_as_in_one_process(ranks, kind):
    wanted = alone(schedule, kind)
    assert same(ranks(2).run(schedule, kind)) == wanted
    if kind == "epoch":
        assert wanted[0] == pytest.approx([1.0, 0.1])
    # Two epochs; six optimizer steps, not six a rank.
    assert wanted[2] == (6 if kind == "step" else 2)


class Scale(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs, labels):
        return self.factor * outputs.mean()


def train_with_its_loss() -> tuple[float, float]:
    net, loss = Line(), Scale()
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.5)
    hapi.Model(net).prepare(optimizer, loss).fit(ramp(3), global_batch_size=4, verbose=0)
    return net.value, float(loss.factor.detach())


def test_a_loss_with_parameters_trains_them_on_all_ranks(ranks):
    # d/dw = factor * mean(x) = 2; d/dfactor = w * mean(x) = 1.
    assert same(ranks(2).run(train_with_its_loss)) == (0.0, 1.5)


class Penalised(hapi.Model):
    """The loss calls the network's own methods, outside its forward."""

    def train_step(self, inputs, labels):
        outputs = self.network(*inputs)
        return outputs.mean() + self.network.layer.weight.square().sum(), outputs


def train_penalised() -> float:
    net = Line()
    Penalised(net).prepare(torch.optim.SGD(net.parameters(), lr=0.5)).fit(ramp(3), global_batch_size=4, verbose=0)
    return net.value


def test_a_loss_that_uses_weights_outside_the_forward_is_reduced(ranks):
    # d/dw = mean(x) + 2 w = 3.
    assert same(ranks(2).run(train_penalised)) == 1 - 0.5 * 3


def freeze_on_the_way() -> list[tuple[float, float]]:
    """Two layers in a row: the first trains from the second epoch on, the second no longer after that one's first step.

    Returns:
        Both weights after each step.
    """
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in net:
        nn.init.constant_(layer.weight, 1.0)
    first, second = (layer.weight for layer in net)
    trace: list[tuple[float, float]] = []

    class Freeze(hapi.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            first.requires_grad_(epoch > 0)

        def on_train_batch_end(self, step, logs=None):
            trace.append((float(first.detach()), float(second.detach())))
            second.requires_grad_(not first.requires_grad)

    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.125), mean_output)
    model.fit(ramp(8), global_batch_size=4, epochs=2, shuffle=False, callbacks=Freeze(), verbose=0)
    return trace


def test_layers_may_be_frozen_and_freed_at_any_step(ranks):
    # Means are 1.5 and 5.5; the gradient of one weight is the mean times the other weight.
    second = 1 - 1.5 / 8 - 5.5 / 8
    both = (1 - second * 1.5 / 8, second - 1.5 / 8)
    last = (both[0] - both[1] * 5.5 / 8, both[1])
    wanted = [(1, 1 - 1.5 / 8), (1, second), both, last]
    assert alone(freeze_on_the_way) == wanted
    assert same(ranks(2).run(freeze_on_the_way)) == wanted


def one_batch_at_a_time() -> list[float]:
    """train_batch on unequal parts, the last of two calls with an update."""
    rank = group.get_rank()
    model = prepared()
    x, y = ramp(6)
    parts = [(x[:1], x[1:3]), (x[3:5], x[5:])] if group.get_world_size() > 1 else [(x[:3],), (x[3:],)]
    trace = []
    for update, batches in zip([False, True], parts, strict=True):
        model.train_batch(batches[rank], y[: len(batches[rank])], update=update)
        trace.append(model.network.value)
    model.train_batch(batches[rank], y[: len(batches[rank])])
    return [*trace, model.network.value]


def test_train_batch_weighs_by_samples_over_ranks_and_calls(ranks):
    # The mean of 0..5 once both calls are in; then that of 3, 4, 5.
    wanted = [1.0, 1 - 2.5, 1 - 2.5 - 4.0]
    assert alone(one_batch_at_a_time) == wanted
    assert same(ranks(2).run(one_batch_at_a_time)) == wanted


def one_rank_without_samples() -> tuple[list[float], bool]:
    """train_batch where the last of several ranks has no samples, in a step and in a part of one."""
    rank, world_size = group.get_rank(), group.get_world_size()
    model = prepared()
    x, y = ramp(6)
    # The last rank's part is empty where there are several.
    parts = [torch.tensor_split(part, max(1, world_size - 1)) for part in (x[:2], x[2:4], x[4:])]
    trace, missing = [], 0
    for part, update in zip(parts, (True, False, True), strict=True):
        own = part[rank] if rank < len(part) else x[:0]
        logs = model.train_batch(own, y[: len(own)], update=update)
        missing += math.isnan(logs["loss"])
        assert math.isnan(model.eval_batch(own, y[: len(own)])["loss"]) == (rank == len(part))
        trace.append(model.network.value)
    return trace, missing == (3 if rank == len(parts[0]) else 0)


def test_a_rank_without_samples_takes_part_in_train_batch(ranks):
    wanted = [0.5, 0.5, 0.5 - 3.5]
    assert alone(one_rank_without_samples) == (wanted, True)
    trace, said = same(ranks(3).run(one_rank_without_samples))
    assert trace == pytest.approx(wanted) and said


def train_an_embedding(sparse: bool) -> list[float]:
    """More ranks than samples in the last step; each row of the table is its own weight."""
    net = nn.Sequential(nn.Embedding(8, 1, sparse=sparse), nn.Flatten())
    nn.init.constant_(net[0].weight, 0.0)
    rows = torch.tensor([[0], [1], [2], [3], [5], [5], [5]])
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=1.0), lambda outputs, _: outputs.mean())
    model.fit((rows, torch.zeros(7)), global_batch_size=4, shuffle=False, epochs=2, verbose=0)
    return net[0].weight.flatten().tolist()


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_with_sparse_gradients_train_on_ranks_without_samples_too(ranks, sparse):
    wanted = [-0.5, -0.5, -0.5, -0.5, 0.0, -2.0, 0.0, 0.0]
    assert alone(train_an_embedding, sparse) == wanted
    assert same(ranks(4).run(train_an_embedding, sparse)) == pytest.approx(wanted)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_options_that_hapi_replaces_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}=True.* Leave it out"):
        prepared(ddp_options={option: True})


def with_options(counted: bool) -> float:
    """Options that only change how gradients travel."""
    net = Line(1.0)
    loss = (lambda outputs, _: (outputs.sum(), len(outputs))) if counted else mean_output
    model = hapi.Model(net).prepare(
        torch.optim.SGD(net.parameters(), lr=1.0), loss,
        ddp_options={"bucket_cap_mb": 1, "gradient_as_bucket_view": False},
    )  # fmt: skip
    model.fit(ramp(6), global_batch_size=3, shuffle=False, accumulate_grad_batches=2, verbose=0)
    return model.network.value


@pytest.mark.parametrize("counted", [False, True])
def test_other_options_change_no_number(ranks, counted):
    assert same(ranks(2).run(with_options, counted)) == 1 - 2.5


def mixed_forms() -> str:
    """A loss that is now a mean, now a sum with its count."""
    calls: list[int] = []

    def loss(outputs, labels):
        calls.append(1)
        return outputs.mean() if len(calls) == 1 else (outputs.sum(), len(outputs))

    net = Line()
    try:
        hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=1.0), loss).fit(ramp(8), batch_size=2, verbose=0)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_a_loss_that_changes_its_form_is_refused_on_all_ranks(ranks):
    assert "a mean for some batches and (sum, count) for others" in same(ranks(2).run(mixed_forms))


def ignored_labels_later() -> tuple[list[float], float]:
    """A first fit on labels of which none is ignored; then others, in a callback of a fit and in a second one."""
    net = nn.Linear(1, 2, bias=False)
    nn.init.constant_(net.weight, 0.5)
    x = torch.arange(6.0)[:, None]
    whole, partly = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 1, -100, 1, 0, -100])
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss())
    values: list[float] = []

    class Evaluate(hapi.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            values.append(self.model.evaluate((x, partly), batch_size=2, verbose=0)["loss"])

    how = {"global_batch_size": 3, "verbose": 0, "shuffle": False}
    values += model.fit((x, whole), callbacks=Evaluate(), **how).history["loss"]
    values += model.fit((x, partly), **how).history["loss"]
    values += model.fit((x, whole), **how).history["loss"]
    return values, net.weight.flatten().tolist()


def test_each_call_weighs_by_its_own_labels(ranks):
    wanted = alone(ignored_labels_later)
    values, weights = same(ranks(2).run(ignored_labels_later))
    assert values == pytest.approx(wanted[0], rel=1e-5)
    assert weights == pytest.approx(wanted[1], rel=1e-5)
    assert alone(ignored_labels_by_hand) == pytest.approx(wanted[1], rel=1e-5)


def ignored_labels_by_hand() -> list[float]:
    net = nn.Linear(1, 2, bias=False)
    nn.init.constant_(net.weight, 0.5)
    x = torch.arange(6.0)[:, None]
    whole, partly = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 1, -100, 1, 0, -100])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for labels in (whole, partly, whole):
        for rows in (slice(0, 3), slice(3, 6)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), labels[rows]).backward()
            optimizer.step()
    return net.weight.flatten().tolist()


class Noisy(torch.optim.SGD):
    """Langevin dynamics, in short: each step adds noise."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for entry in self.param_groups:
            for parameter in entry["params"]:
                parameter.data.add_(torch.randn_like(parameter) * random.random() * float(numpy.random.rand()))


def noisy_weights(by_hook: bool) -> float:
    network = Line(1.0)
    optimizer = (torch.optim.SGD if by_hook else Noisy)(network.parameters(), 0.1)
    if by_hook:
        optimizer.register_step_post_hook(lambda *_: network.layer.weight.data.add_(torch.randn(())))
    model = hapi.Model(network).prepare(optimizer, mean_output)
    model.fit(ramp(12), batch_size=2, shuffle=False, verbose=0, seed=1, num_iters=3)
    return network.value


@pytest.mark.parametrize("by_hook", [False, True])
def test_what_an_optimizer_draws_moves_all_ranks_alike(ranks, by_hook):
    weight = same(ranks(2).run(noisy_weights, by_hook))
    assert weight == same(ranks(2).run(noisy_weights, by_hook)) != 1.0


def interrupted(is_interrupted: bool) -> list[float]:
    """Two batches of one window, of which the first one is broken off after its pass, or meant for no update."""
    torch.manual_seed(0)
    net = nn.Linear(6, 5)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss())
    rows = slice(5 * group.get_rank(), 5 * group.get_rank() + 5)
    x, y = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))[rows], torch.arange(10)[rows] % 5
    model.train_batch(x, y)
    if is_interrupted:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GradientExchange, "complete", _broken_off)
            with pytest.raises(KeyboardInterrupt):
                model.train_batch(x, y)
    else:
        model.train_batch(x, y, update=False)
    model.train_batch(x, y)
    return net.weight.flatten().tolist()


def _broken_off(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_a_broken_off_window_weighed_is_counted_once(ranks):
    wanted = same(ranks(2).run(interrupted, False))
    assert same(ranks(2).run(interrupted, True)) == pytest.approx(wanted, abs=1e-7)


def labels_of_two_epochs() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, the labels of the first epoch, and those of the second, some of which are left out then."""
    x, y = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    later = y.clone()
    later[[0, 1, 2, 5, 9]] = -100
    return x, y, later


class LeavesOut(hapi.callbacks.Callback):
    """Calls a function when the second epoch begins."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change = change

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.change()


class LeavesOutAtTheEnd(LeavesOut):
    """The same in the first epoch's last step."""

    def __init__(self, change: Callable[[], Any]) -> None:
        super().__init__(change)
        self.steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        return

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == 3:
            self.change()


class LeavesOutAtOnce(hapi.callbacks.Callback):
    """Calls a function when training begins."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change = change

    def on_train_begin(self, logs: Any = None) -> None:
        self.change()


def fit_labels_that_change_at_once(by_callback: bool) -> tuple[list[float], list[float]]:
    """Weights and losses."""
    x, y, later = labels_of_two_epochs()
    callback = LeavesOutAtOnce(lambda: y.copy_(later)) if by_callback else None
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.5), nn.CrossEntropyLoss())
    labels = y if by_callback else later
    logs = model.fit((x, labels), epochs=2, global_batch_size=4, seed=1, callbacks=callback, verbose=0).history
    return network.weight.flatten().tolist(), logs["loss"]


def test_labels_that_a_callback_leaves_out_when_training_begins_count_no_more(ranks):
    assert alone(fit_labels_that_change_at_once, True) == alone(fit_labels_that_change_at_once, False)
    wanted = same(ranks(2).run(fit_labels_that_change_at_once, False))
    assert same(ranks(2).run(fit_labels_that_change_at_once, True)) == wanted


def fit_labels_that_change(kind: str, of: type[LeavesOut] = LeavesOut) -> tuple[list[float], list[float], list[float]]:
    """Weights, and the losses and accuracies of both epochs."""
    x, y, later = labels_of_two_epochs()
    subset = Subset(TensorDataset(torch.cat([x, x]), torch.cat([y, later])), range(12))
    data, change = {
        "written to": ((x, y), lambda: y.copy_(later)),
        "other indices": (subset, lambda: setattr(subset, "indices", range(12, 24))),
    }[kind]
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    sgd = torch.optim.SGD(network.parameters(), lr=0.5)
    model = hapi.Model(network).prepare(sgd, nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    options = {"global_batch_size": 4, "accumulate_grad_batches": 2, "shuffle": False, "verbose": 0}
    logs = model.fit(data, epochs=2, callbacks=of(change), **options).history
    return network.weight.flatten().tolist(), logs["loss"], logs["acc"]


def train_by_hand_on_labels_that_change() -> tuple[list[float], list[float], list[float]]:
    """The same with whole windows as batches."""
    x, *epochs = labels_of_two_epochs()
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    sgd = torch.optim.SGD(network.parameters(), lr=0.5)
    losses, accuracies = [], []
    for labels in epochs:
        loss_sum = correct = 0.0
        for window in torch.arange(12).split(8):
            outputs = network(x[window])
            loss = nn.functional.cross_entropy(outputs, labels[window])
            loss_sum += loss.item() * int((labels[window] >= 0).sum())
            correct += int((outputs.argmax(1) == labels[window]).sum())
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        losses.append(loss_sum / int((labels >= 0).sum()))
        accuracies.append(correct / int((labels >= 0).sum()))
    return network.weight.flatten().tolist(), losses, accuracies


class Looks(hapi.callbacks.Callback):
    """Has its turn between epochs, and changes nothing."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        return


def fit_with_callbacks_on(ranks: list[int], set_on_object: bool) -> tuple[list[float], dict[str, list[float]]]:
    """Weights and logs, where only these ranks have a callback of the user's."""
    x, y, later = labels_of_two_epochs()
    callback = hapi.callbacks.Callback() if set_on_object else Looks()
    if set_on_object:
        callback.on_epoch_end = lambda epoch, logs=None: None
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.5), nn.CrossEntropyLoss())
    given = [callback] if group.get_rank() in ranks else []
    logs = model.fit((x, y), (x, later), epochs=3, global_batch_size=4, seed=1, callbacks=given, verbose=0).history
    return network.weight.flatten().tolist(), logs


@pytest.mark.parametrize("set_on_object", [False, True])
def test_ranks_may_have_callbacks_of_their_own(ranks, set_on_object):
    wanted = same(ranks(2).run(fit_with_callbacks_on, [0, 1], set_on_object))
    for having in ([0], [1]):
        assert same(ranks(2).run(fit_with_callbacks_on, having, set_on_object)) == wanted


@pytest.mark.parametrize("kind", ["written to", "other indices"])
def test_labels_that_a_callback_leaves_out_from_the_second_epoch_on_count_no_more(ranks, kind):
    wanted = train_by_hand_on_labels_that_change()
    given = [(kind, of) for of in (LeavesOut, LeavesOutAtTheEnd)]
    several = [same(ranks(2).run(fit_labels_that_change, *each)) for each in given]
    for values in (*several, *(alone(fit_labels_that_change, *each) for each in given)):
        for ours, theirs in zip(values, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
