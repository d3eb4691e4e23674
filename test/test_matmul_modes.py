"""The product in every mode of TensorFlow, and how the layout's table gets there."""

import gc
import glob
import re
import timeit
import weakref

import helpers
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_product_close, bfloat16, random_layout, random_values
from tensorflow.python.ops import control_flow_util

from blocksparse import reference
from blocksparse.matmul import BlocksparseMatMul, get_constant

tf1 = tf.compat.v1


@pytest.fixture
def case(rng):
    """A layer with an input, a weight, and the reference's output."""
    layout = random_layout(rng, 4, 4, 0.5)
    bsmm = BlocksparseMatMul(layout, 8, 1)
    x, w = random_values(rng, (6, 32), np.float32), 0.2 * random_values(rng, bsmm.w_shape, np.float32)
    return bsmm, x, w


def recurrent(bsmm, x, w, steps):
    """`steps` times `h = tanh(h Wd)` in float64, with the gradients of `sum(h)` for x and W."""
    layout, states, size = bsmm.layout, [x.astype(np.float64)], bsmm.bsize
    for _ in range(steps):
        states.append(np.tanh(reference.matmul(states[-1], w, layout, size, 1)))
    dh, dw = np.ones_like(states[-1]), np.zeros(w.shape)
    for before, after in zip(states[-2::-1], states[:0:-1]):
        dy = dh * (1 - after**2)
        dw += reference.matmul_dw(before, dy, layout, size, 1)
        dh = reference.matmul_dx(dy, w, layout, size, 1)
    return states[-1], dh, dw


def assert_recurrent(results, bsmm, x, w, steps):
    tolerance = 1e-5 if tf.config.list_physical_devices("GPU") == [] else 5e-3  # TF32 where there is a GPU
    for ours, expected in zip(results, recurrent(bsmm, x, w, steps), strict=True):
        assert np.linalg.norm(ours - expected) <= tolerance * np.linalg.norm(expected)


# ------------------------------------------------------------------------------------------------------ control flow


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_control_flow_in_v1_graphs(device, case, v2):
    """The first call, which makes the table, is inside a loop inside a branch, under a control dependency."""
    bsmm, x, w = case
    enabled = control_flow_util.ENABLE_CONTROL_FLOW_V2
    control_flow_util.ENABLE_CONTROL_FLOW_V2 = v2
    try:
        with tf.Graph().as_default(), tf1.Session() as session:
            X, steps = tf1.placeholder(tf.float32, [None, 32]), tf1.placeholder(tf.int32, [])
            with tf.device(device):
                W = tf.constant(w)

                def loop():
                    with tf.control_dependencies([tf.identity(X)]):
                        body = lambda i, h: (i + 1, tf.tanh(bsmm(h, W)))  # noqa: E731
                        return tf1.while_loop(lambda i, h: i < steps, body, (0, X))[1]

                h = tf1.cond(steps > 0, loop, lambda: X)
                after = bsmm(X, W)  # the table is there for ops outside too
                gradients = tf1.gradients(h, [X, W])
            for count in (3, 1):
                results = session.run([h, *gradients], {X: x, steps: count})
                assert_recurrent(results, bsmm, x, w, count)
            assert np.array_equal(session.run(h, {X: x, steps: 0}), x)
            assert session.run(after, {X: x}).shape == (6, 32)
            tables = [op for op in session.graph.get_operations() if op.type == "Const" and "table" in op.name]
            assert len(tables) == 1 and not tables[0].control_inputs
            assert not tf1.global_variables()
    finally:
        control_flow_util.ENABLE_CONTROL_FLOW_V2 = enabled


def test_control_flow_in_functions(device, case):
    bsmm, x, w = case

    @tf.function(input_signature=[tf.TensorSpec([None, 32]), tf.TensorSpec(w.shape), tf.TensorSpec([], tf.int32)])
    def run(x, w, steps):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            h = x
            if steps > 0:
                for _ in tf.range(steps):
                    h = tf.tanh(bsmm(h, w))
        return h, *tape.gradient(h, [x, w])

    with tf.device(device):
        for steps in (3, 1):
            assert_recurrent([t.numpy() for t in run(x, w, steps)], bsmm, x, w, steps)


