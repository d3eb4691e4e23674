"""What several tests need: random layouts and values, rounding, and how close a result has to be."""

import ctypes
import functools
import os
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

bfloat16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), bfloat16]

# dtype: (bits of the significand, exponent of the smallest normal number, largest exponent)
_FORMATS = {
    np.dtype(np.float32): (24, -126, 127),
    np.dtype(np.float16): (11, -14, 15),
    bfloat16: (8, -126, 127),
}
_UNIT_ROUNDOFF = 2.0**-24  # of float32, in which all sums are kept


@functools.cache
def devices():
    """The devices to test on: the CPU, and the first GPU if there is one."""
    import tensorflow as tf

    return ["/CPU:0"] + ["/GPU:0"] * bool(tf.config.list_physical_devices("GPU"))


@st.composite
def layouts(draw, max_rows=12, max_columns=12):
    """Bool layouts of any shape up to the given, any density, with at least one block."""
    CB, KB = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    present = draw(st.lists(st.booleans(), min_size=CB * KB, max_size=CB * KB))
    present[draw(st.integers(0, CB * KB - 1))] = True
    return np.array(present).reshape(CB, KB)


def random_layout(rng, CB, KB, density):
    """A bool layout with the given share of blocks (in expectation), at least one."""
    layout = rng.random((CB, KB)) < density
    layout[rng.integers(CB), rng.integers(KB)] = True
    return layout


def random_values(rng, shape, dtype):
    """Standard normal numbers, rounded to dtype."""
    return rng.standard_normal(shape).astype(dtype)


def ulp(x, dtype):
    """Distance, float64, between numbers of dtype at the magnitude of x: that of the binade that |x| lies in."""
    bits, smallest, _ = _FORMATS[np.dtype(dtype)]
    _, exponent = np.frexp(np.asarray(x, np.float64))  # |x| = m 2^exponent, 1/2 <= m < 1
    return np.ldexp(1.0, np.maximum(np.where(x == 0, smallest, exponent - 1), smallest) - (bits - 1))


def round_to(x, dtype):
    """float64 numbers rounded once to dtype: to nearest, ties to even, with subnormals, overflow to infinity.

    `astype` will not do for bfloat16: it goes by way of float32 and rounds twice.
    """
    x = np.asarray(x, np.float64)
    bits, _, largest = _FORMATS[np.dtype(dtype)]
    with np.errstate(invalid="ignore"):
        spacing = np.where(np.isfinite(x), ulp(x, dtype), 1.0)
        rounded = np.rint(x / spacing) * spacing  # division and product by a power of 2 are exact
        limit = np.ldexp(2.0 - 2.0 ** (1 - bits), largest)
        rounded = np.where(np.abs(rounded) > limit, np.copysign(np.inf, x), rounded)
    return np.where(np.isnan(x), np.nan, rounded).astype(dtype)


def assert_product_close(actual, expected, magnitude, terms, tf32=False, cut=False):
    """Checks a sum of products that was kept in float32 and rounded once.

    Args:
      actual: the result, float32, float16 or bfloat16.
      expected: the same in float64, not rounded.
      magnitude: the same in float64 with all factors replaced by their absolute values.
      terms: how many products one entry sums at most.
      tf32: the factors may have been rounded to TF32 (11 bits).
      cut: 16-bit factors on a GPU, whose tensor cores cut the sum after every 16 terms instead of rounding it.

    Entry by entry the result may be off by

    * half the spacing of its dtype, for the one rounding at the end, and
    * what float32 sums lose: every product (without fused instructions) and every addition rounds by up to u = 2^-24
      of itself. Over n terms of random sign that grows like sqrt(n); against the sum of absolute values,
      max(8, 2 sqrt(n)) u leaves a few standard deviations. (Half of that was passed once in some 10^6 entries.)
      (float16 or bfloat16 sums would lose 2^13 or 2^16 times as much.)
    * with TF32, 2^-11 for each of the two factors.

    And for float32 the error of the whole, relative in the Euclidean norm, is at most 1e-6 up to 1024 terms (a sum in
    one sequence gives about 0.4 u sqrt(n) = 0.8e-6 there), growing with sqrt(n) beyond; 1e-3 with TF32, whose roundings
    give 2^-11 / sqrt(3) each, about 4e-4 for two. (Where few entries are compared, all of them may happen to be small
    by cancellation: the norm counts as at least that of magnitude / sqrt(n), what terms of random sign come to. With
    TF32 that is not enough: the gradients of a few gates, of factors rounded exactly to nearest, miss it once in 100.
    Up to 64 entries are bounded one by one alone.) Sums that are cut lose up to 2^-23 of themselves each time, half of
    that on average and always to one side, which adds 2^-24 terms / 16.

    NaN and infinity must be where they are expected.
    """
    actual = np.asarray(actual)
    expected, magnitude = np.asarray(expected, np.float64), np.asarray(magnitude, np.float64)
    assert actual.dtype in _FORMATS, f"no tolerance for {actual.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert magnitude.shape == expected.shape
    wide = actual.astype(np.float64)
    loss = max(8.0, 2.0 * np.sqrt(terms)) * _UNIT_ROUNDOFF + (2.0**-10 if tf32 else 0.0)
    with np.errstate(invalid="ignore"):
        tolerance = ulp(np.where(np.isfinite(expected), expected, 0.0), actual.dtype) / 2 + loss * magnitude
        same = (wide == round_to(expected, actual.dtype).astype(np.float64)) | (np.isnan(wide) & np.isnan(expected))
        good = same | (np.isfinite(wide) & np.isfinite(expected) & (np.abs(wide - expected) <= tolerance))
    if not good.all():
        worst = np.unravel_index(np.argmin(good), good.shape)
        raise AssertionError(
            f"{np.count_nonzero(~good)} of {good.size} entries are wrong, the first at {tuple(map(int, worst))}: "
            f"{wide[worst]!r}, expected {expected[worst]!r} +- {tolerance[worst]:.3g}"
        )
    finite = np.isfinite(expected) & np.isfinite(wide)
    if actual.dtype == np.float32 and np.count_nonzero(finite) > (64 if tf32 else 0):
        error = np.linalg.norm(wide[finite] - expected[finite])
        norm = max(np.linalg.norm(expected[finite]), np.linalg.norm(magnitude[finite]) / np.sqrt(max(terms, 1)))
        allowed = 1e-3 if tf32 else 1e-6 * max(1.0, np.sqrt(terms / 1024))
        allowed += _UNIT_ROUNDOFF * terms / 16 if cut else 0.0
        assert error <= allowed * norm, f"relative error {error / (norm or 1):.3g}, allowed {allowed:.3g}"


