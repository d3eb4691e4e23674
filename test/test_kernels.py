"""The kernels by themselves, on generated operands and on every device: no TensorFlow between operands and result."""

import os
import subprocess
import sys

import c_api
import helpers
import numpy as np
import pytest
from c_api import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Matmul
from helpers import assert_product_close, bfloat16, random_values
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse import reference as ref
from blocksparse.layout import BlockLayout

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), bfloat16]
BSIZES = [8, 16, 32, 64, 128]

# Sizes around the tiles' edges, and any.
batch_sizes = st.one_of(st.sampled_from([0, 1, 2, 7, 8, 31, 32, 33, 64, 127, 129, 257]), st.integers(0, 300))
precisions = st.sampled_from([*DTYPES, "tf32"])
seeds = st.integers(0, 2**32 - 1)


def split_precision(precision):
    """(dtype, tf32) of what `precisions` draws."""
    return (DTYPES[0], True) if precision == "tf32" else (precision, False)


def random_gate(rng, blocks):
    """Some closed, some open, some in between or negative."""
    gate = rng.standard_normal(blocks).astype(np.float32)
    return np.where(rng.random(blocks) < 0.4, rng.integers(0, 2, blocks), gate).astype(np.float32)


def activations(rng, n, features, axis, dtype):
    return random_values(rng, (n, features) if axis == 1 else (features, n), dtype)


def runs(device, table, *args, **kwargs):
    """The result, after checking that it has the same bits when run again and with any number of threads."""
    results = []
    for threads in (1, 2, 3) if device == "cpu" else (1,):
        with Matmul(table, device, threads) as matmul:
            results += [matmul.run(*args, **kwargs) for _ in range(2)]
    assert len({result.tobytes() for result in results}) == 1, "the bits differ from run to run"
    return results[0]


