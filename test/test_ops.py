"""The ops below the Python classes: what they refuse, in eager calls and in hand-made graphs; tables that change from
call to call; sessions and threads side by side."""

import threading

import helpers
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_product_close, bfloat16, random_layout, random_values

from blocksparse import reference as ref
from blocksparse._library import op_module as ops
from blocksparse.layout import BlockLayout

tf1 = tf.compat.v1

LAYOUT = np.array([[1, 0, 1], [1, 1, 0]])  # CB 2, KB 3, 4 blocks
TABLE = BlockLayout(LAYOUT).table
# Where the lists of TABLE begin: column_ptr [4], column_c [4], column_w [4], row_ptr [3], row_k [4], row_w [4], update
FINGERPRINT, COLUMN_PTR, COLUMN_C, COLUMN_W, ROW_PTR, ROW_K, ROW_W, UPDATE = 4, 16, 20, 24, 28, 31, 35, 39


def changed(position, value):
    table = TABLE.copy()
    table[position] = value
    return table


def another_table(layout):
    """The table of another layout, with the fingerprint of LAYOUT's."""
    table = BlockLayout(layout).table.copy()
    table[FINGERPRINT : FINGERPRINT + 4] = TABLE[FINGERPRINT : FINGERPRINT + 4]
    return table


def call(name, dtype=np.float32, **change):
    """(op name, inputs by name, attributes) of a valid call with LAYOUT, bsize 8 and 5 samples, then changed."""
    x, dy = np.ones((5, 16), dtype), np.ones((5, 24), dtype)
    w, gate = np.ones((4, 8, 8), dtype), np.ones(4, np.float32)
    attrs = {"axis": 1, "bsize": 8, "C": 16, "K": 24}
    inputs = {"table": TABLE, "gate": [gate]}
    if name == "blocksparse_matmul":
        inputs |= {"x": x, "w": w}
    elif name == "blocksparse_matmul_dx":
        inputs |= {"dy": dy, "w": w}
    elif name == "blocksparse_matmul_dg":
        inputs, attrs = {"dw": w.astype(np.float32), "w": w, "gate": gate}, {"bsize": 8, "dw_dtype": dtype}
    else:
        inputs |= {"x": [x, x], "dy": [dy, dy]}
        attrs |= {"dw_dtype": dtype, "gated_dw": True}
        if name == "blocksparse_matmul_dwa":
            inputs["dwi"] = np.ones((4, 8, 8), np.float32)
    for key, value in change.items():
        (inputs if key in inputs else attrs)[key] = value
    return name, inputs, attrs


def run_eagerly(device, name, inputs, attrs):
    with tf.device(device):
        return getattr(ops, name)(**inputs, **attrs)


def run_in_a_graph(device, name, inputs, attrs):
    """Fed through placeholders of unknown shape, so that only the kernel can tell what is wrong."""
    feeds = {}

    def placeholder(value):
        if isinstance(value, list):
            return [placeholder(item) for item in value]
        with tf.device("/CPU:0"):
            tensor = tf1.placeholder(value.dtype)
        feeds[tensor] = value
        return tensor

    with tf.Graph().as_default(), tf1.Session() as session:
        inputs = {key: placeholder(np.asarray(v) if not isinstance(v, list) else v) for key, v in inputs.items()}
        with tf.device(device):
            outputs = getattr(ops, name)(**inputs, **attrs)
        return session.run(outputs, feeds)


PRODUCTS = ["blocksparse_matmul", "blocksparse_matmul_dx", "blocksparse_matmul_dw", "blocksparse_matmul_dwa"]
OPS = [*PRODUCTS, "blocksparse_matmul_dg"]
RUNS = pytest.mark.parametrize("run", [run_eagerly, run_in_a_graph])


@RUNS
@pytest.mark.parametrize("name", OPS)
def test_the_calls_that_are_changed_below_are_valid(device, run, name):
    results = run(device, *call(name))
    assert all(np.isfinite(np.asarray(result)).all() for result in tf.nest.flatten(results))


