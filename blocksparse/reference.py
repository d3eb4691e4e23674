"""What each operator means, in float64 NumPy and plain loops: the oracle of the tests, meant to be read.

Nothing here is fast and nothing is shared with the code it checks; NumPy is all it imports. Arrays of any real dtype
come in, float64 goes out.

A layout is a matrix `[CB, KB]` whose entries other than 0 are the blocks that are present; `w [blocks, bsize, bsize]`
holds them in the order of `block_ids`. With `axis` 1 features are the last dimension of activations (`[..., C]`), with
`axis` 0 the first (`[C, ...]`); all other dimensions are batch, in any number and of any size, 0 included. A gate has
one number for each block; a block whose gate is 0 is not read at all.
"""

import numpy as np

# ---------------------------------------------------------------------------------------------------------------------
# Layouts


def block_ids(layout, z_order=True):
    """The list of `(c, k)` of the blocks that are present; a block's id is its index.

    With `z_order` by ascending Morton code, whose even bits, from the lowest, are the bits of c and whose odd bits are
    those of k; else column by column, c ascending in each.
    """
    layout = np.asarray(layout)
    rows, columns = layout.shape
    present = [(c, k) for k in range(columns) for c in range(rows) if layout[c, k] != 0]
    if not z_order:
        return present

    def code(block):
        c, k = block
        bits = 0
        for position in range(max(c.bit_length(), k.bit_length())):
            bits += (c >> position & 1) << 2 * position
            bits += (k >> position & 1) << 2 * position + 1
        return bits

    return sorted(present, key=code)


def dense_weight(w, layout, gate=None, z_order=True):
    """The dense equivalent `Wd [C, K]` of a weight: block w at `(c, k)`, times its gate, and 0 elsewhere."""
    w = np.asarray(w, np.float64)
    CB, KB = np.shape(layout)
    bsize = w.shape[1]
    dense = np.zeros((CB * bsize, KB * bsize))
    for block, (c, k) in enumerate(block_ids(layout, z_order)):
        if gate is None or gate[block] != 0:
            scale = 1.0 if gate is None else float(gate[block])
            dense[c * bsize : (c + 1) * bsize, k * bsize : (k + 1) * bsize] = scale * w[block]
    return dense


# ---------------------------------------------------------------------------------------------------------------------
# The product


def _features_last(x, axis):
    """Activations as a matrix `[N, features]`, and the shape of the batch dimensions."""
    x = np.asarray(x, np.float64)
    if axis == 0:
        x = np.moveaxis(x, 0, -1)
    return x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1]), x.shape[:-1]


def _features_back(y, batch, axis):
    y = y.reshape(*batch, y.shape[-1])
    return np.moveaxis(y, -1, 0) if axis == 0 else y


def matmul(x, w, layout, bsize, axis, gate=None, z_order=True):
    """`y[n, block k] = sum over blocks w at (c, k) of gate[w] * x[n, block c] W[w]`; a column without blocks gives 0.

    Args:
      x: `[..., C]` with axis 1, `[C, ...]` with axis 0.
      w: `[blocks, bsize, bsize]`.

    Returns:
      `[..., K]` or `[K, ...]`.
    """
    x, batch = _features_last(x, axis)
    w = np.asarray(w, np.float64)
    y = np.zeros((x.shape[0], np.shape(layout)[1] * bsize))
    for block, (c, k) in enumerate(block_ids(layout, z_order)):
        if gate is None or gate[block] != 0:
            scale = 1.0 if gate is None else float(gate[block])
            y[:, k * bsize : (k + 1) * bsize] += scale * (x[:, c * bsize : (c + 1) * bsize] @ w[block])
    return _features_back(y, batch, axis)


