"""The loops of `decoding_cpu`: one token of each of B sequences through the whole model, in one call.

The token goes through a list of phases, eight a layer. A phase has units: a few rows of a matrix, a sequence, a head of
a sequence. Threads take units off the phase's counter until none is left, wait until all are done, and go on to the
next: so any number of threads will do, and one that comes late finds phases done and catches up. A unit is computed by
one thread, in one order, whatever else is in the batch: a sequence has the same result alone, bit for bit.

With one sequence, or few, time is what it takes to read the weights. They are read as they are stored, once a step;
everything else is float32 in scratch, [B, width] for each of the places below.
"""

from smi_kernels.compiled import Loop, helper, table
from smi_kernels.vectors import (
    BFLOAT16,
    FLOAT32,
    LANES,
    add,
    div,
    exp,
    fetch_add,
    flush_denormals,
    fma,
    full,
    load,
    load_bfloat16,
    load_float16,
    maximum,
    mul,
    one,
    restore_denormals,
    splat,
    sqrt,
    store,
    store_bfloat16,
    store_float16,
    sub,
    sums,
    total,
    wait_for,
    zero,
)

VECTOR = 4 * LANES  # bytes
UNIT = 32  # rows of a matrix

# what is in scratch: the residual stream and what is to be added to it; the inputs of the matrices of the time mix, in
# the order of its mixes; what comes of them; the same for the channel mix; logits
(
    X, OUT, X_R, X_W, X_K, X_V, X_A, X_G, R, K, V, V_FIRST, LOW_W, LOW_A, LOW_V, LOW_G, W, A, V_MIX, G, MIXED,
    X_FFN, INNER, LOGITS,
) = range(24)  # fmt: skip
PLACES = 24

# a layer's vectors, float32 [C] each
(
    LN1_WEIGHT, LN1_BIAS, MIX_R, MIX_W, MIX_K, MIX_V, MIX_A, MIX_G, W0, A0, V0, K_K, K_A, R_K, LN_X_WEIGHT, LN_X_BIAS,
    LN2_WEIGHT, LN2_BIAS, MIX_FFN,
) = range(19)  # fmt: skip
VECTORS = 19

# columns of the table of matrices: address, output rows, input columns, dtype, where input and output are, what is
# done to the output
ADDRESS, ROWS, COLUMNS, KIND, SOURCE, TARGET, ACTIVATION = range(7)
NONE, TANH, SIGMOID, SQUARED_RELU = range(4)

# matrices of a layer by phase: inputs of the time mix, second factors of its low-rank maps, its output, key and value
# of the channel mix. The head comes after the last layer
FIRST, SECOND, OUTPUT, KEY, VALUE, MATRICES = 0, 7, 11, 12, 13, 14

# a phase's two counters lie in cache lines of their own; bytes
PHASES = 8
COUNTERS, DONE = 128, 64


@helper
def scratch_size(head_size):
    """Floats of scratch that a thread needs of its own."""
    return max(4 * LANES * LANES, LANES * LANES + 9 * head_size)


@helper
def _sigmoid(x):
    return div(one(), add(one(), exp(sub(zero(), x))))


@helper
def _activate(x, activation):
    if activation == TANH:
        return sub(mul(full(2.0), _sigmoid(mul(full(2.0), x))), one())
    if activation == SIGMOID:
        return _sigmoid(x)
    if activation == SQUARED_RELU:
        x = maximum(x, zero())
        return mul(x, x)
    return x


