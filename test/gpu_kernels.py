"""The CUDA kernels through their C interface against float64 on the same GPU: no TensorFlow, PyTorch alone.

    make kernels && python test/gpu_kernels.py [--path sm80] [--cases 4] [--seconds 120] [--json out.json]

Each case is one combination of product, feature axis, block size, dtype, gate, batch size, layout and alignment, on
fresh random operands that lie between guards of NaN; outputs are NaN before each run; every run is repeated and must
give the same bits. How close a result has to be is said at `tolerance`.
"""

import argparse
import ctypes
import importlib.util
import itertools
import json
import os
import pathlib
import random
import sys
import time
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
IDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
PRODUCTS = ("forward", "input gradient", "weight gradient")
FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(3)
BSIZES = (8, 16, 32, 64, 128)
GUARD = 256  # elements on either side of an operand


def _layout_module():
    """blocksparse/layout.py by itself: importing the package would need TensorFlow."""
    spec = importlib.util.spec_from_file_location("layout", ROOT / "blocksparse" / "layout.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BlockLayout = _layout_module().BlockLayout


class MatmulArgs(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("product", "axis", "bsize", "dtype", "out_dtype", "tf32", "pairs")),
        *((name, c_void_p) for name in ("n", "a", "b", "gate", "addend", "out")),
    ]


class GateGradArgs(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("bsize", "blocks", "dtype", "out_dtype", "gated")),
        *((name, c_void_p) for name in ("dw", "w", "gate", "dw_out", "dgate")),
    ]


def load(path):
    lib = ctypes.CDLL(os.path.abspath(path))
    lib.bs_last_error.restype = c_char_p
    lib.bs_matmul_create.restype = c_void_p
    lib.bs_matmul_create.argtypes = [c_char_p, ctypes.c_int, c_void_p, c_int64]
    lib.bs_matmul_destroy.argtypes = [c_void_p]
    lib.bs_matmul_run.argtypes = [c_void_p, POINTER(MatmulArgs), c_void_p]
    lib.bs_matmul_choice.restype = c_char_p
    lib.bs_matmul_choice.argtypes = [c_void_p, POINTER(MatmulArgs)]
    lib.bs_gate_grad_run.argtypes = [c_char_p, ctypes.c_int, POINTER(GateGradArgs), c_void_p]
    return lib


class Matmul:
    """A layout's products on the current GPU."""

    def __init__(self, lib, layout, bsize, axis):
        self.lib, self.bsize, self.axis = lib, bsize, axis
        self.layout = BlockLayout(layout)
        words = np.ascontiguousarray(self.layout.table)
        self.handle = lib.bs_matmul_create(b"gpu", 0, words.ctypes.data, words.size)
        if not self.handle:
            raise RuntimeError(lib.bs_last_error().decode())
        self.C, self.K = self.layout.CB * bsize, self.layout.KB * bsize

    def close(self):
        self.lib.bs_matmul_destroy(self.handle)

    def args(self, product, a, b, out, gate=None, addend=None, tf32=False):
        """The C struct; a and b are lists of tensors (of one, but for weight gradients)."""
        n = [x.shape[1 - self.axis] for x in a]
        arrays = (c_int64 * len(n))(*n), *((c_void_p * len(v))(*(x.data_ptr() for x in v)) for v in (a, b))
        pointer = lambda x: None if x is None else x.data_ptr()  # noqa: E731
        args = MatmulArgs(
            *(product, self.axis, self.bsize, IDS[a[0].dtype], IDS[out.dtype], tf32, len(n)),
            *(ctypes.cast(v, c_void_p) for v in arrays),
            *map(pointer, (gate, addend, out)),
        )
        args.keep = arrays
        return args

    def run(self, args):
        if self.lib.bs_matmul_run(self.handle, args, torch.cuda.current_stream().cuda_stream):
            raise RuntimeError(self.lib.bs_last_error().decode())

    def choice(self, args):
        return self.lib.bs_matmul_choice(self.handle, args).decode()


class Operands:
    """Tensors between guards of NaN, `shift` elements off the alignment of an allocation."""

    def __init__(self, shift=0):
        self.shift, self.guards, self.inputs = shift, [], []

    def make(self, shape, dtype, values=None):
        count = int(np.prod(shape))
        whole = torch.full((count + 2 * GUARD,), float("nan"), dtype=dtype, device="cuda")
        first = GUARD + self.shift
        self.guards.append((whole, first, count))
        tensor = whole[first : first + count].view(shape)
        if values is not None:
            tensor.copy_(values)
            self.inputs.append((tensor, tensor.clone()))
        return tensor

    def check(self):
        for whole, first, count in self.guards:
            assert whole[:first].isnan().all() and whole[first + count :].isnan().all(), "written outside an output"
        for tensor, before in self.inputs:
            same = (tensor == before) | (tensor.isnan() & before.isnan())
            assert same.all(), "an input was changed"


