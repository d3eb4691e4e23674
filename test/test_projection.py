"""Projections onto feature rows, against the reference."""

import pickle

import helpers
import numpy as np
import pytest
import tensorflow as tf
from helpers import bfloat16, random_values

from blocksparse import reference
from blocksparse.matmul import SparseProj

DTYPES = (np.float32, np.float16, bfloat16)


def test_random_rows():
    proj = SparseProj(100, 30)
    assert (proj.nhidden, proj.nproj, proj.name) == (100, 30, "SparseProj")
    assert proj.gather_lut.dtype == proj.scatter_lut.dtype == np.int32
    assert np.all(np.diff(proj.gather_lut) > 0) and proj.gather_lut.min() >= 0 and proj.gather_lut.max() < 100
    assert np.array_equal(proj.scatter_lut[proj.gather_lut], np.arange(30))
    assert np.count_nonzero(proj.scatter_lut == -1) == 70
    np.random.seed(7)  # noqa: NPY002
    first = SparseProj(100, 30).gather_lut
    np.random.seed(7)  # noqa: NPY002
    assert np.array_equal(first, SparseProj(100, 30).gather_lut)
    assert np.array_equal(SparseProj(8, 8).gather_lut, np.arange(8))


def test_stride():
    assert SparseProj(300, proj_stride=4).gather_lut.tolist() == list(range(0, 256, 4))
    assert SparseProj(300, proj_stride=4, block_size=8).gather_lut.tolist() == list(range(0, 288, 4))


def test_pickle():
    proj = pickle.loads(pickle.dumps(SparseProj(10, 3, gather_lut=[7, 1, 4], name="mine")))
    assert proj.gather_lut.tolist() == [7, 1, 4] and (proj.nhidden, proj.nproj, proj.name) == (10, 3, "mine")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (3, 5)], ids=str)
def test_values_and_gradients(device, rng, dtype, shape):
    lut = rng.permutation(24)[:10]
    proj = SparseProj(24, 10, gather_lut=lut)
    x, y = random_values(rng, (24, *shape), dtype), random_values(rng, (10, *shape), dtype)
    dx, dy = random_values(rng, (24, *shape), dtype), random_values(rng, (10, *shape), dtype)
    x[0], x[lut[0]] = -0.0, np.inf  # rows that nothing is added to stay as they are; nothing leaks between rows
    cases = [
        (proj.gather, [x], dy, [reference.scatter(dy, lut, 24)], reference.gather(x, lut)),
        (proj.scatter, [y], dx, [reference.gather(dx, lut)], reference.scatter(y, lut, 24)),
        (proj.scatter_add, [x, y], dx, [dx, reference.gather(dx, lut)], reference.scatter_add(x, y, lut)),
        (proj.scatter_mul, [x, y], dx, reference.scatter_mul_grad(dx, x, y, lut), reference.scatter_mul(x, y, lut)),
    ]
    for function, operands, upstream, expected_gradients, expected in cases:
        before = [operand.copy() for operand in operands]

        def with_gradients(upstream, *operands, function=function):
            with tf.GradientTape() as tape:
                tape.watch(operands)
                z = function(*operands)
            return [z, *tape.gradient(z, operands, upstream)]

        tensors = [tf.constant(array) for array in (upstream, *operands)]
        for mode in (with_gradients, tf.function(with_gradients)):
            with tf.device(device):
                results = mode(*tensors)
            helpers.assert_on(device, *results)
            for result, wanted in zip(results, [expected, *expected_gradients], strict=True):
                # One addition or product of two numbers of the dtype: right to the last bit, the sign of 0 too.
                wanted = helpers.round_to(wanted, dtype)
                assert np.array_equal(np.asarray(result, np.float64), wanted.astype(np.float64), equal_nan=True)
                assert np.array_equal(np.signbit(np.asarray(result, np.float32)), np.signbit(wanted.astype(np.float32)))
        for operand, copy in zip(tensors[1:], before):
            assert operand.numpy().tobytes() == copy.tobytes()


