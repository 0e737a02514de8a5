"""What may be saved, and what is refused at once by its key: a file that a safe load refuses is found days later."""

from __future__ import annotations

import datetime
import enum
import functools
import random
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import hapi
from hapi import files
from hapi.callbacks import Callback


class Color(enum.Enum):
    RED = "red"


class Text(str, enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: int
    y: Any


Old = namedtuple("Old", ["x"])


class Loud(int):
    def __int__(self) -> int:
        return 99

    def __repr__(self) -> str:
        return "loud"


class Name(str):
    def __str__(self) -> str:
        return "another text"


@dataclass
class Data:
    x: int = 1


class Own(torch.Tensor):
    pass


def endless() -> Any:
    nest: list[Any] = []
    nest.append(nest)
    return nest


def deep(levels: int) -> Any:
    nest: Any = 1
    for _ in range(levels):
        nest = [nest]
    return nest


def tagged() -> torch.Tensor:
    tensor = torch.arange(3.0)
    tensor.note = Data()  # type: ignore[attr-defined]
    return tensor


def generator() -> Iterator[int]:
    yield 1


REFUSED: dict[str, Any] = {
    "enum": Color.RED, "enum class": Color, "dataclass": Data(), "class": Data, "function": generator,
    "generator": generator(), "lambda": lambda: 1, "partial": functools.partial(int, 1), "method": [].append,
    "path": Path("a"), "date": datetime.date(2020, 1, 1), "decimal": Decimal(1), "fraction": Fraction(1, 2),
    "frozenset": frozenset([1]), "deque": deque([1]), "range": range(3), "slice": slice(1), "bytearray": bytearray(2),
    "namespace": SimpleNamespace(a=1), "module": torch, "network": nn.Linear(1, 1),
    "torch generator": torch.Generator(),
    "random": random.Random(1), "layout": torch.strided, "memory format": torch.channels_last, "ellipsis": ...,
    "numpy generator": np.random.default_rng(1), "numpy state": np.random.RandomState(1), "numpy dtype": np.dtype("f4"),
    "numpy class": np.float32, "numpy function": np.add, "array of objects": np.array([Data()], dtype=object),
    "array of texts": np.array(["a"]), "array of dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "numpy date": np.datetime64("2020-01-01"), "numpy record": np.zeros(2, dtype=[("a", "i4")])[0],
    "long double": np.longdouble(1.5), "large int": 1 << 2000, "meta tensor": torch.ones(2, device="meta"),
    "holds itself": endless(), "too deep": deep(200), "object": object(), "exception": ValueError("x"),
    "open file": open,
}  # fmt: skip

TAKEN: dict[str, tuple[Any, Any]] = {
    "none": (None, None), "bool": (True, True), "int": (1 << 70, 1 << 70), "nan": (float("inf"), float("inf")),
    "complex": (2j, 2j), "text": ("ä\0", "ä\0"), "bytes": (b"\0x", b"\0x"), "set": ({1, "a"}, {1, "a"}),
    "tuple": ((1, (2,)), (1, (2,))), "size": (torch.Size([2, 3]), torch.Size([2, 3])),
    "dtype": (torch.bfloat16, torch.bfloat16), "device": (torch.device("cuda:3"), torch.device("cuda:3")),
    "named tuple": (Point(1, [2]), (1, [2])), "old named tuple": (Old({"a": 1}), ({"a": 1},)),
    "int enum": (Level.HIGH, 3), "flags": (Bits.ONE | Bits.TWO, 3), "text enum": (Text.RED, "red"),
    "int of its own": (Loud(3), 3), "text of its own": (Name("this"), "this"), "numpy text": (np.str_("a"), "a"),
    "ordered": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}), "default": (defaultdict(list, a=[1]), {"a": [1]}),
    "counter": (Counter("aab"), Counter("aab")), "proxy": (MappingProxyType({1: 2}), {1: 2}),
    "user dict": (UserDict(a=1), {"a": 1}),
    "keys": ({(1, Level.HIGH): 1, None: 2, 2.5: 3}, {(1, 3): 1, None: 2, 2.5: 3}),
    "numpy float": (np.float64(0.1), 0.1), "numpy half": (np.float16(0.5), 0.5), "numpy int": (np.uint64(2**63), 2**63),
    "numpy bool": (np.True_, True), "numpy complex": (np.complex64(1j), 1j), "numpy bytes": (np.bytes_(b"a"), b"a"),
    "array": (np.arange(3), torch.arange(3)), "scalar array": (np.array(2.5), 2.5),
    "big-endian": (np.arange(3, dtype=">i4"), torch.arange(3, dtype=torch.int32)),
    "backwards": (np.arange(3.0)[::-1], torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)),
    "read-only": (np.broadcast_to(np.float32(1), (2, 2)), torch.ones(2, 2)),
    "uint16 array": (np.array([65535], dtype=np.uint16), torch.tensor([65535], dtype=torch.uint16)),
    "nested": ({"a": [({"b": np.int8(1)},)]}, {"a": [({"b": 1},)]}), "90 deep": (deep(90), deep(90)),
    "own tensor class": (torch.ones(2).as_subclass(Own), torch.ones(2)),
    "with an attribute": (tagged(), torch.arange(3.0)),
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Remembers(Callback):
    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory}


