"""The Ray that runs a cluster's processes: one of its own, or one that is there already."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

from cluster.launch.errors import LaunchError, last_line
from cluster.launch.plan import NodePlan
from cluster.launch.signals import StopAsked
from cluster.spec import parse_host_port

CONNECT_S = 5.0
OBJECT_STORE_BYTES = 80 << 20
"""Close to the least that Ray takes: nothing of ours travels through its object store."""

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning about actors without GPUs in every process
}


_ESSENTIAL = ("gcs_server", "raylet")
"""Without the first nothing is started again, without the second nothing goes on."""
_LOCAL_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # Despite its name: with 0, Ray listens on the loopback address instead of the machine's.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray would run our nodes at nice 15, behind everything else on the machine.
    "RAY_worker_niceness": "0",
    # UCX would listen on every interface, for whoever reads pages; on one machine nobody else does.
    "UCX_NET_DEVICES": "lo",
}


class RayRuntime:
    """A connection to Ray, in a namespace of the cluster's own."""

    def __init__(self, *, address: str, cluster: str, session_folder: Path, token_file: Path) -> None:
        """address: "local", or host:port of a running Ray.

        session_folder: where a local Ray keeps its session. token_file: the secret of a local Ray; a Ray that is there
        already has its own, which Ray finds in its usual places.
        """
        self._address = address
        self._namespace = f"headrace-{cluster}"
        self._session_folder = session_folder
        self._token_file = token_file

    @property
    def is_local(self) -> bool:
        return self._address == "local"

    def load(self) -> None:
        """Import Ray, with the environment that it reads once. Must not be interrupted: a second import would fail."""
        os.environ.update(_ENVIRONMENT)
        if self.is_local:
            os.environ.update(_LOCAL_ENVIRONMENT, RAY_AUTH_TOKEN_PATH=str(self._token_file))
        import ray  # noqa: F401

    def start(self, num_nodes: int) -> str:
        """Start or join Ray; returns its address. Needs `load`. num_nodes: how many actors will be made.

        Call it from the main thread: the kernel ends a local Ray together with the thread that started it.
        Raises LaunchError, and StopAsked if a signal interrupts it.
        """
        import ray
        import ray.exceptions

        if not self.is_local:
            _check_reachable(self._address)
        options: dict[str, Any] = {}
        if self.is_local:
            options = {
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(self._session_folder),
                # Actors take no CPU of Ray's account. It is also how many processes Ray starts ahead and at a time.
                "num_cpus": max(num_nodes, os.cpu_count() or 1),
            }
        _silence_crash_notices()
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=self._address, namespace=self._namespace, log_to_driver=False, logging_level="ERROR", **options
            )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            what = "ray did not start" if self.is_local else f"ray at {self._address} cannot be joined"
            raise LaunchError(f"{what}: {last_line(error)}") from error
        except SystemExit as error:  # what Ray makes of SIGTERM meanwhile
            raise StopAsked("SIGTERM") from error
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)
        return str(ray.get_runtime_context().gcs_address)

    def launch(self, plan: NodePlan, log_file: Path | None) -> Any:
        """A handle of the actor that runs a node; returns before the node has started. Raises LaunchError."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from cluster.launch.node_actor import NodeActor

        options: dict[str, Any] = {"name": plan.node_id}
        if plan.beside_launcher:
            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        named = type(plan.node_id, (NodeActor,), {})  # Ray titles the process after the class: ray::decode-0
        actor_class = ray.remote(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            # `ready` waits long and `stop` must not wait for it; `health` waits for neither.
            concurrency_groups={"health": 1, "start": 1},
        )(named)
        try:
            return actor_class.options(**options).remote(plan, None if log_file is None else str(log_file))
        except ValueError as error:  # somebody has an actor of this name
            raise LaunchError(
                f"{plan.node_id}: {last_line(error)}; does the cluster run on this Ray already?"
            ) from error

    def dead_part(self) -> str | None:
        """Which process that our own Ray cannot do without has died; None if all live. Ray itself would wait on."""
        import ray._private.worker

        node = ray._private.worker._global_node
        dead = {kind for kind, _ in node.dead_processes()} if self.is_local and node is not None else set()
        return next((part for part in _ESSENTIAL if part in dead), None)

    def end_process(self, actor: Any, pid: int) -> None:
        """End an actor's process that does not answer, so that Ray starts another one."""
        import ray

        if self.is_local:  # also if it is frozen, where it could not obey
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        else:
            ray.kill(actor, no_restart=False)

    def stop(self) -> None:
        """Leave Ray; a local one ends. Idempotent."""
        import ray

        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise LaunchError if nobody listens there: Ray itself would try for minutes."""
    target = parse_host_port(address)
    try:
        socket.create_connection((target.host, target.port), timeout=CONNECT_S).close()
    except OSError as error:
        raise LaunchError(f"ray at {address} (ray.address of the spec): {error.strerror or error}") from error


def _silence_crash_notices() -> None:
    """Keep Ray from printing a paragraph for each process that dies: the launcher says it in a line, by node.

    No setting of Ray's does this, `log_to_driver` and `logging_level` included.
    """
    import ray._private.worker

    ray._private.worker.listen_error_messages = lambda worker, threads_stopped: None
