"""Building blocks of compiled loops in float32: arrays at addresses, matrix products, and vectorisable functions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from .native import compiled


def _pointer(element: types.Type) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        """Return a pointer to the elements at an address."""

        def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the instructions."""
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generated

    return pointer


_float32, _int64, _uint16 = _pointer(types.float32), _pointer(types.int64), _pointer(types.uint16)


@njit(inline="always")
def floats(address, shape):
    """Return the array of float32 at an address."""
    return carray(_float32(address), shape)


@njit(inline="always")
def integers(address, shape):
    """Return the array of int64 at an address."""
    return carray(_int64(address), shape)


@njit(inline="always")
def halves(address, shape):
    """Return the array of bfloat16 at an address, as 2-byte integers."""
    return carray(_uint16(address), shape)


@njit(inline="always")
def exp(x):
    """Return e^x for a float32, within five units in the last place; 0 below -87, NaN for NaN.

    The C library's function would prevent vectorisation of the loop. Here x = k ln 2 + r, with ln 2 in two parts; e^r
    is a polynomial (that of Cephes' `expf`), and k is added to the exponent.
    """
    x = np.float32(88.3) if x > np.float32(88.3) else x
    k = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) - k * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(max(k, np.float32(-126))) + 127) << 23).view(np.float32)
    return np.float32(0) if x < np.float32(-87) else (p * r * r + r + np.float32(1)) * power


def _lines(short: bool, add: bool) -> Any:
    """Return a function that copies sixteen numbers, or with `add` adds them; with `short`, it reads bfloat16."""

    @intrinsic
    def lines(typing: Any, given: Any, into: Any) -> Any:
        """Copy or add the sixteen numbers at one address to another."""

        def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the instructions."""
            number, bits = ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.IntType(32), 16)
            kind = ir.VectorType(ir.IntType(16), 16) if short else number
            line = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()), align=2 if short else 4)
            if short:
                line = builder.bitcast(builder.shl(builder.zext(line, bits), ir.Constant(bits, [16] * 16)), number)
            place = builder.inttoptr(arguments[1], number.as_pointer())
            line = builder.fadd(builder.load(place, align=4), line) if add else line
            builder.store(line, place, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generated

    return lines


_copy16, _widen16, _add16 = _lines(False, False), _lines(True, False), _lines(False, True)


@compiled
def add(address, count, into):
    """Add `count` float32 numbers at `address` to those at `into`; `count` is a multiple of 16."""
    for c in range(0, count, 16):
        _add16(address + 4 * c, into + 4 * c)


@compiled
def read(address, size, count, into):
    """Copy `count` numbers of `size` bytes, 4 (float32) or 2 (bfloat16), at `address` to float32 at `into`."""
    whole = count // 16 * 16
    if size == 4:
        for c in range(0, whole, 16):
            _copy16(address + 4 * c, into + 4 * c)
        if whole < count:
            numbers, rest = floats(address + 4 * whole, (16,)), floats(into + 4 * whole, (16,))
            for c in range(count - whole):
                rest[c] = numbers[c]
    else:
        for c in range(0, whole, 16):
            _widen16(address + 2 * c, into + 4 * c)
        if whole < count:
            short, rest = halves(address + 2 * whole, (16,)), floats(into + 4 * whole, (16,))
            for c in range(count - whole):
                rest[c] = np.uint32(np.uint32(short[c]) << np.uint32(16)).view(np.float32)


def _tile(rows: int, lanes: int) -> Any:
    """Return a function for a matrix product of `rows` rows and `lanes` columns, with its sums in registers.

    It is written in vector instructions, because a compiled loop keeps the sums in memory and is three times slower.
    """

    @intrinsic
    def tile(typing: Any, a: Any, a_row: Any, a_inner: Any, b: Any, b_inner: Any, out: Any, out_row: Any,
             inner: Any, add: Any) -> Any:  # fmt: skip
        """Compute out = a b, or with `add` out += a b. Arrays are given as addresses and strides in elements."""

        def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the instructions."""
            builder.function.attributes.add("noinline")  # otherwise LLVM compiles it again for every call site
            a, a_row, a_inner, b, b_inner, out, out_row, inner, add = arguments
            number, index = ir.FloatType(), ir.IntType(64)
            vector, nothing = ir.VectorType(number, lanes), ir.Constant(ir.VectorType(number, lanes), ir.Undefined)
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), lanes), None)

            def place(address: Any, offset: Any) -> Any:
                """Return a pointer to the number at an offset from an address."""
                return builder.gep(builder.inttoptr(address, number.as_pointer()), [offset])

            def line(pointer: Any) -> Any:
                """Return a pointer to the `lanes` numbers that begin at a number."""
                return builder.bitcast(pointer, vector.as_pointer())

            counts = [ir.Constant(index, row) for row in range(rows)]
            results = [line(place(out, builder.mul(out_row, count))) for count in counts]
            sources = [place(a, builder.mul(a_row, count)) for count in counts]
            zero = ir.Constant(vector, None)
            before = [builder.select(add, builder.load(result, align=4), zero) for result in results]
            start, step, end = builder.block, builder.append_basic_block("step"), builder.append_basic_block("end")
            builder.cbranch(builder.icmp_signed(">", inner, ir.Constant(index, 0)), step, end)
            builder.position_at_end(step)
            k, sums = builder.phi(index), [builder.phi(vector) for _ in counts]
            line_B = builder.load(line(place(b, builder.mul(k, b_inner))), align=4)
            at, after = builder.mul(k, a_inner), []
            for source, total in zip(sources, sums, strict=True):
                value = builder.insert_element(nothing, builder.load(builder.gep(source, [at])), ir.Constant(index, 0))
                spread = builder.shuffle_vector(value, nothing, everywhere)
                product = builder.fmul(spread, line_B, flags=("contract",))
                after.append(builder.fadd(total, product, flags=("contract",)))
            following = builder.add(k, ir.Constant(index, 1))
            builder.cbranch(builder.icmp_signed("<", following, inner), step, end)
            first, later = (ir.Constant(index, 0), *before), (following, *after)
            builder.position_at_end(end)
            finished = [builder.phi(vector) for _ in counts]
            phis, firsts, laters = (k, *sums, *finished), first + first[1:], later + later[1:]
            for phi, first, later in zip(phis, firsts, laters, strict=True):
                phi.add_incoming(first, start)
                phi.add_incoming(later, step)
            for result, last in zip(results, finished, strict=True):
                builder.store(last, result, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8, types.boolean), generated

    return tile


