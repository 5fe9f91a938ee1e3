"""The loops of the CPU kernel. Importing this module compiles nothing; the first call of a loop does.

One job is one head of one segment: a recurrence that depends on no other. Workers take jobs off a shared counter.
Within a job, tokens are handled in windows of `WINDOW`, whose vectors are first read into float32 scratch with the
decay exponentiated, so that dtype and strides of the inputs are nobody else's concern. The rows of a head lie pages
apart, and most of what reading them takes is waiting: while there is arithmetic to do, the next window's rows are
asked for, a line at a time.

forward     keeps the state transposed: lanes run over values, keys are scalars that are splatted, so that both
            reductions over keys (S a, S r) are sums of vectors. A block of 2 * `LANES` values stays in the
            first-level cache; one sweep over it updates the state, reads the output and prepares the next token's
            S a: 5 multiply-adds an element, one load, one store.
backward    goes through the windows from last to first and through a window in blocks of rows (values), lanes over
            keys. It rebuilds the states of the window from the state at its start and the kept S a, then sweeps the
            gradient of the state from the last token to the first. The sweep from token t to t - 1 reads S_{t-1} once
            for the three gradients it takes part in:

                dw_t += e^w_t * sum_v dS_t S_{t-1}
                da_t += sum_v S_{t-1} dsa_t         dr_{t-1} += sum_v S_{t-1} do_{t-1}
                dS_{t-1} = dS_t diag(e^w_t) + dsa_t a_t^T + do_{t-1} r_{t-1}^T
                dk_{t-1} += sum_v dS_{t-1} v_{t-1}      db_{t-1} += sum_v dS_{t-1} sa_{t-1}
                dv_{t-1} = dS_{t-1} k_{t-1}             dsa_{t-1} = dS_{t-1} b_{t-1}

            where sa_t = S_{t-1} a_t. It is 10 multiply-adds an element, two loads, one store.
"""

from smi_kernels.compiled import Loop, helper, table
from smi_kernels.vectors import (
    BFLOAT16,
    FLOAT32,
    LANES,
    exp,
    fetch_add,
    flush_denormals,
    fma,
    load,
    load_bfloat16,
    load_float16,
    mul,
    one,
    prefetch,
    restore_denormals,
    splat,
    store,
    store_bfloat16,
    store_float16,
    sums,
    transpose,
    zero,
)

WINDOW = 32
VECTOR = 4 * LANES  # bytes
BLOCK = 2 * LANES  # values that the forward sweep handles side by side
# values that the backward sweep handles one after the other: the states of a window then fit into the second-level
# cache twice, for the two threads of a core
ROWS = 16

# columns of the tables that a loop is handed, see `cpu.py`
ADDRESS, BATCH_STRIDE, TIME_STRIDE, HEAD_STRIDE, KIND = range(5)
BATCH, START, LENGTH, SEGMENT, FIRST_WINDOW = range(5)


@helper
def scratch_size(size: int) -> int:
    """Floats of scratch that a thread needs for heads of `size`, forward or backward."""
    return size * size + 15 * (WINDOW + 2) * size + WINDOW * ROWS * size + 2 * ROWS * LANES


@helper
def _read(target, size, source, stride, kind, count):
    """`count` rows of `size` elements, `stride` bytes apart, to contiguous float32."""
    for t in range(count):
        for i in range(0, size, LANES):
            if kind == FLOAT32:
                x = load(source + t * stride + 4 * i)
            elif kind == BFLOAT16:
                x = load_bfloat16(source + t * stride + 2 * i)
            else:
                x = load_float16(source + t * stride + 2 * i)
            store(x, target + 4 * (t * size + i))


@helper
def _write(target, stride, kind, source, size, count):
    """The inverse of `_read`."""
    for t in range(count):
        for i in range(0, size, LANES):
            x = load(source + 4 * (t * size + i))
            if kind == FLOAT32:
                store(x, target + t * stride + 4 * i)
            elif kind == BFLOAT16:
                store_bfloat16(x, target + t * stride + 2 * i)
            else:
                store_float16(x, target + t * stride + 2 * i)


@helper
def _exp(rows, count):
    for i in range(0, 4 * count, VECTOR):
        store(exp(load(rows + i)), rows + i)


@helper
def _fill(rows, count, value):
    for i in range(0, 4 * count, VECTOR):
        store(value, rows + i)


