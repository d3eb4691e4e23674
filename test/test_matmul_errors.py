"""What the product says of bad input, before anything runs. What the ops say of hand-made calls is in test_ops.py."""

import numpy as np
import pytest
import tensorflow as tf

from blocksparse.matmul import BlocksparseMatMul

LAYOUT = np.array([[1, 0, 1], [1, 1, 0]])


@pytest.fixture
def bsmm():
    return BlocksparseMatMul(LAYOUT, 8, 1, name="fc")


def tensor(*shape, dtype=tf.float32):
    return tf.ones(shape, dtype)


def expect(message, function, *arguments, error=ValueError, **options):
    """The error eagerly and while a function is built."""
    with pytest.raises(error, match=message):
        function(*arguments, **options)
    with pytest.raises(error, match=message):
        tf.function(lambda: function(*arguments, **options))()


# ------------------------------------------------------------------------------------------------------- constructor


def test_block_size():
    with pytest.raises(ValueError, match=r"block_size must be one of \(8, 16, 32, 64, 128\), got 24"):
        BlocksparseMatMul(LAYOUT, 24)


def test_feature_axis():
    with pytest.raises(ValueError, match=r"feature_axis must be 0 .* or 1 .*, got 2"):
        BlocksparseMatMul(LAYOUT, 8, 2)


def test_layout_is_not_two_dimensional():
    with pytest.raises(ValueError, match=r"two-dimensional .* got shape \(3,\)"):
        BlocksparseMatMul(np.ones(3), 8)


def test_layout_without_blocks():
    with pytest.raises(ValueError, match=r"at least one entry other than 0, got shape \(2, 3\)"):
        BlocksparseMatMul(np.zeros((2, 3)), 8)


def test_layout_of_strings():
    with pytest.raises(TypeError, match="real numbers"):
        BlocksparseMatMul([["a"]], 8)


def test_features_overflow():
    layout = np.zeros((1, 2**24), bool)
    layout[0, 0] = True
    with pytest.raises(ValueError, match="feature counts must stay below 2.31, got C=128 and K=2147483648"):
        BlocksparseMatMul(layout, 128)


# ---------------------------------------------------------------------------------------------------------- the call


def test_scalar_input(bsmm):
    expect("I must have at least one dimension, of 16 features, got a scalar", bsmm, tensor(), tensor(4, 8, 8))


def test_wrong_features(bsmm):
    expect(
        r"I must have 16 features in its last dimension .* got shape \(5, 17\)$", bsmm, tensor(5, 17), tensor(4, 8, 8)
    )


def test_features_last_where_first_are_expected():
    bsmm = BlocksparseMatMul(LAYOUT, 8)
    message = r"16 features in its first dimension .* got shape \(5, 16\)\. Its last dimension fits: .*feature_axis=1"
    expect(message, bsmm, tensor(5, 16), tensor(4, 8, 8))


def test_features_first_where_last_are_expected(bsmm):
    message = r"16 features in its last dimension .* got shape \(16, 5\)\. Its first dimension fits: .*feature_axis=0"
    expect(message, bsmm, tensor(16, 5), tensor(4, 8, 8))


@pytest.mark.parametrize("shape", [(3, 8, 8), (4, 16, 16), (4, 64)])
def test_weight_shape(bsmm, shape):
    expect(r"W must have shape \(4, 8, 8\) for this layout, got \(", bsmm, tensor(5, 16), tensor(*shape))


def test_dtype_mismatch(bsmm):
    expect(
        "I and W must have one dtype, got float16 and float32", bsmm, tensor(5, 16, dtype=tf.float16), tensor(4, 8, 8)
    )


@pytest.mark.parametrize("dtype", [tf.float64, tf.int32, tf.complex64])
def test_unsupported_dtype(bsmm, dtype):
    expect(
        f"I has dtype {dtype.name}, allowed are float32, float16 and bfloat16",
        bsmm,
        tensor(5, 16, dtype=dtype),
        tensor(4, 8, 8, dtype=dtype),
    )


@pytest.mark.parametrize("shape", [(3,), (4, 1), ()])
def test_gate_of_wrong_shape(bsmm, shape):
    expect(
        r"gate must have shape \(4,\), one entry for each block, got \(",
        bsmm,
        tensor(5, 16),
        tensor(4, 8, 8),
        tensor(*shape),
    )


def test_gate_dtype(bsmm):
    expect("gate must be float32, got float16", bsmm, tensor(5, 16), tensor(4, 8, 8), tensor(4, dtype=tf.float16))


def test_dw_dtype(bsmm):
    expect(
        "dw_dtype must be float32, float16 or bfloat16, got float64",
        bsmm,
        tensor(5, 16),
        tensor(4, 8, 8),
        dw_dtype="float64",
    )


def test_weight_grad_lists(bsmm):
    expect("lists of equal length, at least 1, got 1 and 2", bsmm.weight_grad, [tensor(5, 16)], [tensor(5, 24)] * 2)
    expect("lists of equal length, at least 1, got 0 and 0", bsmm.weight_grad, [], [])


def test_weight_grad_batches(bsmm):
    expect(r"xs\[0\] and dys\[0\] must have one batch shape", bsmm.weight_grad, [tensor(5, 16)], [tensor(6, 24)])


def test_weight_grad_features(bsmm):
    expect(r"dys\[1\] must have 24 features", bsmm.weight_grad, [tensor(5, 16)] * 2, [tensor(5, 24), tensor(5, 16)])


def test_weight_grad_dtypes(bsmm):
    half = tensor(5, 24, dtype=tf.float16)
    expect("xs and dys must have one dtype, got float32 and in pair 0", bsmm.weight_grad, [tensor(5, 16)], [half])


def test_weight_grad_gate(bsmm):
    pair = [tensor(5, 16)], [tensor(5, 24)]
    expect("gate_grad needs the gate and W", bsmm.weight_grad, *pair, gate_grad=True, gate=tensor(4))


def test_gain(bsmm):
    expect(r"gain must be float32 \[24\], got float32 \(16,\)", bsmm.l2_normalize, tensor(4, 8, 8), tensor(16))


def test_prune_shapes(bsmm):
    with pytest.raises(ValueError, match=r"param must be \(4, 8, 8\) and gate \(4,\)"):
        bsmm.prune(np.ones((3, 8, 8)), np.ones(4))


def test_jit_compile(bsmm):
    message = "have no XLA kernels .* jit_compile"
    x, w = tensor(5, 16), tensor(4, 8, 8)
    with pytest.raises(NotImplementedError, match=message):
        tf.function(bsmm, jit_compile=True)(x, w)
    inner = tf.function(lambda: bsmm(x, w))
    with pytest.raises(NotImplementedError, match=message):
        tf.function(lambda: inner() + 1, jit_compile=True)()
