"""The command line as a person meets it where no cluster runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.launch import HOME_VARIABLE, Addresses, ClusterHome
from cluster.spec import HEADING, Spec, parse_spec, render_spec


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return tmp_path


def test_without_a_command_it_says_what_there_is_and_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("up", "down", "status", "chat", "flush", "spec", "version"))
    assert "no cluster runs here; `headrace up` starts one" in said


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["chat"], ["flush"], ["status", "--cluster", "x"]]
)
def test_without_a_cluster_commands_say_how_to_start_one(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("headrace: no cluster")
    assert "`headrace up` starts one" in said.err
    assert said.err.count("\n") == 1


def test_stopping_where_nothing_runs_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down"]) == 0
    assert main(["down", "--cluster", "x"]) == 0
    assert capsys.readouterr().out == "no cluster runs here\nno cluster x runs here\n"


def test_wrong_use_is_told_apart_from_failure() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fly"])
    with pytest.raises(SystemExit, match="2"):
        main(["chat", "--max-tokens", "0"])


def test_the_printed_default_spec_is_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec"]) == 0
    said = capsys.readouterr().out
    assert said == render_spec(Spec(), HEADING)
    assert parse_spec(said, name="x", folder=Path("/")).spec == Spec()


def test_a_file_is_checked_and_completed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("cluster: mine\nkv: {replicas: 5}\n")
    assert main(["spec", str(file)]) == 0
    assert parse_spec(capsys.readouterr().out, name="x", folder=Path("/")).spec.kv.replicas == 5


@pytest.mark.parametrize("command", [["spec"], ["up", "--spec"], ["up", "--detach", "--spec"]])
def test_a_wrong_spec_stops_before_anything_starts(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("cluster: mine\nkvs: {}\n")
    assert main([*command, str(file)]) == 1
    assert capsys.readouterr().err == f"headrace: {file}:2: kvs: no such field; did you mean kv?\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_pool_that_is_too_small_is_found_with_the_models_own_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("decode:\n  - pool_bytes: 64MiB\n")
    assert main(["spec", str(file)]) == 1
    assert "mine.yaml:2: decode[0].pool_bytes: 64MiB holds 182 pages" in capsys.readouterr().err


def test_versions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} >= {"headrace", "ray", "torch", "python"}


def running(home: Path, cluster: str, *, ready: bool) -> None:
    """Make this process look like the launcher of a cluster, with a control plane that does not answer."""
    folder = ClusterHome(cluster, home)
    with folder.hold():
        folder.begin()
        if ready:
            folder.publish(
                Addresses(
                    cluster=cluster,
                    http="127.0.0.1:9",
                    grpc="127.0.0.1:9",
                    control="127.0.0.1:9",
                    ray="",
                    catalog="",
                    models=["a"],
                    launcher_pid=os.getpid(),
                    started_unix_s=0.0,
                )
            )


def clear(home: Path, *clusters: str) -> None:
    for cluster in clusters:
        with ClusterHome(cluster, home).hold():
            ClusterHome(cluster, home).clear()


def test_a_cluster_that_is_starting_is_told_apart_from_none(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(home, "one", ready=False)
    assert main(["status"]) == 3
    assert "cluster one is not ready: it is starting or stopping" in capsys.readouterr().err
    clear(home, "one")


def test_among_several_clusters_one_must_be_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(home, "one", ready=True)
    running(home, "two", ready=True)
    assert main(["status"]) == 2
    assert "say which one with --cluster: one, two" in capsys.readouterr().err
    assert main(["status", "--cluster", "three"]) == 3
    assert "no cluster three runs here; there is one, two" in capsys.readouterr().err
    assert main(["chat", "--cluster", "one", "--model", "b", "--once", "hi"]) == 1
    assert "cluster one has no model b; it has a" in capsys.readouterr().err
    clear(home, "one", "two")


def test_a_control_plane_that_does_not_answer_is_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(home, "one", ready=True)
    assert main(["status"]) == 1
    assert main(["flush"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:3] for line in lines] == [
        ["headrace", "the control plane at 127.0.0.1:9", "UNAVAILABLE"]
    ] * 2
    clear(home, "one")


def test_what_a_killed_launcher_left_is_cleared_by_down(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(home, "one", ready=True)
    path = home / "one" / "launcher.json"
    path.write_text(path.read_text().replace(str(os.getpid()), "4194300"))
    run_folder = ClusterHome("one", home).launcher()
    assert main(["down"]) == 0
    assert capsys.readouterr().out == "cleared away what was left of cluster one\n"
    assert run_folder is not None
    assert not Path(run_folder.run_folder).exists()


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m cluster.cli spec | true"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=60
    )
    assert done.stderr == ""