_tile4, _tile2, _tile1, _narrow8, _narrow1 = _tile(4, 16), _tile(2, 16), _tile(1, 16), _tile(8, 8), _tile(1, 8)


@compiled
def multiply(a, a_row, a_inner, b, b_inner, out, out_row, rows, inner, columns, add):
    """Compute out[rows, columns] = a[rows, inner] b[inner, columns], or with `add` add to out.

    Arrays are given as addresses and strides in elements; the columns of b and out are contiguous. Columns are computed
    in multiples of 16, or 8 for up to eight columns; b and out must have room for these.
    """
    if columns <= 8:
        row = 0
        while row + 8 <= rows:
            _narrow8(a + 4 * row * a_row, a_row, a_inner, b, b_inner, out + 4 * row * out_row, out_row, inner, add)
            row += 8
        while row < rows:
            _narrow1(a + 4 * row * a_row, a_row, a_inner, b, b_inner, out + 4 * row * out_row, out_row, inner, add)
            row += 1
        return
    for column in range(0, columns, 16):
        b_at, out_at, row = b + 4 * column, out + 4 * column, 0
        while row + 4 <= rows:
            _tile4(a + 4 * row * a_row, a_row, a_inner, b_at, b_inner, out_at + 4 * row * out_row, out_row, inner, add)
            row += 4
        if row + 2 <= rows:
            _tile2(a + 4 * row * a_row, a_row, a_inner, b_at, b_inner, out_at + 4 * row * out_row, out_row, inner, add)
            row += 2
        if row < rows:
            _tile1(a + 4 * row * a_row, a_row, a_inner, b_at, b_inner, out_at + 4 * row * out_row, out_row, inner, add)


