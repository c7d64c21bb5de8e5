"""The catalog's contract, on every store that it may stand on."""

from __future__ import annotations

import asyncio

import fakeredis
import pytest

from cluster.catalog import (
    AuditEntry,
    Catalog,
    CatalogCorrupt,
    CatalogUnavailable,
    ControlLockHeld,
    Fenced,
    Placement,
    Roster,
    RosterEntry,
)

ROSTER = Roster(membership_epoch=7, nodes={"kv-0": RosterEntry(incarnations=("b", "a"), present=True, restarts=1)})


def test_a_cluster_id_is_given_once_and_kept(open_catalog):
    async def check() -> None:
        async with open_catalog() as one, open_catalog() as other:
            first = await one.cluster_id()
            assert first
            assert await other.cluster_id() == first

    asyncio.run(check())


def test_a_new_catalog_is_empty(open_catalog):
    async def check() -> None:
        async with open_catalog() as catalog:
            await catalog.ping()
            assert await catalog.placement() is None
            assert await catalog.control_address() is None
            assert await catalog.roster() == Roster()
            assert await catalog.audit_log(10) == []

    asyncio.run(check())


def test_facts_come_back_as_they_were_stored(open_catalog):
    async def check() -> None:
        async with open_catalog() as catalog:
            epoch = await catalog.acquire_control("a", ttl_s=60)
            await catalog.set_placement(Placement(counts={"prefill": 1, "kv": 2}), actor="headrace up")
            await catalog.store_roster(ROSTER, epoch=epoch)
            await catalog.set_control_address("127.0.0.1:5", epoch=epoch)
        async with open_catalog() as catalog:
            assert await catalog.placement() == Placement(counts={"prefill": 1, "kv": 2})
            assert await catalog.roster() == ROSTER
            assert await catalog.control_address() == "127.0.0.1:5"

    asyncio.run(check())


def test_the_audit_log_tells_the_newest_first_with_the_stores_own_time(open_catalog):
    async def check() -> None:
        async with open_catalog() as catalog:
            epoch = await catalog.acquire_control("a", ttl_s=60)
            await catalog.set_placement(Placement(counts={"decode": 3}), actor="headrace up")
            for details in ("all", "decode-0"):
                await catalog.record(AuditEntry(actor="me", action="evict-prefixes", details=details), epoch=epoch)
            log = await catalog.audit_log(10)
            assert [(entry.actor, entry.action) for entry in log] == [
                ("me", "evict-prefixes"),
                ("me", "evict-prefixes"),
                ("headrace up", "set-placement"),
            ]
            assert [entry.details for entry in log[:2]] == ["decode-0", "all"]
            assert log[0].at_unix_s >= log[2].at_unix_s > 1.7e9
            assert await catalog.audit_log(1) == log[:1]

    asyncio.run(check())


def test_only_one_control_plane_holds_the_lock_and_the_next_gets_a_newer_epoch(open_catalog):
    async def check() -> None:
        async with open_catalog() as a, open_catalog() as b:
            first = await a.acquire_control("a", ttl_s=60)
            with pytest.raises(ControlLockHeld) as raised:
                await b.acquire_control("b", ttl_s=60)
            assert raised.value.holder == "a"
            assert 0 < raised.value.expires_in_s <= 60
            await b.release_control("b")  # Not its to give.
            with pytest.raises(ControlLockHeld):
                await b.acquire_control("b", ttl_s=60)
            await a.release_control("a")
            second = await b.acquire_control("b", ttl_s=60)
            assert second > first
            assert await b.renew_control("b", second, ttl_s=60) == "held"

    asyncio.run(check())


def test_asking_again_for_a_lock_that_one_holds_gives_it_again_with_a_newer_epoch(open_catalog):
    """The first answer may have been lost on the way."""

    async def check() -> None:
        async with open_catalog() as catalog:
            first = await catalog.acquire_control("a", ttl_s=60)
            assert await catalog.acquire_control("a", ttl_s=60) == first + 1

    asyncio.run(check())


def test_a_lock_that_ran_out_goes_on_if_nobody_took_it(open_catalog):
    async def check() -> None:
        async with open_catalog() as catalog:
            epoch = await catalog.acquire_control("a", ttl_s=60)
            await catalog.release_control("a")
            assert await catalog.renew_control("a", epoch, ttl_s=60) == "held"
            with pytest.raises(ControlLockHeld):
                await catalog.acquire_control("b", ttl_s=60)

    asyncio.run(check())


