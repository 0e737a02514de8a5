"""Checks of `Model.fit` on a card that gpu.py runs, each in a process of its own; on a CPU where they exist there.

    python benchmarks/gpu_checks.py amp-bf16 resume       some of them

amp-bf16   fit against a plain loop with autocast: losses and weights
amp-fp16   the same with a GradScaler whose first scale overflows: steps skipped, its scale, a schedule by steps
pinned     profiled: copies to the card come from pinned memory alone, and a step neither copies back nor waits for it
beside     profiled: copies to the card go by another stream than what it computes, and some while it computes
kept       data kept on the card against data read from the host: the bits of three epochs, and what a step copies
nccl       a group of one process: fit, DataParallel, evaluate against no group, an exchange on the card
resume     an epoch that is cut, resumed in bf16 with dropout and a schedule: the bits of the run that was not cut
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hapi

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Data = tuple[torch.Tensor, torch.Tensor]


def images(count: int) -> Data:
    """Random images and classes, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, 16, 16, generator=generator), torch.randint(10, (count,), generator=generator)


def convolution(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(dropout), nn.Linear(16 * 14 * 14, 10)),
    )


def farthest(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two networks' parameters and buffers."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.cpu().double() - b.cpu().double()).abs().max()) for a, b in pairs)


def expect(condition: bool, seen: str) -> str:
    """What was seen, if it is as it must be.

    Raises:
        SystemExit: It is not.
    """
    if not condition:
        raise SystemExit(seen)
    return seen


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.002, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


def amp(dtype: torch.dtype, configs: Any, scaler: torch.amp.GradScaler | None) -> str:
    """`fit` with `amp_configs` against a loop with autocast, and the scaler if there is one; 32 steps."""
    data = images(512)
    network = convolution()
    plain = copy.deepcopy(network).to(DEVICE)
    model = hapi.Model(network)
    model.prepare(sgd, nn.CrossEntropyLoss(), amp_configs=configs, scheduler=halving, scheduler_interval="step")
    history = model.fit(data, epochs=2, batch_size=32, shuffle=False, verbose=0)
    losses, state = plain_loop(plain, data, dtype, scaler)
    apart = max(abs(one - two) for one, two in zip(history.history["loss"], losses, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model")
        ours = torch.load(f"{folder}/model.opt.pt", weights_only=True)
    seen = f"losses {apart:.1e} apart, weights {farthest(network, plain):.1e}"
    same = apart < 1e-4 and farthest(network, plain) < 1e-4
    if scaler is not None:
        seen += f"; {32 - state['steps']} of 32 steps skipped by the loop, "
        seen += f"scale {ours['scaler']['scale']:g} and {state['scale']:g}, "
        seen += f"schedule {ours['scheduler']['last_epoch']} and {state['steps']}"
        same &= ours["scaler"]["scale"] == state["scale"] and 0 < state["steps"] < 32
    return expect(same and ours["scheduler"]["last_epoch"] == state["steps"], seen)


def plain_loop(
    network: nn.Module, data: Data, dtype: torch.dtype, scaler: torch.amp.GradScaler | None
) -> tuple[list[float], dict[str, float]]:
    """The loop as torch's documentation has it: each epoch's loss, then the steps that were taken and the scale."""
    optimizer = sgd(network.parameters())
    schedule, taken, losses = halving(optimizer), 0, []
    for _ in range(2):
        total = 0.0
        for x, y in zip(data[0].split(32), data[1].split(32), strict=True):
            with torch.autocast(DEVICE.type, dtype):
                loss = cross_entropy(network(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
                stepped = True
            else:
                before = scaler.get_scale()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                stepped = scaler.get_scale() >= before
            if stepped:
                schedule.step()
                taken += 1
            total += loss.item() * len(y)
        losses.append(total / len(data[0]))
    return losses, {"steps": taken, "scale": 1.0 if scaler is None else scaler.get_scale()}


def amp_bf16() -> str:
    """See the module's text."""
    return amp(torch.bfloat16, "bf16", None)


def amp_fp16() -> str:
    """See the module's text."""
    configs = {"dtype": "float16", "init_loss_scaling": 2.0**30, "incr_every_n_steps": 4}
    return amp(torch.float16, configs, torch.amp.GradScaler(DEVICE.type, init_scale=2.0**30, growth_interval=4))


def traced(steps: int, epochs: int = 1) -> torch.profiler.profile:
    """A fit of so many steps an epoch under torch's profiler."""
    model = hapi.Model(convolution()).prepare(sgd, nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    model.fit(images(64), batch_size=32, verbose=0)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        # Its lines, of which there are a few an epoch, read values: none within the steps that are counted.
        model.fit(images(32 * steps), epochs=epochs, batch_size=32, log_freq=10**6, verbose=0)
    return profile


def profiled(steps: int, epochs: int = 1) -> Counter[str]:
    """Copies and waits of a fit: their names in torch's profiler, with how often they came."""
    names = (event.name for event in traced(steps, epochs).events())
    return Counter(name for name in names if name.startswith("Memcpy") or "Synchronize" in name)


def pinned() -> str:
    """See the module's text."""
    few, many = profiled(40), profiled(80)
    more = {name: (many[name] - few[name]) / 40 for name in sorted(many | few) if many[name] != few[name]}
    pinned_copies = sum(count for name, count in more.items() if "Pinned -> Device" in name)
    # Agreeing whether to stop comes by the clock, not by the step: below a tenth a step.
    others = [n for n, count in more.items() if count > 0.1 and ("Pageable" in n or "DtoH" in n or "Synchronize" in n)]
    seen = ", ".join(f"{count:.2f} {name}" for name, count in more.items())
    # Less than one of each tensor: several small batches are read at once.
    return expect(pinned_copies > 0 and not others, f"a step more brings {seen or 'nothing'}")


def beside() -> str:
    """See the module's text."""
    with mock.patch.dict(os.environ, HAPI_KEEP_DATA="0"), tempfile.TemporaryDirectory() as folder:
        traced(80).export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]
    # The running values of an epoch start with a few numbers that are copied where it computes.
    copies = [copy for copy in copies if copy["args"]["bytes"] >= 1 << 12]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    streams = [{event["args"]["stream"] for event in kind} for kind in (copies, kernels)]
    spans = [(kernel["ts"], kernel["ts"] + kernel["dur"]) for kernel in kernels]
    meanwhile = sum(any(a < copy["ts"] + copy["dur"] and copy["ts"] < b for a, b in spans) for copy in copies)
    seen = f"copies on streams {streams[0]}, kernels on {streams[1]}; {meanwhile} of {len(copies)} copies meanwhile"
    return expect(bool(copies) and not streams[0] & streams[1] and meanwhile > 0, seen)


def kept() -> str:
    """See the module's text."""

    def trained(keep: str) -> nn.Module:
        network = convolution(dropout=0.5)
        model = hapi.Model(network).prepare(sgd, nn.CrossEntropyLoss())
        with mock.patch.dict(os.environ, HAPI_KEEP_DATA=keep):
            model.fit(images(300), images(70), epochs=3, batch_size=32, verbose=0, seed=0)
        return network

    torch.use_deterministic_algorithms(True)
    apart = farthest(trained("1"), trained("0"))
    torch.use_deterministic_algorithms(False)
    copies = {}
    for keep in ("1", "0"):
        with mock.patch.dict(os.environ, HAPI_KEEP_DATA=keep):
            more = profiled(40, 3)
            more.subtract(profiled(40, 2))
        copies[keep] = sum(count for name, count in more.items() if "-> Device" in name) / 40
    seen = f"weights {apart:.1e} apart; copies to the card a step {copies['1']:.2f}, from the host {copies['0']:.2f}"
    return expect(apart == 0, seen)


def nccl() -> str:
    """See the module's text."""
    data = images(256)

    def trained() -> nn.Module:
        network = convolution()
        model = hapi.Model(network).prepare(sgd, nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
        model.fit(data, epochs=2, batch_size=32, verbose=0, seed=0)
        values.append(model.evaluate(data, verbose=0))
        return network

    values: list[dict[str, float]] = []
    alone = trained()
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    grouped = trained()
    wrapped = hapi.distributed.DataParallel(convolution().to(DEVICE))
    loss = cross_entropy(wrapped(data[0].to(DEVICE)), data[1].to(DEVICE))
    loss.backward()
    ddp = nn.parallel.DistributedDataParallel(convolution().to(DEVICE))
    exchanged = cross_entropy(ddp(data[0].to(DEVICE)), data[1].to(DEVICE))
    exchanged.backward()
    total = torch.ones(4, device=DEVICE)
    torch.distributed.all_reduce(total)
    gradients = [(a.grad - b.grad).abs().max() for a, b in zip(wrapped.parameters(), ddp.parameters(), strict=True)]
    apart = (farthest(alone, grouped), float(torch.stack(gradients).max()))
    backend = torch.distributed.get_backend()
    torch.distributed.destroy_process_group()
    evaluations = max(abs(values[0][name] - values[1][name]) for name in values[0])
    seen = (
        f"{backend}: weights {apart[0]:.1e} apart, evaluations {evaluations:.1e}, gradients against DDP {apart[1]:.1e}"
    )
    return expect(max(*apart, evaluations) < 1e-5 and bool((total == 1).all()), seen)


class Cut(Exception):
    """What ends a run where a kill would."""


class CutAt(hapi.callbacks.Callback):
    """Ends the run after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_train_batch_end(self, step, logs=None):
        self.left -= 1
        if not self.left:
            raise Cut


def resume() -> str:
    """See the module's text."""
    torch.use_deterministic_algorithms(True)
    data = images(512)

    def run(folder: str, cut: int | None, resume: bool) -> nn.Module:
        network = convolution(dropout=0.5)
        model = hapi.Model(network)
        model.prepare(sgd, nn.CrossEntropyLoss(), amp_configs="bf16", scheduler=halving, scheduler_interval="step")
        saves = hapi.callbacks.ModelCheckpoint(every_n_steps=5)
        callbacks = [saves] if cut is None else [saves, CutAt(cut)]
        try:
            model.fit(
                data, epochs=3, batch_size=32, save_dir=folder, seed=0, callbacks=callbacks, resume=resume, verbose=0
            )
        except Cut:
            seen.append(f"cut after {cut} more steps")
        return network

    seen: list[str] = []
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        expected = run(whole, None, False)
        for cut in (23, 14):  # of 48: in the second epoch, and from step 20 on in the third
            run(parts, cut, True)
        names = sorted(path.stem for path in Path(parts).glob("*.pt") if ".opt" not in path.name)
        resumed = run(parts, None, True)
    same = all(
        torch.equal(a, b) for a, b in zip(expected.state_dict().values(), resumed.state_dict().values(), strict=True)
    )
    return expect(
        same and len(seen) == 2,
        f"{'; '.join(seen)}; checkpoints then: {', '.join(names)}; weights {farthest(expected, resumed):.1e} apart",
    )


CHECKS: dict[str, Callable[[], str]] = {
    "amp-bf16": amp_bf16,
    "amp-fp16": amp_fp16,
    "pinned": pinned,
    "beside": beside,
    "kept": kept,
    "nccl": nccl,
    "resume": resume,
}
ONLY_ON_CARDS = ("pinned", "beside", "kept")

if __name__ == "__main__":
    # Before the first product on a card: what makes those products repeatable.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for check in sys.argv[1:]:
        print(CHECKS[check]())
