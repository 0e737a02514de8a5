"""What TensorBoard shows of a run beside its curves. Imported when a callback is to write some of it."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hapi.callbacks.terminal import say


def add_graph(writer: Any, model: Any) -> None:
    """Write the graph of the network, as a trace of a copy finds it; a line says so where there is none to be had.

    Args:
        writer: A `SummaryWriter`.
        model: The `hapi.Model`, which has seen a batch.
    """
    inputs = model._engine.example()
    device = torch.device("cpu")
    try:
        if inputs is None:
            raise RuntimeError("this process has seen no batch yet")
        with torch.no_grad(), warnings.catch_warnings():
            # torch.jit.trace, which SummaryWriter calls, is deprecated, and tells of what a trace cannot see.
            warnings.simplefilter("ignore")
            network = copy.deepcopy(model.network).to(device).eval()
            # It prints what goes wrong, and raises it as well.
            with contextlib.redirect_stdout(io.StringIO()):
                writer.add_graph(network, inputs if isinstance(inputs, tuple) else (inputs,), use_strict_trace=False)
    except Exception as error:
        # A picture is no reason to end a training.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        say(
            f"TensorBoard: the graph of {type(model.network).__name__} is left out, since it cannot be traced: {reason}"
        )


def begin_hparams(writer: Any, settings: Mapping[str, Any], tags: Sequence[str]) -> None:
    """Write hyper-parameters, and which curves the table of runs has a column for.

    `SummaryWriter.add_hparams` would make a folder of its own for them, as if it were another run.
    """
    summary = importlib.import_module("torch.utils.tensorboard.summary")
    experiment, start, _ = summary.hparams(dict(settings), dict.fromkeys(tags, 0.0))
    writer.file_writer.add_summary(experiment)
    writer.file_writer.add_summary(start)


def end_hparams(writer: Any) -> None:
    """Write that the run has come to its end."""
    summary = importlib.import_module("torch.utils.tensorboard.summary")
    *_, end = summary.hparams({}, {})
    writer.file_writer.add_summary(end)
