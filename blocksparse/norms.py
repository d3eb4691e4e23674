"""Normalization: layer norm over any axis, batch norm over channels, fused, in as few passes over memory as can be.

Arithmetic is in float32 with one rounding at the end; gains, biases, statistics and their gradients are float32
whatever the dtype of activations. Statistics do not cancel: rows with a mean of 1e4 and a spread of 1 come out right.
Results are the same bits from run to run. All work eagerly, in `tf.function` and in `tf.compat.v1` graphs, with unknown
shapes and empty tensors, on CPUs and GPUs, and have derivatives of every order.

The ops themselves are here too, as `layer_norm_op` and so on, and references in NumPy, as `layer_norm_test` and so on.
"""

from __future__ import annotations

import collections

import tensorflow as tf

from blocksparse import _library, _norms_gradients  # noqa: F401 (_norms_gradients registers itself)
from blocksparse._xla import check_not_xla
from blocksparse.reference import (
    batch_norm_grad_test,
    batch_norm_inf_test,
    batch_norm_test,
    layer_norm_grad_test,
    layer_norm_test,
)

__all__ = [
    "BatchNorm",
    "batch_norm",
    "batch_norm_grad_test",
    "batch_norm_inf_test",
    "batch_norm_inference",
    "batch_norm_test",
    "layer_norm",
    "layer_norm_grad_test",
    "layer_norm_test",
]

_ops = _library.op_module
layer_norm_op = _ops.layer_norm
layer_norm_grad_op = _ops.layer_norm_grad
batch_norm_inf_ncdhw_op = _ops.batch_norm_inference_ncdhw
batch_norm_ncdhw_op = _ops.batch_norm_ncdhw
batch_norm_grad_ncdhw_op = _ops.batch_norm_grad_ncdhw

_DTYPES = (tf.float32, tf.float16, tf.bfloat16)

BatchNorm = collections.namedtuple("BatchNorm", ["y", "m", "v"])


def _activations(x):
    x = tf.convert_to_tensor(x)
    if x.dtype not in _DTYPES:
        raise ValueError(f"x has dtype {x.dtype.name}, allowed are float32, float16 and bfloat16")
    return x


def _vector(name, v, features):
    """v as a float32 tensor of `features` elements (None: not known yet), of any shape."""
    v = (
        tf.convert_to_tensor(v)
        if tf.is_tensor(v) or isinstance(v, tf.Variable)
        else tf.convert_to_tensor(v, tf.float32)
    )
    if v.dtype != tf.float32:
        raise ValueError(f"{name} has dtype {v.dtype.name}, must be float32 whatever the dtype of x")
    elements = v.shape.num_elements()
    if features is not None and elements is not None and elements != features:
        raise ValueError(f"{name} must have {features} elements, one for each feature, got shape {v.shape}")
    return v


def _epsilon(epsilon):
    epsilon = float(epsilon)
    if not 0 <= epsilon < float("inf"):
        raise ValueError(f"epsilon must be a finite number of at least 0, got {epsilon}")
    return epsilon


