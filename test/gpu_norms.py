"""The normalization kernels by way of PyTorch, without TensorFlow: right for every dtype, shape and unaligned operand,
and with the same bits twice.

  python3 test/gpu_norms.py [library] [small] [cpu] [float32] [float16] [bfloat16]

`small` is a short set for compute-sanitizer; `cpu` takes the host's kernels and needs no PyTorch; dtypes: all, if none
is named.
"""

import ctypes
import pathlib
import sys
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p

import numpy as np
from norms_expected import BatchNorm, LayerNorm

ROOT = pathlib.Path(__file__).resolve().parent.parent
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def struct(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def of(kind, names):
    return [(name, kind) for name in names.split()]


LayerArgs = struct(
    "LayerArgs",
    *of(c_int32, "gradient relu dtype"),
    ("epsilon", c_float),
    *of(c_int64, "outer segments features inner"),
    *of(c_void_p, "x dy gain bias mean residual rstd y dx dgain dbias workspace"),
)
BatchArgs = struct(
    "BatchArgs",
    *of(c_int32, "gradient inference dtype"),
    ("epsilon", c_float),
    *of(c_int64, "outer channels inner"),
    *of(c_void_p, "x dy gain bias mean residual variance y dx dgain dbias workspace"),
)


class Kernels:
    """The library's functions. Every call gives a function that launches, with no work on the host beside it."""

    def __init__(self, path, device=b"gpu"):
        self.lib, self.device, self.threads = ctypes.CDLL(str(path)), device, 2
        self.lib.bs_last_error.restype = c_char_p
        for kind, args in (("layer", LayerArgs), ("batch", BatchArgs)):
            for name in ("workspace", "run"):
                function = getattr(self.lib, f"bs_{kind}_norm_{name}")
                function.argtypes = [c_char_p, ctypes.c_int, POINTER(args)] + [c_void_p] * (name == "run")
            getattr(self.lib, f"bs_{kind}_norm_workspace").restype = c_int64

    def launch(self, args, allocate, stream=lambda: None):
        """`allocate(bytes)` gives an address, or an object with data_ptr() that is kept."""
        kind = "layer" if isinstance(args, LayerArgs) else "batch"
        size = getattr(self.lib, f"bs_{kind}_norm_workspace")(self.device, self.threads, args)
        assert size >= 0, self.lib.bs_last_error()
        workspace = allocate(size)
        args.workspace = workspace.data_ptr() if hasattr(workspace, "data_ptr") else workspace
        run, error = getattr(self.lib, f"bs_{kind}_norm_run"), self.lib.bs_last_error

        def function(keep=workspace):
            assert run(self.device, self.threads, args, stream()) == 0, error()

        return function


def widen(raw, dtype):
    """float64 of bytes."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(dtype).astype(np.float64)


def narrow(x, dtype):
    """Bytes of float64, rounded to nearest even."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
    return x.astype(dtype).reshape(-1).view(np.uint8)


class Memory:
    """Buffers on the device, all 0xff (NaN in every dtype) where nothing was put, with as much before and after."""

    GUARD = 256

    def __init__(self, device, shift=0):
        self.gpu, self.shift, self.buffers = device == b"gpu", shift, {}

    def put(self, name, raw, item=0):
        self.allocate(len(raw), name, item)
        buffer, first = self.buffers[name]
        if self.gpu:
            import torch

            buffer[first : first + len(raw)] = torch.from_numpy(raw).cuda()
        else:
            buffer[first : first + len(raw)] = raw
        return self.pointer(name)

    def allocate(self, size, name="workspace", item=4):
        """`item`: bytes of an element, by `shift` of which the buffer is off from an aligned address."""
        total = size + 2 * self.GUARD + 64
        if self.gpu:
            import torch

            buffer = torch.full((total,), 255, dtype=torch.uint8, device="cuda")
        else:
            buffer = np.full(total, 255, np.uint8)
        address = buffer.data_ptr() if self.gpu else buffer.ctypes.data
        first = self.GUARD + -(address + self.GUARD) % 64 + self.shift * item
        self.buffers[name] = buffer, first
        return self.pointer(name)

    def pointer(self, name):
        buffer, first = self.buffers[name]
        return (buffer.data_ptr() if self.gpu else buffer.ctypes.data) + first

    def get(self, name, size):
        buffer, first = self.buffers[name]
        raw = buffer.cpu().numpy() if self.gpu else buffer
        assert (raw[:first] == 255).all() and (raw[first + size :] == 255).all(), f"{name} was written out of place"
        return raw[first : first + size].copy()


def vector(raw):
    return raw.view(np.float32)


def run_layer_norm(kernels, case, shift=0):
    """The bytes of (y, dx, dg, db)."""
    dtype, options, shape = case.dtype, case.options, case.shape
    axis = case.axis % len(shape)
    outer, inner = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
    S, K, n = options["segments"], shape[axis], int(np.prod(shape)) * SIZE[dtype]
    rows = 4 * S * outer * inner
    memory, size = Memory(kernels.device, shift), SIZE[dtype]
    put, new = memory.put, memory.allocate
    common = {
        "relu": options["relu"], "dtype": DTYPES[dtype], "epsilon": options["epsilon"],
        "outer": outer, "segments": S, "features": K // S, "inner": inner,
        "x": put("x", narrow(case.x, dtype), size),
        "gain": put("gain", narrow(case.g, "float32"), 4), "bias": put("bias", narrow(case.b, "float32"), 4),
        "mean": new(rows, "mean"), "residual": new(rows, "residual"), "rstd": new(rows, "rstd"),
    }  # fmt: skip
    kernels.launch(LayerArgs(y=new(n, "y", size), **common), new)()
    y = memory.get("y", n)
    for name in ("mean", "residual", "rstd"):
        assert np.isfinite(vector(memory.get(name, rows))).all(), name
    out = {"dx": new(n, "dx", size), "dgain": new(4 * K, "dgain"), "dbias": new(4 * K, "dbias")}
    kernels.launch(LayerArgs(gradient=1, dy=put("dy", narrow(case.dy, dtype), size), **common, **out), new)()
    return y, memory.get("dx", n), memory.get("dgain", 4 * K), memory.get("dbias", 4 * K)


def run_batch_norm(kernels, case, shift=0):
    """The bytes of (y, m, v, dx, dg, db, y of inference, dx, dg, db of inference)."""
    dtype, shape = case.dtype, case.shape
    C, n = shape[1], int(np.prod(shape)) * SIZE[dtype]
    memory, size = Memory(kernels.device, shift), SIZE[dtype]
    put, new = memory.put, memory.allocate
    common = {
        "dtype": DTYPES[dtype], "epsilon": case.epsilon,
        "outer": shape[0], "channels": C, "inner": int(np.prod(shape[2:])),
        "x": put("x", narrow(case.x, dtype), size),
        "gain": put("gain", narrow(case.g, "float32"), 4), "bias": put("bias", narrow(case.b, "float32"), 4),
        **{name: new(4 * C, name) for name in ("mean", "residual", "variance")},
    }  # fmt: skip
    results = []
    kernels.launch(BatchArgs(y=new(n, "y", size), **common), new)()
    results += [memory.get("y", n), memory.get("mean", 4 * C), memory.get("variance", 4 * C)]
    dy = put("dy", narrow(case.dy, dtype), size)
    for inference in (0, 1):
        if inference:
            common["residual"] = None  # the mean is what one float32 says
            kernels.launch(BatchArgs(inference=1, y=new(n, "y", size), **common), new)()
            results.append(memory.get("y", n))
        out = {"dx": new(n, "dx", size), "dgain": new(4 * C, "dgain"), "dbias": new(4 * C, "dbias")}
        kernels.launch(BatchArgs(gradient=1, inference=inference, dy=dy, **common, **out), new)()
        results += [memory.get("dx", n), memory.get("dgain", 4 * C), memory.get("dbias", 4 * C)]
    return results


def check_layer_norm(kernels, rng, dtype, shape, axis, shift=0, **options):
    case = LayerNorm(rng, shape, axis, lambda x: widen(narrow(x, dtype), dtype).reshape(shape), dtype, **options)
    found = run_layer_norm(kernels, case, shift)
    y, dx, dg, db = found
    case.check_y(widen(y, dtype).reshape(shape))
    case.check_gradients(widen(dx, dtype).reshape(shape), vector(dg), vector(db))
    again = run_layer_norm(kernels, case, shift)
    assert all((a == b).all() for a, b in zip(found, again)), "other bits the second time"


def check_batch_norm(kernels, rng, dtype, shape, shift=0, **options):
    case = BatchNorm(rng, shape, lambda x: widen(narrow(x, dtype), dtype).reshape(shape), dtype, **options)
    found = run_batch_norm(kernels, case, shift)
    y, m, v, dx, dg, db, yi, dxi, dgi, dbi = found
    case.check_y(widen(y, dtype).reshape(shape), vector(m), vector(v))
    case.check_gradients(widen(dx, dtype).reshape(shape), vector(dg), vector(db))
    case.check_gradients(widen(dxi, dtype).reshape(shape), vector(dgi), vector(dbi), vector(m), vector(v))
    case.check_inference(widen(yi, dtype).reshape(shape), vector(m), vector(v))
    again = run_batch_norm(kernels, case, shift)
    assert all((a == b).all() for a, b in zip(found, again)), "other bits the second time"


SMALL_LAYER = [
    ((3, 32), 1), ((5, 31), 1), ((2, 33), -1), ((1, 1), 1), ((7, 4096), 1), ((3, 8191), 1),
    ((31, 5), 0), ((33, 64), 0), ((4, 12, 10), 1), ((2, 3, 40, 5), 2), ((17,), 0), ((130, 1), 0), ((5, 1), 1),
]  # fmt: skip
LARGE_LAYER = [
    ((600, 512), 1), ((700, 1024), 1), ((900, 896), 1), ((150, 3000), 1), ((1100, 4096), 1), ((300, 5120), 1),
    ((530, 8192), 1), ((290, 12288), 1), ((270, 16384), 1), ((40, 32768), 1), ((128, 8188), 1), ((128, 8193), 1),
    ((100, 32767), 1), ((40, 40, 256), 2), ((20000, 64), 1), ((3, 100000), 1),
    ((512, 1024), 0), ((1000, 520), 0), ((4096, 320), 0), ((2048, 1000), 0), ((896, 1003), 0), ((8192, 128), 0),
    ((4, 320, 40, 24), 1), ((60, 96, 100), 1), ((3000, 20, 16), 1), ((33, 4100, 8), 1), ((4000, 100), 0),
]  # fmt: skip
SMALL_BATCH = [(2, 3, 5), (1, 4, 16), (3, 2, 4, 6), (2, 5, 1), (4, 1, 7, 3, 2), (8, 6)]
LARGE_BATCH = [
    (16, 24, 56, 56),
    (33, 30, 56, 56),
    (8, 300, 7, 7),
    (5, 3, 4096),
    (64, 40, 28, 28),
    (2, 2, 100001),
    (3000, 7, 9),
]


def main():
    library = next((a for a in sys.argv[1:] if a.endswith(".so")), ROOT / "build" / "libblocksparse_kernels.so")
    kernels = Kernels(library, b"cpu" if "cpu" in sys.argv else b"gpu")
    seed = int(np.random.SeedSequence().entropy % 2**32)
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    short = "small" in sys.argv
    failures = count = 0

    def check(function, *args, **options):
        nonlocal failures, count
        count += 1
        try:
            function(kernels, rng, *args, **options)
        except AssertionError as error:
            failures += 1
            print(f"FAILED {function.__name__} {args} {options}: {error}", flush=True)

    dtypes = [dtype for dtype in DTYPES if dtype in sys.argv] or list(DTYPES)
    for dtype in dtypes:
        for shape, axis in SMALL_LAYER + [] if short else SMALL_LAYER + LARGE_LAYER:
            segments = rng.choice([s for s in (1, 2, 4) if shape[axis] % s == 0])
            check(check_layer_norm, dtype, shape, axis, relu=bool(rng.integers(2)), segments=int(segments))
        if short:  # one of each of the kernels that hold their data
            check(check_layer_norm, dtype, (70, 4096), 1, relu=True, segments=2)
            check(check_layer_norm, dtype, (640, 512), 0, relu=True)
            check(check_layer_norm, dtype, (2048, 136), 0)
            check(check_batch_norm, dtype, (17, 20, 40, 40))
        for shape in SMALL_BATCH if short else SMALL_BATCH + LARGE_BATCH:
            check(check_batch_norm, dtype, shape)
        if not short:
            for shape, axis in (((6, 4096), 1), ((700, 1024), 1), ((1024, 512), 0), ((64, 40), 0)):
                check(check_layer_norm, dtype, shape, axis, shift=1)  # unaligned
            check(check_layer_norm, dtype, (700, 1024), 1, segments=4, relu=True)
            check(check_layer_norm, dtype, (1024, 512), 0, segments=4, relu=True)
            check(check_batch_norm, dtype, (4, 6, 1024), shift=1)
    if "float32" in dtypes:
        for shape, axis in (((9, 1000), 1), ((500, 1024), 1), ((1024, 320), 0), ((60, 48), 0), ((300, 8192), 1)):
            check(check_layer_norm, "float32", shape, axis, mean=1e4)
        for shape in ((4, 6, 1000), (16, 24, 56, 56)):
            check(check_batch_norm, "float32", shape, mean=1e4)
    print(f"{count - failures} of {count} checks passed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
