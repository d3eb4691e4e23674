"""LSTM cells: the gates fused in one pass over memory, forward and backward, and cells built on them.

The gates work for float32, float16 and bfloat16 on CPUs and GPUs; arithmetic is in float32 with one rounding at the
end, biases and their gradients are float32. They run eagerly, in `tf.function` and in `tf.compat.v1` graphs, with
unknown shapes and empty tensors, and have derivatives of every order. Operands that do not fit raise ValueError, or
InvalidArgumentError where only the running op can see it.

The ops themselves are here too, as `lstm_gates_op` and so on.
"""

from __future__ import annotations

import collections
import os

import tensorflow as tf

from blocksparse import _grouping, _library, _lstm_gradients  # noqa: F401 (_lstm_gradients registers itself)
from blocksparse._xla import check_not_xla
from blocksparse.ewops import float_cast
from blocksparse.norms import layer_norm
from blocksparse.reference import sparse_relu_test

__all__ = [
    "FusedBasicLSTMCell",
    "concat4",
    "fused_lstm_gates",
    "group_lstm_grads",
    "grouped_lstm",
    "sparse_relu",
    "sparse_relu_test",
    "split4",
]

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
    check_not_xla("fused_lstm_gates")
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


# ----------------------------------------------------------------------------------------------------------- cells


LSTMStateTuple = collections.namedtuple("LSTMStateTuple", ["c", "h"])


class _BasicLSTMCell(tf.Module):
    """What a cell of `tf.compat.v1` has to be, for TensorFlow with Keras 3, which has no BasicLSTMCell."""

    def __init__(self, num_units, forget_bias, state_is_tuple, activation, reuse, name, dtype):
        super().__init__(name)
        self._num_units, self._forget_bias, self._state_is_tuple = num_units, forget_bias, state_is_tuple
        self._scope, self._reuse, self._dtype = name, reuse, dtype
        self._kernel = self._bias = None

    @property
    def state_size(self):
        return LSTMStateTuple(self._num_units, self._num_units) if self._state_is_tuple else 2 * self._num_units

    @property
    def output_size(self):
        return self._num_units

    def zero_state(self, batch_size, dtype):
        return tf.nest.map_structure(lambda size: tf.zeros([batch_size, size], dtype), self.state_size)

    def get_initial_state(self, inputs=None, batch_size=None, dtype=None):
        if inputs is not None:
            inputs = tf.convert_to_tensor(inputs)
            batch_size, dtype = tf.shape(inputs)[0], inputs.dtype
        if batch_size is None or dtype is None:
            raise ValueError(f"give inputs, or batch_size and dtype; got batch_size {batch_size} and dtype {dtype}")
        return self.zero_state(batch_size, dtype)

    def build(self, inputs_shape):
        features, units = tf.TensorShape(inputs_shape)[-1], self._num_units
        if features is None:
            raise ValueError(f"the number of input features must be known, got inputs of shape {inputs_shape}")
        scope = self.name if self._reuse else self._scope
        with tf.init_scope(), tf.compat.v1.variable_scope(scope, self.name, reuse=self._reuse):
            self._kernel = tf.compat.v1.get_variable("kernel", [features + units, 4 * units], self._dtype)
            zeros = tf.compat.v1.zeros_initializer()
            self._bias = tf.compat.v1.get_variable("bias", [4 * units], tf.float32, zeros)

    def __call__(self, inputs, state, scope=None):
        inputs = tf.convert_to_tensor(inputs)
        if inputs.shape.rank not in (None, 2):
            raise ValueError(f"inputs must be [batch, features], got shape {inputs.shape}")
        if self._kernel is None:
            self._scope = self._scope or scope
            self._dtype = tf.as_dtype(self._dtype or inputs.dtype)
            self.build(inputs.shape)
        return self.call(inputs, state)


