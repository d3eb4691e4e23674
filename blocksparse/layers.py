"""Keras 3 layers over the block-sparse ops."""

from __future__ import annotations

import base64
import copy
import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from blocksparse import topology as topologies
from blocksparse.lstm import fused_lstm_gates
from blocksparse.matmul import BlocksparseMatMul

__all__ = ["BlocksparseDense", "FusedLSTMCell"]


@keras.saving.register_keras_serializable(package="blocksparse")
class BlocksparseDense(keras.layers.Layer):
    """A densely connected layer of which only some blocks of the weight exist: `activation(inputs Wd + bias)`.

    Inputs `[batch, ..., C]`, outputs `[batch, ..., units]`; C and units are multiples of the block size. The kernel is
    a variable `[blocks, block_size, block_size]`, see `BlocksparseMatMul`. Works under `fit` with default arguments,
    mixed-precision policies and distribution strategies. There are no XLA kernels: `jit_compile` is off for models
    with this layer.

    Args:
      units: number of output features.
      layout: `[C / block_size, units / block_size]` array, other than 0 where a block is present.
      density: instead of a layout: the share of blocks that are present, in a layout from `topology`.
      topology: a name in `blocksparse.topology.TOPOLOGIES`.
      seed: int, of the topology; None draws one from Python's `random`, as `keras.utils.set_random_seed` sets it.
      block_size: 8, 16, 32, 64 or 128.
      activation, use_bias, bias_initializer, kernel_regularizer, bias_regularizer, activity_regularizer,
        kernel_constraint, bias_constraint: as for `keras.layers.Dense`. Regularizer and constraint see the kernel as
        it is stored.
      kernel_initializer: a Keras initializer. Those that scale by fan-in or fan-out (`glorot_uniform`, `he_normal`,
        ...) count the inputs and outputs that a unit has on average; `identity` is `BlocksparseMatMul.identity_init`.

    Attributes:
      bsmm: the `BlocksparseMatMul`, once built.
      kernel, bias: the variables, once built.
    """

    def __init__(
        self,
        units: int,
        layout=None,
        density: float | None = None,
        topology: str = "balanced_random",
        seed: int | None = None,
        block_size: int = 32,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        **kwargs,
    ):
        super().__init__(activity_regularizer=activity_regularizer, **kwargs)
        if (layout is None) == (density is None):
            raise ValueError(f"give either a layout or a density, got layout {layout!r} and density {density!r}")
        if topology not in topologies.TOPOLOGIES:
            raise ValueError(f"topology must be one of {', '.join(topologies.TOPOLOGIES)}, got {topology!r}")
        if units < 1 or units % block_size:
            raise ValueError(f"units must be a positive multiple of the block size ({block_size}), got {units}")
        self.supports_jit = False
        self.units, self.block_size = units, block_size
        self.density, self.topology = density, topology
        self.seed = random.randint(0, 2**31 - 1) if seed is None else seed
        self.layout = None if layout is None else _decode(layout)
        if self.layout is not None and self.layout.shape[1] * block_size != units:
            raise ValueError(
                f"layout must have {units // block_size} columns for {units} units at block size {block_size}, "
                f"got {self.layout.shape[1]}"
            )
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.bsmm = self.kernel = self.bias = None
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def build(self, input_shape):
        features = input_shape[-1]
        if features is None or features % self.block_size:
            raise ValueError(
                f"the number of input features must be a multiple of the block size ({self.block_size}), got {features}"
            )
        CB, KB = features // self.block_size, self.units // self.block_size
        if self.layout is None:
            self.layout = topologies.make_layout(self.topology, CB, KB, self.density, self.seed)
        if self.layout.shape[0] != CB:
            raise ValueError(
                f"layout must have {CB} rows for {features} input features at block size {self.block_size}, "
                f"got {self.layout.shape[0]}"
            )
        self.bsmm = BlocksparseMatMul(self.layout, self.block_size, feature_axis=1, name=self.name)
        self.kernel = self.add_weight(
            name="kernel",
            shape=self.bsmm.w_shape,
            initializer=self._block_initializer(),
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})
        self.built = True

    def _block_initializer(self):
        initializer = self.kernel_initializer
        if isinstance(initializer, keras.initializers.Identity):
            return self.bsmm.identity_init(initializer.gain)
        if isinstance(initializer, keras.initializers.VarianceScaling):
            # Keras takes [blocks, b, b] for a convolution with blocks * b inputs and as many outputs. A unit has, on
            # average, that divided by KB inputs and by CB outputs.
            CB, KB = self.bsmm.CB, self.bsmm.KB
            initializer = copy.copy(initializer)
            initializer.scale *= {"fan_in": KB, "fan_out": CB, "fan_avg": 2 / (1 / CB + 1 / KB)}[initializer.mode]
        return initializer

    def call(self, inputs):
        outputs = self.bsmm(inputs, self.kernel)
        if self.use_bias:
            outputs = tf.add(outputs, self.bias)
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)

    def get_config(self):
        config = super().get_config()
        # A layout that came from a density is as fixed as the kernel once that exists.
        config.update(
            units=self.units,
            layout=None if self.layout is None else _encode(self.layout),
            density=self.density if self.layout is None else None,
            topology=self.topology,
            seed=self.seed,
            block_size=self.block_size,
            activation=keras.activations.serialize(self.activation),
            use_bias=self.use_bias,
            kernel_initializer=keras.initializers.serialize(self.kernel_initializer),
            bias_initializer=keras.initializers.serialize(self.bias_initializer),
            kernel_regularizer=keras.regularizers.serialize(self.kernel_regularizer),
            bias_regularizer=keras.regularizers.serialize(self.bias_regularizer),
            activity_regularizer=keras.regularizers.serialize(self.activity_regularizer),
            kernel_constraint=keras.constraints.serialize(self.kernel_constraint),
            bias_constraint=keras.constraints.serialize(self.bias_constraint),
        )
        return config


