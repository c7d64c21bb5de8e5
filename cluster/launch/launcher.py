"""Starts a cluster, keeps it, and stops it."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import socket
import time
from pathlib import Path
from typing import NoReturn

from cluster.catalog import CatalogError, EmbeddedCatalog
from cluster.launch.errors import LaunchError
from cluster.launch.fleet import Fleet
from cluster.launch.home import Addresses, ClusterHome
from cluster.launch.models import model_shape
from cluster.launch.plan import Site, plan_nodes, usable_cores
from cluster.launch.ports import HeldPort, PortTaken
from cluster.launch.processes import end_processes, processes_in
from cluster.launch.progress import Progress
from cluster.launch.ray_runtime import RayRuntime
from cluster.launch.signals import StopSignals
from cluster.launch.supervision import Verdict
from cluster.spec import HostPort, LoadedSpec, check_models, parse_host_port, without_password

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Between two looks at the nodes and the catalog."""
READY_POLL_S = 0.05
KILLED = 137
"""Exit code of a stop that did not wait for anybody."""
_LOOPBACK = "127.0.0.1"
_NEWS = {
    Verdict.DIED: "died; Ray starts it again",
    Verdict.BACK: "is back",
    Verdict.HUNG: "does not answer and was ended; Ray starts it again",
}


