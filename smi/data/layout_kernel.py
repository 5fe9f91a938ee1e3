"""Laying documents out behind each other, in one pass over their tokens, outside of Python's lock."""

from __future__ import annotations

import numba
from numba import types

# a copy of `smi.data.batch.IGNORE`, which would bring torch along
_IGNORE = -100


def _read(dtype: types.Type) -> types.Array:
    # arrow's memory is not to be written to
    return types.Array(dtype, 1, "C", readonly=True)


@numba.njit(
    types.int64(
        *(_read(dtype) for dtype in (types.int32, types.int32, types.int32, types.int32, types.uint8, types.boolean)),
        *(_read(types.int64) for _ in range(3)),
        types.int64[::1],
        types.int64[::1],
        types.uint8[::1],
        types.int64[::1],
    ),
    nogil=True,
    cache=True,
)
def lay_out(
    ids,
    bounds,
    run_bounds,
    run_tokens,
    run_types,
    run_supervised,
    rows,
    places,
    lengths,
    ids_out,
    labels_out,
    types_out,
    targets_out,
):
    """Write `rows` of a row group (see `smi.data.reading.RowGroup`) to `places` of the outputs, each [tokens].

    Labels and types are those of the next token; a document's last token has no label, and its own type.
    `targets_out`, [rows], gets the number of labels. Returns -1, or the first row whose length is not that of
    `lengths`, or not that of its runs together.
    """
    for i in range(rows.size):
        row, place = rows[i], places[i]
        length = lengths[i]
        runs = 0
        for run in range(run_bounds[row], run_bounds[row + 1]):
            runs += run_tokens[run]
        if length < 1 or length != bounds[row + 1] - bounds[row] or length != runs:
            return row
        # plain loops over slices become vector instructions
        tokens = ids[bounds[row] : bounds[row + 1]]
        ids_row = ids_out[place : place + length]
        for t in range(length):
            ids_row[t] = tokens[t]
        targets = 0
        end = 0
        for run in range(run_bounds[row], run_bounds[row + 1]):
            # nothing comes before the first token, so it is no target
            start = max(end, 1)
            end += run_tokens[run]
            targets_row = tokens[start:end]
            labels_row = labels_out[place + start - 1 : place + end - 1]
            if run_supervised[run]:
                targets += targets_row.size
                for t in range(targets_row.size):
                    labels_row[t] = targets_row[t]
            else:
                labels_row[:] = _IGNORE
            types_out[place + start - 1 : place + end - 1] = run_types[run]
            types_out[place + length - 1] = run_types[run]
        labels_out[place + length - 1] = _IGNORE
        targets_out[i] = targets
    return -1
