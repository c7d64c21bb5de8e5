"""Where a request should go: plain code over a view of the cluster, with the time passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cluster.view import ClusterView, Fingerprint, NodeView, Peer, Role
from kvstore.pages import page_keys, salted
from protos.registration import WIRE_VERSION

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """How a place for a request is chosen."""

    local_prefill_max_tokens: int = 64
    """Up to so many prompt tokens that the decode worker does not hold, it computes them itself."""
    max_prefill_peers: int = 3
    """Prefill workers named to the decode worker: the best one, and whom to ask after its death."""
    max_candidates: int = 8
    """Decode workers tried before a request is refused."""
    growth_reserve_tokens: int = 256
    """Output tokens to find room for where the client named no max_tokens."""
    default_prefill_tokens_per_s: float = 1_000.0
    """Assumed of a worker that has not measured its rate yet."""
    default_link_bytes_per_s: float = 1e9
    """Assumed of a worker that has not pulled anything yet."""
    near: float = 0.1
    """Predictions within this fraction of the best one count as equal to it: the less loaded worker wins then."""
    near_s: float = 0.005
    """The same in seconds, for predictions near zero."""
    unreported_s: float = 5.0
    """A placement counts until the node's next load report, but no longer than this: while the control plane is away
    no report comes."""

    def __post_init__(self) -> None:
        for name in ("max_prefill_peers", "local_prefill_max_tokens", "growth_reserve_tokens", "near", "near_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("max_candidates", "default_prefill_tokens_per_s", "default_link_bytes_per_s", "unreported_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(kw_only=True, slots=True)
class Job:
    """What has to be placed: a prompt and, after an attempt that was lost, what it gave out."""

    model: str
    token_ids: Sequence[int]
    max_tokens: int | None
    """Output tokens still to come; None if the client named no limit."""
    tenant_salt: bytes = b""
    _keys: dict[tuple[bytes, int], list[bytes]] = field(default_factory=dict)

    def keys(self, fingerprint: Fingerprint) -> list[bytes]:
        """Keys of the pages that may come from caches: all full ones, but not the one with the last token."""
        which = (fingerprint.namespace, fingerprint.page_size)
        if which not in self._keys:
            namespace = salted(fingerprint.namespace, self.tenant_salt)
            self._keys[which] = page_keys(namespace, self.token_ids[:-1], fingerprint.page_size)
        return self._keys[which]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A place for a job."""

    decode: Peer
    prefill: tuple[Peer, ...]
    """Whom the decode worker should ask, in this order. Empty: it computes the prompt itself."""
    ttft_s: float
    """Predicted time to the first token."""
    uncached_tokens: int
    """Prompt tokens that somebody has to compute."""
    needed_pages: int
    """Pages that the decode worker has to find room for."""
    has_room: bool
    """Whether it has them, by the view."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Work given to a node that its next load report will contain."""

    at_s: float
    tokens: int
    """To compute."""
    pages: int
    """To find room for."""
    requests: int
    """To decode."""


@dataclass(kw_only=True, slots=True)
class _Unreported:
    """All work given to one node since its last load report, oldest first, and its sums."""

    tokens: int = 0
    pages: int = 0
    requests: int = 0
    _sent: deque[_Sent] = field(default_factory=deque)

    def add(self, sent: _Sent) -> None:
        self._sent.append(sent)
        self._count(sent, 1)

    def forget(self, until_s: float) -> bool:
        """Drop what was given at `until_s` or before. Says whether anything is left."""
        while self._sent and self._sent[0].at_s <= until_s:
            self._count(self._sent.popleft(), -1)
        return bool(self._sent)

    def _count(self, sent: _Sent, sign: int) -> None:
        self.tokens += sign * sent.tokens
        self.pages += sign * sent.pages
        self.requests += sign * sent.requests


_NOTHING_SENT = _Unreported()


