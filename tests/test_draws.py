"""Who draws by chance in an evaluation draws the same for a batch each time; where nobody does, nothing is set."""

import functools
import random
import types

import numpy
import pytest
import torch
from torch import nn
from torch.optim import optimizer as of_all_optimizers
from torchvision.transforms import Compose, RandomHorizontalFlip, ToTensor

import hapi
from hapi import draws, rng
from hapi.datasets import FashionMNIST

X, Y = torch.zeros(50, 4), torch.zeros(50, dtype=torch.int64)
drawn, exchanged = [], []


def draw():
    drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))


class Drawing(nn.Linear):
    def forward(self, x):
        draw()
        return super().forward(x)


class DrawingMetric(hapi.metrics.Accuracy):
    def update(self, outputs, labels):
        draw()
        super().update(outputs, labels)


class DrawingCallback(hapi.callbacks.Callback):
    def on_eval_batch_end(self, step, logs=None):
        draw()


class DrawingData(FashionMNIST):
    def finish_batch(self, batch):
        draw()
        return super().finish_batch(batch)

    is_random = True


class DrawingModel(hapi.Model):
    def eval_step(self, inputs, labels):
        draw()
        return super().eval_step(inputs, labels)


def drawing_loss(outputs, labels):
    draw()
    return nn.functional.cross_entropy(outputs, labels)


def hooked(register):
    def made():
        network = nn.Linear(4, 3)
        getattr(network, register)(lambda *args: draw())
        return prepared(network)

    return made


def replaced():
    network = nn.Linear(4, 3)
    forward = network.forward
    network.forward = lambda x: draw() or forward(x)
    return prepared(network)


def prepared(network, loss=None, metrics=None, kind=hapi.Model):
    return kind(network).prepare(loss=loss or nn.CrossEntropyLoss(), metrics=metrics or hapi.metrics.Accuracy())


def listening(callback):
    callback.on_eval_batch_end = lambda step, logs=None: draw()
    return callback


class Twice(nn.Linear):
    def forward(self, x):
        return super().forward(x), super().forward(x)


def on_all_modules():
    # Of a network that no earlier way has left without one.
    nn.modules.module.register_module_forward_hook(lambda *args: draw())
    return prepared(nn.Linear(4, 3))


def of_losses():
    model = hapi.Model(Twice(4, 3), inputs=1, labels=2)
    return model.prepare(loss=[nn.CrossEntropyLoss(), drawing_loss])


def mean_of(outputs, labels):
    draw()
    return outputs.mean(1)


def activation(x):
    draw()
    return x


@functools.wraps(nn.functional.relu)
def wrapped(x):
    return activation(x)


def held(function):
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation=function, batch_first=True)
    return lambda: prepared(nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Flatten(), nn.Linear(4, 3)))


def of_distances():
    def distance(one, other):
        draw()
        return (one - other).norm(dim=1)

    model = hapi.Model(nn.Linear(4, 4), inputs=1, labels=2)
    return model.prepare(loss=nn.TripletMarginWithDistanceLoss(distance_function=distance))


class WrappedModel(hapi.Model):
    @functools.wraps(hapi.Model.eval_step)
    def eval_step(self, inputs, labels):
        draw()
        return super().eval_step(inputs, labels)


def exchanged_update():
    metric = hapi.metrics.Accuracy()
    metric.update = functools.partial(spied_update, hapi.metrics.Accuracy())
    return prepared(nn.Linear(4, 3), metrics=metric)


def spied_update(metric, outputs, labels):
    draw()
    metric.update(outputs, labels)


def images():
    return prepared(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))


WAYS = {
    "a layer": lambda: prepared(nn.Sequential(nn.Identity(), Drawing(4, 3))),
    "a hook before": hooked("register_forward_pre_hook"),
    "a hook after": hooked("register_forward_hook"),
    "a hook on all modules": on_all_modules,
    "a forward of the object": replaced,
    "a loss": lambda: prepared(nn.Linear(4, 3), loss=drawing_loss),
    "one of two losses": of_losses,
    "a metric": lambda: prepared(nn.Linear(4, 3), metrics=DrawingMetric()),
    "a function as a metric": lambda: prepared(nn.Linear(4, 3), metrics=[mean_of]),
    "a step": lambda: prepared(nn.Linear(4, 3), kind=DrawingModel),
    "a function in a layer": held(activation),
    "a function in a layer, said to be torch's": held(wrapped),
    "a function in a loss": of_distances,
    "a step that is said to be Model's": lambda: prepared(nn.Linear(4, 3), kind=WrappedModel),
    "a metric's object": exchanged_update,
    "a callback": lambda: prepared(nn.Linear(4, 3)),
    "a callback's object": lambda: prepared(nn.Linear(4, 3)),
    "the data": images,
}
DATA = {
    "one of two losses": (X, Y, Y),
    "a function in a loss": (X, X, X + 1),
    "the data": lambda: DrawingData(mode="test", sample=True),
}
CALLBACKS = {"a callback": DrawingCallback(), "a callback's object": listening(hapi.callbacks.History())}


