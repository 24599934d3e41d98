"""RMSNorm row by row. A row is read twice, the second time from the cache."""

from __future__ import annotations

import numpy as np

from ..arrays import floats
from ..native import compiled

ROWS = 32  # rows of a block; backward sums the gradient of the weight block by block


@compiled
def forward(first, last, width, eps, x_at, weight_at, out_at):
    """Compute y = x / rms(x) * weight of rows first to last."""
    x, weight, out = floats(x_at, (last, width)), floats(weight_at, (width,)), floats(out_at, (last, width))
    eps = np.float32(eps)
    for n in range(first, last):
        row, into = x[n], out[n]
        total = np.float32(0)
        for i in range(width):
            total += row[i] * row[i]
        inverse = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            into[i] = row[i] * inverse * weight[i]


@compiled
def backward(first, last, rows, width, eps, grad_at, x_at, weight_at, x_grad_at, part_at):
    """Compute the gradient of x, and the part of each block in the gradient of the weight, for blocks first to last."""
    grad, x, weight = floats(grad_at, (rows, width)), floats(x_at, (rows, width)), floats(weight_at, (width,))
    x_grad, part = floats(x_grad_at, (rows, width)), floats(part_at, (last, width))
    eps = np.float32(eps)
    for block in range(first, last):
        weight_grad = part[block]
        for i in range(width):
            weight_grad[i] = np.float32(0)
        for n in range(block * ROWS, min((block + 1) * ROWS, rows)):
            row, pull, into = x[n], grad[n], x_grad[n]
            total, along = np.float32(0), np.float32(0)
            for i in range(width):
                total += row[i] * row[i]
                along += pull[i] * weight[i] * row[i]
            inverse = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
            # The norm removes the component of the gradient along x.
            along *= -inverse * inverse * inverse / np.float32(width)
            for i in range(width):
                weight_grad[i] += pull[i] * row[i] * inverse
                into[i] = pull[i] * weight[i] * inverse + along * row[i]
