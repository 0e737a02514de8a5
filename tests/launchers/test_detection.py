"""What `detect` makes of environments: recorded under real launchers, taken from their documentation, and broken ones.

`environments/*.json` hold, a file a launch, the launcher's variables of every process, as they were found in a real
run of the command that stands in the file. Hosts are renamed, variables that hold paths are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from hapi.distributed import launchers
from hapi.distributed.environment import Process, first_host, task_counts
from hapi.distributed.launchers import LaunchInfo, decide, detect, owner_mark, placed

LAUNCHES = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "environments").glob("*.json"))
}
RECORDS = [
    pytest.param(record, id=f"{name}-{number}")
    for name, launch in LAUNCHES.items()
    for number, record in enumerate(launch["processes"])
]
HERE = Process(pid=100, is_worker=False, has_terminal=False, initial={}, starter=99)
ENV = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
TORCHRUN = {**ENV, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-node-a7-1234@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = LAUNCHES["srun-2"]["processes"][1]["environ"]
LSF = {"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1", "LSB_JOBID": "77"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in
           (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))}  # fmt: skip
PADDLE = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.2:6171",
}
HOROVOD = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "40001",
}  # fmt: skip


def of_record(record: dict[str, Any]) -> Process:
    return Process(
        pid=record["pid"], is_worker=False, has_terminal=record["has_terminal"], initial={}, starter=record["parent"]
    )


# --- recorded ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS)
def test_a_recorded_environment(record: dict[str, Any]) -> None:
    launch, remark = decide(record["environ"], of_record(record))
    assert (None if launch is None else asdict(launch)) == record["expected"]
    assert (remark is not None) == (record["warns"] is not None)
    if remark is not None:
        assert remark.startswith(record["warns"])


def test_there_are_enough_records() -> None:
    assert len(LAUNCHES) >= 40
    assert len(RECORDS) >= 80


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_processes_of_a_launch_make_one_world(name: str) -> None:
    found = [decide(record["environ"], of_record(record))[0] for record in LAUNCHES[name]["processes"]]
    launches = [launch for launch in found if launch is not None]
    if not launches:
        assert len(found) == 1
        return
    assert sorted(launch.rank for launch in launches) == list(range(len(found)))
    assert {launch.world_size for launch in launches} == {len(found)}
    assert len({(launch.launcher, launch.address, launch.port) for launch in launches}) == 1
    assert len({(launch.node_rank, launch.local_rank) for launch in launches}) == len(found)
    for node in {launch.node_rank for launch in launches}:
        here = [launch for launch in launches if launch.node_rank == node]
        assert [launch.local_world_size for launch in here] == [len(here)] * len(here)


# --- documented, not run -----------------------------------------------------------------------------------------

DOCUMENTED = {
    "PyTorchJob": (
        {**ENV, "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "PYTHONUNBUFFERED": "0"},
        LaunchInfo("env", 1, 4, 0, 1, 1, "job-master-0", 23456),
    ),
    "PyTorchJob, master": (
        {**ENV, "RANK": "0", "MASTER_ADDR": "localhost"},
        LaunchInfo("env", 0, 4, 0, 4, 0, "localhost", 29500),
    ),
    "DeepSpeed": (
        {**ENV, "RANK": "3", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"},
        LaunchInfo("env", 3, 4, 1, 2, 1, "n1", 29500),
    ),
    "Azure": (
        {**ENV, "RANK": "3", "LOCAL_RANK": "1", "NODE_RANK": "1"},
        LaunchInfo("env", 3, 4, 1, 2, 1, "n1", 29500),
    ),
    "by hand on one host, without LOCAL_RANK": (
        {**ENV, "MASTER_ADDR": "127.0.0.1"},
        LaunchInfo("env", 1, 4, 1, 4, 0, "127.0.0.1", 29500),
    ),
    "hapirun": ({**TORCHRUN, "HAPI_LAUNCHED_BY": "hapirun"}, LaunchInfo("hapirun", 1, 4, 1, 2, 0, "n1", 29500)),
    "Open MPI 5, several hosts": (OPENMPI, LaunchInfo("openmpi", 3, 4, 1, 2, 1, "node-a7", 26946)),
    "hydra, several hosts": (HYDRA, LaunchInfo("hydra", 2, 4, 0, 2, 1, None, None)),
    "hydra, several hosts, address given": (
        {**HYDRA, "MASTER_ADDR": "n1", "MASTER_PORT": "1234"},
        LaunchInfo("hydra", 2, 4, 0, 2, 1, "n1", 1234),
    ),
    "LSF": (LSF, LaunchInfo("lsf", 5, 8, 1, 2, 0, None, 21828)),
    "MVAPICH": (MVAPICH, LaunchInfo("mvapich", 1, 2, 1, 2, 0, "127.0.0.1", 21174)),
    "Paddle, two hosts": (PADDLE, LaunchInfo("paddle", 1, 2, 0, 1, 1, "10.0.0.1", 6170)),
    "Horovod": (HOROVOD, LaunchInfo("horovod", 3, 4, 1, 2, 1, "10.0.0.1", 26803)),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_environment(name: str) -> None:
    environ, expected = DOCUMENTED[name]
    assert decide(environ, HERE) == (expected, None)


def test_slurms_short_forms() -> None:
    hosts = {
        "n1": "n1",
        "n[1-2]": "n1",
        "n[03-05,9],m1": "n03",
        "a-b,c": "a-b",
        "r[1-2]n[7,9]": "r1n7",
        "x[4].y": "x4.y",
    }
    assert {nodes: first_host(nodes) for nodes in hosts} == hosts
    assert task_counts("2(x3),1") == [2, 2, 2, 1]
    assert task_counts("") == []


# --- contradictions and halves -----------------------------------------------------------------------------------

BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "rank beyond the size": ({**ENV, "RANK": "4"}, "RANK=4 and WORLD_SIZE=4"),
    "rank beyond the size, torchrun": ({**TORCHRUN, "RANK": "9"}, "RANK=9 and WORLD_SIZE=4"),
    "rank beyond the size, Open MPI": ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4"),
    "negative rank": ({**ENV, "RANK": "-1"}, "RANK='-1'"),
    "rank not a number": ({**ENV, "RANK": "one"}, "RANK='one'"),
    "size not a number": ({**ENV, "WORLD_SIZE": "4.0"}, "WORLD_SIZE='4.0'"),
    "port not a number": ({**ENV, "MASTER_PORT": "auto"}, "MASTER_PORT='auto'"),
    "port out of range": ({**ENV, "MASTER_PORT": "65536"}, "port of 65536"),
    "local rank beyond the local size": ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank of 2 and a local size of 2"),
    "local size beyond the size": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "local size of 8"),
    "size of 0": ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    "Slurm's local id": ({**SLURM, "SLURM_LOCALID": "x"}, "SLURM_LOCALID='x'"),
    "Paddle's endpoint": ({**PADDLE, "PADDLE_TRAINER_ENDPOINTS": "host"}, "PADDLE_TRAINER_ENDPOINTS='host'"),
    "size alone": ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT are not"),
    "size not a number, alone": ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
    "no rank": ({k: v for k, v in ENV.items() if k != "RANK"}, "RANK is not"),
    "no address": ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR is not"),
    "empty address": ({**ENV, "MASTER_ADDR": ""}, "MASTER_ADDR is not"),
    "rank above 0 without size": ({"RANK": "1", "MASTER_ADDR": "n1"}, "RANK=1 is set, but WORLD_SIZE, MASTER_PORT are"),
    "half of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not"),
    "another PMI launcher": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALNRANKS is not"),
    "half of Paddle": ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINER_ENDPOINTS is not"),
    "half of LSF": ({"JSM_NAMESPACE_RANK": "1"}, "JSM_NAMESPACE_SIZE is not"),
    "half of Horovod": ({"HOROVOD_SIZE": "3"}, "HOROVOD_RANK is not"),
    "named launcher is not there": ({**ENV, "HAPI_LAUNCHER": "slurm"}, "slurm did not start this process"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_environment_is_an_error_that_says_what_to_do(name: str) -> None:
    environ, part = BROKEN[name]
    with pytest.raises(RuntimeError) as caught:
        decide(environ, HERE)
    message = str(caught.value)
    assert part in message
    assert "HAPI_LAUNCHER" in message  # the way out


@pytest.mark.parametrize("name", [name for name in BROKEN if name != "named launcher is not there"])
def test_every_broken_environment_is_switched_off(name: str) -> None:
    assert decide({**BROKEN[name][0], "HAPI_LAUNCHER": "off"}, HERE) == (None, None)


# --- left over ---------------------------------------------------------------------------------------------------

LEFT_OVER: dict[str, tuple[dict[str, str], str | None]] = {
    "nothing": ({}, None),
    "local rank": ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set"),
    "local rank above 0": ({"LOCAL_RANK": "3"}, "LOCAL_RANK is set"),
    "address": ({"MASTER_ADDR": "n1"}, "MASTER_ADDR is set"),
    "address and port": ({"MASTER_ADDR": "n1", "MASTER_PORT": "1"}, "MASTER_ADDR, MASTER_PORT are set"),
    "rank 0": ({"RANK": "0"}, "RANK is set"),
    "one process, said clearly": ({**ENV, "RANK": "0", "WORLD_SIZE": "1"}, None),
    "size 1 and a local rank": ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
    "Slurm allocation": ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_NTASKS=2"),
    "Slurm allocation of one task": ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
    "Kubeflow Trainer 2": ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n1"}, "PET_NNODES=2"),
    "LSF batch script": ({"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": "ranks", "LSB_DJOB_NUMPROC": "16"}, None),
    "SageMaker's description": ({"SM_HOSTS": '["a","b"]', "SM_CURRENT_HOST": "a", "SM_NUM_GPUS": "8"}, None),
    "a pod": ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAME": "x"}, None),
    "Paddle, one trainer": ({**PADDLE, "PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"}, None),
    "MPI of one": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
    "PMIx alone": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, None),
}


@pytest.mark.parametrize("name", LEFT_OVER)
def test_left_over_variables_mean_one_process(name: str) -> None:
    environ, begin = LEFT_OVER[name]
    launch, remark = decide(environ, HERE)
    assert launch is None
    if begin is None:
        assert remark is None
    else:
        assert remark is not None
        assert remark.startswith(begin)
        assert "\n" not in remark


def test_the_warning_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_warned", set())
    with pytest.warns(UserWarning, match="LOCAL_RANK is set") as caught:
        for _ in range(3):
            assert detect({"LOCAL_RANK": "0"}, HERE) is None
    assert len(caught) == 1


def test_a_worker_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert detect({"LOCAL_RANK": "0"}, Process(is_worker=True)) is None


# --- order, override ---------------------------------------------------------------------------------------------


def test_the_inner_launcher_wins() -> None:
    everything: dict[str, str] = {}
    names = []
    for environ in (HOROVOD, PADDLE, LSF, SLURM, MVAPICH, HYDRA, OPENMPI, ENV, TORCHRUN):
        everything = {**everything, **environ}
        launch, _ = decide(everything, HERE)
        assert launch is not None
        names.append(launch.launcher)
    assert names == ["horovod", "paddle", "lsf", "slurm", "mvapich", "hydra", "openmpi", "env", "torchrun"]
    for name in names:
        launch, _ = decide({**everything, "HAPI_LAUNCHER": name}, HERE)
        assert launch is not None
        assert launch.launcher == name


def test_a_named_launcher_is_believed_in_a_terminals_shell() -> None:
    record = LAUNCHES["srun-pty-bash-2"]["processes"][0]
    assert decide(record["environ"], of_record(record))[0] is None
    launch, _ = decide({**record["environ"], "HAPI_LAUNCHER": "slurm"}, of_record(record))
    assert launch is not None
    assert (launch.rank, launch.world_size) == (0, 2)


def test_an_unknown_launcher_is_an_error() -> None:
    with pytest.raises(ValueError, match="HAPI_LAUNCHER='lightning' is set.*Write one of torchrun, env, .*or off"):
        decide({"HAPI_LAUNCHER": "lightning"}, HERE)


# --- children of a rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A rank that has left its mark, and a child of it."""

    environ: dict[str, str]
    child: Process