@pytest.fixture(autouse=True)
def no_hooks_are_left():
    yield
    for held in (nn.modules.module, of_all_optimizers):
        for name, hooks in vars(held).items():
            if name.startswith("_global_") and name.endswith("_hooks"):
                hooks.clear()
    nn.modules.module._global_is_full_backward_hook = None
    while exchanged:
        setattr(*exchanged.pop())


@pytest.mark.parametrize("way", WAYS)
def test_what_the_users_code_draws_for_a_batch_is_the_same_each_time(way):
    model, data, found = WAYS[way](), DATA.get(way, (X, Y)), []
    for seed in (1, 2):
        drawn.clear()
        random.seed(seed)
        numpy.random.seed(seed)
        model.evaluate(data() if callable(data) else data, batch_size=16, verbose=0, callbacks=CALLBACKS.get(way))
        found.append(list(drawn))
    assert found[0] == found[1]
    # Each batch draws others.
    assert len(set(found[0])) == len(found[0]) >= 3


@pytest.fixture
def settings(monkeypatch):
    """Which generators are set from here on, in order."""
    told = []
    for name in ("set_torch", "set_streams"):
        original = getattr(rng, name)
        monkeypatch.setattr(rng, name, lambda *args, name=name, original=original: told.append(name) or original(*args))
    # It sets torch's too.
    monkeypatch.setattr(rng, "set_streams", lambda *args: told.append("set_streams"))
    return told


def flipped():
    return FashionMNIST(mode="test", sample=True, transform=Compose([RandomHorizontalFlip(), ToTensor()]))


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_no_generator_is_set_that_nobody_draws_from(call, settings):
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.Dropout(0.5))
    model = hapi.Model(network).prepare(
        loss=nn.CrossEntropyLoss(label_smoothing=0.1), metrics=hapi.metrics.F1(num_classes=10)
    )
    run = getattr(model, call)
    run(FashionMNIST(mode="test", sample=True), batch_size=16)
    run((torch.zeros(40, 784), torch.zeros(40, dtype=torch.int64)), batch_size=16)
    # At the beginning of each pass.
    assert settings == ["set_streams"] * 2
    settings.clear()
    flips = flipped()
    run(flips, batch_size=100)
    assert settings == ["set_streams"] + ["set_torch"] * -(-len(flips) // 100)
    # A loss or a metric of the user's takes no part in a prediction.
    settings.clear()
    model.prepare(loss=drawing_loss, metrics=DrawingMetric())
    run(flips, batch_size=100)
    assert (len(set(settings)) == 1) == (call == "evaluate")


def test_what_a_function_of_torchs_in_a_layer_draws_is_the_same_each_time():
    model, found = held(nn.functional.dropout)(), []
    for seed in (1, 2):
        torch.manual_seed(0)
        callbacks = [DrawingCallback()] if seed == 2 else []
        found.append(model.predict(X + 1, batch_size=16, verbose=0, stack_outputs=True, callbacks=callbacks))
    assert torch.equal(*found)


@pytest.mark.parametrize("function", [nn.functional.gelu, torch.relu, nn.ReLU()])
def test_torchs_own_functions_in_a_layer_draw_nothing(function, settings):
    held(function)().predict(X, batch_size=16, verbose=0)
    assert settings == ["set_streams"]


def test_a_layer_of_torchs_whose_class_was_changed_may_draw(monkeypatch):
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: draw() or forward(self, x))
    test_what_the_users_code_draws_for_a_batch_is_the_same_each_time("a callback")


@pytest.mark.parametrize("network", [nn.Linear(4, 3), Drawing(4, 3)])
def test_what_a_hook_draws_at_the_end_is_the_same_each_time(network):
    class AtEnd(hapi.callbacks.Callback):
        def on_eval_end(self, logs=None):
            drawn.clear()
            draw()

    found = []
    for seed in (1, 2):
        random.seed(seed)
        numpy.random.seed(seed)
        prepared(network).evaluate((X, Y), batch_size=16, verbose=0, callbacks=[AtEnd()])
        found += drawn
    assert found[0] == found[1]


