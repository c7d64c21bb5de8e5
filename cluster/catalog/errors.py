"""What can go wrong with the catalog.

CatalogError
├── CatalogUnavailable   it does not answer; requests go on, changes have to wait
├── CatalogCorrupt       a value there is not what this program wrote
├── CatalogInUse         another launcher runs the embedded server of the same directory
├── ControlLockHeld      another control plane has the cluster
└── Fenced               another control plane has taken over: stop acting
"""

from __future__ import annotations


class CatalogError(Exception):
    """Base of this family."""


class CatalogUnavailable(CatalogError):
    """The catalog did not answer in time, or refuses to work at the moment. Nothing is known about a write."""


class CatalogCorrupt(CatalogError):
    """A value in the catalog does not parse."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"the catalog's {key} is not readable: {reason}")
        self.key = key


class CatalogInUse(CatalogError):
    """The directory of an embedded catalog belongs to a launcher that is alive."""


class ControlLockHeld(CatalogError):
    """Another control plane holds the cluster's lock."""

    def __init__(self, holder: str, expires_in_s: float) -> None:
        super().__init__(f"control plane {holder} holds the lock, for {expires_in_s:.1f} s unless it renews it")
        self.holder = holder
        self.expires_in_s = expires_in_s


class Fenced(CatalogError):
    """A newer control plane has taken over."""

    def __init__(self, epoch: int, newer: int) -> None:
        super().__init__(f"control epoch {epoch} was replaced by {newer}")
        self.epoch = epoch
        self.newer = newer
