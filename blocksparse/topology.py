"""Layouts worth having: small-world graphs, balanced and plain random ones, bands; how fast they mix; pictures.

Every function gives a bool array `[CB, KB]` at block granularity, rows for input blocks, for `BlocksparseMatMul` or
`BlockLayout`; the same seed gives the same layout. `n` makes a square one, as recurrent networks need, with its
diagonal present, so that every unit sees itself.

Where a state of n blocks has to mix within a few internal steps, small-world graphs are the better spent connections:
the mean path length grows with log n only (S. Gray, A. Radford, D. P. Kingma: GPU Kernels for Block-Sparse Weights,
2017).
"""

import networkx as nx
import numpy as np

__all__ = [
    "TOPOLOGIES",
    "balanced_random",
    "banded",
    "barabasi_albert",
    "make_layout",
    "mixing_factor",
    "plot_layout",
    "random",
    "watts_strogatz",
]


def watts_strogatz(n, k=None, p=0.2, seed=None, *, density=None):
    """A ring in which every node is linked to its k nearest ones, each link rewired with probability p.

    D. J. Watts, S. H. Strogatz: Collective dynamics of "small-world" networks, Nature 393, 1998. Links go both ways and
    every node has one to itself, so there are exactly `n (k + 1)` blocks (`n n` where k reaches n - 1).

    Args:
      n: number of block rows and columns.
      k: links of a node before rewiring, even, 0 to n.
      p: share of links that are rewired: 0 is a ring of local links, 1 nearly a random graph.
      seed: int, or None for a fresh one.
      density: instead of k: the k with `(k + 1) / n` next to it.
    """
    _check_size(n=n)
    if not 0 <= p <= 1:
        raise ValueError(f"p is the share of links that are rewired, 0 to 1, got {p}")
    _check_either("k", k, density)
    if k is None:
        k = min(max(2 * round((density * n - 1) / 2), 0), n)
    if not 0 <= k <= n or k % 2:
        raise ValueError(f"k, the links of a node, must be even, 0 to {n}, got {k}")
    return _with_diagonal(nx.watts_strogatz_graph(n, k, p, _int_seed(seed)))


def barabasi_albert(n, m=None, seed=None, *, density=None):
    """A graph with hubs: each new node is linked to m of those before it, with probability proportional to their links.

    A.-L. Barabási, R. Albert: Emergence of scaling in random networks, Science 286, 1999. Links go both ways, every
    node has one to itself, and the first m nodes, the hub, are all linked to each other. Growth starts from a star of
    m + 1 nodes, so there are exactly `n + 2 m (n - m) + (m - 1) (m - 2)` blocks.

    Args:
      n: number of block rows and columns, at least 2.
      m: links of each new node, 1 to n - 1.
      seed: int, or None for a fresh one.
      density: instead of m: the m whose density is next to it.
    """
    _check_size(n=n)
    _check_either("m", m, density)
    if n < 2:
        raise ValueError(f"a Barabási–Albert graph needs at least 2 nodes, got {n}")
    if m is None:
        every = np.arange(1, n)
        blocks = n + 2 * every * (n - every) + (every - 1) * (every - 2)
        m = int(every[np.argmin(np.abs(blocks - density * n * n))])
    if not 1 <= m < n:
        raise ValueError(f"m, the links of a new node, must be 1 to {n - 1}, got {m}")
    layout = _with_diagonal(nx.barabasi_albert_graph(n, m, _int_seed(seed)))
    layout[:m, :m] = True
    return layout


def balanced_random(CB, KB, density, seed=None):
    """Random blocks, as many in every row and as many in every column, so that no unit waits for a longer one.

    There are `round(density CB KB)` blocks, at least 1. Where that divides by CB (KB), all rows (columns) hold the same
    number; else the numbers differ by 1 at most. Column by column the least filled rows are taken, ties by lot; the
    columns are shuffled.
    """
    _check_size(CB=CB, KB=KB)
    blocks = _block_count(CB, KB, density)
    rng = np.random.default_rng(seed)
    column_lengths = blocks // KB + (np.arange(KB) < blocks % KB)
    layout = np.zeros((CB, KB), bool)
    filled = np.zeros(CB, np.int64)
    for k, length in enumerate(column_lengths):
        rows = np.lexsort([rng.random(CB), filled])[:length]
        layout[rows, k] = True
        filled[rows] += 1
    return layout[:, rng.permutation(KB)]


def random(CB, KB, density, seed=None):
    """`round(density CB KB)` blocks, at least 1, each set of that size as likely as any other."""
    _check_size(CB=CB, KB=KB)
    layout = np.zeros(CB * KB, bool)
    layout[np.random.default_rng(seed).choice(CB * KB, _block_count(CB, KB, density), replace=False)] = True
    return layout.reshape(CB, KB)