@pytest.fixture(params=["torchrun", "env", "openmpi", "hydra", "slurm", "paddle"])
def family(request: pytest.FixtureRequest) -> Family:
    of_name = {"torchrun": TORCHRUN, "env": ENV, "openmpi": OPENMPI, "hydra": HYDRA, "slurm": SLURM, "paddle": PADDLE}
    environ = dict(of_name[request.param])
    return Family({**environ, "HAPI_OWNER": owner_mark(environ, HERE)}, Process(101, False, False, {}, 100))


def test_the_rank_itself_keeps_its_place(family: Family) -> None:
    launch, remark = decide(family.environ, HERE)
    assert launch is not None
    assert remark is None


def test_a_child_is_one_process(family: Family) -> None:
    launch, remark = decide(family.environ, family.child)
    assert launch is None
    assert remark is not None
    assert "inherited" in remark


def test_a_child_can_ask_for_its_parents_place(family: Family) -> None:
    launch = placed(family.environ)
    assert launch is not None
    assert launch.launcher == (decide(family.environ, HERE)[0] or launch).launcher


def test_a_pid_alone_marks_as_well() -> None:
    assert decide({**TORCHRUN, "HAPI_OWNER": "100"}, HERE)[0] is not None
    assert decide({**TORCHRUN, "HAPI_OWNER": "99"}, HERE)[0] is None


