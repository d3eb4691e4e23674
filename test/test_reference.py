"""The oracle against the worked examples, against dense products and finite differences; and the rounding helpers."""

import functools

import helpers
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_product_close, bfloat16, round_to, ulp
from hypothesis import given
from hypothesis import strategies as st

from blocksparse import reference as ref


def test_block_ids_of_a_dense_layout():
    ones = np.ones((3, 3))
    assert ref.block_ids(ones) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1), (0, 2), (1, 2), (2, 2)]
    assert ref.block_ids(ones, False) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    first = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 2)]
    assert ref.block_ids(np.ones((4, 4)))[:13] == first


def test_block_ids_of_a_sparse_layout():
    layout = [[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1]]
    expected = [(0, 0), (1, 0), (1, 1), (2, 1), (0, 2), (0, 3), (1, 3), (2, 3), (3, 3)]
    assert ref.block_ids(layout) == ref.block_ids(layout, False) == expected


def dense_of(w, layout, z_order, gate):
    """Wd by scattering a [CB, bsize, KB, bsize] array: another way than the oracle's."""
    CB, KB = layout.shape
    blocks, b, _ = w.shape
    dense = np.zeros((CB, b, KB, b))
    c, k = np.array(ref.block_ids(layout, z_order)).T
    dense[c, :, k, :] = w * (np.ones(blocks) if gate is None else gate)[:, None, None]
    return dense.reshape(CB * b, KB * b)


@given(
    helpers.layouts(5, 5),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([0, 1]),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_products_equal_dense_ones(layout, bsize, axis, z_order, gated, batch, seed):
    rng = np.random.default_rng(seed)
    CB, KB = layout.shape
    blocks = np.count_nonzero(layout)
    w = rng.standard_normal((blocks, bsize, bsize))
    gate = rng.integers(-1, 2, blocks) * rng.random(blocks) if gated else None
    shape = (lambda n: (*batch, n)) if axis == 1 else (lambda n: (n, *batch))
    x, dy = rng.standard_normal(shape(CB * bsize)), rng.standard_normal(shape(KB * bsize))
    if axis == 1:
        forward, back, outer = "...c,ck->...k", "...k,ck->...c", "nc,nk->ck"
    else:
        forward, back, outer = "c...,ck->k...", "k...,ck->c...", "cn,kn->ck"
    options = {"bsize": bsize, "axis": axis, "z_order": z_order}
    dense = dense_of(w, layout, z_order, gate)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)

    np.testing.assert_array_equal(ref.dense_weight(w, layout, gate, z_order), dense)
    close(ref.matmul(x, w, layout, gate=gate, **options), np.einsum(forward, x, dense))
    close(ref.matmul_dx(dy, w, layout, gate=gate, **options), np.einsum(back, dy, dense))

    n = int(np.prod(batch))
    flat = (lambda v: v.reshape(n, v.shape[-1])) if axis == 1 else (lambda v: v.reshape(v.shape[0], n))
    full = np.einsum(outer, flat(x), flat(dy)).reshape(CB, bsize, KB, bsize)
    c, k = np.array(ref.block_ids(layout, z_order)).T
    dw = full[c, :, k, :]
    close(ref.matmul_dw([x, x], [dy, dy], layout, **options), 2 * dw)
    close(ref.matmul_dw(x, dy, layout, **options), dw)
    if gated:
        open_ = (gate != 0)[:, None, None]
        dw_by_rule = {
            (False, False): dw,
            (False, True): dw * open_,
            (True, False): dw * gate[:, None, None],
            (True, True): dw * gate[:, None, None],
        }
        for (gate_grad, dw_gated), expected in dw_by_rule.items():
            close(ref.matmul_dw(x, dy, layout, gate=gate, gate_grad=gate_grad, dw_gated=dw_gated, **options), expected)
        dgate = (dw * w).sum((1, 2))
        close(ref.matmul_dgate(x, dy, w, layout, gate=gate, **options), dgate)
        close(ref.matmul_dgate(x, dy, w, layout, gate=gate, dw_gated=True, **options), dgate * (gate != 0))