def matmul_dx(dy, w, layout, bsize, axis, gate=None, z_order=True):
    """The product's gradient for x: `dx[n, block c] = sum over blocks w at (c, k) of gate[w] * dy[n, block k] W[w]^T`.

    Args:
      dy: `[..., K]` with axis 1, `[K, ...]` with axis 0.
      w: `[blocks, bsize, bsize]`.

    Returns:
      `[..., C]` or `[C, ...]`.
    """
    dy, batch = _features_last(dy, axis)
    w = np.asarray(w, np.float64)
    dx = np.zeros((dy.shape[0], np.shape(layout)[0] * bsize))
    for block, (c, k) in enumerate(block_ids(layout, z_order)):
        if gate is None or gate[block] != 0:
            scale = 1.0 if gate is None else float(gate[block])
            dx[:, c * bsize : (c + 1) * bsize] += scale * (dy[:, k * bsize : (k + 1) * bsize] @ w[block].T)
    return _features_back(dx, batch, axis)


def matmul_dw(xs, dys, layout, bsize, axis, gate=None, gate_grad=False, dw_gated=False, z_order=True):
    """The product's gradient for w, summed over pairs: `dW[w] = sum over p of x_p[:, block c]^T dy_p[:, block k]`.

    What a gate does to it, block by block:

      gate_grad  dw_gated    dW[w]
      False      False       as without a gate, where the gate is 0 too (not the derivative, but what lets a block
                             that is switched off learn)
      False      True        as without a gate, but 0 where the gate is 0
      True       either      gate[w] times it: the derivative

    Args:
      xs, dys: lists of activations and gradients, each pair with its own batch; or one array each.

    Returns:
      `[blocks, bsize, bsize]`.
    """
    if not isinstance(xs, (list, tuple)):
        xs, dys = [xs], [dys]
    blocks = block_ids(layout, z_order)
    dw = np.zeros((len(blocks), bsize, bsize))
    for x, dy in zip(xs, dys, strict=True):
        x, _ = _features_last(x, axis)
        dy, _ = _features_last(dy, axis)
        for block, (c, k) in enumerate(blocks):
            if gate is not None and gate[block] == 0 and (gate_grad or dw_gated):
                continue
            scale = float(gate[block]) if gate is not None and gate_grad else 1.0
            dw[block] += scale * (x[:, c * bsize : (c + 1) * bsize].T @ dy[:, k * bsize : (k + 1) * bsize])
    return dw


def matmul_dgate(xs, dys, w, layout, bsize, axis, gate, dw_gated=False, z_order=True):
    """The product's gradient for the gate: `dgate[w] = sum over i, j of dW[w, i, j] W[w, i, j]`, dW as without a gate.

    With `dw_gated` it is 0 where the gate is 0.

    Returns:
      `[blocks]`.
    """
    w = np.asarray(w, np.float64)
    dw = matmul_dw(xs, dys, layout, bsize, axis, z_order=z_order)
    dgate = np.zeros(len(w))
    for block in range(len(w)):
        if not (dw_gated and gate[block] == 0):
            dgate[block] = np.sum(dw[block] * w[block])
    return dgate