f32 = np.float32
OPERANDS = [
    ("blocksparse_matmul", {"x": np.ones((5, 24), f32)}, r"x must have 16 features in its last dimension .* \[5,24\]"),
    ("blocksparse_matmul", {"x": np.ones((16, 5), f32)}, r"x must have 16 features in its last dimension .* \[16,5\]"),
    ("blocksparse_matmul", {"x": np.float32(1)}, r"x must have 16 features .* got \[\]"),
    (
        "blocksparse_matmul",
        {"x": np.ones((5, 16), f32), "axis": 0},
        r"16 features in its first .* \[5,16\]",
    ),
    ("blocksparse_matmul_dx", {"dy": np.ones((5, 16), f32)}, r"dy must have 24 features .* \[5,16\]"),
    ("blocksparse_matmul", {"w": np.ones((3, 8, 8), f32)}, r"w must be \[4,8,8\] .* got \[3,8,8\]"),
    ("blocksparse_matmul", {"w": np.ones((4, 8, 16), f32)}, r"w must be \[4,8,8\] .* got \[4,8,16\]"),
    ("blocksparse_matmul_dx", {"w": np.ones((4, 64), f32)}, r"w must be \[4,8,8\] .* got \[4,64\]"),
    ("blocksparse_matmul", {"gate": [np.ones(3, f32)]}, r"gate must be \[4\] .* got \[3\]"),
    ("blocksparse_matmul_dx", {"gate": [np.ones((4, 1), f32)]}, r"gate must be \[4\] .* got \[4,1\]"),
    ("blocksparse_matmul_dw", {"gate": [np.ones(5, f32)]}, r"gate must be \[4\] .* got \[5\]"),
    ("blocksparse_matmul", {"gate": [np.ones(4, f32)] * 2}, "at most one gate, got 2"),
    (
        "blocksparse_matmul_dw",
        {"x": [np.ones((5, 16), f32), np.ones((4, 16), f32)]},
        r"dy must be \[4,24\] where x is \[4,16\], got \[5,24\]",
    ),
    ("blocksparse_matmul_dw", {"x": [np.ones((5, 8), f32)] * 2}, r"x must have 16 features .* \[5,8\]"),
    ("blocksparse_matmul_dw", {"dy": [np.ones((5, 16), f32)] * 2}, r"dy must be \[5,24\] .* got \[5,16\]"),
    ("blocksparse_matmul_dw", {"blocks": 3}, "table has 4 blocks, the attribute says 3"),
    ("blocksparse_matmul_dwa", {"dwi": np.ones((4, 8, 9), f32)}, r"dwi must be \[4,8,8\] .* got \[4,8,9\]"),
    ("blocksparse_matmul_dg", {"dw": np.ones((4, 8, 7), f32)}, r"dw must have the shape of w.* got dw \[4,8,7\]"),
    ("blocksparse_matmul_dg", {"w": np.ones((4, 8, 16), f32)}, r"w must be \[blocks,8,8\], got \[4,8,16\]"),
    ("blocksparse_matmul_dg", {"gate": np.ones(3, f32)}, r"gate one entry for each block.* gate \[3\]"),
]


