"""MKL's block-sparse-rows product by ctypes, where its single library is installed: a peer of the benchmark."""

import ctypes
import ctypes.util
import pathlib
import sys

import numpy as np


class _Descriptor(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("mode", ctypes.c_int), ("diag", ctypes.c_int)]


_NON_TRANSPOSED, _GENERAL, _ROW_MAJOR, _ZERO_BASED = 10, 20, 101, 0


def load():
    """MKL's library, or None."""
    found = sorted(pathlib.Path(sys.prefix, "lib").glob("libmkl_rt.so*")) or [ctypes.util.find_library("mkl_rt")]
    try:
        return ctypes.CDLL(str(found[0])) if found[0] else None
    except OSError:
        return None


class Product:
    """y [K, N] = Wd^T x [C, N] of a SciPy BSR matrix Wd^T, in float32; call it, then read `y`."""

    def __init__(self, library, matrix, x):
        self.library, self.x = library, np.ascontiguousarray(x)
        self.y = np.zeros((matrix.shape[0], x.shape[1]), np.float32)
        pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
        self.arrays = [np.ascontiguousarray(matrix.indptr, np.int32), np.ascontiguousarray(matrix.indices, np.int32)]
        self.values = np.ascontiguousarray(matrix.data, np.float32)
        rows, bsize = matrix.shape[0] // matrix.blocksize[0], matrix.blocksize[0]
        self.handle, starts = ctypes.c_void_p(), self.arrays[0]
        status = library.mkl_sparse_s_create_bsr(
            *(ctypes.byref(self.handle), _ZERO_BASED, _ROW_MAJOR, rows, matrix.shape[1] // bsize, bsize),
            *(pointer(starts), pointer(starts[1:]), pointer(self.arrays[1]), pointer(self.values)),
        )
        if status != 0:
            raise RuntimeError(f"mkl_sparse_s_create_bsr gave status {status}")
        self.pointers = pointer(self.x), pointer(self.y)

    def __call__(self):
        n = self.x.shape[1]
        status = self.library.mkl_sparse_s_mm(
            *(_NON_TRANSPOSED, ctypes.c_float(1), self.handle, _Descriptor(_GENERAL, 0, 0), _ROW_MAJOR),
            *(self.pointers[0], n, n, ctypes.c_float(0), self.pointers[1], n),
        )
        if status != 0:
            raise RuntimeError(f"mkl_sparse_s_mm gave status {status}")

    def __del__(self):
        if getattr(self, "handle", None):
            self.library.mkl_sparse_destroy(self.handle)
