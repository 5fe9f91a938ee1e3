"""Vectors of float32 as numba values: what the CPU kernel needs of a machine's vector unit.

Loops in numba vectorise only when LLVM can prove what it cannot see through array views. Here a vector is a value
of its own, so each line below is one instruction (two where `LANES` is twice the machine's width) on any machine
that LLVM knows, and nothing but numba is needed to compile it.

Memory is addressed by integers (bytes). Nothing checks them: callers work out every address from checked shapes.
"""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import register_model

LANES = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8

# element kinds of the tensors that are read and written
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

# a type checker would ask callers for the typing context, which numba supplies
intrinsic: Any = extending.intrinsic

_f32 = ir.FloatType()
_i1, _i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_half = ir.HalfType()


class _Vector(types.Type):
    def __init__(self):
        super().__init__(name=f"float32x{LANES}")


vector = _Vector()
_VECTOR = ir.VectorType(_f32, LANES)
_INTS = ir.VectorType(_i32, LANES)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, _VECTOR)


def _splat(builder, value):
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, value, _i32(0))
    return builder.shuffle_vector(first, nothing, _constant(0, _INTS))


def _constant(value, kind=_VECTOR):
    return ir.Constant(kind, [value] * LANES)


def _load(builder, address, kind):
    # inputs may start at any element: nothing is assumed of their alignment
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def _store(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=2)


def _fma(builder, x, y, z):
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [x, y, z])


@intrinsic
def zero(typingctx):
    """All lanes 0."""
    return vector(), lambda context, builder, signature, args: _constant(0.0)


@intrinsic
def one(typingctx):
    """All lanes 1."""
    return vector(), lambda context, builder, signature, args: _constant(1.0)


@intrinsic
def full(typingctx, value):
    """A number in every lane."""
    return vector(types.float32), lambda context, builder, signature, args: _splat(builder, args[0])


@intrinsic
def load(typingctx, address):
    """`LANES` floats from `address` on."""
    return vector(types.int64), lambda context, builder, signature, args: _load(builder, args[0], _VECTOR)


@intrinsic
def splat(typingctx, address):
    """The float at `address` in every lane."""
    return vector(types.int64), lambda context, builder, signature, args: _splat(builder, _load(builder, args[0], _f32))


@intrinsic
def store(typingctx, value, address):
    """Writes the lanes from `address` on."""

    def codegen(context, builder, signature, args):
        _store(builder, args[0], args[1])
        return context.get_dummy_value()

    return types.none(vector, types.int64), codegen


@intrinsic
def prefetch(typingctx, address):
    """Asks for the cache line at `address`, which need not be one of the process."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _i8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [_i8.as_pointer(), _i32, _i32, _i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # to read, into every level, data
        builder.call(function, [pointer, _i32(0), _i32(3), _i32(1)])
        return context.get_dummy_value()

    return types.none(types.int64), codegen


@intrinsic
def mul(typingctx, x, y):
    """x * y"""
    return vector(vector, vector), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def add(typingctx, x, y):
    """x + y"""
    return vector(vector, vector), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def sub(typingctx, x, y):
    """x - y"""
    return vector(vector, vector), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def div(typingctx, x, y):
    """x / y"""
    return vector(vector, vector), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def maximum(typingctx, x, y):
    """The larger of x and y; y where x is NaN."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), codegen


