"""The control plane: who is there, what they hold, what they should do."""

from cluster.control.config import ControlConfig
from cluster.control.plane import ControlPlane

__all__ = ["ControlConfig", "ControlPlane"]