class ClusterLauncher:
    """One run of a cluster, in the order of its life: `start`, `watch` until something raises, `stop`.

    Owns the catalog's server, a Ray of the cluster's own, and the actors on it. Everything that it starts runs in the
    run folder's `cwd`, so that `stop` can tell what is left. To be used from the main thread, under `ClusterHome.hold`.
    """

    def __init__(self, loaded: LoadedSpec, home: ClusterHome, progress: Progress, signals: StopSignals) -> None:
        self._loaded = loaded
        self._spec = loaded.spec
        self._home = home
        self._progress = progress
        self._signals = signals
        self._is_local = self._spec.ray.address == "local"
        self._ports: list[HeldPort] = []
        self._run_folder: Path | None = None
        self._catalog: EmbeddedCatalog | None = None
        self._ray: RayRuntime | None = None
        self._fleet: Fleet | None = None

    def start(self) -> Addresses:
        """Start everything and wait until the gateway can serve.

        Raises LaunchError, SpecError for a spec that the models contradict, PortTaken, CatalogError, StopAsked. Call
        `stop` in any case.
        """
        begun_unix_s = time.time()
        check_models(self._loaded, model_shape)
        left = self._home.clear()
        if left:
            self._progress.line(f"ended what an earlier run had left behind: processes {left}")
        self._home.new_logs()
        gateways = self._hold_gateway_ports()
        control = self._hold(HostPort(_LOOPBACK if self._is_local else self._own_address(), 0), "the control plane")
        self._run_folder = self._home.begin()
        os.chdir(self._run_folder / "cwd")
        catalog_url = self._start_catalog()
        self._ray, ray_address = self._start_ray(self._run_folder / "ray")
        site = Site(
            control=control,
            gateways=gateways,
            catalog_url=catalog_url,
            host=_LOOPBACK if self._is_local else None,
            cores=usable_cores(),
        )
        self._fleet = Fleet(self._ray, self._home.logs if self._is_local else None)
        self._fleet.launch(plan_nodes(self._spec, site))
        for plan, started in self._fleet.await_started(self._spec.timing.start_deadline_s, self._signals):
            http_address = f"http {started.http_address}, grpc " if started.http_address else ""
            self._progress.step(plan.node_id, f"{http_address}{started.address}")
        http, grpc = (address.reachable for address in gateways[0])
        self._await_ready(http)
        addresses = Addresses(
            cluster=self._spec.cluster,
            http=str(http),
            grpc=str(grpc),
            control=str(control),
            ray=ray_address,
            catalog=without_password(catalog_url),
            models=[model.name for model in self._spec.models],
            launcher_pid=os.getpid(),
            started_unix_s=begun_unix_s,
        )
        self._home.publish_processes(self._fleet.pids)
        self._home.publish(addresses)
        return addresses

    def watch(self) -> NoReturn:
        """Keep the cluster: report nodes that die and come back, end those that hang, restart the catalog's server.

        StopAsked ends it, and LaunchError if Ray itself has died; then only `kill` is left to do.
        """
        assert self._fleet is not None
        assert self._ray is not None
        while True:
            self._signals.check()
            dead_part = self._ray.dead_part()
            if dead_part is not None:
                raise LaunchError(f"Ray's {dead_part} died, and with it what starts nodes again; stopping everything")
            news = self._fleet.check(WATCH_S)
            for watch, verdict in news:
                self._progress.event(f"{watch.node_id} (process {watch.pid}) {_NEWS[verdict]}")
            if news:
                self._home.publish_processes(self._fleet.pids)
            if self._catalog is not None and self._catalog.pid is None:
                self._restart_catalog(self._catalog)

    def stop(self) -> None:
        """Stop what was started, in good order, and clear it away. Idempotent; works after any part of `start`."""
        with contextlib.ExitStack() as steps:  # runs from the last to the first, all of them whatever happens
            steps.callback(self._clear, polite_s=3.0)
            if self._catalog is not None:
                steps.callback(self._catalog.stop)
            if self._ray is not None:
                steps.callback(self._ray.stop)
            if self._fleet is not None:
                steps.callback(self._fleet.stop)
        self._fleet = self._ray = self._catalog = None

    def kill(self, exit_code: int = KILLED) -> NoReturn:
        """Stop without asking anybody, and end this process: Ray's client would wait for its Ray."""
        if self._run_folder is not None:
            end_processes(processes_in(self._run_folder / "cwd"), polite_s=0.0)
        if self._catalog is not None:
            self._catalog.stop()
        self._clear(polite_s=0.0)
        self._progress.line("stopped at once")
        os._exit(exit_code)

    def _clear(self, *, polite_s: float) -> None:
        for port in self._ports:
            port.release()
        self._ports.clear()
        if self._run_folder is not None:
            os.chdir("/")
            left = self._home.clear(polite_s=polite_s)
            if left:
                logger.info("ended what was left of the run: processes %s", left)
            self._run_folder = None

    def _hold(self, wanted: HostPort, what: str) -> HostPort:
        """The address, ours until `stop`. what: the setting, for the message."""
        try:
            port = HeldPort(wanted)
        except PortTaken as error:
            raise PortTaken(f"{error} ({what})") from error
        self._ports.append(port)
        return port.address

    def _hold_gateway_ports(self) -> tuple[tuple[HostPort, HostPort], ...]:
        """HTTP and gRPC address of each gateway."""
        gateway = self._spec.gateway
        wanted = [(gateway.http, gateway.grpc)]
        wanted += [(HostPort(gateway.http.host, 0), HostPort(gateway.grpc.host, 0))] * (gateway.replicas - 1)
        return tuple(
            (self._hold(http, "gateway.http of the spec"), self._hold(grpc, "gateway.grpc of the spec"))
            for http, grpc in wanted
        )

    def _own_address(self) -> str:
        """The address of this machine that reaches the Ray that we join; nothing is sent."""
        ray = parse_host_port(self._spec.ray.address)
        with socket.socket(socket.AF_INET6 if ":" in ray.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((ray.host, ray.port))
            return str(probe.getsockname()[0])

    def _start_catalog(self) -> str:
        if self._spec.catalog != "embedded":
            self._progress.step("catalog", without_password(self._spec.catalog))
            return self._spec.catalog
        self._catalog = EmbeddedCatalog(self._home.catalog)
        self._catalog.start()
        self._progress.step("catalog", f"embedded, in {self._home.catalog}")
        return self._catalog.url

    def _restart_catalog(self, catalog: EmbeddedCatalog) -> None:
        """Requests go on without it, so a start that fails is tried again with the next look."""
        try:
            catalog.start()
            self._progress.event(f"the catalog's server had died; it runs again (process {catalog.pid})")
        except CatalogError as error:
            self._progress.event(f"the catalog's server died and does not start again: {error}")

    def _start_ray(self, session_folder: Path) -> tuple[RayRuntime, str]:
        spec = self._spec
        num_nodes = 1 + spec.kv.replicas + spec.gateway.replicas
        num_nodes += sum(group.replicas for group in [*spec.prefill, *spec.decode])
        ray = RayRuntime(
            address=spec.ray.address,
            cluster=spec.cluster,
            session_folder=session_folder,
            token_file=self._home.ray_token(),
        )
        ray.load()
        self._ray = ray  # before the start, so that half a start is stopped too
        with self._signals.at_once():
            address = ray.start(num_nodes)
        self._progress.step("ray", f"{'a local one' if self._is_local else 'joined'}, {address}")
        return ray, address

    def _await_ready(self, address: HostPort) -> None:
        """Until the gateway says that it can serve."""
        deadline_s = self._spec.timing.start_deadline_s
        until_s = time.monotonic() + deadline_s
        said = "nothing yet"
        while time.monotonic() < until_s:
            self._signals.check()
            connection = http.client.HTTPConnection(address.host, address.port, timeout=5.0)
            try:
                connection.request("GET", "/readyz")
                response = connection.getresponse()
                if response.status == 200:
                    return
                said = f"{response.status} {response.read(500).decode(errors='replace')}".strip()
            except OSError as error:
                said = str(error)
            finally:
                connection.close()
            time.sleep(READY_POLL_S)
        raise LaunchError(f"the cluster is not ready after {deadline_s} s; http://{address}/readyz: {said}")