def wide(x):
    """A tensor or array as float64."""
    return np.asarray(x.numpy() if hasattr(x, "numpy") else x).astype(np.float64)


def assert_close(actual, expected, dtype, ulps=4.0, magnitude=0.0):
    """Checks `actual`, of `dtype`: half a spacing for the rounding, and a few units of float32 for the arithmetic.

    `ulps` counts those of the result's size, and of `magnitude` where terms of that size cancel. NaN and infinity must
    be where they are expected.
    """
    actual = np.asarray(actual.numpy() if hasattr(actual, "numpy") else actual)
    expected = np.asarray(expected, np.float64)
    assert actual.dtype == dtype
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    rounded = round_to(expected, dtype).astype(np.float64)
    finite = np.isfinite(rounded) & np.isfinite(expected)
    safe = np.where(finite, expected, 0.0)
    size = np.maximum(np.abs(safe), magnitude)
    tolerance = ulp(safe, dtype) / 2 + ulps * np.maximum(2 * _UNIT_ROUNDOFF * size, 2.0**-149)
    wide = actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        good = (wide == rounded) | (np.isnan(wide) & np.isnan(rounded)) | (finite & (np.abs(wide - safe) <= tolerance))
        # At the edge of the range arithmetic may round to infinity or just not.
        edge = np.abs(expected) > 0.999 * float(np.finfo(np.float32).max if dtype != np.float16 else 65504)
        good |= (
            edge & (np.sign(wide) == np.sign(expected)) & (np.abs(wide) >= 0.99 * np.minimum(np.abs(expected), 3.3e38))
        )
    assert good.all(), (
        f"{np.count_nonzero(~good)} of {good.size} wrong: {wide[~good][:4]}, expected {expected[~good][:4]}"
    )


def poison(device, *tensors):
    """Fills the memory that new tensors will get with values no test expects, so that an unwritten output shows.

    On the CPU all of it from now on, by the C library (bytes 0x7f: 3.4e38, or NaN in float16). On a GPU what the next
    tensors of the given shapes and dtypes will get, with NaN: its allocator hands out last what came back last.
    """
    if device == "/CPU:0":
        ctypes.CDLL(None).mallopt(-6, 0x80)  # M_PERTURB
        return
    import tensorflow as tf

    with tf.device(device):
        for shape, dtype in tensors:
            copies = [tf.fill(shape, tf.cast(np.nan, dtype)) for _ in range(3)]
            copies[0].numpy()  # the GPU works behind: wait
            del copies


def assert_on(device, *tensors):
    """Checks where tensors live."""
    for tensor in tensors:
        assert tensor.device.endswith(device.replace("/", "device:")), f"{tensor.device}, expected {device}"


def dense(bsmm, w):
    """The dense equivalent `[C, K]` of a weight as a differentiable tensor of w's dtype: an oracle for derivatives of
    any order, in float64."""
    import tensorflow as tf

    c, k = bsmm.updat_lut.T
    pieces = tf.einsum(
        "wij,wc,wk->cikj", w, tf.one_hot(c, bsmm.CB, dtype=w.dtype), tf.one_hot(k, bsmm.KB, dtype=w.dtype)
    )
    return tf.reshape(pieces, [bsmm.C, bsmm.K])


def check_derivatives(function, *operands, atol=2e-2):
    """First and second derivatives against finite differences, in float32."""
    import tensorflow as tf

    operands = [tf.constant(x, tf.float32) for x in operands]

    def gradient(*operands):
        with tf.GradientTape() as tape:
            tape.watch(operands)
            y = function(*operands)
            total = tf.reduce_sum(y * tf.reshape(tf.cos(tf.range(tf.size(y), dtype=tf.float32)), tf.shape(y)))
        gradients = tape.gradient(total, operands, unconnected_gradients="zero")
        return tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)

    for f in (function, gradient):
        theoretical, numerical = tf.test.compute_gradient(f, operands, delta=1e-2)
        for t, n in zip(theoretical, numerical):
            np.testing.assert_allclose(t, n, rtol=2e-2, atol=atol)


def run_python(script, *arguments, timeout=300):
    """Runs a script in a fresh interpreter that finds the package; gives what it prints."""
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), TF_CPP_MIN_LOG_LEVEL="2"
    )
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