@RUNS
@pytest.mark.parametrize(("name", "change", "words"), OPERANDS)
def test_malformed_operands(device, run, name, change, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        run(device, *call(name, **change))


@RUNS
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"axis": 2}, "axis must be 0 or 1, got 2"),
        ({"axis": -1}, "axis must be 0 or 1, got -1"),
        ({"bsize": 24}, "bsize must be 8, 16, 32, 64 or 128, got 24"),
        ({"bsize": 0}, "bsize must be 8, 16, 32, 64 or 128, got 0"),
        ({"bsize": 2**32 + 8}, "bsize must be 8, 16, 32, 64 or 128, got 4294967304"),
        (
            {"bsize": 16},
            "C and K must be positive multiples of bsize 16, got C 16 and K 24",
        ),
        ({"C": 24}, "describes C 16 and K 24, the attributes say C 24 and K 24"),
        ({"K": 32}, "describes C 16 and K 24, the attributes say C 16 and K 32"),
        ({"C": 12}, "C and K must be positive multiples of bsize 8, got C 12"),
        ({"K": -8}, "C and K must be positive multiples of bsize 8, got C 16 and K -8"),
    ],
)
def test_malformed_attributes(device, run, name, change, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        run(device, *call(name, **change))


@RUNS
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    ("table", "words"),
    [
        (TABLE[:, None], r"table must be a vector, got \[47,1\]"),
        (TABLE[:7], "got 7 words, the header alone has 16"),
        (TABLE[:-1], "got 46 words, its header asks for 47"),
        (np.append(TABLE, np.int32(0)), "got 48 words, its header asks for 47"),
        (changed(0, 2), "got version 2"),
        (changed(1, -2), "CB -2"),
        (changed(2, 2**31 - 1), "47 words, its header asks for"),
        (changed(3, 7), "blocks 7"),
        (changed(3, 3), "47 words, its header asks for 41"),
        (changed(FINGERPRINT, 1), "fingerprint"),
        (BlockLayout(np.ones((3, 3))).table, "describes C 24 and K 24"),
        (another_table([[1, 1, 1], [1, 1, 0]]), r"must be \[5,8,8\]|must be \[5\]|fingerprint"),
    ],
)
def test_malformed_tables(device, run, name, table, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        run(device, *call(name, table=table))


@RUNS
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (COLUMN_PTR + 1, 5, "column offset 1 is 5"),
        (COLUMN_PTR + 3, 3, "column offsets must run from 0 to 4, got 0 to 3"),
        (ROW_PTR + 1, -1, "row offset 1 is -1"),
        (COLUMN_C + 1, 2**30, "column entry 1 disagrees"),
        (COLUMN_W, 4, "names block 4, allowed are 0 to 3"),
        (ROW_K, -1, "row entry 0 disagrees"),
        (ROW_W + 3, -(2**31), "names block -2147483648"),
        (UPDATE + 6, 2, "block 3 lies at"),
    ],
)
def test_entries_out_of_place(device, rng, run, name, position, value, words):
    """A table that no plan was made of yet is checked throughout; its fingerprint is new here."""
    table = changed(position, value)
    table[FINGERPRINT : FINGERPRINT + 4] = rng.integers(2**31, size=4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        run(device, *call(name, table=table))


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_borrowed_fingerprint_reads_nothing_out_of_place(device, name):
    """A plan is found by the fingerprint; a table that borrows another's cannot reach beyond its operands."""
    run_eagerly(device, *call(name))  # makes the plan
    for layout in ([[1, 1, 1], [1, 1, 1]], [[1, 0, 0], [0, 0, 0]]):
        blocks = np.count_nonzero(layout)
        change = {"table": another_table(layout), "gate": [np.ones(blocks, f32)]}
        if name in ("blocksparse_matmul", "blocksparse_matmul_dx"):
            change["w"] = np.ones((blocks, 8, 8), f32)
        if name == "blocksparse_matmul_dwa":
            change["dwi"] = np.ones((blocks, 8, 8), f32)
        with pytest.raises(tf.errors.InvalidArgumentError, match="fingerprint"):
            run_eagerly(device, *call(name, **change))


@pytest.mark.parametrize("name", PRODUCTS)
def test_known_shapes_are_checked_when_a_graph_is_made(name):
    wrong = {
        "blocksparse_matmul": {"x": np.ones((5, 24), f32)},
        "blocksparse_matmul_dx": {"w": np.ones((4, 8, 16), f32)},
        "blocksparse_matmul_dw": {"dy": [np.ones((5, 8), f32)] * 2},
        "blocksparse_matmul_dwa": {"x": [np.float32(1)] * 2},
    }[name]
    with tf.Graph().as_default(), pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="(?i)dim|rank"):
        _, inputs, attrs = call(name, **wrong)
        getattr(ops, name)(**inputs, **attrs)


