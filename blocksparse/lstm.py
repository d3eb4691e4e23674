"""LSTM cells: the gates fused in one pass over memory, forward and backward, and cells built on them.

The gates work for float32, float16 and bfloat16 on CPUs and GPUs; arithmetic is in float32 with one rounding at the
end, biases and their gradients are float32. They run eagerly, in `tf.function` and in `tf.compat.v1` graphs, with
unknown shapes and empty tensors, and have derivatives of every order. Operands that do not fit raise ValueError, or
InvalidArgumentError where only the running op can see it.

The ops themselves are here too, as `lstm_gates_op` and so on.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from blocksparse import _library, _lstm_gradients  # noqa: F401 (_lstm_gradients registers itself)

_ops = _library.op_module

lstm_gates_op = _ops.lstm_gates
lstm_gates4_op = _ops.lstm_gates4
lstm_gates_grad_op = _ops.lstm_gates_grad
lstm_gates4_grad_op = _ops.lstm_gates4_grad

_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


def fused_lstm_gates(c, *args, bias=None, forget_bias: float = 1.0, name: str | None = None):
    """The part of an LSTM cell after the matrix product, in one pass over memory.

      `c_next = sigmoid(f + forget_bias) c + sigmoid(i) tanh(u)`, `h_next = sigmoid(o) tanh(c_next)`

    Only the inputs are kept for the gradient, which computes the activations again.

    Args:
      c: `[N, K]` state, float32, float16 or bfloat16. More leading dimensions are more rows.
      *args: either one tensor h `[N, 4K]`, in which the gates lie side by side in the order i, u, f, o; or four tensors
        `[N, K]` i, u, f, o. All of c's dtype.
      bias: float32 `[4K]` in the order of h, added to h first; with one tensor alone.
      forget_bias: number, added to f.

    Returns:
      Named tuple `(c_next, h_next)`, `[N, K]`, of c's dtype.
    """
    if len(args) not in (1, 4):
        raise ValueError(f"fused_lstm_gates takes c and either h or the four gates i, u, f, o, got {len(args)} tensors")
    if len(args) == 4 and bias is not None:
        raise ValueError("bias must be None where the gates are four tensors; add it to them, or give one tensor h")
    c, *gates = (tf.convert_to_tensor(x) for x in (c, *args))
    if c.dtype not in _DTYPES:
        raise ValueError(f"c has dtype {c.dtype.name}, allowed are float32, float16 and bfloat16")
    for gate in gates:
        if gate.dtype != c.dtype:
            raise ValueError(f"c and the gates must have one dtype, got {c.dtype.name} and {gate.dtype.name}")
    _check_not_xla()
    forget_bias = float(forget_bias)
    if len(gates) == 4:
        return lstm_gates4_op(c, *gates, forget_bias=forget_bias, name=name or "LSTMGates4")
    if bias is not None:
        bias = tf.convert_to_tensor(bias)
        width = c.shape[-1] if c.shape.rank else None
        if bias.dtype != tf.float32:
            raise ValueError(f"bias has dtype {bias.dtype.name}, must be float32 whatever the dtype of c")
        if None not in (width, bias.shape.num_elements()) and bias.shape.num_elements() != 4 * width:
            raise ValueError(f"bias must have 4 * {width} elements, those of i, u, f and o, got shape {bias.shape}")
    return lstm_gates_op(c, gates[0], [] if bias is None else [bias], forget_bias=forget_bias, name=name or "LSTMGates")


def _check_not_xla():
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise NotImplementedError(
            "fused_lstm_gates: blocksparse ops have no XLA kernels and cannot be part of a function with "
            "jit_compile=True. Use tf.function without it, or model.compile(jit_compile=False)"
        )


def split4(x) -> list[tf.Tensor]:
    """`[N, 4K]` cut along the last dimension into four `[N, K]`."""
    return tf.split(x, 4, axis=-1)


def concat4(x0, x1, x2, x3) -> tf.Tensor:
    """Four `[N, K]` side by side, `[N, 4K]`: the inverse of `split4`."""
    return tf.concat([x0, x1, x2, x3], axis=-1)


def sparse_relu(x, alpha: float = 1.0) -> tf.Tensor:
    """`max(x - cut, 0)` with `cut = mean + alpha * standard deviation` of each row, over the last dimension.

    The cut counts as a constant: the gradient goes where the result is positive, and through the cut it does not.

    Args:
      x: float32, float16 or bfloat16, at least one dimension. Mean and (population) deviation are in float32.
      alpha: number or scalar tensor.
    """
    x = tf.convert_to_tensor(x)
    if x.dtype not in _DTYPES:
        raise ValueError(f"x has dtype {x.dtype.name}, allowed are float32, float16 and bfloat16")
    wide = tf.cast(x, tf.float32)
    mean, variance = tf.nn.moments(tf.stop_gradient(wide), axes=[-1], keepdims=True)
    return tf.nn.relu(tf.cast(wide - (mean + tf.cast(alpha, tf.float32) * tf.sqrt(variance)), x.dtype))
