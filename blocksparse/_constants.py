"""Constants of the graph that are no variables: lookup tables that an op reads in host memory.

Eagerly and in a `tf.function` such a constant is one eager tensor on the CPU, made outside every function and shared by
all who ask for the same content. In a `tf.compat.v1` graph it is one Const per graph, made outside control dependencies
and control-flow contexts so that any later op may read it. Neither is a variable, needs an initializer or lands in a
checkpoint, and int32 tensors stay on the host, so nothing is copied to a GPU each step.
"""

import hashlib
import threading
import weakref

import numpy as np
import tensorflow as tf

__all__ = ["get_constant", "host_constant"]

# Neither cache keeps its tensors alive: objects hold eager tensors, a graph its own (so the cache holds their names).
_eager = weakref.WeakValueDictionary()
_graphs = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def host_constant(key, array, name="blocksparse/table", device=None):
    """The tensor of `array` on the host, for where the call is made; `key` stands for its content.

    Eagerly and in a `tf.function` the caller keeps the tensor alive; the cache does not. In a graph the Const is on
    `device`; None leaves it to the placer, which puts it where its readers are, where int32 is in host memory.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            with _lock:
                found = _eager.get(key)
            if found is None:
                built = _checked_constant(array)
                with _lock:
                    found = _eager.setdefault(key, built)
            return found
        graph = tf.compat.v1.get_default_graph()
        with _lock:
            names = _graphs.setdefault(graph, {})
            if key not in names:
                with tf.device(None), tf.device(device), tf.name_scope(""):
                    names[key] = tf.constant(array, name=name).name
            return graph.get_tensor_by_name(names[key])


def _checked_constant(array):
    # TensorFlow 2.21 with a GPU was seen to hand a constant to the wrong one of two threads that make one at the same
    # time. A table of another layout would be wrong for as long as it is shared, so what came back is looked at.
    for _ in range(100):
        with tf.device("/cpu:0"):
            built = tf.constant(array)
        if np.array_equal(built.numpy(), array):
            return built
    raise RuntimeError("TensorFlow did not return the constant that was asked for, 100 times in a row")


def get_constant(lut, name):
    """A constant tensor of an int32 array, the same one for equal `name` and content within one graph.

    Args:
      lut: int32 array, or what NumPy makes one of.
      name: string.
    """
    array = np.ascontiguousarray(lut, np.int32)
    return host_constant((name, array.shape, hashlib.blake2b(array, digest_size=32).digest()), array)
