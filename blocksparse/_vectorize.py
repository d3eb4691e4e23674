"""What the conversions of ops by `tf.vectorized_map` share: operands that may not be mapped, conversion by a loop."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor


def check_unmapped(pfor_input, inputs: dict[int, str]) -> None:
    """Raises ValueError where one of the inputs, `{index: what it is}`, differs between elements of the map."""
    for index, what in inputs.items():
        if pfor_input.input(index).is_stacked:
            raise ValueError(
                f"{pfor_input.op_type}: {what} must be the same for all elements under tf.vectorized_map, got one that "
                "differs between them. Map over activations only, or use tf.map_fn"
            )


def by_loop(pfor_input, op, attrs: dict, signature):
    """Each element has sums, or random bits, of its own: a loop of launches, each like the op's.

    Args:
      op: takes the op's inputs and `attrs`, gives a tensor or several.
      signature: dtypes of what it gives, a tuple.
    """
    count = pfor_input.num_inputs
    mapped = [i for i in range(count) if pfor_input.input(i).is_stacked]

    def one(elements):
        values = dict(zip(mapped, elements))
        outputs = op(*(values[i] if i in values else pfor_input.input(i).t for i in range(count)), **attrs)
        return (outputs,) if tf.is_tensor(outputs) else tuple(outputs)

    stacked = tf.map_fn(one, [pfor_input.input(i).t for i in mapped], fn_output_signature=signature)
    return [pfor.wrap(v, True) for v in stacked]


def attributes(op, names) -> dict:
    return {name: op.get_attr(name) for name in names}
