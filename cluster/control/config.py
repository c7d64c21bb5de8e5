"""How a control plane is set up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig:
    """One control plane of a cluster; a second one waits for the first one's lock."""

    cluster: str
    """Names the cluster in the catalog, which several may share."""
    catalog_url: str
    """redis://, rediss:// or unix://; the embedded catalog's launcher passes the URL of its socket."""
    host: str = "127.0.0.1"
    """Address to listen on and to advertise."""
    port: int = 0
    """0 takes the port of the control plane before, which the nodes know, or a free one if that is taken."""
    silence_s: float = 5.0
    """A node that is not heard from for so many seconds counts as dead."""
    lock_ttl_s: float = 4.0
    """Seconds until the lock of a control plane that died is free; one that lives renews it three times in that."""
    catalog_deadline_s: float = 2.0
    """Seconds that the catalog may take to answer."""
    start_deadline_s: float = 15.0
    """Seconds that the start may wait for the catalog and for the lock."""
    grace_s: float = 1.0
    """Seconds that running calls get when it stops; streams are ended at once."""

    def __post_init__(self) -> None:
        if not self.cluster:
            raise ValueError("cluster must not be empty")
        for name in ("silence_s", "lock_ttl_s", "catalog_deadline_s", "start_deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.start_deadline_s <= self.lock_ttl_s:
            raise ValueError(
                f"start_deadline_s {self.start_deadline_s} must be longer than lock_ttl_s {self.lock_ttl_s}: "
                "the lock of a control plane that was killed has to run out first"
            )
