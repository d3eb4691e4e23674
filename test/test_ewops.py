"""The elementwise operators on every device, in every mode, against reference.py."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers import DTYPES, assert_close, assert_on, check_derivatives, random_values, round_to, ulp, wide
from hypothesis import given, settings
from hypothesis import strategies as st

import blocksparse as bs
from blocksparse import _ewops_gradients as codes
from blocksparse import ewops
from blocksparse import reference as ref
from blocksparse.ewops import bias_grad_op, bias_relu_grad_op, ew_dxdg_dzxg_op, ew_dxdy_dzxy_op, ew_z_xb_op

BINARY = ["add", "subtract", "multiply", "divide", "maximum", "minimum"]
UNARY = ["negative", "reciprocal", "square", "sqrt", "exp", "log", "sigmoid", "tanh", "relu", "elu", "gelu", "swish"]
POSITIVE = {"reciprocal", "sqrt", "log"}
ALPHA = {"elu": 0.7, "gelu": 0.044715, "swish": 1.3}

# Sizes around vectors' and tasks' edges, and any.
sizes = st.one_of(st.sampled_from([0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 255, 257, 32767, 32769]), st.integers(0, 3000))
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.one_of(st.sampled_from([0, 1, 2, 3, 8, 33]), st.integers(0, 40)), min_size=1, max_size=4)
fast = settings(max_examples=60)
pytestmark = pytest.mark.usefixtures("on_device")


# ---------------------------------------------------------------------------------------------- element by element


def operand(rng, op, shape, dtype):
    x = random_values(rng, shape, np.float32) * 2
    x = np.abs(x) + 0.1 if op in POSITIVE else x
    return x.astype(dtype)


@pytest.mark.parametrize("op", UNARY)
@fast
@given(n=sizes, dtype=dtypes, seed=seeds)
def test_unary(device, op, n, dtype, seed):
    rng = np.random.default_rng(seed)
    x, dz = operand(rng, op, n, dtype), random_values(rng, n, dtype)
    alpha = ALPHA.get(op, 1.0)
    function = getattr(bs, op)
    call = functools.partial(function, alpha=alpha) if op in ALPHA else function
    with tf.GradientTape() as tape:
        source = tf.constant(x)
        tape.watch(source)
        z = call(source)
    dx = tape.gradient(z, source, tf.constant(dz))
    assert_on(device, z, dx)
    # The rounded argument v of a sigmoid moves the result by v units; terms that cancel count by their size.
    expected_z = ref.elementwise(op, x, alpha=alpha)
    argument = {"gelu": 1.6 * np.abs(wide(x) + alpha * wide(x) ** 3), "swish": alpha * np.abs(wide(x))}.get(op, 0.0)
    assert_close(z, expected_z, dtype, 6, np.abs(expected_z) * (1 + argument))
    expected = ref.elementwise_grad(op, dz, x, alpha=alpha, z=wide(z))
    magnitude = np.abs(wide(dz)) * (2.0 + np.abs(wide(x))) if op in ("gelu", "swish", "sigmoid", "tanh") else 0.0
    assert_close(dx, expected, dtype, 12, magnitude)


def test_fast_gelu_is_swish(device, rng):
    x = random_values(rng, 1000, np.float32)
    assert np.array_equal(bs.fast_gelu(x), bs.swish(x, 1.702))


@pytest.mark.parametrize("op", BINARY)
@fast
@given(n=sizes, dtype=dtypes, seed=seeds)
def test_binary(device, op, n, dtype, seed):
    rng = np.random.default_rng(seed)
    x, y, dz = (random_values(rng, n, dtype) for _ in range(3))
    if op == "divide":
        y = np.where(np.abs(y) < 0.1, 1, y).astype(dtype)
    y = np.where(rng.random(n) < 0.2, x, y)  # ties
    if op == "divide":
        y = np.where(y == 0, 1, y).astype(dtype)
    tx, ty = tf.constant(x), tf.constant(y)
    with tf.GradientTape() as tape:
        tape.watch([tx, ty])
        z = getattr(bs, op)(tx, ty)
    dx, dy = tape.gradient(z, [tx, ty], tf.constant(dz))
    assert_on(device, z, dx, dy)
    assert_close(z, ref.elementwise(op, x, y), dtype)
    for actual, expected in zip((dx, dy), ref.elementwise_grad(op, dz, x, y)):
        assert_close(actual, expected, dtype, 6)


SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, -3e38, 65504, 88.7, -87.4, -103.5, 1e-5, 1]
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", UNARY)
def test_unary_of_special_values(device, op, dtype):
    with np.errstate(over="ignore"):
        x = np.tile(SPECIAL.astype(dtype), 3)
    z = wide(getattr(bs, op)(x))
    with np.errstate(all="ignore"):
        expected = ref.elementwise(op, x)
        if op in ("elu", "gelu", "swish"):
            expected = ref.elementwise(op, x, alpha=0.044715 if op == "gelu" else 1.0)
    # x times a sigmoid: x times the spacing of subnormals.
    magnitude = np.nan_to_num(np.abs(wide(x)) * 2.0**-126, posinf=0.0) if op in ("gelu", "swish") else 0.0
    assert_close(z.astype(dtype), expected, dtype, 6, magnitude)


@pytest.mark.parametrize("op", BINARY)
def test_binary_of_special_values(device, op):
    x, y = (v.reshape(-1).astype(np.float32) for v in np.meshgrid(SPECIAL, SPECIAL))
    z = getattr(bs, op)(x, y)
    assert_close(z, ref.elementwise(op, x, y), np.float32, 2)


@pytest.mark.parametrize("function", ["exp", "log", "tanh", "sigmoid"])
def test_accuracy_in_float32(device, function, rng):
    """Within 2.5 units in the last place over the whole range."""
    x = np.concatenate([rng.uniform(-104, 89, 200000), rng.uniform(-1, 1, 100000), rng.standard_normal(1000) * 1e-6])
    if function == "log":
        x = np.concatenate([np.exp(rng.uniform(-100, 88, 200000)), rng.uniform(0.5, 2, 100000)])
    x = x.astype(np.float32)
    expected = ref.elementwise(function, x)
    actual = wide(getattr(bs, function)(x))
    inside = np.abs(expected) < 3.3e38
    error = np.abs(actual - expected)[inside] / ulp(expected[inside], np.float32)
    assert error.max() <= 2.5, error.max()


@fast
@given(
    n=sizes, dtype=dtypes, seed=seeds, scale=st.floats(-8, 8, width=32), saturate=st.sampled_from([0.0, 1.5, 65504.0])
)
def test_filter_tensor(device, n, dtype, seed, scale, saturate):
    rng = np.random.default_rng(seed)
    x = random_values(rng, n, dtype)
    x = np.where(rng.random(n) < 0.3, rng.choice([np.inf, -np.inf, np.nan], n), x).astype(dtype)
    for infs in (False, True):
        for nans in (False, True):
            y = bs.filter_tensor(x, scale, saturate, infs, nans)
            with np.errstate(invalid="ignore"):
                expected = ref.filter_tensor(x, scale, saturate, infs, nans)
            assert_close(y, expected, dtype, 1)
    source = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(source)
        y = bs.filter_tensor(source, tf.constant(scale), saturate, True, True)
    dy = random_values(rng, n, dtype)
    assert_close(tape.gradient(y, source, dy), ref.filter_tensor(dy, scale, saturate, True, True), dtype, 1)
    assert_close(bs.scale_tensor(dy, scale), ref.filter_tensor(dy, scale), dtype, 1)


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float_cast(device, dtype, to, rng):
    for n in (0, 1, 5, 1000, 70001):
        with np.errstate(over="ignore"):
            x = (random_values(rng, n, np.float32) * np.exp(rng.uniform(-100, 88, n))).astype(np.float32).astype(dtype)
            for dx_dtype in (None, tf.float32, tf.float16, tf.bfloat16):
                source = tf.constant(x)
                with tf.GradientTape() as tape:
                    tape.watch(source)
                    y = bs.float_cast(source, to, dx_dtype)
                if dtype == to:
                    assert y is source
                    continue
                assert_on(device, y)
                np.testing.assert_array_equal(wide(y), wide(round_to(wide(x), to)))
                dx = tape.gradient(y, source, tf.ones_like(y))
                assert dx.dtype == (dx_dtype or tf.as_dtype(dtype)) and np.all(wide(dx) == 1)


@fast
@given(n=sizes, dtype=dtypes, seed=seeds, count=st.one_of(st.integers(1, 20), st.just(300)))
def test_add_n(device, n, dtype, seed, count):
    rng = np.random.default_rng(seed)
    xs = [tf.constant(random_values(rng, n, dtype)) for _ in range(count)]
    given_list = list(xs)
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = bs.add_n(xs)
        y8 = bs.add_n8(xs)
    assert xs == given_list or all(a is b for a, b in zip(xs, given_list))
    total, magnitude = sum(map(wide, xs)), sum(np.abs(wide(x)) for x in xs)
    assert_close(y, total, dtype, max(4, count**0.5), magnitude)
    assert_close(y8, total, dtype, max(4, count**0.5), magnitude)
    for dx in tape.gradient(y8, xs, tf.ones_like(y8)):
        assert np.all(wide(dx) == 1)
    if count == 1:
        assert y is xs[0]


def test_replace_add_n(device):
    def adds():
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [4])
            y = x * x + tf.exp(x) + tf.sin(x)
            tf.gradients(y, x)
            return {op.type for op in tf.compat.v1.get_default_graph().get_operations()}

    try:
        bs.replace_add_n()
        bs.replace_add_n()
        assert "AddN8" in adds() and "AddN" not in adds()
        assert np.array_equal(tf.add_n([tf.constant([1, 2]), tf.constant([3, 4])]), [4, 6])
        with tf.Graph().as_default():  # who calls it by name gets TensorFlow's
            assert tf.add_n([tf.ones(3)] * 3).op.type == "AddN"
    finally:
        bs.restore_add_n()
    assert "AddN8" not in adds() and "AddN" in adds()


# ---------------------------------------------------------------------------------------------- channel by channel


def channel_case(data, seed, dtype):
    rng = np.random.default_rng(seed)
    shape = data.draw(shapes)
    if data.draw(st.booleans()):  # larger, so that sums are cut
        shape = [data.draw(st.integers(1, 700)), data.draw(st.integers(1, 300))]
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    return rng, shape, axis, random_values(rng, shape, dtype), random_values(rng, shape[axis], np.float32)


@settings(max_examples=120)
@given(data=st.data(), dtype=dtypes, seed=seeds, act=st.sampled_from(["none", "relu", "fast_gelu"]))
def test_bias_relu(device, data, dtype, seed, act):
    rng, shape, axis, x, b = channel_case(data, seed, dtype)
    dy = random_values(rng, shape, dtype)
    kwargs = {} if act == "none" else {act: True}
    tx, tb = tf.constant(x), tf.constant(b)
    with tf.GradientTape() as tape:
        tape.watch([tx, tb])
        y = bs.bias_relu(tx, tb, axis=axis, **kwargs)
    dx, db = tape.gradient(y, [tx, tb], tf.constant(dy))
    assert_on(device, y, dx, db)
    size = np.abs(wide(x)) + np.abs(ref._along(b, x, axis))
    assert_close(y, ref.bias_act(x, b, axis, act), dtype, 6, size)
    expected_dx, _, expected_db = ref.bias_act_grad(dy, x, b, axis, act)
    terms = max(1, x.size // max(1, shape[axis]))
    # relu goes by the sign of the output, which 16 bits may round to 0.
    assert_close(dx, expected_dx, dtype, 12, np.abs(wide(dy)) * (1 + size))
    assert_close(db, expected_db, np.float32, max(4, terms**0.5), ref._sum_but(np.abs(wide(dy)) * (1 + size), axis))
    again = tape_gradient(lambda: bs.bias_relu(tx, tb, axis=axis, **kwargs), [tx, tb], dy)
    assert np.array_equal(db, again[1]) and np.array_equal(dx, again[0])
    composed = bs.bias_relu(tx, tb, axis=axis, use_tf=True, **kwargs)
    assert_close(composed, ref.bias_act(x, b, axis, act), dtype, 12, size)


def tape_gradient(function, sources, dy):
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y = function()
    return tape.gradient(y, sources, tf.constant(dy))


@settings(max_examples=60)
@given(n=st.integers(0, 300), k=st.integers(1, 300), dtype=dtypes, seed=seeds, first=st.booleans(), lead=st.booleans())
def test_vector_operand(device, n, k, dtype, seed, first, lead):
    """add and multiply take a float32 vector on either side as bias or gain."""
    rng = np.random.default_rng(seed)
    x, dy = random_values(rng, (n, k), dtype), random_values(rng, (n, k), dtype)
    v = random_values(rng, (1, k) if lead else k, np.float32)
    if n == 1 and lead:
        dtype = np.dtype(np.float32)
        x, dy = x.astype(dtype), dy.astype(dtype)
    tx, tv = tf.constant(x), tf.constant(v)
    for function, gain in ((bs.add, False), (bs.multiply, True)):
        with tf.GradientTape() as tape:
            tape.watch([tx, tv])
            y = function(tv, tx) if first else function(tx, tv)
        dx, dv = tape.gradient(y, [tx, tv], tf.constant(dy))
        assert_on(device, y, dx, dv)
        assert y.dtype == tx.dtype and dv.dtype == tf.float32 and dv.shape == tv.shape
        flat = v.reshape(-1)
        assert_close(y, wide(x) * flat if gain else wide(x) + flat, dtype)
        assert_close(dx, wide(dy) * flat if gain else wide(dy), dtype)
        terms = wide(dy) * wide(x) if gain else wide(dy)
        assert_close(np.reshape(dv, -1), terms.sum(0), np.float32, max(4, n**0.5), np.abs(terms).sum(0))


def test_other_shapes_broadcast_as_in_tensorflow(device, rng):
    x = random_values(rng, (3, 1, 4), np.float32)
    y = random_values(rng, (2, 1), np.float32)
    for op in BINARY:
        assert np.allclose(getattr(bs, op)(x, y), ref.elementwise(op, x, y), rtol=1e-6)
        assert np.allclose(getattr(bs, op)(tf.constant(x), 3.0), ref.elementwise(op, x, 3.0), rtol=1e-6)
        assert np.allclose(getattr(bs, op)(2.0, tf.constant(x)), ref.elementwise(op, 2.0, x), rtol=1e-6)
        assert getattr(bs, op)(tf.constant(2.0), tf.constant(3.0)).shape == ()


# --------------------------------------------------------------------------------------------------------- dropout


def unpack(mask, n):
    return np.unpackbits(np.asarray(mask).view(np.uint8), bitorder="little")[:n].astype(bool)


@fast
@given(
    n=sizes, dtype=dtypes, seed=seeds, keep=st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1e-9]), st.floats(0, 1, width=32))
)
def test_dropout_against_reference(device, n, dtype, seed, keep):
    rng = np.random.default_rng(seed)
    x = random_values(rng, n, dtype)
    words = rng.integers(-(2**31), 2**31, 2).astype(np.int32)
    bits = ref.dropout_bits(words, n, keep)
    y, mask = ewops.dropout_op(x, words, np.float32(keep))
    assert_on(device, y, mask)
    assert np.array_equal(mask, ref.pack_mask(bits))
    assert np.array_equal(ewops.gen_dropout_mask_op(words, n, np.float32(keep)), mask)
    assert_close(y, ref.dropout(x, bits, keep), dtype, 2)
    again, same = bs.dropout(x, keep, mask)
    assert np.array_equal(wide(again), wide(y)) and np.array_equal(mask, same)


def test_dropout_ties_use_the_low_half(device):
    """With a threshold between two half-words, one element in 2^16 hits it: the low half decides, for 4 in 5."""
    keep = float(np.float32(0.3))
    n = 1 << 22
    bits = ref.dropout_bits([5, 6], n, keep)
    high = ref.philox([5, 6], np.arange(n // 8), 0).view("<u2").reshape(-1)
    tied = high == int(keep * 65536)
    assert 4 < tied.sum() and 0 < bits[tied].sum() < tied.sum()
    assert np.array_equal(unpack(ewops.gen_dropout_mask_op([5, 6], n, keep), n), bits)


@settings(max_examples=80)
@given(data=st.data(), dtype=dtypes, seed=seeds)
def test_dropout_mask_shape(device, data, dtype, seed):
    rng = np.random.default_rng(seed)
    shape = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=7))
    mask_shape = [data.draw(st.sampled_from([1, size])) for size in shape]
    x, dy = random_values(rng, shape, dtype), random_values(rng, shape, dtype)
    tx = tf.constant(x)
    given_shape = data.draw(
        st.sampled_from([mask_shape, tf.constant(mask_shape), [None if m != 1 else 1 for m in mask_shape]])
    )
    with tf.GradientTape() as tape:
        tape.watch(tx)
        y, mask = bs.dropout(tx, 0.7, mask_shape=given_shape)
    size = int(np.prod(mask_shape))
    assert mask.shape == [-(-size // 32)]
    bits = unpack(mask, size).reshape(mask_shape)
    assert_close(y, ref.dropout(x, bits, 0.7), dtype, 2)
    assert_close(tape.gradient(y, tx, tf.constant(dy)), ref.dropout(dy, bits, 0.7), dtype, 2)
    again, _ = bs.dropout(tx, 0.7, mask=mask, mask_shape=mask_shape)
    assert np.array_equal(wide(y), wide(again))


def test_dropout_statistics(device):
    """Bits are uniform and independent: of neighbours, of places in a word, of calls and of seeds that differ by 1."""
    n, keep = 1 << 22, 0.25
    draws = [unpack(ewops.gen_dropout_mask_op([s, 7], n, keep), n) for s in range(4)]
    sigma = (keep * (1 - keep) / n) ** 0.5
    for bits in draws:
        assert abs(bits.mean() - keep) < 6 * sigma
        assert np.abs(bits.reshape(-1, 32).mean(0) - keep).max() < 6 * sigma * 32**0.5
        centred = bits - keep
        for lag in (1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 64, 256, 2048, 4096):
            assert abs((centred[lag:] * centred[:-lag]).mean()) < 6 * keep * (1 - keep) / n**0.5
    for i in range(4):
        for j in range(i):
            assert abs(((draws[i] - keep) * (draws[j] - keep)).mean()) < 6 * keep * (1 - keep) / n**0.5


def test_dropout_of_a_scalar_and_by_tensors(device):
    for x in (2.0, tf.Variable(2.0)):
        y, mask = bs.dropout(x, tf.Variable(1.0))
        assert y == 2.0 and y.shape == () and np.array_equal(mask, [1])
    y, mask = bs.dropout(2.0, np.float32(1.0), mask_shape=[])
    assert y == 2.0 and np.array_equal(mask, [1])


def test_keep_prob_is_read_at_each_run(device, rng):
    """A schedule needs no new graph."""
    with tf.Graph().as_default(), tf.device(device):
        x = tf.compat.v1.placeholder(tf.float32, None)
        keep = tf.compat.v1.placeholder(tf.float32, [])
        y, mask = bs.dropout(x, keep)
        (dx,) = tf.gradients(y, x)
        with tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(allow_soft_placement=True)) as session:
            for size in (100, 7, 0):
                for value in (0.0, 0.5, 1.0):
                    out, bits, d = session.run([y, mask, dx], {x: np.ones(size), keep: value})
                    kept = unpack(bits, size)
                    assert np.array_equal(out, d) and np.array_equal(out, np.where(kept, 1 / max(value, 1e-9), 0))
                    assert kept.sum() == {0.0: 0, 1.0: size}.get(value, kept.sum())
            with pytest.raises(tf.errors.InvalidArgumentError, match="keep_prob must be 0 to 1, got 1.25"):
                session.run(y, {x: np.ones(3), keep: 1.25})


def test_dropout_keeps_all_or_nothing(device, rng):
    x = random_values(rng, 1000, np.float32)
    assert np.array_equal(bs.dropout(x, 1.0)[0], x)
    assert np.array_equal(bs.dropout(x, 0)[0], np.zeros(1000))


def test_dropout_of_dynamic_sizes(device):
    """One traced function takes every size; nothing is remembered of the first."""
    function = tf.function(lambda x: bs.dropout(x, 0.5), input_signature=[tf.TensorSpec([None, None], tf.float32)])
    for shape in ((3, 50), (100, 7), (0, 4), (1, 1)):
        y, mask = function(tf.ones(shape))
        assert np.array_equal(np.reshape(y, -1) > 0, unpack(mask, int(np.prod(shape))))


# ----------------------------------------------------------------------------------------------------------- seeds


def mask_of(n=256):
    return np.asarray(bs.dropout(tf.ones(n), 0.5)[1])


@pytest.fixture
def no_entropy():
    from blocksparse import _random

    before, _random._eager = _random._eager, None
    yield
    _random._eager = before


def test_calls_differ_and_set_seed_repeats(device, no_entropy):

    def program(seed):
        """What a program draws, eagerly and in a function of its own, after it has set the seed."""
        tf.random.set_seed(seed)
        function = tf.function(mask_of_tensor)
        return [draw().tobytes() for draw in (mask_of, lambda: np.asarray(function())) for _ in range(3)]

    first, again, other = program(3), program(3), program(5)
    assert len(set(first)) == 6
    assert again == first
    assert not set(first) & set(other)


def mask_of_tensor():
    return bs.dropout(tf.ones(256), 0.5)[1]


def test_two_dropouts_in_one_function_differ(device, no_entropy):
    a, b = tf.function(lambda: (mask_of_tensor(), mask_of_tensor()))()
    assert not np.array_equal(a, b)


def test_entropy_gives_each_rank_its_stream(device, no_entropy):
    with pytest.raises(ValueError, match="set_entropy"):
        bs.get_entropy()
    streams = []
    for rank in (0, 1, 0):
        np.random.seed(rank)  # noqa: NPY002
        bs.set_entropy()
        function = tf.function(mask_of_tensor)
        streams.append([mask_of().tobytes() for _ in range(3)] + [np.asarray(function()).tobytes() for _ in range(3)])
    assert streams[0] == streams[2]
    assert len(set(streams[0] + streams[1])) == 12
    assert isinstance(bs.get_entropy(), tf.Variable) and bs.entropy_size == 245760


def test_entropy_from_content(device, no_entropy):
    init = np.random.default_rng().standard_normal(100).astype(np.float32)
    masks = []
    for value in (init, tf.constant(init), tf.Variable(init), init + 1):
        bs.set_entropy(value)
        masks.append(mask_of().tobytes())
    assert masks[0] == masks[1] == masks[2] != masks[3]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_seeds_in_a_v1_graph(device, with_entropy):
    def run(seed):
        with tf.Graph().as_default(), tf.device(device):
            tf.compat.v1.set_random_seed(11)
            if with_entropy:
                np.random.seed(seed)  # noqa: NPY002
                bs.set_entropy()
                assert bs.get_entropy() in tf.compat.v1.global_variables()
            masks = [mask_of_tensor() for _ in range(5)]
            loop = tf.while_loop(
                lambda i, m: i < 3,
                lambda i, m: (i + 1, tf.bitwise.bitwise_xor(m, mask_of_tensor())),
                (0, tf.zeros(8, tf.int32)),
            )[1]
            with tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(allow_soft_placement=True)) as session:
                session.run(tf.compat.v1.global_variables_initializer())
                return [m.tobytes() for _ in range(3) for m in session.run([*masks, loop])]

    first = run(1)
    assert len(set(first)) == len(first)
    assert run(1) == first
    assert (run(2) == first) != with_entropy


# ----------------------------------------------------------------------------------------------------------- gates


@fast
@given(n=sizes, seed=seeds, temperature=st.sampled_from([0.5, 2 / 3, 1.0]))
def test_concrete_gate(device, n, seed, temperature):
    rng = np.random.default_rng(seed)
    loga, dgate = random_values(rng, n, np.float32), random_values(rng, n, np.float32)
    words = rng.integers(-(2**31), 2**31, 2).astype(np.int32)
    source = tf.constant(loga)
    with tf.GradientTape() as tape:
        tape.watch(source)
        gate, concrete = ewops.concrete_gate_op(source, words, np.float32(temperature))
    assert_on(device, gate, concrete)
    expected, s = ref.concrete_gate(loga, words, temperature)
    # ln(1 - u) loses up to 2^-24 / (1 - u), and epsilon keeps u from 1 by 1e-6 alone.
    assert np.allclose(concrete, s, rtol=1e-4, atol=1e-6) and np.allclose(gate, expected, rtol=1e-4, atol=1e-5)
    d_loga = tape.gradient(gate, source, tf.constant(dgate))
    assert_close(
        d_loga, ref.concrete_gate_grad(dgate, wide(concrete), temperature), np.float32, 8, np.abs(dgate) * 1e-3
    )


def test_concrete_gate_distribution(device):
    """At loga 0: P(gate = 0) is that of s below -limit_a / (limit_b - limit_a)."""
    n = 1 << 20
    gate = np.asarray(bs.concrete_gate(tf.zeros(n)))
    cut = 0.1 / 1.2
    probability = ref._sigmoid(2 / 3 * np.log(cut / (1 - cut)))
    for value in (0.0, 1.0):
        assert abs((gate == value).mean() - probability) < 6 * (probability / n) ** 0.5
    assert abs(gate.mean() - 0.5) < 0.005
    other = np.asarray(bs.concrete_gate(tf.zeros(n)))
    assert abs(np.corrcoef(gate, other)[0, 1]) < 0.006 and abs(np.corrcoef(gate[1:], gate[:-1])[0, 1]) < 0.006


def test_concrete_gate_infer(device, rng):
    loga = random_values(rng, 1001, np.float32) * 4
    source = tf.constant(loga)
    with tf.GradientTape() as tape:
        tape.watch(source)
        gate = bs.concrete_gate_infer(source)
    t = ref._sigmoid(wide(loga)) * 1.2 - 0.1
    assert_close(gate, np.clip(t, 0, 1), np.float32, 6, 1.2)
    expected = ref.concrete_gate_grad(np.ones(1001), ref._sigmoid(wide(loga)), 1.0)
    assert np.allclose(tape.gradient(gate, source), expected, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- indices


@settings(max_examples=80)
@given(data=st.data(), dtype=st.sampled_from([*DTYPES, np.dtype(np.int32)]), seed=seeds)
def test_fancy_gather(device, data, dtype, seed):
    rng = np.random.default_rng(seed)
    lead = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
    dim = data.draw(st.integers(1, 300))
    rest = tuple(data.draw(st.lists(st.integers(0, 9), max_size=2)))
    x = (rng.standard_normal((*lead, dim, *rest)) * 100).astype(dtype)
    idx = rng.integers(-2, dim + 3, lead).astype(data.draw(st.sampled_from([np.int32, np.int64, np.int16])))
    source = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(source)
        y = bs.fancy_gather(source, idx)
    expected = ref.fancy_gather(x, idx)
    assert y.dtype == source.dtype and np.array_equal(wide(y), expected)
    if dtype == np.int32:
        return
    dy = random_values(rng, expected.shape, dtype)
    dx = tape.gradient(y, source, tf.constant(dy))
    assert_on(device, y, dx)
    assert np.array_equal(wide(dx), ref.fancy_gather_grad(dy, idx, dim))
    inside = np.clip(idx, 0, dim - 1)
    assert np.array_equal(wide(bs.fancy_gather(x, inside, use_tf=True)), ref.fancy_gather(x, inside))


@settings(max_examples=80)
@given(data=st.data(), dtype=dtypes, seed=seeds, keepdims=st.booleans())
def test_reduce_max(device, data, dtype, seed, keepdims):
    rng = np.random.default_rng(seed)
    shape = [max(size, 1) for size in data.draw(shapes)]
    if data.draw(st.booleans()):
        shape = [data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5000))][:: data.draw(st.sampled_from([1, -1]))]
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = np.round(rng.standard_normal(shape) * 3).astype(dtype)  # many ties
    x = np.where(rng.random(shape) < 0.1, np.nan, x).astype(dtype)
    source = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(source)
        y = bs.reduce_max(source, axis, keepdims)
    expected, place = ref.reduce_max(x, axis)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32).astype(dtype)
    shown = np.expand_dims(expected, axis) if keepdims else expected
    assert y.shape == shown.shape and np.array_equal(wide(y), wide(shown))
    # In a graph that asks for no places none are sought; the same of two zeros comes out.
    alone = wide(tf.function(bs.reduce_max)(source, axis, keepdims))
    assert np.array_equal(alone, wide(y)) and np.array_equal(np.signbit(alone), np.signbit(wide(y)))
    dy = random_values(rng, expected.shape, dtype)
    dx = tape.gradient(y, source, tf.reshape(dy, y.shape))
    assert_on(device, y, dx)
    assert np.array_equal(wide(dx), ref.reduce_max_grad(dy, place, axis, shape[axis]))


def test_indices_of_large_dimensions(device, rng):
    """More than an 8-bit or a 16-bit index, or one block of threads, would hold."""
    x, idx = random_values(rng, (2, 3000, 1500), np.float32), np.array([2999, 77])
    assert np.array_equal(bs.fancy_gather(x, idx), x[[0, 1], idx])
    x = np.round(random_values(rng, (3, 70001), np.float32) * 1e4)
    x[:, 70000] = x[:, 66000] = 1e6
    for axis, v in ((1, x), (0, x.T), (1, x[..., None])):
        source = tf.constant(v)
        with tf.GradientTape() as tape:
            tape.watch(source)
            y = bs.reduce_max(source, axis)
        dx = tape.gradient(y, source)
        assert np.array_equal(np.reshape(y, -1), np.full(3, 1e6))
        assert np.array_equal(np.argwhere(np.moveaxis(np.asarray(dx).reshape(v.shape[:2]), axis, 1))[:, 1], [66000] * 3)
    flat = random_values(rng, (3, 5000), np.float32)
    dx = ewops.fancy_gather_grad_op(np.ones(3, np.float32), [4999, -5, 5000], [3, 5000])
    assert np.argwhere(dx).tolist() == [[0, 4999], [1, 0]] and np.array_equal(
        bs.fancy_gather(flat, [4999, -5, 5000]), [flat[0, 4999], flat[1, 0], 0]
    )


def test_reduce_max_of_nothing_greater(device):
    x = np.array([[np.nan, -np.inf], [-np.inf, -np.inf]], np.float32)
    assert np.array_equal(bs.reduce_max(x, 1), np.full(2, -np.finfo(np.float32).max, np.float32))


# -------------------------------------------------------------------------------------------------------- variables


@pytest.mark.parametrize("dtype", DTYPES)
def test_assign_add(device, dtype, rng):
    for n in (0, 5, 1000):
        start, x = random_values(rng, n, dtype), random_values(rng, n, dtype)
        variable = tf.Variable(start)
        before = variable.read_value()  # shares the variable's buffer
        assert bs.assign_add(variable, x) is variable
        assert np.array_equal(wide(before), wide(start)), "a value read before has changed"
        assert_close(variable, wide(start) + wide(x), dtype, 1)
        del before

        @tf.function
        def twice(v, x):
            before = v.read_value()
            total = bs.assign_add(v, x)
            with tf.control_dependencies([total]):
                return tf.identity(before), total

        expected = wide(variable)
        before, total = twice(variable, x)
        assert np.array_equal(wide(before), expected), "a value read before has changed"
        assert_close(total, expected + wide(x), dtype, 1)
        assert np.array_equal(wide(total), wide(variable))


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_assign_add_in_a_v1_graph(device, dtype, use_resource, rng):
    start, x = random_values(rng, 77, dtype), random_values(rng, 77, dtype)
    with tf.Graph().as_default(), tf.device(device):
        variable = tf.compat.v1.get_variable("v", initializer=start, use_resource=use_resource)
        total = bs.assign_add(variable, x)
        with tf.compat.v1.Session() as session:
            session.run(variable.initializer)
            assert_close(session.run(total), wide(start) + wide(x), dtype, 1)
            assert_close(session.run(variable), wide(start) + wide(x), dtype, 1)
        # A reference is the variable itself; a resource's value is a tensor of its own, which later sums leave alone.
        assert total.dtype._is_ref_dtype != use_resource
        if use_resource:
            with tf.control_dependencies([total]):
                before = variable.read_value()
            with tf.control_dependencies([before]):
                after = bs.assign_add(variable, x)
            with tf.control_dependencies([after]):
                kept = tf.identity(before)
            with tf.compat.v1.Session() as session:
                session.run(variable.initializer)
                kept, after = session.run([kept, after])
            assert_close(kept, wide(start) + wide(x), dtype, 1)
            assert_close(after, wide(kept) + wide(x), dtype, 1)


@pytest.mark.parametrize("use_resource", [False, True])
def test_assign_add_before_initialization(device, use_resource):
    with tf.Graph().as_default(), tf.device(device):
        variable = tf.compat.v1.get_variable("v", [3], use_resource=use_resource)
        total = bs.assign_add(variable, tf.ones(3))
        with tf.compat.v1.Session() as session:
            with pytest.raises(tf.errors.FailedPreconditionError, match="not been initialized|uninitialized"):
                session.run(total)


@pytest.mark.parametrize("use_resource", [False, True])
def test_assign_add_of_a_shape_that_only_the_run_sees(device, use_resource):
    with tf.Graph().as_default(), tf.device(device):
        variable = tf.compat.v1.get_variable("v", [3], use_resource=use_resource)
        x = tf.compat.v1.placeholder(tf.float32, None)
        total = bs.assign_add(variable, x)
        with tf.compat.v1.Session() as session:
            session.run(variable.initializer)
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=r"the variable is float\[3\], the value float\[4\]"
            ):
                session.run(total, {x: np.ones(4, np.float32)})


# ----------------------------------------------------------------------------------------------------------- modes


def everything(x, b):
    """A bit of each operator, unknown shapes and all."""
    y = bs.bias_relu(bs.add(x, b), b, fast_gelu=True)
    y = bs.multiply(bs.swish(y), b)
    y = bs.bias_relu(y, b, axis=-1, relu=True)
    y = bs.add_n([y, bs.tanh(y), bs.float_cast(bs.float_cast(y, tf.float16), tf.float32)])
    y = bs.dropout(y, 1.0)[0]
    return bs.reduce_max(bs.filter_tensor(y, 0.5, 100.0), -1)


def test_modes_agree(device, rng):
    x, b = random_values(rng, (13, 21), np.float32), random_values(rng, 21, np.float32)

    def with_gradients(x, b):
        with tf.GradientTape() as tape:
            tape.watch([x, b])
            y = everything(x, b)
        return [y, *tape.gradient(y, [x, b])]

    eager = with_gradients(tf.constant(x), tf.constant(b))
    signature = [tf.TensorSpec([None, 21], tf.float32), tf.TensorSpec([21], tf.float32)]
    traced = tf.function(with_gradients, input_signature=signature)(x, b)
    with tf.Graph().as_default(), tf.device(device):
        px = tf.compat.v1.placeholder(tf.float32, [None, 21])
        pb = tf.compat.v1.placeholder(tf.float32, [21])
        y = everything(px, pb)
        outputs = [y, *tf.gradients(y, [px, pb])]
        with tf.compat.v1.Session() as session:
            graph = session.run(outputs, {px: x, pb: b})
    assert np.array_equal(eager[0], traced[0]) and np.array_equal(eager[0], graph[0])
    # TensorFlow's own AddN, where contributions to a gradient meet, adds in the order that suits its buffers.
    for a, t, g in zip(eager, traced, graph):
        np.testing.assert_allclose(a, t, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(a, g, rtol=1e-6, atol=1e-6)


def test_unknown_rank(device, rng):
    x = random_values(rng, (6, 7), np.float32)
    signature = [tf.TensorSpec(None, tf.float32)]
    for function in (
        bs.exp,
        lambda x: bs.bias_relu(x, tf.ones(7), relu=True),
        lambda x: bs.bias_relu(x, tf.ones(6), axis=0, fast_gelu=True),
        lambda x: bs.add(x, x),
        lambda x: bs.reduce_max(x, 0),
        lambda x: bs.dropout(x, 1.0)[0],
        lambda x: bs.fancy_gather(x, [0, 1, 2, 3, 4, 5]),
    ):

        def with_gradient(x, function=function):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            return y, tape.gradient(y, x)

        for eager, traced in zip(
            with_gradient(tf.constant(x)), tf.function(with_gradient, input_signature=signature)(x)
        ):
            assert np.array_equal(eager, traced)


def test_vectorized_map(device, rng):
    x, y = random_values(rng, (5, 9), np.float32), random_values(rng, (5, 9), np.float32)
    for function in (
        lambda x: bs.tanh(x[0]),
        lambda x: bs.multiply(x[0], x[1]),
        lambda x: bs.add(x[0], tf.ones(9)),
        lambda x: bs.add_n([x[0], x[1], x[0]]),
        lambda x: bs.filter_tensor(x[0], 2.0, 1.0),
        lambda x: bs.float_cast(x[0], tf.float16),
        lambda x: tf.gradients(bs.divide(x[0], x[1]), x[0])[0],
        lambda x: tf.gradients(bs.gelu(x[0]), x[0])[0],
    ):
        mapped = tf.function(lambda x, y, f=function: tf.vectorized_map(f, (x, y), fallback_to_while_loop=False))(x, y)
        one = tf.function(lambda x, y, f=function: f((x, y)))
        assert np.array_equal(mapped, np.stack([one(a, b) for a, b in zip(x, y)]))


def mapped_and_one_by_one(function, *operands):
    """`function` under tf.vectorized_map, and called for each element: two lists of the results, element by element."""
    vectorized = tf.function(lambda *x: tf.vectorized_map(lambda x: function(*x), x, fallback_to_while_loop=False))
    one = tf.function(lambda *x: function(*x))
    count = len(operands[0])
    together = tf.nest.flatten(vectorized(*map(tf.constant, operands)))
    alone = [tf.nest.flatten(one(*(tf.constant(v[i]) for v in operands))) for i in range(count)]
    return [[wide(v[i]) for v in together] for i in range(count)], [[wide(v) for v in element] for element in alone]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vectorized_map_of_channels(device, axis, dtype, rng):
    """Mapped activations, and their gradients; what the vector gets is a sum for each element."""
    x, dy = (random_values(rng, (4, 5, 6, 7), dtype) for _ in range(2))
    b, last = (random_values(rng, size, np.float32) for size in (x.shape[axis % 3 + 1], 7))

    def gradients(function, v):
        def run(x, dy):
            with tf.GradientTape() as tape:
                tape.watch([x, v])
                y = function(x, v)
            return [y, *tape.gradient(y, [x, v], dy)]

        return run

    for function, v in (
        (lambda x, b: bs.bias_relu(x, b, axis=axis), tf.constant(b)),
        (lambda x, b: bs.bias_relu(x, b, axis=axis, relu=True), tf.constant(b)),
        (lambda x, b: bs.bias_relu(x, b, axis=axis, fast_gelu=True), tf.constant(b)),
        (bs.add, tf.constant(last)),
        (bs.multiply, tf.constant(last)),
    ):
        for together, alone in zip(*mapped_and_one_by_one(gradients(function, v), x, dy)):
            assert all(np.array_equal(a, b) for a, b in zip(together, alone))


def test_vectorized_map_of_indices(device, rng):
    x, idx = random_values(rng, (4, 3, 8, 2), np.float32), rng.integers(-1, 9, (4, 3)).astype(np.int32)

    def gather(x, idx):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = bs.fancy_gather(x, idx)
        return [y, tape.gradient(y, x, y * 2.0)]

    def largest(axis):
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = bs.reduce_max(x, axis, keepdims=axis == 1)
            return [y, tape.gradient(y, x, y + 1.0)]

        return run

    for function, operands in (
        (gather, (x, idx)),
        (lambda x: gather(x, tf.constant(idx[0])), (x,)),
        (lambda idx: gather(tf.constant(x[0]), idx), (idx,)),
        *((largest(axis), (x,)) for axis in (0, 1, 2, -1, -3)),
    ):
        for together, alone in zip(*mapped_and_one_by_one(function, *operands)):
            assert all(np.array_equal(a, b) for a, b in zip(together, alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectorized_map_of_random_ops(device, dtype, rng):
    x, dy = random_values(rng, (4, 5, 7), dtype), random_values(rng, (4, 5, 7), dtype)
    seeds = rng.integers(-(2**31), 2**31, (4, 2)).astype(np.int32)
    loga, dgate = random_values(rng, (4, 9), np.float32), random_values(rng, (4, 9), np.float32)
    masks = np.stack([ewops.gen_dropout_mask_op(seed, 35, 0.5) for seed in seeds])
    broadcast = ewops.gen_dropout_mask_op([1, 2], 7, 0.5)

    def drop(x, dy, seed):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, mask = ewops.dropout_op(x, seed, 0.7)
        return [y, mask, tape.gradient(y, x, dy)]

    def gate(loga, dgate, seed):
        with tf.GradientTape() as tape:
            tape.watch(loga)
            y, s = ewops.concrete_gate_op(loga, seed, 0.7)
        return [y, s, tape.gradient(y, loga, dgate)]

    for function, operands in (
        (drop, (x, dy, seeds)),
        (lambda x, dy: drop(x, dy, tf.constant([3, 4])), (x, dy)),
        (lambda seed: ewops.gen_dropout_mask_op(seed, 100, 0.5), (seeds,)),
        (lambda x, mask: bs.dropout(x, 0.5, mask)[0], (x, masks)),
        (lambda x: bs.dropout(x, 0.5, tf.constant(masks[0]))[0], (x,)),
        (lambda x: bs.dropout(x, 0.5, broadcast, mask_shape=[1, 7])[0], (x,)),
        (gate, (loga, dgate, seeds)),
        (lambda x: ewops.concrete_gate_op(x, [3, 4], 0.7)[0], (loga,)),
    ):
        for together, alone in zip(*mapped_and_one_by_one(function, *operands)):
            assert all(np.array_equal(a, b) for a, b in zip(together, alone))


def test_vectorized_map_draws_for_each_element(device, no_entropy):
    ones = tf.ones([6, 256])
    mapped = tf.function(lambda: tf.vectorized_map(lambda x: bs.dropout(x, 0.5), ones, fallback_to_while_loop=False))
    y, masks = mapped()
    assert len({m.tobytes() for m in np.asarray(masks)}) == 6
    for row, mask in zip(np.asarray(y), np.asarray(masks)):
        assert np.array_equal(row > 0, unpack(mask, 256))
    gates = tf.function(lambda: tf.vectorized_map(bs.concrete_gate, ones, fallback_to_while_loop=False))()
    assert len({g.tobytes() for g in np.asarray(gates)}) == 6


def test_vectorized_map_refuses_mapped_vectors(device):
    x, vectors = tf.ones([2, 3]), tf.ones([4, 3])
    for function, what in (
        (lambda b: bs.bias_relu(x, b, relu=True), "BiasRelu: the bias"),
        (lambda b: bs.add(x, b), "EwZXb: the bias"),
        (lambda b: bs.multiply(x, b), "EwZXb: the gain"),
        (lambda b: bs.scale_tensor(x, b[0]), "FilterTensor: input 1"),
        (lambda b: bs.dropout(x, b[0], tf.zeros(1, tf.int32))[0], "ApplyDropoutMask: keep_prob"),
    ):
        with pytest.raises(ValueError, match=f"{what} must be the same for all elements"):
            tf.function(lambda f=function: tf.vectorized_map(f, vectors, fallback_to_while_loop=False))()


# ------------------------------------------------------------------------------------------------------ derivatives


@pytest.mark.parametrize("op", UNARY)
def test_derivatives_of_unary(device, op, rng):
    x = operand(rng, op, 6, np.float32) + (0.5 if op in POSITIVE else 0.0)
    x = np.clip(np.where(np.abs(x) < 0.1, 0.3, x), -2, 2)  # away from kinks
    check_derivatives(getattr(bs, op), x)


@pytest.mark.parametrize("op", BINARY)
def test_derivatives_of_binary(device, op, rng):
    x, y = np.float32([0.3, -1.2, 0.8]), np.float32([1.1, 0.7, -1.3])
    check_derivatives(getattr(bs, op), x, y)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("act", ["none", "relu", "fast_gelu"])
def test_derivatives_of_bias_relu(device, act, axis, rng):
    x = np.float32([[0.5, -0.7, 1.1], [0.3, 0.9, -0.4]])
    kwargs = {} if act == "none" else {act: True}
    check_derivatives(lambda x, b: bs.bias_relu(x, b, axis=axis, **kwargs), x, np.full(x.shape[axis], 0.1, np.float32))


def test_derivatives_of_the_rest(device, rng):
    x, v = np.float32([[0.5, -0.7, 1.1], [0.3, 0.9, -0.4]]), np.float32([0.4, -0.6, 1.2])
    check_derivatives(bs.add, x, v)
    check_derivatives(bs.multiply, x, v)
    check_derivatives(lambda x: bs.add_n([x, x * x, x]), x)
    check_derivatives(lambda x: bs.fancy_gather(x * x, [2, 0]), x)
    for axis in (0, 1, -1):
        check_derivatives(lambda x, axis=axis: bs.reduce_max(x * x, axis, axis == 0), x)
    _, mask = bs.dropout(x, 0.5)
    check_derivatives(lambda x: bs.dropout(x * x, 0.5, mask)[0], x)
    check_derivatives(lambda x: ewops.concrete_gate_op(x, [1, 2], 0.7)[0], x)
    check_derivatives(lambda x: ewops.concrete_gate_op(x, [1, 2], 0.7)[1], x)
    check_derivatives(bs.concrete_gate_infer, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_second_derivatives_in_every_dtype(device, dtype, rng):
    x = tf.constant(np.abs(random_values(rng, 8, np.float32)).astype(dtype) + np.array(0.5, dtype))
    for op in UNARY:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = getattr(bs, op)(x)
            first = tape.gradient(y, x)
        second = outer.gradient(first, x)
        assert second is None or (second.dtype == x.dtype and np.isfinite(wide(second)).all())


# ---------------------------------------------------------------------------------------------------------- errors


X = np.ones((3, 4), np.float32)

BAD = {
    "dtype of x": (lambda: bs.exp(tf.ones(3, tf.float64)), "float64.*float32, float16 and bfloat16"),
    "mixed dtypes": (lambda: bs.subtract(X, X.astype(np.float16)), "one dtype.*float32.*float16"),
    "bias length": (lambda: bs.bias_relu(X, np.ones(3, np.float32)), r"4 elements for axis -1.*\(3,\)"),
    "bias dtype": (lambda: bs.bias_relu(X, np.ones(4, np.float16)), "float16.*must be float32"),
    "bias axis": (lambda: bs.bias_relu(X, np.ones(4, np.float32), axis=2), "axis must be -2 to 1.*got 2"),
    "two activations": (lambda: bs.bias_relu(X, np.ones(4, np.float32), relu=True, fast_gelu=True), "both"),
    "cast": (lambda: bs.float_cast(X, tf.int32), "dtype must be float32.*int32"),
    "cast gradient": (lambda: bs.float_cast(X, tf.float16, tf.float64), "dx_dtype.*float64"),
    "keep_prob": (lambda: bs.dropout(X, 1.5), "keep_prob must be 0 to 1, got 1.5"),
    "keep_prob tensor": (lambda: bs.dropout(X, tf.constant(-0.1)), "keep_prob must be 0 to 1, got -0.1"),
    "keep_prob dtype": (lambda: bs.dropout(X, tf.constant(1)), "keep_prob.*int32"),
    "mask dtype": (lambda: bs.dropout(X, 0.5, np.ones(1, np.float32)), "mask.*float32.*int32"),
    "mask length": (lambda: bs.dropout(X, 0.5, np.ones(2, np.int32)), r"mask must be \[1\] words.*12.*\[2\]"),
    "mask shape": (lambda: bs.dropout(X, 0.5, mask_shape=[3, 2]), "mask_shape.*rank of x"),
    "mask rank": (lambda: bs.dropout(X, 0.5, mask_shape=[1, 3, 4]), "mask_shape.*rank of x"),
    "gate dtype": (lambda: bs.concrete_gate(np.ones(3, np.float16)), "loga.*float16"),
    "temperature": (lambda: bs.concrete_gate(np.ones(3, np.float32), 0.0), "tempurature must be more than 0"),
    "empty list": (lambda: bs.add_n8([]), "at least one"),
    "list dtypes": (lambda: bs.add_n8([X, X.astype(np.float16)]), "one dtype"),
    "list shapes": (lambda: bs.add_n8([X, X[:2], X]), "one shape"),
    "index dtype": (lambda: bs.fancy_gather(X, np.ones(3, np.float32)), "idx.*float32.*integers"),
    "index shape": (lambda: bs.fancy_gather(X, np.ones(2, np.int32)), "leading dimensions"),
    "index rank": (lambda: bs.fancy_gather(X, np.ones((3, 4), np.int32)), "leading dimensions"),
    "gather dtype": (lambda: bs.fancy_gather(X.astype(np.float64), np.ones(3, np.int32)), "x has dtype float64"),
    "max axis": (lambda: bs.reduce_max(X, 2), "axis must be -2 to 1.*got 2"),
    "max axes": (lambda: bs.reduce_max(X, [0, 1]), "axis must be an int"),
    "max of nothing": (lambda: bs.reduce_max(tf.ones([3, 0]), 1), "no elements"),
    "assign to a tensor": (lambda: bs.assign_add(tf.constant(X), X), "must be a variable"),
    "assign another shape": (lambda: bs.assign_add(tf.Variable(X), X[:2]), "variable's shape"),
    "assign another dtype": (lambda: bs.assign_add(tf.Variable(X), X.astype(np.float16)), "float32 and float16"),
    "op code": (lambda: ewops.ew_z_xy_op(X, X, op=7), "op must be 0 to 5, got 7"),
    "shapes": (lambda: ewops.ew_z_xy_op(X, X[:2], op=0), "one shape"),
    "gradient from output": (lambda: ewops.ew_dx_dzxa_op(X, X, op=codes.TANH), "EwDxDzza"),
    "vector length": (lambda: ew_z_xb_op(X, np.ones(3, np.float32), op=18), "4 elements"),
    "saturate": (lambda: bs.filter_tensor(X, 1.0, -1.0), "saturate must be 0"),
    "scalar shape": (lambda: bs.scale_tensor(X, tf.ones(2)), "scale must be a scalar"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(device, name):
    call, message = BAD[name]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        call()


XLA = {
    "add": lambda x, b: bs.add(x, x),
    "bias": bs.add,
    "exp": lambda x, b: bs.exp(x),
    "filter_tensor": lambda x, b: bs.scale_tensor(x, 2.0),
    "float_cast": lambda x, b: bs.float_cast(x, tf.float16),
    "dropout": lambda x, b: bs.dropout(x, 0.5)[0],
    "concrete_gate": lambda x, b: bs.concrete_gate(x),
    "concrete_gate_infer": lambda x, b: bs.concrete_gate_infer(x),
    "add_n8": lambda x, b: bs.add_n([x, x, x]),
    "bias_relu": bs.bias_relu,
    "fancy_gather": lambda x, b: bs.fancy_gather(x, [0, 1, 2]),
    "reduce_max": lambda x, b: bs.reduce_max(x, 1),
}


@pytest.mark.parametrize("name", XLA)
def test_xla_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"(?i){name}.*: blocksparse ops have no XLA kernels"):
        tf.function(XLA[name], jit_compile=True)(tf.ones([3, 4]), tf.ones(4))


def test_errors_in_a_v1_graph_without_shapes(device):
    """What only the running op can see, and says by itself."""
    ones = {n: np.ones(n, np.float32) for n in (3, 4, 5)}
    cases = (
        (lambda x, b: bs.bias_relu(x, b), [X, ones[5]], "the bias must have 4 elements.*axis 1.*got shape"),
        (lambda x, b: bs.bias_relu(x, b, axis=2), [X, ones[4]], "axis must be -2 to 1 for x of shape .* got 2"),
        (lambda x, b: ew_z_xb_op(x, b, op=19), [X, ones[3]], "the gain must have 4 elements"),
        (lambda x, y: bs.add_n8([x, y]), [X, X[:2]], "all tensors must have one shape"),
        (lambda x, m: bs.dropout(x, 0.5, tf.cast(m, tf.int32))[0], [X, ones[3]], r"mask must be \[1\] words.*12"),
        (lambda x, i: bs.fancy_gather(x, tf.cast(i, tf.int32)), [X, ones[4]], "the leading dimensions of x"),
        (lambda x, _: bs.reduce_max(x, 2), [X, X], "axis must be -2 to 1 for x of shape .* got 2"),
        (lambda x, t: bs.concrete_gate(x, tf.reshape(t, [-1])[0] * 0.0), [X, X], "tempurature must be more than 0"),
        (lambda x, s: bs.scale_tensor(x, s), [X, ones[3]], "scale must be a scalar"),
    )
    for function, operands, message in cases:
        with tf.Graph().as_default(), tf.device(device):
            inputs = [tf.compat.v1.placeholder(v.dtype, None) for v in operands]
            y = function(*inputs)
            with tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(allow_soft_placement=True)) as session:
                with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                    session.run(y, dict(zip(inputs, operands)))


def test_errors_of_gradient_ops(device):
    for call in (
        lambda: ew_dxdy_dzxy_op(X, X, X[:2], op=2),
        lambda: ew_dxdg_dzxg_op(X, X, np.ones(5, np.float32), op=19),
        lambda: bias_relu_grad_op(X, X[:2], np.ones(4, np.float32), relu=1),
        lambda: bias_grad_op(X, np.ones(5, np.float32)),
    ):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            call()


def test_inputs_are_left_alone(device, rng):
    """An op may take over a buffer only where nobody else holds it."""
    x, b = tf.constant(random_values(rng, (50, 40), np.float32)), tf.constant(random_values(rng, 40, np.float32))
    before = x.numpy().copy()

    def gradient(function):
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            return tape.gradient(y, x, x)

        return run

    relu = functools.partial(bs.bias_relu, b=b, relu=True)
    functions = [bs.exp, bs.tanh, lambda x: bs.add(x, x), relu, lambda x: bs.multiply(x, b), lambda x: bs.divide(x, x)]
    functions += [lambda x: bs.dropout(x, 0.5)[0], lambda x: bs.add_n([x, x, x * 1.0])]
    for call in [*functions, *map(gradient, functions)]:
        call(x)
        tf.function(call)(x)
        tf.function(lambda x, call=call: (call(x * 1.0), x))(x)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("axis", [0, -1])
def test_bench_repeats_do_not_read_what_they_wrote(device, rng, axis):
    """Where the input is nobody else's, and an output could lie in its place; the gradient, too."""
    x, b, dy = (tf.constant(random_values(rng, shape, np.float32)) for shape in ((32, 32), 32, (32, 32)))

    def run(bench):
        @tf.function
        def function(x, b, dy):
            with tf.GradientTape() as tape:
                tape.watch([x, b])
                y = bs.bias_relu(3 * x, b, axis=axis, relu=True, bench=bench)
            return [y, *tape.gradient(y, [x, b], 3 * dy)]

        with tf.device(device):
            return function(x, b, dy)

    for repeated, once in zip(run(3), run(0), strict=True):
        np.testing.assert_array_equal(repeated, once)
