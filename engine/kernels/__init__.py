"""The arithmetic of the CPU engine: numba kernels that read pages in place and fix the order of every sum.

Importing a module of this package compiles nothing; `warm_up` does, or loads what an earlier process compiled.
"""