def test_a_closed_gate_hides_what_is_in_its_block():
    layout = np.ones((1, 2))
    w = np.stack([np.full((2, 2), np.nan), np.ones((2, 2))])
    y = ref.matmul(np.ones((3, 2)), w, layout, 2, 1, gate=[0.0, 2.0])
    np.testing.assert_array_equal(y, np.tile([0.0, 0.0, 4.0, 4.0], (3, 1)))
    dx = ref.matmul_dx(np.ones((3, 4)), w, layout, 2, 1, gate=[0.0, 2.0])
    np.testing.assert_array_equal(dx, np.full((3, 2), 4.0))


def test_block_reduced_full_dw(rng):
    bsize, CB, KB = 4, 3, 2
    xs = [rng.standard_normal((5, CB * bsize)), rng.standard_normal((1, CB * bsize))]
    dys = [rng.standard_normal((5, KB * bsize)), rng.standard_normal((1, KB * bsize))]
    for norm in ("max", "l2"):
        expected = np.zeros((CB, KB))
        for x, dy in zip(xs, dys):
            for c in range(CB):
                for k in range(KB):
                    for n in range(len(x)):
                        pieces = x[n, c * bsize : (c + 1) * bsize], dy[n, k * bsize : (k + 1) * bsize]
                        sizes = [max(abs(p)) if norm == "max" else np.sqrt(p @ p) for p in pieces]
                        expected[c, k] += 0.5 * sizes[0] * sizes[1]
        np.testing.assert_allclose(ref.block_reduced_full_dw(xs, dys, bsize, 1, 0.5, norm), expected, rtol=1e-12)
        flipped = ref.block_reduced_full_dw([x.T for x in xs], [dy.T for dy in dys], bsize, 0, 0.5, norm)
        np.testing.assert_allclose(flipped, expected, rtol=1e-12)
    xs[0][0, 0] = np.inf
    only_second = ref.block_reduced_full_dw(xs[1:], dys[1:], bsize, 1)
    np.testing.assert_array_equal(ref.block_reduced_full_dw(xs, dys, bsize, 1)[0], only_second[0])
    assert not ref.block_reduced_full_dw(xs, dys, bsize, 1, scale=0.0).any()


@given(helpers.layouts(6, 6), st.sampled_from([1, 3]), st.booleans())
def test_identity_and_checker(layout, bsize, z_order):
    CB, KB = layout.shape
    dense = np.zeros((CB, bsize, KB, bsize))
    board = np.zeros((CB, KB))
    for c in range(CB):
        for k in range(KB):
            board[c, k] = (c + k + 1) % 2
            if layout[c, k] and c % KB == k % CB:
                dense[c, :, k, :] = 0.5 * np.eye(bsize)
    w = ref.identity(layout, bsize, 0.5, z_order)
    assert w.shape == (np.count_nonzero(layout), bsize, bsize)
    np.testing.assert_array_equal(ref.dense_weight(w, layout, None, z_order), dense.reshape(CB * bsize, KB * bsize))
    c, k = np.array(ref.block_ids(layout, z_order)).T
    np.testing.assert_array_equal(ref.checker(layout, z_order), board[c, k])


def test_identity_of_a_square_layout_passes_its_input_on(rng):
    layout = rng.random((5, 5)) < 0.4
    np.fill_diagonal(layout, True)
    x = rng.standard_normal((7, 20))
    np.testing.assert_array_equal(ref.matmul(x, ref.identity(layout, 4), layout, 4, 1), x)


def test_orthonormality_error(rng):
    q, _ = np.linalg.qr(rng.standard_normal((12, 4)))
    layout = np.array([[1, 0], [1, 1], [1, 0]])  # ids (0,0) (1,0) (1,1) (2,0)
    square, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    w = np.stack([q[:4], q[4:8], square, q[8:]])
    assert ref.orthonormality_error(w, layout) < 1e-14
    w[3, 0, 0] += 0.1
    assert ref.orthonormality_error(w, layout) > 1e-3
    assert ref.orthonormality_error(np.stack([q[:4].T, q[4:8].T, q[8:].T]), np.ones((1, 3))) < 1e-14


