"""Helpers shared by the operator families."""

from __future__ import annotations

import functools
import operator

import numpy as np
import tensorflow as tf

from blocksparse import _library
from blocksparse._constants import host_constant
from blocksparse._random import entropy_size, get_entropy, set_entropy

__all__ = [
    "backward_pad",
    "ceil_div",
    "conv_slice",
    "deconv_slice",
    "dilation_size",
    "entropy_size",
    "get_entropy",
    "is_param_casted",
    "magic32u",
    "magic64u",
    "out_dim",
    "reduce_mul",
    "reset_scalar_constants",
    "same_pad",
    "scalar_constant",
    "set_entropy",
    "z_order_2d",
    "z_order_3d",
]

_op_module = _library.op_module

_scalars: dict = {}  # keeps eager tensors alive
_generation = 0

# ---------------------------------------------------------------------------------------------------------- scalars


def scalar_constant(value, dtype=None, name: str | None = None):
    """A scalar as a tensor on the host. A tensor is returned as it is.

    Args:
      value: tensor, int or float (`np.float64` is one).
      dtype: of the tensor; default int32 for an int, float32 for a float.
      name: of the Const in a graph, where it is the first of its value and dtype.

    Raises:
      ValueError: for anything else.
    """
    if tf.is_tensor(value):
        return value
    if not isinstance(value, (int, float)):
        raise ValueError(f"Not a scalar value. Got {type(value).__name__}, allowed are tensors, int and float")
    dtype = tf.as_dtype(dtype or (tf.float32 if isinstance(value, float) else tf.int32))
    array = np.array(value, dtype.as_numpy_dtype)
    key = ("scalar", _generation, dtype.name, array.tobytes())
    tensor = host_constant(key, array, name or "blocksparse/scalar", "/cpu:0")
    if isinstance(tensor, tf.__internal__.EagerTensor):
        _scalars[key] = tensor
    return tensor


def reset_scalar_constants() -> None:
    """Forgets the scalars made so far; later calls make new ones."""
    global _generation
    _generation += 1
    _scalars.clear()


def is_param_casted(param) -> bool:
    """Whether a graph reads a variable through a cast: its "read" Identity has at most 5 readers and one is a Cast."""
    for operation in param.op.graph.get_operations():
        if operation.type in ("Identity", "ReadVariableOp") and param.op.name in (t.op.name for t in operation.inputs):
            readers = operation.outputs[0].consumers()
            if len(readers) <= 5 and any("Cast" in reader.type for reader in readers):
                return True
    return False


# ------------------------------------------------------------------------------------------------------ arithmetic


def reduce_mul(vals, init=1):
    """The product of numbers and `init`."""
    return functools.reduce(operator.mul, vals, init)


def ceil_div(x: int, y: int) -> int:
    """`x / y`, rounded up."""
    return -(-x // y)


def z_order_2d(x: int, y: int) -> int:
    """The Morton code of a point: bits of x in even positions, from the lowest, of y in odd ones."""
    return _interleave((x, y))


def z_order_3d(z: int, y: int, x: int) -> int:
    """The Morton code of a point: in each group of three bits x lowest, then y, then z."""
    return _interleave((x, y, z))


def _interleave(numbers):
    bits = max(number.bit_length() for number in numbers)
    return sum(
        (number >> bit & 1) << (bit * len(numbers) + place)
        for bit in range(bits)
        for place, number in enumerate(numbers)
    )


def magic32u(nmax: int, d: int) -> tuple[int, int]:
    """`(m, s)`, s the smallest, with `n // d == n * m >> s` for `0 <= n <= nmax` (Warren, Hacker's Delight, 10-9)."""
    return _magic(nmax, d, 0)


def magic64u(d: int) -> tuple[int, int]:
    """`(m, s)`, m below 2^32, for `0 <= n < 2^31`: `n // d == n * m >> 32 >> s`, or `n >> s` where m is 1."""
    if d & (d - 1) == 0:
        return magic32u(2**31 - 1, d)
    magic, shift = _magic(2**31 - 1, d, 32)
    return magic, shift - 32


def _magic(nmax, d, shift):
    if d < 1 or nmax < 0:
        raise ValueError(f"nmax must be at least 0 and d at least 1, got {nmax} and {d}")
    if d > nmax:
        return 0, shift
    limit = (nmax + 1) // d * d - 1  # the largest n with n mod d = d - 1
    while True:
        excess = d - 1 - (2**shift - 1) % d
        if 2**shift > limit * excess:
            return (2**shift + excess) // d, shift
        shift += 1


# ------------------------------------------------------------------------- one dimension of a convolution: sizes, taps


def dilation_size(S: int, dil: int = 1) -> int:
    """Inputs that a filter of S taps spans."""
    return S * dil - dil + 1


def out_dim(S: int, W: int, pad: int, std: int = 1, dil: int = 1) -> int:
    """Outputs of a filter of S taps over W inputs."""
    return ceil_div(W - dilation_size(S, dil) + 1 + 2 * pad, std)


def same_pad(S: int, dil: int = 1) -> int:
    """The padding that keeps the size, for odd filters."""
    return dilation_size(S, dil) // 2


def backward_pad(S: int, pad: int, dil: int = 1) -> int:
    """The padding of the convolution that is the input gradient."""
    return dilation_size(S, dil) - pad - 1


def conv_slice(q: int, W: int, S: int, pad: int, std: int = 1, dil: int = 1) -> list[int]:
    """The inputs, of W, that output q reads."""
    return [x for x in (q * std - pad + s * dil for s in range(S)) if 0 <= x < W]


def deconv_slice(x: int, Q: int, S: int, bpad: int, std: int = 1, dil: int = 1) -> list[int]:
    """The outputs, of Q, that read input x; `bpad` is `backward_pad`."""
    scaled = (x - bpad + s * dil for s in range(S))
    return [e // std for e in scaled if e % std == 0 and 0 <= e // std < Q]
