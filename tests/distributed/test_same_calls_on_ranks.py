"""Ranks whose calls differ: told apart before the first step, on all ranks, with no debug mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from closed_form import Line, mean_output, prepared, ramp
from ranks import same

import hapi
from hapi.distributed import group


def by_rank(first: Any, other: Any) -> Any:
    return first if group.get_rank() == 0 else other


FIT: dict[str, Callable[[], dict[str, Any]]] = {
    "batch_size": lambda: {"batch_size": 4 + group.get_rank()},
    "global_batch_size": lambda: {"global_batch_size": by_rank(4, 8)},
    "epochs": lambda: {"epochs": by_rank(1, 2)},
    "accumulate_grad_batches": lambda: {"accumulate_grad_batches": by_rank(1, 2)},
    "num_iters": lambda: {"num_iters": by_rank(None, 2)},
    "drop_last": lambda: {"drop_last": by_rank(None, True)},
    "shuffle": lambda: {"shuffle": by_rank(True, False)},
    "eval_freq": lambda: {"eval_data": ramp(8), "eval_freq": by_rank(1, 2)},
    "save_freq": lambda: {"save_freq": by_rank(1, 2)},
    "nan_policy": lambda: {"nan_policy": by_rank("stop", "ignore")},
    "eval_data": lambda: {"eval_data": by_rank(ramp(8), None)},
    "save_dir": lambda: {"save_dir": by_rank("checkpoints", None)},
    "callbacks": lambda: {"callbacks": by_rank(hapi.callbacks.EarlyStopping("loss"), None)},
}
PREPARE: dict[str, Callable[[torch.nn.Module], dict[str, Any]]] = {
    "optimizer.param_groups": lambda net: {"optimizer": torch.optim.SGD(net.parameters(), lr=by_rank(0.1, 0.2))},
    "optimizer": lambda net: {"optimizer": by_rank(torch.optim.SGD, torch.optim.Adam)(net.parameters(), lr=0.1)},
    "clip_grad_norm": lambda net: {"clip_grad_norm": by_rank(None, 1.0)},
    "amp_configs": lambda net: {"amp_configs": by_rank(None, "bf16")},
    "metrics": lambda net: {"metrics": by_rank(hapi.metrics.MeanAbsoluteError(), [])},
    "loss": lambda net: {"loss": by_rank(torch.nn.MSELoss(), torch.nn.L1Loss())},
    "loss of another smoothing": lambda net: {"loss": torch.nn.CrossEntropyLoss(label_smoothing=by_rank(0.0, 0.1))},
    "scheduler": lambda net: {"scheduler": by_rank(None, lambda o: torch.optim.lr_scheduler.StepLR(o, 1))},
}


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def fit_unlike(name: str) -> str:
    model = prepared()
    return said_by(lambda: model.fit(ramp(8), verbose=0, **FIT[name]()))


def fit_prepared_unlike(name: str) -> str:
    network = Line()
    options = {"optimizer": torch.optim.SGD(network.parameters(), lr=0.1), "loss": mean_output}
    model = hapi.Model(network).prepare(**{**options, **PREPARE[name](network)})
    return said_by(lambda: model.fit(ramp(8), verbose=0))


def evaluate_unlike() -> list[str]:
    model = prepared()
    return [
        said_by(lambda: model.evaluate(ramp(8), batch_size=by_rank(2, 3), verbose=0)),
        said_by(lambda: model.evaluate(ramp(8), num_iters=by_rank(None, 3), verbose=0)),
        said_by(lambda: model.predict(ramp(8), stack_outputs=by_rank(True, False), verbose=0)),
        said_by(lambda: by_rank(model.evaluate, model.predict)(ramp(8), verbose=0)),
        said_by(lambda: by_rank(model.fit, model.predict)(ramp(8), verbose=0)),
    ]


@pytest.mark.parametrize("name", FIT)
def test_arguments_of_fit_that_differ_are_refused_on_all_ranks(ranks, name):
    text = same(ranks(2).run(fit_unlike, name))
    assert f"fit was called with {name}=" in text and "on rank 1" in text and "same value" in text


@pytest.mark.parametrize("name", PREPARE)
def test_what_was_prepared_otherwise_is_refused_on_all_ranks(ranks, name):
    text = same(ranks(2).run(fit_prepared_unlike, name))
    assert f"fit was called with {name.partition(' ')[0]}=" in text and "on rank 1" in text


def test_evaluate_and_predict_look_too_and_other_calls_are_told_apart(ranks):
    sizes, steps, stacks, *calls = same(ranks(3).run(evaluate_unlike))
    assert "evaluate was called with batch_size=2 on rank 0 and batch_size=3 on rank 1" in sizes
    assert "num_iters=None on rank 0 and num_iters=3 on rank 1" in steps
    assert "predict was called with stack_outputs=True on rank 0" in stacks
    assert "rank 0 has called evaluate, rank 1 has called predict" in calls[0]
    assert "rank 0 has called fit, rank 1 has called predict" in calls[1]
    assert all("on every rank" in text for text in calls)


class Counting(hapi.callbacks.EarlyStopping):
    """Has something of its own, which is not the same on all ranks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.counted = group.get_rank()


def fit_with_what_may_differ(folder: str) -> tuple[float, list[float]]:
    model = prepared()
    rank = group.get_rank()
    logger = by_rank([hapi.callbacks.CSVLogger(f"{folder}/log.csv")], [])
    history = model.fit(
        ramp(9), batch_size=2, verbose=2 * (rank == 1), log_freq=1 + rank, num_workers=rank, seed=rank,
        save_dir=f"{folder}/{rank}", callbacks=[*logger, Counting(monitor="loss", patience=9)],
    )  # fmt: skip
    return model.network.value, history.history["loss"]


def test_what_one_rank_may_do_by_itself_passes(ranks, tmp_path):
    same(ranks(2).run(fit_with_what_may_differ, str(tmp_path)))
    assert (tmp_path / "0" / "final.pt").exists() and not (tmp_path / "1").exists()