def check_refused(memory: Any, key: str, folder: Path) -> None:
    """At the save itself, from a callback's state, an optimizer's group and a network's extra state."""
    with pytest.raises(TypeError) as caught:
        files.as_plain(memory, "callbacks['A.0']")
    assert str(caught.value).startswith(f"callbacks['A.0']{key}"), caught.value
    subject = hapi.Model(nn.Linear(2, 2)).prepare("sgd")
    subject.optimizer.param_groups[0]["note"] = memory
    with pytest.raises(TypeError) as caught:
        subject.save(folder / "net")
    assert str(caught.value).startswith(f"optimizer['param_groups'][0]['note']{key}"), caught.value
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_its_key(tmp_path: Path, kind: str) -> None:
    value = REFUSED[kind]
    check_refused(value, "", tmp_path)
    check_refused({"a": [1, (value,)]}, "['a'][1][0]", tmp_path)


def test_a_refused_key_of_a_dict(tmp_path: Path) -> None:
    check_refused({"a": {Color.RED: 1}}, "['a']: its key <Color.RED: 'red'>", tmp_path)


def test_refused_in_the_state_of_a_callback(tmp_path: Path) -> None:
    subject = hapi.Model(nn.Linear(6, 3)).prepare("sgd", nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match=r"callbacks\['Remembers\.0'\]\['memory'\]\['x'\] is of type Decimal"):
        subject.fit((torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)), verbose=0, save_dir=tmp_path / "run",
                    callbacks=Remembers({"x": Decimal(1)}))  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", TAKEN)
def test_taken_and_read_back(tmp_path: Path, kind: str) -> None:
    value, expected = TAKEN[kind]
    files.write(tmp_path / "value.pt", files.as_plain({"x": value}, "value"))
    assert same(files.read(tmp_path / "value.pt")["x"], expected)
    assert same(torch.load(tmp_path / "value.pt", weights_only=True)["x"], expected)


def test_lazy_layers_have_nothing_to_save_yet(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lazy modules were once announced as new.
        network = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(TypeError, match=r"^network\['0\.weight'\] has no values yet.*Let the network see a batch"):
        hapi.Model(network).save(tmp_path / "net")
    assert list(tmp_path.iterdir()) == []


def test_checksums_that_the_script_has_switched_off(tmp_path: Path) -> None:
    network = nn.Linear(2, 2)
    torch.serialization.set_crc32_options(False)
    try:
        hapi.Model(network).save(tmp_path / "net")
        torch.save(network.state_dict(), tmp_path / "plain.pt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    hapi.Model(nn.Linear(2, 2)).load(tmp_path / "net")
    with pytest.raises(ValueError, match=r"plain\.pt.*written without checksums.*save it anew"):
        hapi.Model(nn.Linear(2, 2)).load(tmp_path / "plain")
