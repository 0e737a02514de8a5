"""Where the time of training steps goes: a trace and tables, by torch.profiler."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from hapi import kinds
from hapi.callbacks import tracking
from hapi.callbacks.base import Callback, Logs
from hapi.callbacks.terminal import note
from hapi.distributed import get_rank

_LAYER = "layer: "


class Profiler(Callback):
    """Profiles a few training steps of a fit, and does nothing before and after.

    The first ``wait`` steps pass untouched, ``warmup`` steps let the profiler's own start-up pass, and ``active`` steps
    are recorded; a window ends with its epoch at the latest where the run ends there. Then there are, in ``log_dir``,
    ``rank0.pt.trace.json``, which chrome://tracing, Perfetto and TensorBoard's profiler plugin open, and ``rank0.txt``
    with two tables: the time in each layer's forward, and in each operator.

    Args:
        log_dir: The folder; it is made when there is something to write. Files of an earlier window are replaced.
        wait: Steps before it starts, from the first step of this fit.
        warmup: Steps that are profiled, and not kept.
        active: Steps that are recorded.
        all_ranks: Every rank records its own steps, as ``rank{r}``. False: rank 0 alone.
        layers: Mark each layer's forward in the trace. Networks that are compiled as a whole show operators alone.
        record_shapes: Keep the operators' input shapes in the trace.
        profile_memory: Keep allocations in the trace.
        with_stack: Keep the lines of source in the trace; it slows the steps down.
        verbose: 1: a line that says where the files are. 0: none.

    Attributes:
        trace: The path of the trace that this rank has written; None: there is none.
        table: The tables as text.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: A count is too small; when a fit begins: ``log_dir`` cannot be written.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "profile",
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        *,
        all_ranks: bool = False,
        layers: bool = True,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        verbose: int = 1,
    ) -> None:
        kinds.check(Profiler, locals())
        for name, value, least in (("wait", wait, 0), ("warmup", warmup, 1), ("active", active, 1)):
            kinds.count(name, value, least or 1, least, owner="Profiler", what="steps")
        self.log_dir, self.wait, self.warmup, self.active = Path(log_dir), wait, warmup, active
        self.all_ranks, self.layers, self.verbose = all_ranks, layers, verbose
        self._end = wait + warmup + active
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack
        }  # fmt: skip
        self.trace: Path | None = None
        self.table: str | None = None
        self._profile: Any = None
        self._marks: list[Any] = []
        self._begun = 0
        self._over = True

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start counting steps anew."""
        self._stop(keep=False)
        self.trace = self.table = None
        self._begun = 0
        self._over = not (self.all_ranks or get_rank() == 0)
        if not self._over:
            tracking.check_place("Profiler", "log_dir", self.log_dir)

    def on_train_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Start, go on, or stop: a step ends where the next one begins."""
        if self._over:
            return
        if self._begun == self._end:
            self._stop(keep=True)
            return
        if self._profile is not None:
            self._profile.step()
        elif self._begun == self.wait:
            self._start()
        self._begun += 1

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """A full window holds training steps alone."""
        self._stop_if_full()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """See that a full window is written."""
        self._stop_if_full()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Write what a run that has ended before its window has."""
        if self._over:
            return
        begun, first = self._begun, self.wait + self.warmup
        self._stop(keep=begun > first)
        if begun <= first:
            text = f"Profiler: the fit ended after {begun} steps, before the first to record, step {first + 1}."
            note(self.verbose, self.params, f"{text} Write Profiler(wait=0, warmup=1), or train longer.")

    def on_exception(self, exc: BaseException) -> None:
        """Stop; nothing is written."""
        self._stop(keep=False)

    def _stop_if_full(self) -> None:
        if not self._over and self._begun == self._end:
            self._stop(keep=True)

    def _start(self) -> None:
        # Only for a run that comes to its window.
        from torch import profiler

        self._mark_layers()
        schedule = profiler.schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1)
        self._profile = profiler.profile(schedule=schedule, **self._options)
        self._profile.start()

    def _stop(self, keep: bool) -> None:
        """End the window, and write what is in it where that is wanted."""
        self._over = True
        for handle in self._marks:
            handle.remove()
        self._marks = []
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        if keep:
            self._write(profile)

    def _write(self, profile: Any) -> None:
        rank = get_rank()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.trace = self.log_dir / f"rank{rank}.pt.trace.json"
        profile.export_chrome_trace(str(self.trace))
        averages = profile.key_averages()
        device = any(entry.self_device_time_total > 0 for entry in averages)
        order = "self_device_time_total" if device else "self_cpu_time_total"
        operators = averages.table(sort_by=order, row_limit=50)
        self.table = f"{_layer_table(averages)}\n\nTime in operators\n{operators}"
        (self.log_dir / f"rank{rank}.txt").write_text(self.table, encoding="utf-8")
        note(self.verbose, self.params, f"Profiler: wrote {self.trace} and rank{rank}.txt")

    def _mark_layers(self) -> None:
        network = self.model.network
        if not self.layers or network._compiled_call_impl is not None:
            return
        for name, module in network.named_modules():
            mark = _Mark(f"{name or 'the network'} ({type(module).__name__})")
            self._marks.append(module.register_forward_pre_hook(mark.enter))
            self._marks.append(module.register_forward_hook(mark.leave, always_call=True))


class _Mark:
    """A layer's forward passes as ranges of the trace."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[ExitStack] = []

    def enter(self, module: nn.Module, _: Any) -> None:
        from torch import profiler

        mark = ExitStack()
        mark.enter_context(profiler.record_function(_LAYER + self._name))
        self._open.append(mark)

    def leave(self, module: nn.Module, _: Any, outputs: Any) -> None:
        if self._open:
            self._open.pop().close()


def _layer_table(averages: Any) -> str:
    """The layers by the time in their forward passes, the layers within included."""
    entries = {entry.key.removeprefix(_LAYER): entry for entry in averages if entry.key.startswith(_LAYER)}
    if not entries:
        return "No layers were marked."
    found = sorted(entries.items(), key=lambda item: -max(item[1].device_time_total, item[1].cpu_time_total))
    rows = [("layer (type)", "calls", "CPU ms", "device ms"), *(_row(name, entry) for name, entry in found)]
    width = max(len(name) for name, *_ in rows)
    lines = [f"{name:<{width}}  {calls:>6}  {cpu:>10}  {device:>10}" for name, calls, cpu, device in rows]
    return "\n".join(["Time in the layers' forward, layers within included", *lines])


def _row(name: str, entry: Any) -> tuple[str, str, str, str]:
    """A layer's cells; times are over all calls, in milliseconds."""
    cpu, device = entry.cpu_time_total / 1000, entry.device_time_total / 1000
    return name, str(entry.count), f"{cpu:.3f}", f"{device:.3f}"