def test_a_function_in_c_as_a_hook():
    callback, called = hapi.callbacks.Callback(), {}
    callback.on_eval_batch_end = called.setdefault
    prepared(nn.Linear(4, 3)).evaluate((X, Y), batch_size=25, verbose=0, callbacks=[callback])
    assert list(called) == [0, 1]


class Trained:
    """A network, and how it is trained: torch's and hapi's own code alone, unless a way changes it."""

    def __init__(self):
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.kind, self.loss, self.data = hapi.Model, nn.CrossEntropyLoss(), (X, Y)
        self.metrics, self.callbacks = [hapi.metrics.Accuracy()], [hapi.callbacks.EMA(0.9)]
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.options = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def fit(self):
        model = self.kind(self.network).prepare(self.optimizer, self.loss, self.metrics, **self.options)
        sizes = {} if isinstance(self.data, list) else {"batch_size": 10}
        model.fit(self.data, epochs=2, callbacks=self.callbacks, verbose=2, **sizes)


class Loss:
    def __call__(self, outputs, labels, reduction):
        return nn.functional.cross_entropy(outputs, labels, reduction=reduction)


class DrawingOptimizer(torch.optim.SGD):
    """The user's own."""


class DrawingStep(hapi.Model):
    def train_step(self, inputs, labels):
        return super().train_step(inputs, labels)


class DrawingValues(hapi.callbacks.Callback):
    def batch_values(self, step):
        return {}


class Beginning(hapi.callbacks.Callback):
    def on_train_batch_begin(self, step, logs=None):
        """Called in each step."""


def with_hook(register, *part):
    return lambda it: getattr(it.network[2] if not part else getattr(it.network[2], *part), register)(lambda *_: None)


def noisy(x):
    return x * (1 + random.random())


def forward_of(function):
    def change(it):
        it.network[2].forward = function

    return change


class Subclassed(nn.Parameter):
    """Of a class of its own, which may compute with code of its own."""


def of_own_class(it):
    it.network[2].bias = Subclassed(torch.zeros(3))
    it.optimizer = torch.optim.Adam(it.network.parameters())


def own_step(it):
    it.optimizer.step = types.MethodType(lambda self, closure=None: type(self).step(self), it.optimizer)


def said_to_be_ours(it):
    @functools.wraps(hapi.callbacks.Callback.on_train_batch_begin)
    def hook(step, logs=None):
        """Called in each step."""

    it.callbacks[0].on_train_batch_begin = hook


def changed(kind, name):
    """A class of torch's or ours whose method was exchanged, until `no_hooks_are_left`."""

    def change(it):
        original = getattr(kind, name)
        exchanged.append((kind, name, original))
        setattr(kind, name, lambda self, *args: original(self, *args))
        it.optimizer = torch.optim.SGD(it.network.parameters(), 0.1)

    return change


def saving(it):
    class Saving(hapi.callbacks.ModelCheckpoint):
        """The user's own: it is asked after each step whether to save."""

    it.callbacks.append(Saving(save_dir=it.folder))


def scheduled(make):
    return lambda it: it.options.update(scheduler=make, scheduler_interval="step")


