"""Embedding lookup on every device, in every mode, against reference.py."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import DTYPES, assert_on, random_values, ulp, wide
from hypothesis import given, settings
from hypothesis import strategies as st

import blocksparse as bs
from blocksparse import embed
from blocksparse import reference as ref

INDEX_DTYPES = [np.dtype(t) for t in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")]
seeds = st.integers(0, 2**32 - 1)
pytestmark = pytest.mark.usefixtures("on_device")


def assert_sum_close(actual, expected, magnitude, terms, dtype):
    """One rounding to dtype, and what sums of so many terms in float32 lose."""
    actual = np.asarray(actual)
    assert actual.dtype == dtype and actual.shape == expected.shape
    tolerance = ulp(expected, dtype) / 2 + max(4, 2 * terms**0.5) * 2.0**-24 * magnitude
    assert np.all(np.abs(actual.astype(np.float64) - expected) <= tolerance)


def draw_indices(rng, kind, shape, rows, dtype):
    """Indices, some of them out of range where `kind` says so."""
    count = int(np.prod(shape))
    high = min(rows, np.iinfo(dtype).max + 1)
    if kind == "equal":
        idx = np.full(count, rng.integers(high))
    elif kind == "zipf":
        idx = np.minimum(rng.zipf(1.3, count), high) - 1
    else:
        idx = rng.integers(high, size=count)
    idx = idx.astype(dtype)
    if kind == "outside":
        bad = [v for v in (-1, -(2**31), rows, 2**31 + 1, 2**40) if np.iinfo(dtype).min <= v <= np.iinfo(dtype).max]
        bad.append(np.iinfo(dtype).max) if np.iinfo(dtype).max >= rows else None
        if bad:
            idx = np.where(rng.random(count) < 0.3, rng.choice(np.array(bad, dtype), count), idx)
    return idx.astype(dtype).reshape(shape)


@settings(max_examples=250)
@given(
    shape=st.lists(st.one_of(st.sampled_from([0, 1, 3]), st.integers(1, 40)), max_size=3),
    rows=st.integers(1, 300),
    width=st.one_of(st.sampled_from([0, 1, 4, 8, 64, 65, 257]), st.integers(1, 150)),
    dtype=st.sampled_from(DTYPES),
    index_dtype=st.sampled_from(INDEX_DTYPES),
    kind=st.sampled_from(["uniform", "zipf", "equal", "outside"]),
    seed=seeds,
)
def test_lookup(device, shape, rows, width, dtype, index_dtype, kind, seed):
    rng = np.random.default_rng(seed)
    table = random_values(rng, (rows, width), dtype)
    idx = draw_indices(rng, kind, shape, rows, index_dtype)
    dy = random_values(rng, (*shape, width), dtype)
    emb = tf.constant(table)
    with tf.GradientTape() as tape:
        tape.watch(emb)
        y = bs.embedding_lookup(emb, tf.constant(idx))
    dw = tape.gradient(y, emb, tf.constant(dy))
    assert_on(device, y, dw)
    assert isinstance(dw, tf.Tensor) and y.dtype == emb.dtype
    assert np.array_equal(wide(y), ref.embedding_lookup(table, idx))
    magnitude = ref.embedding_lookup_grad(np.abs(wide(dy)), idx, rows)
    assert_sum_close(dw, ref.embedding_lookup_grad(dy, idx, rows), magnitude, max(1, idx.size), dtype)
    for unused in (False, True):
        # Arguments: what depends on constants alone TensorFlow may compute while it makes the graph, on the CPU.
        again = tf.function(lambda e, i, d, s=unused: gradient(e, i, d, sort_grad=s))(
            emb, tf.constant(idx), tf.constant(dy)
        )
        assert np.array_equal(wide(again), wide(dw))


def gradient(emb, idx, dy, **kwargs):
    with tf.GradientTape() as tape:
        tape.watch(emb)
        y = bs.embedding_lookup(emb, idx, **kwargs)
    return tape.gradient(y, emb, dy)


@pytest.mark.parametrize("kind", ["uniform", "zipf", "equal", "sorted"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_many_indices(device, dtype, kind, rng):
    """Sums of tens of thousands of terms: cut in parts, exact in float32's sense, and the same bits each time."""
    count, rows, width = 40000, 5000, 24
    idx = draw_indices(rng, kind, count, rows, np.int32)
    idx = np.sort(idx) if kind == "sorted" else idx
    dy = random_values(rng, (count, width), dtype)
    expected, magnitude = np.zeros((rows, width)), np.zeros((rows, width))
    np.add.at(expected, idx, wide(dy))
    np.add.at(magnitude, idx, np.abs(wide(dy)))
    dw = embed.embedding_lookup_grad_op(dy, idx, rows)
    # The number of terms grows with the magnitude: the fewer, the closer.
    assert_sum_close(dw, expected, magnitude, np.bincount(idx).max() ** 0.5, dtype)
    for _ in range(3):
        assert np.array_equal(wide(embed.embedding_lookup_grad_op(dy, idx, rows)), wide(dw))


