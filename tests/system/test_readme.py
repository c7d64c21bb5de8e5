"""The README's first requests, run as they stand there, but for the addresses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.cluster import DEADLINE_S, Cluster
from tests.system.conftest import SMOL

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=["curl", "openai", "grpc"])
def test_a_request_of_the_readme_is_answered(cluster: Cluster, language: str, code: str) -> None:
    addresses = cluster.status()["addresses"]
    for written, actual in (
        ("127.0.0.1:8000", addresses["http"]),
        ("127.0.0.1:8001", addresses["grpc"]),
        ("smollm2-135m-instruct", SMOL),
    ):
        code = code.replace(written, actual)
    command = ["bash", "-c", code] if language == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said = "".join(re.findall(r'"content": ?"([^"]*)"', done.stdout)) if language == "bash" else done.stdout
    assert len(said) > 20, done.stdout