def _product_of(load_weights, size):
    """The matrix product for one dtype of weights, `size` bytes each."""

    @helper
    def product(weights, rows, columns, first, last, source, target, batch, activation, partial):
        """Rows first .. last - 1 of activation(W x) for the x [columns] of every sequence; whole vectors are written:
        behind the last row of W stands its copy."""
        stride = (rows + LANES - 1) // LANES * VECTOR
        for row in range(first, last, LANES):
            together = batch // 4 * 4
            for b in range(0, together, 4):
                x = source + 4 * b * columns
                for j in range(LANES):
                    w = weights + size * columns * min(row + j, rows - 1)
                    y0, y1, y2, y3 = zero(), zero(), zero(), zero()
                    for i in range(0, columns, LANES):
                        w_i, at = load_weights(w + size * i), x + 4 * i
                        y0 = fma(w_i, load(at), y0)
                        y1 = fma(w_i, load(at + 4 * columns), y1)
                        y2 = fma(w_i, load(at + 8 * columns), y2)
                        y3 = fma(w_i, load(at + 12 * columns), y3)
                    at = partial + j * VECTOR
                    store(y0, at)
                    store(y1, at + LANES * VECTOR)
                    store(y2, at + 2 * LANES * VECTOR)
                    store(y3, at + 3 * LANES * VECTOR)
                for j in range(4):
                    y = _activate(sums(partial + j * LANES * VECTOR), activation)
                    store(y, target + (b + j) * stride + 4 * row)
            for b in range(together, batch):
                x = source + 4 * b * columns
                for j in range(LANES):
                    w = weights + size * columns * min(row + j, rows - 1)
                    y = zero()
                    for i in range(0, columns, LANES):
                        y = fma(load_weights(w + size * i), load(x + 4 * i), y)
                    store(y, partial + j * VECTOR)
                store(_activate(sums(partial), activation), target + b * stride + 4 * row)

    return product


_product_float32 = _product_of(load, 4)
_product_bfloat16 = _product_of(load_bfloat16, 2)
_product_float16 = _product_of(load_float16, 2)


@helper
def _products(matrices, first, last, batch, scratch, places, partial, counters):
    """A phase: matrices first .. last - 1 of the table."""
    units = 0
    for m in range(first, last):
        units += (matrices[m, ROWS] + UNIT - 1) // UNIT
    unit = fetch_add(counters)
    while unit < units:
        m, before = first, 0
        while unit - before >= (matrices[m, ROWS] + UNIT - 1) // UNIT:
            before += (matrices[m, ROWS] + UNIT - 1) // UNIT
            m += 1
        weights, rows, columns = matrices[m, ADDRESS], matrices[m, ROWS], matrices[m, COLUMNS]
        source, target = scratch + places[matrices[m, SOURCE]], scratch + places[matrices[m, TARGET]]
        start = (unit - before) * UNIT
        end = min(start + UNIT, rows)
        kind, activation = matrices[m, KIND], matrices[m, ACTIVATION]
        if kind == FLOAT32:
            _product_float32(weights, rows, columns, start, end, source, target, batch, activation, partial)
        elif kind == BFLOAT16:
            _product_bfloat16(weights, rows, columns, start, end, source, target, batch, activation, partial)
        else:
            _product_float16(weights, rows, columns, start, end, source, target, batch, activation, partial)
        fetch_add(counters + DONE)
        unit = fetch_add(counters)
    wait_for(counters + DONE, units)


@helper
def _load(address, index, kind):
    if kind == FLOAT32:
        return load(address + 4 * index)
    if kind == BFLOAT16:
        return load_bfloat16(address + 2 * index)
    return load_float16(address + 2 * index)


@helper
def _store(value, address, index, kind):
    if kind == FLOAT32:
        store(value, address + 4 * index)
    elif kind == BFLOAT16:
        store_bfloat16(value, address + 2 * index)
    else:
        store_float16(value, address + 2 * index)


@helper
def _statistics(x, size, eps):
    """Mean and 1 / sqrt(variance + eps), in every lane; eps: its address, in all that follows."""
    share = full(1.0 / size)
    mean = zero()
    for i in range(0, 4 * size, VECTOR):
        mean = add(mean, load(x + i))
    mean = mul(total(mean), share)
    variance = zero()
    for i in range(0, 4 * size, VECTOR):
        distance = sub(load(x + i), mean)
        variance = fma(distance, distance, variance)
    return mean, div(one(), sqrt(fma(total(variance), share, splat(eps))))


@helper
def _add(x, y, width):
    for i in range(0, 4 * width, VECTOR):
        store(add(load(x + i), load(y + i)), x + i)


@helper
def _normalise(x, target, width, weight, bias, eps):
    mean, scale = _statistics(x, width, eps)
    for i in range(0, 4 * width, VECTOR):
        store(fma(mul(sub(load(x + i), mean), scale), load(weight + i), load(bias + i)), target + i)