def _encode(layout):
    """A layout as JSON can hold it: its shape, and its bits row by row in base64."""
    return {"shape": list(layout.shape), "bits": base64.b64encode(np.packbits(layout)).decode()}


def _decode(layout):
    if not isinstance(layout, dict):
        layout = np.asarray(layout)
        if layout.ndim != 2:
            raise ValueError(f"layout must be two-dimensional, got shape {layout.shape}")
        return layout != 0
    shape = layout["shape"]
    bits = np.frombuffer(base64.b64decode(layout["bits"]), np.uint8)
    return np.unpackbits(bits, count=shape[0] * shape[1]).reshape(shape).astype(bool)


@keras.saving.register_keras_serializable(package="blocksparse")
class FusedLSTMCell(keras.layers.Layer):
    """An LSTM cell with fused gates, for `keras.layers.RNN`.

    Inputs `[batch, features]`, states h and c `[batch, units]`; gives `(h, [h, c])`. Weights are those of
    `keras.layers.LSTMCell`, kernel `[features, 4 units]`, recurrent kernel `[units, 4 units]` and bias `[4 units]`, but
    for the order of gates: i, u (Keras: c), f, o. Under mixed precision the bias stays float32. There are no XLA
    kernels: `jit_compile` is off for models with this layer.

    Args:
      units: number of units.
      forget_bias: number, added to the forget gate's argument. (Keras puts it into the bias's initial value.)
      use_bias, kernel_initializer, recurrent_initializer, bias_initializer, kernel_regularizer, recurrent_regularizer,
        bias_regularizer: as for `keras.layers.LSTMCell`.
    """

    def __init__(
        self,
        units: int,
        forget_bias: float = 1.0,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if units < 1:
            raise ValueError(f"units must be at least 1, got {units}")
        self.supports_jit = False
        self.units, self.forget_bias, self.use_bias = units, forget_bias, use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.recurrent_initializer = keras.initializers.get(recurrent_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = keras.regularizers.get(recurrent_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.state_size, self.output_size = [units, units], units
        self.kernel = self.recurrent_kernel = self.bias = None

    def build(self, input_shape):
        width = 4 * self.units
        self.kernel = self.add_weight(
            name="kernel",
            shape=(input_shape[-1], width),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
        )
        self.recurrent_kernel = self.add_weight(
            name="recurrent_kernel",
            shape=(self.units, width),
            initializer=self.recurrent_initializer,
            regularizer=self.recurrent_regularizer,
        )
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(width,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                dtype="float32",
                autocast=False,
            )
        self.built = True

    def call(self, inputs, states, training=False):
        h, c = states
        gates = tf.matmul(inputs, self.kernel) + tf.matmul(h, self.recurrent_kernel)
        bias = None if self.bias is None else tf.convert_to_tensor(self.bias)
        c, h = fused_lstm_gates(c, gates, bias=bias, forget_bias=self.forget_bias)
        return h, [h, c]

    def get_initial_state(self, batch_size=None):
        return [tf.zeros((batch_size, self.units), self.compute_dtype) for _ in range(2)]

    def get_config(self):
        config = super().get_config()
        config.update(
            units=self.units,
            forget_bias=self.forget_bias,
            use_bias=self.use_bias,
            kernel_initializer=keras.initializers.serialize(self.kernel_initializer),
            recurrent_initializer=keras.initializers.serialize(self.recurrent_initializer),
            bias_initializer=keras.initializers.serialize(self.bias_initializer),
            kernel_regularizer=keras.regularizers.serialize(self.kernel_regularizer),
            recurrent_regularizer=keras.regularizers.serialize(self.recurrent_regularizer),
            bias_regularizer=keras.regularizers.serialize(self.bias_regularizer),
        )
        return config
