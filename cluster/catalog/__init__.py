"""The catalog: the few facts of a cluster that outlive its processes."""

from cluster.catalog.embedded import EmbeddedCatalog
from cluster.catalog.errors import (
    CatalogCorrupt,
    CatalogError,
    CatalogInUse,
    CatalogUnavailable,
    ControlLockHeld,
    Fenced,
)
from cluster.catalog.facts import AuditEntry, Placement, Roster, RosterEntry
from cluster.catalog.store import Catalog

__all__ = [
    "AuditEntry",
    "Catalog",
    "CatalogCorrupt",
    "CatalogError",
    "CatalogInUse",
    "CatalogUnavailable",
    "ControlLockHeld",
    "EmbeddedCatalog",
    "Fenced",
    "Placement",
    "Roster",
    "RosterEntry",
]
