"""The durable facts in Redis, Valkey, or whatever speaks their protocol."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cluster.catalog.errors import CatalogCorrupt, CatalogUnavailable, ControlLockHeld, Fenced
from cluster.catalog.facts import AuditEntry, Placement, Roster

logger = logging.getLogger(__name__)

T = TypeVar("T")

SCHEMES = ("redis", "rediss", "unix")
AUDIT_ENTRIES = 10_000
"""About how many of the newest are kept."""

# A control plane that took the lock (KEYS[1]) may go on for ARGV[2] ms. Its epoch (KEYS[2]) is newer than any before.
_ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return {0, holder, redis.call('PTTL', KEYS[1])} end
local epoch = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {epoch, ARGV[1], 0}
"""
# Answers the newest epoch, and whether it had to be put back: a store that lost its data must not fence the newest
# control plane, nor hand out its epoch again.
_RENEW = """
local stored = tonumber(redis.call('GET', KEYS[2]) or '0')
local mine = tonumber(ARGV[2])
if stored > mine then return {stored, 0} end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return {mine, stored < mine and 1 or 0}
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
# One write command on KEYS[2], unless a newer control plane than ARGV[1] has been seen.
_FENCED = """
local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
if stored > tonumber(ARGV[1]) then return stored end
redis.call(ARGV[2], KEYS[2], unpack(ARGV, 3))
return 0
"""

# Errors that say "not now" rather than "you asked nonsense", among those that redis-py has no class for.
_NOT_NOW = ("MISCONF", "NOREPLICAS", "NOAUTH", "WRONGPASS", "NOPERM", "OOM", "READONLY", "LOADING", "MASTERDOWN")

Renewal = Literal["held", "restored"]


class Catalog:
    """The cluster's durable facts, over one redis-py code path.

    Every call takes at most `deadline_s`, then raises CatalogUnavailable; a write that raised it may have happened.
    Writes of a control plane carry its epoch and raise Fenced once a newer one has taken over. Needs Redis 7.0 or
    anything later that is compatible. Belongs to one event loop.
    """

    def __init__(self, client: redis.asyncio.Redis, *, cluster: str, deadline_s: float = 2.0) -> None:
        """client: with decode_responses; closed by `close`."""
        self._client = client
        self._deadline_s = deadline_s
        # The braces keep all keys of a cluster in one slot, should the store be sharded.
        self._prefix = f"headrace:{{{cluster}}}:"
        self._acquire = client.register_script(_ACQUIRE)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)
        self._fenced = client.register_script(_FENCED)

    @classmethod
    def open(cls, url: str, *, cluster: str, deadline_s: float = 2.0) -> Catalog:
        """The catalog at a redis://, rediss:// or unix:// URL. Does not connect yet. Raises ValueError for others.

        "embedded" is not among them: whoever starts the embedded server passes the URL of its socket.
        """
        if urlsplit(url).scheme not in SCHEMES:
            raise ValueError(f"a catalog's URL begins with redis://, rediss:// or unix://, got {url!r}")
        client = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            # Once, at once: a pooled connection is found dead only by using it after the server restarted.
            retry=Retry(NoBackoff(), 1),
            health_check_interval=0,
        )
        return cls(client, cluster=cluster, deadline_s=deadline_s)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.aclose()

    async def __aenter__(self) -> Catalog:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def ping(self) -> None:
        """Raises CatalogUnavailable if the catalog does not answer."""
        await self._call(self._client.ping())

    async def cluster_id(self) -> str:
        """A name that this cluster's catalog got at first use and keeps."""
        key = self._key("id")
        await self._call(self._client.set(key, uuid.uuid4().hex, nx=True))
        return str(await self._call(self._client.get(key)))

    async def acquire_control(self, holder: str, *, ttl_s: float) -> int:
        """Take the control lock for `ttl_s` seconds; returns the fencing epoch, newer than any before.

        holder: tells this control plane from any other, its earlier and later lives included.
        Raises ControlLockHeld.
        """
        epoch, other, remaining_ms = await self._call(
            self._acquire(keys=[self._key("lock"), self._key("epoch")], args=[holder, _ms(ttl_s)])
        )
        if not epoch:
            raise ControlLockHeld(str(other), max(0, int(remaining_ms)) / 1000)
        return int(epoch)

    async def renew_control(self, holder: str, epoch: int, *, ttl_s: float) -> Renewal:
        """Keep the lock for another `ttl_s` seconds, also if it ran out and nobody has taken it.

        "restored": the catalog had lost its data; the lock and the epoch are back, the caller stores the rest again.
        Raises Fenced.
        """
        keys = [self._key("lock"), self._key("epoch")]
        newest, restored = await self._call(self._renew(keys=keys, args=[holder, epoch, _ms(ttl_s)]))
        if int(newest) > epoch:
            raise Fenced(epoch, int(newest))
        return "restored" if restored else "held"

    async def release_control(self, holder: str) -> None:
        """Let the next control plane start without waiting. Does nothing if the lock is another's."""
        await self._call(self._release(keys=[self._key("lock")], args=[holder]))

    async def control_address(self) -> str | None:
        """host:port where the control plane listens or listened last; None before the first."""
        address = await self._call(self._client.get(self._key("address")))
        return None if address is None else str(address)

    async def set_control_address(self, address: str, *, epoch: int) -> None:
        await self._write(epoch, "SET", "address", address)

    async def placement(self) -> Placement | None:
        """What the operator wants to run; None if that was never said. Raises CatalogCorrupt."""
        return await self._read("placement", Placement.from_json)

    async def set_placement(self, placement: Placement, *, actor: str) -> None:
        """Store what the operator wants to run, with an entry in the audit log."""
        text = placement.to_json()
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.set(self._key("placement"), text)
            entry = {"actor": actor, "action": "set-placement", "details": text}
            pipeline.xadd(self._key("audit"), entry, maxlen=AUDIT_ENTRIES, approximate=True)  # type: ignore[arg-type]
            await self._call(pipeline.execute())

    async def roster(self) -> Roster:
        """What the last control plane knew of its nodes; empty before the first. Raises CatalogCorrupt."""
        return await self._read("roster", Roster.from_json) or Roster()

    async def store_roster(self, roster: Roster, *, epoch: int) -> None:
        await self._write(epoch, "SET", "roster", roster.to_json())

    async def record(self, entry: AuditEntry, *, epoch: int) -> None:
        """Append to the audit log."""
        fields = ("actor", entry.actor, "action", entry.action, "details", entry.details)
        await self._write(epoch, "XADD", "audit", "MAXLEN", "~", str(AUDIT_ENTRIES), "*", *fields)

    async def audit_log(self, limit: int) -> list[AuditEntry]:
        """The newest `limit` entries, newest first."""
        rows = await self._call(self._client.xrevrange(self._key("audit"), count=limit))
        return [
            AuditEntry(
                actor=fields["actor"],
                action=fields["action"],
                details=fields["details"],
                at_unix_s=int(entry_id.partition("-")[0]) / 1000,
            )
            for entry_id, fields in rows
        ]

    def _key(self, name: str) -> str:
        return self._prefix + name

    async def _read(self, name: str, parse: Callable[[str], T]) -> T | None:
        text = await self._call(self._client.get(self._key(name)))
        if text is None:
            return None
        try:
            return parse(text)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CatalogCorrupt(self._key(name), repr(error)) from error

    async def _write(self, epoch: int, command: str, name: str, *arguments: str) -> None:
        keys = [self._key("epoch"), self._key(name)]
        newer = await self._call(self._fenced(keys=keys, args=[epoch, command, *arguments]))
        if newer:
            raise Fenced(epoch, int(newer))

    async def _call(self, reply: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await reply
        except TimeoutError as error:
            raise CatalogUnavailable(f"no answer within {self._deadline_s} s") from error
        except (
            redis.exceptions.ConnectionError,
            redis.exceptions.TimeoutError,
            redis.exceptions.ReadOnlyError,
            redis.exceptions.OutOfMemoryError,
            redis.exceptions.ClusterDownError,
            OSError,
        ) as error:
            raise CatalogUnavailable(str(error)) from error
        except redis.exceptions.ResponseError as error:
            if str(error).startswith(_NOT_NOW):
                raise CatalogUnavailable(str(error)) from error
            raise


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