class Router:
    """Ranks the places for a job by predicted time to first token.

        queue + uncached tokens / measured prefill rate + bytes to move / measured link rate

    A page counts as cached if the worker that would compute it holds it or can pull it: a prefill worker from the
    decode worker or a storage node. Loads are some heartbeats old, so what this router itself placed since a node's
    last report is added to that node's queue, for `unreported_s` at the most. The view is a hint: the worker has the
    last word.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._unreported: dict[Peer, _Unreported] = {}
        self._turn = 0

    def workers(self, view: ClusterView, model: str) -> list[NodeView]:
        """The decode workers that could take a request for `model` now."""
        return [node for node in view.with_role(Role.DECODE) if _serves(node, model) and node.load.ready]

    def routes(self, view: ClusterView, job: Job, now_s: float) -> list[Route]:
        """Places for `job`, best first, at most `max_candidates`. Empty if no decode worker of the model is ready.

        now_s: by the clock that the view's `loaded_at_s` and `placed` use.
        """
        workers = self.workers(view, job.model)
        self._forget_reported(view, now_s)
        routes = [self._route(view, job, worker) for worker in workers]
        return self._rank(routes, {worker.peer: self._occupancy(worker) for worker in workers})

    def placed(self, route: Route, now_s: float) -> None:
        """Remember that a job went there, until the nodes' next load reports say so themselves."""
        computing = route.prefill[0] if route.prefill else route.decode
        self._send(route.decode, _Sent(now_s, 0, route.needed_pages, 1))
        self._send(computing, _Sent(now_s, route.uncached_tokens, 0, 0))

    def _send(self, peer: Peer, sent: _Sent) -> None:
        self._unreported.setdefault(peer, _Unreported()).add(sent)

    def _forget_reported(self, view: ClusterView, now_s: float) -> None:
        loaded_at_s = {node.peer: node.loaded_at_s for node in view.nodes.values()}
        for peer, unreported in list(self._unreported.items()):
            is_gone = peer not in loaded_at_s
            if is_gone or not unreported.forget(max(loaded_at_s[peer], now_s - self._config.unreported_s)):
                del self._unreported[peer]

    def _sent(self, node: NodeView) -> _Unreported:
        return self._unreported.get(node.peer, _NOTHING_SENT)

    def _route(self, view: ClusterView, job: Job, worker: NodeView) -> Route:
        fingerprint = worker.fingerprint
        keys = job.keys(fingerprint)
        here = _held(worker, keys)
        growth = self._config.growth_reserve_tokens if job.max_tokens is None else job.max_tokens
        pages = -(-(len(job.token_ids) + growth) // fingerprint.page_size)
        needed = max(0, pages - here.bit_count())
        room = worker.load.room_pages - self._sent(worker).pages
        prefill: tuple[Peer, ...] = ()
        uncached = len(job.token_ids) - here.bit_count() * fingerprint.page_size
        ttft_s = self._queue_s(worker) + uncached / self._prefill_rate(worker)
        if uncached > self._config.local_prefill_max_tokens and self._config.max_prefill_peers > 0:
            stored = 0
            for node in view.with_role(Role.KV):
                stored |= _held(node, keys)
            ranked = self._rank_prefill(view, job, worker, keys, here, stored)
            if ranked:
                prefill = tuple(peer for _, peer, _ in ranked[: self._config.max_prefill_peers])
                ttft_s, _, uncached = ranked[0]
        return Route(
            decode=worker.peer,
            prefill=prefill,
            ttft_s=ttft_s,
            uncached_tokens=uncached,
            needed_pages=needed,
            has_room=needed <= room,
        )

    def _rank_prefill(
        self, view: ClusterView, job: Job, worker: NodeView, keys: list[bytes], here: int, stored: int
    ) -> list[tuple[float, Peer, int]]:
        """(predicted TTFT, prefill worker, tokens it would compute), best first.

        here, stored: bit i is set if the decode worker, or some storage node, holds page i.
        """
        fingerprint = worker.fingerprint
        pages = -(-len(job.token_ids) // fingerprint.page_size)
        into_decode_s = (pages - here.bit_count()) * fingerprint.page_bytes / self._link_rate(worker)
        nodes = [node for node in view.with_role(Role.PREFILL) if node.fingerprint == fingerprint and node.load.ready]
        ranked: list[tuple[float, int, Peer, int]] = []
        for place, node in enumerate(self._rotated(nodes)):
            there = _held(node, keys)
            pullable = (here | stored) & ~there
            uncached = len(job.token_ids) - (there | pullable).bit_count() * fingerprint.page_size
            compute_s = self._queue_s(node) + uncached / self._prefill_rate(node)
            pull_s = pullable.bit_count() * fingerprint.page_bytes / self._link_rate(node)
            ranked.append((compute_s + pull_s + into_decode_s, place, node.peer, uncached))
        ranked.sort(key=lambda item: item[:2])
        return [(ttft_s, peer, uncached) for ttft_s, _, peer, uncached in ranked]

    def _rank(self, routes: list[Route], occupancy: dict[Peer, int]) -> list[Route]:
        """With room before without. Among predictions that are nearly the best one, the emptiest worker wins."""
        self._turn += 1
        routes = self._rotated(routes)
        best_s = min((route.ttft_s for route in routes if route.has_room), default=0.0)
        near_s = best_s * (1 + self._config.near) + self._config.near_s

        def order(route: Route) -> tuple[bool, float, int]:
            if route.ttft_s <= near_s:
                return (not route.has_room, 0.0, occupancy[route.decode])
            return (not route.has_room, route.ttft_s, 0)

        routes.sort(key=order)  # stable: ties stay in rotated order
        return routes[: self._config.max_candidates]

    def _rotated(self, items: list[T]) -> list[T]:
        start = self._turn % len(items) if items else 0
        return items[start:] + items[:start]

    def _occupancy(self, node: NodeView) -> int:
        return node.load.running + node.load.waiting + self._sent(node).requests

    def _queue_s(self, node: NodeView) -> float:
        return (node.load.queued_tokens + self._sent(node).tokens) / self._prefill_rate(node)

    def _prefill_rate(self, node: NodeView) -> float:
        return node.load.prefill_tokens_per_s or self._config.default_prefill_tokens_per_s

    def _link_rate(self, node: NodeView) -> float:
        return node.load.pull_bytes_per_s or self._config.default_link_bytes_per_s


def _serves(node: NodeView, model: str) -> bool:
    fingerprint = node.fingerprint
    return fingerprint.model == model and fingerprint.wire_version == WIRE_VERSION and fingerprint.page_size > 0


def _held(node: NodeView, keys: Sequence[bytes]) -> int:
    """Bit i is set if the node holds the page of keys[i]. Pages behind a hole count: a key commits to the prefix."""
    held = 0
    if not node.keys:
        return held
    for index, key in enumerate(keys):
        if key in node.keys:
            held |= 1 << index
    return held