def test_a_control_plane_that_was_replaced_is_fenced_in_all_its_writes(open_catalog):
    async def check() -> None:
        async with open_catalog() as old, open_catalog() as new:
            stale = await old.acquire_control("old", ttl_s=0.001)
            while True:
                try:
                    fresh = await new.acquire_control("new", ttl_s=60)
                    break
                except ControlLockHeld:
                    await asyncio.sleep(0)
            await new.set_control_address("new:1", epoch=fresh)
            entry = AuditEntry(actor="me", action="evict-prefixes", details="")
            for write in (
                lambda: old.renew_control("old", stale, ttl_s=60),
                lambda: old.set_control_address("old:1", epoch=stale),
                lambda: old.store_roster(ROSTER, epoch=stale),
                lambda: old.record(entry, epoch=stale),
            ):
                with pytest.raises(Fenced) as raised:
                    await write()
                assert (raised.value.epoch, raised.value.newer) == (stale, fresh)
            assert await old.control_address() == "new:1"
            assert await old.roster() == Roster()
            assert await old.audit_log(1) == []
            assert await new.renew_control("new", fresh, ttl_s=60) == "held"

    asyncio.run(check())


def test_a_store_that_lost_its_data_gets_the_epoch_back_and_fences_older_ones():
    """A Redis without persistence that restarts must neither stop the control plane nor hand out its epoch again."""

    async def check() -> None:
        server = fakeredis.FakeServer()
        client = fakeredis.FakeAsyncRedis(server=server, decode_responses=True)
        async with Catalog(client, cluster="c") as catalog:
            await catalog.acquire_control("a", ttl_s=60)
            await catalog.release_control("a")
            newest = await catalog.acquire_control("b", ttl_s=60)
            await client.flushall()
            assert await catalog.renew_control("a", newest - 1, ttl_s=60) == "restored"
            assert await catalog.renew_control("b", newest, ttl_s=60) == "restored"
            with pytest.raises(Fenced):
                await catalog.renew_control("a", newest - 1, ttl_s=60)
            await catalog.release_control("b")
            assert await catalog.acquire_control("c", ttl_s=60) == newest + 1

    asyncio.run(check())


def test_an_unreachable_catalog_raises_for_every_call_and_works_again_later():
    async def check() -> None:
        server = fakeredis.FakeServer()
        async with Catalog(fakeredis.FakeAsyncRedis(server=server, decode_responses=True), cluster="c") as catalog:
            epoch = await catalog.acquire_control("a", ttl_s=60)
            server.connected = False
            for call in (
                catalog.ping,
                catalog.cluster_id,
                catalog.placement,
                catalog.roster,
                catalog.control_address,
                lambda: catalog.audit_log(1),
                lambda: catalog.acquire_control("b", ttl_s=60),
                lambda: catalog.renew_control("a", epoch, ttl_s=60),
                lambda: catalog.release_control("a"),
                lambda: catalog.store_roster(ROSTER, epoch=epoch),
                lambda: catalog.set_placement(Placement(counts={}), actor="me"),
            ):
                with pytest.raises(CatalogUnavailable):
                    await call()
            server.connected = True
            assert await catalog.renew_control("a", epoch, ttl_s=60) == "held"

    asyncio.run(check())


def test_nobody_listening_is_unavailable_and_not_another_error(tmp_path):
    async def check() -> None:
        async with Catalog.open(f"unix://{tmp_path}/nobody.sock", cluster="c") as catalog:
            with pytest.raises(CatalogUnavailable):
                await catalog.ping()

    asyncio.run(check())


@pytest.mark.parametrize(
    "nonsense", ["", "[]", "{}", '{"counts": 3}', '{"counts": {"kv": -1}}', '{"counts": {"kv": "x"}}']
)
def test_a_placement_that_somebody_else_wrote_is_named_and_not_guessed_at(nonsense):
    async def check() -> None:
        client = fakeredis.FakeAsyncRedis(decode_responses=True)
        await client.set("headrace:{c}:placement", nonsense)
        async with Catalog(client, cluster="c") as catalog:
            with pytest.raises(CatalogCorrupt, match="placement"):
                await catalog.placement()

    asyncio.run(check())


@pytest.mark.parametrize("nonsense", ["7", "{}", '{"membership_epoch": 1, "nodes": {"a": {}}}'])
def test_a_roster_that_somebody_else_wrote_is_named_and_not_guessed_at(nonsense):
    async def check() -> None:
        client = fakeredis.FakeAsyncRedis(decode_responses=True)
        await client.set("headrace:{c}:roster", nonsense)
        async with Catalog(client, cluster="c") as catalog:
            with pytest.raises(CatalogCorrupt, match="roster"):
                await catalog.roster()

    asyncio.run(check())


def test_clusters_that_share_a_store_do_not_meet(store):
    async def check() -> None:
        async with store("left") as left, store("right") as right:
            await left.acquire_control("a", ttl_s=60)
            await right.acquire_control("b", ttl_s=60)
            await left.set_placement(Placement(counts={"kv": 1}), actor="me")
            assert await right.placement() is None

    asyncio.run(check())


@pytest.mark.parametrize("url", ["embedded", "http://localhost", "", "redis"])
def test_a_url_of_another_kind_is_refused(url):
    with pytest.raises(ValueError, match="redis://"):
        Catalog.open(url, cluster="c")