@intrinsic
def sqrt(typingctx, x):
    """The square root."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.sqrt.v{LANES}f32"), args)

    return vector(vector), codegen


@intrinsic
def fma(typingctx, x, y, z):
    """x * y + z, rounded once"""
    return vector(vector, vector, vector), lambda context, builder, signature, args: _fma(builder, *args)


@intrinsic
def exp(typingctx, x):
    """e^x to one unit in the last place; 0 below -87.3, at most e^88; NaN stays NaN."""

    def codegen(context, builder, signature, args):
        (x,) = args
        for limit, outside in ((-88.0, "<"), (88.0, ">")):
            x = builder.select(builder.fcmp_ordered(outside, x, _constant(limit)), _constant(limit), x)
        # x = n ln 2 + rest, |rest| <= ln(2) / 2; adding 1.5 * 2^23 rounds to an integer
        magic = _constant(12582912.0)
        shifted = _fma(builder, x, _constant(1.4426950408889634), magic)
        n = builder.fsub(shifted, magic)
        rest = _fma(builder, n, _constant(-0.693145751953125), x)
        rest = _fma(builder, n, _constant(-1.428606765330187e-06), rest)
        power = _constant(1 / 5040)
        for factorial in (720, 120, 24, 6, 2, 1, 1):
            power = _fma(builder, power, rest, _constant(1 / factorial))
        # 2^n by its exponent bits; n = -127 gives 0
        exponent = builder.add(builder.bitcast(shifted, _INTS), _constant(127, _INTS))
        scale = builder.bitcast(builder.shl(exponent, _constant(23, _INTS)), _VECTOR)
        return builder.fmul(power, scale)

    return vector(vector), codegen


@intrinsic
def load_bfloat16(typingctx, address):
    """`LANES` bfloat16 numbers from `address` on."""

    def codegen(context, builder, signature, args):
        bits = builder.zext(_load(builder, args[0], ir.VectorType(_i16, LANES)), _INTS)
        return builder.bitcast(builder.shl(bits, _constant(16, _INTS)), _VECTOR)

    return vector(types.int64), codegen


@intrinsic
def store_bfloat16(typingctx, value, address):
    """Rounds to the nearest bfloat16, ties to even."""

    def codegen(context, builder, signature, args):
        value, address = args
        bits = builder.bitcast(value, _INTS)
        odd = builder.and_(builder.lshr(bits, _constant(16, _INTS)), _constant(1, _INTS))
        rounded = builder.add(builder.add(bits, _constant(0x7FFF, _INTS)), odd)
        # the carry would turn some NaN into infinity
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), _constant(0x7FC00000, _INTS), rounded)
        upper = builder.trunc(builder.lshr(rounded, _constant(16, _INTS)), ir.VectorType(_i16, LANES))
        _store(builder, upper, address)
        return context.get_dummy_value()

    return types.none(vector, types.int64), codegen


@intrinsic
def load_float16(typingctx, address):
    """`LANES` float16 numbers from `address` on."""

    def codegen(context, builder, signature, args):
        return builder.fpext(_load(builder, args[0], ir.VectorType(_half, LANES)), _VECTOR)

    return vector(types.int64), codegen


@intrinsic
def store_float16(typingctx, value, address):
    """Rounds to the nearest float16, ties to even."""

    def codegen(context, builder, signature, args):
        _store(builder, builder.fptrunc(args[0], ir.VectorType(_half, LANES)), args[1])
        return context.get_dummy_value()

    return types.none(vector, types.int64), codegen


def _butterfly(builder, x, y, step):
    """Swaps the off-diagonal halves of 2 x 2 blocks of `step` lanes: one stage of a transposition."""

    def shuffle(pick):
        mask = ir.Constant(ir.VectorType(_i32, LANES), [pick(lane, lane & step) for lane in range(LANES)])
        return builder.shuffle_vector(x, y, mask)

    first = shuffle(lambda lane, high: LANES + lane - step if high else lane)
    second = shuffle(lambda lane, high: LANES + lane if high else lane + step)
    return first, second


def _rows(builder, address, stride):
    return [builder.add(address, builder.mul(stride, _i64(row))) for row in range(LANES)]


@intrinsic
def transpose(typingctx, target, target_stride, source, source_stride):
    """Copies a `LANES` x `LANES` block, rows to columns; strides in bytes."""

    def codegen(context, builder, signature, args):
        target, target_stride, source, source_stride = args
        rows = [_load(builder, row, _VECTOR) for row in _rows(builder, source, source_stride)]
        step = LANES // 2
        while step:
            for i in range(LANES):
                if not i & step:
                    rows[i], rows[i + step] = _butterfly(builder, rows[i], rows[i + step], step)
            step //= 2
        for row, to in zip(rows, _rows(builder, target, target_stride), strict=True):
            _store(builder, row, to)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4), codegen


@intrinsic
def sums(typingctx, address):
    """The sums of `LANES` consecutive vectors, one in each lane."""

    def codegen(context, builder, signature, args):
        rows = [_load(builder, row, _VECTOR) for row in _rows(builder, args[0], _i64(4 * LANES))]
        step = LANES // 2
        while step:
            rows = [builder.fadd(*_butterfly(builder, rows[i], rows[i + step], step)) for i in range(step)]
            step //= 2
        return rows[0]

    return vector(types.int64), codegen


@intrinsic
def total(typingctx, x):
    """The sum of the lanes, in every lane."""

    def codegen(context, builder, signature, args):
        (x,) = args
        step = LANES // 2
        while step:
            mask = ir.Constant(_INTS, [lane ^ step for lane in range(LANES)])
            x = builder.fadd(x, builder.shuffle_vector(x, x, mask))
            step //= 2
        return x

    return vector(vector), codegen


@intrinsic
def fetch_add(typingctx, address):
    """Adds one to the int64 at `address` and returns what it was; what a thread wrote before is seen by those that
    count after it."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _i64.as_pointer())
        return builder.atomic_rmw("add", pointer, _i64(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def wait_for(typingctx, address, count):
    """Spins until the int64 at `address`, which other threads count up, is `count`; see `fetch_add`."""

    def codegen(context, builder, signature, args):
        address, count = args
        pointer = builder.inttoptr(address, _i64.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [])
        pause = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
        test, spin, done = (builder.append_basic_block(name) for name in ("test", "spin", "done"))
        builder.branch(test)
        builder.position_at_end(test)
        reached = builder.icmp_signed(">=", builder.load_atomic(pointer, "acquire", 8), count)
        builder.cbranch(reached, done, spin)
        builder.position_at_end(spin)
        builder.call(pause, [])
        builder.branch(test)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


# flush-to-zero and denormals-are-zero of the MXCSR register
_FLUSH = 0x8040


def _mxcsr(builder, name, slot):
    pointer = builder.bitcast(slot, _i8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [_i8.as_pointer()])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [pointer])


@intrinsic
def flush_denormals(typingctx):
    """Takes denormal numbers for zero in this thread from now on; returns what `restore` needs."""

    def codegen(context, builder, signature, args):
        slot = builder.alloca(_i32)
        _mxcsr(builder, "llvm.x86.sse.stmxcsr", slot)
        before = builder.load(slot)
        builder.store(builder.or_(before, _i32(_FLUSH)), slot)
        _mxcsr(builder, "llvm.x86.sse.ldmxcsr", slot)
        return before

    return types.int32(), codegen


@intrinsic
def restore_denormals(typingctx, before):
    """Undoes `flush_denormals`."""

    def codegen(context, builder, signature, args):
        slot = builder.alloca(_i32)
        builder.store(args[0], slot)
        _mxcsr(builder, "llvm.x86.sse.ldmxcsr", slot)
        return context.get_dummy_value()

    return types.none(types.int32), codegen