def block_reduced_full_dw(xs, dys, bsize, axis, scale=1.0, norm="max"):
    """How much each position of a layout, present or not, would matter: a map for growing networks.

    `out[c, k] = sum over pairs p and batch entries n of scale * size(x_p[n, block c]) * size(dy_p[n, block k])`, where
    the size of a block of features is their largest magnitude (`norm="max"`) or Euclidean norm (any other). A pair
    whose sum at a position is not finite counts 0 there; a scale of 0 gives 0.

    Returns:
      `[CB, KB]`.
    """
    total = 0.0
    for x, dy in zip(xs, dys, strict=True):
        sizes = []
        for features in (x, dy):
            matrix, _ = _features_last(features, axis)
            pieces = np.abs(matrix).reshape(matrix.shape[0], matrix.shape[1] // bsize, bsize)
            sizes.append(pieces.max(axis=2) if norm == "max" else np.sqrt((pieces**2).sum(axis=2)))
        if scale == 0:
            partial = np.zeros((sizes[0].shape[1], sizes[1].shape[1]))
        else:
            partial = scale * (sizes[0].T @ sizes[1])
        total = total + np.where(np.isfinite(partial), partial, 0.0)
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def identity(layout, bsize, scale=1.0, z_order=True):
    """The weight of a layer that passes its input on: `W[w, i, i] = scale` where `c mod KB == k mod CB`, 0 elsewhere.

    Of the layout's blocks those on the diagonal; where it is longer than wide or wider than long, the diagonal repeats.
    """
    CB, KB = np.shape(layout)
    blocks = block_ids(layout, z_order)
    w = np.zeros((len(blocks), bsize, bsize))
    for block, (c, k) in enumerate(blocks):
        if c % KB == k % CB:
            w[block] = scale * np.eye(bsize)
    return w


def checker(layout, z_order=True):
    """A checkerboard of gates: 1 where `c + k` is even, else 0."""
    return np.array([1.0 if (c + k) % 2 == 0 else 0.0 for c, k in block_ids(layout, z_order)])


def orthonormality_error(w, layout, z_order=True):
    """How far a weight is from orthonormal: the largest entry of `|V^T V - 1|` over the matrices V that should be.

    Of a sparse layout these are the block columns, each its blocks one below the other; of a layout with every block
    present it is the dense weight, or its transpose where that has fewer columns.
    """
    w = np.asarray(w, np.float64)
    if np.all(np.asarray(layout) != 0):
        dense = dense_weight(w, layout, z_order=z_order)
        matrices = [dense if dense.shape[0] >= dense.shape[1] else dense.T]
    else:
        columns = {}
        for block, (_, k) in enumerate(block_ids(layout, z_order)):
            columns.setdefault(k, []).append(w[block])
        matrices = [np.concatenate(column) for column in columns.values()]
    return max(np.abs(v.T @ v - np.eye(v.shape[1])).max() for v in matrices)


def l2_normalize(w, layout, gain=None, epsilon=1e-12, z_order=True):
    """Gives each output feature's weights Euclidean norm 1, or its gain (Salimans and Kingma, 2016).

    For the features j of block column k: `S[j] = sum over its blocks w and rows i of W[w, i, j]^2`, and
    `Y[w, i, j] = gain[j] * W[w, i, j] / sqrt(max(S[j], epsilon))`.

    Args:
      w: `[blocks, bsize, bsize]`.
      gain: `[K]`, or None for 1.

    Returns:
      `(Y [blocks, bsize, bsize], S [K])`.
    """
    w = np.asarray(w, np.float64)
    bsize = w.shape[1]
    K = np.shape(layout)[1] * bsize
    gain = np.ones(K) if gain is None else np.asarray(gain, np.float64)
    blocks = block_ids(layout, z_order)
    squares = np.zeros(K)
    for block, (_, k) in enumerate(blocks):
        squares[k * bsize : (k + 1) * bsize] += np.sum(w[block] ** 2, axis=0)
    factor = gain / np.sqrt(np.maximum(squares, epsilon))
    y = np.zeros(w.shape)
    for block, (_, k) in enumerate(blocks):
        y[block] = w[block] * factor[k * bsize : (k + 1) * bsize]
    return y, squares


def l2_normalize_grad(w, dy, layout, gain=None, epsilon=1e-12, z_order=True):
    """The gradients of `l2_normalize`. With `m = max(S, epsilon)` and sums over an output feature's weights:

    `dW = (gain * dY - [S >= epsilon] * W * sum(gain * dY * W) / m) / sqrt(m)` and `dgain = sum(dY * W) / sqrt(m)`.

    Returns:
      `(dW [blocks, bsize, bsize], dgain [K])`.
    """
    w, dy = np.asarray(w, np.float64), np.asarray(dy, np.float64)
    bsize = w.shape[1]
    K = np.shape(layout)[1] * bsize
    gain = np.ones(K) if gain is None else np.asarray(gain, np.float64)
    blocks = block_ids(layout, z_order)
    _, squares = l2_normalize(w, layout, gain, epsilon, z_order)
    m = np.maximum(squares, epsilon)
    products = np.zeros(K)
    for block, (_, k) in enumerate(blocks):
        products[k * bsize : (k + 1) * bsize] += np.sum(dy[block] * w[block], axis=0)
    dw = np.zeros(w.shape)
    for block, (_, k) in enumerate(blocks):
        j = slice(k * bsize, (k + 1) * bsize)
        through_norm = np.where(squares[j] >= epsilon, gain[j] * products[j] / m[j], 0.0)
        dw[block] = (gain[j] * dy[block] - w[block] * through_norm) / np.sqrt(m[j])
    return dw, products / np.sqrt(m)


# ---------------------------------------------------------------------------------------------------------------------
# Projections onto a subset of the feature rows: `lut` lists distinct rows, activations are [features, ...]


def gather(x, lut):
    """`y[i] = x[lut[i]]`. Its gradient is `scatter`."""
    x = np.asarray(x, np.float64)
    return np.array([x[row] for row in lut]).reshape(len(lut), *x.shape[1:])


def scatter(x, lut, nhidden):
    """`y[lut[i]] = x[i]`, 0 in the other of the nhidden rows. Its gradient is `gather`."""
    x = np.asarray(x, np.float64)
    y = np.zeros((nhidden, *x.shape[1:]))
    for i, row in enumerate(lut):
        y[row] = x[i]
    return y


def scatter_add(x, y, lut):
    """x with `y[i]` added in row `lut[i]`. Its gradients are dz for x and `gather(dz)` for y."""
    z = np.array(x, np.float64)
    for i, row in enumerate(lut):
        z[row] += np.asarray(y, np.float64)[i]
    return z


def scatter_mul(x, y, lut):
    """x with row `lut[i]` multiplied by `y[i]`."""
    z = np.array(x, np.float64)
    for i, row in enumerate(lut):
        z[row] *= np.asarray(y, np.float64)[i]
    return z


def scatter_mul_grad(dz, x, y, lut):
    """The gradients of `scatter_mul`: `(dx, dy)`, dz * y in the rows of lut and dz in others; dz * x gathered."""
    return scatter_mul(dz, y, lut), gather(np.asarray(dz, np.float64) * np.asarray(x, np.float64), lut)


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise operators


def _sigmoid(x):
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1.0) / (1.0 + np.exp(-np.abs(x)))


