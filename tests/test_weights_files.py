"""Files of weights: ours in plain torch, plain torch's in ours, `.safetensors`, other devices, every dtype."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi import archive, checkpoint, files, tensorfile

safetensors = importlib.import_module("safetensors.torch")
FORMATS = ("net.pt", "net.safetensors")


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def write_plain(state: Any, path: Path) -> None:
    """As a script without hapi does."""
    if path.suffix == ".safetensors":
        safetensors.save_file(dict(state), path)
    else:
        torch.save(state, path)


def read_plain(path: Path) -> Any:
    return safetensors.load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().cpu().resolve_conj().contiguous().flatten()
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).tolist() if flat.numel() else []


def same(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(bits(one[key]) == bits(other[key]) for key in one)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return same(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", FORMATS)
def test_ours_in_plain_torch_and_back(tmp_path: Path, name: str) -> None:
    subject, plain, again = hapi.Model(network()).prepare("adam"), network(1), network(2)
    subject.train_step = None  # type: ignore[assignment, method-assign]
    subject.save(tmp_path / name)
    plain.load_state_dict(read_plain(tmp_path / name), strict=True)
    assert same_weights(subject.network, plain)
    write_plain(plain.state_dict(), tmp_path / name)
    hapi.Model(again).load(tmp_path / name)
    assert same_weights(again, plain)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrappers(tmp_path: Path, name: str, prefix: str) -> None:
    write_plain({prefix + key: value for key, value in network(1).state_dict().items()}, tmp_path / name)
    subject = network()
    hapi.Model(subject).load(tmp_path / name)
    assert same_weights(subject, network(1))


@pytest.mark.parametrize("name", FORMATS)
def test_skip_mismatch_and_other_networks(tmp_path: Path, name: str) -> None:
    hapi.Model(network()).save(tmp_path / name)
    other = nn.Sequential(nn.Linear(6, 8), nn.Identity(), nn.Identity(), nn.Linear(8, 5))
    subject = hapi.Model(other)
    with pytest.raises(ValueError, match=rf"{name} is of another network: .*skip_mismatch=True"):
        subject.load(tmp_path / name)
    with pytest.warns(UserWarning, match=rf"{name}: loaded 2 of 4 entries.*3\.weight \(\(3, 8\) in the file"):
        subject.load(tmp_path / name, skip_mismatch=True)
    assert torch.equal(other[0].weight, network()[0].weight)


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


class Buffers(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for dtype in DTYPES:
            raw = torch.randint(0, 2 if dtype is torch.bool else 100, (48,), generator=draw, dtype=torch.uint8)
            self.register_buffer(str(dtype).replace("torch.", "of_"), raw.view(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_every_dtype_keeps_its_bits(tmp_path: Path, name: str) -> None:
    one, other = Buffers(1), Buffers(2)
    assert not same_weights(one, other)
    hapi.Model(one).save(tmp_path / name)
    hapi.Model(other).load(tmp_path / name)
    assert same_weights(one, other) and len(one.state_dict()) == len(DTYPES)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_another_dtype_is_taken_into_the_networks(tmp_path: Path, name: str) -> None:
    hapi.Model(network().double()).save(tmp_path / name)
    subject = network(1)
    hapi.Model(subject).load(tmp_path / name)
    assert same_weights(subject, network())


class Odd(nn.Module):
    """Tensors that share memory, are strided, or are views of something larger."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        pool = torch.randn(6, 4)
        for place, view in enumerate((pool[:2], pool[1:3], pool.t(), pool[4], torch.randn(1, 3).expand(2, 3))):
            self.register_buffer(f"view{place}", view)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("number", torch.tensor(3))
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())


@pytest.mark.parametrize("name", FORMATS)
def test_tied_strided_and_partial_tensors(tmp_path: Path, name: str) -> None:
    one, other = Odd(1), Odd(2)
    other.register_buffer("view4", torch.randn(2, 3))  # memory that is there twice cannot be loaded into
    hapi.Model(one).save(tmp_path / name)
    stored = read_plain(tmp_path / name)
    assert same(dict(stored), {key: one.state_dict()[key] for key in stored}) and len(stored) == len(one.state_dict())
    hapi.Model(other).load(tmp_path / name)
    assert same_weights(one, other) and other.head.weight is other.embed.weight
    assert one.conv.weight.is_contiguous(memory_format=torch.channels_last), "the network's own tensors are left alone"


