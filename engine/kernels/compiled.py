"""How kernels are compiled: without the GIL, and once per machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def _cache_folder() -> Path:
    """Where compiled kernels lie: a folder per state of this package's sources.

    numba's own cache looks only at the file that holds the function: after an edit of simd.py it would go on using the
    old machine code of the kernels that inline it.
    """
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root) / "headrace" / f"kernels-{digest.hexdigest()}"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or a read-only one: compile anew in each process rather than fail
        return Path(tempfile.mkdtemp(prefix="headrace-kernels-"))
    return folder


_CACHE_FOLDER = str(_cache_folder())


def kernel(function: Callable[..., Any]) -> Any:
    """A part of a kernel, compiled for the types it is first called with. Only other kernels can call it."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def entry(function: Callable[..., Any]) -> Any:
    """A kernel that Python calls; the GIL is free while it runs."""
    return _compiled(function, nogil=True, no_cfunc_wrapper=True)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Neither fastmath nor contraction: see simd.py."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _CACHE_FOLDER  # read when the function is wrapped; other users of numba keep their own
    try:
        return numba.njit(function, cache=True, boundscheck=False, error_model="numpy", **options)
    finally:
        numba.config.CACHE_DIR = before
