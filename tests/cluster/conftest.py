"""A Slurm of two nodes on this machine: munge, the controller and two slurmd, in a temporary folder and on loopback."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
INSTALL = "apt-get install slurmctld slurmd slurm-client munge"

CONFIGURATION = """
ClusterName=moh-llm-tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=100000
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=100000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Clusters are started only where the tests of this folder are asked for by their marker."""
    if "cluster" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("cluster"):
                item.add_marker(pytest.mark.skip(reason="make test-cluster runs it"))


class Slurm:
    """The cluster, running.

    The first node has this machine's own name, since processes find each other by it; the second one's sorts behind.
    """

    def __init__(self, folder: Path):
        self.folder, self._daemons = folder, []
        self.nodes = (socket.gethostname().split(".")[0], "zz-second")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self) -> None:
        """Write the configuration, start the daemons, and wait until both nodes take jobs."""
        (self.folder / "state").mkdir()
        words = {"folder": self.folder, "nodes": self.nodes, "ports": free_ports(3), "user": getpass.getuser()}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**words))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
        self._daemon("munged", "--foreground", "--force", *munge)
        self._until(lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-i")
        for node in self.nodes:
            (self.folder / f"spool-{node}").mkdir()
            self._daemon("slurmd", "-D", "-N", node)
        self._until(lambda: self.ask("sinfo", "--noheader", "--format=%T %D", check=False) == "idle 2")

    def stop(self) -> None:
        """Cancel all jobs, wait for their ends, and end the daemons."""
        with contextlib.suppress(Exception):
            self.ask("scancel", f"--user={getpass.getuser()}")
            self._until(lambda: not self.ask("squeue", "--noheader"), 60)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def ask(self, *words: object, folder: Path = ROOT, check: bool = True, **variables: str) -> str:
        """What one of Slurm's commands prints."""
        command = [str(word) for word in words]
        environment = self.environment | variables
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by its words: JobState, Restarts, RunTime."""
        said = self.ask("scontrol", "show", "job", job)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def processes(self, job: str, node: str | None = None) -> list[Path]:
        """Folders in /proc of the processes of a job's first step, on a node or on both."""
        wanted = {f"SLURM_JOB_ID={job}", "SLURM_STEP_ID=0"} | ({f"SLURMD_NODENAME={node}"} if node else set())
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted <= set((process / "environ").read_text(errors="replace").split("\0")):
                    found.append(process)
        return found

    def kill_step(self, job: str, node: str) -> int:
        """SIGKILL to all of a job's first step on a node, as if the node had died; returns the number of processes."""
        killed = set()
        for process in self.processes(job, node):
            with contextlib.suppress(OSError):
                parent = Path("/proc", (process / "stat").read_text().rpartition(")")[2].split()[1])
                killed |= {process} | ({parent} if (parent / "comm").read_text().startswith("slurmstepd") else set())
        for process in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        return len(killed)

    @contextlib.contextmanager
    def held(self, job: str) -> Iterator[Callable[[], bool]]:
        """Within the block training stands still; what it gives says whether a signal waits for all its processes."""
        training = [p for p in self.processes(job) if "moh_llm.cli\0train" in (p / "cmdline").read_text()]
        training = [p for p in training if "commands.launch" not in (p / "cmdline").read_text()]
        for process in training:
            os.kill(int(process.name), signal.SIGSTOP)

        def signalled() -> bool:
            for process in training:
                status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
                if not int(status["ShdPnd"], 16) >> (signal.SIGTERM - 1) & 1:
                    return False
            return len(training) > 0

        try:
            yield signalled
        finally:
            for process in training:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGCONT)

    def _daemon(self, *command: str) -> None:
        name = f"{command[0]}-{command[-1]}.out" if command[0] == "slurmd" else f"{command[0]}.out"
        with (self.folder / name).open("wb") as out:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=out, stderr=out))

    def _until(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            said = [path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.out"))]
            assert time.monotonic() < deadline, "\n".join(said)
            time.sleep(0.2)


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster of two nodes."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    if missing := [name for name in NEEDED if shutil.which(name, path=path) is None]:
        pytest.skip(f"no {', '.join(missing)} here: {INSTALL}")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
