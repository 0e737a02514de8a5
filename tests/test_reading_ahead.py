"""Workers begin with the next epoch while the last step of one is trained, and what follows it is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

import hapi
import hapi.loop

SAMPLES = 12


class Noisy(Dataset[Any]):
    """Samples drawn anew in each epoch; how many have been read is written down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self.path.open("a") as file:
            file.write(".")
        return torch.randn(3) + index / SAMPLES, torch.rand(1)

    def read(self) -> int:
        return len(self.path.read_text())


class Told(Noisy):
    """It is told its epochs, and may look up what the script has made for them."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Placed(Noisy):
    """It has a place of its own to be kept: it goes on from there after a restart."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Sharded(Placed):
    sharded = True


class Ends(hapi.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """It might change what the data gives."""


class Steps(hapi.callbacks.Callback):
    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Workers read over steps anyway."""


def trained(data: Any, *callbacks: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.01), nn.MSELoss())
    history = model.fit(data, batch_size=2, verbose=0, callbacks=[*callbacks], seed=3, **options)
    return list(net.parameters()), history.history


def read_ahead(
    monkeypatch: pytest.MonkeyPatch, data: Noisy, wanted: list[int], *callbacks: Any, **options: Any
) -> tuple[list[int], Any]:
    """Train; how many samples of later epochs have been read at the end of each, where so many are waited for."""
    ahead: list[int] = []

    def at_end(first: bool) -> None:
        epochs = len(ahead) + 1
        until = time.monotonic() + 20
        # Where none should come, those would have begun before.
        time.sleep(0.5 if not wanted[epochs - 1] else 0)
        while data.read() - epochs * SAMPLES < wanted[epochs - 1] and time.monotonic() < until:
            time.sleep(0.01)
        ahead.append(data.read() - epochs * SAMPLES)

    with monkeypatch.context() as patched:
        patched.setattr(hapi.loop, "_hand_back_memory", at_end)
        return ahead, trained(data, *callbacks, num_workers=2, **options)


def assert_as_alone(found: Any, path: Path, epochs: int) -> None:
    weights, values = found
    others, wanted = trained(Noisy(path), epochs=epochs)
    assert values == wanted and all(map(torch.equal, weights, others))


@pytest.mark.parametrize("callbacks", [[], [Steps()]])
def test_workers_read_over_the_ends_of_epochs_and_nothing_beyond_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, callbacks: list[Any]
) -> None:
    data = Noisy(tmp_path / "read")
    # Two workers have two batches of two samples each before them.
    ahead, found = read_ahead(monkeypatch, data, [8, 8, 0], *callbacks, epochs=3)
    assert ahead == [8, 8, 0]
    assert data.read() == 3 * SAMPLES
    assert_as_alone(found, tmp_path / "alone", 3)


def test_a_run_may_end_where_workers_have_read_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Nothing is as little as the loss's own change.
    stops = hapi.callbacks.EarlyStopping("loss", min_delta=1e9, patience=0, verbose=0)
    ahead, found = read_ahead(monkeypatch, Noisy(tmp_path / "read"), [8, 8], stops, epochs=9)
    assert ahead == [8, 8]
    assert_as_alone(found, tmp_path / "alone", 2)


@pytest.mark.parametrize(
    "kind, callbacks, options",
    [
        (Noisy, [], {"num_iters": 9}),
        (Noisy, [Ends()], {}),
        (Told, [], {}),
        (Placed, [], {}),
        (Sharded, [], {}),
    ],
)
def test_nothing_is_read_ahead_of_what_may_change_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Noisy], callbacks: list[Any], options: Any
) -> None:
    data = kind(tmp_path / "read")
    # The last epoch but for num_iters', which ends within it.
    ahead, _ = read_ahead(monkeypatch, data, [0, 0], *callbacks, epochs=2, **options)
    assert ahead[0] == 0


class Shared(Dataset[torch.Tensor]):
    """What the script sets reaches the workers, too."""

    def __init__(self) -> None:
        self.value = torch.zeros(1).share_memory_()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.value.clone()


def test_what_a_callback_sets_between_epochs_holds_for_the_whole_next_one() -> None:
    data = Shared()
    seen: list[float] = []

    class Sets(hapi.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            data.value.fill_(epoch)

    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend(x.flatten().tolist())
            return super().forward(x)

    net = Keeps(1, 1)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), lambda outputs: outputs.mean())
    model.fit(data, batch_size=2, epochs=3, num_workers=1, callbacks=[Sets()], verbose=0)
    assert seen == [0.0] * 4 + [1.0] * 4 + [2.0] * 4


class Seeds(Dataset[torch.Tensor]):
    """What a generator of the data set's own may be made from."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        return torch.tensor([0 if info is None else info.seed])


def test_workers_have_the_run_s_seeds_and_leave_the_script_s_generator_alone() -> None:
    found = []
    for seed in (1, 1, 2):
        seen: list[int] = []

        class Keeps(hapi.Model):
            def train_step(self, inputs: Any, labels: Any, seen: list[int] = seen) -> Any:
                seen.extend(inputs[0].flatten().tolist())
                return self.network(inputs[0].float() * 0).mean(), None

        model = Keeps(nn.Linear(1, 1)).prepare("sgd")
        torch.manual_seed(5)
        model.fit(Seeds(), batch_size=1, epochs=2, num_workers=2, seed=seed, verbose=0)
        found.append((seen, float(torch.rand(()))))
    one, again, other = found
    assert one == again
    assert len({*one[0]}) == 2 and not {*one[0]} & {*other[0]}
    torch.manual_seed(5)
    assert {draw for _, draw in found} == {float(torch.rand(()))}