@settings(max_examples=60)
@given(
    layout=helpers.layouts(5, 5),
    bsize=st.sampled_from(BSIZES),
    axis=st.sampled_from([0, 1]),
    precision=precisions,
    n=batch_sizes,
    gated=st.booleans(),
    z_order=st.booleans(),
    seed=seeds,
)
def test_forward_and_input_gradient(device, layout, bsize, axis, precision, n, gated, z_order, seed):
    rng = np.random.default_rng(seed)
    dtype, tf32 = split_precision(precision)
    table = BlockLayout(layout, z_order).table
    CB, KB = layout.shape
    blocks = np.count_nonzero(layout)
    w = random_values(rng, (blocks, bsize, bsize), dtype)
    gate = random_gate(rng, blocks) if gated else None
    absolute = None if gate is None else np.abs(gate)
    for product, features, longest, oracle in (
        (FORWARD, CB, layout.sum(0).max(), ref.matmul),
        (INPUT_GRAD, KB, layout.sum(1).max(), ref.matmul_dx),
    ):
        x = activations(rng, n, features * bsize, axis, dtype)
        y = runs(c_api.device_name(device), table, product, x, w, axis=axis, bsize=bsize, gate=gate, tf32=tf32)
        expected = oracle(x, w, layout, bsize, axis, gate, z_order)
        magnitude = oracle(np.abs(x), np.abs(w), layout, bsize, axis, absolute, z_order)
        assert_product_close(y, expected, magnitude, longest * bsize, tf32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bsize", [32, 64])
@pytest.mark.parametrize("product", [FORWARD, INPUT_GRAD])
def test_long_columns(device, product, bsize, axis):
    """A reduction so long that the batch is worked on in slices, and a hub whose outputs are cut into parts."""
    rng = np.random.default_rng(bsize + axis)
    n, layout = 200, rng.random((8192 // bsize, 4)) < 0.3
    layout[:, 1] = True
    w = random_values(rng, (np.count_nonzero(layout), bsize, bsize), bfloat16)
    oracle = ref.matmul if product == FORWARD else ref.matmul_dx
    if product == INPUT_GRAD:
        layout = np.ascontiguousarray(layout.T)
    x = activations(rng, n, 8192, axis, bfloat16)
    y = runs(c_api.device_name(device), BlockLayout(layout).table, product, x, w, axis=axis, bsize=bsize)
    expected = oracle(x, w, layout, bsize, axis, None)
    magnitude = oracle(np.abs(x), np.abs(w), layout, bsize, axis, None)
    assert_product_close(y, expected, magnitude, 8192)


@settings(max_examples=60)
@given(
    layout=helpers.layouts(5, 5),
    bsize=st.sampled_from(BSIZES),
    axis=st.sampled_from([0, 1]),
    precision=precisions,
    out_float32=st.booleans(),
    ns=st.lists(batch_sizes, min_size=1, max_size=9),
    gated=st.booleans(),
    added=st.booleans(),
    seed=seeds,
)
def test_weight_gradient(device, layout, bsize, axis, precision, out_float32, ns, gated, added, seed):
    rng = np.random.default_rng(seed)
    dtype, tf32 = split_precision(precision)
    table = BlockLayout(layout).table
    CB, KB = layout.shape
    blocks = np.count_nonzero(layout)
    xs = [activations(rng, n, CB * bsize, axis, dtype) for n in ns]
    dys = [activations(rng, n, KB * bsize, axis, dtype) for n in ns]
    gate = random_gate(rng, blocks) if gated else None
    addend = random_values(rng, (blocks, bsize, bsize), np.float32) if added else None
    dw = runs(
        c_api.device_name(device),
        table,
        WEIGHT_GRAD,
        xs,
        dys,
        axis=axis,
        bsize=bsize,
        gate=gate,
        addend=addend,
        out_dtype=np.float32 if out_float32 else dtype,
        tf32=tf32,
    )
    extra = 0.0 if addend is None else addend.astype(np.float64)
    expected = ref.matmul_dw(xs, dys, layout, bsize, axis, gate, dw_gated=True) + extra
    sizes = [[np.abs(v) for v in values] for values in (xs, dys)]
    magnitude = ref.matmul_dw(*sizes, layout, bsize, axis, gate, dw_gated=True) + np.abs(extra)
    cut = dtype != np.float32 and device != "/CPU:0"
    assert_product_close(dw, expected, magnitude, sum(ns) + 1, tf32, cut)


def check_products(device, rng, layout, bsize, axis, dtype, n):
    table = BlockLayout(layout).table
    x, dy = (activations(rng, n, blocks * bsize, axis, dtype) for blocks in layout.shape)
    w = random_values(rng, (np.count_nonzero(layout), bsize, bsize), dtype)
    sizes = [np.abs(v) for v in (x, dy, w)]
    for product, oracle, a, b, terms in (
        (FORWARD, ref.matmul, 0, 2, layout.sum(0).max() * bsize),
        (INPUT_GRAD, ref.matmul_dx, 1, 2, layout.sum(1).max() * bsize),
        (WEIGHT_GRAD, ref.matmul_dw, 0, 1, max(n, 1)),
    ):
        operands = [(x, dy, w)[i] for i in (a, b)]
        lists = [[v] for v in operands] if product == WEIGHT_GRAD else operands
        y = runs(c_api.device_name(device), table, product, *lists, axis=axis, bsize=bsize)
        magnitude = oracle(sizes[a], sizes[b], layout, bsize, axis)
        assert_product_close(y, oracle(*operands, layout, bsize, axis), magnitude, terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bsize", BSIZES)
def test_each_kernel(device, rng, bsize, axis, dtype):
    for n in (1, 24, 61, 129):
        layout = helpers.random_layout(rng, int(rng.integers(1, 6)), int(rng.integers(1, 6)), rng.choice([0.2, 0.6, 1]))
        check_products(device, rng, layout, bsize, axis, dtype, n)


@pytest.mark.parametrize("bsize", [8, 32])
@pytest.mark.parametrize("axis", [0, 1])
def test_hubs_and_long_batches(device, rng, axis, bsize):
    """One full row and column, empty ones beside them, more batch than a pass of the weight gradient takes."""
    layout = np.zeros((21, 17), bool)
    layout[3], layout[:, 5] = True, True
    layout[7], layout[:, 11] = False, False
    check_products(device, rng, layout, bsize, axis, DTYPES[0], 600)
    check_products(device, rng, layout, bsize, axis, DTYPES[1], 33)


@pytest.mark.skipif("BLOCKSPARSE_CPU_ISA" in os.environ, reason="this is the process the test below starts")
@pytest.mark.parametrize("isa", ["base", "avx2", "avx512", "amx"])
def test_instruction_sets(isa):
    """The other instruction sets that this CPU has: these tests again, in a process of their own."""
    with Matmul(BlockLayout([[1]]).table) as matmul:
        if matmul.choice(FORWARD, 32, bfloat16, 16).startswith(isa):
            pytest.skip("the tests above ran it")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    command += ["-k", "not GPU and (each_kernel or weight_gradient or belong or subnormals)"]
    run = subprocess.run(command, env={**os.environ, "BLOCKSPARSE_CPU_ISA": isa}, capture_output=True, text=True)
    if "this CPU allows" in run.stdout:
        pytest.skip(f"this CPU has no {isa}")
    assert run.returncode == 0, run.stdout[-4000:]


@settings(max_examples=30)
@given(
    blocks=st.integers(1, 20),
    bsize=st.sampled_from(BSIZES),
    dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(DTYPES),
    gated=st.booleans(),
    seed=seeds,
)
def test_gate_gradient(device, blocks, bsize, dtype, out_dtype, gated, seed):
    rng = np.random.default_rng(seed)
    dw, gate = random_values(rng, (blocks, bsize, bsize), np.float32), random_gate(rng, blocks)
    w = random_values(rng, dw.shape, dtype)
    arguments = {"gated": gated, "out_dtype": out_dtype, "device": c_api.device_name(device)}
    dw_out, dgate = c_api.gate_grad(dw, w, gate, **arguments)
    again = c_api.gate_grad(dw, w, gate, threads=3, **arguments)
    assert (dw_out.tobytes(), dgate.tobytes()) == tuple(a.tobytes() for a in again)
    wide, weights = dw.astype(np.float64), w.astype(np.float64)
    expected = wide * gate[:, None, None]
    assert_product_close(dw_out, expected, np.abs(expected), 1)
    open_ = gate != 0 if gated else np.ones(blocks)
    assert_product_close(
        dgate, (wide * weights).sum((1, 2)) * open_, np.abs(wide * weights).sum((1, 2)) * open_, bsize**2
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_one_handle_serves_any_batch_size(device, rng, axis, dtype):
    layout = helpers.random_layout(rng, 4, 3, 0.5)
    w = random_values(rng, (np.count_nonzero(layout), 16, 16), dtype)
    with Matmul(BlockLayout(layout).table, c_api.device_name(device)) as matmul:
        for n in (64, 1, 0, 1000, 3, 129):
            x = activations(rng, n, 64, axis, dtype)
            y = matmul.run(FORWARD, x, w, axis=axis, bsize=16)
            magnitude = ref.matmul(np.abs(x), np.abs(w), layout, 16, axis)
            assert_product_close(y, ref.matmul(x, w, layout, 16, axis), magnitude, 64)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_32_grouped_steps_are_rounded_once(device, rng, axis, dtype):
    layout = helpers.random_layout(rng, 3, 3, 0.6)
    xs = [activations(rng, 17, 96, axis, dtype) for _ in range(32)]
    dys = [activations(rng, 17, 96, axis, dtype) for _ in range(32)]
    dw = runs(c_api.device_name(device), BlockLayout(layout).table, WEIGHT_GRAD, xs, dys, axis=axis, bsize=32)
    magnitude = ref.matmul_dw([np.abs(x) for x in xs], [np.abs(dy) for dy in dys], layout, 32, axis)
    assert_product_close(dw, ref.matmul_dw(xs, dys, layout, 32, axis), magnitude, 32 * 17)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bsize", BSIZES)
def test_nan_and_infinity_stay_where_they_belong(device, rng, bsize, axis, dtype):
    """As in a dense product over the blocks that are present; what a closed gate hides has no effect."""
    layout = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
    table, name = BlockLayout(layout).table, c_api.device_name(device)
    blocks = ref.block_ids(layout)
    w = random_values(rng, (len(blocks), bsize, bsize), dtype)
    w[blocks.index((1, 2)), 0, 1] = np.nan
    w[blocks.index((0, 1)), 1, 0] = np.inf
    gate = np.ones(len(blocks), np.float32)
    gate[blocks.index((2, 0))] = 0
    w[blocks.index((2, 0))] = np.nan
    x = activations(rng, 9, 3 * bsize, axis, dtype)
    x[(4, 2) if axis == 1 else (2, 4)] = -np.inf
    x[(5, bsize) if axis == 1 else (bsize, 5)] = np.nan
    sizes = [np.abs(v).astype(np.float64) for v in (x, w)]
    with np.errstate(invalid="ignore"):
        for product, oracle in ((FORWARD, ref.matmul), (INPUT_GRAD, ref.matmul_dx)):
            y = runs(name, table, product, x, w, axis=axis, bsize=bsize, gate=gate)
            expected = oracle(x, w, layout, bsize, axis, gate)
            assert np.isnan(expected).any() and np.isfinite(expected).any()
            assert_product_close(y, expected, oracle(*sizes, layout, bsize, axis, gate), 2 * bsize)
        dy = activations(rng, 9, 3 * bsize, axis, dtype)
        dw = runs(name, table, WEIGHT_GRAD, [x], [dy], axis=axis, bsize=bsize, gate=gate)
        expected = ref.matmul_dw(x, dy, layout, bsize, axis, gate, dw_gated=True)
        magnitude = ref.matmul_dw(np.abs(x), np.abs(dy), layout, bsize, axis, gate, dw_gated=True)
        assert_product_close(dw, expected, magnitude, 9)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_small_results_keep_their_subnormals_and_large_ones_overflow(device, dtype):
    limit = float(np.finfo(np.float16).max) if dtype == np.float16 else 2.0**127
    tiny = 2.0**-24 if dtype == np.float16 else 2.0**-133
    x, w = np.zeros((4, 8), dtype), np.zeros((1, 8, 8), dtype)
    x[:, 0] = [tiny, 3 * tiny, limit, -limit]
    w[0, 0, :] = [1, 0.5, 0.25, 2, 4, 0.75, -1, 1.5]
    y = runs(c_api.device_name(device), BlockLayout([[1]]).table, FORWARD, x, w, axis=1, bsize=8)
    expected = ref.matmul(x, w, np.ones((1, 1)), 8, 1)
    np.testing.assert_array_equal(y, helpers.round_to(expected, dtype))
    assert np.isinf(y.astype(np.float64)).any() and (y[0].astype(np.float64) == tiny).any()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("bsize", [8, 32])
def test_subnormal_operands_count_but_on_amx_tiles(device, bsize, dtype):
    table, name = BlockLayout([[1]]).table, c_api.device_name(device)
    tiny = np.array(3 * (2.0**-24 if dtype == np.float16 else 2.0**-133), dtype)
    x, w = np.full((16, bsize), tiny), np.eye(bsize, dtype=dtype)[None]
    with Matmul(table, name) as matmul:
        drops = matmul.choice(FORWARD, bsize, dtype, 16).startswith("amx")
    y = runs(name, table, FORWARD, x, w, axis=1, bsize=bsize)
    np.testing.assert_array_equal(y, np.zeros_like(x) if drops else x)


def test_the_guards_work(device):
    """A byte written before or after a buffer shows, and so does an input that changes; what is not written is NaN."""
    name = c_api.device_name(device)
    with c_api.Buffers(name) as buffers:
        assert np.isnan(buffers.output(8).get(2, np.float32)).all()
        assert np.isnan(buffers.output(8).get(4, bfloat16).astype(np.float32)).all()
        for offset, words in ((-1, "before the start"), (8, "past the end")):
            buffer = buffers.output(8)
            buffer.poke(offset, 0)
            with pytest.raises(AssertionError, match=words):
                buffer.get(2, np.float32)
        buffers.input(np.ones(2, np.float32))
        buffers.check_inputs()
        buffers.buffers[-1].poke(5, 1)
        with pytest.raises(AssertionError, match="an input was changed"):
            buffers.check_inputs()


# What is refused


def table_of(changes=None, drop=0):
    """A valid table of a 2 x 3 layout with 4 blocks, then changed in places, or cut."""
    table = BlockLayout([[1, 0, 1], [1, 1, 0]]).table.copy()
    for position, value in (changes or {}).items():
        table[position] = value
    return table[: len(table) - drop]


# Where the lists of that table begin: column_ptr [4], column_c [4], column_w [4], row_ptr [3], row_k, row_w, update
COLUMN_PTR, COLUMN_C, COLUMN_W, ROW_PTR, ROW_K, ROW_W, UPDATE = 16, 20, 24, 28, 31, 35, 39


@pytest.mark.parametrize(
    ("changes", "drop", "words"),
    [
        ({0: 2}, 0, "got version 2, this library reads version 1"),
        ({}, 40, "got 7 words, the header alone has 16"),
        ({}, 1, "got 46 words, its header asks for 47"),
        ({1: 0}, 0, "CB 0"),
        ({2: -3}, 0, "KB -3"),
        ({3: 0}, 0, "blocks 0"),
        ({3: 7}, 0, "blocks 7"),
        ({4: 0}, 0, "fingerprint"),
        ({7: 12345}, 0, "fingerprint"),
        ({8: 5}, 0, "statistics disagree with the column lists"),
        ({9: 5}, 0, "statistics disagree with the row lists"),
        ({10: 1}, 0, "statistics disagree with the column lists"),
        ({11: 1}, 0, "statistics disagree with the row lists"),
        ({COLUMN_PTR: 1}, 0, "column offsets must run from 0 to 4, got 1 to 4"),
        ({COLUMN_PTR + 3: 5}, 0, "column offsets must run from 0 to 4, got 0 to 5"),
        ({COLUMN_PTR + 1: -1}, 0, "column offset 1 is -1"),
        ({COLUMN_PTR + 1: 2**31 - 1}, 0, "column offset 1 is 2147483647"),
        ({ROW_PTR + 1: 9}, 0, "row offset 1 is 9"),
        ({COLUMN_C: 1}, 0, "column entry 0 disagrees"),
        ({COLUMN_C: -1}, 0, "column entry 0 disagrees"),
        ({COLUMN_W + 1: 4}, 0, "names block 4, allowed are 0 to 3"),
        ({ROW_W: -1}, 0, "names block -1"),
        ({ROW_K + 2: 2}, 0, "row entry 2 disagrees"),
        ({UPDATE: 2}, 0, r"block 0 lies at \(2, 0\), outside 2 x 3"),
        ({UPDATE + 1: -1}, 0, r"block 0 lies at \(0, -1\), outside 2 x 3"),
    ],
)
def test_malformed_tables(changes, drop, words):
    with pytest.raises(c_api.Error, match=words):
        Matmul(table_of(changes, drop))


def test_a_block_listed_twice_is_refused():
    table = table_of()
    first, second = slice(UPDATE, UPDATE + 2), slice(UPDATE + 2, UPDATE + 4)
    table[second] = table[first]
    with pytest.raises(c_api.Error, match="disagrees with the update list"):
        Matmul(table)


@given(helpers.layouts(), st.booleans(), st.data())
def test_no_changed_table_passes(layout, z_order, data):
    """Whatever word of a table is changed, except the four that mean nothing, the table is refused."""
    table = BlockLayout(layout, z_order).table.copy()
    Matmul(table).__exit__()
    position = data.draw(st.sampled_from([i for i in range(len(table)) if not 12 <= i < 16]))
    change = data.draw(st.one_of(st.integers(-3, 3), st.integers(-(2**31), 2**31 - 1)).filter(bool))
    table[position : position + 1] += np.array([change]).astype(np.int32)
    with pytest.raises(c_api.Error, match="layout table"):
        Matmul(table)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"product": 3}, "product must be .* got 3"),
        ({"axis": 2}, "axis must be 0 or 1, got 2"),
        ({"bsize": 24}, "block size must be 8, 16, 32, 64 or 128, got 24"),
        ({"dtype": 3}, "dtype must be .* got 3"),
        ({"out_dtype": -1}, "out_dtype must be .* got -1"),
        ({"out_dtype": 1}, "only a weight gradient"),
        ({"pairs": 2}, "only a weight gradient"),
        ({"addend": 1}, "only a weight gradient"),
        ({"pairs": 0, "product": 2}, "at least one pair, got 0"),
        ({"n": (c_api.c_int64 * 1)(-1)}, "at least 0 .* got -1"),
        ({"n": (c_api.c_int64 * 1)(2**62)}, r"below 2\^60"),
        ({"n": None}, "arrays n, a and b are missing"),
    ],
)
def test_malformed_calls(change, words):
    x, w = np.zeros((5, 16), np.float32), np.zeros((4, 8, 8), np.float32)
    with Matmul(table_of()) as matmul, pytest.raises(c_api.Error, match=words):
        matmul.run(FORWARD, x, w, axis=1, bsize=8, change=change)


def test_malformed_handles():
    with pytest.raises(c_api.Error, match='device must be "cpu" or "gpu", got "tpu"'):
        Matmul(table_of(), "tpu")
    with pytest.raises(c_api.Error, match="threads must be at least 1, got 0"):
        Matmul(table_of(), threads=0)
