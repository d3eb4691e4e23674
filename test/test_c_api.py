"""The kernels through their C interface: no TensorFlow between, on host memory.

BLOCKSPARSE_KERNELS=path takes them from a library of `make kernels`, made by another compiler or a sanitizer perhaps.
"""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import assert_product_close, bfloat16, random_layout, random_values, round_to

from blocksparse import reference
from blocksparse.layout import BlockLayout

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), bfloat16]
BSIZES = [8, 16, 32, 64, 128]
FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(3)


class MatmulArgs(ctypes.Structure):
    _fields_ = [(f, ctypes.c_int32) for f in ("product", "axis", "bsize", "dtype", "out_dtype", "tf32", "pairs")]
    _fields_ += [(f, ctypes.c_void_p) for f in ("n", "a", "b", "gate", "addend", "out")]


class GateGradArgs(ctypes.Structure):
    _fields_ = [(f, ctypes.c_int32) for f in ("bsize", "blocks", "dtype", "out_dtype", "gated")]
    _fields_ += [(f, ctypes.c_void_p) for f in ("dw", "w", "gate", "dw_out", "dgate")]


@pytest.fixture(scope="module")
def library():
    path = os.environ.get("BLOCKSPARSE_KERNELS")
    if path:
        handle = ctypes.CDLL(os.path.abspath(path))
    else:
        from blocksparse import _library

        handle = ctypes.CDLL(_library.handle._name)  # an object of its own, since argument types are declared on it
    handle.bs_last_error.restype = ctypes.c_char_p
    handle.bs_matmul_choice.restype = ctypes.c_char_p
    handle.bs_matmul_choice.argtypes = [ctypes.c_void_p, ctypes.POINTER(MatmulArgs)]
    handle.bs_matmul_create.restype = ctypes.c_void_p
    handle.bs_matmul_create.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    handle.bs_matmul_destroy.argtypes = [ctypes.c_void_p]
    handle.bs_matmul_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(MatmulArgs), ctypes.c_void_p]
    handle.bs_gate_grad_run.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(GateGradArgs), ctypes.c_void_p]
    return handle


class Matmul:
    """One layout's products on the CPU; outputs are poisoned with NaN before each run."""

    def __init__(self, library, layout, bsize, axis, threads=2):
        self.library, self.bsize, self.axis = library, bsize, axis
        self.table = BlockLayout(layout)
        words = self.table.table
        self.handle = library.bs_matmul_create(b"cpu", threads, words.ctypes.data, words.size)
        assert self.handle, library.bs_last_error()

    def __del__(self):
        self.library.bs_matmul_destroy(self.handle)

    def features(self, output):
        return (self.table.KB if output else self.table.CB) * self.bsize

    def run(self, product, a, b, gate=None, addend=None, out_dtype=None):
        a, b = (x if isinstance(x, list) else [x] for x in (a, b))
        batch = [x.shape[1 - self.axis] for x in a]
        if product == WEIGHT_GRAD:
            shape = (self.table.blocks, self.bsize, self.bsize)
        else:
            features = self.features(product == FORWARD)
            shape = (batch[0], features) if self.axis == 1 else (features, batch[0])
        out = np.full(shape, np.nan, out_dtype or a[0].dtype)
        pointers = lambda arrays: (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))  # noqa: E731
        n, pa, pb = (ctypes.c_int64 * len(a))(*batch), pointers(a), pointers(b)
        address = lambda x: None if x is None else x.ctypes.data  # noqa: E731
        args = MatmulArgs(
            *(product, self.axis, self.bsize, DTYPES.index(a[0].dtype), DTYPES.index(out.dtype), 0, len(a)),
            *map(ctypes.addressof, (n, pa, pb)),
            *map(address, (gate, addend, out)),
        )
        assert self.library.bs_matmul_run(self.handle, args, None) == 0, self.library.bs_last_error()
        return out


