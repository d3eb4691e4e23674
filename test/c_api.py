"""The kernels behind C linkage (src/kernels/c_api.h) called with NumPy arrays, on the CPU and, by way of CUDA's driver,
on the GPU. Operands lie between guards full of NaN, and outputs are NaN before the call, so that what is read or
written out of place, or not written, shows.

BLOCKSPARSE_KERNELS=path takes the kernels from a library of `make kernels`.
"""

import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p

import numpy as np
from helpers import bfloat16

if path := os.environ.get("BLOCKSPARSE_KERNELS"):
    lib = ctypes.CDLL(os.path.abspath(path))
else:
    from blocksparse import _library

    lib = ctypes.CDLL(_library.handle._name)  # an object of its own, since argument types are declared on it

DTYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, bfloat16: 2}
FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(3)

_GUARD = 4096  # bytes on either side; a multiple of every alignment


class Error(Exception):
    """What bs_last_error says."""


class MatmulArgs(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("product", "axis", "bsize", "dtype", "out_dtype", "tf32", "pairs")),
        ("n", POINTER(c_int64)),
        ("a", POINTER(c_void_p)),
        ("b", POINTER(c_void_p)),
        *((name, c_void_p) for name in ("gate", "addend", "out")),
    ]


class GateGradArgs(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("bsize", "blocks", "dtype", "out_dtype", "gated")),
        *((name, c_void_p) for name in ("dw", "w", "gate", "dw_out", "dgate")),
    ]


lib.bs_last_error.restype = c_char_p
lib.bs_matmul_create.restype = c_void_p
lib.bs_matmul_create.argtypes = [c_char_p, ctypes.c_int, c_void_p, c_int64]
lib.bs_matmul_destroy.argtypes = [c_void_p]
lib.bs_matmul_run.argtypes = [c_void_p, POINTER(MatmulArgs), c_void_p]
lib.bs_matmul_choice.restype = c_char_p
lib.bs_matmul_choice.argtypes = [c_void_p, POINTER(MatmulArgs)]
lib.bs_gate_grad_run.argtypes = [c_char_p, ctypes.c_int, POINTER(GateGradArgs), c_void_p]


def device_name(device):
    """ "cpu" or "gpu" for a device as TensorFlow names it."""
    return "gpu" if "GPU" in device else "cpu"


