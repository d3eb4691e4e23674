"""The block-sparse product beside its peers, in one process: ours and dense tf.matmul through TensorFlow, SciPy's and,
where it is installed, MKL's block-sparse rows.

    python bench/matmul.py                      everything (hours); --suite floors: C = K = 4096, random layouts
    python bench/matmul.py --n 64 --block 32    a part of it
    python bench/matmul.py --suite sweep        about 6.55 M weights in ever larger, sparser matrices
    python bench/matmul.py --device gpu         on a GPU: see matmul_gpu.py

Rounds of [dense, ours with one layout, with the next, ...], in each the best of a few calls; a result is the median
over the rounds of dense time by our time. Rounds in which dense ran more than 20 % slower than in its best round are
rejected, as the machine was busy; where fewer than three stay, the result says so. "cold" is the same with the
last-level cache overwritten before each call. Forward of axis 0 is set beside the dense product of axis 1, as the dense
product of axis 0 is slow.
"""

import argparse
import itertools
import json
import statistics
import sys

import numpy as np
from _common import RESULTS, Scrubber, about, median_ratio, quiet, rounds, save

PRODUCTS = ("forward", "dx", "dw")
LAYOUTS = ("random", "watts_strogatz", "barabasi_albert")
WEIGHTS = 6.55e6  # of the sweep of constant weights


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--suite", choices=("all", "floors", "sweep"), default="all")
    parser.add_argument("--size", type=int, default=4096, help="C and K")
    parser.add_argument("--n", type=int, nargs="+", help="batch sizes; default 1 64 512 4096, floors: 64 512")
    parser.add_argument("--density", type=float, nargs="+", help="default 0.5 0.25 0.1 0.03 0.01, floors: without 0.01")
    parser.add_argument("--block", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--product", nargs="+", choices=PRODUCTS, default=PRODUCTS)
    parser.add_argument("--axis", type=int, nargs="+", choices=(0, 1), default=[1])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, help="default all, floors: random")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine others use, too")
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="time SciPy and MKL, too")
    parser.add_argument("--json", help="name of the result in bench/results/; default matmul_cpu_<suite>.json")
    parser.add_argument("--append", action="store_true", help="keep what that result has of other cases")
    return parser


def dense_product(tf, product, axis, x, dy, w):
    """The dense peer: activations [N, features] for axis 1, [features, N] for axis 0."""
    if product == "dw":
        return lambda: tf.matmul(x, dy, transpose_a=True) if axis == 1 else tf.matmul(x, dy, transpose_b=True)
    if product == "dx":
        return lambda: tf.matmul(dy, w, transpose_b=True) if axis == 1 else tf.matmul(w, dy)
    return lambda: tf.matmul(x, w)  # see the module's words on axis 0


class Ours:
    """One layout's three products as TensorFlow ops."""

    def __init__(self, tf, layout, bsize, axis):
        import blocksparse.matmul as module

        self.tf, self.ops = tf, module._ops
        self.matmul = module.BlocksparseMatMul(layout, block_size=bsize, feature_axis=axis)
        self.table = self.matmul._table(True)

    def call(self, product, x, dy, w):
        attrs = self.matmul._attrs
        common = dict(gate_grad=False, gated_dw=False, dw_dtype=w.dtype)
        if product == "forward":
            return lambda: self.matmul(x, w)
        if product == "dx":
            return lambda: self.ops.blocksparse_matmul_dx(dy, w, self.table, [], **common, **attrs)
        return lambda: self.matmul.weight_grad(x, dy)


def layout_of(kind, blocks, density):
    from blocksparse import topology

    return topology.make_layout(kind, blocks, blocks, density, seed=1)


def peers_of(matmul, layout, w, x):
    """SciPy's and MKL's forward product, float32: y [K, N] = Wd^T x [C, N], the layout they are written for."""
    import _mkl
    import scipy.sparse

    order = np.lexsort((matmul.updat_lut[:, 0], matmul.updat_lut[:, 1]))  # by output, then input block
    pointer = np.concatenate([[0], np.cumsum(np.asarray(layout).astype(bool).sum(0))])
    blocks = np.ascontiguousarray(w.numpy()[order].transpose(0, 2, 1))
    matrix = scipy.sparse.bsr_matrix(
        (blocks, matmul.updat_lut[order, 0], pointer), shape=(matmul.K, matmul.C), blocksize=blocks.shape[1:]
    )
    operand = np.ascontiguousarray(x.numpy() if matmul.axis == 0 else x.numpy().T)
    calls = {"scipy": lambda: matrix @ operand}
    library = _mkl.load()
    if library is not None:
        calls["mkl"] = _mkl.Product(library, matrix, operand)
    return calls


