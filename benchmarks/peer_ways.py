"""The same training in other libraries: the programs that peers.py lets take turns.

MNIST in memory, Linear 784-512, ReLU, Dropout 0.2, Linear 512-10, Adam with 1e-3, batch 32 a process, the epoch's loss
and accuracy kept; all start from the weights of `bench_fit.mlp`. Each is written as its library's documentation has its
users write it, without logger and checkpoint files, its bar as it is by default. Of what a documentation shows, the
fastest is taken: a fused Adam, accuracy as a mean that the library keeps anyway, no value read in a step.

Where a library takes tensors it gets them (Keras, Poutyne, skorch), else a TensorDataset in a DataLoader; their images
are floats already, while fit and the loop convert bytes in each step. The ways
whose names end in `-batched` get the loader that torch's documentation has for data that is faster to read in bulk: a
sampler of batches, `batch_size=None`. What is left of a way's time is then its loop. `keras-compiled` is the same as
`keras` with `jit_compile=True`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from bench_fit import adam, fit, hand, mlp, mnist_in_memory, steps_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from turns import Laps

BATCH_SIZE = 32
FOREVER = 10**6
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """All images as float32 in [0, 1], and their classes."""
    images, classes = mnist_in_memory()
    return images.div(255), classes


def loader(batch_size: int = BATCH_SIZE) -> DataLoader:
    """The usual one: a sample at a time, then collated."""
    return DataLoader(TensorDataset(*tensors()), batch_size=batch_size, shuffle=True)


def bulk_loader() -> DataLoader:
    """A batch at a time, by one indexing."""
    data = TensorDataset(*tensors())
    return DataLoader(data, sampler=BatchSampler(RandomSampler(data), BATCH_SIZE, drop_last=False), batch_size=None)


def hand_on_ranks(laps: Laps, batch_size: int) -> None:
    """The tuned loop of `bench_fit.hand` with DDP; each global batch is shared out as `fit` does."""
    images, classes = mnist_in_memory()
    torch.distributed.init_process_group("gloo")
    network = mlp()
    wrapped = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = adam(network)
    order, rank = torch.Generator().manual_seed(1), torch.distributed.get_rank()
    torch.manual_seed(rank)
    while True:
        loss_sum, correct = torch.zeros(()), torch.zeros(())
        for batch in torch.randperm(len(classes), generator=order).split(WORLD_SIZE * batch_size):
            rows = batch.tensor_split(WORLD_SIZE)[rank]
            labels = classes[rows]
            outputs = wrapped(images[rows].float().div_(255))
            loss = cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach() * len(rows)
            correct += (outputs.detach().argmax(1) == labels).sum()
        values = torch.stack([loss_sum, correct]) / len(classes)
        torch.distributed.all_reduce(values)
        print(values)
        laps.mark(loss=values[0].item(), acc=values[1].item(), steps=steps_of(optimizer))


def lightning(laps: Laps, data: DataLoader) -> None:
    """A LightningModule that logs both values for the epoch; `Trainer.fit`."""
    import lightning as L

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp()

        def training_step(self, batch, batch_idx):
            images, labels = batch
            outputs = self.network(images)
            loss = cross_entropy(outputs, labels)
            accuracy = (outputs.detach().argmax(1) == labels).float().mean()
            self.log_dict(
                {"loss": loss, "acc": accuracy},
                on_step=False,
                on_epoch=True,
                sync_dist=WORLD_SIZE > 1,
                batch_size=len(labels),
            )
            return loss

        def configure_optimizers(self):
            return adam(self.network)

    class Marks(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            values = {name: trainer.callback_metrics[name].item() for name in ("loss", "acc")}
            laps.mark(**values, steps=steps_of(trainer.optimizers[0]))

    several = {"strategy": "ddp", "devices": WORLD_SIZE} if WORLD_SIZE > 1 else {"devices": 1}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=FOREVER,
        callbacks=[Marks()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **several,
    )
    trainer.fit(Classifier(), data)


def accelerate(laps: Laps, data: DataLoader) -> None:
    """A loop of one's own with `accelerator.backward`; there is no bar by default."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network = mlp()
    network, optimizer = accelerator.prepare(network, adam(network))
    # It cannot rebuild a loader without a batch size, which in one process needs nothing of it.
    prepared = accelerator.prepare(data) if data.batch_size else data
    samples = len(data.dataset)
    while True:
        loss_sum, correct = torch.zeros(()), torch.zeros(())
        for images, labels in prepared:
            outputs = network(images)
            loss = cross_entropy(outputs, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach() * len(labels)
            correct += (outputs.detach().argmax(1) == labels).sum()
        values = accelerator.reduce(torch.stack([loss_sum, correct]), reduction="sum") / samples
        print(values)
        laps.mark(loss=values[0].item(), acc=values[1].item(), steps=steps_of(optimizer))


def ignite(laps: Laps, data: DataLoader) -> None:
    """`create_supervised_trainer` with two metrics; there is no bar by default."""
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer
    from ignite.metrics import Accuracy, Average

    def train(local_rank: int) -> None:
        batches = data
        if data.batch_size:
            # It divides the batch size that it is given by the number of processes.
            batches = idist.auto_dataloader(data.dataset, batch_size=WORLD_SIZE * BATCH_SIZE, shuffle=True)
        network = mlp()
        optimizer = idist.auto_optim(adam(network))
        trainer = create_supervised_trainer(
            idist.auto_model(network),
            optimizer,
            nn.CrossEntropyLoss(),
            output_transform=lambda x, y, outputs, loss: (outputs.detach(), y, loss.detach()),
        )
        Average(output_transform=lambda output: output[2]).attach(trainer, "loss")
        Accuracy(output_transform=lambda output: output[:2]).attach(trainer, "acc")

        @trainer.on(Events.EPOCH_COMPLETED)
        def mark() -> None:
            values = trainer.state.metrics
            laps.mark(loss=float(values["loss"]), acc=float(values["acc"]), steps=steps_of(optimizer))

        trainer.run(batches, max_epochs=FOREVER)

    if WORLD_SIZE == 1:
        train(0)
    else:
        with idist.Parallel(backend="gloo") as parallel:
            parallel.run(train)


def keras(laps: Laps, compiled: bool) -> None:
    """Keras's own layers and Adam on the torch backend; `fit` on tensors."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    network = keras.Sequential(
        [
            keras.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    # A Dense holds what a Linear has, its weights the other way round.
    network.set_weights([p.detach().t().numpy() for p in mlp().parameters()])
    network.compile(
        optimizer=keras.optimizers.Adam(1e-3, epsilon=1e-8),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=compiled,
    )

    class Marks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            steps = float(network.optimizer.iterations.numpy())
            laps.mark(loss=logs["loss"], acc=logs["accuracy"], steps=steps)

    images, classes = tensors()
    network.fit(images.squeeze(1), classes, batch_size=BATCH_SIZE, epochs=FOREVER, callbacks=[Marks()])


def poutyne(laps: Laps) -> None:
    """`poutyne.Model.fit` on tensors."""
    from poutyne import Callback, Model

    class Marks(Callback):
        def on_epoch_end(self, epoch_number, logs):
            laps.mark(loss=logs["loss"], acc=float(logs["acc"]) / 100, steps=steps_of(optimizer))

    network = mlp()
    optimizer = adam(network)
    model = Model(network, optimizer, "cross_entropy", batch_metrics=["accuracy"], device="cpu")
    model.fit(*tensors(), batch_size=BATCH_SIZE, epochs=FOREVER, callbacks=[Marks()])


def skorch(laps: Laps) -> None:
    """`NeuralNetClassifier.fit` on tensors, all of them for training; it prints a line an epoch by default."""
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Callback, EpochScoring

    class Marks(Callback):
        def on_epoch_end(self, net, **kwargs):
            row = net.history[-1]
            laps.mark(loss=float(row["train_loss"]), acc=float(row["train_acc"]), steps=steps_of(net.optimizer_))

    NeuralNetClassifier(
        mlp(),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        optimizer__fused=True,
        lr=1e-3,
        batch_size=BATCH_SIZE,
        max_epochs=FOREVER,
        iterator_train__shuffle=True,
        train_split=None,
        callbacks=[("train_acc", EpochScoring("accuracy", name="train_acc", on_train=True)), ("laps", Marks())],
    ).fit(*tensors())


ALONE: dict[str, Callable[[Laps], None]] = {
    "hand": lambda laps: hand(laps, BATCH_SIZE),
    "fit": lambda laps: fit(laps, BATCH_SIZE),
    "lightning": lambda laps: lightning(laps, loader()),
    "lightning-batched": lambda laps: lightning(laps, bulk_loader()),
    "accelerate": lambda laps: accelerate(laps, loader()),
    "accelerate-batched": lambda laps: accelerate(laps, bulk_loader()),
    "ignite": lambda laps: ignite(laps, loader()),
    "ignite-batched": lambda laps: ignite(laps, bulk_loader()),
    "keras": lambda laps: keras(laps, compiled=False),
    "keras-compiled": lambda laps: keras(laps, compiled=True),
    "poutyne": poutyne,
    "skorch": skorch,
}
# Keras on torch, Poutyne and skorch document no training of one network on several processes of a CPU.
ON_RANKS: dict[str, Callable[[Laps], None]] = {
    "hand": lambda laps: hand_on_ranks(laps, BATCH_SIZE),
    "fit": lambda laps: fit(laps, BATCH_SIZE),
    "lightning": lambda laps: lightning(laps, loader()),
    "accelerate": lambda laps: accelerate(laps, loader()),
    "ignite": lambda laps: ignite(laps, loader()),
}

if __name__ == "__main__":
    torch.set_flush_denormal(True)
    (ALONE if WORLD_SIZE == 1 else ON_RANKS)[sys.argv[1]](Laps(pauses=False))
