"""Starting a cluster's processes on Ray, keeping them, and stopping them."""

from cluster.launch.errors import LaunchError
from cluster.launch.home import (
    HOME_VARIABLE,
    Addresses,
    AlreadyRunning,
    ClusterHome,
    Launcher,
    headrace_home,
    running_clusters,
    stale_clusters,
)
from cluster.launch.ports import PortTaken

__all__ = [
    "HOME_VARIABLE",
    "Addresses",
    "AlreadyRunning",
    "ClusterHome",
    "LaunchError",
    "Launcher",
    "PortTaken",
    "headrace_home",
    "running_clusters",
    "stale_clusters",
]
