"""The loops of `gsm_kernels.mhc` on a CPU: forward and backward, each with one pass over the streams.

Tokens are processed in groups. The coefficients of a group have the tokens last, so that a step of Sinkhorn's is a few
vector instructions for all of them. The streams of a group stay in the cache. PyTorch computes the product with phi
before forward, and two matrix products for the gradients after backward.
"""

from __future__ import annotations

import numpy as np

from ..arrays import exp, floats
from ..native import compiled, part

X = 4  # streams
MIX, C = 2 * X, 2 * X + X * X  # first number of the mixing matrix; all numbers of a token
GROUP = 32  # tokens of a group; with fewer, LLVM unrolls the loops over them instead of vectorising them
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)


@part
def _coefficients(first, count, number_NC, bias_C, scale_3, rounds, eps, gate, matrix, divisor):
    """Write the sigmoids [2X, GROUP] and mixing matrices [X*X, GROUP] of a group, and the divisors of Sinkhorn's steps
    except the last, as far as `divisor` has room."""
    for c in range(MIX):
        for n in range(count):
            gate[c, n] = number_NC[first + n, c] * scale_3[c // X] + bias_C[c]
    for c in range(X * X):
        for n in range(count):
            matrix[c, n] = number_NC[first + n, MIX + c] * scale_3[2] + bias_C[MIX + c]
    for c in range(MIX):
        for n in range(GROUP):
            gate[c, n] = ONE / (ONE + exp(-gate[c, n]))
    for j in range(X):
        for n in range(GROUP):
            largest = matrix[j * X, n]
            for k in range(1, X):
                largest = max(largest, matrix[j * X + k, n])
            for k in range(X):
                matrix[j * X + k, n] -= largest
    for c in range(X * X):
        for n in range(GROUP):
            matrix[c, n] = exp(matrix[c, n])
    for j in range(X):
        for n in range(GROUP):
            total = ZERO
            for k in range(X):
                total += matrix[j * X + k, n]
            for k in range(X):
                matrix[j * X + k, n] = matrix[j * X + k, n] / total + eps
    keeps_divisors = divisor.shape[0] > 1
    for step in range(2 * rounds - 1):
        row = step if keeps_divisors else 0
        if step % 2 == 0:  # columns: divide by sums over sources
            for k in range(X):
                for n in range(GROUP):
                    total = eps
                    for j in range(X):
                        total += matrix[j * X + k, n]
                    divisor[row, k, n] = total
                    for j in range(X):
                        matrix[j * X + k, n] *= ONE / total
        else:  # rows: divide by sums over destinations
            for j in range(X):
                for n in range(GROUP):
                    total = eps
                    for k in range(X):
                        total += matrix[j * X + k, n]
                    divisor[row, j, n] = total
                    for k in range(X):
                        matrix[j * X + k, n] *= ONE / total


@part
def _sinkhorn_grad(rounds, eps, grad, matrix, divisor):
    """Replace gradients of mixing matrices by those of their logits; `matrix` is overwritten. See `sinkhorn_grad`."""
    for c in range(X * X):
        for n in range(GROUP):
            grad[c, n] *= matrix[c, n]
    for step in range(2 * rounds - 2, -1, -1):
        if step % 2 == 0:
            for k in range(X):
                for n in range(GROUP):
                    total = ZERO
                    for j in range(X):
                        total += grad[j * X + k, n]
                    for j in range(X):
                        grad[j * X + k, n] -= matrix[j * X + k, n] * total
                        matrix[j * X + k, n] *= divisor[step, k, n]
        else:
            for j in range(X):
                for n in range(GROUP):
                    total = ZERO
                    for k in range(X):
                        total += grad[j * X + k, n]
                    for k in range(X):
                        grad[j * X + k, n] -= matrix[j * X + k, n] * total
                        matrix[j * X + k, n] *= divisor[step, j, n]
    for j in range(X):
        for n in range(GROUP):
            total = ZERO
            for k in range(X):
                softmax = matrix[j * X + k, n] - eps
                grad[j * X + k, n] *= softmax / matrix[j * X + k, n]
                total += grad[j * X + k, n]
            for k in range(X):
                grad[j * X + k, n] -= (matrix[j * X + k, n] - eps) * total


@compiled
def forward(
    first, last, tokens, width, rounds, eps, hc_eps, streams_at, update_at, bias_at, scale_at,
    number_at, inverse_at, left_at, mixed_at,
):  # fmt: skip
    """Write the new streams, the next site's input, and the inverse root mean square of the streams. The numbers are
    the products with phi; they are multiplied by the inverse in place."""
    streams, update = floats(streams_at, (tokens, X, width)), floats(update_at, (tokens, width))
    bias_C, scale_3 = floats(bias_at, (C,)), floats(scale_at, (3,))
    number_NC, inverse_N = floats(number_at, (tokens, C)), floats(inverse_at, (tokens,))
    left, mixed = floats(left_at, (tokens, X, width)), floats(mixed_at, (tokens, width))
    eps, hc_eps = np.float32(eps), np.float32(hc_eps)
    gate, matrix = np.zeros((MIX, GROUP), np.float32), np.zeros((X * X, GROUP), np.float32)
    divisor = np.empty((1, X, GROUP), np.float32)
    for start in range(first, last, GROUP):
        count = min(GROUP, last - start)
        for n in range(start, start + count):
            total = ZERO
            for j in range(X):
                for i in range(width):
                    total += streams[n, j, i] * streams[n, j, i]
            inverse_N[n] = ONE / np.sqrt(total / np.float32(X * width) + eps)
            for c in range(C):
                number_NC[n, c] *= inverse_N[n]
        _coefficients(start, count, number_NC, bias_C, scale_3, rounds, hc_eps, gate, matrix, divisor)
        for n in range(count):
            t = start + n
            for k in range(X):
                read, write = gate[k, n] + hc_eps, TWO * gate[X + k, n]
                mix0, mix1, mix2, mix3 = matrix[k, n], matrix[X + k, n], matrix[2 * X + k, n], matrix[3 * X + k, n]
                for i in range(width):
                    value = write * update[t, i] + mix0 * streams[t, 0, i] + mix1 * streams[t, 1, i]
                    value += mix2 * streams[t, 2, i] + mix3 * streams[t, 3, i]
                    left[t, k, i] = value
                    mixed[t, i] = read * value if k == 0 else mixed[t, i] + read * value


@compiled
def backward(
    first, last, tokens, width, rounds, hc_eps, streams_at, update_at, bias_at, scale_at, number_at, inverse_at,
    left_grad_at, mixed_grad_at, logit_grad_at, number_grad_at, streams_grad_at, update_grad_at,
):  # fmt: skip
    """Write the gradients of the logits, of the products with phi, of the update, and of the streams except the part
    through the products with phi."""
    streams, update = floats(streams_at, (tokens, X, width)), floats(update_at, (tokens, width))
    bias_C, scale_3 = floats(bias_at, (C,)), floats(scale_at, (3,))
    number_NC, inverse_N = floats(number_at, (tokens, C)), floats(inverse_at, (tokens,))
    left_grad, mixed_grad = floats(left_grad_at, (tokens, X, width)), floats(mixed_grad_at, (tokens, width))
    logit_grad, number_grad = floats(logit_grad_at, (tokens, C)), floats(number_grad_at, (tokens, C))
    streams_grad, update_grad = floats(streams_grad_at, (tokens, X, width)), floats(update_grad_at, (tokens, width))
    hc_eps = np.float32(hc_eps)
    gate, matrix = np.zeros((MIX, GROUP), np.float32), np.zeros((X * X, GROUP), np.float32)
    gate_grad, matrix_grad = np.zeros((MIX, GROUP), np.float32), np.zeros((X * X, GROUP), np.float32)
    undone, divisor = np.empty((X * X, GROUP), np.float32), np.empty((2 * rounds, X, GROUP), np.float32)
    product = np.empty((X + 1, X + 1), np.float32)  # of streams and update with the gradients of both results
    for start in range(first, last, GROUP):
        count = min(GROUP, last - start)
        _coefficients(start, count, number_NC, bias_C, scale_3, rounds, hc_eps, gate, matrix, divisor)
        for n in range(count):
            t = start + n
            for j in range(X + 1):
                row = streams[t, j] if j < X else update[t]
                p0, p1, p2, p3, p4 = ZERO, ZERO, ZERO, ZERO, ZERO
                for i in range(width):
                    p0 += row[i] * left_grad[t, 0, i]
                    p1 += row[i] * left_grad[t, 1, i]
                    p2 += row[i] * left_grad[t, 2, i]
                    p3 += row[i] * left_grad[t, 3, i]
                    p4 += row[i] * mixed_grad[t, i]
                product[j, 0], product[j, 1], product[j, 2], product[j, 3], product[j, 4] = p0, p1, p2, p3, p4
            for k in range(X):
                read = gate[k, n] + hc_eps
                read_grad = TWO * gate[X + k, n] * product[X, X]
                for j in range(X):
                    read_grad += matrix[j * X + k, n] * product[j, X]
                    matrix_grad[j * X + k, n] = product[j, k] + read * product[j, X]
                gate_grad[k, n] = read_grad
                gate_grad[X + k, n] = TWO * (product[X, k] + read * product[X, X])
        for c in range(MIX):
            for n in range(GROUP):
                gate_grad[c, n] *= gate[c, n] * (ONE - gate[c, n])
        for c in range(X * X):
            for n in range(GROUP):
                undone[c, n] = matrix[c, n]
        _sinkhorn_grad(rounds, hc_eps, matrix_grad, undone, divisor)
        for n in range(count):
            t = start + n
            along = ZERO
            for c in range(C):
                logit_grad[t, c] = gate_grad[c, n] if c < MIX else matrix_grad[c - MIX, n]
                pull = logit_grad[t, c] * scale_3[min(c // X, 2)]
                along += pull * number_NC[t, c]
                number_grad[t, c] = pull * inverse_N[t]
            # number = phi . x / rms(x), so the gradient of x has a part along phi, and one along x through the rms.
            along *= -inverse_N[t] * inverse_N[t] / np.float32(X * width)
            for j in range(X + 1):
                row, out = (streams[t, j], streams_grad[t, j]) if j < X else (update[t], update_grad[t])
                itself = along if j < X else ZERO
                w0 = matrix[j * X, n] if j < X else TWO * gate[X, n]
                w1 = matrix[j * X + 1, n] if j < X else TWO * gate[X + 1, n]
                w2 = matrix[j * X + 2, n] if j < X else TWO * gate[X + 2, n]
                w3 = matrix[j * X + 3, n] if j < X else TWO * gate[X + 3, n]
                w4 = w0 * (gate[0, n] + hc_eps) + w1 * (gate[1, n] + hc_eps)
                w4 += w2 * (gate[2, n] + hc_eps) + w3 * (gate[3, n] + hc_eps)
                for i in range(width):
                    value = w0 * left_grad[t, 0, i] + w1 * left_grad[t, 1, i] + w2 * left_grad[t, 2, i]
                    value += w3 * left_grad[t, 3, i] + w4 * mixed_grad[t, i]
                    out[i] = value + itself * row[i]
