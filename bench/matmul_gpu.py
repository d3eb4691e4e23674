"""The block-sparse product on a GPU beside its peers: ours through the C interface, cuBLAS on the dense matrix,
PyTorch's block-sparse rows (Triton), cuSPARSE's Blocked-ELL, STK where it is installed. Needs PyTorch, not TensorFlow.

    make kernels && python bench/matmul_gpu.py --cases peers --json bench/results/NAME.json
    python bench/report.py bench/results/NAME.json

TFLOP/s count the products with present blocks alone, whatever a kernel does. Times are medians of single calls,
measured by events, with the L2 cache full of other data before each. Every timed result of ours is first compared with
a product in float32 of the dense matrix.
"""

import argparse
import ctypes
import functools
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import sys
import time

import numpy as np
import torch
from _common import random_layout

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "test"))

from gpu_kernels import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Matmul, blocks_of, dense, load  # noqa: E402

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
PRODUCTS = {"forward": FORWARD, "dx": INPUT_GRAD, "dw": WEIGHT_GRAD}


@functools.lru_cache(32)
def make_layout(kind, blocks, density):
    """random, skewed (a full row and a full column on top), or one of blocksparse/topology.py's."""
    if kind in ("random", "skewed"):
        layout = random_layout(blocks, density)
        if kind == "skewed":
            layout[blocks // 3] = layout[:, blocks // 2] = True
        return layout
    spec = importlib.util.spec_from_file_location("topology", ROOT / "blocksparse" / "topology.py")
    topology = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(topology)
    return {"watts_strogatz": topology.watts_strogatz, "barabasi_albert": topology.barabasi_albert}[kind](
        blocks, seed=0, density=density
    )


class Timer:
    """Medians of single calls, with the L2 cache full of other lines: clean ones, which nobody has to write back.

    Every series begins with the same rest, since a chip that was just busy is held to a lower clock for a while; the
    clock in the middle of the series is kept in `mhz`."""

    def __init__(self, budget_ms=25, rest=0.3):
        self.budget, self.rest = budget_ms, rest
        self.flush = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
        self.mhz = None

    def __call__(self, call):
        torch.cuda.synchronize()
        time.sleep(self.rest)
        for _ in range(3):
            call()
        once = self._sample(call, 3)
        count = int(min(max(self.budget / max(statistics.median(once), 1e-3), 7), 50))
        return statistics.median(self._sample(call, count)) * 1e-3

    def _sample(self, call, count):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            self.flush.sum()
            begin.record()
            call()
            end.record()
        self.mhz = _clock()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]


def _clock():
    """The multiprocessors' clock now, in MHz; None where NVML cannot be asked."""
    try:
        return torch.cuda.clock_rate()
    except Exception:  # PyTorch's import of NVML, or NVML itself
        return None


class BlockedEll:
    """y^T = W^T x^T through cuSPARSE, W^T [K, C] in Blocked-ELL with random values."""

    TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
    _lib = None

    def __init__(self, layout, bsize, n, dtype):
        if BlockedEll._lib is None:
            BlockedEll._lib = ctypes.CDLL("libcusparse.so.12")
            BlockedEll._handle = ctypes.c_void_p()
            self._check(self._lib.cusparseCreate(ctypes.byref(self._handle)))
        CB, KB = layout.shape
        per = int(layout[:, 0].sum())
        assert (layout.sum(0) == per).all(), "Blocked-ELL takes as many blocks in every column"
        C, K = CB * bsize, KB * bsize
        columns = np.stack([np.flatnonzero(column) for column in layout.T]).astype(np.int32)
        self.columns = torch.from_numpy(columns).cuda()
        self.values = torch.randn(K * per * bsize, device="cuda", dtype=dtype)
        self.x, self.y = (torch.randn(features, n, device="cuda", dtype=dtype) for features in (C, K))
        a, b, c = (ctypes.c_void_p() for _ in range(3))
        i64, pointer, kind = ctypes.c_int64, lambda t: ctypes.c_void_p(t.data_ptr()), self.TYPES[dtype]
        create, dense = self._lib.cusparseCreateBlockedEll, self._lib.cusparseCreateDnMat
        index32, row_major = 2, 2
        self._check(
            create(
                ctypes.byref(a), i64(K), i64(C), i64(bsize), i64(per * bsize), pointer(self.columns),
                pointer(self.values), index32, 0, kind,
            )
        )  # fmt: skip
        self._check(dense(ctypes.byref(b), i64(C), i64(n), i64(n), pointer(self.x), kind, row_major))
        self._check(dense(ctypes.byref(c), i64(K), i64(n), i64(n), pointer(self.y), kind, row_major))
        one, zero, size = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_size_t()
        self.args = (self._handle, 0, 0, ctypes.byref(one), a, b, ctypes.byref(zero), c, 0, 0)
        self.keep = one, zero
        self._check(self._lib.cusparseSpMM_bufferSize(*self.args, ctypes.byref(size)))
        self.buffer = torch.empty(max(size.value, 4), dtype=torch.uint8, device="cuda")
        self._check(self._lib.cusparseSetStream(self._handle, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))
        self.buffer_pointer = pointer(self.buffer)

    def __call__(self):
        self._check(self._lib.cusparseSpMM(*self.args, self.buffer_pointer))

    @staticmethod
    def _check(status):
        assert status == 0, f"cuSPARSE status {status}"