def layer_norm(
    x,
    g,
    b,
    axis: int = 1,
    segments: int = 1,
    epsilon: float = 1e-6,
    relu: bool = False,
    atomics: bool = True,
    bench: int = 0,
    use_tf: bool = False,
) -> tf.Tensor:
    """`y = (x - m) / sqrt(v + epsilon) * g + b`, m and v the mean and variance over the features at each other index.

    Layer normalization (J. L. Ba, J. R. Kiros, G. E. Hinton, 2016), with what follows it in one pass: `relu` gives
    `max(y, 0)`. With `segments=S` the features are cut in S equal contiguous parts, each normalized by itself: the four
    gates of an LSTM, say, in one launch. The variance is the biased one.

    Args:
      x: float32, float16 or bfloat16, of any rank from 1.
      g, b: gain and bias, float32, one element for each feature, in any shape.
      axis: the dimension of features, `-rank` to `rank - 1`.
      segments: int that divides the features.
      epsilon: at least 0.
      relu: see above.
      atomics: accepted and ignored; sums are always in a fixed order.
      bench: time this many launches and print the mean.
      use_tf: compose it of TensorFlow's ops instead, for comparison.

    Returns:
      x's shape and dtype. Gradients of g and b are float32 and have their shapes.

    Raises:
      ValueError: for dtypes, an axis, segments or lengths that do not fit. InvalidArgumentError, where only the running
        op can see it.
      NotImplementedError: under `jit_compile=True`.
    """
    x = _activations(x)
    for name, value in (("axis", axis), ("segments", segments)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(f"{name} must be an int, got {value!r}")
    axis, segments, rank = int(axis), int(segments), x.shape.rank
    if rank is not None and not -rank <= axis < rank:
        allowed = f"{-rank} to {rank - 1} for x of shape {x.shape}" if rank else "in range, and x is a scalar"
        raise ValueError(f"axis must be {allowed}, got {axis}")
    features = None if rank is None else x.shape[axis]
    if segments < 1 or (features is not None and features % segments):
        raise ValueError(f"segments must be at least 1 and divide the {features} features, got {segments}")
    g, b = _vector("gain", g, features), _vector("bias", b, features)
    epsilon = _epsilon(epsilon)
    if use_tf:
        return _layer_norm_of_tf(x, g, b, axis, segments, epsilon, relu)
    check_not_xla("layer_norm")
    return layer_norm_op(x, g, b, S=segments, axis=axis, epsilon=epsilon, relu=bool(relu), bench=bench)[0]


def _layer_norm_of_tf(x, g, b, axis, segments, epsilon, relu):
    shape = tf.shape(x)
    axis = axis + tf.rank(x) if axis < 0 else axis
    cut = tf.stack([segments, shape[axis] // segments])
    x32 = tf.cast(tf.reshape(x, tf.concat([[tf.reduce_prod(shape[:axis])], cut, [-1]], 0)), tf.float32)
    # tf.nn.moments stops the gradient of the mean in the variance, so second derivatives of it are wrong.
    mean = tf.reduce_mean(x32, axis=2, keepdims=True)
    variance = tf.reduce_mean(tf.square(x32 - mean), axis=2, keepdims=True)
    vector = tf.concat([[1], cut, [1]], 0)
    y = (x32 - mean) * tf.math.rsqrt(variance + epsilon) * tf.reshape(g, vector) + tf.reshape(b, vector)
    y = tf.reshape(tf.cast(y, x.dtype), shape)
    return tf.nn.relu(y) if relu else y


def _channels(x):
    if x.shape.rank is None:
        return None
    if x.shape.rank < 2:
        raise ValueError(f"x must be [N, C, ...], of rank 2 or more, got shape {x.shape}")
    return x.shape[1]


def batch_norm(x, g, b, epsilon: float = 1e-6) -> BatchNorm:
    """`y = (x - m) / sqrt(v + epsilon) * g + b`, m and v the mean and variance of each channel over all else.

    Batch normalization (S. Ioffe, C. Szegedy, 2015) of a training step. The variance is the biased one. An empty batch
    gives means and variances of 0.

    Args:
      x: float32, float16 or bfloat16 `[N, C, ...]`.
      g, b: gain and bias, float32, C elements in any shape.
      epsilon: at least 0.

    Returns:
      The named tuple `(y, m, v)`: y of x's shape and dtype, m and v float32 of g's shape. The gradient is that of y;
      gradients that reach m and v are left out, as for what a moving average takes.

    Raises:
      ValueError: for dtypes, a rank or lengths that do not fit. InvalidArgumentError, where only the running op can see
        it.
      NotImplementedError: under `jit_compile=True`.
    """
    x = _activations(x)
    channels = _channels(x)
    g, b = _vector("gain", g, channels), _vector("bias", b, channels)
    check_not_xla("batch_norm")
    return BatchNorm(*batch_norm_ncdhw_op(x, g, b, eps=_epsilon(epsilon))[:3])


def batch_norm_inference(x, g, b, m, v, epsilon: float = 1e-6) -> tf.Tensor:
    """`y = (x - m) / sqrt(v + epsilon) * g + b` with statistics given: batch norm after training.

    The gradient is the true one, for all five tensors: `dx = dy * g / sqrt(v + epsilon)`. (The original package passed
    dy on as it was.)

    Args:
      x: float32, float16 or bfloat16 `[N, C, ...]`.
      g, b, m, v: gain, bias, mean and variance, float32, C elements in any shape.
      epsilon: at least 0.

    Returns:
      x's shape and dtype.

    Raises:
      ValueError: for dtypes, a rank or lengths that do not fit. InvalidArgumentError, where only the running op can see
        it.
      NotImplementedError: under `jit_compile=True`.
    """
    x = _activations(x)
    channels = _channels(x)
    vectors = [_vector(name, u, channels) for name, u in (("gain", g), ("bias", b), ("mean", m), ("variance", v))]
    check_not_xla("batch_norm_inference")
    return batch_norm_inf_ncdhw_op(x, *vectors, eps=_epsilon(epsilon))
