"""The block-sparse kernel: tokens times the kept tiles of a region, in Triton.

    Y[m, r] (+)= alpha · Σ_s X[m, c·index[r / R, s] …] · values[r, c·s …]      s < KEPT, tiles R × c

    X       [M, K]                e4m3, bf16 or f16, rows contiguous
    values  [rows, KEPT · c]      as X, row-major: the kept tiles of a row side by side
    index   [rows / R, KEPT]      int32, tiles counted from X's first column
    Y       [M, rows]             bf16 or f16 with a stride; or f32 parts [SPLIT, M, rows]

A program owns one row block and BLOCK_M tokens, walks the row block's kept tiles and multiplies
each with the tokens' columns: full tensor-core tiles, rows of W on the side of the instruction that
is 64 or 128 wide, tokens on the side that may be as narrow as 16. All row blocks have the same
number of tiles, so all programs take the same time. The grid is persistent: programs take (row
block, token block) pairs in turn, GROUP token blocks at a time for each row block, so that W comes
from L2 for all but the first and a group's X stays there.

Bytes: W once (rows · KEPT · c), X once per row block through L2. At small M the first decides, and
SPLIT programs share the tiles of a row block; their f32 parts are added in fixed order by a second
launch. At large M the second decides: with BLOCK_M = 256 and c = 128, R = 128 asks L2 for 50 bytes
a clock and SM at full FP8 speed, R = 64 for 84 (more tokens a program change that little, X being
read once per row block). So tiles of 128 rows are for large M; at small M both are alike.

Limits: X columns in steps of 16 bytes. Not measured on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_sparse_kernel", "sum_parts_kernel"]


@triton.jit
def _locate(
    work: tl.tensor, row_blocks: tl.tensor, token_blocks: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Number of a pair → (row block, token block): down the row blocks in groups of tokens."""
    width = GROUP * row_blocks
    first = work // width * GROUP
    size = tl.minimum(token_blocks - first, GROUP)
    inside = work % width
    return inside // size, first + inside % size


@triton.jit(do_not_specialize=["M", "token_blocks"])
def block_sparse_kernel(
    x: tl.tensor,
    values: tl.tensor,
    index: tl.tensor,
    y: tl.tensor,
    M: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    row_blocks: tl.tensor,
    token_blocks: tl.tensor,
    alpha: tl.tensor,
    KEPT: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> None:
    """See the head of the module. With SPLIT > 1, y is the scratch [SPLIT, M, rows]."""
    split = tl.program_id(1)
    first = split * KEPT // SPLIT
    last = (split + 1) * KEPT // SPLIT
    y += split.to(tl.int64) * M * y_stride
    columns = tl.arange(0, TILE_COLS)
    for work in range(tl.program_id(0), row_blocks * token_blocks, tl.num_programs(0)):
        block, token_block = _locate(work, row_blocks, token_blocks, GROUP)
        rows = block.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
        # Tokens past the end repeat the last one: no masks inside the loop. They are not stored.
        x_rows = tl.minimum(tokens, M - 1).to(tl.int64) * x_stride
        x_at = x + x_rows[:, None] + columns[None, :]  # [BLOCK_M, TILE_COLS]
        w_at = values + rows[:, None] * (KEPT * TILE_COLS) + columns[None, :]
        kept = index + block * KEPT
        tile = tl.load(kept + first)
        acc = tl.zeros((TILE_ROWS, BLOCK_M), tl.float32)
        for slot in tl.range(first, last, num_stages=STAGES):
            w = tl.load(w_at + slot * TILE_COLS)
            x_tile = tl.load(x_at + tile * TILE_COLS)
            acc = tl.dot(w, tl.trans(x_tile), acc)
            tile = tl.load(kept + tl.minimum(slot + 1, KEPT - 1))  # one ahead of its use
        out = tl.trans(acc) * alpha  # [BLOCK_M, TILE_ROWS]
        at = y + tokens.to(tl.int64)[:, None] * y_stride + rows[None, :]
        live = tokens[:, None] < M
        if ACCUMULATE:
            out += tl.load(at, live, other=0.0).to(tl.float32)
        tl.store(at, out.to(y.dtype.element_ty), live)


@triton.jit(do_not_specialize=["M"])
def sum_parts_kernel(
    parts: tl.tensor,
    y: tl.tensor,
    M: tl.tensor,
    rows: tl.tensor,
    y_stride: tl.tensor,
    SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Y[m, r] (+)= Σ_s parts[s, m, r], s ascending; one token and BLOCK rows a program."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    at = parts + token * rows + row
    total = tl.load(at, live, other=0.0)
    for s in tl.static_range(1, SPLIT):
        total += tl.load(at + tl.cast(s, tl.int64) * M * rows, live, other=0.0)
    out = y + token * y_stride + row
    if ACCUMULATE:
        total += tl.load(out, live, other=0.0).to(tl.float32)
    tl.store(out, total.to(y.dtype.element_ty), live)