def elementwise(op, x, y=None, alpha=1.0):
    """An elementwise operator by its name, `add` to `minimum` on x and y, `negative` to `swish` on x."""
    x = np.asarray(x, np.float64)
    y = None if y is None else np.asarray(y, np.float64)
    with np.errstate(all="ignore"):
        return {
            "add": lambda: x + y,
            "subtract": lambda: x - y,
            "multiply": lambda: x * y,
            "divide": lambda: x / y,
            "maximum": lambda: np.maximum(x, y),
            "minimum": lambda: np.minimum(x, y),
            "negative": lambda: -x,
            "reciprocal": lambda: 1 / x,
            "square": lambda: x * x,
            "sqrt": lambda: np.sqrt(x),
            "exp": lambda: np.exp(x),
            "log": lambda: np.log(x),
            "sigmoid": lambda: _sigmoid(x),
            "tanh": lambda: np.tanh(x),
            "relu": lambda: np.where(x < 0, 0.0, x),
            "elu": lambda: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
            "gelu": lambda: x * _sigmoid(2 * np.sqrt(2 / np.pi) * (x + alpha * x**3)),
            "swish": lambda: x * _sigmoid(alpha * x),
        }[op]()


def elementwise_grad(op, dz, x, y=None, alpha=1.0, z=None):
    """Its derivatives: dx, or `(dx, dy)` for an op on two. sigmoid, tanh and relu go by their output z.

    A tie of maximum or minimum gives both operands the whole gradient.
    """
    dz, x = np.asarray(dz, np.float64), np.asarray(x, np.float64)
    y = None if y is None else np.asarray(y, np.float64)
    z = elementwise(op, x, y, alpha) if z is None else np.asarray(z, np.float64)

    def gated(v, dv):  # the derivative of x sigmoid(v)
        s = _sigmoid(v)
        return dz * (s + x * s * (1 - s) * dv)

    c = 2 * np.sqrt(2 / np.pi)
    with np.errstate(all="ignore"):
        return {
            "add": lambda: (dz, dz),
            "subtract": lambda: (dz, -dz),
            "multiply": lambda: (dz * y, dz * x),
            "divide": lambda: (dz / y, -dz * x / y**2),
            "maximum": lambda: (dz * (x >= y), dz * (y >= x)),
            "minimum": lambda: (dz * (x <= y), dz * (y <= x)),
            "negative": lambda: -dz,
            "reciprocal": lambda: -dz / x**2,
            "square": lambda: 2 * dz * x,
            "sqrt": lambda: 0.5 * dz / np.sqrt(x),
            "exp": lambda: dz * np.exp(x),
            "log": lambda: dz / x,
            "sigmoid": lambda: dz * (z - z * z),
            "tanh": lambda: dz * (1 - z * z),
            "relu": lambda: dz * (z > 0),
            "elu": lambda: dz * np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0))),
            "gelu": lambda: gated(c * (x + alpha * x**3), c * (1 + 3 * alpha * x * x)),
            "swish": lambda: gated(alpha * x, alpha),
        }[op]()


