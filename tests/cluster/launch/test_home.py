"""What a launcher leaves on disk, and what becomes of it when the launcher is killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cluster.launch import Addresses, AlreadyRunning, ClusterHome, running_clusters
from cluster.launch.home import stale_clusters
from cluster.launch.processes import processes_in, start_ticks

ADDRESSES = Addresses(
    cluster="a",
    http="127.0.0.1:1",
    grpc="127.0.0.1:2",
    control="127.0.0.1:3",
    ray="127.0.0.1:4",
    catalog="unix:///x",
    models=["m"],
    launcher_pid=os.getpid(),
    started_unix_s=0.0,
)


def test_a_run_is_seen_while_its_launcher_lives_and_gone_once_cleared(tmp_path: Path) -> None:
    home = ClusterHome("a", tmp_path)
    assert running_clusters(tmp_path) == []
    with home.hold():
        run_folder = home.begin()
        home.publish(ADDRESSES)
        assert running_clusters(tmp_path) == ["a"]
        assert home.addresses() == ADDRESSES
        assert home.clear() == []
    assert running_clusters(tmp_path) == stale_clusters(tmp_path) == []
    assert home.addresses() is None
    assert not run_folder.exists()


def test_a_second_launcher_is_told_who_has_the_cluster(tmp_path: Path) -> None:
    home = ClusterHome("a", tmp_path)
    with home.hold():
        home.begin()
        with (
            pytest.raises(AlreadyRunning, match=rf"process {os.getpid()}.*headrace down"),
            ClusterHome("a", tmp_path).hold(),
        ):
            pass
        with ClusterHome("b", tmp_path).hold():
            pass  # another cluster is nobody's business
        home.clear()


def test_a_run_whose_launcher_was_killed_is_cleared_with_its_processes(tmp_path: Path) -> None:
    launcher = textwrap.dedent(
        """
        import os, signal, subprocess, sys
        from pathlib import Path
        from cluster.launch import ClusterHome
        home = ClusterHome("a", Path(sys.argv[1]))
        with home.hold():
            os.chdir(home.begin() / "cwd")
            child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            print(child.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", launcher, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    orphan = int(done.stdout)
    assert start_ticks(orphan) is not None
    home = ClusterHome("a", tmp_path)
    killed = home.launcher()
    assert killed is not None
    assert not killed.alive
    assert running_clusters(tmp_path) == []
    assert stale_clusters(tmp_path) == ["a"]
    with home.hold():
        assert home.clear() == [orphan]
    assert start_ticks(orphan) is None
    assert not Path(killed.run_folder).exists()
    assert stale_clusters(tmp_path) == []


def test_a_launcher_is_not_mistaken_for_a_later_process_of_the_same_id(tmp_path: Path) -> None:
    home = ClusterHome("a", tmp_path)
    with home.hold():
        home.begin()
    path = tmp_path / "a" / "launcher.json"
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    path.write_text(path.read_text().replace(str(ticks), str(ticks - 1)))
    assert stale_clusters(tmp_path) == ["a"]
    with home.hold():
        home.clear()


def test_secrets_are_for_the_owner_alone(tmp_path: Path) -> None:
    home = ClusterHome("a", tmp_path)
    with home.hold():
        token = home.ray_token()
        assert token == home.ray_token()
        assert len(token.read_text()) == 64
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700


def test_processes_are_found_by_the_folder_they_run_in(tmp_path: Path) -> None:
    with (
        subprocess.Popen(["sleep", "600"], cwd=tmp_path) as inside,
        subprocess.Popen(["sleep", "600"], cwd="/") as outside,
    ):
        assert processes_in(tmp_path) == [inside.pid]
        inside.kill()
        outside.kill()
