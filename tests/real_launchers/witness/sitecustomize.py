"""Loaded by each Python that a test starts: after `Model.evaluate` it writes down what this process holds.

So the script under test needs no change. One file a process, in the folder that WITNESS_FOLDER names.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys


class _WhenImported:
    """Finds hapi.model like everyone else, and adds to it what `_watched` does."""

    def find_spec(self, name, path=None, target=None):
        if name != "hapi.model":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_watch(module):
            execute(module)
            module.Model.evaluate = _watched(module.Model.evaluate)

        spec.loader.exec_module = execute_and_watch
        return spec


def _watched(evaluate):
    @functools.wraps(evaluate)
    def evaluate_and_tell(model, *arguments, **options):
        results = evaluate(model, *arguments, **options)
        _tell(model, results)
        return results

    return evaluate_and_tell


def _tell(model, results):
    from weights_digest import digest

    from hapi.distributed import ParallelEnv

    place = ParallelEnv()
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "launcher", "backend")
    seen = {name: getattr(place, name) for name in names}
    path = os.path.join(os.environ["WITNESS_FOLDER"], f"{os.getpid()}.json")
    with open(path, "w") as file:
        json.dump({**seen, "weights": digest(model.network.state_dict()), "results": results}, file)


if os.environ.get("WITNESS_FOLDER"):
    sys.meta_path.insert(0, _WhenImported())