def dense(layout, w, bsize, gate=None):
    """W as float64 [C, K]; blocks whose gate is 0 are not read."""
    out = torch.zeros(layout.CB, bsize, layout.KB, bsize, dtype=torch.float64, device="cuda")
    c, k = torch.from_numpy(np.array(layout.update)).long().cuda().T
    w = w.double()
    if gate is not None:
        w = torch.where((gate != 0)[:, None, None], w * gate.double()[:, None, None], torch.zeros_like(w))
    out[c, :, k, :] = w
    return out.view(layout.CB * bsize, layout.KB * bsize)


def blocks_of(full, layout, bsize):
    """The present blocks of a [C, K] matrix."""
    c, k = torch.from_numpy(np.array(layout.update)).long().cuda().T
    return full.view(layout.CB, bsize, layout.KB, bsize)[c, :, k, :]


def spacing(x, dtype):
    """Distance of neighbours of dtype at |x|."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps), exponent - 1)


def tolerance(expected, magnitude, terms, dtype, tf32):
    """Half a spacing of the result's dtype for its one rounding; max(4, sqrt(n)) 2^-24 of the sum of absolute values
    for a sum of n terms in float32; with TF32 2^-11 for each of two factors."""
    loss = max(4.0, terms**0.5) * 2.0**-24 + (2.0**-10 if tf32 else 0)
    return spacing(expected, dtype) / 2 + loss * magnitude


def compare(actual, expected, magnitude, terms, tf32):
    assert not actual.isnan().any(), f"{int(actual.isnan().sum())} NaN among {actual.numel()}"
    off = (actual.double() - expected).abs() - tolerance(expected, magnitude, terms, actual.dtype, tf32)
    if not (off <= 0).all():
        where = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
        raise AssertionError(
            f"{int((off > 0).sum())} of {off.numel()} wrong; at {where} {actual[where].item()!r}, "
            f"expected {expected[where].item()!r}"
        )
    if actual.numel() == 0:
        return 0.0
    norm = max(float(expected.norm()), float(magnitude.norm()) / max(terms, 1) ** 0.5)
    error = float((actual.double() - expected).norm()) / (norm or 1.0)
    if actual.dtype == torch.float32:
        allowed = 1e-3 if tf32 else 1e-6 * max(1.0, (terms / 1024) ** 0.5)
        assert error <= allowed, f"relative error {error:.3g}, allowed {allowed:.3g}"
    return error


def random_layout(rng, bsize):
    kind = rng.choice(["random", "one block", "full", "sparse", "hub"])
    most = max(2, 768 // bsize)
    CB, KB = rng.randint(1, most), rng.randint(1, most)
    generator = np.random.default_rng(rng.getrandbits(32))
    layout = generator.random((CB, KB)) < {"random": 0.4, "one block": 0, "full": 1, "sparse": 0.05, "hub": 0.1}[kind]
    if kind == "hub":
        layout[generator.integers(CB)] = layout[:, generator.integers(KB)] = True
        layout[generator.integers(CB)] = layout[:, generator.integers(KB)] = False
    layout[generator.integers(CB), generator.integers(KB)] = True
    return layout


def check_case(lib, rng, product, axis, bsize, precision, gated, n=None, layout=None, repeats=3):
    """One case; returns (description, error)."""
    dtype, tf32 = (torch.float32, True) if precision == "tf32" else (DTYPES[precision], False)
    shift = rng.choice([0, 0, 0, 1, 2, 4])
    if layout is None:
        layout = random_layout(rng, bsize)
    matmul = Matmul(lib, layout, bsize, axis)
    shape = lambda n, features: (n, features) if axis == 1 else (features, n)  # noqa: E731
    draw_n = lambda: rng.choice([0, 1, 2, 7, 8, 31, 64, 127, 128, 129, 200, 257, 512, rng.randint(1, 700)])  # noqa: E731
    operands = Operands(shift)
    fresh = lambda *s: torch.randn(*s, device="cuda")  # noqa: E731
    blocks = matmul.layout.blocks
    gate = None
    if gated:
        gate = fresh(blocks) * (torch.rand(blocks, device="cuda") < 0.7)
        gate = Operands().make((blocks,), torch.float32, gate)
    size = None if gate is None else gate.abs()
    if product != WEIGHT_GRAD:
        n = draw_n() if n is None else n
        values = fresh(blocks, bsize, bsize)
        if gated:
            values[gate == 0] = float("nan")  # must not be read
        w = operands.make((blocks, bsize, bsize), dtype, values)
        features, outputs = (matmul.C, matmul.K) if product == FORWARD else (matmul.K, matmul.C)
        x = operands.make(shape(n, features), dtype, fresh(*shape(n, features)))
        out = operands.make(shape(n, outputs), dtype)
        args = matmul.args(product, [x], [w], out, gate, tf32=tf32)
        full, bound = dense(matmul.layout, w, bsize, gate), dense(matmul.layout, w.abs(), bsize, size)
        if product == INPUT_GRAD:
            full, bound = full.T, bound.T
        rows, wide = (x, lambda v: v) if axis == 1 else (x.T, lambda v: v.T)
        expected, magnitude = wide(rows.double() @ full), wide(rows.double().abs() @ bound)
        terms = int(matmul.layout.layout.sum(0 if product == FORWARD else 1).max()) * bsize
        label = f"n {n}"
    else:
        pairs = rng.choice([1, 1, 2, 5, 40]) if n is None else 1
        batches = [draw_n() if pairs < 40 else rng.randint(0, 3) for _ in range(pairs)] if n is None else [n]
        xs = [operands.make(shape(m, matmul.C), dtype, fresh(*shape(m, matmul.C))) for m in batches]
        dys = [operands.make(shape(m, matmul.K), dtype, fresh(*shape(m, matmul.K))) for m in batches]
        addend = Operands().make((blocks, bsize, bsize), torch.float32, fresh(blocks, bsize, bsize))
        addend = rng.choice([None, addend])
        out = operands.make((blocks, bsize, bsize), rng.choice([dtype, torch.float32]))
        args = matmul.args(WEIGHT_GRAD, xs, dys, out, gate, addend, tf32)
        left = lambda v: v.double().T if axis == 1 else v.double()  # noqa: E731
        expected = sum(left(x) @ left(dy).T for x, dy in zip(xs, dys))
        magnitude = sum(left(x).abs() @ left(dy).abs().T for x, dy in zip(xs, dys))
        expected, magnitude = (blocks_of(v, matmul.layout, bsize) for v in (expected, magnitude))
        if gated:
            expected, magnitude = (torch.where((gate != 0)[:, None, None], v, 0.0) for v in (expected, magnitude))
        if addend is not None:
            expected, magnitude = expected + addend.double(), magnitude + addend.double().abs()
        terms = sum(batches) + 1
        label = f"n {batches if pairs < 40 else '40 pairs'}, to {str(out.dtype)[6:]}"
    name = (
        f"{PRODUCTS[product]}, axis {axis}, blocks {bsize}, {precision}{', gates' * gated}, {label}, "
        f"layout {layout.shape} with {blocks}, shift {shift}: {matmul.choice(args)}"
    )
    try:
        results = []
        for _ in range(repeats):
            out.fill_(float("nan"))
            matmul.run(args)
            results.append(out.clone())
        torch.cuda.synchronize()
        operands.check()
        error = compare(results[0], expected, magnitude, terms, tf32)
        bits = [r.view(torch.int16 if r.element_size() == 2 else torch.int32) for r in results]
        assert all(torch.equal(bits[0], other) for other in bits[1:]), "the bits differ from run to run"
    except AssertionError as failure:
        raise AssertionError(f"{name}: {failure}") from None
    finally:
        matmul.close()
    return name, error


def check_special_values(lib):
    """NaN and infinity reach what they touch and nothing else; subnormals count."""
    for (precision, dtype), axis, bsize in itertools.product(DTYPES.items(), (0, 1), (8, 32)):
        matmul = Matmul(lib, np.eye(3), bsize, axis)
        x = torch.ones(5, 3 * bsize, dtype=dtype, device="cuda")
        x[0, 0], x[0, bsize] = float("nan"), float("inf")
        tiny = 3 * 2.0 ** (-24 if precision == "float16" else -130)
        x[0, 2 * bsize] = tiny
        w = torch.eye(bsize, dtype=dtype, device="cuda").repeat(3, 1, 1)
        y = torch.full_like(x, float("nan"))
        rows, result = (x, y) if axis == 1 else (x.T.contiguous(), y.T.contiguous())
        matmul.run(matmul.args(FORWARD, [rows], [w], result))
        y = result if axis == 1 else result.T
        assert y[0, :bsize].isnan().all(), "0 times NaN is NaN"
        assert y[0, bsize] == float("inf") and y[0, bsize + 1 : 2 * bsize].isnan().all(), "infinity"
        assert y[0, 2 * bsize] == x[0, 2 * bsize] != 0, f"{precision} subnormal {y[0, 2 * bsize]}"
        assert (y[0, 2 * bsize + 1 :] == 1).all() and (y[1:] == 1).all()
        matmul.close()


def check_long_columns(lib, rng):
    """Columns and rows longer than one thread block takes, and worth cutting with so small a batch."""
    for bsize, axis, gated in itertools.product(BSIZES, (0, 1), (False, True)):
        for product, turned in ((FORWARD, False), (INPUT_GRAD, True)):
            layout = np.random.default_rng(rng.getrandbits(32)).random((max(12288 // bsize, 160), 2)) < 0.9
            layout[:, 0] = True
            precision = rng.choice(list(DTYPES))
            layout = layout.T if turned else layout
            check_case(lib, rng, product, axis, bsize, precision, gated, n=rng.choice([1, 30, 131]), layout=layout)


def check_gate_grad(lib, rng):
    for (_, dtype), (_, out_dtype), bsize in itertools.product(DTYPES.items(), DTYPES.items(), BSIZES):
        blocks, gated = 7, rng.random() < 0.5
        operands = Operands()
        dw = operands.make((blocks, bsize, bsize), torch.float32, torch.randn(blocks, bsize, bsize, device="cuda"))
        w = operands.make(dw.shape, dtype, torch.randn(blocks, bsize, bsize, device="cuda"))
        gate = torch.randn(blocks, device="cuda")
        gate[2] = 0
        gate = operands.make((blocks,), torch.float32, gate)
        out, dgate = operands.make(dw.shape, out_dtype), operands.make((blocks,), torch.float32)
        args = GateGradArgs(
            bsize, blocks, IDS[dtype], IDS[out_dtype], gated, *(v.data_ptr() for v in (dw, w, gate, out, dgate))
        )
        if lib.bs_gate_grad_run(b"gpu", 0, args, torch.cuda.current_stream().cuda_stream):
            raise RuntimeError(lib.bs_last_error().decode())
        torch.cuda.synchronize()
        operands.check()
        assert torch.equal(out, (gate[:, None, None] * dw).to(out_dtype))
        terms = dw.double() * w.double()
        if gated:
            terms[2] = 0
        compare(dgate, terms.sum((1, 2)), terms.abs().sum((1, 2)), bsize * bsize, False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=str(ROOT / "build" / "libblocksparse_kernels.so"))
    parser.add_argument("--path", choices=["sm80", "native"], default="native", help="which kernels, on a Hopper GPU")
    parser.add_argument("--cases", type=int, default=1, help="random cases for every combination")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this time")
    parser.add_argument("--blocks", help="only these block sizes, with commas")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--small", action="store_true", help="tiny problems, no repeats: for compute-sanitizer")
    parser.add_argument("--stop", type=int, default=10, help="failures to print")
    parser.add_argument("--json", help="write a summary here")
    options = parser.parse_args()
    if options.path == "sm80":
        os.environ["BLOCKSPARSE_CUDA_PATH"] = "sm80"
    lib, rng, start = load(options.library), random.Random(options.seed), time.time()
    torch.manual_seed(options.seed)
    bsizes = BSIZES if options.blocks is None else [int(b) for b in options.blocks.split(",")]
    combinations = list(itertools.product(range(3), (0, 1), bsizes, (*DTYPES, "tf32"), (False, True))) * options.cases
    rng.shuffle(combinations)
    failures, passed, worst = [], 0, {}
    checks = [
        ("special values", lambda: check_special_values(lib)),
        ("gate gradient", lambda: check_gate_grad(lib, rng)),
        ("long columns", lambda: check_long_columns(lib, rng)),
    ]
    for name, check in [] if options.small else checks:
        try:
            check()
            passed += 1
        except Exception as error:
            failures.append(f"{name}: {error!r}")
    for product, axis, bsize, precision, gated in combinations:
        if time.time() - start > options.seconds:
            break
        small = {
            "n": rng.choice([1, 33, 130]),
            "layout": np.random.default_rng(rng.getrandbits(32)).random((3, 3)) < 0.7,
        }
        if options.small:
            small["layout"][0, 0] = True
        try:
            extra = small | {"repeats": 1} if options.small else {}
            name, error = check_case(lib, rng, product, axis, bsize, precision, gated, **extra)
            passed += 1
            key = f"{PRODUCTS[product]} {precision}"
            worst[key] = max(worst.get(key, 0.0), error)
        except Exception as error:  # whatever it is, the other cases are still worth running
            failures.append(f"{PRODUCTS[product]}, axis {axis}, {bsize}, {precision}, gates {gated}: {error!r}")
            if "CUDA" in str(error) or "cuda" in str(error):
                break
    summary = {
        "what": "CUDA kernels through the C interface against float64",
        "path": options.path,
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("BLOCKSPARSE_COMMIT", ""),
        "seed": options.seed,
        "seconds": round(time.time() - start, 1),
        "passed": passed,
        "failed": len(failures),
        "skipped_for_time": len(combinations) + (0 if options.small else len(checks)) - passed - len(failures),
        "worst_relative_error": {key: float(f"{value:.3g}") for key, value in sorted(worst.items())},
        "failures": failures[:50],
    }
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(summary, indent=1) + "\n")
    for failure in failures[: options.stop]:
        print("FAIL", failure)
    print({key: value for key, value in summary.items() if key != "failures"})
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
