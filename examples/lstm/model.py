"""The recurrent byte-level language model of "GPU Kernels for Block-Sparse Weights" (Gray, Radford, Kingma, 2017).

Every `lin` of the cell is a matrix product, dense or block-sparse, followed by layer norm with gain and bias. A weight
is used once per time step; its gradient is computed once for all of them, from a list of (activation, gradient) pairs.
"""

import numpy as np
import tensorflow as tf
from data import VOCABULARY

from blocksparse.embed import embedding_lookup
from blocksparse.lstm import fused_lstm_gates
from blocksparse.matmul import BlocksparseMatMul
from blocksparse.norms import layer_norm
from blocksparse.topology import make_layout


def cell(lin, internal_steps, axis, x, h, c):
    """One time step.

    Args:
      lin: `lin(name, x)` gives the layer-normed product of x with the weight of that name.
      internal_steps: at least 2: steps that mix the state before the gates are computed from it (the paper's D).
      axis: feature axis of all activations.
      x: the input byte's features.
      h, c: the state.

    Returns:
      The next (h, c).
    """
    h = lin("multiply_x", x) * lin("multiply", h)
    h = tf.nn.relu(lin("add_x", x) + lin("add", h))
    for step in range(2, internal_steps):
        h = tf.nn.relu(lin(f"mix{step}", h))
    gates = lin("gates", h)  # i, u, f and o
    c, h = fused_lstm_gates(c, *([gates] if axis else tf.split(gates, 4)))
    return h, c


def unroll(step, products, inputs, state, weights, parameters):
    """Runs a recurrent step over time, with one grouped gradient for each weight.

    Plain differentiation makes as many gradients of a weight as there are time steps, and adds them up. Here the inner
    tape differentiates everything but the weights, down to the outputs of their products; `weight_grad` does the rest.

    Args:
      step: `step(product, inputs, state, parameters)` gives the next state; `product(name, x)` multiplies x by the
        weight of that name.
      products: name -> BlocksparseMatMul or DenseMatMul.
      inputs: tensor `[time, ...]`.
      state: tuple of tensors, the first of which is the output.
      weights: name -> tensor.
      parameters: whatever else `step` depends on and gradients are wanted for, as a nest of tensors.

    Returns:
      (list of outputs, one per time step; the last state).
    """

    @tf.custom_gradient
    def run(inputs, state, weights, parameters):
        calls = {name: [] for name in products}

        def product(name, x):
            x = tf.cast(x, weights[name].dtype)
            y = products[name](x, weights[name])
            calls[name].append((x, y))
            return y

        sources = (inputs, state, parameters)
        outputs = []
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            for now in tf.unstack(inputs):
                state = step(product, now, state, parameters)
                outputs.append(state[0])

        def backward(*upstream):
            xs = {name: [x for x, _ in calls[name]] for name in products}
            ys = {name: [y for _, y in calls[name]] for name in products}
            (d_inputs, d_state, d_parameters), dys = tape.gradient((outputs, state), (sources, ys), list(upstream))
            d_weights = {
                name: products[name].weight_grad(xs[name], dys[name], dw_dtype=tf.float32) for name in products
            }
            return tf.nest.flatten((d_inputs, d_state, d_weights, d_parameters))

        return (outputs, state), backward

    return run(inputs, state, weights, parameters)