def check(rng, library, layout, bsize, axis, dtype, n, gated, threads=2):
    """All three products of one combination against the float64 reference."""
    matmul = Matmul(library, layout, bsize, axis, threads)
    shape = lambda output: (n, matmul.features(output)) if axis == 1 else (matmul.features(output), n)  # noqa: E731
    x, dy = random_values(rng, shape(False), dtype), random_values(rng, shape(True), dtype)
    w = random_values(rng, (matmul.table.blocks, bsize, bsize), dtype)
    gate = None
    if gated:
        gate = rng.standard_normal(matmul.table.blocks).astype(np.float32) * (rng.random(matmul.table.blocks) < 0.7)
        w[gate == 0] = np.nan  # must not be read
    magnitude = [np.abs(v.astype(np.float64)) for v in (x, dy, w)]
    size = None if gate is None else np.abs(gate)
    for product, a, function, operands, absolute, longest in (
        (FORWARD, x, reference.matmul, (x, w), (magnitude[0], magnitude[2]), layout.sum(0).max()),
        (INPUT_GRAD, dy, reference.matmul_dx, (dy, w), (magnitude[1], magnitude[2]), layout.sum(1).max()),
    ):
        expected = function(*operands, layout, bsize, axis, gate)
        assert_product_close(
            matmul.run(product, a, w, gate), expected, function(*absolute, layout, bsize, axis, size), longest * bsize
        )
    expected = reference.matmul_dw([x], [dy], layout, bsize, axis, gate, dw_gated=True)
    bound = reference.matmul_dw(magnitude[:1], magnitude[1:2], layout, bsize, axis, gate, dw_gated=True)
    for out_dtype in {dtype, np.dtype(np.float32)}:
        assert_product_close(matmul.run(WEIGHT_GRAD, x, dy, gate, out_dtype=out_dtype), expected, bound, max(n, 1))


@pytest.mark.parametrize("bsize", BSIZES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(rng, library, dtype, axis, bsize):
    for n in (0, 1, 2, 7, 8, 16, 24, 61, 129):
        layout = random_layout(rng, int(rng.integers(1, 6)), int(rng.integers(1, 6)), rng.choice([0.2, 0.6, 1.0]))
        check(rng, library, layout, bsize, axis, dtype, n, gated=bool(rng.integers(2)), threads=int(rng.integers(1, 4)))


@pytest.mark.parametrize("bsize", [8, 32])
@pytest.mark.parametrize("axis", [0, 1])
def test_hubs_and_long_batches(rng, library, axis, bsize):
    """One full row and column, empty ones beside them, more batch than a pass of the weight gradient takes."""
    layout = np.zeros((21, 17), bool)
    layout[3], layout[:, 5] = True, True
    layout[7], layout[:, 11] = False, False
    check(rng, library, layout, bsize, axis, np.dtype(np.float32), 600, gated=False)
    check(rng, library, layout, bsize, axis, np.dtype(np.float16), 33, gated=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_pairs_and_addend(rng, library, axis, dtype):
    layout = random_layout(rng, 5, 4, 0.5)
    matmul = Matmul(library, layout, 16, axis)
    batches = [3, 0, 700, 1, 64]
    shape = lambda n, output: (n, matmul.features(output)) if axis == 1 else (matmul.features(output), n)  # noqa: E731
    xs, dys = ([random_values(rng, shape(n, output), dtype) for n in batches] for output in (False, True))
    addend = random_values(rng, (matmul.table.blocks, 16, 16), np.float32)
    wide = lambda arrays: [np.abs(v.astype(np.float64)) for v in arrays]  # noqa: E731
    expected = reference.matmul_dw(xs, dys, layout, 16, axis) + addend
    bound = reference.matmul_dw(wide(xs), wide(dys), layout, 16, axis) + np.abs(addend)
    assert_product_close(matmul.run(WEIGHT_GRAD, xs, dys, addend=addend), expected, bound, sum(batches))


def test_threads_do_not_change_the_bits(rng, library):
    layout = random_layout(rng, 30, 30, 0.3)
    layout[4] = layout[:, 9] = True
    for n in (1, 50, 600):
        x, dy = random_values(rng, (n, 960), np.float32), random_values(rng, (n, 960), np.float32)
        results = []
        for threads in (1, 2, 5):
            matmul = Matmul(library, layout, 32, 1, threads)
            w = np.random.default_rng(1).standard_normal((matmul.table.blocks, 32, 32)).astype(np.float32)
            results.append((matmul.run(FORWARD, x, w), matmul.run(INPUT_GRAD, dy, w), matmul.run(WEIGHT_GRAD, x, dy)))
        for other in results[1:]:
            for a, b in zip(results[0], other):
                assert not np.isnan(a).any() and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 20])
