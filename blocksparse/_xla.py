"""What every wrapper says where its op would be compiled by XLA."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


def check_not_xla(what: str) -> None:
    """Raises NotImplementedError in a function with `jit_compile=True`; `what` is the name of the caller."""
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise NotImplementedError(
            f"{what}: blocksparse ops have no XLA kernels and cannot be part of a function with jit_compile=True. "
            "Use tf.function without it, or model.compile(jit_compile=False)"
        )