# Who takes part in a step of training, and may draw.
OTHERS = {
    "a layer": lambda it: it.network.append(Drawing(3, 3)),
    "a hook forward": with_hook("register_forward_hook"),
    "a hook backward": with_hook("register_full_backward_hook"),
    "a hook before backward": with_hook("register_full_backward_pre_hook"),
    "a hook on a gradient": with_hook("register_hook", "weight"),
    "a hook on what was added up": with_hook("register_post_accumulate_grad_hook", "weight"),
    "a hook on the optimizer": lambda it: it.optimizer.register_step_pre_hook(lambda *_: None),
    "an optimizer": lambda it: vars(it).update(optimizer=DrawingOptimizer(it.network.parameters(), 0.1)),
    "a loss": lambda it: vars(it).update(loss=lambda outputs, labels: nn.functional.cross_entropy(outputs, labels)),
    "a metric": lambda it: it.metrics.append(DrawingMetric(name="other")),
    "a step": lambda it: vars(it).update(kind=DrawingStep),
    "a callback": lambda it: it.callbacks.append(Beginning()),
    "values of a callback": lambda it: it.callbacks.append(DrawingValues()),
    "a hook on all modules before": lambda it: nn.modules.module.register_module_forward_pre_hook(lambda *_: None),
    "a hook on all modules backward": lambda it: nn.modules.module.register_module_full_backward_pre_hook(
        lambda *_: None
    ),
    "a hook on all optimizers": lambda it: of_all_optimizers.register_optimizer_step_post_hook(lambda *_: None),
    "a forward under autocast": forward_of(torch.autocast("cpu", enabled=False)(noisy)),
    "a forward that is not compiled": forward_of(torch.compiler.disable(noisy)),
    "a parameter's class": of_own_class,
    "an optimizer's own step": own_step,
    "an optimizer's changed class": changed(torch.optim.SGD, "step"),
    "a metric's changed class": changed(hapi.metrics.Accuracy, "update"),
    "a hook that is said to be ours": said_to_be_ours,
    "a saver": saving,
    "a part of a loss": lambda it: vars(it).update(loss=functools.partial(Loss(), reduction="mean")),
    "a schedule that calls a function": scheduled(
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: random.random())
    ),
    "a schedule that calls one in turn": scheduled(
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer, [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)] * 2, [1]
        )
    ),
    "data of the user's": lambda it: vars(it).update(
        data=[(x, y) for x, y in zip(X.split(10), Y.split(10), strict=True)]
    ),
}


# What of torch's takes part and calls nobody else's code.
TORCHS = {
    "nothing more": lambda it: None,
    "a schedule by steps": scheduled(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)),
    "a part of a loss": lambda it: vars(it).update(
        loss=functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)
    ),
    "a network without dropout": lambda it: it.network.pop(1),
}


@pytest.mark.parametrize("way", [*OTHERS, *(f"torch's own: {way}" for way in TORCHS)])
def test_in_a_step_of_training_all_is_set_that_the_users_code_may_draw_from(way, settings, tmp_path):
    it = Trained()
    it.folder = tmp_path
    theirs = way.removeprefix("torch's own: ")
    own = theirs == way
    (OTHERS if own else TORCHS)[theirs](it)
    it.fit()
    steps = 2 * 5
    # All is set for an epoch's beginning, the end of its training, and its end, too.
    # And before what an optimizer step calls of the user's: on all ranks alike.
    each = (1 + ("optimizer" in way)) if own else 0
    assert settings.count("set_streams") == 2 * 3 + steps * each
    assert settings.count("set_torch") == (0 if own else steps)


def test_a_random_transform_gives_the_same_images_each_time():
    model = hapi.Model(nn.Flatten())
    first, second = (model.predict(flipped(), batch_size=32, stack_outputs=True, verbose=0) for _ in range(2))
    assert torch.equal(first, second)


def test_torchs_layers_draw_nothing_in_eval_mode_but_those_that_are_known_to():
    x = torch.rand(4, 8, 8)
    layers = [
        *(kind(0.5) for kind in (nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout)),
        *(kind(8, 8, num_layers=2, dropout=0.5, batch_first=True) for kind in (nn.RNN, nn.LSTM, nn.GRU)),
        *(nn.TransformerEncoderLayer(8, 2, dropout=0.5, batch_first=first) for first in (True, False)),
        *(
            nn.RReLU(),
            nn.BatchNorm1d(8),
            nn.GroupNorm(2, 8),
            nn.Linear(8, 8),
            nn.Conv1d(8, 8, 3),
            nn.AdaptiveMaxPool1d(2),
        ),
    ]
    several = nn.TransformerDecoderLayer(8, 2, dropout=0.5), nn.MultiheadAttention(8, 2, dropout=0.5)
    before = torch.get_rng_state()
    for layer in layers:
        layer.eval()(x)
    several[0].eval()(x, x)
    several[1].eval()(x, x, x)
    assert torch.equal(torch.get_rng_state(), before)
    for kind in draws._DRAWING:
        kind(2, output_size=2).eval()(torch.rand(1, 8, 8, 8))
        assert not torch.equal(torch.get_rng_state(), before)
        before = torch.get_rng_state()


def test_a_layer_that_draws_in_eval_mode_draws_the_same_for_a_batch_each_time():
    model = hapi.Model(nn.FractionalMaxPool2d(2, output_size=3))
    first, second = (
        model.predict(torch.rand(20, 1, 9, 9).fill_(1).cumsum(3), batch_size=4, verbose=0, stack_outputs=True)
        for _ in range(2)
    )
    assert torch.equal(first, second)
