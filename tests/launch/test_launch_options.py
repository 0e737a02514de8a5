"""The command line of hapirun, without starting anything."""

from __future__ import annotations

import pytest

from hapi.distributed.launch import main
from hapi.distributed.launch.devices import place, threads_for
from hapi.distributed.launch.options import Options, UsageError, parse


@pytest.fixture(autouse=True)
def _script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_what_follows_the_script_is_the_scripts():
    options = parse(["--gpus", "0,1", "train.py", "--gpus", "7", "-h", "--", "-m"])
    assert options is not None
    assert (options.devices, options.arguments) == (("0", "1"), ("--gpus", "7", "-h", "--", "-m"))
    options = parse(["--nproc-per-node=2", "-m", "package.train", "--log_dir", "x"])
    assert options is not None
    assert (options.script, options.is_module, options.processes) == ("package.train", True, 2)
    assert (options.arguments, options.log_dir) == (("--log_dir", "x"), "log")


def test_every_option_has_its_place():
    line = (
        "--devices=cpu --nproc_per_node 3 --nnodes 2:4 --master h0:1234 --timeout 9 --max-restart 2 --grace 1.5 "
        "--log_dir l --job_id j train.py"
    )
    assert parse(line.split()) == Options(
        "train.py", False, (), devices=(), processes=3, min_nodes=2, max_nodes=4, master=("h0", 1234), timeout=9.0,
        max_restart=2, grace=1.5, log_dir="l", job_id="j",
    )  # fmt: skip
    options = parse(["--ips", "10.0.0.2,10.0.0.10", "--rank", "1", "train.py"])
    assert options is not None
    assert (options.ips, options.node_rank) == (("10.0.0.2", "10.0.0.10"), 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--log_dirr x train.py", "Did you mean --log_dir?"),
        ("--logdir x train.py", "Did you mean --log_dir?"),
        ("--gpu 0 train.py", "Did you mean --gpus?"),
        ("--nproc 2 train.py", "Did you mean --nproc_per_node?"),
        ("--nprocs 2 train.py", "Did you mean --nproc_per_node?"),
        ("--max-restarts 2 train.py", "Did you mean --max_restart?"),
        ("--master-addr h train.py", "Did you mean --master?"),
        ("--typo 3 train.py", "hapirun --help"),
        ("--nproc_per_node 0 train.py", "'0'"),
        ("--nproc_per_node two train.py", "'two'"),
        ("--nproc_per_node", "no value"),
        ("--gpus 0,0 train.py", "different cards"),
        ("--ips a,,b train.py", "empty entry"),
        ("--gpus a train.py", "0,1"),
        ("--grace soon train.py", "'soon'"),
        ("--grace -1 train.py", "seconds"),
        ("--nnodes 3:2 --master h train.py", "2:3"),
        ("--nnodes 2 train.py", "--master HOST:PORT"),
        ("--nnodes 2 --master h:99999 train.py", "65535"),
        ("--nnodes 2 --node_rank 2 --master h train.py", "0 to 1"),
        ("--nnodes 1:2 --node_rank 0 --master h train.py", "Leave one out"),
        ("--ips a,b --nnodes 2 train.py", "one of the two"),
        ("--ips a,a train.py", "twice"),
        ("--ips a,b --max_restart 1 train.py", "--nnodes 2 --master"),
        ("missing.py", "does not exist"),
        ("-m", "names no module"),
        ("", "No script"),
    ],
)
def test_a_command_line_that_cannot_be_followed(line, words, capsys):
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "--max_restart" in capsys.readouterr().out


def place_for(line, count):
    options = parse([*line.split(), "train.py"])
    assert options is not None
    return place(options.devices, options.processes, count=count)


@pytest.mark.parametrize(
    ("line", "count", "processes", "visible"),
    [
        ("", 4, 4, None),
        ("", 0, 1, None),
        ("--nproc_per_node 3", 0, 3, None),
        ("--gpus 0,1", 0, 2, None),
        ("--gpus 2,0", 4, 2, "2,0"),
        ("--gpus 0,1 --nproc_per_node 1", 4, 1, "0,1"),
        ("--gpus cpu --nproc_per_node 3", 4, 3, ""),
    ],
)
def test_cards(line, count, processes, visible):
    placement = place_for(line, count)
    assert placement.processes == processes
    assert placement.environment.get("CUDA_VISIBLE_DEVICES") == visible


def test_cards_among_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5")
    assert place_for("--gpus 1", 2).environment == {"CUDA_VISIBLE_DEVICES": "GPU-5"}
    with pytest.raises(UsageError, match=r"card 2 is not there.* 2 card.*within CUDA_VISIBLE_DEVICES=4,GPU-5.*up to 1"):
        place_for("--gpus 0,2", 2)


@pytest.mark.parametrize("line", ["--nproc_per_node 3", "--nproc_per_node 3 --gpus 0,1"])
def test_processes_without_a_card_of_their_own(line):
    with pytest.raises(UsageError, match=r"does not go with 2 card.*--gpus cpu"):
        place_for(line, 2)


def test_threads():
    assert threads_for(10**6) == 1
    assert threads_for(1) >= threads_for(2) >= 1