def measure_group(tf, options, size, n, dtype, product, axis, cells, scrub, tick):
    """All layouts of one dense product, beside it in the same rounds."""
    random = lambda *shape: tf.cast(tf.random.normal(shape), dtype)  # noqa: E731
    shape = (n, size) if axis == 1 else (size, n)
    x, dy, w = random(*shape), random(*shape), random(size, size)
    straight = random(n, size) if product == "forward" and axis == 0 else x
    calls, products = {"dense": dense_product(tf, product, axis, straight, dy, w)}, {}
    for cell in cells:
        kind, density, bsize = cell
        layout = layout_of(kind, size // bsize, density)
        ours = Ours(tf, layout, bsize, axis)
        blocks = random(*ours.matmul.w_shape)
        products[cell] = ours.matmul, layout, blocks
        calls[cell] = ours.call(product, x, dy, blocks)
    for call in calls.values():
        call()
    times = rounds(calls, options.rounds, options.clock)
    cold = rounds(calls, 3, options.clock, before=scrub) if scrub else None
    kept = quiet(times["dense"])
    rows = []
    for cell in cells:
        kind, density, bsize = cell
        matmul, layout, blocks = products.pop(cell)
        flops = 2 * n * matmul.blocks * bsize * bsize
        row = dict(layout=kind, size=size, n=n, density=density, block=bsize, dtype=dtype, product=product, axis=axis)
        row |= {"blocks": matmul.blocks, "rounds": options.rounds, "kept": len(kept)}
        for name, key, count in (("dense", "dense", 2 * n * size * size), ("ours", cell, flops)):
            row[f"{name}_ms"] = statistics.median(times[key][i] for i in kept) * 1e3
            row[f"{name}_gflops"] = count / row[f"{name}_ms"] / 1e6
        row["speedup"] = median_ratio(times["dense"], times[cell], kept)
        if cold:
            row["cold_speedup"] = median_ratio(cold["dense"], cold[cell], range(3))
        if options.peers and product == "forward" and dtype == "float32" and flops < 2e9:
            for name, peer in peers_of(matmul, layout, blocks, x).items():
                peer()
                row[f"{name}_ms"] = min(rounds({name: peer}, 2, options.clock)[name]) * 1e3
        rows.append(row)
        tick(row)
    return rows


def case_of(row):
    return tuple(row[k] for k in ("layout", "size", "n", "density", "block", "dtype", "product", "axis"))


def groups(options):
    """What is timed: (size, n, dtype, product, axis), [(layout, density, block)]."""
    floors = options.suite == "floors"
    ns = options.n or ([64, 512] if floors else [1, 64, 512, 4096])
    densities = options.density or [0.5, 0.25, 0.1, 0.03] + [0.01] * (not floors)
    kinds = options.layout or (["random"] if floors else LAYOUTS)
    dtypes = options.dtype or (["float32"] if floors else ["float32", "bfloat16"])
    if options.suite == "sweep":
        for size, dtype, product, axis in itertools.product(
            (2560, 5120, 10240, 20480), options.dtype or ["float32"], options.product, options.axis
        ):
            cells = itertools.product(options.layout or ["random"], [WEIGHTS / size**2], options.block)
            yield (size, 64, dtype, product, axis), list(cells)
        return
    for key in itertools.product([options.size], ns, dtypes, options.product, options.axis):
        yield key, list(itertools.product(kinds, densities, options.block))


def main():
    options = parse().parse_args()
    if options.device == "gpu":
        import matmul_gpu

        sys.argv[1:] = [a for a in sys.argv[1:] if a not in ("--device", "gpu", "--device=gpu")]
        return matmul_gpu.main()

    import tensorflow as tf
    from tqdm import tqdm

    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    scrub = Scrubber() if options.cold else None
    work = list(groups(options))
    document = about("cpu", options.threads) | {
        "tensorflow": tf.__version__,
        "suite": options.suite,
        "clock": options.clock,
    }
    name = options.json or f"matmul_cpu_{options.suite}.json"
    document["rows"] = []
    if options.append and (RESULTS / name).exists():
        document["rows"] = json.loads((RESULTS / name).read_text())["rows"]
    with tqdm(total=sum(len(cells) for _, cells in work), unit="case") as bar:

        def tick(row):
            bar.set_postfix_str(
                f"{row['product']} N={row['n']} block {row['block']} at {row['density']:.3g}: {row['speedup']:.1f}x"
            )
            bar.update()

        for key, cells in work:
            rows = measure_group(tf, options, *key, cells, scrub, tick)
            new = {case_of(row) for row in rows}
            document["rows"] = [row for row in document["rows"] if case_of(row) not in new] + rows
            path = save(name, document)  # after each group, so that an interrupted run leaves what it has
    busy = sum(row["kept"] < 3 for row in document["rows"])
    print(f"{len(document['rows'])} cases in {path}" + (f", {busy} of them on a busy machine" if busy else ""))


if __name__ == "__main__":
    main()