def filter_tensor(x, scale=1.0, saturate=0.0, zero_infs=False, zero_nans=False):
    """Infinities to 0, NaN to 0, times scale, clamped to +-saturate unless that is 0; in this order."""
    x = np.array(x, np.float64)
    if zero_infs:
        x[np.isinf(x)] = 0
    if zero_nans:
        x[np.isnan(x)] = 0
    x = x * float(scale)
    return np.clip(x, -saturate, saturate) if saturate else x


def _along(v, x, axis):
    """A vector of channels in the shape that broadcasts over x along an axis."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return np.asarray(v, np.float64).reshape(shape)


def _sum_but(x, axis):
    return x.sum(tuple(d for d in range(x.ndim) if d != axis % x.ndim))


def bias_act(x, bias, axis=-1, act="none", gain=None):
    """`act(gain x + bias)` along an axis; act is none, relu or fast_gelu, which is `v sigmoid(1.702 v)`."""
    x = np.asarray(x, np.float64)
    v = (x if gain is None else x * _along(gain, x, axis)) + (0 if bias is None else _along(bias, x, axis))
    return {"none": lambda: v, "relu": lambda: np.maximum(v, 0), "fast_gelu": lambda: v * _sigmoid(1.702 * v)}[act]()


def bias_act_grad(dy, x, bias, axis=-1, act="none", gain=None):
    """Its derivatives `(dx, dgain, dbias)`, with `dgain` and `dbias` one number for each channel."""
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    v = bias_act(x, bias, axis, "none", gain)
    if act == "relu":
        dy = dy * (v > 0)
    elif act == "fast_gelu":
        dy = elementwise_grad("swish", dy, v, alpha=1.702)
    return (dy if gain is None else dy * _along(gain, x, axis)), _sum_but(dy * x, axis), _sum_but(dy, axis)


def philox(seed, counter, stream):
    """Philox4x32-7: four words of 32 bits for each counter (J. K. Salmon et al., 2011).

    Args:
      seed: two int32, the key.
      counter: integers `[n]`, the low 64 bits of the counter.
      stream: the next 32 bits.

    Returns:
      uint32 `[n, 4]`.
    """
    low = np.uint64(0xFFFFFFFF)
    key = [np.uint64(int(word) & 0xFFFFFFFF) for word in seed]
    counter = np.asarray(counter, np.uint64)
    c = [counter & low, counter >> np.uint64(32), np.full_like(counter, stream), np.zeros_like(counter)]
    for _ in range(7):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ key[0], p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ key[1], p0 & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, -1).astype(np.uint32)


def dropout_bits(seed, n, keep_prob):
    """Which of n elements are kept, bool: those whose 32 random bits, times 2^-32, are less than keep_prob.

    The high half of element e's bits is half-word `e % 8` of block `e // 8` of stream 0, the low half that of stream 1.
    """
    blocks = np.arange(-(-n // 8))
    high, low = (philox(seed, blocks, stream).view("<u2").reshape(-1)[:n].astype(np.float64) for stream in (0, 1))
    return (high * 2.0**16 + low) * 2.0**-32 < np.float64(np.float32(keep_prob))


def pack_mask(bits):
    """Bits as the int32 words of a mask: bit e is bit `e % 32`, from the lowest, of word `e // 32`."""
    bits = np.asarray(bits, bool).reshape(-1)
    padded = np.zeros(-(-bits.size // 32) * 32, bool)
    padded[: bits.size] = bits
    return np.packbits(padded, bitorder="little").view("<i4")


def dropout(x, bits, keep_prob):
    """`x / keep_prob` where a bit is set, else 0; bits are broadcast over x. The gradient is the same of dy."""
    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.broadcast_to(bits, x.shape), x / np.float64(np.float32(keep_prob)), 0.0)


def concrete_gate(loga, seed, temperature=2 / 3, limit_a=-0.1, limit_b=1.1, epsilon=1e-6):
    """`(gate, s)` of hard concrete gates (C. Louizos, M. Welling, D. P. Kingma, 2018).

    Element e's random number is the upper 24 bits of word `e % 4` of block `e // 4` of stream 2.
    """
    loga = np.asarray(loga, np.float64)
    words = philox(seed, np.arange(-(-loga.size // 4)), 2).reshape(-1)[: loga.size].reshape(loga.shape)
    u = (words >> np.uint32(8)) * 2.0**-24 * (1 - 2 * epsilon) + epsilon
    s = _sigmoid((np.log(u) - np.log1p(-u) + loga) / temperature)
    return np.clip(s * (limit_b - limit_a) + limit_a, 0, 1), s


def concrete_gate_grad(dgate, s, temperature=2 / 3, limit_a=-0.1, limit_b=1.1):
    """The gradient of loga: 0 where the gate is clipped."""
    dgate, s = np.asarray(dgate, np.float64), np.asarray(s, np.float64)
    t = s * (limit_b - limit_a) + limit_a
    return dgate * ((t >= 0) & (t <= 1)) * (limit_b - limit_a) * s * (1 - s) / temperature


def fancy_gather(x, idx):
    """`y[i..., rest...] = x[i..., idx[i...], rest...]`; a negative index counts as 0, one past the end gives 0."""
    x, idx = np.asarray(x, np.float64), np.asarray(idx)
    dim = x.shape[idx.ndim]
    y = np.zeros(idx.shape + x.shape[idx.ndim + 1 :])
    for i in np.ndindex(idx.shape):
        if idx[i] < dim:
            y[i] = x[i][max(idx[i], 0)]
    return y


def fancy_gather_grad(dy, idx, dim):
    """dx: dy in the places that were read, 0 elsewhere."""
    dy, idx = np.asarray(dy, np.float64), np.asarray(idx)
    dx = np.zeros((*idx.shape, dim, *dy.shape[idx.ndim :]))
    for i in np.ndindex(idx.shape):
        if idx[i] < dim:
            dx[i][max(idx[i], 0)] = dy[i]
    return dx


def reduce_max(x, axis):
    """`(y, argmax)`: the search goes from the first element to the last, starting from `(-FLT_MAX, 0)`."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, 0)
    y, place = np.full(x.shape[1:], -float(np.finfo(np.float32).max)), np.zeros(x.shape[1:], np.int64)
    for d in range(x.shape[0]):
        better = x[d] > y
        y, place = np.where(better, x[d], y), np.where(better, d, place)
    return y, place


