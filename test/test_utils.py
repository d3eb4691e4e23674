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


def test_conv_layout_examples(capsys):
    """Those of the original's documentation."""
    layout, mask = utils.bst_conv_layout(input_w=64, filter_w=15, stride=1, blk_size=8)
    assert "padding 0x7" in capsys.readouterr().out
    assert layout.dtype == bool and np.array_equal(layout, np.eye(8) + np.eye(8, k=-1))
    assert np.array_equal(mask((8, 8), 0, 3, 3, 0), np.tri(8))
    layout, _ = utils.bst_conv_layout(input_w=64, filter_w=8, stride=2, blk_size=8)
    assert [np.flatnonzero(row).tolist() for row in layout] == [[0, 1], [1, 2, 3], [3, 4, 5], [5, 6, 7]]
    layout, _ = utils.bst_deconv_layout(output_w=64, filter_w=8, stride=2, blk_size=8)
    assert [np.flatnonzero(row).tolist() for row in layout] == [[0], [0], [0, 1], [1], [1, 2], [2], [2, 3], [3]]


@given(
    *(st.integers(1, 6) for _ in range(2)),
    *(st.integers(1, 7) for _ in range(2)),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_conv_layout_connects_what_the_convolution_does(h, w, filter_h, filter_w, stride, autoregressive, turned, data):
    """Pixel by pixel."""
    H, W = 1 if h == 1 else h * stride, w * stride
    P, Q = max(H // stride, 1), w
    blk_size = data.draw(st.sampled_from([b for b in range(1, P * Q + 1) if P * Q % b == 0 and H * W % b == 0]))
    build = utils.bst_deconv_layout if turned else utils.bst_conv_layout
    try:
        layout, mask = build(H, W, filter_h, filter_w, stride, blk_size, autoregressive)
    except ValueError as error:
        assert "no padding" in str(error)
        return
    filters = [1 if H == 1 else filter_h, filter_w]
    pads = [
        next(p for p in range(f) if utils.out_dim(f, size, p, stride) == out)
        for f, size, out in zip(filters, (H, W), (P, Q), strict=True)
    ]
    expected = np.zeros((P * Q, H * W), bool)
    for p, q in np.ndindex(P, Q):
        for i in utils.conv_slice(p, H, filters[0], pads[0], stride):
            for j in utils.conv_slice(q, W, filters[1], pads[1], stride):
                key, query = i * W + j, p * stride * Q * stride + q * stride
                expected[p * Q + q, i * W + j] = not autoregressive or (key >= query if turned else key <= query)
    expected = expected.T if turned else expected
    blocks = expected.reshape(layout.shape[0], blk_size, layout.shape[1], blk_size)
    assert np.array_equal(layout, blocks.any((1, 3)))
    for q, k in np.ndindex(*layout.shape):
        assert np.array_equal(mask((blk_size, blk_size), 0, q, k, 0), blocks[q, :, k])


def test_conv_layout_errors():
    for match, args in {
        "input_h .unless it is 1. and input_w must be multiples of stride 2, got 3 and 4": {
            "input_h": 3,
            "input_w": 4,
            "stride": 2,
        },
        "no padding of a filter of 4 at stride 1 takes 32 pixels to 32": {"input_w": 32, "filter_w": 4},
        "blk_size must divide the numbers of pixels, 48 and 48, got 32": {"input_w": 48, "filter_w": 3},
        "filter_w must be at least 1, got 0": {"input_w": 32, "filter_w": 0},
    }.items():
        with pytest.raises(ValueError, match=match):
            utils.bst_conv_layout(**args)
    _, mask = utils.bst_conv_layout(input_w=64, filter_w=3)
    with pytest.raises(ValueError, match="blocks are 32 x 32, got blk_shape .16, 16."):
        mask((16, 16), 0, 0, 0, 0)
