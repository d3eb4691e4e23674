"""Elementwise operators: fused, in one pass over memory, for float32, float16 and bfloat16 on CPUs and GPUs.

Arithmetic is in float32 with one rounding at the end; biases and gains are float32 whatever the dtype of activations.
All work eagerly, in `tf.function` and in `tf.compat.v1` graphs, with unknown shapes and empty tensors, and are
differentiable, twice where mathematics allows. A tensor of another dtype, a bias of the wrong length and the like raise
ValueError, or InvalidArgumentError where only the running op can see it; a function with `jit_compile=True`
NotImplementedError.

The ops themselves are here too, as `ew_z_xy_op` and so on.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import math_ops

from blocksparse import _ewops_gradients as _codes
from blocksparse import _library
from blocksparse._random import draw_seed
from blocksparse._xla import check_not_xla
from blocksparse.utils import scalar_constant

_ops = _library.op_module

ew_z_xy_op = _ops.ew_z_xy
ew_z_xa_op = _ops.ew_z_xa
ew_z_xb_op = _ops.ew_z_xb
ew_dxdy_dzxy_op = _ops.ew_dxdy_dzxy
ew_dx_dzxa_op = _ops.ew_dx_dzxa
ew_dx_dzza_op = _ops.ew_dx_dzza
ew_db_dzb_op = _ops.ew_db_dzb
ew_dxdg_dzxg_op = _ops.ew_dxdg_dzxg
filter_tensor_op = _ops.filter_tensor
float_cast_op = _ops.float_cast
gen_dropout_mask_op = _ops.gen_dropout_mask
apply_dropout_mask_op = _ops.apply_dropout_mask
dropout_op = _ops.dropout
concrete_gate_op = _ops.concrete_gate
concrete_gate_grad_op = _ops.concrete_gate_grad
concrete_gate_infer_op = _ops.concrete_gate_infer
add_n8_op = _ops.add_n8
bias_relu_op = _ops.bias_relu
bias_relu_grad_op = _ops.bias_relu_grad
bias_grad_op = _ops.bias_grad
fancy_gather_op = _ops.fancy_gather
fancy_gather_grad_op = _ops.fancy_gather_grad
reduce_max_op = _ops.reduce_max
reduce_max_grad_op = _ops.reduce_max_grad
assign_add_op = _ops.assign_add_op
assign_add_variable_op = _ops.assign_add_variable

ew_names = (
    "Add Sub Mul Div Maximum Minimum Neg Rcp Sqr Sqrt Exp Log Sig Tanh Relu Elu Gelu Swish Biasadd Gainmul".split()
)
ADD_OP, SUB_OP, MUL_OP, DIV_OP, MAXIMUM_OP, MINIMUM_OP, NEG_OP, RCP_OP, SQR_OP, SQRT_OP = range(10)
EXP_OP, LOG_OP, SIG_OP, TANH_OP, RELU_OP, ELU_OP, GELU_OP, SWISH_OP, BIASADD_OP, GAINMUL_OP = range(10, 20)

_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


def _floating(name, x):
    """x as a tensor of one of the three dtypes."""
    x = tf.convert_to_tensor(x)
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {x.dtype.name}, allowed are float32, float16 and bfloat16")
    return x


def _vector(name, v):
    v = tf.convert_to_tensor(v)
    if v.dtype != tf.float32:
        raise ValueError(f"{name} has dtype {v.dtype.name}, must be float32 whatever the dtype of x")
    return v


def _host_scalar(name, value):
    """A float32 scalar in host memory, from a number or a tensor."""
    if not tf.is_tensor(value):
        try:
            return scalar_constant(float(value), tf.float32)
        except TypeError:
            value = tf.convert_to_tensor(value)  # a variable
    if not value.dtype.is_floating:
        raise ValueError(f"{name} has dtype {value.dtype.name}, must be floating")
    with tf.device("/cpu:0"):
        return tf.cast(value, tf.float32)


def _check_axis(axis, rank):
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise ValueError(f"axis must be an int, got {axis!r}")
    axis = int(axis)
    if rank is not None and not -rank <= axis < rank:
        raise ValueError(f"axis must be {-rank} to {rank - 1} for a tensor of rank {rank}, got {axis}")
    return axis


# ---------------------------------------------------------------------------------------------------------- binary


def broadcast_check(x, y, ew_op: int, bc_op: int | None, tf_op, name: str | None = None) -> tf.Tensor:
    """An operator on two tensors, by what their shapes ask for.

    1. The same static shape (unknown sizes count as the same) and one of the three dtypes: our op.
    2. `bc_op` given, and one operand is a float32 vector, `[K]` or `[1, ..., K]`, over the last dimension of the other:
       our op for a bias or a gain; the result has the other's dtype.
    3. Otherwise `tf_op`, with TensorFlow's broadcasting and rules on dtypes.
    """
    if not tf.is_tensor(x) and not isinstance(x, tf.Variable) and (tf.is_tensor(y) or isinstance(y, tf.Variable)):
        y = tf.convert_to_tensor(y)
        x = tf.convert_to_tensor(x, y.dtype) if isinstance(x, (int, float)) else tf.convert_to_tensor(x)
    x = tf.convert_to_tensor(x)
    y = tf.convert_to_tensor(y, x.dtype) if isinstance(y, (int, float)) else tf.convert_to_tensor(y)
    if x.dtype == y.dtype and x.dtype in _DTYPES and x.shape.rank is not None and x.shape.rank == y.shape.rank:
        if x.shape.as_list() == y.shape.as_list():
            check_not_xla(ew_names[ew_op])
            return ew_z_xy_op(x, y, op=ew_op, name=name or ew_names[ew_op])
    if bc_op is not None:
        for activation, vector in ((x, y), (y, x)):
            if _is_vector_over(vector, activation):
                check_not_xla(ew_names[bc_op])
                return ew_z_xb_op(activation, vector, op=bc_op, name=name or ew_names[bc_op])
    if x.dtype != y.dtype:
        raise ValueError(
            f"x and y must have one dtype unless one is a float32 vector over the last dimension of the other, got "
            f"{x.dtype.name} {x.shape} and {y.dtype.name} {y.shape}"
        )
    return tf_op(x, y, name=name)


def _is_vector_over(vector, activation):
    if vector.dtype != tf.float32 or activation.dtype not in _DTYPES or not vector.shape.is_fully_defined():
        return False
    if activation.shape.rank is None or not 1 <= vector.shape.rank <= activation.shape.rank:
        return False
    return vector.shape.num_elements() == vector.shape[-1] == activation.shape[-1]


def add(x, y, name: str | None = None) -> tf.Tensor:
    """`x + y`. A float32 vector over the last dimension of the other operand is a bias; its gradient is float32."""
    return broadcast_check(x, y, _codes.ADD, _codes.BIASADD, tf.add, name)


def multiply(x, y, name: str | None = None) -> tf.Tensor:
    """`x * y`. A float32 vector over the last dimension of the other operand is a gain; its gradient is float32."""
    return broadcast_check(x, y, _codes.MUL, _codes.GAINMUL, tf.multiply, name)


def subtract(x, y, name: str | None = None) -> tf.Tensor:
    """`x - y`."""
    return broadcast_check(x, y, _codes.SUB, None, tf.subtract, name)


def divide(x, y, name: str | None = None) -> tf.Tensor:
    """`x / y`."""
    return broadcast_check(x, y, _codes.DIV, None, tf.divide, name)


def maximum(x, y, name: str | None = None) -> tf.Tensor:
    """The greater of x and y, NaN where one is. At a tie both operands of one shape get the whole gradient."""
    return broadcast_check(x, y, _codes.MAXIMUM, None, tf.maximum, name)


def minimum(x, y, name: str | None = None) -> tf.Tensor:
    """The smaller of x and y, NaN where one is. At a tie both operands of one shape get the whole gradient."""
    return broadcast_check(x, y, _codes.MINIMUM, None, tf.minimum, name)


# ----------------------------------------------------------------------------------------------------------- unary


def _unary(x, code, name, alpha=1.0):
    check_not_xla(ew_names[code])
    return ew_z_xa_op(_floating("x", x), op=code, alpha=alpha, name=name or ew_names[code])


def negative(x, name: str | None = None) -> tf.Tensor:
    """`-x`."""
    return _unary(x, _codes.NEG, name)


def reciprocal(x, name: str | None = None) -> tf.Tensor:
    """`1 / x`."""
    return _unary(x, _codes.RCP, name)


def square(x, name: str | None = None) -> tf.Tensor:
    """`x^2`."""
    return _unary(x, _codes.SQR, name)


def sqrt(x, name: str | None = None) -> tf.Tensor:
    """The square root of x."""
    return _unary(x, _codes.SQRT, name)


def exp(x, name: str | None = None) -> tf.Tensor:
    """`e^x`."""
    return _unary(x, _codes.EXP, name)


def log(x, name: str | None = None) -> tf.Tensor:
    """The natural logarithm of x."""
    return _unary(x, _codes.LOG, name)


def sigmoid(x, name: str | None = None) -> tf.Tensor:
    """`1 / (1 + e^-x)`."""
    return _unary(x, _codes.SIG, name)


def tanh(x, name: str | None = None) -> tf.Tensor:
    """The hyperbolic tangent of x."""
    return _unary(x, _codes.TANH, name)


def relu(x, name: str | None = None) -> tf.Tensor:
    """`max(x, 0)`; its derivative at 0 is 0."""
    return _unary(x, _codes.RELU, name)


def elu(x, alpha: float = 1.0, name: str | None = None) -> tf.Tensor:
    """x where `x > 0`, else `alpha (e^x - 1)`."""
    return _unary(x, _codes.ELU, name, alpha)


def gelu(x, alpha: float = 0.044715, name: str | None = None) -> tf.Tensor:
    """`0.5 x (1 + tanh(sqrt(2 / pi) (x + alpha x^3)))` (D. Hendrycks, K. Gimpel, 2016)."""
    return _unary(x, _codes.GELU, name, alpha)


def swish(x, alpha: float = 1.0, name: str | None = None) -> tf.Tensor:
    """`x sigmoid(alpha x)`."""
    return _unary(x, _codes.SWISH, name, alpha)


def fast_gelu(x, name: str | None = None) -> tf.Tensor:
    """`x sigmoid(1.702 x)`, which is near `gelu`."""
    return swish(x, _codes.FAST_GELU_ALPHA, name)


# ------------------------------------------------------------------------------------------- filtering, scaling, casts


def filter_tensor(
    x, scale=1.0, saturate: float = 0.0, zero_infs: bool = False, zero_nans: bool = False, name: str | None = None
) -> tf.Tensor:
    """In this order: infinities to 0 and NaN to 0 (where asked for), times `scale`, clamped to +-`saturate` (unless 0).

    The gradient goes through the same filter with the same scale; `scale` gets none.

    Args:
      x: float32, float16 or bfloat16, any shape.
      scale: number, or floating scalar tensor.
      saturate: 65504 is the largest float16.
    """
    check_not_xla("filter_tensor")
    return filter_tensor_op(
        _floating("x", x),
        _host_scalar("scale", scale),
        saturate=saturate,
        zero_infs=zero_infs,
        zero_nans=zero_nans,
        name=name or "FilterTensor",
    )


def scale_tensor(x, scale=1.0, name: str | None = None) -> tf.Tensor:
    """`scale * x`; `scale` is a number or a floating scalar tensor and gets no gradient."""
    return filter_tensor(x, scale, name=name or "ScaleTensor")


def float_cast(x, dtype, dx_dtype=None, name: str | None = None) -> tf.Tensor:
    """x in another dtype. Casting to the dtype that x has gives x itself.

    Args:
      x, dtype: between float32, float16 and bfloat16.
      dx_dtype: of the gradient with respect to x; default x's. Another than x's works where all contributions to that
        gradient share it and no while-loop carries it; elsewhere TensorFlow raises an error.
    """
    x = _floating("x", x)
    dtype = tf.as_dtype(dtype)
    dx_dtype = x.dtype if dx_dtype is None else tf.as_dtype(dx_dtype).base_dtype
    for what, value in (("dtype", dtype), ("dx_dtype", dx_dtype)):
        if value not in _DTYPES:
            raise ValueError(f"{what} must be float32, float16 or bfloat16, got {value.name}")
    if dtype == x.dtype:
        return x
    check_not_xla("float_cast")
    return float_cast_op(x, TY=dtype, dx_dtype=dx_dtype, name=name or "FloatCast")


# --------------------------------------------------------------------------------------------------------- dropout


def dropout(x, keep_prob, mask=None, mask_shape=None) -> tuple[tf.Tensor, tf.Tensor]:
    """`x / keep_prob` where an element is kept and 0 elsewhere.

    Which elements are kept depends on the seed of the call alone, not on the device; see `set_entropy` for seeds. To
    compute the same again, pass the mask of the first call.

    Args:
      x: float32, float16 or bfloat16, any shape.
      keep_prob: number or floating scalar tensor from 0 to 1; each element is kept with this probability.
      mask: what an earlier call gave.
      mask_shape: shape of the mask where it is broadcast over x: for each dimension of x its size (also as None) or 1.
        ints, or an integer tensor. Default: a bit for each element.

    Returns:
      `(y, mask)`. mask is int32 `[ceil(bits / 32)]`: element e, counted in row-major order over `mask_shape`, is bit
      `e % 32`, from the lowest, of word `e // 32`; 1 means kept; bits past the last element are 0.
    """
    x = _floating("x", x)
    if not tf.is_tensor(keep_prob) and not isinstance(keep_prob, tf.Variable) and not 0 <= keep_prob <= 1:
        raise ValueError(f"keep_prob must be 0 to 1, got {keep_prob}")
    keep_prob = _host_scalar("keep_prob", keep_prob)
    if mask is not None:
        mask = tf.convert_to_tensor(mask)
        if mask.dtype != tf.int32:
            raise ValueError(f"mask has dtype {mask.dtype.name}, must be int32")
    check_not_xla("dropout")
    shape, size = _mask_shape(x, mask_shape)
    if mask is None and size is None:
        return dropout_op(x, draw_seed(), keep_prob)
    if mask is None:
        mask = gen_dropout_mask_op(draw_seed(), size, keep_prob)
    return apply_dropout_mask_op(x, mask, keep_prob, shape), mask


def _mask_shape(x, mask_shape):
    """`mask_shape` and its number of elements, int64 on the host; the number is None for a bit for each element."""
    if mask_shape is None or (not tf.is_tensor(mask_shape) and len(mask_shape) == 0):
        return _codes.no_mask_shape(), None
    with tf.device("/cpu:0"):
        if tf.is_tensor(mask_shape):
            if not mask_shape.dtype.is_integer:
                raise ValueError(f"mask_shape must be integers, got {mask_shape.dtype.name}")
            shape = tf.cast(mask_shape, tf.int64)
            return shape, tf.reduce_prod(shape)
        sizes = list(mask_shape.as_list() if isinstance(mask_shape, tf.TensorShape) else mask_shape)
        if x.shape.rank is not None:
            fits = len(sizes) == x.shape.rank and all(
                size in (None, 1) or dim is None or size == dim for size, dim in zip(sizes, x.shape.as_list())
            )
            if not fits:
                raise ValueError(
                    f"mask_shape must have the rank of x, with 1 or x's size in each dimension: x is {x.shape}, "
                    f"got {sizes}"
                )
        if None in sizes:
            known = tf.shape(x, out_type=tf.int64)
            shape = tf.stack(
                [known[d] if size is None else tf.constant(size, tf.int64) for d, size in enumerate(sizes)]
            )
        else:
            shape = tf.constant(sizes, tf.int64)
        return shape, tf.reduce_prod(shape)


# --------------------------------------------------------------------------------------------- hard concrete gates


def concrete_gate(
    loga, tempurature=2.0 / 3.0, limit_a: float = -0.1, limit_b: float = 1.1, epsilon: float = 1e-6
) -> tf.Tensor:
    """Random gates in `[0, 1]`, many of them exactly 0 or 1 (C. Louizos, M. Welling, D. P. Kingma, 2018).

    With r uniform in `[0, 1)` and `u = r (1 - 2 epsilon) + epsilon`, the gate is `s (limit_b - limit_a) + limit_a`,
    clipped, where `s = sigmoid((ln(u / (1 - u)) + loga) / tempurature)`. For seeds see `set_entropy`. Only loga has a
    gradient.

    Args:
      loga: float32, any shape.
      tempurature: number or floating scalar tensor, more than 0.
    """
    check_not_xla("concrete_gate")
    gate, _ = concrete_gate_op(
        _vector("loga", loga),
        draw_seed(),
        _host_scalar("tempurature", tempurature),
        limit_a=limit_a,
        limit_b=limit_b,
        epsilon=epsilon,
    )
    return gate


def concrete_gate_infer(loga, limit_a: float = -0.1, limit_b: float = 1.1) -> tf.Tensor:
    """Gates for inference: `sigmoid(loga) (limit_b - limit_a) + limit_a`, clipped to `[0, 1]`. loga is float32."""
    check_not_xla("concrete_gate_infer")
    return concrete_gate_infer_op(_vector("loga", loga), limit_a=limit_a, limit_b=limit_b)


# ------------------------------------------------------------------------------------------------------------ sums


def add_n8(xs, name: str | None = "AddN") -> tf.Tensor:
    """The sum of a list of tensors of one shape and dtype, in the order of the list, in one pass; at most 4000."""
    xs = [_floating(f"xs[{i}]", x) for i, x in enumerate(xs)]
    if not xs:
        raise ValueError("xs must be a list of at least one tensor, got an empty one")
    if len({x.dtype for x in xs}) > 1:
        raise ValueError(f"xs must have one dtype, got {', '.join(sorted({x.dtype.name for x in xs}))}")
    check_not_xla("add_n8")
    return add_n8_op(xs, name=name)


def add_n(xs, name: str | None = "AddN") -> tf.Tensor:
    """The sum of a list of tensors of one shape and dtype, or its only tensor. The list stays as it is."""
    xs = list(xs)
    if len(xs) == 1:
        return xs[0]
    return add(*xs, name=name) if len(xs) == 2 else add_n8(xs, name)


_tf_add_n = None


def replace_add_n() -> None:
    """Makes `tf.gradients` add up contributions to a gradient with `add_n`: fewer passes, sums in float32.

    `tf.gradients` alone: `tf.GradientTape` and what called `tf.add_n` by that name are not affected. `restore_add_n`
    undoes it.
    """
    global _tf_add_n
    if _tf_add_n is None:
        _tf_add_n = math_ops.add_n
        math_ops.add_n = _replaced_add_n


def restore_add_n() -> None:
    """Undoes `replace_add_n`."""
    global _tf_add_n
    if _tf_add_n is not None:
        math_ops.add_n = _tf_add_n
        _tf_add_n = None


def _replaced_add_n(inputs, name=None):
    ours = isinstance(inputs, (list, tuple)) and all(tf.is_tensor(x) and x.dtype in _DTYPES for x in inputs)
    if not ours or isinstance(inputs[0], tf.IndexedSlices):
        return _tf_add_n(inputs, name)
    return add_n(inputs, name or "AddN")


# ------------------------------------------------------------------------------------------------ bias and activation


def bias_relu(
    x,
    b,
    axis: int = -1,
    relu: bool = False,
    fast_gelu: bool = False,
    atomics: bool = True,
    bench: int = 0,
    use_tf: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """`act(x + b)` along an axis; act is the identity, relu or `v sigmoid(1.702 v)`.

    Args:
      x: float32, float16 or bfloat16.
      b: float32, any shape, one element for each index of `axis`. Its gradient is float32 and has its shape.
      axis: of x; negative counts from the last.
      relu, fast_gelu: the activation; not both.
      atomics: no effect: sums are always in a fixed order.
      bench: repeats of the launch whose mean time is printed; 0 for none.
      use_tf: compose it of TensorFlow's ops.
    """
    if relu and fast_gelu:
        raise ValueError("relu and fast_gelu cannot both be asked for")
    x, b = _floating("x", x), _vector("b", b)
    axis = _check_axis(axis, x.shape.rank)
    if x.shape.rank is not None and b.shape.is_fully_defined() and x.shape[axis] is not None:
        if b.shape.num_elements() != x.shape[axis]:
            raise ValueError(
                f"b must have {x.shape[axis]} elements for axis {axis} of x {x.shape}, got shape {b.shape}"
            )
    if use_tf:
        v = tf.cast(x, tf.float32) + _codes._over_axis(b, x, axis)
        v = tf.nn.relu(v) if relu else v * tf.sigmoid(_codes.FAST_GELU_ALPHA * v) if fast_gelu else v
        return tf.cast(v, x.dtype, name=name)
    check_not_xla("bias_relu")
    return bias_relu_op(
        x, b, axis=axis, relu=1 if relu else 2 if fast_gelu else 0, bench=bench, name=name or "BiasRelu"
    )


# --------------------------------------------------------------------------------------------------------- indices


def fancy_gather(x, idx, use_tf: bool = False, name: str | None = None) -> tf.Tensor:
    """`y[i..., rest...] = x[i..., idx[i...], rest...]`.

    A negative index counts as 0; one past the end gives 0 and no gradient.

    Args:
      x: float32, float16, bfloat16 or int32, of higher rank than idx, whose leading dimensions are idx's shape.
      idx: integers, any shape.
      use_tf: compose it of TensorFlow's ops; an index past the end then does what `tf.gather` does.

    Returns:
      `idx.shape + x.shape[rank of idx + 1:]`, x's dtype.
    """
    x, idx = tf.convert_to_tensor(x), tf.convert_to_tensor(idx)
    if x.dtype not in (*_DTYPES, tf.int32):
        raise ValueError(f"x has dtype {x.dtype.name}, allowed are float32, float16, bfloat16 and int32")
    if not idx.dtype.is_integer:
        raise ValueError(f"idx has dtype {idx.dtype.name}, must be integers")
    rank = idx.shape.rank
    if x.shape.rank is not None and rank is not None:
        if x.shape.rank <= rank or not x.shape[:rank].is_compatible_with(idx.shape):
            raise ValueError(
                f"the leading dimensions of x must be those of idx, with one more to index: x is {x.shape}, "
                f"idx {idx.shape}"
            )
    if idx.dtype.size > 4 or idx.dtype == tf.uint32:
        idx = tf.cast(tf.clip_by_value(tf.cast(idx, tf.int64), -1, 2**31 - 1), tf.int32)
    idx = tf.cast(idx, tf.int32)
    if use_tf:
        return tf.gather(x, tf.maximum(idx, 0), batch_dims=rank, axis=rank, name=name)
    check_not_xla("fancy_gather")
    return fancy_gather_op(x, idx, name=name or "FancyGather")


def reduce_max(x, axis: int, keepdims: bool = False, use_tf: bool = False, name: str | None = None) -> tf.Tensor:
    """The maximum over an axis. The first of equal elements gets the whole gradient.

    NaN never wins; where no element is greater than -FLT_MAX the result is -FLT_MAX.

    Args:
      x: float32, float16 or bfloat16.
      axis: an int; negative counts from the last.
      keepdims: keep the axis, with size 1.
      use_tf: `tf.reduce_max`, by its rules on ties and NaN.
    """
    x = _floating("x", x)
    axis = _check_axis(axis, x.shape.rank)
    if use_tf:
        return tf.reduce_max(x, axis, keepdims, name=name)
    check_not_xla("reduce_max")
    return reduce_max_op(x, axis=axis, keepdims=keepdims, name=name or "ReduceMax")[0]


# ------------------------------------------------------------------------------------------------------- variables


def assign_add(y, x, name: str | None = None):
    """Adds x to a variable, in float32 with one rounding. No gradient.

    Args:
      y: float32, float16 or bfloat16 variable. Values read from it before keep what they were.
      x: tensor of its shape and dtype.

    Returns:
      In a graph a tensor that is the new value, for a v1 reference variable its reference; eagerly y.
    """
    x = tf.convert_to_tensor(x)
    if not isinstance(y, tf.Variable) and not (tf.is_tensor(y) and y.dtype._is_ref_dtype):
        raise ValueError(f"y must be a variable, got {type(y).__name__}")
    dtype = y.dtype.base_dtype
    if dtype not in _DTYPES or x.dtype != dtype:
        raise ValueError(f"y and x must both be float32, float16 or bfloat16, got {dtype.name} and {x.dtype.name}")
    if not x.shape.is_compatible_with(y.shape):
        raise ValueError(f"x must have the variable's shape {y.shape}, got {x.shape}")
    check_not_xla("assign_add")
    if y.dtype._is_ref_dtype:
        return assign_add_op(y._ref() if isinstance(y, tf.Variable) else y, x, name=name)
    done = assign_add_variable_op(y.handle, x, name=name)
    if tf.executing_eagerly():
        return y
    with tf.control_dependencies([done]):
        return y.read_value()