@pytest.mark.parametrize("with_gain", [False, True])
@pytest.mark.parametrize("z_order", [False, True])
def test_l2_normalize(rng, with_gain, z_order):
    layout = helpers.random_layout(rng, 5, 4, 0.6)
    layout[:, 1] = False
    layout[0, 0] = True
    bsize, K = 3, 12
    w = rng.standard_normal((np.count_nonzero(layout), bsize, bsize))
    w[ref.block_ids(layout, z_order).index((0, 0)), :, 0] = 0
    gain = rng.standard_normal(K) if with_gain else None
    y, squares = ref.l2_normalize(w, layout, gain, z_order=z_order)
    dense = ref.dense_weight(w, layout, z_order=z_order)
    np.testing.assert_allclose(squares, (dense**2).sum(0), rtol=1e-12)
    expected = dense * (1 if gain is None else gain) / np.maximum(np.linalg.norm(dense, axis=0), 1e-6)
    np.testing.assert_allclose(ref.dense_weight(y, layout, z_order=z_order), expected, rtol=1e-12)


@pytest.mark.parametrize("epsilon", [1e-12, 3.0])
def test_l2_normalize_gradient_by_differences(rng, epsilon):
    """epsilon 3 leaves some features below it and some above."""
    layout = np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 0]])
    w = rng.standard_normal((7, 2, 2))
    gain, dy = rng.standard_normal(6), rng.standard_normal(w.shape)

    def loss(w, gain):
        return np.sum(dy * ref.l2_normalize(w, layout, gain, epsilon)[0])

    dw, dgain = ref.l2_normalize_grad(w, dy, layout, gain, epsilon)
    step = 1e-6
    for i in np.ndindex(*w.shape):
        d = np.zeros(w.shape)
        d[i] = step
        assert dw[i] == pytest.approx((loss(w + d, gain) - loss(w - d, gain)) / (2 * step), rel=1e-6, abs=1e-7)
    for i in range(6):
        d = np.eye(6)[i] * step
        assert dgain[i] == pytest.approx((loss(w, gain + d) - loss(w, gain - d)) / (2 * step), rel=1e-6, abs=1e-7)


def test_projections(rng):
    lut = np.array([1, 4, 5])
    matrix = np.eye(7)[lut]  # [3, 7], a gather as a matrix
    x, y, dz = rng.standard_normal((7, 2, 3)), rng.standard_normal((3, 2, 3)), rng.standard_normal((7, 2, 3))
    spread = np.einsum("ph,p...->h...", matrix, y)
    mapped = matrix.sum(0)[:, None, None]
    np.testing.assert_array_equal(ref.gather(x, lut), np.einsum("ph,h...->p...", matrix, x))
    np.testing.assert_array_equal(ref.scatter(y, lut, 7), spread)
    np.testing.assert_array_equal(ref.scatter_add(x, y, lut), x + spread)
    factor = spread + (1 - mapped)
    before = x.copy()
    np.testing.assert_array_equal(ref.scatter_mul(x, y, lut), x * factor)
    np.testing.assert_array_equal(x, before)
    dx, dy = ref.scatter_mul_grad(dz, x, y, lut)
    np.testing.assert_array_equal(dx, dz * factor)
    np.testing.assert_array_equal(dy, np.einsum("ph,h...->p...", matrix, dz * x))
    assert ref.gather(np.zeros((7, 0)), lut).shape == (3, 0)


# The helpers that decide what passes.


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rounding_agrees_with_numpy(rng, dtype):
    limits = np.finfo(dtype)
    x = rng.standard_normal(20000) * 10.0 ** rng.uniform(-50 if dtype == np.float32 else -9, 5, 20000)
    edges = [
        0.0,
        -0.0,
        limits.max,
        float(limits.max) * (1 + 2.0**-limits.nmant),
        float(limits.smallest_subnormal) / 2,
        np.inf,
    ]
    x = np.concatenate([x, edges, [-np.inf, np.nan, float(limits.smallest_subnormal) * 1.5]])
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_array_equal(round_to(x, dtype), x.astype(dtype))


