"""Shared by all tests: one torch thread, since two collapse when a neighbour takes a core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
