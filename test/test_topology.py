"""Layouts by topology: sizes, counts, seeds, mixing, pictures, errors."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocksparse import topology

seeds = st.integers(0, 2**32 - 1)
densities = st.floats(0.01, 1.0)


@given(st.integers(1, 40), st.data(), st.floats(0, 1), seeds)
def test_watts_strogatz(n, data, p, seed):
    k = 2 * data.draw(st.integers(0, n // 2))
    layout = topology.watts_strogatz(n, k, p, seed)
    assert layout.shape == (n, n) and layout.dtype == bool
    assert layout.diagonal().all() and (layout == layout.T).all()
    assert np.count_nonzero(layout) == min(n * (k + 1), n * n)
    np.testing.assert_array_equal(layout, topology.watts_strogatz(n, k, p, seed))


@given(st.integers(1, 20), st.data())
def test_watts_strogatz_without_rewiring_is_a_band_on_a_ring(n, data):
    k = 2 * data.draw(st.integers(0, n // 2))
    np.testing.assert_array_equal(topology.watts_strogatz(n, k, 0.0), topology.banded(n, n, k // 2, wrap=True))


@given(st.integers(2, 40), st.data(), seeds)
def test_barabasi_albert(n, data, seed):
    m = data.draw(st.integers(1, n - 1))
    layout = topology.barabasi_albert(n, m, seed)
    assert layout.shape == (n, n) and layout.dtype == bool
    assert layout.diagonal().all() and (layout == layout.T).all() and layout[:m, :m].all()
    assert np.count_nonzero(layout) == n + 2 * m * (n - m) + (m - 1) * (m - 2)
    assert (np.tril(layout, -1)[m + 1 :].sum(1) == m).all()  # each new node has m links to earlier ones
    np.testing.assert_array_equal(layout, topology.barabasi_albert(n, m, seed))


def test_barabasi_albert_has_hubs(rng):
    """Preferential attachment: the best linked of 500 nodes has far more links than the 2 m of the mean."""
    degrees = topology.barabasi_albert(500, 4, int(rng.integers(2**31))).sum(0) - 1
    assert degrees.max() > 5 * degrees.mean()
    assert np.median(degrees) < degrees.mean()


@given(st.integers(1, 30), st.integers(1, 30), densities, seeds)
def test_balanced_random(CB, KB, density, seed):
    layout = topology.balanced_random(CB, KB, density, seed)
    assert layout.shape == (CB, KB) and layout.dtype == bool
    blocks = max(round(density * CB * KB), 1)
    assert np.count_nonzero(layout) == blocks
    for lengths, parts in ((layout.sum(0), KB), (layout.sum(1), CB)):
        assert set(lengths.tolist()) <= {blocks // parts, -(-blocks // parts)}
    np.testing.assert_array_equal(layout, topology.balanced_random(CB, KB, density, seed))


@given(st.integers(1, 30), st.integers(1, 30), densities, seeds)
def test_random(CB, KB, density, seed):
    layout = topology.random(CB, KB, density, seed)
    assert layout.shape == (CB, KB) and layout.dtype == bool
    assert np.count_nonzero(layout) == max(round(density * CB * KB), 1)
    np.testing.assert_array_equal(layout, topology.random(CB, KB, density, seed))


@pytest.mark.parametrize("make", [topology.random, topology.balanced_random])
def test_every_position_is_as_likely(rng, make):
    draws = 2000
    counts = sum(make(4, 6, 1 / 3, int(rng.integers(2**31))).astype(int) for _ in range(draws))
    spread = np.sqrt(draws * (1 / 3) * (2 / 3))
    assert np.abs(counts - draws / 3).max() < 6 * spread


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12), st.booleans())
def test_banded(CB, KB, width, wrap):
    expected = np.zeros((CB, KB), bool)
    for c in range(CB):
        for k in range(KB):
            distance = abs((2 * c + 1) * KB - (2 * k + 1) * CB)  # in units of 1 / (2 CB KB)
            if wrap:
                distance = min(distance, 2 * CB * KB - distance)
            expected[c, k] = distance * max(CB, KB) <= 2 * CB * KB * width
    if expected.any():
        np.testing.assert_array_equal(topology.banded(CB, KB, width, wrap=wrap), expected)
    else:
        with pytest.raises(ValueError, match="no block within width"):
            topology.banded(CB, KB, width, wrap=wrap)
    if CB == KB and not wrap:
        c, k = np.indices((CB, KB))
        np.testing.assert_array_equal(expected, abs(c - k) <= width)


@pytest.mark.parametrize("kind", topology.TOPOLOGIES)
@pytest.mark.parametrize("density", [0.05, 0.1, 0.37, 1.0])
def test_make_layout(kind, density):
    layout = topology.make_layout(kind, 64, 64, density, seed=3)
    # A ring has its links in pairs (2 of 64); a band grows by two diagonals at a time.
    assert abs(layout.mean() - density) <= 1 / 32
    np.testing.assert_array_equal(layout, topology.make_layout(kind, 64, 64, density, seed=3))
    if kind != "banded" and density < 1:
        assert (layout != topology.make_layout(kind, 64, 64, density, seed=4)).any()
        assert (topology.make_layout(kind, 64, 64, density) != topology.make_layout(kind, 64, 64, density)).any()


@pytest.mark.parametrize("kind", ["balanced_random", "random", "banded"])
def test_make_layout_rectangular(kind):
    layout = topology.make_layout(kind, 24, 60, 0.25, seed=3)
    assert layout.shape == (24, 60) and abs(layout.mean() - 0.25) < 0.05


def test_seeds_do_not_touch_global_generators():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    for kind in topology.TOPOLOGIES:
        topology.make_layout(kind, 16, 16, 0.3)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_mixing_factor_of_known_layouts():
    np.testing.assert_array_equal(topology.mixing_factor(np.eye(5), 3), [0.2, 0.2, 0.2])
    np.testing.assert_array_equal(topology.mixing_factor(np.ones((4, 4)), 2), [1, 1])
    ring = topology.banded(10, 10, 1, wrap=True)
    np.testing.assert_allclose(topology.mixing_factor(ring, 5), [0.3, 0.5, 0.7, 0.9, 1.0])
    # directed: rows lead to columns
    chain = np.eye(3, k=1)
    np.testing.assert_allclose(topology.mixing_factor(chain, 3), [2 / 9, 1 / 9, 0])
    wide, back = np.array([[1, 1, 0], [0, 0, 1]]), np.array([[1, 0], [0, 1], [0, 1]])
    np.testing.assert_allclose(topology.mixing_factor([wide, back]), [0.5, 0.75])


def test_small_worlds_mix_faster_than_rings():
    ring = topology.mixing_factor(topology.watts_strogatz(200, 6, 0.0, seed=1), 4)
    small_world = topology.mixing_factor(topology.watts_strogatz(200, 6, 0.2, seed=1), 4)
    assert ring[-1] == pytest.approx(25 / 200)
    assert small_world[-1] > 0.7
    assert (np.diff(small_world) >= 0).all()


def test_plot_layout(tmp_path):
    pytest.importorskip("matplotlib")
    layout = topology.watts_strogatz(16, 4, 0.2, seed=1)
    axes = topology.plot_layout(layout, tmp_path / "layout.png")
    assert (tmp_path / "layout.png").read_bytes()[1:4] == b"PNG"
    np.testing.assert_array_equal(axes.images[0].get_array(), layout)
    assert axes.get_title() == "16 x 16 blocks, 31.2% present"
    again = topology.plot_layout(layout, axes=axes, title="mine")
    assert again is axes and axes.get_title() == "mine"
    with pytest.raises(ValueError, match=r"two-dimensional, got shape \(3,\)"):
        topology.plot_layout([1, 0, 1])


def test_plot_layout_names_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        topology.plot_layout(np.eye(3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: topology.watts_strogatz(10, 3), "even, 0 to 10, got 3"),
        (lambda: topology.watts_strogatz(10, 12), "even, 0 to 10, got 12"),
        (lambda: topology.watts_strogatz(10, 2, 1.5), "0 to 1, got 1.5"),
        (lambda: topology.watts_strogatz(10), "either k or density"),
        (lambda: topology.watts_strogatz(10, 2, density=0.5), "either k or density"),
        (lambda: topology.watts_strogatz(0, 0), "n must be .* at least 1, got 0"),
        (lambda: topology.barabasi_albert(10, 10), "1 to 9, got 10"),
        (lambda: topology.barabasi_albert(10, 0), "1 to 9, got 0"),
        (lambda: topology.barabasi_albert(1, 1), "at least 2 nodes, got 1"),
        (lambda: topology.barabasi_albert(10, density=1.2), "at most 1, got 1.2"),
        (lambda: topology.balanced_random(4, 4, 0.0), "above 0 and at most 1, got 0.0"),
        (lambda: topology.balanced_random(2.5, 4, 0.5), "CB must be a whole number .* got 2.5"),
        (lambda: topology.random(4, -1, 0.5), "KB must be .* got -1"),
        (lambda: topology.random(4, 4, float("nan")), "got nan"),
        (lambda: topology.banded(4, 4, -1), "at least 0, got -1"),
        (lambda: topology.banded(4, 4), "either width or density"),
        (lambda: topology.make_layout("scale_free", 4, 4, 0.5), "watts_strogatz.* got 'scale_free'"),
        (lambda: topology.make_layout("watts_strogatz", 4, 8, 0.5), "square, got 4 x 8"),
        (lambda: topology.mixing_factor(np.eye(3)), "number of steps"),
        (lambda: topology.mixing_factor(np.ones((2, 3)), 2), r"shape \(2, 3\) for 3 blocks"),
        (lambda: topology.mixing_factor(np.ones(3), 2), r"shape \(3,\)"),
    ],
)
def test_malformed_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()
