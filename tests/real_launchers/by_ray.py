"""Starts a script by Ray's TorchTrainer:  python by_ray.py PROCESSES SCRIPT [ARGUMENT ...]

Ray keeps to the loopback interface, and its files to RAY_FOLDER. The script runs in the folder that this is started in.
"""

from __future__ import annotations

import os
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def run(config: dict[str, list[str] | str]) -> None:
    sys.path.insert(0, config["tools"])
    import scripted

    scripted.run(config["command"], config["folder"])


if __name__ == "__main__":
    processes, *command = sys.argv[1:]
    folder = os.environ["RAY_FOLDER"]
    ray.init(
        num_cpus=int(processes) + 1,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    config = {"command": command, "folder": os.getcwd(), "tools": os.path.dirname(os.path.abspath(__file__))}
    TorchTrainer(
        run,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=int(processes)),
        run_config=RunConfig(storage_path=os.path.join(folder, "results")),
    ).fit()
    ray.shutdown()
