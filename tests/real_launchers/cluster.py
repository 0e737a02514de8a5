"""A Slurm cluster of this machine alone: munged, slurmctld and one slurmd for each node, all on loopback.

Debian's slurmd can play any number of nodes. The daemons stay children of this process, in the foreground; everything
they write lies in a folder of their own, except for the nodes' names, which are in /etc/hosts as long as the cluster
is there: a rank finds another host by its name.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import install

HOSTS = Path("/etc/hosts")
PATIENCE = 30.0

CONFIGURATION = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SchedulerParameters=sched_min_interval=0,defer_batch
"""
# cred_expire: as long a job that is put back waits, 120 seconds by default.
# linuxproc and task/none: a container has no cgroups to give. config_overrides: a node has the CPUs that are written.


class NotPermittedError(RuntimeError):
    """This machine does not let a cluster be made."""


class Cluster:
    """`with Cluster() as cluster:`, then srun with `cluster.environment`.

    Raises:
        NotPermittedError: On entering it, where the machine does not permit such daemons.
        RuntimeError: On entering it, where they do not come up for another reason.
    """

    def __init__(self, nodes: int = 2, cpus: int = 2) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hapi-slurm-"))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        # Names that no other cluster of this machine has.
        prefix = f"c{os.getpid()}x{secrets.randbelow(1000)}n"
        self.names = [f"{prefix}{number}" for number in range(1, nodes + 1)]
        self._cpus = cpus
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        if os.geteuid() != 0:
            raise NotPermittedError("Slurm's daemons need root")
        try:
            _edit_hosts(add=self.names)
        except OSError as error:
            raise NotPermittedError(f"the nodes' names cannot be written into {HOSTS}: {error}") from error
        try:
            self._start()
            self._await_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 2:
            self.call("scancel", "-u", "root", "--signal=KILL")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        _edit_hosts(remove=self.names)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *command: str) -> str:
        """What one of Slurm's commands prints; nothing where it fails."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        return done.stdout if done.returncode == 0 else ""

    def _start(self) -> None:
        port, *ports = _free_ports(1 + len(self.names))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} CPUs={self._cpus} State=UNKNOWN"
            for name, own in zip(self.names, ports, strict=True)
        ]
        partition = "PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP"
        text = CONFIGURATION.format(host=host, port=port, folder=self.folder)
        (self.folder / "slurm.conf").write_text("\n".join([text.strip(), *nodes, partition, ""]))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(256))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        for name in self.names:
            (self.folder / f"spool.{name}").mkdir()
        files = [f"--{kind}-file={self.folder / name}" for kind, name in (("pid", "munge.pid"), ("seed", "munge.seed"))]
        socket_path = self.folder / "munge.socket"
        self._run("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}", *files)
        self._await(socket_path.exists, "munged's socket")
        self._run("slurmctld", "-D", "-c")
        for name in self.names:
            self._run("slurmd", "-D", "-N", name)

    def _run(self, name: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            command = [install.find(name) or name, *arguments]
            environment = {**os.environ, **self.environment}
            self._daemons.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )

    def _await_idle(self) -> None:
        def all_idle() -> bool:
            return self.call("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(self.names)

        self._await(all_idle, "idle nodes")

    def _await(self, condition, what: str) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if condition():
                return
            if any(daemon.poll() is not None for daemon in self._daemons):
                break
            time.sleep(0.1)
        said = self._said()
        if re.search("(?i)operation not permitted|permission denied|function not implemented", said):
            raise NotPermittedError(f"Slurm's daemons are not allowed what they need here:\n{said}")
        raise RuntimeError(f"Slurm has not come up ({what}):\n{said}")

    def _said(self) -> str:
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(line for file in files for line in file.read_text(errors="replace").splitlines()[-5:])


def _edit_hosts(add: list[str] = (), remove: list[str] = ()) -> None:
    # In place, as the file is often a mount of its own; locked, as other tests may be at it.
    with open(HOSTS, "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        lines = [line for line in file.read().splitlines() if line.split()[1:2] not in [[name] for name in remove]]
        lines += [f"127.0.0.1 {name}" for name in add]
        file.seek(0)
        file.write("".join(f"{line}\n" for line in lines))
        file.truncate()


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