def test_variables_and_graphs(device, rng):
    table, idx = random_values(rng, (9, 6), np.float32), rng.integers(-2, 11, (4, 3))
    expected, dw = ref.embedding_lookup(table, idx), ref.embedding_lookup_grad(np.ones((4, 3, 6)), idx, 9)
    variable = tf.Variable(table)

    def with_gradient(idx):
        with tf.GradientTape() as tape:
            y = bs.embedding_lookup(variable, idx)
        return y, tape.gradient(y, variable)

    for shape in ([4, 3], [None, 3], None):
        y, d = tf.function(with_gradient, input_signature=[tf.TensorSpec(shape, tf.int64)])(idx)
        assert np.array_equal(y, expected) and np.allclose(d, dw)
    for use_tf in (False, True):
        inside = np.clip(idx, 0, 8) if use_tf else idx
        d = gradient(variable, inside, tf.ones([4, 3, 6]), use_tf=use_tf)
        assert isinstance(d, tf.Tensor)
        assert np.allclose(d, ref.embedding_lookup_grad(np.ones((4, 3, 6)), inside, 9))
    with tf.Graph().as_default(), tf.device(device):
        emb = tf.compat.v1.placeholder(tf.float32, [None, 6])
        index = tf.compat.v1.placeholder(tf.int64, None)
        y = bs.embedding_lookup(emb, index)
        outputs = [y, tf.gradients(y, emb)[0]]
        with tf.compat.v1.Session() as session:
            y, d = session.run(outputs, {emb: table, index: idx})
    assert np.array_equal(y, expected) and np.allclose(d, dw)


def test_derivatives(device, rng):
    idx = tf.constant([2, 0, 2, 7, -1])
    x = random_values(rng, (3, 2), np.float32)
    for function in (lambda x: bs.embedding_lookup(x * x, idx), lambda x: gradient(x, [0, 1, 0], x * x)):
        theoretical, numerical = tf.test.compute_gradient(function, [tf.constant(x)], delta=1e-2)
        np.testing.assert_allclose(theoretical[0], numerical[0], atol=1e-2)


def test_vectorized_map(device, rng):
    emb = tf.constant(random_values(rng, (7, 3), np.float32))
    idx = tf.constant(rng.integers(-1, 9, (5, 4)))
    dy = tf.constant(random_values(rng, (5, 4, 3), np.float32))
    for function, operands in (
        (lambda x: bs.embedding_lookup(emb, x), idx),
        (lambda x: embed.embedding_lookup_grad_op(x[1], x[0], 7), (idx, dy)),
        (lambda x: embed.embedding_lookup_grad_op(x, idx[0], 7), dy),
    ):
        mapped = tf.function(lambda x, f=function: tf.vectorized_map(f, x, fallback_to_while_loop=False))(operands)
        one = [function(tf.nest.map_structure(lambda t, k=k: t[k], operands)) for k in range(5)]
        np.testing.assert_allclose(mapped, np.stack(one), rtol=1e-6)
    with pytest.raises(ValueError, match="table must be the same"):
        tables = tf.stack([emb] * 5)
        tf.function(
            lambda: tf.vectorized_map(lambda x: bs.embedding_lookup(x, [0]), tables, fallback_to_while_loop=False)
        )()


def test_bench_prints_a_time(device, capfd):
    bs.embedding_lookup(tf.ones([4, 4]), [1, 2], bench=2)
    assert "EmbeddingLookup" in capfd.readouterr().out


X = np.ones((3, 4), np.float32)

BAD = {
    "dtype": (lambda: bs.embedding_lookup(tf.ones([3, 4], tf.float64), [0]), "float64.*float32, float16 and bfloat16"),
    "index dtype": (lambda: bs.embedding_lookup(X, [0.0]), "idx has dtype float32, must be integers"),
    "rank": (lambda: bs.embedding_lookup(X[0], [0]), r"emb must be \[C, K\]"),
    "gradient's shape": (lambda: embed.embedding_lookup_grad_op(X, [0, 1], 3), "dy must be|equal"),
    "gradient's rank": (lambda: embed.embedding_lookup_grad_op(X, 1, 3), "one dimension more|rank"),
    "gradient's rows": (lambda: embed.embedding_lookup_grad_op(X, [0, 1, 2], -1), "0 or more|non-negative|>= 0"),
    "xla": (lambda: tf.function(lambda: bs.embedding_lookup(X, [0]), jit_compile=True)(), "no XLA kernels"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(device, name):
    call, message = BAD[name]
    with pytest.raises((ValueError, NotImplementedError, tf.errors.InvalidArgumentError), match=message):
        call()