def test_ranks_that_a_rank_launches_are_ranks() -> None:
    inner = {**TORCHRUN, "MASTER_PORT": "41234", "HAPI_OWNER": owner_mark(TORCHRUN, HERE)}
    assert decide(inner, Process(102, False, False, {}, 101))[0] is not None
    step = {**SLURM, "SLURM_STEP_ID": "7", "HAPI_OWNER": owner_mark(SLURM, HERE)}
    assert decide(step, Process(102, False, False, {}, 101))[0] is not None


def test_a_multiprocessing_child_is_a_rank_only_by_its_own_variables() -> None:
    inherited = Process(101, True, False, initial=ENV)
    assert decide(ENV, inherited)[0] is None
    assert decide({**ENV, "RANK": "2"}, inherited)[0] is not None
    assert decide(ENV, Process(101, True, False, initial={}))[0] is not None
    marked = {**ENV, "HAPI_OWNER": owner_mark(ENV, inherited)}
    assert decide(marked, inherited)[0] is not None


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_in_real_children(method: str) -> None:
    code = (
        "import multiprocessing\n"
        "from children import set_and_detect\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
        "        print(set_and_detect({}), pool.apply(set_and_detect, ({'RANK': '2'},)))\n"
    )
    assert _run(code) == "(True, True) (False, True)"


def test_it_is_read_without_torch() -> None:
    assert _run("import sys, children; print(children.detect().rank, 'torch' in sys.modules)") == "1 False"


def _run(code: str) -> str:
    environ = {**os.environ, **ENV, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
