"""How the threads that run one kernel together wait for each other."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.kernels.compiled import kernel
from engine.kernels.simd import emit_pointer

_SPINS = 2000
"""Looks before the core is offered to others: some microseconds, longer than siblings that run are apart. A sibling
that another process has displaced would be waited for in vain."""

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _count_one(typing: Any, counter: Any) -> Any:
    """Atomically counter[0] += 1; everything written before it is seen by whoever sees the count."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = context.get_constant(types.intp, 0)
        pointer = emit_pointer(context, builder, signature.args[0], args[0], zero)
        builder.atomic_rmw("add", pointer, pointer.type.pointee(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(counter), emit


@intrinsic
def _counted(typing: Any, counter: Any) -> Any:
    """Atomically counter[0]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = context.get_constant(types.intp, 0)
        pointer = emit_pointer(context, builder, signature.args[0], args[0], zero)
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(counter), emit


@kernel
def meet(counter, expected):
    """Returns when `expected` arrivals have been counted since the counter was 0, this one included.

    counter: int64 [1]. With n threads the k-th meeting expects k * n.
    """
    _count_one(counter)
    spins = 0
    while _counted(counter) < expected:
        spins += 1
        if spins > _SPINS:
            _sched_yield()
