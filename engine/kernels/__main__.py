"""`python -m engine.kernels` compiles all kernels for this machine, so that the first start need not."""

from __future__ import annotations

from engine.kernels.warm import warm_up

if __name__ == "__main__":
    for dtype in ("bfloat16", "float32"):
        warm_up(dtype)
