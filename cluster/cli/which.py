"""Which cluster a command is about."""

from __future__ import annotations

from cluster.cli.errors import CommandError, NoCluster
from cluster.launch import Addresses, ClusterHome, running_clusters

HOW_TO_START = "`headrace up` starts one on this machine"


def running_cluster(name: str | None) -> ClusterHome:
    """The home of the cluster that is meant: the one named, else the only one that runs.

    Raises NoCluster if none runs, CommandError if several do and none was named.
    """
    running = running_clusters()
    if name is not None:
        if name not in running:
            others = f"; there is {', '.join(running)}" if running else f"; {HOW_TO_START}"
            raise NoCluster(f"no cluster {name} runs here{others}")
        return ClusterHome(name)
    if not running:
        raise NoCluster(f"no cluster runs here; {HOW_TO_START}")
    if len(running) > 1:
        raise CommandError(
            f"several clusters run here; say which one with --cluster: {', '.join(running)}", exit_code=2
        )
    return ClusterHome(running[0])


def ready_cluster(name: str | None) -> Addresses:
    """Where the cluster that is meant answers.

    Raises like `running_cluster`, and NoCluster while it starts or stops.
    """
    home = running_cluster(name)
    addresses = home.addresses()
    if addresses is None:
        raise NoCluster(f"cluster {home.cluster} is not ready: it is starting or stopping (logs: {home.logs})")
    return addresses
