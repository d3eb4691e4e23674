"""Scalars and arithmetic."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import blocksparse
from blocksparse import utils

tf1 = tf.compat.v1


def test_exports():
    for name in blocksparse.__all__:
        assert getattr(blocksparse, name) is not None
    assert isinstance(blocksparse.__version__, str)
    assert blocksparse._op_module.blocksparse_matmul is blocksparse.matmul.blocksparse_matmul
    for name in ("blocksparse_matmul_dx", "blocksparse_matmul_dw", "blocksparse_matmul_dwa", "blocksparse_matmul_dg"):
        assert callable(getattr(blocksparse.matmul, name))


def test_scalar_constant():
    one, one_as_float = utils.scalar_constant(1), utils.scalar_constant(1.0)
    assert (one.dtype, one_as_float.dtype) == (tf.int32, tf.float32)  # equal numbers, two constants
    assert utils.scalar_constant(1) is one and utils.scalar_constant(1, tf.float32) is one_as_float
    assert utils.scalar_constant(one) is one
    assert utils.scalar_constant(np.float64(0.5)).numpy() == 0.5
    utils.reset_scalar_constants()
    assert utils.scalar_constant(1) is not one
    for value in (np.float32(1), "1", None, [1]):
        with pytest.raises(ValueError, match="Not a scalar value"):
            utils.scalar_constant(value)


def test_scalar_constant_in_a_graph():
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf.control_dependencies([tf.no_op()]):
            half = utils.scalar_constant(0.5, name="half")
        assert utils.scalar_constant(0.5) is half and half.op.name == "half" and not half.op.control_inputs
        assert half.device.endswith("CPU:0") and session.run(half) == 0.5
        assert not tf1.global_variables()
    with tf.Graph().as_default():
        assert utils.scalar_constant(0.5).graph is tf1.get_default_graph()


def test_is_param_casted():
    with tf.Graph().as_default():
        a, b = tf1.get_variable("a", [2]), tf1.get_variable("b", [2])
        tf.cast(a, tf.float16), tf.exp(b)
        assert utils.is_param_casted(a) and not utils.is_param_casted(b)


def test_products_and_quotients():
    assert utils.reduce_mul([2, 3, 4]) == 24 and utils.reduce_mul([], 5) == 5
    assert [utils.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_z_order():
    square = sorted(((x, y) for y in range(4) for x in range(4)), key=lambda point: utils.z_order_2d(*point))
    assert square[:9] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (0, 2)]
    assert (utils.z_order_2d(0, 0), utils.z_order_2d(2**20, 2**20)) == (0, 3 * 2**40)
    assert [utils.z_order_3d(z, y, x) for z, y, x in [(0, 0, 1), (0, 1, 0), (1, 0, 0), (3, 3, 3)]] == [1, 2, 4, 63]


@given(st.integers(0, 2**32 - 1), st.integers(1, 2**32 - 1), st.data())
def test_magic32u(nmax, d, data):
    magic, shift = utils.magic32u(nmax, d)
    n = data.draw(st.integers(0, nmax))
    for m in {0, n, nmax, max(nmax // d * d - 1, 0), nmax // d * d}:
        assert m * magic >> shift == m // d


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_magic64u(n, d):
    magic, shift = utils.magic64u(d)
    assert 0 <= magic < 2**32 and shift >= 0
    for m in {0, n, 2**31 - 1, n // d * d}:
        assert (m >> shift if magic == 1 else m * magic >> 32 >> shift) == m // d


def test_magic_errors():
    with pytest.raises(ValueError, match="nmax must be at least 0 and d at least 1, got 5 and 0"):
        utils.magic32u(5, 0)


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.data())
def test_convolution_sizes(W, S, std, dil, data):
    pad = data.draw(st.integers(0, utils.dilation_size(S, dil) - 1))
    Q = utils.out_dim(S, W, pad, std, dil)
    reads = {}
    for q in range(max(Q, 0)):
        taps = [q * std - pad + s * dil for s in range(S)]
        assert taps[-1] - taps[0] + 1 == utils.dilation_size(S, dil) and taps[0] >= -pad and taps[-1] < W + pad
        assert utils.conv_slice(q, W, S, pad, std, dil) == [x for x in taps if 0 <= x < W]
        for x in utils.conv_slice(q, W, S, pad, std, dil):
            reads.setdefault(x, []).append(q)
    bpad = utils.backward_pad(S, pad, dil)
    for x in range(W):
        assert sorted(utils.deconv_slice(x, max(Q, 0), S, bpad, std, dil)) == reads.get(x, [])
    if S % 2 and std == 1:
        assert utils.out_dim(S, W, utils.same_pad(S, dil), 1, dil) == W
