"""A script as its author would check it: mypy --strict finds nothing in it. See test_types.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import hapi
from hapi.callbacks import Callback, CSVLogger, EarlyStopping, History, LRScheduler, ModelCheckpoint, ReduceLROnPlateau
from hapi.datasets import CIFAR10, MNIST, FashionMNIST
from hapi.metrics import F1, Accuracy, Auc, Metric, Precision


class Largest(Metric):
    largest: Tensor

    def __init__(self) -> None:
        super().__init__("largest")
        self.add_state("largest", torch.tensor(0.0), reduce="max")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.largest = torch.maximum(self.largest, outputs.max())

    def result(self) -> Tensor:
        return self.largest


class Say(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.losses.append(float((logs or {})["loss"]))
        if self.losses[-1] < 0.1:
            self.model.stop_training = True

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = list(state["losses"])


class Penalized(hapi.Model):
    def train_step(self, inputs: Any, labels: Any) -> tuple[Any, Any]:
        loss, outputs = super().train_step(inputs, labels)
        return loss + sum(p.abs().sum() for p in self.parameters()), outputs


def top3(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.topk(3).indices == labels[:, None]).any(1).float()


def main() -> None:
    hapi.seed(0)
    assert_type(hapi.set_device("cpu"), torch.device)
    assert_type(hapi.get_device(), str)
    train, test = FashionMNIST(mode="train", sample=True), FashionMNIST(mode="test", sample=True)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    model = hapi.Model(net).prepare(
        torch.optim.Adam(net.parameters()),
        nn.CrossEntropyLoss(),
        [Accuracy(topk=(1, 5)), F1(num_classes=10), Precision(num_classes=10, average="micro"), Largest(), top3],
        amp_configs="bf16",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        clip_grad_norm=1.0,
    )
    assert_type(model, hapi.Model)
    callbacks = [
        Say(),
        CSVLogger("log.csv"),
        EarlyStopping(patience=2),
        ModelCheckpoint(monitor="val_loss", save_top_k=2),
    ]
    history = model.fit(train, test, epochs=2, batch_size=[32, 256], save_dir="runs", callbacks=callbacks, resume=True)
    assert_type(history, History)
    assert_type(history.history["loss"], list[float])
    assert_type(model.evaluate(test, batch_size=256), dict[str, float])
    assert_type(model.train_batch(torch.rand(2, 784), torch.tensor([1, 2])), dict[str, float])
    assert_type(model.summary(input_size=(1, 784)), dict[str, int])
    loader = DataLoader(TensorDataset(torch.rand(8, 784), torch.arange(8)), batch_size=4)
    Penalized(net, inputs=1).prepare("adam", nn.CrossEntropyLoss()).fit(loader, callbacks=LRScheduler(by_step=True))
    scores: Tensor = model.predict(torch.rand(4, 784))
    print(scores, Auc().compute(), ReduceLROnPlateau().state_dict())
    model.save("net")
    model.load("net", skip_mismatch=True)
    model.export("net.pt2", example_inputs=torch.rand(1, 784))
    history.plot("history.png")
    assert_type(hapi.distributed.get_rank(), int)
    print(MNIST(mode="test").classes, CIFAR10().targets, hapi.distributed.ParallelEnv().launcher)


if __name__ == "__main__":
    main()