def ours(lib, timer, layout, bsize, n, product, precision, axis, gated):
    """(seconds, relative error against float32, choice)"""
    dtype = PRECISIONS[precision]
    matmul = Matmul(lib, layout, bsize, axis)
    try:
        fresh = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)  # noqa: E731
        rows = lambda features: fresh(n, features) if axis == 1 else fresh(features, n)  # noqa: E731
        blocks = matmul.layout.blocks
        gate = torch.rand(blocks, device="cuda") + 0.5 if gated else None
        if product == WEIGHT_GRAD:
            a, b, out = rows(matmul.C), rows(matmul.K), torch.empty(blocks, bsize, bsize, device="cuda", dtype=dtype)
        else:
            a, b = rows(matmul.C if product == FORWARD else matmul.K), fresh(blocks, bsize, bsize)
            out = torch.empty_like(rows(matmul.K if product == FORWARD else matmul.C))
        out.fill_(float("nan"))
        args = matmul.args(product, [a], [b], out, gate, tf32=precision == "tf32")
        matmul.run(args)
        # The check takes as many batch entries (or rows of blocks) as float32 is quick with.
        torch.backends.cuda.matmul.allow_tf32 = False
        left = (lambda v: v) if axis == 1 else (lambda v: v.T)
        if product == WEIGHT_GRAD:
            some = slice(0, min(8, matmul.layout.CB) * bsize)
            full = torch.zeros(matmul.C, matmul.K, device="cuda")
            full[some] = left(a)[:, some].float().T @ left(b).float()
            inside = torch.from_numpy(np.array(matmul.layout.update[:, 0] < some.stop // bsize)).cuda()
            expected, actual = blocks_of(full, matmul.layout, bsize)[inside], out.float()[inside]
        else:
            some = slice(0, min(n, 256))
            full = dense(matmul.layout, b, bsize, gate).float()
            expected = left(a)[some].float() @ (full if product == FORWARD else full.T)
            actual = left(out)[some].float()
            assert not out.isnan().any()
        del full
        error = float((actual - expected).norm() / expected.norm())
        assert error < {"bf16": 4e-3, "fp16": 5e-4, "tf32": 6e-4, "fp32": 3e-6}[precision], error
        return timer(lambda: matmul.run(args)), error, matmul.choice(args)
    finally:
        matmul.close()


@functools.lru_cache(None)
def cublas(timer, C, K, n, product, precision):
    dtype = PRECISIONS[precision]
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    fresh = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)  # noqa: E731
    x, w, dy = fresh(n, C), fresh(C, K), fresh(n, K)
    return timer({FORWARD: lambda: x @ w, INPUT_GRAD: lambda: dy @ w.T, WEIGHT_GRAD: lambda: x.T @ dy}[product])


def pytorch_bsr(timer, layout, bsize, n, precision):
    dtype = PRECISIONS[precision]
    C, K = (blocks * bsize for blocks in layout.shape)
    mask = torch.from_numpy(layout.T.copy()).cuda().repeat_interleave(bsize, 0).repeat_interleave(bsize, 1)
    weight = (torch.randn(K, C, device="cuda", dtype=dtype) * mask).to_sparse_bsr((bsize, bsize))
    del mask
    x = torch.randn(n, C, device="cuda", dtype=dtype)
    return timer(lambda: torch.nn.functional.linear(x, weight))


def stk_dsd(timer, layout, bsize, n, precision):
    """y^T = W^T x^T with STK's dense = sparse x dense, blocks of 128."""
    import stk

    mask = torch.from_numpy(layout.T.copy()).cuda()
    dense_weight = mask.repeat_interleave(bsize, 0).repeat_interleave(bsize, 1).to(PRECISIONS[precision])
    weight = stk.ops.to_sparse(dense_weight, bsize)
    del dense_weight
    x = torch.randn(layout.shape[0] * bsize, n, device="cuda", dtype=PRECISIONS[precision])
    return timer(lambda: stk.ops.dsd(weight, x))


def case(size, density, n, bsize, precision="bf16", product="forward", axis=1, kind="random", peers=(), gated=False):
    return locals()


CASES = ("quick", "axes", "gates", "peers", "bsr", "floors", "breakeven", "constant", "densities")


def cases(name):
    """The lists by name: what each is for."""
    bsizes = (8, 16, 32, 64, 128)
    if name == "quick":  # a look at every product after a change
        for b in bsizes:
            for product in PRODUCTS:
                yield case(12288, 0.1, 4096, b, product=product)
            yield case(12288, 0.1, 64, b)
    elif name == "axes":  # feature axis 0, float32, gates
        for b in bsizes:
            for product in PRODUCTS:
                yield case(12288, 0.1, 4096, b, product=product, axis=0)
            yield case(12288, 0.1, 4096, b, "tf32")
            yield case(12288, 0.1, 4096, b, "fp32")
            yield case(12288, 0.1, 4096, b, "fp16")
            yield case(12288, 0.1, 4096, b, gated=True)
    elif name == "gates":
        for b in bsizes:
            for product in PRODUCTS:
                yield case(12288, 0.1, 4096, b, product=product, gated=True)
            yield case(12288, 0.1, 64, b, gated=True)
    elif name == "peers":  # beside what a user would take instead
        for n in (4096, 64):
            for b in bsizes:
                yield case(12288, 0.1, n, b, peers=("cublas", "bsr", "bell") + ("stk",) * (b == 128))
        for b in bsizes[1:]:
            yield case(4096, 0.25, 4096, b, peers=("cublas", "bsr", "bell") + ("stk",) * (b == 128))
        for b in bsizes[1:]:
            yield case(12288, 0.1, 4096, b, "fp32", peers=("cublas", "bsr"))
            yield case(12288, 0.1, 4096, b, "tf32", peers=("cublas", "bell"))
    elif name == "bsr":  # the peer that the portable kernels are measured by
        for b in bsizes[1:]:
            for n in (4096, 64):
                yield case(12288, 0.1, n, b, peers=("bsr",))
        yield case(12288, 0.1, 4096, 32, "fp32", peers=("bsr",))
    elif name == "floors":  # one line per promise
        for b in bsizes:
            for size, density in ((12288, 0.1), (12288, 0.05), (12288, 0.25), (4096, 0.25), (8192, 1.0)):
                yield case(size, density, 4096, b)
            for product in ("dx", "dw"):
                yield case(12288, 0.1, 4096, b, product=product)
            yield case(12288, 0.1, 4096, b, product="dw", axis=0)
            yield case(12288, 0.1, 4096, b, axis=0)
            yield case(12288, 0.1, 4096, b, "fp16")
            for precision in ("tf32", "fp32"):
                yield case(12288, 0.1, 4096, b, precision)
                yield case(12288, 0.1, 4096, b, precision, axis=0)
                yield case(12288, 0.1, 4096, b, precision, product="dw")
            for n in (64, 1):
                yield case(12288, 0.25, n, b)
            yield case(12288, 0.1, 4096, b, gated=True)
            for kind in ("skewed", "barabasi_albert", "watts_strogatz"):
                yield case(12288, 0.1, 4096, b, kind=kind)
    elif name == "breakeven":  # cuBLAS at the densities up to which sparse has to win, and should
        wins = {8: (0.03, 0.05, 0.1, 0.15), 16: (0.1, 0.18, 0.28), 32: (0.3, 0.4, 0.5), 64: (0.6, 0.72, 0.85)}
        for b, densities in (wins | {128: (0.8, 0.88, 0.97)}).items():
            for density in densities:
                yield case(12288, density, 4096, b, peers=("cublas",))
    elif name == "constant":  # as many weights as a dense layer 1024 wide, over more and more units
        for b in (8, 16, 32):
            for size in (1024, 2048, 4096, 8192, 16384):
                for n in (64, 4096):
                    yield case(size, (1024 / size) ** 2, n, b, kind="watts_strogatz", peers=("cublas",))
    elif name == "densities":  # where sparse meets dense
        for b in bsizes:
            for size in (12288, 4096):
                for density in (0.5, 0.25, 0.1, 0.05, 0.03, 0.01):
                    for n in (64, 4096, 1, 512, 16384):
                        yield case(size, density, n, b, peers=("cublas",))
    else:
        raise ValueError(f"cases must be {', '.join(CASES)}, got {name}")


def run(lib, timer, options, size, density, n, bsize, precision, product, axis, kind, peers, gated):
    layout = make_layout(kind, size // bsize, density)
    flops = 2.0 * n * layout.sum() * bsize * bsize
    row = {
        "C": size, "K": size, "density": round(float(layout.mean()), 4), "layout": kind, "N": n, "block": bsize,
        "dtype": precision, "product": product, "axis": axis, "gated": gated,
    }  # fmt: skip

    def record(name, measure):
        try:
            value = measure()
            seconds, *rest = value if isinstance(value, tuple) else (value,)
            row[f"{name}_us"] = round(seconds * 1e6, 2)
            row[f"{name}_tflops"] = round(flops / seconds / 1e12, 2)
            if rest:
                row["error"], row["choice"], row["mhz"] = float(f"{rest[0]:.3g}"), rest[1], timer.mhz
        except Exception as error:  # a peer that refuses a case is a result
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]

    which = PRODUCTS[product]
    record("ours", lambda: ours(lib, timer, layout, bsize, n, which, precision, axis, gated))
    if options.peers:
        if "cublas" in peers:
            record("cublas", lambda: cublas(timer, size, size, n, which, precision))
        if "bsr" in peers and product == "forward":
            record("bsr", lambda: pytorch_bsr(timer, layout, bsize, n, precision))
        if "bell" in peers and product == "forward":
            record("bell", lambda: timer(BlockedEll(layout, bsize, n, PRECISIONS[precision])))
        if "stk" in peers and product == "forward":
            record("stk", lambda: stk_dsd(timer, layout, bsize, n, precision))
    torch.cuda.empty_cache()
    return row


def describe(row):
    parts = [f"{row['product']:8}{row['dtype']} {row['C']}@{row['density']:<7g}N {row['N']:<6}b {row['block']:<4}"]
    parts.append(f"axis {row['axis']}{' gated' * row['gated']} {row['layout'][:8]}")
    for name in ("ours", "cublas", "bsr", "bell", "stk"):
        if f"{name}_us" in row:
            parts.append(f"{name} {row[f'{name}_us']:.1f} us {row[f'{name}_tflops']:.1f} TF")
        elif f"{name}_error" in row:
            parts.append(f"{name} {row[f'{name}_error'][:60]}")
    return " | ".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=str(ROOT / "build" / "libblocksparse_kernels.so"))
    parser.add_argument(
        "--cases", default="quick", help=f"{', '.join(CASES)}; several with commas, one several times to repeat it"
    )
    parser.add_argument("--path", choices=["sm80", "native"], default="native", help="which kernels, on a Hopper GPU")
    parser.add_argument("--blocks", help="only these block sizes, with commas")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this time")
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    if options.path == "sm80":
        os.environ["BLOCKSPARSE_CUDA_PATH"] = "sm80"
    lib, timer, start = load(options.library), Timer(), time.time()
    rows = []
    wanted = None if options.blocks is None else {int(b) for b in options.blocks.split(",")}
    todo = [c for name in options.cases.split(",") for c in cases(name) if wanted is None or c["bsize"] in wanted]
    for one in todo:
        if time.time() - start > options.seconds:
            print(f"out of time: {len(todo) - len(rows)} cases left")
            break
        rows.append(run(lib, timer, options, **one))
        print(describe(rows[-1]), flush=True)
    if options.json:
        about = {
            "what": f"block-sparse products through the C interface, cases {options.cases}",
            "path": options.path,
            "device": torch.cuda.get_device_name(),
            "driver": _driver(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "commit": os.environ.get("BLOCKSPARSE_COMMIT", ""),
        }
        pathlib.Path(options.json).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def _driver():
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
        return next(word for word in text.split() if word.count(".") >= 1 and word[0].isdigit())
    except (OSError, StopIteration):
        return ""


if __name__ == "__main__":
    main()