def test_rounding_to_bfloat16(rng):
    every = np.arange(0x7F80, dtype=np.uint16).view(bfloat16).astype(np.float64)  # all finite numbers from 0 up
    np.testing.assert_array_equal(round_to(every, bfloat16), every.astype(bfloat16))
    middle = (every[:-1] + every[1:]) / 2  # exact in float64
    even = np.where(np.arange(len(middle)) % 2 == 0, every[:-1], every[1:])
    np.testing.assert_array_equal(round_to(middle, bfloat16).astype(np.float64), even)
    np.testing.assert_array_equal(round_to(np.nextafter(middle, 0), bfloat16).astype(np.float64), every[:-1])
    np.testing.assert_array_equal(round_to(np.nextafter(middle, np.inf), bfloat16).astype(np.float64), every[1:])
    np.testing.assert_array_equal(ulp(every[1:-1], bfloat16), np.diff(every)[1:])
    assert np.isinf(round_to(3.4e38, bfloat16).astype(np.float64))
    assert np.isnan(round_to(np.nan, bfloat16).astype(np.float64))
    assert ml_dtypes.finfo(bfloat16).max == round_to(3.39e38, bfloat16)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_the_tolerance_passes_what_is_right_and_nothing_else(rng, dtype):
    a, b = (helpers.random_values(rng, shape, dtype).astype(np.float32) for shape in ((64, 512), (512, 48)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    magnitude = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    check = functools.partial(assert_product_close, expected=exact, magnitude=magnitude, terms=512)
    sequence = np.zeros((64, 48), np.float32)
    for i in range(512):
        sequence += a[:, i : i + 1] * b[i : i + 1]
    check(round_to(sequence, dtype))
    check(round_to(exact, dtype))

    wrong = round_to(exact, dtype)
    wrong[3, 5] = np.nan
    with pytest.raises(AssertionError, match=r"1 of 3072 .*\(3, 5\)"):
        check(wrong)
    wrong = round_to(exact, dtype)
    wrong[3, 5] = round_to(exact[3, 5] + 1.5 * ulp(exact[3, 5], dtype) + 2.0**-18 * magnitude[3, 5], dtype)
    with pytest.raises(AssertionError):
        check(wrong)
    if dtype != np.float32:
        half = np.zeros((64, 48))
        for i in range(512):
            half = round_to(half + a[:, i : i + 1] * b[i : i + 1], dtype).astype(np.float64)
        with pytest.raises(AssertionError):  # sums kept in 16 bits
            check(round_to(half, dtype))
        truncated = round_to(exact, dtype).astype(np.float64)
        truncated -= np.where(np.abs(truncated) > np.abs(exact), np.copysign(ulp(exact, dtype), exact), 0)
        with pytest.raises(AssertionError):  # rounded towards 0
            check(round_to(truncated, dtype))
    else:
        tf32 = [np.ldexp(np.rint(np.ldexp(v, 11 - e)), e - 11) for v, e in ((v, np.frexp(v)[1]) for v in (a, b))]
        coarse = round_to(tf32[0].astype(np.float64) @ tf32[1].astype(np.float64), np.float32)
        check(coarse, tf32=True)
        with pytest.raises(AssertionError):
            check(coarse)


def test_nan_and_infinity_must_be_where_they_are_expected():
    expected = np.array([np.nan, np.inf, -np.inf, 1e6, 1.0])
    good = np.array([np.nan, np.inf, -np.inf, np.inf, 1.0], np.float16)
    assert_product_close(good, expected, np.abs(expected), 1)
    for i, value in ((0, 0.0), (1, 1.0), (1, -np.inf), (2, np.nan), (3, 60000.0), (4, np.inf)):
        bad = good.copy()
        bad[i] = value
        with pytest.raises(AssertionError):
            assert_product_close(bad, expected, np.abs(expected), 1)