def test_special_values(library, dtype, n):
    """NaN and infinity reach what they touch and nothing else; subnormals count."""
    layout = np.eye(3, dtype=bool)
    matmul = Matmul(library, layout, 8, 1)
    w = np.tile(np.eye(8), (3, 1, 1)).astype(dtype)
    x = np.ones((n, 24), dtype)
    x[0, 0], x[0, 8] = np.nan, np.inf
    tiny = np.array(np.ldexp(3.0, -24 if dtype == np.float16 else -130), dtype)
    x[0, 16] = tiny
    y = matmul.run(FORWARD, x, w)
    assert np.isnan(y[0, :8].astype(np.float32)).all()  # 0 times NaN is NaN
    assert np.isposinf(y[0, 8].astype(np.float32)) and np.isnan(y[0, 9:16].astype(np.float32)).all()
    assert y[0, 16] == tiny and (y[0, 17:] == 1).all() and (y[1:] == 1).all()
    dy = np.ones((n, 24), dtype)
    dw = matmul.run(WEIGHT_GRAD, x, dy)
    assert np.isnan(dw[0, 0].astype(np.float32)).all() and (dw[0, 1:] == n).all()
    assert (dw[1, 0] == np.inf).all() and (dw[2, 1:] == n).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bsize", [8, 32, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_gate_grad(rng, library, bsize, dtype, gated):
    blocks = 7
    dw, w = random_values(rng, (blocks, bsize, bsize), np.float32), random_values(rng, (blocks, bsize, bsize), dtype)
    gate = rng.standard_normal(blocks).astype(np.float32)
    gate[2] = 0
    dw_out, dgate = np.full(dw.shape, np.nan, dtype), np.full(blocks, np.nan, np.float32)
    args = GateGradArgs(
        *(bsize, blocks, DTYPES.index(w.dtype), DTYPES.index(dw_out.dtype), gated),
        *(v.ctypes.data for v in (dw, w, gate, dw_out, dgate)),
    )
    assert library.bs_gate_grad_run(b"cpu", 2, args, None) == 0, library.bs_last_error()
    product = dw.astype(np.float64) * gate[:, None, None]
    assert (dw_out == round_to(product.astype(np.float32), dtype)).all()
    terms = dw.astype(np.float64) * w.astype(np.float64)
    if gated:
        terms[2] = 0
    assert_product_close(dgate, terms.sum((1, 2)), np.abs(terms).sum((1, 2)), bsize * bsize)


def test_errors(library):
    table = BlockLayout(np.eye(2)).table.copy()
    table[0] = 99
    assert not library.bs_matmul_create(b"cpu", 1, table.ctypes.data, table.size)
    assert b"version" in library.bs_last_error()
    assert not library.bs_matmul_create(b"tpu", 1, table.ctypes.data, table.size)
    assert b"tpu" in library.bs_last_error()
    matmul = Matmul(library, np.eye(2), 8, 1)
    args = MatmulArgs(0, 2, 8, 0, 0, 0, 1)
    n, a = ctypes.c_int64(1), ctypes.c_void_p(0)
    args.n, args.a, args.b = ctypes.addressof(n), ctypes.addressof(a), ctypes.addressof(a)
    assert library.bs_matmul_run(matmul.handle, args, None) != 0
    assert b"axis" in library.bs_last_error()


@pytest.mark.skipif("BLOCKSPARSE_CPU_ISA" in os.environ, reason="this is the process the test below starts")
@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_instruction_sets(library, isa):
    """The other instruction sets that this CPU has: these tests again, in a process of their own."""
    matmul = Matmul(library, np.eye(1), 8, 1)
    one = np.ones((1, 8), np.float32)
    n, a = ctypes.c_int64(1), ctypes.c_void_p(one.ctypes.data)
    args = MatmulArgs(0, 1, 8, 0, 0, 0, 1, *map(ctypes.addressof, (n, a, a)))
    if library.bs_matmul_choice(matmul.handle, args).startswith(isa.encode()):
        pytest.skip("the tests above ran it")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    command += ["-k", "pairs or special or (products and float16) or (products and 32-)"]
    run = subprocess.run(command, env={**os.environ, "BLOCKSPARSE_CPU_ISA": isa}, capture_output=True, text=True)
    if "this CPU allows" in run.stdout:
        pytest.skip(f"this CPU has no {isa}")
    assert run.returncode == 0, run.stdout[-4000:]
