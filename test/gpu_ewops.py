"""The elementwise kernels on a GPU by way of PyTorch, without TensorFlow: right for every operator, dtype, odd size and
unaligned operand, and with the same bits twice.

  python3 test/gpu_ewops.py [library] [small]

`small` only launches, for compute-sanitizer. Reads blocksparse/reference.py by its path: the package is not imported.
"""

import ctypes
import importlib.util
import itertools
import pathlib
import sys
from ctypes import c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a unit
BINARY = ["add", "subtract", "multiply", "divide", "maximum", "minimum"]
UNARY = ["negative", "reciprocal", "square", "sqrt", "exp", "log", "sigmoid", "tanh", "relu", "elu", "gelu", "swish"]
POSITIVE = {"reciprocal", "sqrt", "log"}
ALPHA = {"elu": 0.7, "gelu": 0.044715, "swish": 1.3}


def struct(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def of(kind, names):
    return [(name, kind) for name in names.split()]


Ew = struct(
    "Ew",
    *of(c_int32, "op gradient dtype zero_infs zero_nans"),
    *of(c_float, "alpha low high"),
    ("n", c_int64),
    ("in_", c_void_p * 3),
    ("out", c_void_p * 2),
)
Cast = struct("Cast", *of(c_int32, "from_ to"), ("n", c_int64), *of(c_void_p, "x y"))
AddN = struct("AddN", *of(c_int32, "dtype count"), ("n", c_int64), *of(c_void_p, "x y"))
Channel = struct(
    "Channel",
    *of(c_int32, "gradient act dtype"),
    *of(c_int64, "outer channels inner"),
    *of(c_void_p, "gain bias x dy y dx dgain dbias workspace"),
)
Dropout = struct(
    "Dropout",
    *of(c_int32, "generate dtype rank"),
    ("keep_prob", c_float),
    ("seed", c_uint32 * 2),
    ("n", c_int64),
    *of(c_void_p, "mask x y dims stride"),
)
ConcreteGate = struct(
    "ConcreteGate",
    ("seed", c_uint32 * 2),
    *of(c_float, "inverse_temperature low high epsilon"),
    ("n", c_int64),
    *of(c_void_p, "x gate concrete"),
)
FancyGather = struct(
    "FancyGather", *of(c_int32, "gradient element_bytes"), *of(c_int64, "outer dim inner"), *of(c_void_p, "index x y")
)
ReduceMax = struct(
    "ReduceMax", *of(c_int32, "gradient dtype"), *of(c_int64, "outer dim inner"), *of(c_void_p, "x y argmax")
)


class Kernels:
    """The library's functions on torch tensors of one GPU, on torch's current stream. Every call gives a function that
    launches, with no work on the host beside it."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.bs_last_error.restype = c_char_p
        self.lib.bs_channel_workspace.restype = c_int64

    def launcher(self, name, args, *keep):
        function = getattr(self.lib, f"bs_{name}_run")
        pointer = ctypes.byref(args)

        def launch():
            stream = c_void_p(torch.cuda.current_stream().cuda_stream)
            if function(b"gpu", 1, pointer, stream):
                raise RuntimeError(self.lib.bs_last_error().decode())

        launch.keep = (args, *keep)
        return launch

    def ew(self, op, ins, outs, gradient=False, alpha=1.0, low=0.0, high=0.0, infs=False, nans=False):
        pointers = [t.data_ptr() for t in ins] + [None] * (3 - len(ins)), [t.data_ptr() for t in outs] + [None] * 2
        return self.launcher(
            "ew",
            Ew(
                op, gradient, DTYPES[ins[0].dtype], infs, nans, alpha, low, high, ins[0].numel(),
                (c_void_p * 3)(*pointers[0]), (c_void_p * 2)(*pointers[1][:2]),
            ),
            ins, outs,
        )  # fmt: skip

    def cast(self, x, y):
        args = Cast(DTYPES[x.dtype], DTYPES[y.dtype], x.numel(), x.data_ptr(), y.data_ptr())
        return self.launcher("cast", args, x, y)

    def add_n(self, xs, y):
        pointers = (c_void_p * len(xs))(*[x.data_ptr() for x in xs])
        args = AddN(DTYPES[y.dtype], len(xs), y.numel(), ctypes.cast(pointers, c_void_p), y.data_ptr())
        return self.launcher("add_n", args, pointers, xs, y)

    def channel(self, dtype, shape, axis, act=0, **tensors):
        """tensors: any of the struct's pointers; a gradient where there is dy."""
        axis %= len(shape)
        outer, inner = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        args = Channel("dy" in tensors, act, DTYPES[dtype], outer, shape[axis], inner, **pointers)
        size = self.lib.bs_channel_workspace(b"gpu", ctypes.byref(args))
        workspace = torch.full((max(1, size // 4),), float("nan"), device="cuda")
        args.workspace = workspace.data_ptr()
        return self.launcher("channel", args, workspace, tensors)

    def dropout(self, dtype, n, keep, seed=(1, 2), mask=None, x=None, y=None, generate=True, dims=(), stride=()):
        arrays = [(c_int64 * len(v))(*v) for v in (dims, stride)]
        args = Dropout(
            generate, DTYPES[dtype], len(dims), keep, (c_uint32 * 2)(*seed), n, mask.data_ptr(),
            x.data_ptr() if x is not None else None, y.data_ptr() if y is not None else None,
            *[ctypes.cast(a, c_void_p) for a in arrays],
        )  # fmt: skip
        return self.launcher("dropout", args, arrays, mask, x, y)

    def concrete_gate(self, x, gate, concrete, seed=(1, 2), temperature=2 / 3):
        args = ConcreteGate(
            (c_uint32 * 2)(*seed),
            1 / temperature,
            -0.1,
            1.1,
            1e-6,
            x.numel(),
            x.data_ptr(),
            gate.data_ptr(),
            concrete.data_ptr(),
        )
        return self.launcher("concrete_gate", args, x, gate, concrete)

    def fancy_gather(self, x, index, y, outer, dim, inner, gradient=False):
        args = FancyGather(gradient, x.element_size(), outer, dim, inner, index.data_ptr(), x.data_ptr(), y.data_ptr())
        return self.launcher("fancy_gather", args, x, index, y)

    def reduce_max(self, x, y, argmax, outer, dim, inner, gradient=False):
        args = ReduceMax(gradient, DTYPES[x.dtype], outer, dim, inner, x.data_ptr(), y.data_ptr(), argmax.data_ptr())
        return self.launcher("reduce_max", args, x, y, argmax)


# --------------------------------------------------------------------------------------------------------- reference


def load_reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "blocksparse" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def elementwise(op, x, y=None, alpha=1.0):
    return {
        "add": lambda: x + y,
        "subtract": lambda: x - y,
        "multiply": lambda: x * y,
        "divide": lambda: x / y,
        "maximum": lambda: torch.maximum(x, y),
        "minimum": lambda: torch.minimum(x, y),
        "negative": lambda: -x,
        "reciprocal": lambda: 1 / x,
        "square": lambda: x * x,
        "sqrt": lambda: x.sqrt(),
        "exp": lambda: x.exp(),
        "log": lambda: x.log(),
        "sigmoid": lambda: x.sigmoid(),
        "tanh": lambda: x.tanh(),
        "relu": lambda: x.clamp(min=0),
        "elu": lambda: torch.where(x > 0, x, alpha * torch.expm1(x)),
        "gelu": lambda: x * torch.sigmoid(2 * (2 / np.pi) ** 0.5 * (x + alpha * x**3)),
        "swish": lambda: x * torch.sigmoid(alpha * x),
    }[op]()


def slopes(op, x, y):
    return {
        "multiply": lambda: (y, x),
        "divide": lambda: (1 / y, -x / y**2),
        "maximum": lambda: ((x >= y).double(), (y >= x).double()),
        "minimum": lambda: ((x <= y).double(), (y <= x).double()),
    }[op]()


class Checker:
    def __init__(self, kernels):
        self.kernels, self.count, self.worst = kernels, 0, {}

    def poisoned(self, n, dtype, shift):
        """A tensor of n elements, `shift` elements past an aligned address, full of NaN."""
        return torch.full((n + shift,), float("nan"), dtype=torch.float32, device="cuda").to(dtype)[shift:]

    def random(self, n, dtype, shift=0, positive=False):
        x = torch.randn(n + shift, device="cuda") * 2
        return (x.abs() + 0.1 if positive else x).to(dtype)[shift:]

    def runs(self, launch, *outputs):
        """Runs twice and compares bits."""
        launch()
        torch.cuda.synchronize()
        first = [o.clone() for o in outputs]
        for o in outputs:
            if o.is_floating_point():
                o.fill_(float("nan"))
        launch()
        torch.cuda.synchronize()
        for a, b in zip(first, outputs):
            same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
            assert bool(same.all()), "the bits differ from run to run"

    def close(self, name, actual, expected, units=8.0, magnitude=None):
        expected = expected.double()
        size = expected.abs() if magnitude is None else torch.maximum(expected.abs(), magnitude.double())
        tolerance = EPSILON[actual.dtype] * expected.abs() * 1.01 + units * 2.0**-23 * size + 2.0**-133
        if actual.dtype == torch.float16:
            tolerance += 2.0**-25  # subnormals
        error = (actual.double() - expected).abs()
        good = (error <= tolerance) | (actual.double() == expected.to(actual.dtype).double())  # or both overflow
        if not bool(good.all()):
            i = int(torch.nonzero(~good)[0][0]) if good.dim() == 1 else torch.nonzero(~good)[0]
            raise AssertionError(
                f"{name}: {int((~good).sum())} of {good.numel()} wrong, at {i}: {actual[i]} expected {expected[i]}"
            )
        self.count += 1

    def maps(self, sizes, shifts):
        k = self.kernels
        for dtype, n, shift in itertools.product(DTYPES, sizes, shifts):
            for code, op in enumerate(BINARY):
                x, y, dz = (self.random(n, dtype, shift) for _ in range(3))
                if op == "divide":
                    y = torch.where(y.abs() < 0.1, torch.ones_like(y), y)
                    y = torch.cat([y.new_zeros(shift), y])[shift:]
                z = self.poisoned(n, dtype, shift)
                self.runs(k.ew(code, [x, y], [z]), z)
                self.close(f"{op} {dtype} {n} {shift}", z, elementwise(op, x.double(), y.double()))
                if code < 2:
                    continue
                dx, dy = self.poisoned(n, dtype, shift), self.poisoned(n, dtype, shift)
                self.runs(k.ew(code, [dz, x, y], [dx, dy], gradient=True), dx, dy)
                ex, ey = slopes(op, x.double(), y.double())
                self.close(f"{op} dx", dx, dz.double() * ex)
                self.close(f"{op} dy", dy, dz.double() * ey)
            for code, op in enumerate(UNARY, 6):
                x, dz = self.random(n, dtype, shift, op in POSITIVE), self.random(n, dtype, shift)
                z, dx = self.poisoned(n, dtype, shift), self.poisoned(n, dtype, shift)
                alpha = ALPHA.get(op, 1.0)
                self.runs(k.ew(code, [x], [z], alpha=alpha), z)
                wide = x.double().requires_grad_()
                expected = elementwise(op, wide, alpha=alpha)
                # The rounded argument of a sigmoid moves the result by as many units as the argument is large.
                argument = 1.6 * (x.double() + 0.044715 * x.double() ** 3).abs() if op in ("gelu", "swish") else 0.0
                self.close(
                    f"{op} {dtype} {n} {shift}", z, expected.detach(), 8, expected.detach().abs() * (1 + argument)
                )
                if op in ("sigmoid", "tanh", "relu"):
                    zd = z.double()
                    slope = {"sigmoid": zd - zd * zd, "tanh": 1 - zd * zd, "relu": (zd > 0).double()}[op]
                    self.runs(k.ew(code, [dz, z], [dx], gradient=True), dx)
                    self.close(f"{op} gradient", dx, dz.double() * slope, 8, dz.double().abs())
                else:
                    expected.backward(dz.double())
                    self.runs(k.ew(code, [dz, x], [dx], gradient=True, alpha=alpha), dx)
                    magnitude = dz.double().abs() * (1 + x.double().abs()) if op in ("gelu", "swish") else None
                    self.close(f"{op} gradient", dx, wide.grad, 16, magnitude)
            x = self.random(n, dtype, shift)
            if n > 4:
                x[::3], x[1::5] = float("inf"), float("nan")
            z = self.poisoned(n, dtype, shift)
            self.runs(k.ew(20, [x], [z], alpha=0.5, low=-1.5, high=1.5, infs=True, nans=True), z)
            self.close("filter", z, (torch.nan_to_num(x.double(), 0.0, 0.0, 0.0) * 0.5).clamp(-1.5, 1.5))
            for to in DTYPES:
                if to != dtype:
                    x, y = self.random(n, dtype, shift), self.poisoned(n, to, shift)
                    self.runs(k.cast(x, y), y)
                    assert torch.equal(y, x.to(to)), f"cast {dtype} {to} {n} {shift}"
            for count in (1, 3, 9, 40):
                xs = [self.random(n, dtype, shift) for _ in range(count)]
                y = self.poisoned(n, dtype, shift)
                self.runs(k.add_n(xs, y), y)
                self.close(f"add_n {count}", y, sum(x.double() for x in xs), 8, sum(x.double().abs() for x in xs))

    def channels(self, shapes, shifts):
        k = self.kernels
        for dtype, (shape, axis), shift in itertools.product(DTYPES, shapes, shifts):
            n, C = int(np.prod(shape)), shape[axis]
            view = [1] * len(shape)
            view[axis] = C
            others = [d for d in range(len(shape)) if d != axis % len(shape)]
            g, b = torch.randn(C, device="cuda"), torch.randn(C, device="cuda")
            for act, gained in itertools.product((0, 1, 2), (False, True)):
                x, dy = self.random(n, dtype, shift), self.random(n, dtype, shift)
                y = self.poisoned(n, dtype, shift)
                gain = {"gain": g} if gained else {}
                self.runs(k.channel(dtype, shape, axis, act, x=x, y=y, bias=b, **gain), y)
                xd = x.double().reshape(shape).requires_grad_()
                gd = (g if gained else torch.ones_like(g)).double().requires_grad_()
                bd = b.double().requires_grad_()
                v = gd.reshape(view) * xd + bd.reshape(view)
                expected = v if act == 0 else v.relu() if act == 1 else v * torch.sigmoid(1.702 * v)
                size = (v.detach().abs() + (gd.reshape(view) * xd).detach().abs() + bd.detach().reshape(view).abs()) * 3
                name = f"channel act {act} gain {gained} {dtype} {shape} axis {axis} shift {shift}"
                self.close(name, y, expected.detach().reshape(-1), 8, size.reshape(-1))
                expected.backward(dy.double().reshape(shape))
                dx, dg, db = (
                    self.poisoned(n, dtype, shift),
                    torch.full_like(g, float("nan")),
                    torch.full_like(b, float("nan")),
                )
                other = {"y": y} if act == 1 and not gained else {"x": x}
                sums = {"dgain": dg, "dbias": db} if gained else {"dbias": db}
                launch = k.channel(dtype, shape, axis, act, dy=dy, dx=dx, bias=b, **gain, **other, **sums)
                self.runs(launch, dx, *sums.values())
                dyd = dy.double().reshape(shape).abs()
                self.close(name + " dx", dx, xd.grad.reshape(-1), 16, (dyd * (1 + size)).reshape(-1))
                terms = max(4, (n // max(C, 1)) ** 0.5)
                self.close(name + " db", db, bd.grad, terms, (dyd * (1 + size)).sum(others))
                if gained:
                    self.close(name + " dg", dg, gd.grad, terms, (dyd * (1 + size) * xd.detach().abs()).sum(others))
            db = torch.full_like(b, float("nan"))
            self.runs(k.channel(dtype, shape, axis, dy=dy, dbias=db), db)
            self.close(name + " sum", db, dy.double().reshape(shape).sum(others), terms, dyd.sum(others))

    def random_bits(self, sizes, shifts):
        k, ref = self.kernels, load_reference()
        for n, keep, shift in itertools.product(sizes, (0.3, 0.5, 1.0, 0.0, 0.999), shifts):
            seed = np.random.default_rng().integers(0, 2**32, 2).tolist()
            bits = ref.dropout_bits(seed, n, keep)
            packed = torch.from_numpy(ref.pack_mask(bits).copy()).cuda()
            kept = torch.from_numpy(bits).cuda()
            mask = torch.full_like(packed, -1)
            k.dropout(torch.float32, n, keep, seed, mask)()
            assert torch.equal(mask, packed), f"mask of {n}"
            for dtype in DTYPES:
                x, y = self.random(n, dtype, shift), self.poisoned(n, dtype, shift)
                mask = torch.full_like(packed, -1)
                self.runs(k.dropout(dtype, n, keep, seed, mask, x, y), y, mask)
                assert torch.equal(mask, packed), f"mask of {n} {dtype}"
                expected = torch.where(kept, x.double() / max(keep, 1e-9), 0.0)
                self.close(f"dropout {n} {dtype}", y, expected, 4)
                y = self.poisoned(n, dtype, shift)
                self.runs(k.dropout(dtype, n, keep, (9, 9), mask, x, y, generate=False), y)
                self.close(f"mask applied {n} {dtype}", y, expected, 4)
        shape, stride = (5, 7, 3, 11), (33, 0, 11, 1)
        bits = torch.rand(165, device="cuda") < 0.5
        mask = torch.from_numpy(ref.pack_mask(bits.cpu().numpy()).copy()).cuda()
        for dtype in DTYPES:
            x, y = self.random(1155, dtype), self.poisoned(1155, dtype, 0)
            self.runs(k.dropout(dtype, 1155, 0.5, (1, 1), mask, x, y, generate=False, dims=shape, stride=stride), y)
            expected = torch.where(bits.reshape(5, 1, 3, 11), x.double().reshape(shape) * 2, 0.0)
            self.close("broadcast mask", y, expected.reshape(-1), 4)
        for n in sizes:
            x, gate, s = (
                self.random(n, torch.float32),
                self.poisoned(n, torch.float32, 0),
                self.poisoned(n, torch.float32, 0),
            )
            self.runs(k.concrete_gate(x, gate, s, (3, 4)), gate, s)
            expected, es = ref.concrete_gate(x.cpu().numpy(), (3, 4))
            assert np.allclose(gate.cpu(), expected, rtol=1e-4, atol=1e-5) and np.allclose(
                s.cpu(), es, rtol=1e-4, atol=1e-6
            )
            dg, dx = self.random(n, torch.float32), self.poisoned(n, torch.float32, 0)
            self.runs(k.ew(21, [dg, s], [dx], gradient=True, alpha=1.5, low=-0.1, high=1.1), dx)
            e = ref.concrete_gate_grad(dg.cpu().numpy(), s.cpu().numpy())
            assert np.allclose(dx.cpu(), e, rtol=1e-4, atol=1e-5)
            self.runs(k.ew(22, [x], [gate], low=-0.1, high=1.1), gate)
            self.close("infer", gate, (x.double().sigmoid() * 1.2 - 0.1).clamp(0, 1), 8, torch.ones_like(x))

    def indices(self, cases):
        k = self.kernels
        for dtype, (outer, dim, inner) in itertools.product(DTYPES, cases):
            x = self.random(outer * dim * inner, dtype).reshape(outer, dim, inner)
            index = torch.randint(-2, dim + 3, (outer,), device="cuda", dtype=torch.int32)
            y = self.poisoned(outer * inner, dtype, 0)
            self.runs(k.fancy_gather(x, index, y, outer, dim, inner), y)
            inside = index.clamp(0, dim - 1).long()
            rows = torch.arange(outer, device="cuda")
            valid = (index < dim)[:, None]
            expected = torch.where(valid, x[rows, inside], torch.zeros_like(x[:, 0]))
            assert torch.equal(y.reshape(outer, inner), expected), "fancy_gather"
            dx = self.poisoned(x.numel(), dtype, 0)
            self.runs(k.fancy_gather(y, index, dx, outer, dim, inner, gradient=True), dx)
            expected_dx = torch.zeros_like(x)
            expected_dx[rows, inside] = torch.where(valid, y.reshape(outer, inner), torch.zeros_like(expected))
            assert torch.equal(dx.reshape(x.shape), expected_dx), "fancy_gather gradient"
            x = x.round()  # ties
            x[:, ::7] = float("nan")
            argmax = torch.full((outer * inner,), -1, device="cuda", dtype=torch.int64)
            self.runs(k.reduce_max(x, y, argmax, outer, dim, inner), y, argmax)
            clean = torch.where(x.isnan(), torch.full_like(x, float("-inf")), x).float()
            best = clean.max(1).values
            first = (clean == best[:, None]).int().argmax(1)
            dead = best == float("-inf")
            best = torch.where(dead, torch.full_like(best, -3.4028234663852886e38), best).to(dtype)
            assert torch.equal(y.reshape(outer, inner), best), f"reduce_max {dtype} {(outer, dim, inner)}"
            assert torch.equal(argmax.reshape(outer, inner), torch.where(dead, torch.zeros_like(first), first)), (
                "argmax"
            )
            self.runs(k.reduce_max(y, dx, argmax, outer, dim, inner, gradient=True), dx)
            expected_dx = torch.zeros_like(x).scatter_(1, argmax.reshape(outer, 1, inner), y.reshape(outer, 1, inner))
            assert torch.equal(dx.reshape(x.shape), expected_dx), "reduce_max gradient"
            self.count += 4


class Launcher(Checker):
    """Launches alone, for compute-sanitizer, under which PyTorch's own kernels take long."""

    def random(self, n, dtype, shift=0, positive=False):
        return torch.from_numpy(np.ones(n + shift, np.float32)).to(dtype).cuda()[shift:]

    def poisoned(self, n, dtype, shift):
        return torch.empty(n + shift, dtype=dtype, device="cuda")[shift:]

    def runs(self, launch, *outputs):
        launch()
        self.count += 1

    def close(self, *args):
        pass

    def channels(self, shapes, shifts):
        k = self.kernels
        for dtype, (shape, axis), shift in itertools.product(DTYPES, shapes, shifts):
            n = int(np.prod(shape))
            x, dy, y = (self.random(n, dtype, shift) for _ in range(3))
            g, b, dg, db = (self.random(shape[axis], torch.float32) for _ in range(4))
            for act in (0, 1, 2):
                self.runs(k.channel(dtype, shape, axis, act, x=x, y=y, bias=b, gain=g))
                self.runs(k.channel(dtype, shape, axis, act, dy=dy, dx=y, x=x, bias=b, gain=g, dgain=dg, dbias=db))
                self.runs(k.channel(dtype, shape, axis, act, dy=dy, dx=dy, y=x, bias=b, dbias=db))
            self.runs(k.channel(dtype, shape, axis, dy=dy, dbias=db))

    def random_bits(self, sizes, shifts):
        k = self.kernels
        mask = torch.empty(40, dtype=torch.int32, device="cuda")
        for dtype, n, shift in itertools.product(DTYPES, sizes, shifts):
            x, y = self.random(n, dtype, shift), self.poisoned(n, dtype, shift)
            exact = mask[: (n + 31) // 32].clone()
            self.runs(k.dropout(dtype, n, 0.3, (1, 2), exact, x, y))
            self.runs(k.dropout(dtype, n, 0.3, (1, 2), exact, x, y, generate=False))
            self.runs(k.dropout(dtype, n, 0.3, (1, 2), exact))
        for n in sizes:
            x = self.random(n, torch.float32)
            self.runs(k.concrete_gate(x, torch.empty_like(x), torch.empty_like(x)))
        x, y = self.random(1155, torch.float32), self.random(1155, torch.float32)
        broadcast = {"dims": (5, 7, 3, 11), "stride": (33, 0, 11, 1)}
        self.runs(k.dropout(torch.float32, 1155, 0.5, (1, 1), mask, x, y, False, **broadcast))

    def indices(self, cases):
        k = self.kernels
        for dtype, (outer, dim, inner) in itertools.product(DTYPES, cases):
            x, y = self.random(outer * dim * inner, dtype), self.random(outer * inner, dtype)
            index = torch.from_numpy(np.arange(-1, outer - 1, dtype=np.int32)).cuda()
            argmax = torch.from_numpy(np.zeros(outer * inner, np.int64)).cuda()
            for gradient in (False, True):
                self.runs(k.fancy_gather(*((y, index, x) if gradient else (x, index, y)), outer, dim, inner, gradient))
                self.runs(k.reduce_max(*((y, x) if gradient else (x, y)), argmax, outer, dim, inner, gradient))


def main():
    library = next((a for a in sys.argv[1:] if a.endswith(".so")), ROOT / "build" / "libblocksparse_kernels.so")
    kernels = Kernels(library)
    if "small" in sys.argv:
        checker = Launcher(kernels)
        checker.maps([259, 4096], [0, 1])
        shapes = [
            ((9, 37), 1),
            ((9, 64), 1),
            ((64, 300), 0),
            ((3, 5, 8), 1),
            ((3, 5, 7), 1),
            ((2600, 130), 1),
            ((5, 70000), 0),
        ]
        checker.channels(shapes, [0, 1])
        checker.random_bits([1, 33, 1000], [0, 1])
        checker.indices([(5, 7, 1), (3, 9, 8), (2, 3000, 1), (2, 40, 33)])
    else:
        checker = Checker(kernels)
        checker.maps([1, 3, 8, 31, 1000, 4097, 1 << 20], [0, 1])
        rows = [(1, 1), (5, 3), (1000, 3), (257, 129), (513, 1024), (4099, 260), (8192, 72), (3, 100000)]
        planes = [((7, 300), 0), ((300, 4096), 0), ((3, 200001), 0), ((5, 37, 49), 1), ((64, 256, 64), 1)]
        checker.channels([(shape, 1) for shape in rows] + planes, [0, 1])
        checker.channels([((300, 5, 8), 1), ((2, 3, 70000), 1), ((1, 2, 1 << 20), -2)], [0])
        checker.random_bits([1, 31, 32, 33, 255, 256, 257, 4095, 100003, 1 << 20], [0, 1])
        checker.indices([(1, 1, 1), (5, 7, 1), (100, 2048, 1), (10, 5000, 1), (3, 100001, 1), (64, 4096, 1)])
        checker.indices([(17, 9, 8), (16, 300, 33), (100, 20, 128), (2, 7, 1000), (3, 5000, 16), (5000, 40, 64)])
    torch.cuda.synchronize()
    print(f"gpu_ewops: {checker.count} checks passed on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
