"""Names of devices, and which one is used; cards are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import hapi
from hapi import device


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device, "_chosen", None)
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    yield


Machine = Callable[[str, int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes torch believe in so many devices of one kind."""

    def have(kind: str, count: int) -> None:
        found = torch.device(kind) if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return have


def as_rank(monkeypatch: pytest.MonkeyPatch, local_rank: int) -> None:
    launched = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "expected", "shown"),
    [
        ("cpu", "cpu", "cpu"),
        ("cpu:3", "cpu", "cpu"),
        ("gpu", "cuda:0", "gpu:0"),
        ("cuda", "cuda:0", "gpu:0"),
        ("gpu:1", "cuda:1", "gpu:1"),
        ("cuda:3", "cuda:3", "gpu:3"),
        (torch.device("cuda", 2), "cuda:2", "gpu:2"),
        (torch.device("cpu"), "cpu", "cpu"),
    ],
)
def test_names_of_cards(machine: Machine, name: str | torch.device, expected: str, shown: str) -> None:
    machine("cuda", 4)
    assert hapi.set_device(name) == torch.device(expected)
    assert device.current_device() == torch.device(expected)
    assert hapi.get_device() == shown


def test_the_card_that_the_script_has_made_current(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in scripts that start their processes and group themselves, with rank and card as arguments."""
    machine("cuda", 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert hapi.get_device() == "gpu:0"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert hapi.get_device() == "gpu:2" and device.parse_device("gpu") == torch.device("cuda:2")
    # Part of a launcher's variables tells no card, and is nothing to complain of here.
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert hapi.get_device() == "gpu:2"
    as_rank(monkeypatch, 1)
    assert hapi.get_device() == "gpu:1"


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_accelerators(machine: Machine, kind: str) -> None:
    machine(kind, 1)
    assert hapi.get_device() == f"{kind}:0"
    assert hapi.set_device(kind) == torch.device(kind, 0)
    with pytest.raises(ValueError, match="no cuda device"):
        hapi.set_device("gpu")


@pytest.mark.parametrize(
    ("count", "name", "cure"),
    [
        (0, "gpu", r'has no cuda device.*set_device\("cpu"\)'),
        (0, "gpu:0", r'has no cuda device.*set_device\("cpu"\)'),
        (2, "gpu:2", 'only 2 of this kind.*Write "gpu:1" or a smaller'),
        (2, "cuda:7", 'only 2 of this kind.*Write "cuda:1" or a smaller'),
        (2, "mps", r'has no mps device.*set_device\("cpu"\)'),
        (2, "meta", r'has no meta device.*set_device\("cpu"\)'),
        (2, "tpux", 'Write "cpu", "gpu", "gpu:1" or "mps"'),
        (2, "gpu:-1", 'Write "cpu", "gpu", "gpu:1" or "mps"'),
        (2, "gpu:one", 'Write "cpu", "gpu", "gpu:1" or "mps"'),
    ],
)
def test_devices_that_are_not_there(machine: Machine, count: int, name: str, cure: str) -> None:
    machine("cuda", count)
    hapi.set_device("cpu")
    with pytest.raises(ValueError, match=rf"'{name}'.*{cure}"):
        hapi.set_device(name)
    assert hapi.get_device() == "cpu"


def test_by_default_the_first_accelerator_or_the_cpu(machine: Machine) -> None:
    machine("cuda", 0)
    assert hapi.get_device() == "cpu"
    machine("cuda", 2)
    assert hapi.get_device() == "gpu:0"


@pytest.mark.parametrize(("local_rank", "count", "expected"), [(0, 4, 0), (3, 4, 3), (3, 2, 1), (5, 1, 0)])
def test_a_launched_process_has_its_own_card(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, local_rank: int, count: int, expected: int
) -> None:
    machine("cuda", count)
    as_rank(monkeypatch, local_rank)
    assert hapi.get_device() == f"gpu:{expected}"
    assert hapi.set_device("gpu") == torch.device("cuda", expected)


def test_what_was_chosen_goes_before_the_launchers_card(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("cuda", 4)
    as_rank(monkeypatch, 3)
    hapi.set_device("gpu:1")
    assert hapi.get_device() == "gpu:1"
    hapi.set_device("cpu")
    assert hapi.get_device() == "cpu"


def test_nothing_is_started_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a device was asked for")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    network = nn.Linear(2, 1)
    hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.1), nn.MSELoss())
