"""Process groups that live as long as the test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2).run(function, *args)`: one result a rank."""
    worlds: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        return worlds.setdefault(world_size, Ranks(world_size))

    yield of
    for world in worlds.values():
        world.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # As the ranks have it, so that sums are made in the same order.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
