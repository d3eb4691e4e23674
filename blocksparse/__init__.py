"""Block-sparse linear algebra for TensorFlow, on GPUs and CPUs."""

from blocksparse.matmul import (
    BlocksparseMatMul,
    SparseProj,
    block_reduced_full_dw,
    get_bsmm_dx_ops,
    group_param_grads,
)
from blocksparse.utils import (
    _op_module,
    ceil_div,
    reduce_mul,
    reset_scalar_constants,
    scalar_constant,
)

__version__ = "0.1.0"

__all__ = [
    "BlocksparseMatMul",
    "SparseProj",
    "_op_module",
    "block_reduced_full_dw",
    "ceil_div",
    "get_bsmm_dx_ops",
    "group_param_grads",
    "reduce_mul",
    "reset_scalar_constants",
    "scalar_constant",
]