@helper
def _at(operands, index, batch, token, head):
    return (
        operands[index, ADDRESS]
        + batch * operands[index, BATCH_STRIDE]
        + token * operands[index, TIME_STRIDE]
        + head * operands[index, HEAD_STRIDE]
    )


@helper
def _read_window(target, operands, index, batch, token, head, count, size):
    source = _at(operands, index, batch, token, head)
    _read(target, size, source, operands[index, TIME_STRIDE], operands[index, KIND], count)


@helper
def _write_window(operands, index, batch, token, head, source, count, size):
    target = _at(operands, index, batch, token, head)
    _write(target, operands[index, TIME_STRIDE], operands[index, KIND], source, size, count)


@helper
def _prefetch(operands, count, batch, token, head, offset):
    """Asks for the line `offset` bytes into a token's row, in each of the first `count` operands."""
    for i in range(count):
        prefetch(_at(operands, i, batch, token, head) + offset)


@helper
def _forward_window(state, count, size, r, e, k, v, a, b, o, sa, operands, batch, after, head):
    """Advances the transposed state [block, K, BLOCK] over `count` tokens; writes o and S a, [count, V] both.

    The row of a behind the last token is read, and what comes of it is thrown away. `after`: the next window's first
    token.
    """
    row = 4 * size
    for block in range(0, row, 2 * VECTOR):
        here = state + block * size
        sa0, sa1 = zero(), zero()
        for i in range(0, row, 4):
            s = here + i * BLOCK
            a_i = splat(a + i)
            sa0 = fma(load(s), a_i, sa0)
            sa1 = fma(load(s + VECTOR), a_i, sa1)
        for t in range(0, count * row, row):
            store(sa0, sa + t + block)
            store(sa1, sa + t + block + VECTOR)
            _prefetch(operands, 6, batch, after + t // row, head, block)
            v0, v1 = load(v + t + block), load(v + t + block + VECTOR)
            o0, o1, next0, next1 = zero(), zero(), zero(), zero()
            s = here
            for i in range(t, t + row, 4):
                e_i, b_i, k_i = splat(e + i), splat(b + i), splat(k + i)
                s0 = fma(v0, k_i, fma(sa0, b_i, mul(load(s), e_i)))
                s1 = fma(v1, k_i, fma(sa1, b_i, mul(load(s + VECTOR), e_i)))
                store(s0, s)
                store(s1, s + VECTOR)
                r_i, a_i = splat(r + i), splat(a + i + row)
                o0, o1 = fma(s0, r_i, o0), fma(s1, r_i, o1)
                next0, next1 = fma(s0, a_i, next0), fma(s1, a_i, next1)
                s += 2 * VECTOR
            store(o0, o + t + block)
            store(o1, o + t + block + VECTOR)
            sa0, sa1 = next0, next1


@helper
def _load_state(state, source, size):
    """[V, K] to the transposed [block, K, BLOCK]."""
    for v in range(0, size, LANES):
        for k in range(0, size, LANES):
            target = state + 4 * ((v // BLOCK * size + k) * BLOCK + v % BLOCK)
            transpose(target, 4 * BLOCK, source + 4 * (v * size + k), 4 * size)


@helper
def _save_state(target, tile_stride, row_stride, state, size):
    """The transposed state to rows of values: element (v, k) goes to k // LANES tiles, v rows and k % LANES floats."""
    for v in range(0, size, LANES):
        for k in range(0, size, LANES):
            source = state + 4 * ((v // BLOCK * size + k) * BLOCK + v % BLOCK)
            transpose(target + k // LANES * tile_stride + v * row_stride, row_stride, source, 4 * BLOCK)


@helper
def _arguments(address, operands):
    """What `cpu.py` hands to a loop: tables, sizes, three states; this thread's scratch; the count of jobs taken."""
    thread = fetch_add(address)
    a = table(address, 1, 11)[0]
    scratch = a[9] + thread * 4 * scratch_size(a[5])
    return (
        table(a[1], operands, 5), table(a[2], a[3], 5), a[4], a[5], a[6], a[7], a[8], scratch, a[10],
    )  # fmt: skip


@Loop
def forward(arguments):
    """Works on jobs until none is left.

    operands: r, w, k, v, a, b, o, sa.
    """
    operands, segments, heads, size, initial, final, checkpoints, scratch, counter = _arguments(arguments, 8)
    flags = flush_denormals()
    row = 4 * size
    square = row * size
    part = (WINDOW + 1) * row
    state = scratch
    # in the order of the operands
    r = state + square
    e, k, v, a = r + part, r + 2 * part, r + 3 * part, r + 4 * part
    b, o, sa = r + 5 * part, r + 6 * part, r + 7 * part
    job = fetch_add(counter)
    while job < len(segments) * heads:
        segment, head = job // heads, job % heads
        batch, start, length = segments[segment, BATCH], segments[segment, START], segments[segment, LENGTH]
        place = segments[segment, SEGMENT] * heads + head
        if initial:
            _load_state(state, initial + place * square, size)
        else:
            _fill(state, size * size, zero())
        checkpoint = checkpoints + (segments[segment, FIRST_WINDOW] * heads + head) * square
        for window in range(0, length, WINDOW):
            count = min(WINDOW, length - window)
            token = start + window
            if checkpoints:
                _save_state(checkpoint, row * LANES, VECTOR, state, size)
                checkpoint += heads * square
            for i in range(6):
                _read_window(r + i * part, operands, i, batch, token, head, count, size)
            _exp(e, count * size)
            _fill(a + count * row, size, zero())
            _forward_window(state, count, size, r, e, k, v, a, b, o, sa, operands, batch, token + WINDOW, head)
            for i in range(6, 8 if checkpoints else 7):
                _write_window(operands, i, batch, token, head, r + i * part, count, size)
        _save_state(final + place * square, VECTOR, row, state, size)
        job = fetch_add(counter)
    restore_denormals(flags)


@helper
def _rebuild(history, start, start_tile, count, size, e, k, v, b, sa):
    """The states after 1 .. count tokens, `ROWS` of their rows: history[t] is [K / LANES, ROWS, LANES].

    Rows of v and sa begin at the first of the rows; `start` is the state at the window's start, whose tiles
    lie `start_tile` bytes apart.
    """
    row = 4 * size
    tile = ROWS * VECTOR
    for t in range(count):
        before = start if t == 0 else history + (t - 1) * row * ROWS
        before_tile = start_tile if t == 0 else tile
        after = history + t * row * ROWS
        for i in range(0, row, VECTOR):
            e_i, k_i, b_i = load(e + t * row + i), load(k + t * row + i), load(b + t * row + i)
            source = before + i // VECTOR * before_tile
            target = after + i * ROWS
            for j in range(0, 4 * ROWS, 4):
                s = mul(load(source + j * LANES), e_i)
                s = fma(splat(sa + t * row + j), b_i, s)
                s = fma(splat(v + t * row + j), k_i, s)
                store(s, target + j * LANES)


@helper
def _sweep(grad, state, state_tile, size, e, a, r, k, b, dsa, do, v, sa, dw, da, dr, dk, db, partial):
    """Takes dS from token t to token t - 1: e, a, dsa, dw, da are rows of t, the others of t - 1; see the module.

    The products of dv and dsa with the last tile are left in partial, [2, ROWS, LANES].
    """
    for i in range(0, 4 * size, VECTOR):
        e_i, a_i, r_i, k_i, b_i = load(e + i), load(a + i), load(r + i), load(k + i), load(b + i)
        dw_i, da_i, dr_i, dk_i, db_i = load(dw + i), load(da + i), load(dr + i), load(dk + i), load(db + i)
        g = grad + i * ROWS
        s = state + i // VECTOR * state_tile
        for j in range(0, 4 * ROWS, 4):
            s_j, g_j = load(s + j * LANES), load(g + j * LANES)
            dsa_j = splat(dsa + j)
            dw_i = fma(g_j, s_j, dw_i)
            da_i = fma(s_j, dsa_j, da_i)
            g_j = fma(dsa_j, a_i, mul(g_j, e_i))
            do_j = splat(do + j)
            dr_i = fma(s_j, do_j, dr_i)
            g_j = fma(do_j, r_i, g_j)
            store(g_j, g + j * LANES)
            dk_i = fma(g_j, splat(v + j), dk_i)
            db_i = fma(g_j, splat(sa + j), db_i)
            at = partial + j * LANES
            store(fma(g_j, k_i, load(at)), at)
            store(fma(g_j, b_i, load(at + ROWS * VECTOR)), at + ROWS * VECTOR)
        store(dw_i, dw + i)
        store(da_i, da + i)
        store(dr_i, dr + i)
        store(dk_i, dk + i)
        store(db_i, db + i)


@Loop
def backward(arguments):
    """Works on jobs until none is left.

    operands: r, w, k, v, a, b, sa, do, dr, dw, dk, dv, da, db.
    """
    operands, segments, heads, size, grad_final, grad_initial, checkpoints, scratch, counter = _arguments(arguments, 14)
    flags = flush_denormals()
    row = 4 * size
    square = row * size
    part = (WINDOW + 2) * row
    grad = scratch
    history = grad + square
    partial = history + WINDOW * row * ROWS
    # in the order of the operands
    r = partial + 2 * ROWS * VECTOR
    e, k, v, a = r + part, r + 2 * part, r + 3 * part, r + 4 * part
    b, sa, do = r + 5 * part, r + 6 * part, r + 7 * part
    dr = do + part
    dw, dk, dv, da, db, dsa = dr + part, dr + 2 * part, dr + 3 * part, dr + 4 * part, dr + 5 * part, dr + 6 * part
    # token t of a window lies in row t + 1. Row 0 stands for what is before the window
    for x in (r, k, v, b, sa, do):
        _fill(x, size, zero())
    _fill(partial, 2 * ROWS * LANES, zero())

    job = fetch_add(counter)
    while job < len(segments) * heads:
        segment, head = job // heads, job % heads
        batch, start, length = segments[segment, BATCH], segments[segment, START], segments[segment, LENGTH]
        place = segments[segment, SEGMENT] * heads + head
        for j in range(size):
            for i in range(0, row, VECTOR):
                x = load(grad_final + place * square + j * row + i)
                store(x, grad + j // ROWS * ROWS * row + i * ROWS + j % ROWS * VECTOR)
        windows = (length + WINDOW - 1) // WINDOW
        for window in range(windows - 1, -1, -1):
            count = min(WINDOW, length - window * WINDOW)
            token = start + window * WINDOW
            checkpoint = checkpoints + ((segments[segment, FIRST_WINDOW] + window) * heads + head) * square
            for i in range(8):
                _read_window(r + i * part + row, operands, i, batch, token, head, count, size)
            _exp(e + row, count * size)
            # the row behind the last token leaves dS as it is
            end = (count + 1) * row
            _fill(e + end, size, one())
            _fill(a + end, size, zero())
            _fill(dsa + end, size, zero())
            for x in (dr, dw, dk, da, db):
                _fill(x, (count + 2) * size, zero())

            for j in range(0, row, 4 * ROWS):
                tile_start = checkpoint + j * LANES
                _rebuild(
                    history, tile_start, row * LANES, count, size,
                    e + row, k + row, v + row + j, b + row, sa + row + j,
                )  # fmt: skip
                for t in range(count + 1, 0, -1):
                    now, before = t * row, (t - 1) * row
                    for line in range(j, j + 4 * ROWS, 64):
                        _prefetch(operands, 8, batch, token - WINDOW + t - 1, head, line)
                    if t > 1:
                        state, state_tile = history + (t - 2) * row * ROWS, ROWS * VECTOR
                    else:
                        state, state_tile = tile_start, row * LANES
                    _sweep(
                        grad + j * size, state, state_tile, size,
                        e + now, a + now, r + before, k + before, b + before,
                        dsa + now + j, do + before + j, v + before + j, sa + before + j,
                        dw + now, da + now, dr + before, dk + before, db + before, partial,
                    )  # fmt: skip
                    for i in range(0, 4 * ROWS, VECTOR):
                        store(sums(partial + i * LANES), dv + before + j + i)
                        store(sums(partial + (ROWS * 4 + i) * LANES), dsa + before + j + i)
                    _fill(partial, 2 * ROWS * LANES, zero())
            for i in range(row, (count + 1) * row, VECTOR):
                store(mul(load(dw + i), load(e + i)), dw + i)
            for i in range(8, 14):
                _write_window(operands, i, batch, token, head, r + i * part + row, count, size)
        for j in range(size):
            for i in range(0, row, VECTOR):
                x = load(grad + j // ROWS * ROWS * row + i * ROWS + j % ROWS * VECTOR)
                store(x, grad_initial + place * square + j * row + i)
        job = fetch_add(counter)
    restore_denormals(flags)
