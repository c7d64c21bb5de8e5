"""A vector of 16 float32 for numba kernels, with exact control over every rounding.

LLVM splits it into what the CPU has (two AVX2 registers, one AVX-512 register, four NEON registers). Nothing here lets
the compiler reorder or fuse on its own: a kernel rounds where it says `mul`, `add` or `fma` and nowhere else, so its
results have the same bits on every CPU with a fused multiply-add. That is what the numeric contract rests on.

Arrays are C-contiguous and one-dimensional, float32 or uint16; uint16 holds bfloat16. Indices count elements and are
not checked. The functions work inside kernels only; `emit_*` are their bodies, for intrinsics that emit larger pieces.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
VECTOR = ir.VectorType(F32, LANES)
_INTS = ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(_I16, LANES)


class Vector(types.Type):
    """16 float32 in registers."""

    def __init__(self) -> None:
        super().__init__(name="headrace.Vector")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VECTOR)


def emit_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Address of `array[index]`."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def emit_floats(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def _ints(value: int) -> Any:
    return _same(_INTS, value)


def emit_splat(builder: Any, scalar: Any) -> Any:
    """The vector whose lanes are all `scalar`."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _ints(0))


def emit_load(builder: Any, pointer: Any) -> Any:
    """16 elements from `pointer` on; bfloat16 is widened, which is exact."""
    if pointer.type.pointee == F32:
        loaded = builder.load(builder.bitcast(pointer, VECTOR.as_pointer()))
        loaded.align = 4
        return loaded
    halves = builder.load(builder.bitcast(pointer, _HALVES.as_pointer()))
    halves.align = 2
    return builder.bitcast(builder.shl(builder.zext(halves, _INTS), _ints(16)), VECTOR)


def emit_store(builder: Any, value: Any, pointer: Any) -> None:
    """16 elements to `pointer` on; bfloat16 takes the nearest, ties to even."""
    if pointer.type.pointee == F32:
        builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer())).align = 4
        return
    narrow = builder.trunc(_emit_narrow(builder, builder.bitcast(value, _INTS)), _HALVES)
    builder.store(narrow, builder.bitcast(pointer, _HALVES.as_pointer())).align = 2


