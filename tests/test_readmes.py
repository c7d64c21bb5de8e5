"""READMEs cite files; files move. Every top-level folder has a README, and every path in one exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
SUFFIXES = (".py", ".proto", ".yaml", ".md", ".toml")


NOT_OURS = re.compile(r"\.(?!ci|github|gitignore).*|__pycache__|_gen|build|dist|.*\.egg-info")
"""Names of what may lie in a checkout and is not part of it, for where git cannot be asked."""


def files_of(root: Path) -> list[Path]:
    """Files of the repository, relative to it, so that build outputs and virtual environments are left out.

    An unpacked archive has no .git, and a machine need not have git: there the tree is walked.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if (root / ".git").exists() and shutil.which("git") is not None:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        return [Path(line) for line in listed.stdout.splitlines()]
    return sorted(walked(root, Path()))


def walked(root: Path, folder: Path) -> Iterator[Path]:
    for entry in (root / folder).iterdir():
        if NOT_OURS.fullmatch(entry.name):
            continue
        if entry.is_dir():
            yield from walked(root, folder / entry.name)
        else:
            yield folder / entry.name


FILES = files_of(ROOT)
READMES = sorted(path for path in FILES if path.suffix == ".md")
FOLDERS = sorted({path.parts[0] for path in FILES if len(path.parts) > 1 and not path.parts[0].startswith(".")})


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_top_level_folder_has_a_readme(folder: str) -> None:
    assert (ROOT / folder / "README.md").is_file()


def cited(text: str) -> list[str]:
    """Paths in a README: targets of links, and code that looks like a path from the repository's root."""
    links = [target for target in LINK.findall(text) if "://" not in target]
    code = [word for span in CODE.findall(text) for word in span.split() if "/" in word and word.endswith(SUFFIXES)]
    return links + [word for word in code if not word.startswith(("/", "~", "$", "http"))]


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_every_path_in_a_readme_exists(readme: Path) -> None:
    text = (ROOT / readme).read_text()
    missing = [
        target
        for target in cited(text)
        if not (ROOT / target).exists() and not (ROOT / readme.parent / target).exists()
    ]
    assert missing == []


def test_paths_are_found_in_links_and_in_code() -> None:
    text = (
        "See [the spec](deploy/specs/laptop.yaml), [us](https://x.org/a.md) and `engine/core.py`, or `pip install x/y`."
    )
    assert cited(text) == ["deploy/specs/laptop.yaml", "engine/core.py"]


def test_the_readme_names_every_top_level_folder() -> None:
    text = (ROOT / "README.md").read_text()
    assert [folder for folder in FOLDERS if f"[{folder}]({folder}/README.md)" not in text] == []


def test_without_git_the_tree_is_walked_and_what_is_not_ours_is_left_out(tmp_path: Path) -> None:
    for name in (
        "README.md",
        ".ci/run",
        "protos/README.md",
        "protos/_gen/a_pb2.py",
        ".venv/lib/README.md",
        "engine/__pycache__/core.pyc",
        "engine/core.py",
        ".mypy_cache/README.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert files_of(tmp_path) == [Path(name) for name in (".ci/run", "README.md", "engine/core.py", "protos/README.md")]