@functools.cache
def _driver():
    """CUDA's driver with the first GPU's primary context, the one that the library's runtime works in, too."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context = c_void_p()
    for error in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)):
        assert error == 0, f"CUDA driver error {error}"
    cuda.context = context
    return cuda


class Buffer:
    """Bytes on a device between two guards, all 0xff: NaN in each of our dtypes."""

    def __init__(self, device, nbytes):
        self.nbytes, self.gpu = nbytes, device == "gpu"
        total = nbytes + 2 * _GUARD
        if self.gpu:
            self.address = c_void_p()
            self._call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(total))
            self._write(self.address.value, np.full(total, 0xFF, np.uint8))
            self.pointer = self.address.value + _GUARD
        else:
            self.bytes = np.full(total + 64, 0xFF, np.uint8)
            self.bytes = self.bytes[-self.bytes.ctypes.data % 64 :][:total]
            self.pointer = self.bytes.ctypes.data + _GUARD

    def put(self, array):
        data = np.ascontiguousarray(array).view(np.uint8).ravel()
        if self.gpu:
            self._write(self.pointer, data)
        else:
            self.bytes[_GUARD : _GUARD + self.nbytes] = data
        return self

    def poke(self, offset, value):
        """Writes one byte, also in the guards."""
        if self.gpu:
            self._write(self.pointer + offset, np.array([value], np.uint8))
        else:
            self.bytes[_GUARD + offset] = value

    def get(self, shape, dtype):
        """The content; checks the guards."""
        if self.gpu:
            everything = np.empty(self.nbytes + 2 * _GUARD, np.uint8)
            self._call("cuCtxSynchronize")
            self._call(
                "cuMemcpyDtoH_v2", c_void_p(everything.ctypes.data), self.address, ctypes.c_size_t(everything.size)
            )
        else:
            everything = self.bytes
        assert (everything[:_GUARD] == 0xFF).all(), "written before the start of a buffer"
        assert (everything[_GUARD + self.nbytes :] == 0xFF).all(), "written past the end of a buffer"
        return everything[_GUARD : _GUARD + self.nbytes].copy().view(dtype).reshape(shape)

    def close(self):
        if self.gpu:
            self._call("cuMemFree_v2", self.address)

    def _write(self, pointer, data):
        self._call("cuMemcpyHtoD_v2", c_void_p(pointer), c_void_p(data.ctypes.data), ctypes.c_size_t(data.size))

    def _call(self, name, *args):
        cuda = _driver()
        error = cuda.cuCtxSetCurrent(cuda.context) or getattr(cuda, name)(*args)
        assert error == 0, f"{name}: CUDA driver error {error}"


class Buffers:
    """The operands of one call: freed together, and inputs checked to be as they were."""

    def __init__(self, device):
        self.device, self.buffers, self.inputs = device, [], []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for buffer in self.buffers:
            buffer.close()

    def input(self, array):
        """The pointer to a copy; None for None."""
        if array is None:
            return None
        array = np.ascontiguousarray(array)
        self.buffers.append(Buffer(self.device, array.nbytes).put(array))
        self.inputs.append((self.buffers[-1], array))
        return self.buffers[-1].pointer

    def output(self, nbytes):
        self.buffers.append(Buffer(self.device, nbytes))
        return self.buffers[-1]

    def check_inputs(self):
        for buffer, array in self.inputs:
            assert buffer.get(array.shape, array.dtype).tobytes() == array.tobytes(), "an input was changed"


class Matmul:
    """A handle for a layout table (int32) on "cpu" or "gpu"."""

    def __init__(self, table, device="cpu", threads=2):
        self.table, self.device = np.ascontiguousarray(table, np.int32), device
        self.handle = lib.bs_matmul_create(device.encode(), threads, self.table.ctypes.data, self.table.size)
        if not self.handle:
            raise Error(lib.bs_last_error().decode())

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        lib.bs_matmul_destroy(self.handle)

    def choice(self, product, bsize, dtype, n=1):
        """The name of the kernel that n rows of such a product take, with features last."""
        operand = np.ones(1, np.dtype(dtype))
        address = (c_void_p * 1)(operand.ctypes.data)
        ids = (DTYPES[operand.dtype],) * 2
        args = MatmulArgs(product, 1, bsize, *ids, False, 1, (c_int64 * 1)(n), address, address)
        return lib.bs_matmul_choice(self.handle, args).decode()

    def run(self, product, a, b, *, axis, bsize, gate=None, addend=None, out_dtype=None, tf32=False, change=None):
        """The result. a and b: arrays, or for a weight gradient lists of them, activations `[n, features]` with axis 1
        and `[features, n]` with axis 0. `change`: fields of the C struct to set to something
        else."""
        CB, KB, blocks = self.table[1:4].tolist()
        if product != WEIGHT_GRAD:
            a, b = [a], [b]
        n = [array.shape[1 - axis] for array in a]
        features = (KB if product == FORWARD else CB) * bsize
        if product == WEIGHT_GRAD:
            shape = (blocks, bsize, bsize)
        else:
            shape = (n[0], features) if axis == 1 else (features, n[0])
        dtype = np.dtype(a[0].dtype)
        out_dtype = np.dtype(out_dtype or dtype)
        with Buffers(self.device) as buffers:
            output = buffers.output(int(np.prod(shape)) * out_dtype.itemsize)
            fields = {
                "product": product,
                "axis": axis,
                "bsize": bsize,
                "dtype": DTYPES[dtype],
                "out_dtype": DTYPES[out_dtype],
                "tf32": tf32,
                "pairs": len(a),
                "n": (c_int64 * len(n))(*n),
                "a": (c_void_p * len(a))(*map(buffers.input, a)),
                "b": (c_void_p * len(b))(*map(buffers.input, b)),
                "gate": buffers.input(gate),
                "addend": buffers.input(addend),
                "out": output.pointer,
            }
            if lib.bs_matmul_run(self.handle, MatmulArgs(**(fields | (change or {}))), None):
                raise Error(lib.bs_last_error().decode())
            buffers.check_inputs()
            return output.get(shape, out_dtype)


def gate_grad(dw, w, gate, *, gated, out_dtype, device="cpu", threads=2):
    """`(dW, dgate)` from the weight gradient without a gate, float32 `[blocks, bsize, bsize]`."""
    blocks, bsize, _ = w.shape
    out_dtype = np.dtype(out_dtype)
    with Buffers(device) as buffers:
        dw_out, dgate = buffers.output(dw.size * out_dtype.itemsize), buffers.output(4 * blocks)
        args = GateGradArgs(
            bsize,
            blocks,
            DTYPES[np.dtype(w.dtype)],
            DTYPES[out_dtype],
            gated,
            *map(buffers.input, (dw, w, gate)),
            dw_out.pointer,
            dgate.pointer,
        )
        if lib.bs_gate_grad_run(device.encode(), threads, args, None):
            raise Error(lib.bs_last_error().decode())
        buffers.check_inputs()
        return dw_out.get(w.shape, out_dtype), dgate.get(blocks, np.float32)