def _tensorflow_cell():
    """TensorFlow's BasicLSTMCell, which is there where Keras 2 is asked for; else None."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() not in ("1", "true"):
        return None
    try:
        return tf.compat.v1.nn.rnn_cell.BasicLSTMCell
    except (AttributeError, ImportError):
        return None


class _FusedGates:
    """Fuses the gates of the cell class that comes after it."""

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        state_is_tuple: bool = True,
        activation=None,
        reuse: bool | None = None,
        name: str | None = None,
        dtype=None,
        **kwargs,
    ):
        if activation not in (None, "tanh", tf.tanh):
            raise ValueError(f"activation must be tanh, which is what the fused gates compute, got {activation!r}")
        super().__init__(num_units, forget_bias, state_is_tuple, None, reuse, name, dtype, **kwargs)

    def call(self, inputs, state):
        c, h = state if self._state_is_tuple else tf.split(state, 2, axis=1)
        gates = tf.matmul(tf.concat([inputs, h], 1), self._kernel)
        c, h = fused_lstm_gates(c, gates, bias=tf.cast(self._bias, tf.float32), forget_bias=self._forget_bias)
        return h, tf.nest.pack_sequence_as(state, [c, h]) if self._state_is_tuple else tf.concat([c, h], 1)


class FusedBasicLSTMCell(_FusedGates, _tensorflow_cell() or _BasicLSTMCell):
    """The LSTM cell of `tf.compat.v1.nn.dynamic_rnn` and its like, with fused gates.

    `cell(inputs, state)` gives `(h, state)` for inputs `[batch, features]` and state `(c, h)`, `[batch, num_units]`
    each. It derives from TensorFlow's `BasicLSTMCell` where TensorFlow runs on Keras 2, and stands alone elsewhere. Its
    variables are kernel `[features + num_units, 4 num_units]`, with gates in the order i, u, f, o, and bias.

    Args:
      num_units: int.
      forget_bias: number, added to the forget gate's argument.
      state_is_tuple: False: states are `[batch, 2 num_units]`, c beside h.
      activation: None or tanh.
      reuse: True: use the variables that an earlier cell of the same name has made in this scope.
      name: of the scope of the variables.
      dtype: of the kernel; default that of the first inputs.
    """


# ------------------------------------------------------------------------------------ recurrence, grouped gradients


def grouped_lstm(
    inputs,
    width: int,
    timesteps: int,
    initial_state,
    scope: str = "grouped_lstm",
    reuse: bool | None = None,
    lstm_id: int = 0,
    layernorm: bool = True,
    variables=None,
):
    """An LSTM unrolled over time, whose weight gradients `group_lstm_grads` can group.

    Step t computes `matmul(concat([x_t, h]), kernel)`, then layer norm for each gate (without: a bias), then the gates,
    with a forget bias of 1.

    Args:
      inputs: `[batch, timesteps, features]`, float32, float16 or bfloat16, the number of features known.
      width: units.
      timesteps: int.
      initial_state: `(c, h)`, `[batch, width]` each, of the dtype of inputs.
      scope, reuse: of the variables, float32: kernel `[features + width, 4 width]`, bias `[4 width]` and, with layer
        norm, gain `[4 width]`. They are made by `tf.compat.v1.get_variable` in a graph of `tf.compat.v1`.
      lstm_id: int, distinguishes LSTMs that share a scope.
      layernorm: bool.
      variables: what to use in place of new variables, needed outside `tf.compat.v1` graphs: `(kernel, bias, gain)`,
        without layer norm `(kernel, bias)`.

    Returns:
      `(output [batch, timesteps, width], [c, h])`.
    """
    inputs = tf.convert_to_tensor(inputs)
    if inputs.dtype not in _DTYPES:
        raise ValueError(f"inputs has dtype {inputs.dtype.name}, allowed are float32, float16 and bfloat16")
    features = inputs.shape[-1] if inputs.shape.rank else None
    if features is None:
        raise ValueError(f"the number of input features must be known, got inputs of shape {inputs.shape}")
    if timesteps < 1 or (inputs.shape.rank == 3 and inputs.shape[1] not in (None, timesteps)):
        raise ValueError(f"timesteps is {timesteps}, inputs are [batch, timesteps, features] = {inputs.shape}")
    names = ("kernel", "bias", "gain") if layernorm else ("kernel", "bias")
    with tf.init_scope():
        if variables is None and tf.executing_eagerly():
            raise ValueError(f"grouped_lstm makes variables in tf.compat.v1 graphs alone; elsewhere pass them: {names}")
    if variables is not None and len(variables) != len(names):
        raise ValueError(f"variables must be {names}, got {len(variables)} of them")
    with tf.compat.v1.variable_scope(scope, reuse=reuse):
        if variables is None:
            shapes = [[features + width, 4 * width], [4 * width], [4 * width]]
            initializers = [None, tf.compat.v1.zeros_initializer(), tf.compat.v1.ones_initializer()]
            variables = [
                tf.compat.v1.get_variable(name, shape, tf.float32, initializer)
                for name, shape, initializer in zip(names, shapes, initializers)
            ]
        kernel, bias, *gain = variables
        kernel = float_cast(kernel, inputs.dtype, dx_dtype=inputs.dtype)
        xs = [tf.reshape(inputs, [-1, features])]
        if timesteps > 1:
            xs = tf.unstack(inputs, timesteps, axis=1)
        c, h = initial_state
        outputs = []
        for step, x in enumerate(xs):
            gates = tf.matmul(tf.concat([x, h], 1), kernel, name=f"lstm_{lstm_id:02d}/step_{step:04d}")
            if layernorm:
                gates = layer_norm(gates, *gain, bias, axis=1, segments=4)
            c, h = fused_lstm_gates(c, gates, bias=None if layernorm else bias)
            outputs.append(h)
        return tf.stack(outputs, 1), [c, h]


def group_lstm_grads(grads, params, scope: str = "grouped_lstm", group_size: int | None = None):
    """Computes the kernel's gradient of `grouped_lstm` by few large products instead of one for each time step.

    Changes `grads` in place: the gradient of the parameter whose name contains `scope` and "kernel" gets an equal
    value, in which the products of each LSTM's steps are one product for every `group_size` of them.

    Args:
      grads: list of gradients, from `tf.gradients` or a tape in a function.
      params: list of the variables that they belong to.
      scope: see above.
      group_size: time steps in one product; default all.

    Returns:
      grads.

    Raises:
      AssertionError: no parameter has such a name.
      ValueError: eagerly, or where the time steps are behind a loop or a function call.
    """
    places = [i for i, param in enumerate(params) if scope in param.name and "kernel" in param.name]
    assert places, f"none of the parameters has {scope!r} and 'kernel' in its name: {[p.name for p in params]}"
    if group_size is not None and group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    place = places[0]
    total = grads[place]
    if not isinstance(total, tf.Tensor) or isinstance(total, tf.__internal__.EagerTensor):
        raise ValueError(f"group_lstm_grads needs a tensor of a graph, got {type(total).__name__}: {_ELSEWHERE}")
    while total.op.type in ("FloatCast", "Cast", "Identity"):
        total = total.op.inputs[0]
    steps, others = {}, []
    for term in _grouping._terms(total):
        op = term.op
        if op.type == "MatMul" and op.get_attr("transpose_a") and not op.get_attr("transpose_b"):
            path = op.name.split("/")
            steps.setdefault(path[-3] if len(path) > 2 else "", []).append(op)
        else:
            others.append(term)
    if not steps:
        raise ValueError(f"group_lstm_grads found no weight gradient in op {total.op.name!r}: {_ELSEWHERE}")
    terms = []
    with tf.name_scope("group_lstm_grads"), tf.device(total.device or None):
        for lstm in sorted(steps):
            ops = steps[lstm]
            for _, group in _grouping._chunks(ops, group_size or len(ops)):
                x, dy = (tf.concat([op.inputs[i] for op in group], 0) for i in (0, 1))
                terms.append(tf.matmul(x, dy, transpose_a=True))
        grads[place] = tf.cast(tf.add_n(others + terms), grads[place].dtype)
    return grads


_ELSEWHERE = (
    "this works where the time steps are ops of one graph: a tf.compat.v1 graph, or a loop unrolled in a tf.function. "
    "In every mode, a recurrence with a custom gradient can multiply the concatenated steps once"
)