@pytest.mark.parametrize("axis", [0, 1])
def test_static_shapes(axis):
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [None, 7, 16] if axis else [16, 7, None])
        dy = tf1.placeholder(tf.float32, [None, 7, 24] if axis else [24, 7, None])
        w = tf1.placeholder(tf.float32, [4, 8, 8])
        attrs = {"axis": axis, "bsize": 8, "C": 16, "K": 24}
        y = ops.blocksparse_matmul(x, w, TABLE, [], **attrs)
        dx = ops.blocksparse_matmul_dx(dy, w, TABLE, [], **attrs)
        assert y.shape.as_list() == dy.shape.as_list() and dx.shape.as_list() == x.shape.as_list()
        dw = ops.blocksparse_matmul_dw([x], [dy], TABLE, [], dw_dtype=tf.float16, blocks=4, **attrs)
        assert dw.shape.as_list() == [4, 8, 8] and dw.dtype == tf.float16
        dw = ops.blocksparse_matmul_dw([x], [dy], TABLE, [], dw_dtype=tf.float16, **attrs)
        assert dw.shape.as_list() == [None, 8, 8]
        unknown = ops.blocksparse_matmul(tf1.placeholder(tf.float32), w, TABLE, [], **attrs)
        assert unknown.shape.rank is None


@pytest.mark.parametrize("axis", [0, 1])
def test_one_graph_serves_tables_that_change(device, rng, axis):
    """Pruning and growth: another table makes another plan and no new graph."""
    attrs = {"axis": axis, "bsize": 16, "C": 64, "K": 80}
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf.device("/CPU:0"):
            x, dy, w = (tf1.placeholder(tf.float32) for _ in range(3))
            table = tf1.placeholder(tf.int32)
        with tf.device(device):
            results = [
                ops.blocksparse_matmul(x, w, table, [], tf32=False, **attrs),
                ops.blocksparse_matmul_dx(dy, w, table, [], tf32=False, **attrs),
                ops.blocksparse_matmul_dw([x], [dy], table, [], dw_dtype=tf.float32, tf32=False, **attrs),
            ]
        for _ in range(12):
            layout = random_layout(rng, 4, 5, rng.random())
            n = int(rng.integers(0, 50))
            shape = (lambda features, n=n: (n, features)) if axis else (lambda features, n=n: (features, n))
            xs, dys = random_values(rng, shape(64), f32), random_values(rng, shape(80), f32)
            ws = random_values(rng, (np.count_nonzero(layout), 16, 16), f32)
            found = session.run(results, {x: xs, dy: dys, w: ws, table: BlockLayout(layout).table})
            size = [np.abs(v) for v in (xs, dys, ws)]
            common = (layout, 16, axis)
            for y, expected, magnitude in zip(
                found,
                (ref.matmul(xs, ws, *common), ref.matmul_dx(dys, ws, *common), ref.matmul_dw(xs, dys, *common)),
                (
                    ref.matmul(size[0], size[2], *common),
                    ref.matmul_dx(size[1], size[2], *common),
                    ref.matmul_dw(size[0], size[1], *common),
                ),
                strict=True,
            ):
                assert_product_close(y, expected, magnitude, 80)