# Shuffle masks for the addition of two vectors: four rounds reduce sixteen vectors to their sixteen sums.
_FOURS = ([0, 16, 1, 17], [2, 18, 3, 19]), ([0, 1, 16, 17], [2, 3, 18, 19])
_ROUNDS = [[[at + i for at in (0, 4, 8, 12) for i in four] for four in pair] for pair in _FOURS]
_ROUNDS += [[[at + i for at in starts for i in range(4)] for starts in ((0, 8, 16, 24), (4, 12, 20, 28))]] * 2


def _line(builder: Any, address: Any) -> Any:
    """Load sixteen numbers at an address."""
    return builder.load(builder.inttoptr(address, ir.VectorType(ir.FloatType(), 16).as_pointer()), align=4)


def _dots(typing: Any, vector: Any, size: Any, entry: Any, step: Any, out: Any) -> Any:
    """Compute the dot products of a vector with sixteen others, `step` bytes apart; `size` is a multiple of 16."""

    def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Write the instructions."""
        vector, size, entry, step, out = arguments
        line, index = ir.VectorType(ir.FloatType(), 16), ir.IntType(64)
        entries = [builder.add(entry, builder.mul(step, ir.Constant(index, i))) for i in range(16)]
        start, again, end = builder.block, builder.append_basic_block("again"), builder.append_basic_block("end")
        builder.branch(again)
        builder.position_at_end(again)
        at, sums = builder.phi(index), [builder.phi(line) for _ in entries]
        left, after = _line(builder, builder.add(vector, at)), []
        for address, total in zip(entries, sums, strict=True):
            product = builder.fmul(left, _line(builder, builder.add(address, at)), flags=("contract",))
            after.append(builder.fadd(total, product, flags=("contract",)))
        following = builder.add(at, ir.Constant(index, 64))
        for phi, later in zip((at, *sums), (following, *after), strict=True):
            phi.add_incoming(ir.Constant(phi.type, None), start)
            phi.add_incoming(later, again)
        builder.cbranch(builder.icmp_signed("<", following, builder.mul(size, ir.Constant(index, 4))), again, end)
        builder.position_at_end(end)
        for pair in _ROUNDS:
            masks = [ir.Constant(ir.VectorType(ir.IntType(32), 16), mask) for mask in pair]
            lines = zip(after[::2], after[1::2], strict=True)
            after = [builder.fadd(*[builder.shuffle_vector(a, b, mask) for mask in masks]) for a, b in lines]
        builder.store(after[0], builder.inttoptr(out, line.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generated


def _peak(typing: Any, address: Any) -> Any:
    """Return the largest of 64 numbers at an address; NaN may be ignored."""

    def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Write the instructions."""

        def larger(a: Any, b: Any) -> Any:
            """Return the larger number of each pair."""
            return builder.select(builder.fcmp_ordered(">", b, a), b, a)

        places = [ir.Constant(ir.IntType(64), at) for at in (0, 64, 128, 192)]
        lines = [_line(builder, builder.add(arguments[0], place)) for place in places]
        best = functools.reduce(larger, lines)
        for apart in (8, 4, 2, 1):
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 16), [i ^ apart for i in range(16)])
            best = larger(best, builder.shuffle_vector(best, best, mask))
        return builder.extract_element(best, places[0])

    return types.float32(types.int64), generated


_dots16: Any = intrinsic(_dots)
peak: Any = intrinsic(_peak)


@compiled
def dots(groups, shared, size, vectors, entries, step, out, out_row):
    """Compute the dot products of groups * shared vectors with sixteen entries, out[groups * shared, 16].

    An entry is the concatenation of one vector per group; `shared` of the vectors are multiplied by it. `size` is a
    multiple of 16, and entries are `step` bytes apart.
    """
    for h in range(groups * shared):
        _dots16(vectors + 4 * h * size, size, entries + 4 * (h // shared) * size, step, out + 4 * h * out_row)
