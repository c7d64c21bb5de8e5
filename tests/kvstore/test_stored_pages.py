"""A worker's pages in several storage nodes: what one of them does costs nothing to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from kvstore import stored_pages
from kvstore.client import KvClient
from kvstore.owners import by_owner, fragment_key, fragment_pages
from kvstore.pages import ColdPage
from kvstore.plane import PagePlane, PlaneConfig
from kvstore.stored_pages import StoredPages
from kvstore.transport import boot_time_s, create_transport
from protos import kvstore_pb2
from tests.kvstore.node.harness import WAIT_S, BareNode, Cluster, eventually, run
from tests.kvstore.node.samples import LAYOUT, PAGE_BYTES, key_of, page_of

NUM_PAGES = 128
KEYS = [key_of(number) for number in range(1, NUM_PAGES + 1)]
DEPTH = fragment_pages(LAYOUT.page_size)


class NoSink:
    """Of a step loop that submits no pulls."""

    def put(self, event: object, /) -> None:
        raise AssertionError(f"unexpected {event}")


class Reader:
    """Has written out pages 1..128 to two nodes, and reads them back into a pool that is empty again."""

    def __init__(self, cluster: Cluster) -> None:
        self.client = KvClient()
        config = PlaneConfig(pool_bytes=NUM_PAGES * PAGE_BYTES, transports=("inprocess",))
        self.plane = PagePlane(LAYOUT, config, "reader", NoSink())
        self.plane.start()
        self.stored = StoredPages(self.plane, self.client)
        self.client.update(cluster.view())

    async def write_out(self) -> None:
        pages = self.plane.cache.pages
        for place in range(NUM_PAGES):
            pages[place] = page_of(place + 1)
        cold = [
            ColdPage(key, KEYS[place - 1] if place else None, fragment_key(KEYS, place, DEPTH), place)
            for place, key in enumerate(KEYS)
        ]
        await self.stored.offer(cold)
        pages[:] = 0

    async def fetch(self, deadline_in_s: float = WAIT_S) -> set[int]:
        """Page ids that came, each checked byte by byte."""
        wanted = {key: place for place, key in enumerate(KEYS)}
        deadline_s = boot_time_s() + deadline_in_s
        filled = await self.stored.fetch(KEYS, wanted, deadline_s=deadline_s)
        assert boot_time_s() < deadline_s, "nobody waits for it any longer"
        assert all(np.array_equal(self.plane.cache.pages[place], page_of(place + 1)) for place in filled)
        return set(filled)

    async def close(self) -> None:
        await self.client.close()
        await asyncio.to_thread(self.plane.close)
        assert not self.stored._staging.extents()


@pytest.fixture
def with_two_nodes(monkeypatch) -> Callable[[Callable[[Reader, BareNode, BareNode], Awaitable[None]]], None]:
    def run_with(body: Callable[[Reader, BareNode, BareNode], Awaitable[None]]) -> None:
        async def inner() -> None:
            async with Cluster() as cluster:
                monkeypatch.setattr(
                    "kvstore.plane.create_transport",
                    lambda *arguments: create_transport(*arguments, fabric=cluster.fabric),
                )
                nodes = [await cluster.bare_node(max_writing_share=1.0) for _ in range(2)]
                reader = Reader(cluster)
                try:
                    await reader.write_out()
                    await body(reader, *nodes)
                finally:
                    for node in nodes:
                        node.gate.open.set()
                    await reader.close()

        run(inner)

    return run_with


def places_of(node: BareNode, *nodes: BareNode) -> set[int]:
    weights = {each.node_id: 1.0 for each in (node, *nodes)}
    return set(by_owner(KEYS, range(NUM_PAGES), DEPTH, weights)[node.node_id])


def test_pages_come_back_from_all_nodes(with_two_nodes):
    async def body(reader: Reader, one: BareNode, two: BareNode) -> None:
        assert await reader.fetch() == places_of(one, two) | places_of(two, one) == set(range(NUM_PAGES))

    with_two_nodes(body)


def test_what_one_node_lends_is_pulled_while_another_is_silent(with_two_nodes):
    """All pulls used to begin when the last owner had answered, or at the deadline that both share."""

    async def body(reader: Reader, silent: BareNode, good: BareNode) -> None:
        silent.gate.open.clear()
        fetch = asyncio.create_task(reader.fetch(4 * WAIT_S))
        await eventually(lambda: good.gate.num_released == 1)
        assert not fetch.done()
        silent.gate.open.set()
        assert await fetch == set(range(NUM_PAGES))

    with_two_nodes(body)


def test_a_silent_node_is_given_up_before_what_the_others_lent_comes_too_late(with_two_nodes):
    async def body(reader: Reader, silent: BareNode, good: BareNode) -> None:
        silent.gate.open.clear()
        assert await reader.fetch(6.0) == places_of(good, silent)

    with_two_nodes(body)


def nonsense(field: str, value: int) -> Callable[[kvstore_pb2.MatchResponse], None]:
    return lambda response: setattr(response.pages[0], field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("offset_bytes", (1 << 64) - 1), ("offset_bytes", 1 << 62), ("num_bytes", 0), ("num_bytes", (1 << 64) - 1)],
)
def test_a_page_that_cannot_be_where_its_node_says_is_a_miss_alone(field, value, with_two_nodes):
    async def body(reader: Reader, liar: BareNode, good: BareNode) -> None:
        liar.gate.alter = nonsense(field, value)
        filled = await reader.fetch()
        assert filled > places_of(good, liar)
        assert len(filled) == NUM_PAGES - 1

    with_two_nodes(body)


def test_a_decoder_that_breaks_costs_one_nodes_pages_and_the_others_are_awaited(with_two_nodes, monkeypatch):
    """The fetch used to end with the first error while others were still writing into pages that it called settled."""

    async def body(reader: Reader, one: BareNode, two: BareNode) -> None:
        broken = KEYS[min(places_of(one, two))]

        def restore(page, *arguments):
            if page.key == broken:
                raise ZeroDivisionError
            return real(page, *arguments)

        real = stored_pages.restore
        monkeypatch.setattr(stored_pages, "restore", restore)
        assert await reader.fetch() == places_of(two, one)

    with_two_nodes(body)
