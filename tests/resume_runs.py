"""Runs that are ended after an epoch and resumed, against one that is not; alone, and as a script of a launcher."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import hapi
from hapi.callbacks import EarlyStopping, ModelCheckpoint


class Noisy(Dataset):
    """Draws for each sample, as an augmentation does."""

    def __len__(self):
        return 44

    def __getitem__(self, index):
        return torch.full((6,), index / 44) + 0.1 * torch.randn(6), index % 3


def trained(save_dir: Path, epochs: int, **options) -> tuple[hapi.Model, hapi.callbacks.History]:
    """A fresh network, optimizer and Model, as a new process would make them, trained up to `epochs`."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(0.3), nn.Linear(300, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = hapi.Model(net).prepare(
        optimizer,
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        hapi.metrics.Accuracy(),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        ddp_options={"bucket_cap_mb": 0.002},
    )
    history = model.fit(
        Noisy(), Noisy(), batch_size=4, epochs=epochs, save_dir=save_dir, verbose=0, seed=3, log_freq=1,
        callbacks=[ModelCheckpoint(monitor="val_loss"), EarlyStopping(patience=100)], **options,
    )  # fmt: skip
    return model, history


def bits(model: hapi.Model) -> list[torch.Tensor]:
    states = [s for state in model.optimizer.state.values() for s in state.values() if isinstance(s, torch.Tensor)]
    return [tensor.clone() for tensor in (*model.network.state_dict().values(), *states)]


def check(folder: Path) -> None:
    straight, history = trained(folder / "straight", 4)
    trained(folder / "cut", 1, resume=False)
    trained(folder / "cut", 3, resume=True)
    resumed, resumed_history = trained(folder / "cut", 4, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(bits(straight), bits(resumed), strict=True)), "other bits"
    assert resumed_history.history == history.history and resumed_history.epoch == [1, 2, 3, 4]
    assert (resumed.epochs_trained, resumed.steps_trained) == (4, straight.steps_trained)


if __name__ == "__main__":
    check(Path(sys.argv[1]))
    print(f"rank {hapi.distributed.get_rank()} equal\n", end="")