def test_recurrent_loop_with_one_weight_gradient(device, case):
    """What the graph-rewriting utilities do for unrolled graphs, in any mode: a loop with a gradient of its own."""
    bsmm, x, w = case
    steps = 5

    @tf.custom_gradient
    def run(x, w):
        states = tf.TensorArray(tf.float32, steps + 1, clear_after_read=False, element_shape=[None, 32]).write(0, x)
        _, states = tf.while_loop(
            lambda i, states: i < steps,
            lambda i, states: (i + 1, states.write(i + 1, tf.tanh(bsmm(states.read(i), w)))),
            (0, states),
        )
        h = states.stack()

        def gradient(dh):
            def back(i, dh, dys):
                dy = dh * (1 - h[i + 1] ** 2)
                with tf.GradientTape() as tape:
                    state = h[i]
                    tape.watch(state)
                    y = bsmm(state, w)
                return i - 1, tape.gradient(y, state, dy), dys.write(i, dy)

            dys = tf.TensorArray(tf.float32, steps, element_shape=[None, 32])
            _, dx, dys = tf.while_loop(lambda i, *_: i >= 0, back, (steps - 1, dh, dys))
            return dx, bsmm.weight_grad(h[:-1], dys.stack())

        return h[-1], gradient

    def with_gradients(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            h = run(x, w)
        return [h, *tape.gradient(h, [x, w])]

    with tf.device(device):
        for mode in (with_gradients, tf.function(with_gradients)):
            assert_recurrent([t.numpy() for t in mode(tf.constant(x), tf.constant(w))], bsmm, x, w, steps)


# --------------------------------------------------------------------------------------------------- mapped and nested


@pytest.mark.parametrize("axis", [0, 1])
def test_vectorized_map_of_gradients(device, rng, axis):
    """Gradients of each element for itself: for the input in one launch, for the weight and the gate one by one."""
    layout = random_layout(rng, 3, 4, 0.5)
    bsmm = BlocksparseMatMul(layout, 16, axis)
    for dtype in (np.float32, np.float16, bfloat16):
        w, gate = random_values(rng, bsmm.w_shape, dtype), rng.standard_normal(bsmm.blocks).astype(np.float32)
        xs = random_values(rng, (5, *bsmm.i_shape(3)), dtype)
        dys = random_values(rng, (5, *bsmm.o_shape(3)), dtype)

        def one(pair, w=w, gate=gate):
            x, dy = pair
            variables = [x, tf.constant(w), tf.constant(gate)]
            with tf.GradientTape() as tape:
                tape.watch(variables)
                y = bsmm(*variables, gate_grad=True)
            return [y, *tape.gradient(y, variables, dy)]

        pairs = tf.constant(xs), tf.constant(dys)
        with tf.device(device):
            mapped = tf.vectorized_map(one, pairs, fallback_to_while_loop=False)
            looped = tf.map_fn(one, pairs, fn_output_signature=[dtype, dtype, dtype, tf.float32])
        for a, b in zip(mapped, looped, strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            scale = {np.float32: 1e-6 if device == "/CPU:0" else 2e-3, np.float16: 1e-3, bfloat16: 8e-3}[dtype]
            assert a.shape == b.shape and np.abs(a - b).max() <= scale * np.abs(b).max()


def test_mapped_sums_of_pairs(device, rng):
    """A weight gradient of mapped and unmapped lists, and one that adds to a mapped sum."""
    bsmm = BlocksparseMatMul(random_layout(rng, 3, 2, 0.6), 8, 1)
    xs, dy = random_values(rng, (4, 5, 24), np.float32), random_values(rng, (5, 16), np.float32)
    with tf.device(device):
        mapped = tf.vectorized_map(
            lambda x: bsmm.weight_grad([x, 2 * x], [dy, dy]), tf.constant(xs), fallback_to_while_loop=False
        )
        for x, dw in zip(xs, mapped):
            assert np.array_equal(dw, bsmm.weight_grad([x, 2 * x], [dy, dy]))


def test_jacobian(device, case):
    bsmm, x, w = case
    with tf.device(device):
        with tf.GradientTape() as tape:
            X = tf.constant(x)
            tape.watch(X)
            y = bsmm(X, w)
        jacobian = tape.batch_jacobian(y, X).numpy()
    dense = reference.dense_weight(w, bsmm.layout).T
    tolerance = 1e-6 if device == "/CPU:0" else 1e-3
    assert np.abs(jacobian - dense).max() <= tolerance


@pytest.mark.parametrize("what", ["weight", "gate"])
def test_mapped_weights_and_gates_are_refused(case, what):
    bsmm, x, w = case
    gate = np.ones(bsmm.blocks, np.float32)
    call = {"weight": lambda v: bsmm(x, w * v), "gate": lambda v: bsmm(x, w, gate * v)}[what]
    with pytest.raises(ValueError, match=f"the {what} must be the same for all elements under tf.vectorized_map"):
        tf.vectorized_map(call, tf.constant([1.0, 2.0]))


def test_inside_data_pipelines_and_wrapped_functions(case):
    bsmm, x, w = case
    with tf.device("/CPU:0"):  # where data pipelines run
        expected = bsmm(x, w).numpy()
        mapped = next(iter(tf.data.Dataset.from_tensors(x).map(lambda x: bsmm(x, w))))
        assert np.array_equal(mapped, expected)
        wrapped = tf1.wrap_function(lambda x: bsmm(x, w), [tf.TensorSpec([None, 32])])
        assert np.array_equal(wrapped(tf.constant(x)), expected)
    with tf.Graph().as_default(), tf.device("/CPU:0"), tf1.Session() as session:  # a function called from a v1 graph
        assert np.array_equal(session.run(tf.function(bsmm)(tf.constant(x), tf.constant(w))), expected)


def test_dynamic_batch(device, case, rng):
    """One function and one graph for batches of any size; the static shape keeps what is known."""
    bsmm, _, w = case
    function = tf.function(bsmm, input_signature=[tf.TensorSpec([None, None, 32]), tf.TensorSpec(w.shape)])
    assert function.get_concrete_function().structured_outputs.shape.as_list() == [None, None, 32]
    unknown = tf.function(bsmm, input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    with tf.device(device):
        for shape in [(2, 3, 32), (0, 5, 32), (7, 1, 32), (1, 1, 32), (40, 11, 32)]:
            x = random_values(rng, shape, np.float32)
            expected = reference.matmul(x, w, bsmm.layout, 8, 1)
            bound = reference.matmul(np.abs(x), np.abs(w), bsmm.layout, 8, 1)
            for f in (function, unknown):
                assert_product_close(f(x, w), expected, bound, 32, tf32=device != "/CPU:0")


# ------------------------------------------------------------------------------------------------------ the table


def test_table_is_shared_and_no_variable():
    layout = np.eye(5)
    a, b = BlocksparseMatMul(layout, 8, 1), BlocksparseMatMul(layout > 0, 32, 0)
    assert a._table(True) is b._table(True)
    x, w = np.ones((2, 40), np.float32), np.ones(a.w_shape, np.float32)
    with tf.Graph().as_default() as graph:
        a(x, w), b(np.ones((160, 2), np.float32), np.ones(b.w_shape, np.float32))
        assert sum("table" in op.name for op in graph.get_operations()) == 1
        assert not graph.get_collection("variables") and not graph.get_all_collection_keys()
    module = tf.Module()
    module.bsmm, module.w = a, tf.Variable(w)
    module.f = tf.function(lambda x: a(x, module.w))
    module.f(x)
    assert [v.name for v in module.variables] == ["Variable:0"]


def test_graphs_and_tables_are_freed():
    bsmm = BlocksparseMatMul(np.eye(7), 8, 1)
    x, w = np.ones((2, 56), np.float32), np.ones(bsmm.w_shape, np.float32)
    graph = tf.Graph()
    with graph.as_default():
        bsmm(x, w)
    alive = [weakref.ref(graph), weakref.ref(bsmm._table(True))]
    del graph, bsmm
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_checkpoint_has_the_weight_alone(tmp_path, case):
    bsmm, x, w = case
    module = tf.Module()
    module.bsmm, module.w = bsmm, tf.Variable(w)
    module.call = tf.function(lambda x: bsmm(x, module.w))
    module.call(x)
    path = tf.train.Checkpoint(module=module).save(str(tmp_path / "checkpoint"))
    saved = [name for name, shape in tf.train.list_variables(path) if shape]
    assert saved == ["module/w/.ATTRIBUTES/VARIABLE_VALUE"]


def test_get_constant():
    a = get_constant([1, 2, 3], "lut")
    assert get_constant(np.array([1, 2, 3], np.int32), "lut") is a and get_constant([1, 2, 3], "other") is not a
    assert a.dtype == tf.int32 and a.device.endswith("CPU:0")
    with tf.Graph().as_default():
        b = get_constant([1, 2, 3], "lut")
        assert get_constant([1, 2, 3], "lut") is b and b.graph is tf1.get_default_graph()


def test_no_copy_of_the_table(device, rng, tmp_path):
    """A profile of 100 steps has no copy to the GPU as large as the table."""
    if device == "/CPU:0":
        pytest.skip("nothing is copied on one device")
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    bsmm = BlocksparseMatMul(random_layout(rng, 64, 64, 0.3), 32, 1)
    size = bsmm._table(True).shape[0] * 4
    with tf.device(device):
        x, w = tf.ones([64, bsmm.C]), tf.ones(bsmm.w_shape)
        step = tf.function(lambda: tf.reduce_sum(bsmm(x, w)))
        step(), bsmm(x, w)  # noqa: B018 (makes the plans)
        tf.profiler.experimental.start(str(tmp_path))
        for _ in range(100):
            step()
            bsmm(x, w)
        bsmm(x, w).numpy()
        tf.profiler.experimental.stop()
    space = xplane_pb2.XSpace()
    with open(glob.glob(f"{tmp_path}/**/*.xplane.pb", recursive=True)[0], "rb") as file:
        space.ParseFromString(file.read())
    planes = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    if not any(line.events for plane in planes for line in plane.lines):
        pytest.skip("this machine's driver lets nobody profile the GPU")
    names = {id: stat.name for plane in planes for id, stat in plane.stat_metadata.items()}
    copies = []
    for plane in planes:
        for event in (event for line in plane.lines for event in line.events):
            if "memcpyh2d" in plane.event_metadata[event.metadata_id].name.lower():
                copies.append(
                    {names.get(stat.metadata_id): stat.str_value or stat.uint64_value for stat in event.stats}
                )
    sizes = [int(n) for copy in copies for n in re.findall(r"size:(\d+)", str(copy))]
    assert len(copies) < 20 and all(n < size for n in sizes), f"{len(copies)} copies in 200 products: {copies[:3]}"


def test_call_costs_little():
    """One block, one sample: at most twice the time of tf.matmul, the wrapper's checks included."""
    bsmm = BlocksparseMatMul([[1]], 32, 1)
    with tf.device("/CPU:0"):
        x, w = tf.ones([1, 32]), tf.ones([1, 32, 32])
        dense = w[0]
        repeats = [
            (timeit.timeit(lambda: bsmm(x, w), number=300), timeit.timeit(lambda: tf.matmul(x, dense), number=300))
            for _ in range(11)
        ]
    ours, theirs = (min(times) for times in zip(*repeats))
    assert ours <= 2 * theirs, f"{ours / 300 * 1e6:.1f} us, tf.matmul {theirs / 300 * 1e6:.1f} us"


# ----------------------------------------------------------------------------------------------- exported, distributed


def test_saved_model_in_a_fresh_process(tmp_path, case):
    """With a signature and gradients inside, on every device there is; nothing is saved but the weight."""
    bsmm, x, w = case
    module = tf.Module()
    module.w = tf.Variable(w)

    @tf.function(input_signature=[tf.TensorSpec([None, 32])])
    def call(x):
        with tf.GradientTape() as tape:
            y = bsmm(x, bsmm.l2_normalize(module.w))
        return {"y": y, "dw": tape.gradient(y, module.w)}

    module.call = call
    path = str(tmp_path / "model")
    tf.saved_model.save(module, path, signatures=call)
    assert [name for name, shape in tf.train.list_variables(path + "/variables/variables") if shape] == [
        "w/.ATTRIBUTES/VARIABLE_VALUE"
    ]
    np.savez(tmp_path / "case.npz", x=x, **{name: value.numpy() for name, value in call(x).items()})
    script = """
import sys
import numpy as np, tensorflow as tf
import blocksparse
path, case = sys.argv[1], np.load(sys.argv[2])
tolerance = 2e-3 if tf.config.list_physical_devices("GPU") else 0
for device in ["/CPU:0"] + ["/GPU:0"] * bool(tf.config.list_physical_devices("GPU")):
    with tf.device(device):
        model = tf.saved_model.load(path)
        outputs = model.call(case["x"]), model.signatures["serving_default"](tf.constant(case["x"]))
        for output in outputs:
            for name in ("y", "dw"):
                assert np.abs(output[name].numpy() - case[name]).max() <= tolerance * np.abs(case[name]).max(), name
    assert len(model.variables) == 1 if hasattr(model, "variables") else model.w.shape.rank == 3
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    tf.compat.v1.saved_model.load(session, ["serve"], path)
print("right")
"""
    assert "right" in helpers.run_python(script, path, tmp_path / "case.npz")


def test_old_scripts():
    """With TensorFlow 2 behaviour off: reference variables, shapes of Dimensions, loops and grouped gradients."""
    script = """
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
from blocksparse.matmul import BlocksparseMatMul, SparseProj, group_param_grads, block_reduced_full_dw
tf.set_random_seed(1)
bsmm = BlocksparseMatMul(np.tri(4), block_size=8, feature_axis=0, name="fc")
proj = SparseProj(32, 8)
x = tf.placeholder(tf.float32, [32, None])
w = tf.get_variable("w", bsmm.w_shape, initializer=bsmm.identity_init(), use_resource=False)
g = tf.get_variable("g", bsmm.g_shape, initializer=tf.ones_initializer(), use_resource=False)
def net(h):
    for _ in range(6):
        h = tf.tanh(bsmm(h, bsmm.l2_normalize(w), g, gate_grad=True))
    return tf.reduce_sum(proj.gather(h))
for build in (net, lambda x: tf.while_loop(lambda i, h: i < 6, lambda i, h: (i + 1, bsmm(h, w)), (0, x))[1]):
    loss = build(x)
    plain = tf.gradients(loss, [w])
grads = tf.gradients(net(x), [w, g])
sums = tf.gradients(net(x), [w, g])
full = block_reduced_full_dw(sums[0], scale=tf.constant(1.0))
sums[0] = group_param_grads(sums[0], group_size=3, cast32=True)
assert [v.op.name for v in tf.global_variables()] == ["w", "g"]
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    feed = {x: np.random.standard_normal((32, 5))}
    session.run(plain, feed)
    for a, b in zip(session.run(grads, feed), session.run(sums, feed)):
        assert np.abs(a - b).max() < 5e-3 * np.abs(a).max(), (a, b)
    assert session.run(full, feed).shape == (4, 4)
print("right")
"""
    assert "right" in helpers.run_python(script)


def test_mirrored_strategy_with_two_devices():
    """Two replicas, each on a logical CPU device, give the gradients of one."""
    script = """
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from blocksparse.layers import BlocksparseDense
from blocksparse.matmul import BlocksparseMatMul
import keras
strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
bsmm = BlocksparseMatMul(np.eye(4), 8, 1)
x = np.random.standard_normal((8, 32)).astype(np.float32)
with strategy.scope():
    w = tf.Variable(np.random.standard_normal(bsmm.w_shape).astype(np.float32))
devices = []
def replica(x):
    with tf.GradientTape() as tape:
        y = bsmm(x, w)
        loss = tf.reduce_sum(y * y)
    devices.append(y.device)
    return tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, w))
@tf.function
def step(batch):
    return strategy.run(replica, (batch,))
def value(context):
    return tf.constant(x[context.replica_id_in_sync_group * 4:][:4])
grads = strategy.experimental_local_results(step(strategy.experimental_distribute_values_from_function(value)))
with tf.device("/cpu:0"):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(bsmm(x, w) ** 2)
    expected = tape.gradient(loss, w)
for grad in grads:
    assert np.abs(grad - expected).max() < 1e-4, np.abs(grad - expected).max()
assert len(grads) == 2 and len(set(devices)) == 2, devices
with strategy.scope():
    sparse = BlocksparseDense(32, density=0.5, block_size=8, activation="relu")
    model = keras.Sequential([sparse, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
history = model.fit(np.tile(x, (16, 1)), np.tile(x[:, :1], (16, 1)), batch_size=32, epochs=4, verbose=0).history["loss"]
assert history[-1] < history[0], history
print("right")
"""
    assert "right" in helpers.run_python(script)
