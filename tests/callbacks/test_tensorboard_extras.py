"""TensorBoard beside its curves: the graph, the table of runs, images and what the network takes them for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_tensorboard import STEPS, EventAccumulator, StopAt, X, Y, fit, model
from torch import nn
from torch.utils.data import Dataset, Subset

import hapi
from hapi.callbacks import EMA, Callback, GradientNorm, TensorBoard, pictures, settings

IMAGES = torch.rand(20, 1, 2, 3, generator=torch.Generator().manual_seed(2))


def image_model(seed: int = 0) -> hapi.Model:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    return hapi.Model(network).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())


def fit_images(subject: hapi.Model, callbacks: Any, **options: Any) -> None:
    options = {"epochs": 2, "seed": 3, **options}
    subject.fit((IMAGES, Y), (IMAGES, Y), batch_size=4, verbose=0, callbacks=callbacks, **options)


def events(folder: Path) -> Any:
    return EventAccumulator(str(folder)).Reload()


def test_nothing_but_curves_unless_asked(tmp_path: Path) -> None:
    fit(model(), TensorBoard(tmp_path))
    found = events(tmp_path)
    tags = found.Tags()
    assert tags["images"] == [] and not tags["graph"] and not found.summary_metadata


def test_the_graph(tmp_path: Path) -> None:
    fit_images(image_model(), TensorBoard(tmp_path, graph=True))
    nodes = {node.name for node in events(tmp_path).Graph().node}
    assert "output/output.1" in nodes, nodes
    assert any("Linear[3]" in name and "weight" in name for name in nodes)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            raise RuntimeError("not a trace\nof it")
        return self.layer(x.flatten(1))


def test_a_network_that_cannot_be_traced_is_trained_all_the_same(tmp_path: Path, capsys: Any) -> None:
    subject = hapi.Model(Branching()).prepare("adam", nn.CrossEntropyLoss())
    fit_images(subject, TensorBoard(tmp_path, graph=True))
    line = "TensorBoard: the graph of Branching is left out, since it cannot be traced: not a trace\n"
    assert capsys.readouterr().out == line
    assert not events(tmp_path).Tags()["graph"] and "epoch/loss" in events(tmp_path).Tags()["scalars"]


def table(folder: Path) -> tuple[dict[str, Any], list[str], int]:
    """The hyper-parameters, the curves that have a column, and how the run has ended."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    held = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
        for tag, metadata in events(folder).summary_metadata.items()
        if metadata.plugin_data.plugin_name == "hparams"
    }
    start = held["_hparams_/session_start_info"].session_start_info.hparams
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()}
    curves = [info.name.tag for info in held["_hparams_/experiment"].experiment.metric_infos]
    ended = held.get("_hparams_/session_end_info")
    return values, curves, 0 if ended is None else ended.session_end_info.status


def test_the_table_of_runs(tmp_path: Path) -> None:
    history = fit(model(), TensorBoard(tmp_path, hparams={"width": 8, "name": "small", "deep": False}))
    values, curves, status = table(tmp_path)
    assert {name: values[name] for name in ("width", "name", "deep")} == {"width": 8, "name": "small", "deep": False}
    known = {"network": "Sequential", "parameters": 83, "loss": "CrossEntropyLoss", "optimizer": "Adam", "lr": 0.001}
    known |= {"batch_size": 4, "epochs": 2, "seed": 3}
    assert {name: value for name, value in values.items() if name not in ("width", "name", "deep")} == known
    assert set(curves) == {f"epoch/{name}" for name in history}
    assert status == 1  # success
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == set()