def reduce_max_grad(dy, argmax, axis, dim):
    """dx: dy at argmax, 0 elsewhere."""
    dx = np.where(np.arange(dim).reshape(-1, *[1] * argmax.ndim) == argmax, np.asarray(dy, np.float64), 0.0)
    return np.moveaxis(dx, 0, axis)


# ---------------------------------------------------------------------------------------------------------------------
# LSTM and embedding


def lstm_gates(c, i, u, f, o, forget_bias=1.0):
    """`(c_next, h_next)` of an LSTM cell with the gates' arguments i, u, f, o, all `[N, K]`."""
    c, i, u, f, o = (np.asarray(x, np.float64) for x in (c, i, u, f, o))
    c_next = _sigmoid(f + forget_bias) * c + _sigmoid(i) * np.tanh(u)
    return c_next, _sigmoid(o) * np.tanh(c_next)


def lstm_gates_grad(dc_next, dh_next, c, i, u, f, o, forget_bias=1.0):
    """`(dc, di, du, df, do)` given the gradients of c_next and h_next, by the chain rule."""
    dc_next, dh_next, c, i, u, f, o = (np.asarray(x, np.float64) for x in (dc_next, dh_next, c, i, u, f, o))
    c_next, _ = lstm_gates(c, i, u, f, o, forget_bias)
    si, sf, so = _sigmoid(i), _sigmoid(f + forget_bias), _sigmoid(o)
    d_tanh, do = dh_next * so, dh_next * np.tanh(c_next) * so * (1 - so)
    d = dc_next + d_tanh / np.cosh(c_next) ** 2
    return d * sf, d * np.tanh(u) * si * (1 - si), d * si / np.cosh(u) ** 2, d * c * sf * (1 - sf), do


