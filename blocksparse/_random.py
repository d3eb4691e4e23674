"""Seeds of the random ops: two int32 on the host, a new pair for each call.

Without `set_entropy` seeds come from TensorFlow's own generator, so `tf.random.set_seed` makes a program repeatable.
After it they come from the entropy variable, so each process can have a reproducible stream of its own.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import tensorflow as tf

__all__ = ["draw_seed", "entropy_size", "get_entropy", "set_entropy"]

entropy_size = 80 * 3 * 1024  # elements that callers of the original package gave as `init`; any size will do

_graphs = weakref.WeakKeyDictionary()  # v1 graph: its _GraphEntropy
_eager = None  # the variable of eager mode and of functions called from it
_lock = threading.Lock()


class _GraphEntropy:
    def __init__(self, variable):
        self.variable = variable
        self.draws = 0  # ops that draw, in the order in which they were added to the graph


def set_entropy(init=None) -> None:
    """Makes random ops draw their seeds from an entropy variable, in place of TensorFlow's generator.

    `np.random.seed(rank); set_entropy()` gives each process its own reproducible stream. In eager mode and in functions
    it holds from then on; in a v1 graph for the ops that are added to that graph afterwards, and the variable has to be
    initialized with the others.

    The variable is int64 `[3]`, not trainable, named "Entropy": the counter and the key of a Philox generator.

    Args:
      init: what the key is made from: array, tensor or variable, any shape and number type. Default: 64 bits from
        `np.random`.
    """
    global _eager
    if init is None:
        init = np.random.randint(-(2**31), 2**31, 2, np.int64)  # noqa: NPY002 (what np.random.seed controls)
    with tf.device("/cpu:0"):
        content = tf.io.serialize_tensor(tf.convert_to_tensor(init))
        key = tf.strings.to_hash_bucket_strong(content, 2**63 - 1, [0x243F6A88, 0x13198A2E])
        with tf.init_scope():
            variable = tf.Variable(tf.stack([0, 0, key]), trainable=False, name="Entropy", dtype=tf.int64)
    graph = _root_graph()
    with _lock:
        if graph is None:
            _eager = variable
        else:
            _graphs[graph] = _GraphEntropy(variable)


def get_entropy() -> tf.Variable:
    """The entropy variable of the graph that is being built, or of eager mode.

    Raises:
      ValueError: `set_entropy` has not been called.
    """
    graph = _root_graph()
    variable = _eager if graph is None else getattr(_graphs.get(graph), "variable", None)
    if variable is None:
        raise ValueError("Call bs.set_entropy() after creating Session, then init global variables.")
    return variable


def draw_seed() -> tf.Tensor:
    """A new seed, int32 `[2]` on the host."""
    graph = _root_graph()
    with tf.device("/cpu:0"):
        if graph is None:
            if _eager is None:
                return _tensorflow_seed()
            return tf.random.Generator.from_state(_eager, "philox").uniform_full_int([2], tf.int32)
        with _lock:
            entropy = _graphs.get(graph)
            if entropy is None:
                return _tensorflow_seed()
            place, entropy.draws = entropy.draws, entropy.draws + 1
        # A session runs ops in any order, so that a counter shared between them would give each another number from run
        # to run. The op below has a counter of its own.
        key = tf.bitcast(entropy.variable.read_value()[2], tf.int32)
        return tf.bitwise.bitwise_xor(key, _tensorflow_seed(place))


def _root_graph():
    """The v1 graph that is being built, within whatever functions and loops; None in eager mode."""
    with tf.init_scope():
        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _tensorflow_seed(seed=None):
    return tf.random.uniform([2], tf.int32.min, tf.int32.max, tf.int32, seed)