def banded(CB, KB, width=None, *, density=None, wrap=False):
    """Local links only: the blocks near the diagonal.

    Row c sits at `(c + 1/2) / CB` of the layout's height, column k at `(k + 1/2) / KB` of its width; a block is present
    where the two differ by at most `width / max(CB, KB)`: for a square layout, where `|c - k| <= width`.

    Args:
      CB, KB: number of block rows and columns.
      width: neighbours on each side, 0 or more; not necessarily whole.
      density: instead of width: the width whose density is next to it.
      wrap: take the ends as neighbours, as on a ring.
    """
    _check_size(CB=CB, KB=KB)
    _check_either("width", width, density)
    # Distances in units of 1 / (2 CB KB), so that they are exact.
    distance = np.abs((2 * np.arange(CB)[:, None] + 1) * KB - (2 * np.arange(KB) + 1) * CB)
    if wrap:
        distance = np.minimum(distance, 2 * CB * KB - distance)
    if width is None:
        limits, counts = np.unique(distance, return_counts=True)
        limit = limits[np.argmin(np.abs(np.cumsum(counts) - density * CB * KB))]
    elif width < 0:
        raise ValueError(f"width, the neighbours on each side, must be at least 0, got {width}")
    else:
        limit = width * 2 * min(CB, KB)
    layout = distance <= limit
    if not layout.any():
        raise ValueError(f"a {CB} x {KB} layout has no block within width {width} of its diagonal")
    return layout


def make_layout(topology, CB, KB, density, seed=None):
    """A layout of the given size and (nearly) the given density, by the name of its topology.

    Args:
      topology: a key of `TOPOLOGIES`: "balanced_random", "random" and "banded" for any size; "watts_strogatz" (20 %
        rewired) and "barabasi_albert" for square ones.
      CB, KB: number of block rows and columns.
      density: share of blocks that are present, above 0, at most 1.
      seed: int, or None for a fresh one.
    """
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {topology!r}")
    return TOPOLOGIES[topology](CB, KB, density, seed)


TOPOLOGIES = {
    "balanced_random": balanced_random,
    "random": random,
    "banded": lambda CB, KB, density, seed: banded(CB, KB, density=density),
    "watts_strogatz": lambda CB, KB, density, seed: watts_strogatz(_square(CB, KB), seed=seed, density=density),
    "barabasi_albert": lambda CB, KB, density, seed: barabasi_albert(_square(CB, KB), seed=seed, density=density),
}


def mixing_factor(layout, steps=None):
    """How much of a state one of its units reaches: the mean over units of the share reached after each internal step.

    Args:
      layout: a square layout, applied `steps` times; or a sequence of layouts, one for each step, each with as many
        rows as the one before has columns.
      steps: number of steps, for a single layout.

    Returns:
      float64 `[steps]`; 1 where every unit reaches every other.
    """
    if steps is not None:
        layouts = [np.asarray(layout)] * steps
    elif getattr(layout, "ndim", 3) == 2:
        raise ValueError("mixing_factor of one layout needs the number of steps")
    else:
        layouts = [np.asarray(step) for step in layout]
    reached, shares = None, []
    for step in layouts:
        if step.ndim != 2 or (reached is not None and reached.shape[1] != step.shape[0]):
            raise ValueError(
                f"a step's layout must have as many rows as the state has blocks, got shape {step.shape}"
                + ("" if reached is None else f" for {reached.shape[1]} blocks")
            )
        links = (step != 0).astype(np.float32)
        reached = links if reached is None else (reached @ links > 0).astype(np.float32)
        shares.append(reached.mean(dtype=np.float64))
    return np.array(shares)


def plot_layout(layout, path=None, *, title=None, axes=None):
    """Draws a layout, present blocks dark, input blocks downwards and output blocks to the right. Needs matplotlib.

    Args:
      layout: two-dimensional array-like.
      path: where to save the picture, with a suffix that matplotlib knows (.png, .svg, .pdf); None: not saved.
      title: by default the size and the density.
      axes: matplotlib axes to draw on; None: a figure of its own.

    Returns:
      The axes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_layout needs matplotlib: pip install matplotlib") from error
    present = np.asarray(layout) != 0
    if present.ndim != 2:
        raise ValueError(f"a layout is two-dimensional, got shape {present.shape}")
    if axes is None:
        axes = Figure(figsize=(5, 5), layout="tight").add_subplot()
    axes.imshow(present, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel("output block")
    axes.set_ylabel("input block")
    CB, KB = present.shape
    axes.set_title(title if title is not None else f"{CB} x {KB} blocks, {present.mean():.1%} present")
    if path is not None:
        axes.figure.savefig(path)
    return axes


def _with_diagonal(graph):
    """The adjacency of an undirected graph of nodes 0 to n - 1, and its diagonal."""
    layout = np.eye(len(graph), dtype=bool)
    edges = np.array(graph.edges, np.int64).reshape(-1, 2)
    layout[edges[:, 0], edges[:, 1]] = layout[edges[:, 1], edges[:, 0]] = True
    return layout


def _int_seed(seed):
    """A seed for networkx, which would take None as leave to use Python's global generator."""
    return int(np.random.default_rng(seed).integers(2**31))


def _block_count(CB, KB, density):
    _check_density(density)
    return max(round(density * CB * KB), 1)


def _square(CB, KB):
    if CB != KB:
        raise ValueError(
            f"graph topologies are square, got {CB} x {KB} blocks; balanced_random, random and banded take any size"
        )
    return CB


def _check_size(**sizes):
    for name, size in sizes.items():
        if size < 1 or size != int(size):
            raise ValueError(f"{name} must be a whole number of blocks, at least 1, got {size}")


def _check_density(density):
    if not 0 < density <= 1:
        raise ValueError(f"density, the share of blocks present, must be above 0 and at most 1, got {density}")


def _check_either(name, value, density):
    if (value is None) == (density is None):
        raise ValueError(f"give either {name} or density, got {name}={value} and density={density}")
    if density is not None:
        _check_density(density)
