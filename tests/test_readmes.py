"""READMEs cite files; files move. Every top-level folder has a README, and every path in one exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
SUFFIXES = (".py", ".proto", ".yaml", ".md", ".toml")


def tracked() -> list[Path]:
    """Files of the repository, so that build outputs and virtual environments are left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.splitlines()]


FILES = tracked()
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
