"""Corners of the trainer that a first reading of the contract does not show."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hapi
from hapi.callbacks import Callback, ModelCheckpoint


def data(n: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    return x, x.argmax(1) % 3


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.a(x), self.b(x)


class Twice(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((4,), index / 10), index % 3, (index + 1) % 3


def test_a_list_of_losses_is_the_sum_of_means_and_refuses_those_that_are_none():
    net = TwoHeads()
    model = hapi.Model(net, inputs=1).prepare(sgd(net), [nn.CrossEntropyLoss(), nn.CrossEntropyLoss()])
    whole = model.evaluate(Twice(), batch_size=10, verbose=0)["loss"]
    assert model.evaluate(Twice(), batch_size=3, verbose=0)["loss"] == pytest.approx(whole, rel=1e-6)
    with pytest.raises(ValueError, match="Give one callable"):
        model.prepare(sgd(net), [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.ones(3))])
    counted = [lambda o, t: (o.sum(), len(o))] * 2
    with pytest.raises(ValueError, match="Give one callable"):
        model.prepare(sgd(net), counted).fit(Twice(), verbose=0)


def test_what_the_user_compiled_stays_compiled_and_what_hapi_compiled_is_undone():
    net = nn.Linear(4, 3)
    net.compile(backend="eager")
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    model.evaluate(data(), verbose=0)
    assert net._compiled_call_impl is not None
    other = nn.Linear(4, 3)
    model = hapi.Model(other).prepare(compile=True)
    model._engine.ready()
    assert other._compiled_call_impl is not None
    model.prepare()._engine.ready()
    assert other._compiled_call_impl is None


def test_fp16_reads_the_scale_only_for_a_schedule_of_steps(monkeypatch):
    reads = []
    original = torch.amp.GradScaler.get_scale
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda self: reads.append(1) or original(self))
    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss(), amp_configs="fp16")
    model.fit(data(), batch_size=2, verbose=0)
    assert reads == []
    optimizer = sgd(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model.prepare(
        optimizer, nn.CrossEntropyLoss(), amp_configs="fp16", scheduler=scheduler, scheduler_interval="step"
    ).fit(data(), batch_size=2, verbose=0)
    assert len(reads) == 20


def test_fits_save_freq_and_folder_hold_beside_a_model_checkpoint_of_the_users(tmp_path):
    def saved(*callbacks, **options):
        net = nn.Linear(4, 3)
        model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
        model.fit(data(), data(), epochs=4, verbose=0, callbacks=list(callbacks), **options)

    saved(ModelCheckpoint(monitor="val_loss"), save_dir=tmp_path / "d", save_freq=3)
    names = {path.name.removesuffix(".pt") for path in (tmp_path / "d").glob("*.pt")}
    assert {name for name in names if not name.endswith(".opt")} == {"3", "4", "final", "best_model"}
    saved(ModelCheckpoint(save_dir=tmp_path / "e", save_freq=2), save_dir=tmp_path / "f", save_freq=4)
    assert {path.name for path in (tmp_path / "e").glob("*[0-9l].pt")} == {"2.pt", "4.pt", "final.pt"}
    assert {path.name for path in (tmp_path / "f").glob("*[0-9l].pt")} == {"4.pt", "final.pt"}
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Choose a folder"):
        saved(ModelCheckpoint(save_dir=tmp_path / "file" / "x"))


def test_weights_load_where_the_loss_has_other_class_weights(tmp_path):
    net = nn.Linear(4, 3)
    saved = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))
    saved.save(tmp_path / "m")
    other = nn.Linear(4, 3)
    hapi.Model(other).prepare(sgd(other), nn.CrossEntropyLoss()).load(tmp_path / "m")
    assert torch.equal(net.weight, other.weight)


def test_a_loss_with_parameters_is_trained_saved_and_in_eval_mode_when_evaluated(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, outputs, labels):
            return nn.functional.cross_entropy(self.norm(outputs) * self.scale, labels)

    net, loss = nn.Linear(4, 3), Scaled()
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    model = hapi.Model(net).prepare(optimizer, loss)
    model.fit(data(), verbose=0)
    assert loss.scale.item() != 1
    moved = loss.norm.running_mean.clone()
    model.evaluate(data(), verbose=0)
    assert torch.equal(loss.norm.running_mean, moved) and loss.norm.training
    model.save(tmp_path / "m")
    fresh_net, fresh = nn.Linear(4, 3), Scaled()
    optimizer = torch.optim.SGD([*fresh_net.parameters(), *fresh.parameters()], lr=0.1)
    hapi.Model(fresh_net).prepare(optimizer, fresh).load(tmp_path / "m")
    assert torch.equal(fresh.scale, loss.scale)


def test_losses_without_a_hash_serve():
    @dataclass
    class Margin:
        margin: float

        def __call__(self, outputs, labels):
            return nn.functional.multi_margin_loss(outputs, labels, margin=self.margin)

    net = nn.Linear(4, 3)
    assert "loss" in hapi.Model(net).prepare(sgd(net), Margin(0.5)).evaluate(data(), verbose=0)


def test_the_range_of_labels_leaves_ignored_ones_out():
    x, y = data()
    y[3] = 255
    net = nn.Linear(4, 2)
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss(ignore_index=255))
    for given in ((x, y), DataLoader(TensorDataset(x, y), batch_size=4)):
        with pytest.raises(ValueError, match=r"Labels from 0 to 2 .* Give the last layer 3 outputs"):
            model.fit(given, verbose=0)


def test_the_start_line_knows_a_data_loader(capsys):
    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    seen = []

    class Look(Callback):
        def on_train_begin(self, logs=None):
            seen.append(self.params["batch_size"])

    model.fit(DataLoader(TensorDataset(*data()), batch_size=6, shuffle=True), verbose=2, callbacks=Look())
    model.fit(data(), global_batch_size=7, verbose=2, callbacks=Look())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hapi: ")]
    assert lines == [
        "hapi: 1 process (no launcher) on cpu; batch 6 per process, 6 global; 20 samples; 4 steps per epoch",
        "hapi: 1 process (no launcher) on cpu; batch 7 per process, 7 global; 20 samples; 3 steps per epoch",
    ]
    assert seen == [6, 7]


def test_a_tuple_of_batches_is_a_list_of_batches_everywhere():
    x, y = data()
    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    batches = ((x[:12], y[:12]), (x[12:], y[12:]))
    assert model.evaluate(batches, verbose=0) == pytest.approx(model.evaluate((x, y), verbose=0), rel=1e-6)
    with pytest.raises(ValueError, match="Write one number"):
        model.fit((x, y), batches, batch_size=[4, 7], verbose=0)


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_empty_streams_and_empty_batches():
    x, _ = data()
    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare(sgd(net), nn.MSELoss())
    for call in (
        lambda: model.fit(Stream([]), verbose=0),
        lambda: model.fit((x, x[:, :3]), Stream([]), verbose=0),
        lambda: model.evaluate(Stream([]), verbose=0),
        lambda: model.predict(Stream([]), verbose=0),
    ):
        with pytest.raises(ValueError, match="gave no batch"):
            call()
    empty = (x[:0], x[:0, :3])
    model.fit([(x[:6], x[:6, :3]), empty, (x[6:], x[6:, :3])], verbose=0)
    assert all(torch.isfinite(p).all() for p in net.parameters())
    assert len(model.predict([x[:6], x[:0], x[6:]], verbose=0)) == 20


def test_a_schedulers_interval_may_be_set_and_is_checked():
    net = nn.Linear(4, 3)
    optimizer = sgd(net)
    model = hapi.Model(net).prepare(
        optimizer, nn.CrossEntropyLoss(), scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1)
    )
    with pytest.raises(ValueError, match='"step" or "epoch"'):
        model.scheduler_interval = "batch"
    model.scheduler_interval = "step"
    model.fit(data(), batch_size=10, verbose=0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    with pytest.raises(ValueError, match="scheduler="):
        hapi.Model(net).prepare().scheduler_interval = "step"


def test_a_prepare_that_fails_changes_nothing():
    net = nn.Linear(4, 3)
    optimizer = sgd(net)
    model = hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss())
    with pytest.raises(TypeError):
        model.prepare("adam", nn.MSELoss(), metrics="acc")
    assert model.optimizer is optimizer and isinstance(model.loss, nn.CrossEntropyLoss)


def test_steps_that_return_no_pair_are_told_what_to_return():
    class Mine(hapi.Model):
        def train_step(self, inputs, labels):
            return self.loss(self.network(*inputs), labels)

    net = nn.Linear(4, 3)
    with pytest.raises(ValueError, match="return loss, outputs"):
        Mine(net).prepare(sgd(net), nn.CrossEntropyLoss()).fit(data(), verbose=0)


def test_whole_numbers_of_numpy_are_whole_numbers():
    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    model.fit(data(), batch_size=np.int64(5), epochs=np.int32(2), verbose=0)
    assert model.steps_trained == 8
    with pytest.raises(TypeError, match="not a whole number"):
        model.fit(data(), batch_size=np.float64(5), verbose=0)


COUNTS = {
    "save_freq": (hapi.callbacks.ModelCheckpoint, 0),
    "every_n_steps": (hapi.callbacks.ModelCheckpoint, 0),
    "keep_last": (hapi.callbacks.ModelCheckpoint, 0),
    "save_top_k": (hapi.callbacks.ModelCheckpoint, 0),
    "patience": (hapi.callbacks.EarlyStopping, -1),
    "cooldown": (hapi.callbacks.ReduceLROnPlateau, -1),
    "wait": (hapi.callbacks.Profiler, -1),
    "active": (hapi.callbacks.Profiler, 0),
    "log_freq": (hapi.callbacks.ProgBarLogger, 0),
    "image_count": (hapi.callbacks.TensorBoard, 0),
    "topk": (hapi.metrics.Accuracy, 0),
    "n": (hapi.seed, None),
    "nprocs": (lambda nprocs: hapi.distributed.spawn(len, nprocs=nprocs), 0),
    "num_workers": (lambda num_workers: hapi.Model(nn.Linear(1, 1)).predict([], num_workers=num_workers), -1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_a_wrong_kind_and_one_that_is_too_small(name):
    call, small = COUNTS[name]
    for value in (True, 1.5, "3"):
        with pytest.raises(
            TypeError, match=rf"received .*{value!r}, of type .*which is not a whole number. Write {name}="
        ):
            call(**{name: value})
    if small is not None:
        with pytest.raises(ValueError, match=rf"received .*{small}, but it counts .*from {small + 1}. Write {name}="):
            call(**{name: small})


def test_labels_are_spoken_of_only_where_they_may_have_been_passed():
    array, model = np.array([1, 2]), hapi.Model(nn.Linear(1, 1))
    told = []
    for call in (
        lambda: model.predict(array, array),
        lambda: model.predict(array, np.float64(5)),
        lambda: hapi.metrics.Accuracy(topk=array),
    ):
        with pytest.raises(TypeError, match="which is not a whole number") as caught:
            call()
        told.append("as one tuple (x, y)" in str(caught.value))
    assert told == [True, False, False]


NAN = float("nan")


@pytest.mark.parametrize(
    "call",
    [
        lambda: hapi.callbacks.EarlyStopping(min_delta=NAN),
        lambda: hapi.callbacks.EarlyStopping(baseline=NAN),
        lambda: hapi.callbacks.ReduceLROnPlateau(min_delta=float("inf")),
        lambda: hapi.callbacks.ReduceLROnPlateau(min_lr=NAN),
        lambda: hapi.callbacks.ReduceLROnPlateau(min_lr=-1),
        lambda: hapi.seed(10**40),
        lambda: hapi.seed(-(10**40)),
    ],
)
def test_numbers_that_say_nothing(call):
    with pytest.raises(ValueError, match=r"^[\w.]+ received \w+=.*(nan|inf|-1|\d{40}).* Write \w+=[\d.e-]+"):
        call()


@pytest.mark.parametrize("path", ["plot.nope", "file/plot.png", "folder.png"])
def test_a_plot_that_cannot_be_written(path, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    history = hapi.callbacks.History()
    history.on_epoch_end(0, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"History.plot received path=.*which cannot be written: .*Write another path"):
        history.plot(tmp_path / path)


def test_options_of_ddp_are_checked_in_one_process_too():
    with pytest.raises(ValueError, match="It takes: .*bucket_cap_mb"):
        hapi.Model(nn.Linear(1, 1)).prepare(ddp_options={"bucket_cap": 1})


def test_wrapped_networks_are_refused_with_the_way_out():
    net = nn.Linear(4, 3)
    with pytest.raises(TypeError, match="compile=True"):
        hapi.Model(torch.compile(net))
    with pytest.raises(TypeError, match="give the network itself"):
        hapi.Model(nn.DataParallel(net))


def test_the_ending_of_an_inference_program(tmp_path):
    net = nn.Linear(4, 3)
    model = hapi.Model(net)
    model.predict(data()[0], verbose=0)
    for given in ("a", "b.pt2", "c.pt", "d.v2"):
        model.save(tmp_path / given, training=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt2", "b.pt2", "c.pt2", "d.v2.pt2"]


def test_shapes_are_remembered_once_a_call():
    remembered = []

    class Mine(hapi.Model):
        def train_step(self, inputs, labels):
            outputs = self.network(*inputs)
            return nn.functional.cross_entropy(outputs, labels), outputs

    net = nn.Linear(4, 3)
    model = Mine(net).prepare(sgd(net))
    remember = model._engine.remember
    model._engine.remember = lambda inputs: remembered.append(1) or remember(inputs)
    model.fit(data(), batch_size=2, verbose=0)
    model.predict(data()[0], batch_size=2, verbose=0)
    assert len(remembered) == 2


def test_callbacks_whose_hooks_could_not_be_called_are_refused_before_the_first_step():
    class Misspelled(Callback):
        def on_batch_end(self, step, logs=None):
            raise AssertionError

    class Short(Callback):
        def on_epoch_end(self, epoch):
            raise AssertionError

    class Free(Callback):
        def on_epoch_end(self, *args, **kwargs):
            self.called = True

    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="on_batch_end, which is no hook .* is meant"):
        model.fit(data(), verbose=0, callbacks=Misspelled())
    with pytest.raises(TypeError, match=r"Write def on_epoch_end\(self, epoch, logs=None\)\."):
        model.fit(data(), verbose=0, callbacks=Short())
    free = Free()
    model.fit(data(), verbose=0, callbacks=free)
    assert free.called


def test_messages_about_inputs_name_what_works():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, a, b):
            return self.layer(a + b)

    x, y = data()
    net = Two()
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="flat"):
        model.fit([((x, x), y)], verbose=0)
    with pytest.raises(TypeError, match=r"Model\(network, inputs=2\)"):
        model.predict((x, x), verbose=0)
    assert hapi.Model(net, inputs=2).predict((x, x), verbose=0).shape == (20, 3)
    single = nn.Linear(4, 3)
    with pytest.raises(TypeError, match=r"train_batch\(x, y\)"):
        hapi.Model(single).prepare(sgd(single), nn.CrossEntropyLoss()).train_batch((x, y))
    with pytest.raises(TypeError, match=r"one tuple \(x, y\)"):
        hapi.Model(single).prepare(loss=nn.CrossEntropyLoss()).evaluate(x, y)


def test_resume_takes_a_folder_too(tmp_path):
    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    model.fit(data(), epochs=2, verbose=0, save_dir=tmp_path)
    assert model.fit(data(), epochs=3, verbose=0, resume=tmp_path).epoch == [1, 2, 3]


def test_fit_trains_in_any_context_and_odd_arrays_serve():
    x, y = data()
    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    for context in (torch.no_grad(), torch.inference_mode()):
        before = net.weight.clone()
        with context:
            model.fit((x.numpy()[::-1], y.numpy()[::-1]), verbose=0)
        assert not torch.equal(net.weight, before)


def test_a_closed_or_missing_stdout_ends_no_training(monkeypatch):
    import io
    import sys

    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        model.fit(data(), data(), verbose=1)
    assert model.epochs_trained == 2


def test_cross_entropy_of_an_output_that_is_no_tensor():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return {"scores": self.layer(x)}

    net = Named()
    model = hapi.Model(net).prepare(sgd(net), nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"outputs\['scores'\]"):
        model.fit(data(), verbose=0)
