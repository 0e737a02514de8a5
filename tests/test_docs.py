"""The documentation: its pages' code runs as it stands, its files start what they say, and its lists are up to date."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import docs_pages
import pytest
from docs_pages import DOCS, ROOT, blocks

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
LAUNCH = DOCS / "launch"
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    """One thread, no launcher's variables, and this checkout."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    return {**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


# Few processes, each of which imports torch once; what takes longest is spread.
@pytest.mark.slow
@pytest.mark.parametrize("pages", [PAGES[0::2], PAGES[1::2]], ids=["even", "odd"])
def test_the_pages_run_as_they_stand(pages: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", docs_pages.__file__, str(tmp_path / "pages"), *pages]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"passed (\S+)", done.stdout) == pages
    assert "Warning" not in done.stderr, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_known(page: str) -> None:
    found = blocks(DOCS / page)
    shells = "\n".join(block.code for block in found if block.language == "sh")
    for block in found:
        place = f"docs/{page}:{block.line}"
        assert block.language in ("python", "py", "sh", "text", "bash", "yaml", "dockerfile"), place
        if block.language in ("python", "py"):
            compile(block.code, place, "exec")
        if block.language == "python" and block.title:
            assert block.title in shells, f"{place}: no command starts {block.title}"
        if block.language in ("bash", "yaml", "dockerfile"):
            (name,) = re.findall(r'^--8<-- "(.+)"$', block.code, re.M)
            assert (DOCS / name).is_file(), place


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert set(re.findall(r": (\S+\.md)$", navigation, re.M)) == pages


def test_all_that_is_public_is_in_the_reference() -> None:
    import hapi

    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md")))
    shown = set(re.findall(r"^::: (\S+)$", text, re.M)) | {
        name.strip() for names in re.findall(r"members: \[(.*)\]", text) for name in names.split(",")
    }
    public = {f"hapi.{name}" if isinstance(getattr(hapi, name), ModuleType) else name for name in hapi.__all__}
    assert public - {"__version__"} <= shown


def test_every_example_of_data_is_in_the_guide() -> None:
    text = (DOCS / "own-data.md").read_text(encoding="utf-8")
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples" / "data").glob("*.py")}
    assert files == set(re.findall(r"`(examples/data/\w+\.py)`", text))


def test_every_launcher_is_in_the_guide() -> None:
    from hapi.distributed.launchers import _ROWS

    words = {"env": "MASTER_PORT", "openmpi": "Open MPI", "hydra": "MPICH", "lsf": "jsrun"}
    text = (DOCS / "scaling-out.md").read_text(encoding="utf-8").lower()
    for row in _ROWS:
        assert words.get(row.name, row.name).lower() in text, row.name


# The files for clusters.


def manifests(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A container's working folder: the guide's script, and the commands of an installation."""
    (script,) = (block for block in blocks(DOCS / "scaling-out.md") if block.title == "train.py")
    (tmp_path / "train.py").write_text(script.code, encoding="utf-8")
    docs_pages.shims(tmp_path / "bin")
    return tmp_path


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def own_address() -> str:
    """This host's address as others see it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            pytest.skip(f"this machine has no address but loopback: {error}")
        return str(probe.getsockname()[0])


def run_both(folder: Path, commands: list[list[str]], variables: list[dict[str, str]]) -> list[str]:
    """Start a container's command for each of two pods; what they print."""
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    running = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(PATH=path, **own),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, own in zip(commands, variables, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], outputs
    return outputs


def accuracies(outputs: list[str]) -> list[str]:
    return re.findall(r"'acc': (\d\.\d+)", "".join(outputs))


@pytest.mark.slow
def test_the_pytorchjob_runs(folder: Path) -> None:
    (job,) = manifests("pytorchjob.yaml")
    assert job["kind"] == "PyTorchJob"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    specs = [replicas[role]["template"]["spec"] for role in ("Master", "Worker")]
    for spec in specs:
        (container,) = spec["containers"]
        assert container["name"] == "pytorch"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    size = sum(replica["replicas"] for replica in replicas.values())
    # What the operator sets.
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "PYTHONUNBUFFERED": "0"}
    commands = [spec["containers"][0]["command"] for spec in specs]
    outputs = run_both(folder, commands, [{**meeting, "RANK": str(rank)} for rank in range(size)])
    assert "hapi: 2 processes (env, " in outputs[0]
    first, second = accuracies(outputs)
    assert first == second


@pytest.mark.slow
def test_the_indexed_job_runs(folder: Path) -> None:
    service, job = manifests("job.yaml")
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    template = job["spec"]["template"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert given["MASTER"].startswith(f"{job['metadata']['name']}-0.{service['metadata']['name']}:")
    given |= {"MASTER": f"{own_address()}:{free_port()}"}
    command = [*container["command"], *container["args"]]
    for index in (0, 1):
        (folder / str(index)).mkdir()
    # Each pod has a disk of its own but for the checkpoints; here they share it, so that logs need names of their own.
    commands = [[part.replace("hapirun ", f"hapirun --log_dir {index}/log ") for part in command] for index in (0, 1)]
    outputs = run_both(folder, commands, [{**given, "JOB_COMPLETION_INDEX": str(index)} for index in (0, 1)])
    logs = [(folder / str(index) / "log" / f"workerlog.{index}").read_text(encoding="utf-8") for index in (0, 1)]
    assert "hapi: 2 processes (hapirun, " in logs[0], outputs
    first, second = accuracies(logs)
    assert first == second


# What is made by scripts.


def test_the_catalogue_of_errors_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_errors_page.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def code_of(path: Path) -> list[str]:
    """The fenced blocks of a file, as they stand."""
    return re.findall(r"^```\w*\n.*?^```$", path.read_text(encoding="utf-8"), re.M | re.S)


def test_the_chinese_readme_has_the_same_code() -> None:
    chinese = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    english = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(README.zh-CN.md)" in english and "(README.md)" in chinese
    assert code_of(ROOT / "README.zh-CN.md") == code_of(ROOT / "README.md")


# The notebook.


@pytest.fixture
def notebook() -> Iterator[dict[str, Any]]:
    yield json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))


def test_the_notebook_holds_no_outputs(notebook: dict[str, Any]) -> None:
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    read = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    os.environ.update(environment())
    nbclient.NotebookClient(
        read, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    printed = "".join(output.get("text", "") for cell in read.cells for output in cell.get("outputs", ()))
    assert re.search(r"accuracy 0\.[89]", printed), printed
    assert "2 processes: accuracy 0." in printed
