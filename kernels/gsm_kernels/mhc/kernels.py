"""Triton kernels of the hyper-connections; `triton.py` describes how they work together.

Letters: N tokens, X streams of width D. A token has C = 2X + X*X numbers (phi . x / rms) and as many coefficients, in
the order read (X), write (X), mix (X x X, source then destination). Numbers are stored as [N, C], for matrix products.
Coefficients are stored as [C, N], so that one coefficient of neighbouring tokens is contiguous. Sums and coefficients
are in float32.
"""

# pyright: reportGeneralTypeIssues=false
# By their type hints, Triton's loops are not iterators.

import triton
import triton.language as tl


@triton.jit
def forward(
    streams_ptr, update_ptr, phi_ptr, bias_ptr, scale_ptr,
    left_ptr, mixed_ptr, number_ptr, inverse_ptr, coefficient_ptr, N, D, rounds, eps, hc_eps,
    X: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of tokens: the products with phi, the coefficients, then the results. The second pass over the
    streams finds them in the L2 cache."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = row < N
    C: tl.constexpr = 2 * X + X * X
    total, squares = _sums(streams_ptr, phi_ptr, row, inside, 0, X * D, X * D, C, WIDTH, PADDED, PRECISION)
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 1) / (X * D) + eps)
    c = tl.arange(0, PADDED)
    tl.store(number_ptr + row[:, None] * C + c, total * inverse[:, None], mask=inside[:, None] & (c < C))
    tl.store(inverse_ptr + row, inverse, mask=inside)
    # Numbers and coefficients have different register layouts, so they are exchanged through memory, here and below.
    tl.debug_barrier()
    live = inside[:, None]
    number = tl.load(number_ptr + row[:, None] * C + tl.arange(0, 2 * X), mask=live, other=0.0)
    logit = _mix_logit(number_ptr, bias_ptr, scale_ptr, row, inside, X)
    gate, matrix = _gates(number, bias_ptr, scale_ptr, hc_eps, X), _sinkhorn(logit, rounds, hc_eps)
    _keep_coefficients(coefficient_ptr, gate, matrix, row, live, N, X)
    tl.debug_barrier()
    coefficient = _vectors(coefficient_ptr, row, inside, N, C)
    _mix(streams_ptr, update_ptr, coefficient, left_ptr, mixed_ptr, row, inside, 0, D, D, X, WIDTH)


