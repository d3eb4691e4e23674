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
    "bst_conv_layout",
    "bst_deconv_layout",
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


# ------------------------------------------------------------------------------ attention in the shape of a convolution


def bst_conv_layout(input_h=1, input_w=1, filter_h=1, filter_w=1, stride=1, blk_size=32, autoregressive=True):
    """Which keys a query sees where attention has the windows of a two-dimensional convolution.

    Keys are the pixels of an input `[input_h, input_w]`, row by row; queries those of an output `[P, Q]`, the input's
    size over stride. Query (p, q) sees the keys in its window; with autoregressive only those up to key
    (p stride, q stride). The padding is the smallest that gives the output its size.

    Args:
      input_h: height, a multiple of stride; or 1, for which filter_h is 1, too.
      input_w: width, a multiple of stride.
      filter_h: height of the window.
      filter_w: width of the window.
      stride: inputs from one output to the next; 2 where a filter's size is even.
      blk_size: pixels of a block; divides the number of inputs and that of outputs.
      autoregressive: whether a query is kept from seeing what comes after it.

    Returns:
      layout: bool `[P Q / blk_size, input_h input_w / blk_size]`, the blocks with a pair in them.
      mask_callback: `(blk_shape, head_idx, qry_idx, key_idx, blk_idx)` to the pairs of a block, bool
        `[blk_size, blk_size]`, a row for each query.
    """
    name = "bst_conv_layout"
    windows = _Windows(name, ("input_h", input_h), ("input_w", input_w), filter_h, filter_w, stride, blk_size)
    return windows.layout_and_mask(name, lambda q, k: windows.pairs(q, k, autoregressive), False)


def bst_deconv_layout(output_h=1, output_w=1, filter_h=1, filter_w=1, stride=1, blk_size=32, autoregressive=True):
    """The transpose of `bst_conv_layout`: queries are the pixels of the larger image.

    Query (h, w) of an output `[output_h, output_w]` sees key (p, q) of the smaller image where the convolution from the
    one to the other connects the two; with autoregressive only if (h, w) is not before (p stride, q stride).

    Args:
      output_h: height, a multiple of stride; or 1, for which filter_h is 1, too.
      output_w: width, a multiple of stride.
      filter_h: height of the window.
      filter_w: width of the window.
      stride: see `bst_conv_layout`.
      blk_size: see `bst_conv_layout`.
      autoregressive: see `bst_conv_layout`.

    Returns:
      layout: bool `[output_h output_w / blk_size, P Q / blk_size]`.
      mask_callback: as of `bst_conv_layout`.
    """
    name = "bst_deconv_layout"
    windows = _Windows(name, ("output_h", output_h), ("output_w", output_w), filter_h, filter_w, stride, blk_size)
    return windows.layout_and_mask(name, lambda q, k: windows.pairs(k, q, autoregressive, after=True).T, True)


class _Windows:
    """The windows of a convolution over an image `[H, W]`, by pixels and by blocks of them."""

    def __init__(self, name, height, width, filter_h, filter_w, stride, blk_size):
        for size_name, size in (height, width, ("filter_h", filter_h), ("filter_w", filter_w), ("stride", stride)):
            if size < 1:
                raise ValueError(f"{name}: {size_name} must be at least 1, got {size}")
        (height_name, H), (width_name, W) = height, width
        if (H > 1 and H % stride) or W % stride:
            raise ValueError(
                f"{name}: {height_name} (unless it is 1) and {width_name} must be multiples of stride {stride}, "
                f"got {H} and {W}"
            )
        self.size, self.out, self.stride, self.blk_size = (H, W), (max(H // stride, 1), W // stride), stride, blk_size
        self.filter = (filter_h if H > 1 else 1, filter_w)
        pixels = [H * W, reduce_mul(self.out)]
        if blk_size < 1 or any(n % blk_size for n in pixels):
            raise ValueError(
                f"{name}: blk_size must divide the numbers of pixels, {pixels[0]} and {pixels[1]}, got {blk_size}"
            )
        self.blocks = [n // blk_size for n in pixels]
        self.reached = []  # for each dimension, bool [output, input]
        self.padding = []
        for size, out, taps in zip(self.size, self.out, self.filter, strict=True):
            pad = next((p for p in range(taps) if out_dim(taps, size, p, stride) == out), None)
            if pad is None:
                raise ValueError(
                    f"{name}: no padding of a filter of {taps} at stride {stride} takes {size} pixels to {out}; "
                    "filters of even size need stride 2"
                )
            reached = np.zeros((out, size), bool)
            for q in range(out):
                reached[q, conv_slice(q, size, taps, pad, stride)] = True
            self.reached.append(reached)
            self.padding.append(pad)

    def pairs(self, outputs, inputs, autoregressive, after=False):
        """Bool `[outputs, inputs]` of two ranges of pixels; `after`: an output is only seen from later inputs."""
        (p, q), (h, w) = np.divmod(outputs, self.out[1]), np.divmod(inputs, self.size[1])
        pairs = self.reached[0][p][:, h] & self.reached[1][q][:, w]
        if autoregressive:
            limit = (p * self.stride * self.out[1] * self.stride + q * self.stride)[:, None]
            pairs &= inputs >= limit if after else inputs <= limit
        return pairs

    def layout_and_mask(self, name, pairs, transposed):
        keys, queries = self.blocks[::-1] if transposed else self.blocks
        block = lambda idx: np.arange(idx * self.blk_size, (idx + 1) * self.blk_size)  # noqa: E731
        everything = np.arange(keys * self.blk_size)
        layout = np.stack(
            [
                pairs(block(q), everything).reshape(self.blk_size, keys, self.blk_size).any((0, 2))
                for q in range(queries)
            ]
        )

        def mask_callback(blk_shape, head_idx, qry_idx, key_idx, blk_idx):
            if tuple(blk_shape) != (self.blk_size, self.blk_size):
                raise ValueError(f"{name}: blocks are {self.blk_size} x {self.blk_size}, got blk_shape {blk_shape}")
            return pairs(block(qry_idx), block(key_idx))

        print(
            f"{name}: {self.size[0]}x{self.size[1]} to {self.out[0]}x{self.out[1]}, "
            f"filter {self.filter[0]}x{self.filter[1]}, stride {self.stride}, "
            f"padding {self.padding[0]}x{self.padding[1]}, {layout.sum()} of {layout.size} blocks"
        )
        return layout, mask_callback
