"""A Slurm of one machine, from Debian's packages, in a folder of its own and on loopback: for tests alone."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
NODES = ("node0", "node1")
"""Both are this machine, each with a daemon of its own."""
CPUS = 8
"""More than there may be: Slurm believes what it is told, and tests compute little."""

CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A job that was requeued may begin again once its credential has run out; by default after two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=5,sched_interval=5
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=20
SlurmdParameters=config_overrides
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=tests Nodes=node0,node1 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no Slurm here, and what to do; None: there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"no {', '.join(absent)} on this machine: make slurm installs Debian's packages, as root" if absent else None


@dataclass(frozen=True)
class Slurm:
    """A running one."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What its commands, and the jobs that they submit, are to see."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH, "OMP_NUM_THREADS": "1"}

    def __call__(self, *command: str, cwd: Path | None = None) -> str:
        """What one of its commands prints."""
        done = subprocess.run(command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Hand a script in, in the folder that it lies in; returns the job's number."""
        return self("sbatch", "--parsable", *options, script.name, cwd=script.parent).strip()

    def facts(self, job: str) -> dict[str, str]:
        """All that Slurm knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", "-o", job)))

    def state(self, job: str) -> str:
        """As COMPLETED."""
        return self.facts(job)["JobState"]

    def ended(self, job: str) -> bool:
        """Whether a job is over, and nothing of it runs any more."""
        return self.state(job) not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")

    def limit(self, job: str, *, minutes: int) -> None:
        """Let a job have so much of its walltime left; Slurm looks every half a minute."""
        days, clock = ("0-" + self.facts(job)["RunTime"]).split("-")[-2:]
        hours, gone, _ = map(int, clock.split(":"))
        self("scontrol", "update", f"JobId={job}", f"TimeLimit={max(1, 1440 * int(days) + 60 * hours + gone + minutes)}")

    def log(self) -> str:
        """The last lines of its daemons."""
        tails = [(self.folder / f"{name}.log").read_text(errors="replace")[-1500:] for name in ("slurmctld", *NODES)]
        return "\n".join(tails)


def eventually(what: Callable[[], bool], within: float, told: Callable[[], str] = lambda: "") -> None:
    """Wait until it is so; ``told`` says what there is to say where it never is."""
    until = time.monotonic() + within
    while not what():
        assert time.monotonic() < until, f"not within {within:.0f} s: {told()}"
        time.sleep(0.2)


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """Start one, stop it and all its jobs."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path may not be long
    slurm = Slurm(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _write(folder)
        munge = [f"--{name}={folder}/munge{end}" for name, end in FILES_OF_MUNGE]
        daemons.append(_start(slurm, "munged", "--foreground", "--force", *munge))
        eventually((folder / "munge.socket").exists, 20, (folder / "munged.out").read_text)
        daemons.append(_start(slurm, "slurmctld", "-D", "-f", f"{folder}/slurm.conf"))
        for node in NODES:
            daemons.append(_start(slurm, "slurmd", "-D", "-N", node, "-f", f"{folder}/slurm.conf"))
        eventually(lambda: _is_idle(slurm), 60, slurm.log)
        yield slurm
        slurm("scancel", "--user", getpass.getuser())
        eventually(lambda: not slurm("squeue", "-h").strip(), 60, slurm.log)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


FILES_OF_MUNGE = (
    ("key-file", ".key"),
    ("socket", ".socket"),
    ("pid-file", ".pid"),
    ("log-file", ".log"),
    ("seed-file", ".seed"),
)


def _write(folder: Path) -> None:
    for name in ("state", *NODES):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    settings = {
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "folder": folder,
        "ports": _free_ports(3),
        "cpus": CPUS,
    }
    (folder / "slurm.conf").write_text(CONF.format(**settings))
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={_cgroups()}\n")


def _cgroups() -> str:
    """The plugin that does without them: none has a name of its own from 23.02 on, before that v1 was one unless used."""
    said = subprocess.run(["slurmd", "-V"], env={**os.environ, "PATH": PATH}, capture_output=True, text=True, check=True).stdout
    year = re.search(r"(\d+)\.\d+", said)
    return "disabled" if year is not None and int(year[1]) >= 23 else "cgroup/v1"


def _start(slurm: Slurm, *command: str) -> subprocess.Popen[bytes]:
    with (slurm.folder / f"{command[0]}.out").open("ab") as output:
        return subprocess.Popen(command, env=slurm.environment, stdout=output, stderr=output, start_new_session=True)


def _is_idle(slurm: Slurm) -> bool:
    asked = subprocess.run(["sinfo", "-h", "-o", "%T"], env=slurm.environment, capture_output=True, text=True, timeout=60)
    return asked.stdout.strip() == "idle"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