class LanguageModel(tf.Module):
    """Predicts the next byte.

    Args:
      products: name -> BlocksparseMatMul or DenseMatMul, for the names of `cell` and for "output".
      internal_steps: see `cell`.
      precision: dtype of the operands of products; variables, layer norm and state are float32.
      seed: of the initial weights.
    """

    def __init__(self, products, internal_steps, precision="float32", seed=0):
        super().__init__()
        self.products, self.internal_steps, self.precision = products, internal_steps, precision
        self.axis, self.width = products["output"].axis, products["output"].C
        self.embedding = tf.Variable(tf.random.stateless_normal((VOCABULARY, products["add_x"].C), (seed, 0)))
        self.weights, self.norms = {}, {}
        for index, (name, product) in enumerate(products.items(), 1):
            fan_in = np.prod(product.w_shape) / product.K  # the mean, where layouts are uneven
            normal = tf.random.stateless_normal(product.w_shape, (seed, index))
            self.weights[name] = tf.Variable(normal / fan_in**0.5, name=name)
            if name != "output":
                self.norms[name] = tf.Variable(tf.ones(product.K)), tf.Variable(tf.zeros(product.K))
        self.output_bias = tf.Variable(tf.zeros(VOCABULARY))

    def zero_state(self, batch):
        shape = (batch, self.width) if self.axis else (self.width, batch)
        return tf.zeros(shape), tf.zeros(shape)

    def __call__(self, bytes_in, state):
        """Reads a window.

        Args:
          bytes_in: int32 `[batch, time]`.
          state: (h, c) as `zero_state` or the last call gave it.

        Returns:
          (float32 logits of the next bytes `[time * batch, 256]`, time by time; the state after the window).
        """
        xs = embedding_lookup(self.embedding, tf.transpose(bytes_in))  # [time, batch, embedding]
        if self.axis == 0:
            xs = tf.transpose(xs, (0, 2, 1))
        weights = {name: tf.cast(weight, self.precision) for name, weight in self.weights.items()}
        output_weight = weights.pop("output")
        products = {name: self.products[name] for name in weights}
        norms = tf.nest.map_structure(tf.convert_to_tensor, self.norms)
        hs, state = unroll(self._step, products, xs, state, weights, norms)

        h = tf.cast(tf.concat(hs, 1 - self.axis), self.precision)
        logits = tf.cast(self.products["output"](h, output_weight), tf.float32)
        return (logits if self.axis else tf.transpose(logits)) + self.output_bias, state

    def _step(self, product, x, state, norms):
        def lin(name, x):
            y = tf.cast(product(name, x), tf.float32)
            return layer_norm(y, *norms[name], axis=self.axis, segments=y.shape[self.axis] // self.width)

        return cell(lin, self.internal_steps, self.axis, x, *state)


def make_products(width, internal_steps, layout="dense", density=None, block_size=16, embedding=64, axis=1, seed=0):
    """The matrix products of a `LanguageModel`.

    In a block-sparse model every internal step and every gate has a layout of its own. Where the recurrent weights have
    density d, input and output have sqrt(d), balanced: the former grow with the square of the width, the latter with
    the width. So there are as many weights as in a dense model of width `width * sqrt(d)`.

    Args:
      width: units of the state.
      internal_steps: see `cell`.
      layout: "dense", or the topology of the recurrent weights, a key of `blocksparse.topology.TOPOLOGIES`.
      density: share of blocks that are present in the recurrent weights.
      block_size: 8, 16, 32, 64 or 128; must divide width, embedding and 256.
      embedding: features that stand for a byte.
      axis: feature axis of activations.
      seed: of the layouts.

    Returns:
      name -> BlocksparseMatMul or DenseMatMul.
    """
    if internal_steps < 2:
        raise ValueError(f"internal_steps must be at least 2, got {internal_steps}")
    shapes = {"multiply_x": (embedding, width, 1), "add_x": (embedding, width, 1), "output": (width, VOCABULARY, 1)}
    shapes |= {name: (width, width, 1) for name in ("multiply", "add")}
    shapes |= {f"mix{step}": (width, width, 1) for step in range(2, internal_steps)}
    shapes |= {"gates": (width, width, 4)}
    if layout == "dense":
        return {name: DenseMatMul(C, parts * K, axis) for name, (C, K, parts) in shapes.items()}
    if density is None:
        raise ValueError(f"layout {layout} needs a density")
    if any(size % block_size for size in (width, embedding, VOCABULARY)):
        raise ValueError(
            f"block_size must divide width, embedding and {VOCABULARY}, got block_size {block_size}, "
            f"width {width} and embedding {embedding}"
        )
    products = {}
    for index, (name, (C, K, parts)) in enumerate(shapes.items()):
        recurrent = name not in ("multiply_x", "add_x", "output")
        blocks = [
            make_layout(
                layout if recurrent else "balanced_random",
                C // block_size,
                K // block_size,
                density if recurrent else density**0.5,
                (seed, index, part),
            )
            for part in range(parts)
        ]
        products[name] = BlocksparseMatMul(np.concatenate(blocks, axis=1), block_size, axis, name=name)
    return products


class DenseMatMul:
    """A dense product behind the interface of BlocksparseMatMul.

    Args:
      C, K: input and output features.
      feature_axis: 0: x `[C, N]`, y `[K, N]`; 1: x `[N, C]`, y `[N, K]`.
    """

    def __init__(self, C, K, feature_axis):
        self.axis, self.C, self.K, self.w_shape = feature_axis, C, K, (C, K)

    def __call__(self, x, w):
        return tf.matmul(x, w) if self.axis else tf.matmul(w, x, transpose_a=True)

    def weight_grad(self, xs, dys, dw_dtype):
        x, dy = tf.concat(xs, 1 - self.axis), tf.concat(dys, 1 - self.axis)
        return tf.cast(tf.matmul(x, dy, transpose_a=bool(self.axis), transpose_b=not self.axis), dw_dtype)