def test_a_run_that_is_cut_has_its_table_and_writes_it_once(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    options = {"hparams": {}, "graph": True, "images": (IMAGES, Y)}
    with pytest.raises(RuntimeError, match="a fault"):
        callbacks = [TensorBoard(folder, **options), StopAt(1, 4)]
        fit_images(image_model(), callbacks, log_freq=2, epochs=3, save_dir=tmp_path / "files")
    assert table(folder)[0]["epochs"] == 3 and table(folder)[2] == 0
    fit_images(image_model(), TensorBoard(folder, **options), epochs=3, save_dir=tmp_path / "files", resume=True)
    assert table(folder)[2] == 1
    found = events(folder)
    assert [event.step for event in found.Images("images/samples")] == [2]
    assert [event.step for event in found.Images("images/wrong")] == [STEPS, 2 * STEPS, 3 * STEPS]


def sizes(found: Any, tag: str) -> list[tuple[int, int]]:
    return [Image.open(io.BytesIO(event.encoded_image_string)).size for event in found.Images(tag)]


def test_samples_once_and_wrong_predictions_each_epoch(tmp_path: Path) -> None:
    fit_images(image_model(), TensorBoard(tmp_path, images=(IMAGES, Y), image_count=3), log_freq=2)
    found = events(tmp_path)
    assert [event.step for event in found.Images("images/samples")] == [2]
    assert [event.step for event in found.Images("images/wrong")] == [STEPS, 2 * STEPS]
    # 2 x 3 pixels are drawn 42 times as large; one line below them, or two.
    assert sizes(found, "images/samples") == [(3 * 132, 84 + 14 + 6)]
    assert sizes(found, "images/wrong") == [(3 * 132, 84 + 28 + 6)] * 2


def test_images_and_labels_as_a_list(tmp_path: Path) -> None:
    fit_images(image_model(), TensorBoard(tmp_path / "list", images=[IMAGES, Y], image_count=3))
    fit_images(image_model(), TensorBoard(tmp_path / "tuple", images=(IMAGES, Y), image_count=3))
    listed, paired = (events(tmp_path / name).Images("images/wrong") for name in ("list", "tuple"))
    assert [event.encoded_image_string for event in listed] == [event.encoded_image_string for event in paired]


def test_no_picture_of_nothing_where_all_is_seen_rightly(tmp_path: Path) -> None:
    subject = image_model()
    right = subject.predict((IMAGES, Y), verbose=0).argmax(1)
    subject.prepare(torch.optim.SGD(subject.parameters(), lr=0.0), nn.CrossEntropyLoss())
    subject.network[1].momentum = 0.0
    fit_images(subject, TensorBoard(tmp_path, images=(IMAGES, right)))
    assert events(tmp_path).Tags()["images"] == ["images/samples"]


def test_the_training_is_the_same_with_it_and_without(tmp_path: Path) -> None:
    plain, shown = image_model(), image_model()
    fit_images(plain, None)
    fit_images(shown, TensorBoard(tmp_path, log_freq=1, graph=True, hparams={}, images=(IMAGES, Y)))
    pairs = zip(plain.network.state_dict().items(), shown.network.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)


@pytest.mark.parametrize("in_evaluation", [True, False])
@pytest.mark.parametrize("last", [True, False], ids=["EMA last", "EMA first"])
def test_wrong_predictions_are_those_of_the_weights_that_the_evaluation_used(
    tmp_path: Path, in_evaluation: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[torch.Tensor] = []
    wrong = pictures.Labelled.wrong
    monkeypatch.setattr(pictures.Labelled, "wrong", lambda self, out, n: told.append(out) or wrong(self, out, n))

    class Look(Callback):
        """The loss that the evaluation had, and what the network is when the others have seen the epoch's end."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            losses.append(logs["val_loss"])
            assert self.model.network.training and self.model.network[3].training

    losses: list[float] = []
    plain, shown = image_model(), image_model()
    board, ema = TensorBoard(tmp_path, images=(IMAGES, Y)), EMA(0.9, in_evaluation=in_evaluation)
    fit_images(plain, EMA(0.9, in_evaluation=in_evaluation))
    fit_images(shown, [board, ema, Look()] if last else [ema, board, Look()])
    assert len(told) == 2
    assert [float(nn.functional.cross_entropy(out, Y)) for out in told] == pytest.approx(losses)
    pairs = zip(plain.network.state_dict().values(), shown.network.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class Named(Dataset):
    classes = ["cat", "dog", "emu"]

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return Image.new("RGB", (200, 100)), index % 3


def test_which_images_are_shown_and_what_is_written_below() -> None:
    labelled = pictures.Labelled("TensorBoard", Subset(Named(), [1, 2, 3, 4]), None)
    assert [each.label for each in labelled.samples(3)] == ["dog", "emu", "cat"]
    scores = torch.eye(3)[[1, 0, 1, 2]]
    assert [each[1:] for each in labelled.wrong(scores, 9)] == [("emu", "cat"), ("cat", "dog"), ("dog", "emu")]
    assert [each[1:] for each in labelled.wrong(scores, 2)] == [("emu", "cat"), ("cat", "dog")]
    drawn = pictures.draw(labelled.wrong(scores, 9), columns=2)
    assert drawn.shape == (3, 2 * (100 + 28 + 6), 2 * (200 + 6)) and drawn.dtype == torch.uint8
    given = pictures.Labelled("TensorBoard", (torch.rand(2, 4, 4), torch.tensor([1, 7])), ["a", "b"])
    assert [each.label for each in given.samples(9)] == ["b", "7"]


@pytest.mark.parametrize(
    ("image", "first", "last"),
    [
        (torch.tensor([[0.0, 1.0]]), (0, 0, 0), (255, 255, 255)),
        (torch.tensor([[[-3.0, 1.0]]]), (0, 0, 0), (255, 255, 255)),  # normalized for the network
        (torch.tensor([[7, 200]], dtype=torch.uint8), (7, 7, 7), (200, 200, 200)),
        (torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 1.0]]]), (255, 0, 0), (0, 0, 255)),
        (torch.tensor([[[1, 2, 3], [4, 5, 6]]] * 2, dtype=torch.uint8).numpy(), (1, 2, 3), (4, 5, 6)),
        (torch.tensor([[float("nan"), 1.0]]), (0, 0, 0), (255, 255, 255)),
    ],
)
def test_the_colors_of_an_image(image: Any, first: Any, last: Any) -> None:
    drawn = pictures.draw([pictures.Captioned(image, "")])
    assert tuple(drawn[:, 0, 20].tolist()) == first and tuple(drawn[:, 0, -21].tolist()) == last


def test_what_cannot_be_shown() -> None:
    for images in (iter([]), torch.rand(3, 4, 4), (torch.rand(2, 4, 4), Y, Y)):
        with pytest.raises(TypeError, match=r"no single image with its label.*Pass a data set"):
            TensorBoard(images=images)
    labelled = pictures.Labelled("TensorBoard", (IMAGES, Y), None)
    # Of one column the largest is always the first: all would be class 0.
    for outputs, received in ((torch.rand(20), r"\(20,\)"), (torch.rand(20, 1), r"\(20, 1\)"), ({"a": X}, "dict")):
        with pytest.raises(ValueError, match=f"{received}.*no row of scores.*Leave images= out"):
            labelled.wrong(outputs, 3)
    one_hot = pictures.Labelled("TensorBoard", (IMAGES, nn.functional.one_hot(Y)), None)
    for show in (lambda: one_hot.samples(1), lambda: one_hot.wrong(torch.rand(20, 3), 1)):
        with pytest.raises(TypeError, match=r"which is not the number of a class.*y\.argmax\(1\)"):
            show()
    with pytest.raises(ValueError, match=r"shape \(3,\), which cannot be drawn"):
        pictures.draw([pictures.Captioned(torch.rand(3), "")])
    with pytest.raises(ValueError, match=r"image_count=0.*Write image_count=16"):
        TensorBoard(images=(IMAGES, Y), image_count=0)


@pytest.mark.parametrize("hparams", [3, {"a": [1, 2]}, {1: 2}])
def test_hyper_parameters_that_no_table_can_hold(hparams: Any) -> None:
    with pytest.raises(TypeError, match=r"TensorBoard received hparams.*Write hparams=\{"):
        TensorBoard(hparams=hparams)


def test_the_hyper_parameters_that_a_fit_knows() -> None:
    subject = image_model()
    optimizer = torch.optim.SGD(subject.parameters(), lr=torch.tensor(0.5), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    subject.prepare(optimizer, lambda outputs, labels: outputs.mean(), None, "bf16", scheduler=schedule)
    found = settings.known(subject, {"accumulate_grad_batches": 2, "clip_grad_norm": 2, "last_epoch": 3})
    assert found == {
        "network": "Sequential", "parameters": 33, "loss": "<lambda>", "optimizer": "SGD", "lr": 0.5, "momentum": 0.9,
        "scheduler": "StepLR", "precision": "bfloat16", "clip_grad_norm": 2, "epochs": 3, "accumulate_grad_batches": 2,
    }  # fmt: skip


def test_the_clipping_is_known_also_where_a_callback_does_it(tmp_path: Path) -> None:
    subject = image_model()
    subject.prepare("adam", nn.CrossEntropyLoss(), clip_grad_norm=0.5)
    fit_images(subject, [GradientNorm(), TensorBoard(tmp_path, hparams={})], epochs=1)
    assert table(tmp_path)[0]["clip_grad_norm"] == 0.5


def test_the_rate_that_a_fit_is_known_by_is_that_which_it_began_with(tmp_path: Path) -> None:
    subject = image_model()
    schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    subject.prepare("adam", nn.CrossEntropyLoss(), scheduler=schedule, scheduler_interval="step")
    fit_images(subject, TensorBoard(tmp_path, log_freq=3, hparams={}))
    assert table(tmp_path)[0]["lr"] == 1e-3


def test_a_folder_that_cannot_be_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    subject = model()
    with pytest.raises(ValueError, match=r"TensorBoard received log_dir=.*nothing can be written: .*is a file. Write"):
        fit(subject, TensorBoard(tmp_path / "file"))
    assert subject.steps_trained == 0


@pytest.mark.parametrize("shape", [(3, 0, 8), (0, 8, 8), (8,), (2, 3, 8, 8)])
def test_an_image_that_cannot_be_drawn(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"An image has the shape .*cannot be drawn.*Pass images of such a shape"):
        pictures.draw([pictures.Captioned(torch.zeros(shape), "cat")])


@pytest.mark.parametrize("label", [torch.eye(3)[0], "cat", None])
def test_a_label_that_is_no_number(label: Any) -> None:
    class Pairs(Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return IMAGES[0], label

    labelled = pictures.Labelled("TensorBoard", Pairs(), None)
    for look in (lambda: labelled.samples(1), lambda: labelled.wrong(torch.eye(3)[:1], 1)):
        with pytest.raises(TypeError, match=r"TensorBoard received images with a label of type .*Write images=\(x, y"):
            look()
