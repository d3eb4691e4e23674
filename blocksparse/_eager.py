"""One eager call at a time where operands may come from another device.

TensorFlow runs an eager op as a function. Where an operand lies on another device than the op (the layout's table, and
every other int32, is in the CPU's memory), the function fetches it over a rendezvous, and threads that run the same op
at once overwrite each other's (seen in TensorFlow 2.21 with its own ops too, `tf.fill` among them): a thread may then
get another thread's operand. Nothing of this concerns graphs, sessions, or a machine with one device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType

_lock = threading.Lock()
_one_device: bool | None = None  # not known yet


def one_at_a_time(op_module: ModuleType) -> None:
    """Puts every op of the module behind one lock, taken in eager mode where TensorFlow sees several devices."""
    import tensorflow as tf
    from tensorflow.python.autograph.impl.api import autograph_artifact

    def guard(op: Callable) -> Callable:
        @functools.wraps(op)
        def call(*args, **kwargs):
            global _one_device
            if _one_device or not tf.executing_eagerly():
                return op(*args, **kwargs)
            if _one_device is None:  # TensorFlow is initialized by this call at the latest, and keeps its devices
                _one_device = len(tf.config.list_logical_devices()) == 1
                return call(*args, **kwargs)
            with _lock:
                return op(*args, **kwargs)

        return autograph_artifact(call)  # AutoGraph must not look for its source

    for name in [name for name in vars(op_module) if f"{name}_eager_fallback" in vars(op_module)]:
        setattr(op_module, name, guard(getattr(op_module, name)))