def test_second_derivatives(device, rng):
    proj = SparseProj(12, 5)
    x, y = rng.standard_normal((12, 3)), rng.standard_normal((5, 3))
    with tf.device(device):
        x, y = tf.constant(x, tf.float32), tf.constant(y, tf.float32)
        with tf.GradientTape() as outer:
            outer.watch([x, y])
            with tf.GradientTape() as inner:
                inner.watch([x, y])
                z = proj.scatter_mul(proj.scatter_add(x, y), proj.gather(x) * y)
                loss = tf.reduce_sum(z**2) + tf.reduce_sum(proj.scatter(y) ** 3)
            norm = tf.add_n([tf.reduce_sum(g**2) for g in inner.gradient(loss, [x, y])])
        ours = outer.gradient(norm, [x, y])
    lut = proj.gather_lut
    spread = tf.one_hot(lut, 12, dtype=tf.float64)  # [5, 12]
    with tf.device("/CPU:0"):
        x, y = tf.cast(x, tf.float64), tf.cast(y, tf.float64)
        with tf.GradientTape() as outer:
            outer.watch([x, y])
            with tf.GradientTape() as inner:
                inner.watch([x, y])
                inside = tf.reduce_sum(spread, 0)[:, None]
                factor = tf.matmul(spread, tf.matmul(spread, x) * y, transpose_a=True)
                z = (x + tf.matmul(spread, y, transpose_a=True)) * (factor + 1 - inside)
                loss = tf.reduce_sum(z**2) + tf.reduce_sum(y**3)
            norm = tf.add_n([tf.reduce_sum(g**2) for g in inner.gradient(loss, [x, y])])
        expected = outer.gradient(norm, [x, y])
    for a, b in zip(ours, expected):
        assert np.linalg.norm(a.numpy() - b.numpy()) <= 1e-5 * np.linalg.norm(b)


def test_v1_graph_with_unknown_batch(rng):
    proj = SparseProj(6, 2, gather_lut=[4, 1])
    x = random_values(rng, (6, 3), np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        placeholder = tf.compat.v1.placeholder(tf.float32)
        y = proj.gather(placeholder)
        gradient = tf.compat.v1.gradients(y, placeholder)[0]
        y, gradient = session.run([y, gradient], {placeholder: x})
    assert np.array_equal(y, x[[4, 1]]) and gradient.sum(1).tolist() == [0, 3, 0, 0, 3, 0]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(), "missing nproj, proj_stride or gather_lut"),
        (dict(nproj=11), r"nproj must be 1 to nhidden \(10\), got 11"),
        (dict(proj_stride=11), r"proj_stride must be 1 to nhidden \(10\), got 11"),
        (dict(proj_stride=2, block_size=8), "leaves 5 of 10 rows, less than block_size"),
        (dict(gather_lut=[1, 2]), "gather_lut needs nproj"),
        (dict(gather_lut=[1, 2], nproj=3), r"gather_lut needs nproj, its length, got nproj 3 and shape \(2,\)"),
        (dict(gather_lut=[1, 1], nproj=2), "distinct rows from 0 to 9"),
        (dict(gather_lut=[1, 10], nproj=2), "distinct rows from 0 to 9"),
    ],
    ids=str,
)
def test_constructor_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        SparseProj(10, **arguments)


def test_call_errors():
    proj = SparseProj(10, 4)
    x, y = tf.ones([10, 2]), tf.ones([4, 2])
    for function in (proj.gather, lambda x: proj.scatter_add(x, y)):
        with pytest.raises(ValueError, match=r"x must have 10 rows in its first dimension, got shape \(9, 2\)"):
            function(tf.ones([9, 2]))
    with pytest.raises(ValueError, match="x must have 4 rows"):
        proj.scatter(x)
    with pytest.raises(ValueError, match="one dtype, got float32 and float16"):
        proj.scatter_mul(x, tf.cast(y, tf.float16))
    with pytest.raises(ValueError, match="agree in all dimensions but the first"):
        proj.scatter_mul(x, tf.ones([4, 3]))
    with pytest.raises(ValueError, match="dtype float64, allowed are float32, float16 and bfloat16"):
        proj.gather(tf.cast(x, tf.float64))