@triton.jit
def project(
    streams_ptr, phi_ptr, number_part_ptr, square_part_ptr, N, K, columns,
    C: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the part of some columns of the streams in the numbers, [shares, N, C], and in the sums of squares,
    [shares, N]. For few tokens."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside, c, first = row < N, tl.arange(0, PADDED), tl.program_id(1) * columns
    total, squares = _sums(
        streams_ptr, phi_ptr, row, inside, first, tl.minimum(first + columns, K), K, C, WIDTH, PADDED, PRECISION
    )
    line = tl.program_id(1) * N + row
    tl.store(number_part_ptr + line[:, None] * C + c, total, mask=inside[:, None] & (c < C))
    tl.store(square_part_ptr + line, tl.sum(squares, 1), mask=inside)


@triton.jit
def finish(
    streams_ptr, update_ptr, number_part_ptr, square_part_ptr, bias_ptr, scale_ptr,
    left_ptr, mixed_ptr, number_ptr, inverse_ptr, coefficient_ptr, N, D, columns, rounds, eps, hc_eps,
    X: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Sum the shares of the numbers, and write some columns of the results. For few tokens. Every program computes the
    coefficients of its tokens in registers; the first one stores them."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside, C, g, share = row < N, 2 * X + X * X, tl.arange(0, 2 * X), tl.arange(0, SHARES)
    live, mix = inside[:, None], _mix_place(X)
    line = share[:, None] * N + row[None, :]
    square = tl.load(square_part_ptr + line, mask=inside[None, :], other=0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(square, 0) / (X * D) + eps)
    part = tl.load(number_part_ptr + line[:, :, None] * C + g, mask=inside[None, :, None], other=0.0)
    number = tl.sum(part, 0) * inverse[:, None]
    mix_part_ptr = number_part_ptr + line[:, :, None, None] * C + mix[None, :, :, :]
    mix_part = tl.load(mix_part_ptr, mask=inside[None, :, None, None], other=0.0)
    mix_number = tl.sum(mix_part, 0) * inverse[:, None, None]
    gate = _gates(number, bias_ptr, scale_ptr, hc_eps, X)
    matrix = _sinkhorn(_scaled(mix_number, mix, bias_ptr, scale_ptr), rounds, hc_eps)
    if tl.program_id(1) == 0:
        tl.store(inverse_ptr + row, inverse, mask=inside)
        tl.store(number_ptr + row[:, None] * C + g, number, mask=live)
        tl.store(number_ptr + row[:, None, None] * C + mix, mix_number, mask=live[:, :, None])
        _keep_coefficients(coefficient_ptr, gate, matrix, row, live, N, X)
    coefficient = ()
    for k in tl.static_range(2 * X):
        coefficient = coefficient + (tl.sum(tl.where(g == k, gate, 0.0), 1),)
    for k in tl.static_range(X * X):
        coefficient = coefficient + (tl.sum(tl.sum(tl.where(mix == 2 * X + k, matrix, 0.0), 2), 1),)
    first = tl.program_id(1) * columns
    _mix(streams_ptr, update_ptr, coefficient, left_ptr, mixed_ptr, row, inside, first, first + columns, D, X, WIDTH)


@triton.jit
def _sums(
    streams_ptr, phi_ptr, row, inside, first, last, K,
    C: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of columns `first` to `last` of the streams with phi, [TOKENS, PADDED], and their squares,
    [TOKENS, WIDTH]. With bfloat16 streams, phi is rounded to bfloat16."""
    c = tl.arange(0, PADDED)
    total = tl.zeros((row.shape[0], PADDED), tl.float32)
    squares = tl.zeros((row.shape[0], WIDTH), tl.float32)
    for start in range(first, last, WIDTH):
        k = start + tl.arange(0, WIDTH)
        x = tl.load(streams_ptr + row[:, None] * K + k, mask=inside[:, None] & (k < last), other=0.0)
        phi = tl.load(phi_ptr + c[:, None] * K + k, mask=(c < C)[:, None] & (k < last), other=0.0)
        phi = phi.to(tl.bfloat16 if x.dtype == tl.bfloat16 else tl.float32)
        total = tl.dot(x.to(phi.dtype), tl.trans(phi), total, input_precision=PRECISION)
        squares += x.to(tl.float32) * x.to(tl.float32)
    return total, squares


@triton.jit
def _gates(number, bias_ptr, scale_ptr, hc_eps, X: tl.constexpr):
    """Return the read and write coefficients, [TOKENS, 2X]."""
    g = tl.arange(0, 2 * X)
    scale = tl.where(g < X, tl.load(scale_ptr).to(tl.float32), tl.load(scale_ptr + 1).to(tl.float32))
    gate = tl.sigmoid(tl.maximum(number * scale + tl.load(bias_ptr + g).to(tl.float32), -80.0))
    return tl.where(g < X, gate + hc_eps, 2 * gate)  # -80 avoids an overflow of exp in sigmoid


@triton.jit
def _sinkhorn(logit, rounds, hc_eps):
    """Return the mixing coefficients, [TOKENS, source, destination]."""
    matrix = _softmax(logit) + hc_eps
    matrix /= tl.sum(matrix, 1, keep_dims=True) + hc_eps
    for _ in range(1, rounds):
        matrix /= tl.sum(matrix, 2, keep_dims=True) + hc_eps
        matrix /= tl.sum(matrix, 1, keep_dims=True) + hc_eps
    return matrix


@triton.jit
def _keep_coefficients(coefficient_ptr, gate, matrix, row, live, N, X: tl.constexpr):
    """Store all coefficients of some tokens."""
    tl.store(coefficient_ptr + tl.arange(0, 2 * X) * N + row[:, None], gate, mask=live)
    tl.store(coefficient_ptr + _mix_place(X) * N + row[:, None, None], matrix, mask=live[:, :, None])


@triton.jit
def _mix_place(X: tl.constexpr):
    """Return the places of the mixing numbers among a token's C numbers, [1, source, destination]."""
    return 2 * X + tl.arange(0, X)[None, :, None] * X + tl.arange(0, X)[None, None, :]


@triton.jit
def _mix_logit(number_ptr, bias_ptr, scale_ptr, row, inside, X: tl.constexpr):
    """Load the mixing numbers; return Sinkhorn's input, [TOKENS, source, destination]."""
    at = _mix_place(X)
    number = tl.load(number_ptr + row[:, None, None] * (2 * X + X * X) + at, mask=inside[:, None, None], other=0.0)
    return _scaled(number, at, bias_ptr, scale_ptr)


@triton.jit
def _scaled(number, at, bias_ptr, scale_ptr):
    """Return the mixing numbers with scale and bias applied; `at` are their places among the C numbers."""
    return number * tl.load(scale_ptr + 2).to(tl.float32) + tl.load(bias_ptr + at).to(tl.float32)


@triton.jit
def _softmax(logit):
    """Return the softmax over the destinations."""
    exp = tl.exp(logit - tl.max(logit, 2, keep_dims=True))
    return exp / tl.sum(exp, 2, keep_dims=True)


@triton.jit
def _mix(
    streams_ptr, update_ptr, coefficient, left_ptr, mixed_ptr, row, inside, first, last, D,
    X: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the new streams and the next site's input, in columns `first` to `last`."""
    for start in range(first, last, WIDTH):
        d = start + tl.arange(0, WIDTH)
        live = inside[:, None] & (d < D)
        x = _streams(streams_ptr, row, d, D, live, X)
        y = tl.load(update_ptr + row[:, None] * D + d, mask=live, other=0.0).to(tl.float32)
        mixed = tl.zeros_like(y)
        for k in tl.static_range(X):
            left = coefficient[X + k][:, None] * y
            for j in tl.static_range(X):
                left += coefficient[2 * X + j * X + k][:, None] * x[j]
            at = left_ptr + (row * X + k)[:, None] * D + d
            tl.store(
                at, left, mask=live, eviction_policy="evict_first"
            )  # the results leave the cache before the inputs, which are read twice
            mixed += coefficient[k][:, None] * left
        tl.store(mixed_ptr + row[:, None] * D + d, mixed, mask=live)


@triton.jit
def _streams(ptr, row, d, D, live, X: tl.constexpr):
    """Load the X streams of some tokens, a tuple of [TOKENS, WIDTH]."""
    x = ()
    for j in tl.static_range(X):
        x = x + (tl.load(ptr + (row * X + j)[:, None] * D + d, mask=live, other=0.0).to(tl.float32),)
    return x


@triton.jit
def _vectors(ptr, row, inside, N, COUNT: tl.constexpr):
    """Load the first COUNT coefficients of some tokens, a tuple of [TOKENS]."""
    vectors = ()
    for c in tl.static_range(COUNT):
        vectors = vectors + (tl.load(ptr + c * N + row, mask=inside, other=0.0),)
    return vectors


@triton.jit
def products(
    streams_ptr, update_ptr, left_grad_ptr, mixed_grad_ptr, coefficient_ptr, product_ptr, update_grad_ptr, N, D,
    X: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the inner products of the X streams and the update with the gradients of the X new streams and of the next
    site's input, [(X+1) (X+1), N], and the gradient of the update. The gradients of the coefficients follow from the
    products. LANES threads share a token; each sums what it has loaded, and the sums are reduced at the end."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = row < N
    read_write = _vectors(coefficient_ptr, row, inside, N, 2 * X)
    through = tl.zeros((TOKENS,), tl.float32)
    for k in tl.static_range(X):
        through += read_write[k] * read_write[X + k]
    product = ()
    for _ in tl.static_range((X + 1) * (X + 1)):
        product = product + (tl.zeros((TOKENS, LANES), tl.float32),)
    for start in range(0, D, WIDTH):
        d = start + tl.arange(0, WIDTH)
        live = inside[:, None] & (d < D)
        flat = row[:, None] * D + d
        source = _streams(streams_ptr, row, d, D, live, X)
        source = source + (tl.load(update_ptr + flat, mask=live, other=0.0).to(tl.float32),)
        grad = _streams(left_grad_ptr, row, d, D, live, X)
        grad = grad + (tl.load(mixed_grad_ptr + flat, mask=live, other=0.0).to(tl.float32),)
        update_grad = through[:, None] * grad[X]
        for k in tl.static_range(X):
            update_grad += read_write[X + k][:, None] * grad[k]
        tl.store(update_grad_ptr + flat, update_grad, mask=live)
        sums = ()
        for i in tl.static_range((X + 1) * (X + 1)):
            terms = tl.reshape(source[i // (X + 1)] * grad[i % (X + 1)], (TOKENS, LANES, WIDTH // LANES))
            sums = sums + (product[i] + tl.sum(terms, 2),)
        product = sums
    for i in tl.static_range((X + 1) * (X + 1)):
        tl.store(product_ptr + i * N + row, tl.sum(product[i], 1), mask=inside)


@triton.jit
def coefficient_gradients(
    product_ptr, number_ptr, inverse_ptr, bias_ptr, scale_ptr, coefficient_ptr, pull_ptr, along_ptr, partial_ptr,
    N, K, hc_eps, X: tl.constexpr, ROUNDS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the coefficients and their inputs from the products. The gradient of a token's streams
    through its numbers is `pull` (C numbers) times phi plus `along` (through the rms) times the streams. Each program
    writes a partial sum of the gradients of bias and scale."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside, C, x = row < N, 2 * X + X * X, tl.arange(0, X)
    token, live, stream = row[:, None], inside[:, None], x[None, :, None] * (X + 1)
    read = tl.load(coefficient_ptr + x * N + token, mask=live, other=0.0)
    write = tl.load(coefficient_ptr + (X + x) * N + token, mask=live, other=0.0)
    matrix = tl.load(coefficient_ptr + _mix_place(X) * N + token[:, :, None], mask=live[:, :, None], other=0.0)
    product = product_ptr + token
    by_mix = tl.load(product[:, :, None] + (stream + x) * N, mask=live[:, :, None], other=0.0)
    by_write = tl.load(product + (X * (X + 1) + x) * N, mask=live, other=0.0)
    stream_read = tl.load(product[:, :, None] + (stream + X) * N, mask=live[:, :, None], other=0.0)
    update_read = tl.load(product + (X * (X + 1) + X) * N, mask=live, other=0.0)

    logit = _mix_logit(number_ptr, bias_ptr, scale_ptr, row, inside, X)
    mix_grad = _through_sinkhorn(by_mix + stream_read * read[:, None, :], logit, hc_eps, ROUNDS)
    gate = read - hc_eps
    read_grad = (write * update_read + tl.sum(matrix * stream_read, 1)) * gate * (1 - gate)
    write_grad = (by_write + read * update_read) * write * (1 - write / 2)

    inverse = tl.load(inverse_ptr + row, mask=inside, other=0.0)
    mix_grad = tl.reshape(mix_grad, (TOKENS, X * X))
    along = _through_numbers(read_grad, 0, number_ptr, scale_ptr, pull_ptr, partial_ptr, row, inside, inverse, C)
    along += _through_numbers(write_grad, X, number_ptr, scale_ptr + 1, pull_ptr, partial_ptr, row, inside, inverse, C)
    along += _through_numbers(
        mix_grad, 2 * X, number_ptr, scale_ptr + 2, pull_ptr, partial_ptr, row, inside, inverse, C
    )
    tl.store(along_ptr + row, -along * inverse * inverse / K, mask=inside)


@triton.jit
def _through_sinkhorn(grad, logit, eps, ROUNDS: tl.constexpr):
    """Return the gradient of Sinkhorn's input, as in `sinkhorn.py`: compute forward again, keep the divisors in
    registers, and multiply by them on the way back."""
    soft = _softmax(logit)
    matrix = soft + eps
    divisors = ()
    for step in tl.static_range(2 * ROUNDS - 1):
        divisors = divisors + (tl.sum(matrix, 1 + step % 2, keep_dims=True) + eps,)
        matrix /= divisors[step]
    grad *= matrix
    for back in tl.static_range(2 * ROUNDS - 1):
        grad -= matrix * tl.sum(grad, 1 + back % 2, keep_dims=True)
        matrix *= divisors[2 * ROUNDS - 2 - back]
    grad *= soft / matrix
    return grad - soft * tl.sum(grad, 2, keep_dims=True)


@triton.jit
def _through_numbers(
    logit_grad, begin, number_ptr, scale_ptr, pull_ptr, partial_ptr, row, inside, inverse, C
):  # fmt: skip
    """Write the pulls and both partial sums of the numbers of one scale, from `begin` on; return their part of `along`,
    [TOKENS]."""
    c = begin + tl.arange(0, logit_grad.shape[1])
    at, live = row[:, None] * C + c, inside[:, None]
    number = tl.load(number_ptr + at, mask=live, other=0.0)
    number_grad = logit_grad * tl.load(scale_ptr).to(tl.float32)
    tl.store(pull_ptr + at, number_grad * inverse[:, None], mask=live)
    partial = partial_ptr + tl.program_id(0) * 2 * C + c
    tl.store(partial, tl.sum(logit_grad, 0))
    tl.store(partial + C, tl.sum(logit_grad * number, 0))
    return tl.sum(number_grad * number, 1)


@triton.jit
def stream_gradients(
    streams_ptr, left_grad_ptr, mixed_grad_ptr, phi_ptr, coefficient_ptr, pull_ptr, along_ptr, streams_grad_ptr,
    partial_ptr, N, D, rows,
    X: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of WIDTH columns of every stream for `rows` tokens, and the gradient of phi summed over these
    tokens, which stays in registers."""
    C: tl.constexpr = 2 * X + X * X
    d, c = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, PADDED)
    of_phi = (c < C)[:, None] & (d < D)
    place = c[:, None] * X * D + d
    phi_grad = ()
    for _ in tl.static_range(X):
        phi_grad = phi_grad + (tl.zeros((PADDED, WIDTH), tl.float32),)
    first = tl.program_id(1) * rows
    for start in range(first, tl.minimum(first + rows, N), TOKENS):
        row = (start + tl.arange(0, TOKENS)).to(tl.int64)
        inside = row < N
        live = inside[:, None] & (d < D)
        coefficient = _vectors(coefficient_ptr, row, inside, N, C)
        along = tl.load(along_ptr + row, mask=inside, other=0.0)
        pull = tl.load(pull_ptr + row[:, None] * C + c, mask=inside[:, None] & (c < C), other=0.0)
        pull = pull.to(phi_ptr.dtype.element_ty)
        mixed_grad = tl.load(mixed_grad_ptr + row[:, None] * D + d, mask=live, other=0.0).to(tl.float32)
        grad = ()  # the whole gradient of the new streams
        for k in tl.static_range(X):
            at = (row * X + k)[:, None] * D + d
            later = tl.load(left_grad_ptr + at, mask=live, other=0.0).to(tl.float32)
            grad = grad + (later + coefficient[k][:, None] * mixed_grad,)
        sums = ()
        for j in tl.static_range(X):
            at = (row * X + j)[:, None] * D + d
            x = tl.load(streams_ptr + at, mask=live, other=0.0)
            phi = tl.load(phi_ptr + place + j * D, mask=of_phi, other=0.0)
            x_grad = along[:, None] * x.to(tl.float32)
            for k in tl.static_range(X):
                x_grad += coefficient[2 * X + j * X + k][:, None] * grad[k]
            # Last, so that the lines above have the layout of their loads, instead of that of a matrix product.
            tl.store(streams_grad_ptr + at, tl.dot(pull, phi, x_grad, input_precision=PRECISION), mask=live)
            sums = sums + (tl.dot(tl.trans(pull), x.to(pull.dtype), phi_grad[j], input_precision=PRECISION),)
        phi_grad = sums
    for j in tl.static_range(X):
        at = tl.program_id(1).to(tl.int64) * C * X * D + place + j * D
        tl.store(partial_ptr + at, phi_grad[j], mask=of_phi)


@triton.jit(do_not_specialize=["phi_parts", "parts"])
def add_parts(
    phi_part_ptr, part_ptr, phi_grad_ptr, bias_grad_ptr, scale_grad_ptr, SIZE, phi_parts, parts,
    X: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Sum all partial sums in order: the first program those of bias and scale, each other program COLUMNS elements of
    phi's SIZE."""
    C: tl.constexpr = 2 * X + X * X
    if tl.program_id(0) == 0:
        c = tl.arange(0, PADDED)
        FEW: tl.constexpr = ROWS * COLUMNS // PADDED
        tl.store(bias_grad_ptr + c, _sum_of_parts(part_ptr, parts, 2 * C, c, c < C, FEW), mask=c < C)
        by_number = _sum_of_parts(part_ptr + C, parts, 2 * C, c, c < C, FEW)
        tl.store(scale_grad_ptr, tl.sum(tl.where(c < X, by_number, 0.0), 0))
        tl.store(scale_grad_ptr + 1, tl.sum(tl.where((c >= X) & (c < 2 * X), by_number, 0.0), 0))
        tl.store(scale_grad_ptr + 2, tl.sum(tl.where(c >= 2 * X, by_number, 0.0), 0))
    else:
        column = (tl.program_id(0) - 1) * COLUMNS + tl.arange(0, COLUMNS)
        total = _sum_of_parts(phi_part_ptr, phi_parts, SIZE, column, column < SIZE, ROWS)
        tl.store(phi_grad_ptr + column, total, mask=column < SIZE)


@triton.jit
def _sum_of_parts(part_ptr, parts, stride, column, inside, ROWS: tl.constexpr):
    """Return the sum of some columns over all parts, which are `stride` elements apart; 0 outside."""
    total = tl.zeros((ROWS, column.shape[0]), tl.float32)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        at = part.to(tl.int64)[:, None] * stride + column[None, :]
        total += tl.load(part_ptr + at, mask=(part < parts)[:, None] & inside[None, :], other=0.0)
    return tl.sum(total, 0)
