"""The LSTM gates and the embedding on a GPU by way of PyTorch, without TensorFlow: right for every dtype, odd size and
unaligned operand, and with the same bits twice.

  python3 test/gpu_lstm_embed.py [library] [small]

`small` is a short set for compute-sanitizer.
"""

import ctypes
import functools
import importlib.util
import pathlib
import sys
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a unit


def of(kind, names):
    return [(name, kind) for name in names.split()]


class Lstm(ctypes.Structure):
    _fields_ = [
        *of(c_int32, "gradient dtype"),
        *of(c_int64, "rows width stride"),
        ("forget_bias", c_float),
        *of(c_void_p, "bias c"),
        ("gate", c_void_p * 4),
        *of(c_void_p, "c_next h_next dc_next dh_next dc"),
        ("dgate", c_void_p * 4),
        *of(c_void_p, "dbias workspace"),
    ]


class Embed(ctypes.Structure):
    _fields_ = [
        *of(c_int32, "gradient dtype index_bytes index_signed"),
        *of(c_int64, "count rows width"),
        *of(c_void_p, "index x y workspace"),
    ]


class Kernels:
    """The library's functions on torch tensors of one GPU, on torch's current stream. Every call gives a function that
    launches, with no work on the host beside it."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.bs_last_error.restype = c_char_p
        for name in ("lstm", "embed"):
            getattr(self.lib, f"bs_{name}_workspace").restype = c_int64

    def _launch(self, name, args, *keep):
        size = getattr(self.lib, f"bs_{name}_workspace")(b"gpu", ctypes.byref(args))
        assert size >= 0, self.lib.bs_last_error()
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        args.workspace = workspace.data_ptr()
        function = getattr(self.lib, f"bs_{name}_run")

        def launch(_keep=(args, workspace, keep)):
            stream = c_void_p(torch.cuda.current_stream().cuda_stream)
            code = function(b"gpu", 1, ctypes.byref(args), stream)
            assert code == 0, self.lib.bs_last_error()

        return launch

    def gates(self, c, h, outputs, bias=None, upstream=(), dbias=None):
        """h: one tensor [rows, 4 width] or four; outputs: (c_next, h_next), or (dc, dh) with upstream gradients."""
        args = Lstm(gradient=bool(upstream), dtype=DTYPES[c.dtype], forget_bias=1.0)
        args.c = c.data_ptr()
        merged = not isinstance(h, (list, tuple))
        args.rows, args.width = c.shape if merged else (1, c.numel())
        args.stride = args.width * (4 if merged else 1)
        step = args.width * c.element_size()

        def four(x):
            return [x.data_ptr() + g * step for g in range(4)] if merged else [t.data_ptr() for t in x]

        args.gate[:] = four(h)
        if upstream:
            args.dc_next, args.dh_next = (None if t is None else t.data_ptr() for t in upstream)
            args.dc = outputs[0].data_ptr()
            args.dgate[:] = four(outputs[1])
        else:
            args.c_next, args.h_next = (t.data_ptr() for t in outputs)
        args.bias = None if bias is None else bias.data_ptr()
        args.dbias = None if dbias is None else dbias.data_ptr()
        return self._launch("lstm", args, c, h, outputs, bias, upstream, dbias)

    def embed(self, index, x, y, rows, gradient=False):
        args = Embed(gradient, DTYPES[x.dtype], index.element_size(), index.dtype.is_signed)
        args.count, args.rows, args.width = index.numel(), rows, x.shape[-1]
        args.index, args.x, args.y = index.data_ptr(), x.data_ptr(), y.data_ptr()
        return self._launch("embed", args, index, x, y)


def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "blocksparse" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wide(x):
    return x.double().cpu().numpy()


def close(label, actual, expected, magnitude, units=32):
    eps = EPSILON[actual.dtype]
    tiny = 2.0**-25 if actual.dtype == torch.float16 else 2.0**-134
    tolerance = np.abs(expected) * eps * 1.01 + units * 2.0**-24 * magnitude + tiny
    error = np.abs(wide(actual) - expected)
    assert np.all(error <= tolerance), f"{label}: {np.nanmax(error / tolerance)} of the tolerance"


def unaligned(shape, dtype, shift):
    n = int(np.prod(shape))
    return torch.full([n + shift], float("nan"), device="cuda", dtype=dtype)[shift:].view(shape)


GATES = (1, 1), (5, 7), (3, 8), (33, 100), (64, 256), (1000, 96), (700, 1028), (2, 12), (300, 66), (32, 4096)
SMALL_GATES = (5, 7), (3, 8), (260, 256)
EMBED = [
    (1, 1, 1), (63, 10, 8), (64, 9, 100), (65, 300, 33), (4097, 50, 64), (20000, 3000, 40), (5000, 2, 2056),
    (26000, 50000, 264),
]  # fmt: skip
SMALL_EMBED = (65, 300, 33), (4097, 50, 64)


def check_gates(k, ref, rng, shapes):
    count = 0
    for dtype in DTYPES:
        for rows, width in shapes:
            for shift in (0, 1, 4) if rows * width < 20000 else (0,):
                for merged in (True, False):
                    c, i, u, f, o, dc, dh = (
                        torch.tensor(np.clip(rng.standard_normal((rows, width)) * s, -12, 12), device="cuda").to(dtype)
                        for s in (1, 3, 3, 3, 3, 1, 1)
                    )
                    new = lambda shape, dtype=dtype, shift=shift: unaligned(shape, dtype, shift)  # noqa: E731
                    bias = torch.randn(4 * width, device="cuda") if merged else None
                    h = torch.cat([i, u, f, o], 1) if merged else [i, u, f, o]
                    b = np.zeros((4, width)) if bias is None else wide(bias).reshape(4, width)
                    args = [wide(g) + b[n] for n, g in enumerate((i, u, f, o))]
                    label = f"gates {dtype} {rows}x{width} shift {shift} merged {merged}"
                    y = new((rows, width)), new((rows, width))
                    k.gates(c, h, y, bias)()
                    size = 1 + np.abs(wide(c))
                    for name, a, e in zip(("c_next", "h_next"), y, ref.lstm_gates(wide(c), *args)):
                        close(f"{label} {name}", a, e, size)
                    for up in ((dc, dh), (None, dh), (dc, None)):
                        zero = torch.zeros_like(dc)
                        full = [wide(zero if t is None else t) for t in up]
                        d_c = new((rows, width))
                        d_h = new((rows, 4 * width)) if merged else [new((rows, width)) for _ in range(4)]
                        db = torch.full([4 * width], float("nan"), device="cuda") if merged else None
                        k.gates(c, h, (d_c, d_h), bias, up, db)()
                        expected = ref.lstm_gates_grad(*full, wide(c), *args)
                        upstream = (np.abs(full[0]) + np.abs(full[1])) * size
                        d_gates = d_h.split(width, 1) if merged else d_h
                        for name, a, e in zip("ciufo", (d_c, *d_gates), expected):
                            close(f"{label} d{name}", a, e, upstream)
                        if merged:
                            sums = np.concatenate([e.sum(0) for e in expected[1:]])
                            close(f"{label} dbias", db, sums, np.tile(upstream.sum(0), 4))
                            again = torch.empty_like(db)
                            k.gates(c, h, (d_c, d_h), bias, up, again)()
                            assert torch.equal(db, again), label
                        count += 1
    empty = torch.full([8], float("nan"), device="cuda")
    none = torch.empty((0, 2), device="cuda")
    k.gates(none, torch.empty((0, 8), device="cuda"), (none, none), empty, (none, none), empty)()
    assert torch.equal(empty, torch.zeros_like(empty))
    print(f"gates: {count} cases right")


def indices(rng, kind, count, rows):
    if kind == "equal":
        return np.full(count, rows // 2)
    if kind == "zipf":
        return np.minimum(rng.zipf(1.2, count), rows) - 1
    index = rng.integers(rows, size=count)
    if kind == "outside":
        index = np.where(rng.random(count) < 0.2, rng.choice([-1, rows, -(2**40), 2**40], count), index)
    return index


def check_embed(k, rng, shapes):
    narrow = torch.int32, torch.uint8, torch.int16
    cases = [(*shape, kind, torch.int64) for shape in shapes for kind in ("uniform", "zipf", "equal", "outside")]
    cases += [(63, 90, 8, "uniform", index_dtype) for index_dtype in narrow]
    for dtype in DTYPES:
        for n, rows, width, kind, index_dtype in cases:
            label = f"embedding {dtype} {kind} {n} {rows} {width} {index_dtype}"
            values = indices(rng, kind, n, rows)
            index = torch.tensor(values, device="cuda").to(index_dtype)
            inside = torch.tensor((values >= 0) & (values < rows), device="cuda")
            safe = torch.where(inside, index.long(), 0)
            table = torch.randn(rows, width, device="cuda").to(dtype)
            y = unaligned((n, width), dtype, n % 2)
            k.embed(index, table, y, rows)()
            assert torch.equal(y, torch.where(inside[:, None], table[safe], torch.zeros_like(y))), label
            dy = torch.randn(n, width, device="cuda").to(dtype)
            dw = unaligned((rows, width), dtype, n % 2)
            k.embed(index, dy, dw, rows, gradient=True)()
            expected = torch.zeros(rows, width, device="cuda", dtype=torch.float64)
            magnitude = torch.zeros_like(expected)
            expected.index_add_(0, safe[inside], dy.double()[inside])
            magnitude.index_add_(0, safe[inside], dy.double().abs()[inside])
            close(f"{label} gradient", dw, wide(expected), wide(magnitude), 8)
            again = torch.empty_like(dw)
            k.embed(index, dy, again, rows, gradient=True)()
            assert torch.equal(dw, again), label
    print(f"embedding: {len(cases) * len(DTYPES)} cases right")


def main():
    library = next((a for a in sys.argv[1:] if a.endswith(".so")), ROOT / "build" / "libblocksparse_kernels.so")
    k, rng, small = Kernels(library), np.random.default_rng(), "small" in sys.argv
    failed = False
    for check in (
        functools.partial(check_gates, k, reference(), rng, SMALL_GATES if small else GATES),
        functools.partial(check_embed, k, rng, SMALL_EMBED if small else EMBED),
    ):
        try:
            check()
        except AssertionError as error:
            failed = True
            print(f"WRONG: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