def sparse_relu_test(x, alpha=1.0):
    """`max(x - cut, 0)`, cut = mean + alpha * (population) standard deviation over the last axis."""
    x = np.asarray(x, np.float64)
    return np.maximum(x - x.mean(-1, keepdims=True) - float(alpha) * x.std(-1, keepdims=True), 0.0)


def embedding_lookup(emb, idx):
    """`y[..., :] = emb[idx[...], :]`; rows of zeros where an index is not in `[0, rows)`."""
    emb, idx = np.asarray(emb, np.float64), np.asarray(idx)
    y = np.zeros((*idx.shape, emb.shape[1]))
    for place in np.ndindex(idx.shape):
        if 0 <= idx[place] < emb.shape[0]:
            y[place] = emb[idx[place]]
    return y


def embedding_lookup_grad(dy, idx, rows):
    """The gradient `[rows, K]` of the table: each row sums dy over the places that read it."""
    dy, idx = np.asarray(dy, np.float64), np.asarray(idx)
    dw = np.zeros((rows, dy.shape[-1]))
    for place in np.ndindex(idx.shape):
        if 0 <= idx[place] < rows:
            dw[idx[place]] += dy[place]
    return dw


# Normalization


def _segmented(x, axis, segments):
    """x as `[outer, segments, features, inner]`, features of one segment next to each other."""
    x = np.asarray(x, np.float64)
    axis = range(x.ndim)[axis]
    outer, inner = int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis + 1 :]))
    return x.reshape(outer, segments, x.shape[axis] // segments, inner)


def _normalized(x, dims, epsilon):
    """`(x - mean) / sqrt(variance + epsilon)` over `dims`, and the factor."""
    rstd = 1 / np.sqrt(x.var(axis=dims, keepdims=True) + epsilon)
    return (x - x.mean(axis=dims, keepdims=True)) * rstd, rstd


def layer_norm_test(x, g, b, axis=1, segments=1, epsilon=1e-6, relu=False):
    """`y = x^ * g + b` with `x^ = (x - mean) / sqrt(variance + epsilon)` over the features (dimension `axis`) at each
    other index, of each of `segments` equal contiguous parts by itself; with `relu` `max(y, 0)`.

    Args:
      x: of any rank from 1.
      g, b: one element for each feature, in any shape.

    Returns:
      y, of x's shape.
    """
    cut = _segmented(x, axis, segments)
    xhat, _ = _normalized(cut, 2, epsilon)
    vector = (1, *cut.shape[1:3], 1)
    y = xhat * np.asarray(g, np.float64).reshape(vector) + np.asarray(b, np.float64).reshape(vector)
    return (np.maximum(y, 0) if relu else y).reshape(np.shape(x))


def layer_norm_grad_test(dy, x, g, b, axis=1, segments=1, epsilon=1e-6, relu=False):
    """The gradients of `layer_norm_test`. With t = dy, 0 where the relu gave 0, and d = t * g:

    `dg = sum(t * x^)`, `db = sum(t)`, `dx = (d - mean(d) - x^ * mean(d * x^)) / sqrt(variance + epsilon)`.

    Returns:
      `(dx, dg, db)`; dg and db are `[K, 1]` with axis 0, else `[1, K]`.
    """
    cut = _segmented(x, axis, segments)
    xhat, rstd = _normalized(cut, 2, epsilon)
    vector = (1, *cut.shape[1:3], 1)
    g, b = np.asarray(g, np.float64).reshape(vector), np.asarray(b, np.float64).reshape(vector)
    t = _segmented(dy, axis, segments)
    if relu:
        t = np.where(xhat * g + b > 0, t, 0)
    d = t * g
    dx = (d - d.mean(axis=2, keepdims=True) - xhat * (d * xhat).mean(axis=2, keepdims=True)) * rstd
    shape = (-1, 1) if range(np.ndim(x))[axis] == 0 else (1, -1)
    return dx.reshape(np.shape(x)), (t * xhat).sum(axis=(0, 3)).reshape(shape), t.sum(axis=(0, 3)).reshape(shape)


def _channel_vector(v, x):
    return np.asarray(v, np.float64).reshape(1, x.shape[1], *[1] * (x.ndim - 2))


def _other_dims(x):
    return (0, *range(2, x.ndim))


def batch_norm_inf_test(x, g, b, m, v, epsilon=1e-6):
    """`y = (x - m) / sqrt(v + epsilon) * g + b`, by channel: x is `[N, C, ...]`, the others have C elements."""
    x = np.asarray(x, np.float64)
    g, b, m, v = (_channel_vector(u, x) for u in (g, b, m, v))
    return (x - m) / np.sqrt(v + epsilon) * g + b


def batch_norm_test(x, g, b, epsilon=1e-6):
    """`batch_norm_inf_test` with each channel's own mean and (biased) variance: `(y, mean [C], variance [C])`."""
    x = np.asarray(x, np.float64)
    m, v = x.mean(axis=_other_dims(x)), x.var(axis=_other_dims(x))
    return batch_norm_inf_test(x, g, b, m, v, epsilon), m, v


def batch_norm_grad_test(dy, x, g, m, v, epsilon=1e-6):
    """The gradients of `batch_norm_test`'s y. With n elements to a channel and x^ = (x - m) / sqrt(v + epsilon):

    `dg = sum(dy * x^)`, `db = sum(dy)`, `dx = (dy - (x^ * dg + db) / n) * g / sqrt(v + epsilon)`.

    Returns:
      `(dx, dg [C], db [C])`.
    """
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    g, m, v = (_channel_vector(u, x) for u in (g, m, v))
    rstd = 1 / np.sqrt(v + epsilon)
    xhat = (x - m) * rstd
    dg, db = ((u).sum(axis=_other_dims(x)) for u in (dy * xhat, dy))
    n = x.size // x.shape[1]
    dx = (dy - (xhat * _channel_vector(dg, x) + _channel_vector(db, x)) / n) * g * rstd
    return dx, dg, db


def batch_norm_inf_grad_test(dy, x, g, m, v, epsilon=1e-6):
    """The gradients of `batch_norm_inf_test`: `(dx, dg, db, dm, dv)`, the last four `[C]`."""
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    g, m, v = (_channel_vector(u, x) for u in (g, m, v))
    rstd = 1 / np.sqrt(v + epsilon)
    dims = _other_dims(x)
    dg, db = (dy * (x - m) * rstd).sum(axis=dims), dy.sum(axis=dims)
    flat = g.reshape(-1) * rstd.reshape(-1)
    return dy * g * rstd, dg, db, -flat * db, -0.5 * flat * rstd.reshape(-1) * dg
