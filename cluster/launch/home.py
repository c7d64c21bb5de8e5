"""A cluster's folder on the machine that launches it: who launched it, where it answers, its logs and durable data."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.launch.processes import end_processes, processes_in, start_ticks

HOME_VARIABLE = "HEADRACE_HOME"
"""Environment variable: the folder that holds a folder per cluster; ~/.headrace where it is not set."""


class AlreadyRunning(Exception):
    """The cluster of this name has a launcher that is alive."""

    def __init__(self, cluster: str, pid: int | None) -> None:
        self.cluster = cluster
        self.pid = pid
        process = f" (process {pid})" if pid is not None else ""
        super().__init__(
            f"cluster {cluster} runs already{process}: `headrace status` shows it, `headrace down` stops it"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """The process that started a cluster and stops it."""

    pid: int
    start_ticks: int
    """With the pid it names one process for ever."""
    run_folder: str
    """Where this run keeps what ends with it; its processes run in `cwd` below it."""

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Where a cluster that is ready can be reached; all are host:port except where said."""

    cluster: str
    http: str
    """The first gateway's."""
    grpc: str
    control: str
    ray: str
    """Of the Ray that runs the processes."""
    catalog: str
    """A URL without its password."""
    models: list[str]
    launcher_pid: int
    started_unix_s: float


def headrace_home() -> Path:
    """The folder with a folder per cluster."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.headrace").expanduser().absolute()


class ClusterHome:
    """`<home>/<cluster>/`.

        launcher.lock     held by the launcher as long as it lives
        launcher.json     which process that is, and its run folder
        addresses.json    there while the cluster is ready
        processes.json    the process id of each node, as the launcher last saw it
        ray_auth_token    what processes of the cluster's own Ray show one another
        logs/             one file per process, kept until the next start
        launcher.log      what a detached launcher says
        catalog/          data of the embedded catalog, kept from run to run

    A run's sockets and Ray's session lie in a short folder below the system's temporary one (`run_folder`), since the
    path of a socket has at most 107 bytes.
    """

    def __init__(self, cluster: str, home: Path | None = None) -> None:
        self.cluster = cluster
        self.folder = (home or headrace_home()) / cluster
        self.logs = self.folder / "logs"
        self.catalog = self.folder / "catalog"
        self.launcher_log = self.folder / "launcher.log"
        self._launcher = self.folder / "launcher.json"
        self._addresses = self.folder / "addresses.json"
        self._processes = self.folder / "processes.json"

    def launcher(self) -> Launcher | None:
        """The launcher of the last run that has not been cleared away; dead or alive."""
        data = _read_json(self._launcher)
        return None if data is None else Launcher(**data)

    def addresses(self) -> Addresses | None:
        """None if the cluster is not ready, or its launcher is dead."""
        launcher, data = self.launcher(), _read_json(self._addresses)
        return Addresses(**data) if data is not None and launcher is not None and launcher.alive else None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only one who starts or clears this cluster. Raises AlreadyRunning."""
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        lock = os.open(self.folder / "launcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            launcher = self.launcher()
            raise AlreadyRunning(self.cluster, launcher.pid if launcher else None) from None
        else:
            yield
        finally:
            os.close(lock)

    def begin(self) -> Path:
        """Register this process as the launcher; returns the new run's folder. Needs `hold`."""
        run_folder = Path(tempfile.mkdtemp(prefix="headrace-", dir=_short_temporary_folder()))
        (run_folder / "cwd").mkdir()
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        launcher = Launcher(pid=os.getpid(), start_ticks=ticks, run_folder=str(run_folder))
        _write_json(self._launcher, dataclasses.asdict(launcher))
        return run_folder

    def publish(self, addresses: Addresses) -> None:
        """Say that the cluster is ready, and where. Needs `hold`."""
        _write_json(self._addresses, dataclasses.asdict(addresses))

    def processes(self) -> dict[str, int]:
        """Process id by node id, the control plane's too; empty if the cluster is not ready."""
        return (_read_json(self._processes) or {}) if self.addresses() is not None else {}

    def publish_processes(self, pids: dict[str, int]) -> None:
        """Say which process runs which node. Needs `hold`."""
        _write_json(self._processes, pids)

    def clear(self, *, polite_s: float = 2.0) -> list[int]:
        """End what is left of the last run and remove what it left on disk. Needs `hold`.

        Returns the pids that had to be ended.
        """
        self._addresses.unlink(missing_ok=True)
        self._processes.unlink(missing_ok=True)
        launcher = self.launcher()
        if launcher is None:
            return []
        run_folder = Path(launcher.run_folder)
        left = processes_in(run_folder / "cwd")
        end_processes(left, polite_s=polite_s)
        shutil.rmtree(run_folder, ignore_errors=True)
        self._launcher.unlink(missing_ok=True)
        return left

    def ray_token(self) -> Path:
        """File with the secret of the cluster's own Ray; made at the first call, readable by its owner alone."""
        path = self.folder / "ray_auth_token"
        if not path.exists():
            _write_private(path, secrets.token_hex(32))
        return path

    def new_logs(self) -> None:
        """Begin the run with empty logs."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(mode=0o700)


def running_clusters(home: Path | None = None) -> list[str]:
    """Names of the clusters whose launcher is alive, sorted."""
    return [name for name, launcher in _launchers(home) if launcher.alive]


def stale_clusters(home: Path | None = None) -> list[str]:
    """Names of the clusters whose launcher died without clearing its run away, sorted."""
    return [name for name, launcher in _launchers(home) if not launcher.alive]


def _launchers(home: Path | None) -> list[tuple[str, Launcher]]:
    folder = home or headrace_home()
    names = sorted(path.parent.name for path in folder.glob("*/launcher.json"))
    found = [(name, ClusterHome(name, folder).launcher()) for name in names]
    return [(name, launcher) for name, launcher in found if launcher is not None]


def _short_temporary_folder() -> str:
    """The temporary folder, or /tmp where its name would make socket paths too long."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 16 else "/tmp"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    assert isinstance(data, dict), path
    return data


def _write_json(path: Path, data: dict[str, Any]) -> None:
    _write_private(path, json.dumps(data, indent=2) + "\n")


def _write_private(path: Path, text: str) -> None:
    """Whole or not at all, and for the owner's eyes."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