# Devices.


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.save as on a machine with cards: what it writes says that it lay there."""

    def use(device: str) -> None:
        tag = torch.serialization.location_tag
        monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: device and tag(storage) and device)

    return use


@pytest.mark.parametrize("device", ["cuda:0", "cuda:7", "mps", "xpu:1", "hpu", "xla:0"])
def test_files_of_another_device(tmp_path: Path, on_a_card: Any, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    subject = hapi.Model(network()).prepare("adam", nn.CrossEntropyLoss())
    subject.train_batch(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    with monkeypatch.context():
        on_a_card(device)
        subject.save(tmp_path / "net")
        torch.save(subject.network.state_dict(), tmp_path / "plain.pt")
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            torch.load(tmp_path / "plain.pt", weights_only=True)
    for name in ("net", "plain"):
        other = hapi.Model(network(1)).prepare("adam", nn.CrossEntropyLoss())
        other.load(tmp_path / name)
        assert same_weights(subject.network, other.network)
    assert checkpoint.newest(tmp_path, network())[0] == str(tmp_path / "net")
    again = hapi.Model(network(1)).prepare("adam", nn.CrossEntropyLoss())
    again.load(tmp_path / "net")
    moments = [state["exp_avg"] for state in again.optimizer.state.values()]
    assert len(moments) == 6 and all(moment.device.type == "cpu" for moment in moments)


def test_the_order_of_checkpoints_of_another_device(tmp_path: Path, on_a_card: Any) -> None:
    subject = hapi.Model(network()).prepare("adam", nn.CrossEntropyLoss())
    on_a_card("cuda:0")
    for name in ("2", "1"):  # the further one is written first
        subject.steps_trained = int(name)
        subject.save(tmp_path / name)
    assert checkpoint.newest(tmp_path, network())[0] == str(tmp_path / "2")


# Versions of modules.


class Changed(nn.Module):
    """Its first version kept the weight negated, and said no version."""

    _version = 2

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("name", FORMATS)
def test_a_module_knows_its_own_version(tmp_path: Path, name: str) -> None:
    hapi.Model(nn.Sequential(Changed(3.0))).save(tmp_path / name)
    subject = nn.Sequential(Changed(0.0))
    hapi.Model(subject).load(tmp_path / name)
    assert subject[0].weight.item() == 3.0
    write_plain({"0.weight": torch.tensor([4.0])}, tmp_path / name)
    hapi.Model(subject).load(tmp_path / name)
    assert subject[0].weight.item() == -4.0


def test_versions_are_found_below_the_names_of_wrappers(tmp_path: Path) -> None:
    wrapped = nn.Sequential(OrderedDict(module=nn.Sequential(Changed(3.0))))
    torch.save(wrapped.state_dict(), tmp_path / "net.pt")
    subject = nn.Sequential(Changed(0.0))
    hapi.Model(subject).load(tmp_path / "net")
    assert subject[0].weight.item() == 3.0


# What `.safetensors` is, and is not.


def test_weights_alone_and_without_training_state(tmp_path: Path) -> None:
    subject, other = (hapi.Model(network(seed)).prepare("adam", nn.CrossEntropyLoss()) for seed in (0, 1))
    subject.train_batch(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    for training in (True, False):
        subject.save(tmp_path / "deep" / "net.safetensors", training=training)
        assert [path.name for path in (tmp_path / "deep").iterdir()] == ["net.safetensors"]
    other.load(str(tmp_path / "deep" / "net.safetensors"))
    assert same_weights(subject.network, other.network)
    assert not other.optimizer.state and other.steps_trained == 0
    with pytest.raises(ValueError, match=r"net\.safetensors, but no training state"):
        other.fit((torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)), verbose=0,
                  resume=tmp_path / "deep" / "net.safetensors")  # fmt: skip


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Extra(2, 2), r"^network\['_extra_state'\] is dict, and net\.safetensors can hold only dense tensors"),
        (nn.ParameterDict({"a": nn.Parameter(torch.eye(2).to_sparse())}), r"^network\['a'\] is a sparse or quantized"),
        (
            nn.ParameterDict({"a": nn.Parameter(torch.ones(2, dtype=torch.complex128))}),
            r"^network\['a'\] is of torch\.c",
        ),
    ],
)
def test_what_the_format_cannot_hold(tmp_path: Path, module: nn.Module, message: str) -> None:
    with pytest.raises(TypeError, match=rf"{message}.*Save to a path without \.safetensors"):
        hapi.Model(module).save(tmp_path / "net.safetensors")
    assert list(tmp_path.iterdir()) == []
    hapi.Model(module).save(tmp_path / "net")
    hapi.Model(module).load(tmp_path / "net")


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, subject = tmp_path / "net.safetensors", hapi.Model(network())
    subject.save(path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (subject.save, subject.load):
        with pytest.raises(ImportError, match=r'needs safetensors, which is not installed\. Run `pip install "torch-h'):
            call(path)


def test_a_missing_and_a_broken_file(tmp_path: Path) -> None:
    subject, path = hapi.Model(network()), tmp_path / "net.safetensors"
    with pytest.raises(FileNotFoundError, match=r"net\.safetensors does not exist.*\.safetensors included"):
        subject.load(path)
    subject.save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"net\.safetensors is not a whole safetensors file .*Load another file"):
        subject.load(path)


# Files that are no weights.


def test_a_training_state_is_no_network(tmp_path: Path) -> None:
    subject = hapi.Model(network()).prepare("adam")
    subject.save(tmp_path / "net")
    for skip in (False, True):
        with pytest.raises(ValueError, match=r"net\.opt\.pt holds the training state .*without \.opt"):
            subject.load(tmp_path / "net.opt.pt", skip_mismatch=skip)


@pytest.mark.parametrize("content", [[1, 2], torch.ones(2), {1: torch.ones(2)}, "text", None])
def test_what_is_no_state_dict(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"net\.pt holds a \w+, not the state dict of a network\. Load a file"):
        hapi.Model(network()).load(tmp_path / "net")


@pytest.mark.parametrize(
    "content",
    [
        {"a": torch.zeros(3), "empty": torch.zeros(0), "number": 1, "text": "x"},
        {"view": torch.arange(10)[2:5], "same": torch.arange(10)},
        [torch.ones(3).half(), (torch.ones(3, dtype=torch.bool), {"w": nn.Parameter(torch.ones(2, 2))})],
        {"sparse": torch.eye(3).to_sparse()},
        "text",
    ],
)
def test_what_is_stored_is_as_long_as_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    """An older torch does not compare it, and takes what comes first of a part that is too long."""
    monkeypatch.setattr(archive, "_torch_compares_sizes", lambda: False)
    shared = [content, content]
    torch.save(shared, tmp_path / "kept.pt")
    files.read(tmp_path / "kept.pt")
    monkeypatch.setattr(archive, "verify", lambda file: 10**6)
    with pytest.raises(ValueError, match=r"its tensors take \d+ bytes, and it has 1000000 for them"):
        files.read(tmp_path / "kept.pt")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = hapi.Model(network()).prepare("adam")
    for name in ("1", "2"):
        subject.steps_trained = int(name)
        subject.save(tmp_path / name)

    verify = archive.verify

    def refused(file: Any, *rest: Any, **more: Any) -> int:
        if "2.pt" in str(file.name):
            raise PermissionError(13, "Permission denied")
        return verify(file, *rest, **more)

    # As root may read everything, the refusal is played.
    monkeypatch.setattr(archive, "verify", refused)
    with pytest.raises(PermissionError, match=r"2\.pt may not be read by this user .*Change its permissions"):
        subject.load(tmp_path / "2")
    found, passed_over = checkpoint.newest(tmp_path, network())
    assert found == str(tmp_path / "1") and "may not be read" in passed_over[0]


def test_a_module_whose_metadata_is_strange_is_refused_at_save(tmp_path: Path) -> None:
    subject = network()

    def hook(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        metadata["odd"] = object()

    subject[0].register_state_dict_post_hook(hook)
    with pytest.raises(TypeError, match=r"_metadata\['0'\]\['odd'\] is of type object"):
        hapi.Model(subject).save(tmp_path / "net")


def test_tensors_on_the_cpu_are_all_that_a_read_gives(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensorfile.write(tmp_path / "net.safetensors", network().state_dict())
        state = tensorfile.read(tmp_path / "net.safetensors")
    assert all(tensor.device.type == "cpu" and type(tensor) is torch.Tensor for tensor in state.values())


@pytest.mark.parametrize("metadata", [[1], {"hapi": 3}, {"hapi": {"id": 3}}, 7])
def test_odd_metadata_of_a_file_from_elsewhere(tmp_path: Path, metadata: Any) -> None:
    state = network().state_dict()
    state._metadata = metadata
    torch.save(state, tmp_path / "x.pt")
    assert checkpoint.newest(tmp_path, network())[0] is None
    hapi.Model(network()).load(tmp_path / "x")