def in_threads(functions):
    """Runs them all at once, each many times; raises what any raised."""
    errors, barrier = [], threading.Barrier(len(functions))

    def work(function):
        try:
            barrier.wait()
            for _ in range(20):
                function()
        except BaseException as error:  # handed on below
            errors.append(error)

    threads = [threading.Thread(target=work, args=[function]) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def products(rng, layout, dtype):
    """A function that takes (x, w, table, dy) to all three products, the operands, and the bits that must come out."""
    operands = [
        random_values(rng, (37, 16 * layout.shape[0]), dtype),
        random_values(rng, (np.count_nonzero(layout), 16, 16), dtype),
        BlockLayout(layout).table,
        random_values(rng, (37, 16 * layout.shape[1]), dtype),
    ]
    attrs = {"axis": 1, "bsize": 16, "C": 16 * layout.shape[0], "K": 16 * layout.shape[1]}

    def function(x, w, table, dy):
        return [
            ops.blocksparse_matmul(x, w, table, [], **attrs),
            ops.blocksparse_matmul_dx(dy, w, table, [], **attrs),
            ops.blocksparse_matmul_dw([x], [dy], table, [], dw_dtype=tf.float32, **attrs),
        ]

    return function, operands


def bits(tensors):
    return [np.asarray(tensor).tobytes() for tensor in tensors]


def test_eager_threads(device, rng):
    """Six threads, two for each layout, in three dtypes; plans are made while others run."""

    def worker(dtype, layout):
        function, operands = products(rng, layout, dtype)
        with tf.device(device):
            operands = [tf.constant(operand) for operand in operands]
        expected = []

        def check():
            with tf.device(device):
                found = bits(function(*operands))
            expected.append(found)
            assert found == expected[0]

        return check, expected

    workers = []
    for dtype in (np.float32, np.float16, bfloat16):
        layout = random_layout(rng, 5, 6, 0.4)
        workers += [worker(dtype, layout) for _ in range(2)]
    in_threads([check for check, _ in workers])
    for check, expected in workers:  # and alone
        check()
        assert len(expected) == 21


ON_SECOND_DEVICE = """
import sys, threading
import numpy as np
import tensorflow as tf
cpu, = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from blocksparse import BlocksparseMatMul, embedding_lookup

rng, wrong = np.random.default_rng(int(sys.argv[1])), []

def worker(blocks):
    layout = np.zeros((5, 6), bool)
    layout.flat[rng.permutation(30)[:blocks]] = True
    bsmm = BlocksparseMatMul(layout, 8, 1)
    with tf.device("/CPU:1"):
        shapes = (3, bsmm.C), bsmm.w_shape, (9, 4)
        x, w, dense = (tf.constant(rng.standard_normal(shape), tf.float32) for shape in shapes)
        places = tf.constant(rng.integers(9, size=blocks), tf.int32)
        expected = bsmm(x, w).numpy(), dense.numpy()[places.numpy()]

    def work():
        try:
            with tf.device("/CPU:1"):
                for _ in range(400):
                    found = bsmm(x, w), embedding_lookup(dense, places)
                    wrong.extend(found for a, b in zip(found, expected) if a.numpy().tobytes() != b.tobytes())
        except Exception as error:
            wrong.append(error)

    return work

threads = [threading.Thread(target=worker(blocks)) for blocks in range(10, 16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"{len(wrong)} wrong {wrong[:1]}")
"""


def test_threads_get_their_own_tables_from_another_device(rng):
    """Six layouts on six threads, on the second of two devices: the tables and indices come from the first."""
    printed = helpers.run_python(ON_SECOND_DEVICE, str(rng.integers(2**31)))
    assert printed.strip() == "0 wrong []"


def test_autograph_lets_the_ops_alone(device, caplog, monkeypatch):
    """No warning that a function could not be transformed."""
    monkeypatch.setattr(tf.get_logger(), "propagate", True)

    @tf.function
    def function(x, w):
        for _ in range(2):
            x = ops.blocksparse_matmul(x, w, TABLE, [], axis=1, bsize=8, C=16, K=24)[:, :16]
        return x

    with tf.device(device):
        function(tf.ones([2, 16]), tf.ones([4, 8, 8]))
    assert not caplog.records


def test_two_sessions_at_once(device, rng):
    """Each with a graph of its own, run from two threads each."""
    runs, sessions = [], []
    for dtype in (np.float32, np.float16):
        function, operands = products(rng, random_layout(rng, 6, 5, 0.4), dtype)
        with tf.device(device):
            expected = bits(function(*operands))
        with tf.Graph().as_default():
            with tf.device("/CPU:0"):
                feeds = {tf1.placeholder(operand.dtype): operand for operand in operands}
            with tf.device(device):
                results = function(*feeds)
            session = tf1.Session()
        sessions.append(session)

        def run(session=session, results=results, feeds=feeds, expected=expected):
            assert bits(session.run(results, feeds)) == expected

        runs += [run, run]
    in_threads(runs)
    for session in sessions:
        session.close()


def test_devices():
    """The suite knows the devices that TensorFlow and the library see."""
    from blocksparse._library import handle

    gpus = tf.config.list_physical_devices("GPU")
    assert len(helpers.devices()) == 1 + bool(gpus)
    assert handle.bs_device_count() <= len(gpus)