def _emit_narrow(builder: Any, bits: Any) -> Any:
    """float32 bits to bfloat16 bits, the nearest, ties to even; NaN stays NaN, which plain rounding could carry to
    infinity."""
    of = bits.type
    odd = builder.and_(builder.lshr(bits, _same(of, 16)), _same(of, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _same(of, 0x7FFF))), _same(of, 16))
    magnitude = builder.and_(bits, _same(of, 0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, _same(of, 0x7F800000))
    return builder.select(is_nan, _same(of, 0x7FC0), rounded)


def _same(int_type: Any, value: int) -> Any:
    """`value` as a constant of a scalar or vector type."""
    return ir.Constant(int_type, [value] * LANES if isinstance(int_type, ir.VectorType) else value)


def emit_call(builder: Any, name: str, *args: Any) -> Any:
    """LLVM's intrinsic `name` on vectors."""
    function_type = ir.FunctionType(VECTOR, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.{name}.v16f32"), args)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return emit_call(builder, "fma", a, b, c)


def _emit_halving(builder: Any, value: Any, combine: Any) -> Any:
    """Lanes i and i + width / 2 combined, until one is left: the one order of every sum over lanes."""
    width = LANES
    while width > 1:
        width //= 2
        low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
        undefined = ir.Constant(value.type, ir.Undefined)
        value = combine(builder.shuffle_vector(value, undefined, low), builder.shuffle_vector(value, undefined, high))
    return builder.extract_element(value, ir.Constant(_I32, 0))


def _emit_exp(builder: Any, x: Any) -> Any:
    """e ** x, within 2 ulp; x is clamped to [-87.3, 88.3], so that the result is neither 0 nor infinite.

    x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two pieces keeps r exact; the polynomial is Cephes' expf.
    """
    x = builder.select(builder.fcmp_ordered("<", x, emit_floats(-87.3)), emit_floats(-87.3), x)
    x = builder.select(builder.fcmp_ordered(">", x, emit_floats(88.3)), emit_floats(88.3), x)
    n = emit_call(builder, "roundeven", builder.fmul(x, emit_floats(1.44269504088896341)))
    r = emit_fma(builder, n, emit_floats(-0.693359375), x)
    r = emit_fma(builder, n, emit_floats(2.12194440e-4), r)
    y = emit_floats(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = emit_fma(builder, y, r, emit_floats(coefficient))
    y = builder.fadd(emit_fma(builder, y, builder.fmul(r, r), r), emit_floats(1.0))
    power = builder.shl(builder.add(builder.fptosi(n, _INTS), _ints(127)), _ints(23))
    return builder.fmul(y, builder.bitcast(power, VECTOR))


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """array[index : index + 16]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, emit_pointer(context, builder, signature.args[0], args[0], args[1]))

    return vector(array, types.intp), emit


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index : index + 16] = value."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_store(builder, args[2], emit_pointer(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), emit


@intrinsic
def load_one(typing: Any, array: Any, index: Any) -> Any:
    """array[index] as a float32 scalar."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = builder.load(emit_pointer(context, builder, signature.args[0], args[0], args[1]))
        if element.type == F32:
            return element
        return builder.bitcast(builder.shl(builder.zext(element, _I32), ir.Constant(_I32, 16)), F32)

    return types.float32(array, types.intp), emit


@intrinsic
def store_one(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, a float32 scalar."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = emit_pointer(context, builder, signature.args[0], args[0], args[1])
        if pointer.type.pointee == F32:
            builder.store(args[2], pointer)
        else:
            builder.store(builder.trunc(_emit_narrow(builder, builder.bitcast(args[2], _I32)), _I16), pointer)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), emit


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """All lanes `scalar`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_splat(builder, args[0])

    return vector(types.float32), emit


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def sub(typing: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def mul(typing: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def div(typing: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return vector(vector, vector, vector), lambda context, builder, signature, args: emit_fma(builder, *args)


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return vector(vector, vector), emit


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    return vector(vector), lambda context, builder, signature, args: _emit_exp(builder, args[0])


@intrinsic
def keep_first(typing: Any, value: Any, count: Any, fill: Any) -> Any:
    """Lanes from `count` on become `fill`, whatever they held."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(_INTS, list(range(LANES)))
        undefined = ir.Constant(_INTS, ir.Undefined)
        first = builder.insert_element(undefined, builder.trunc(args[1], _I32), ir.Constant(_I32, 0))
        counts = builder.shuffle_vector(first, undefined, _ints(0))
        return builder.select(builder.icmp_signed("<", lanes, counts), args[0], emit_splat(builder, args[2]))

    return vector(vector, types.intp, types.float32), emit


@intrinsic
def sum_lanes(typing: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_halving(builder, args[0], builder.fadd)

    return types.float32(vector), emit


@intrinsic
def max_lanes(typing: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_halving(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(vector), emit


@intrinsic
def transpose(typing: Any, source: Any, rows_at: Any, first: Any, column: Any, target: Any, target_at: Any) -> Any:
    """target[target_at + 16 c + r] = source[rows_at[first + r] + column + c] for r, c in 0..15.

    rows_at: int64. target: float32.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = []
        for r in range(LANES):
            place = emit_pointer(context, builder, signature.args[1], args[1], builder.add(args[2], args[2].type(r)))
            at = builder.add(builder.load(place), args[3])
            pointer = emit_pointer(context, builder, signature.args[0], args[0], at)
            halves = pointer.type.pointee != F32
            loaded = builder.load(builder.bitcast(pointer, (_HALVES if halves else _INTS).as_pointer()))
            loaded.align = 2 if halves else 4
            rows.append(loaded)
        for c, values in enumerate(_emit_transposed(builder, rows)):
            if values.type == _HALVES:
                values = builder.shl(builder.zext(values, _INTS), _ints(16))
            at = builder.add(args[5], args[5].type(c * LANES))
            emit_store(
                builder, builder.bitcast(values, VECTOR), emit_pointer(context, builder, signature.args[4], args[4], at)
            )
        return context.get_dummy_value()

    n = types.intp
    return types.void(source, rows_at, n, n, target, n), emit


def _emit_transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16: three rounds of interleaving transpose the 8 x 8 quarters, a last one puts them in their place.

    The rounds stay within halves of a vector, which AVX2 does in one instruction.
    """

    def shuffled(a: Any, b: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(_INTS, lanes))

    low = [lane for half in (0, 8) for i in range(4) for lane in (half + i, LANES + half + i)]
    high = [lane + 4 for lane in low]
    quarters = []
    for upper in (rows[:8], rows[8:]):
        for _ in range(3):
            upper = [shuffled(upper[i], upper[i + 4], lanes) for i in range(4) for lanes in (low, high)]
        quarters.append(upper)
    left = [*range(8), *range(LANES, LANES + 8)]
    right = [lane + 8 for lane in left]
    return [shuffled(quarters[0][c], quarters[1][c], lanes) for lanes in (left, right) for c in range(8)]