@helper
def _mix(x, shift, kind, width, weight, bias, eps, mixes, count, target, target_stride):
    """Norm of x, mixed with the last token's in `count` ways; becomes the last token's."""
    mean, scale = _statistics(x, width, eps)
    for i in range(0, width, LANES):
        at = 4 * i
        h = fma(mul(sub(load(x + at), mean), scale), load(weight + at), load(bias + at))
        distance = sub(_load(shift, i, kind), h)
        for m in range(count):
            store(fma(distance, load(mixes + 4 * m * width + at), h), target + m * target_stride + at)
        _store(h, shift, i, kind)


@helper
def _embed(x, embedding, kind, index, width, weight, bias, eps):
    for i in range(0, width, LANES):
        store(_load(embedding, index * width + i, kind), x + 4 * i)
    _normalise(x, x, width, weight, bias, eps)


@helper
def _head(scratch, places, at, vectors, width, size, first_layer, state, constants, partial):
    """One head of one sequence: from the matrices' products to what the output matrix reads.

    at: bytes into the [B, C] arrays; vectors: the layer's, from the head's first channel on; state: [V, K].
    """
    row = 4 * size
    at += scratch
    r, k, v, v_first = at + places[R], at + places[K], at + places[V], at + places[V_FIRST]
    w, a, v_mix, g = at + places[W], at + places[A], at + places[V_MIX], at + places[G]
    mixed = at + places[MIXED]
    block = partial + LANES * VECTOR
    decay, keys, removal, added, values, removed, o = (
        block, block + row, block + 2 * row, block + 3 * row, block + 4 * row, block + 5 * row, block + 6 * row,
    )  # fmt: skip

    squares, bonus = zero(), zero()
    for i in range(0, row, VECTOR):
        here = vectors + i
        w_i = _sigmoid(add(load(here + 4 * W0 * width), load(w + i)))
        store(exp(mul(w_i, splat(constants + 8))), decay + i)
        v_i = load(v + i)
        if first_layer:
            store(v_i, v_first + i)
        else:
            share = _sigmoid(add(load(here + 4 * V0 * width), load(v_mix + i)))
            v_i = fma(sub(load(v_first + i), v_i), share, v_i)
        store(v_i, values + i)
        a_i = _sigmoid(add(load(here + 4 * A0 * width), load(a + i)))
        k_i = load(k + i)
        kk_i = mul(k_i, load(here + 4 * K_K * width))
        squares = fma(kk_i, kk_i, squares)
        store(kk_i, removal + i)
        store(a_i, added + i)
        k_i = mul(k_i, fma(sub(a_i, one()), load(here + 4 * K_A * width), one()))
        store(k_i, keys + i)
        bonus = fma(mul(load(r + i), k_i), load(here + 4 * R_K * width), bonus)
    bonus = total(bonus)
    scale = div(one(), maximum(sqrt(total(squares)), full(1e-12)))
    for i in range(0, row, VECTOR):
        kk_i = mul(load(removal + i), scale)
        store(kk_i, removal + i)
        store(mul(kk_i, sub(zero(), load(added + i))), added + i)

    # S <- S diag(decay) - (S kk) (kk a)^T + v k^T, then S r: lanes over keys, `LANES` values at a time
    for j in range(0, row, VECTOR):
        rows = state + j * size
        for t in range(LANES):
            y = zero()
            for i in range(0, row, VECTOR):
                y = fma(load(rows + t * row + i), load(removal + i), y)
            store(y, partial + t * VECTOR)
        store(sums(partial), removed + j)
        for t in range(LANES):
            removed_t, v_t = splat(removed + j + 4 * t), splat(values + j + 4 * t)
            y = zero()
            for i in range(0, row, VECTOR):
                s = mul(load(rows + t * row + i), load(decay + i))
                s = fma(v_t, load(keys + i), fma(removed_t, load(added + i), s))
                store(s, rows + t * row + i)
                y = fma(s, load(r + i), y)
            store(y, partial + t * VECTOR)
        store(sums(partial), o + j)

    mean, scale = _statistics(o, size, constants + 4)
    for i in range(0, row, VECTOR):
        here = vectors + i
        y = fma(
            mul(sub(load(o + i), mean), scale), load(here + 4 * LN_X_WEIGHT * width), load(here + 4 * LN_X_BIAS * width)
        )
        store(mul(fma(bonus, load(values + i), y), load(g + i)), mixed + i)


