"""One node in one process of Ray's."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

import ray
import ray.util

from cluster.launch.build import build_node
from cluster.launch.node_thread import NodeThread, Started, StartFailed
from cluster.launch.plan import NodePlan

logger = logging.getLogger(__name__)

RESTART_PAUSE_S = 2.0
"""Between a failed start of a restarted node and the next one, so that a crash loop is slow."""
HEALTH_S = 1.0
"""The event loop of a healthy node answers within so many seconds."""


class NodeActor:
    """Runs the node of a plan for as long as its process lives. Ray wraps this class where it is launched.

    When a process dies, Ray makes the object again in a new one with the same arguments: so everything starts from
    `__init__`. A node that cannot start says why to whoever asks `ready`, the first time; a restarted one has nobody
    who asks, and ends its process after a pause, so that Ray makes another one. SIGTERM stops the node in good order
    and then ends the process, with the same consequence.

    There is no coroutine here on purpose: it would make this an asyncio actor, with `__init__` off the main thread.
    """

    def __init__(self, plan: NodePlan, log_file: str | None) -> None:
        """log_file: takes everything that the process prints or logs; None leaves that to Ray's files."""
        self._plan = plan
        if log_file is not None:
            _redirect_output(Path(log_file))
        _configure_logging()
        host = ray.util.get_node_ip_address()
        self._node = NodeThread(plan.node_id, lambda: build_node(plan, host), on_error=lambda: _end_process(1))
        sigterm = _watch_sigterm()
        threading.Thread(target=self._await_sigterm, args=(sigterm,), name="sigterm", daemon=True).start()
        self._node.start()
        if _is_restarted():
            threading.Thread(target=self._await_start, name="restart", daemon=True).start()

    def ready(self) -> Started | StartFailed:
        """Wait until the node has started or failed to."""
        return self._node.outcome()

    def health(self) -> int:
        """This process's id. Raises TimeoutError if the node's event loop does not answer."""
        if not self._node.answers(HEALTH_S):
            raise TimeoutError(f"the event loop of {self._plan.node_id} does not answer")
        return os.getpid()

    def stop(self, deadline_s: float) -> bool:
        """Stop the node in good order; says whether it managed within `deadline_s`. The process stays."""
        return self._node.stop(deadline_s)

    def _await_start(self) -> None:
        if isinstance(self._node.outcome(), StartFailed):
            time.sleep(RESTART_PAUSE_S)
            _end_process(1)

    def _await_sigterm(self, sigterm: socket.socket) -> None:
        while signal.SIGTERM not in sigterm.recv(64):
            pass
        logger.info("node %s: SIGTERM", self._plan.node_id)
        self._node.stop(self._plan.stop_deadline_s)
        _end_process(0)


def _is_restarted() -> bool:
    """Whether an earlier process of this actor has died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own use of what it deprecates
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _watch_sigterm() -> socket.socket:
    """A socket from which the numbers of signals can be read as they come. Needs the main thread.

    Ray keeps the main thread in C++, where Python's handlers do not run; the wake-up descriptor is written at once.
    """
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writable.detach(), warn_on_full_buffer=False)
    return readable


def _redirect_output(log_file: Path) -> None:
    """Send stdout and stderr, those of C++ libraries too, to the end of a file of the node's own."""
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(target, number)
    os.close(target)


def _configure_logging() -> None:
    # A stream of our own: Ray has put a wrapper into sys.stderr.
    handler = logging.StreamHandler(os.fdopen(2, "w", buffering=1, closefd=False))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    faulthandler.enable(file=2)


def _end_process(code: int) -> None:
    """At once: whatever is left on other threads has had its time."""
    logging.shutdown()
    os._exit(code)