@Loop
def step(arguments):
    """See `decoding_cpu.CPUDecoder.step`. Sequences in scratch are in the order of ids."""
    thread = fetch_add(arguments)
    a = table(arguments, 1, 20)[0]
    layers, batch, width, size = a[1], a[2], a[3], a[4]
    matrices, vectors, ends, eps = table(a[5], layers * MATRICES + 1, 7), a[6], a[7], a[8]
    embedding, embedding_kind, ids = a[9], a[10], table(a[11], 1, batch)[0]
    states, att_shift, ffn_shift, shift_kind = a[12], a[13], a[14], a[15]
    scratch, places, partial, counters = a[16], table(a[17], 1, PLACES)[0], a[18], a[19]
    partial += thread * 4 * scratch_size(size)
    flags = flush_denormals()
    heads = width // size
    row = 4 * width
    shift_row = row if shift_kind == FLOAT32 else row // 2
    x, out = scratch + places[X], scratch + places[OUT]
    x_r, x_ffn = scratch + places[X_R], scratch + places[X_FFN]
    for layer in range(layers):
        here = vectors + layer * VECTORS * row
        first = layer * MATRICES
        phase = counters + layer * PHASES * COUNTERS

        b = fetch_add(phase)
        while b < batch:
            if layer == 0:
                _embed(x + b * row, embedding, embedding_kind, ids[b], width, ends, ends + row, eps)
            else:
                _add(x + b * row, out + b * row, width)
            _mix(
                x + b * row, att_shift + (layer * batch + b) * shift_row, shift_kind, width,
                here + LN1_WEIGHT * row, here + LN1_BIAS * row, eps,
                here + MIX_R * row, 6, x_r + b * row, batch * row,
            )  # fmt: skip
            fetch_add(phase + DONE)
            b = fetch_add(phase)
        wait_for(phase + DONE, batch)

        phase += COUNTERS
        _products(matrices, first + FIRST, first + SECOND, batch, scratch, places, partial, phase)
        phase += COUNTERS
        _products(matrices, first + SECOND, first + OUTPUT, batch, scratch, places, partial, phase)

        phase += COUNTERS
        job = fetch_add(phase)
        while job < batch * heads:
            b, head = job // heads, job % heads
            state = states + ((layer * batch + b) * heads + head) * 4 * size * size
            at = head * 4 * size
            _head(scratch, places, b * row + at, here + at, width, size, layer == 0, state, eps, partial)
            fetch_add(phase + DONE)
            job = fetch_add(phase)
        wait_for(phase + DONE, batch * heads)

        phase += COUNTERS
        _products(matrices, first + OUTPUT, first + KEY, batch, scratch, places, partial, phase)

        phase += COUNTERS
        b = fetch_add(phase)
        while b < batch:
            _add(x + b * row, out + b * row, width)
            _mix(
                x + b * row, ffn_shift + (layer * batch + b) * shift_row, shift_kind, width,
                here + LN2_WEIGHT * row, here + LN2_BIAS * row, eps,
                here + MIX_FFN * row, 1, x_ffn + b * row, 0,
            )  # fmt: skip
            fetch_add(phase + DONE)
            b = fetch_add(phase)
        wait_for(phase + DONE, batch)

        phase += COUNTERS
        _products(matrices, first + KEY, first + VALUE, batch, scratch, places, partial, phase)
        phase += COUNTERS
        _products(matrices, first + VALUE, first + MATRICES, batch, scratch, places, partial, phase)

    phase = counters + layers * PHASES * COUNTERS
    b = fetch_add(phase)
    while b < batch:
        _add(x + b * row, out + b * row, width)
        _normalise(x + b * row, x_ffn + b * row, width, ends + 2 * row, ends + 3 * row, eps)
        fetch_add(phase + DONE)
        b = fetch_add(phase)
    wait_for(phase + DONE, batch)
    phase += COUNTERS
    first = layers * MATRICES
    _products(matrices, first, first + 1, batch, scratch, places, partial, phase)
    restore_denormals(flags)
