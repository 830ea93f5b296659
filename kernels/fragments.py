"""Device helpers of the decode kernel: what one warp copies in, and the products it makes of it.

A warp works on *blocks*: 16 rows × 128 k of W, and the 8 · NT tokens × 128 k of X that go with
them. It copies them to its own part of shared memory (cp.async, 16 bytes a lane), some steps ahead,
and reads its fragments from there. Lane 4g + t holds rows g and g+8 of W and token g of X:

    2:4 values    16 k kept a lane: groups 8·p(t) … 8·p(t)+7 of its two rows, p = 0, 2, 1, 3
    2:4 metadata  the words of its two rows that hold groups of its steps (layouts.py)
    X (for 2:4)   32 k of chunk t & 2 and of the one after it: lanes t and t ^ 1 read the same bytes
    dense, X      16 B a lane, four lanes in a row, then the next 64 B

Any order of k is right as long as W and X agree. `mma.sp` step j = 0 … 3 multiplies the logical
groups τ < 4: 8·p(τ) + 2j and 4 + τ: 8·p(τ) + 2j + 1. Its B operand wants of lane t the pair t & 1
of the groups of τ = t/2 and τ = 2 + t/2, which p puts into two neighbouring chunks of 32 k.
Weights lie in shared memory as 8 rows × 64 bytes, X in rows of tokens with 16-byte pieces swapped.
Run on the CPU, instruction by instruction: tests/gluon_emulator.py.
"""

# Device code has no Python types, and its tuples grow by `+` alone.
# ruff: noqa: ANN001, ANN201, ANN202, RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm_spense.kernels import ptx

__all__ = [
    "copy_metadata",
    "copy_rows",
    "copy_x",
    "dense_tile",
    "dense_x",
    "sparse_tile",
    "sparse_x",
]


@gluon.jit
def copy_rows(slot, at, lane, left, live, live8, row_bytes: gl.constexpr, N: gl.constexpr):
    """Start the copy of 16 rows × 64·N bytes of values or weights, 512 bytes for every 8 rows.

    at: the lane's first piece of row g; left: bytes from there to the end of the row. Neighbouring
    pieces stay neighbours: cp.async is slow where it has to tear a 32-byte sector apart.
    """
    for i in gl.static_range(N):
        inside = left > i * 64
        to = slot + lane * 16 + i * 1024
        ptx.copy_shared(to, at + i * 64, gl.where(inside, live, 0), True)
        ptx.copy_shared(to + 512, at + 8 * row_bytes + i * 64, gl.where(inside, live8, 0), True)


@gluon.jit
def copy_metadata(slot, at, lane, tiles_left, live, BYTES: gl.constexpr):
    """Start the copy of the metadata of two blocks, 256 bytes each: lanes 0 … 15, lanes 16 … 31.

    at: where the lane's block begins. FP8: two k64 tiles 512 bytes apart, 128 bytes of each belong
    to these rows; 16-bit types: four k32 tiles 256 apart, 64 of each. tiles_left: those that exist.
    """
    PIECES: gl.constexpr = 8 // BYTES
    run = lane % 16
    at += run // PIECES * (512 // BYTES) + run % PIECES * 16
    live = gl.where(run // PIECES < tiles_left, live, 0)
    ptx.copy_shared(slot + lane * 16, at, live, True)


@gluon.jit
def _metadata(slot, lane, BYTES: gl.constexpr):
    """A lane's two words for mma.sp: steps 0, 1 in lanes t = 0, 1, steps 2, 3 in lanes t = 2, 3."""
    g = lane // 4
    t = lane % 4
    if BYTES == 1:
        low = ptx.load_shared_pair(slot + g * 16 + t // 2 * 8)
        high = ptx.load_shared_pair(slot + g * 16 + t // 2 * 8 + 128)
        shift = t % 2 * 4
        return ptx.metadata_word(low[0], high[0], shift), ptx.metadata_word(low[1], high[1], shift)
    else:
        w0 = ptx.load_shared_pair(slot + g * 8)
        w1 = ptx.load_shared_pair(slot + g * 8 + 64)
        w2 = ptx.load_shared_pair(slot + g * 8 + 128)
        w3 = ptx.load_shared_pair(slot + g * 8 + 192)
        byte = t % 2 * 2 + t // 2
        return (
            ptx.metadata_word_16bit(w0[0], w1[0], w2[0], w3[0], byte),
            ptx.metadata_word_16bit(w0[1], w1[1], w2[1], w3[1], byte),
        )


@gluon.jit
def _piece(slot, token, piece, SPARSE: gl.constexpr, BYTES: gl.constexpr):
    """Where 16 bytes of a token's block of X lie: rows of 128·BYTES, pieces swapped by token, so
    that neither the copy in nor the fragment loads hit a bank twice."""
    swap = token if SPARSE else token % 2 * 4 + token // 2
    if BYTES == 2:
        swap ^= piece // 8 * 4
    return slot + token * (128 * BYTES) + (piece ^ swap) * 16


@gluon.jit
def copy_x(slot, x, lane, token_left, k_left, LDX: gl.constexpr, NT: gl.constexpr,
           SPARSE: gl.constexpr, BYTES: gl.constexpr):  # fmt: skip
    """Start the copy of 8·NT tokens × 128 k of X; zeros past the end.

    x: address of the block; token_left, k_left: what exists from there on.
    """
    PIECES: gl.constexpr = 8 * BYTES  # of 16 bytes in a token's block
    TOKENS: gl.constexpr = 32 // PIECES
    piece = lane % PIECES
    inside = piece * (16 // BYTES) < k_left
    for i in gl.static_range(8 * NT // TOKENS):
        token = lane // PIECES + i * TOKENS
        to = _piece(slot + token // 8 * (1024 * BYTES), token % 8, piece, SPARSE, BYTES)
        live = inside & (token < token_left)
        address = gl.where(live, x + token * (LDX * BYTES) + piece * 16, x)
        ptx.copy_shared(to, address, gl.where(live, 16, 0), False)


@gluon.jit
def sparse_x(slot, g, t, BYTES: gl.constexpr):
    """B registers of the four mma.sp steps of a block for the token tile at `slot`."""
    low = ()
    high = ()
    for i in gl.static_range(2 * BYTES):
        piece = t // 2 * (4 * BYTES) + i
        low = low + ptx.load_shared(_piece(slot, g, piece, True, BYTES))
        high = high + ptx.load_shared(_piece(slot, g, piece + 2 * BYTES, True, BYTES))
    odd = t % 2
    steps = ()
    for j in gl.static_range(4):
        if BYTES == 1:
            selector = 0x5410 + odd * 0x2222
            p = ptx.pairs_f16(low[2 * j], low[2 * j + 1], selector)
            q = ptx.pairs_f16(high[2 * j], high[2 * j + 1], selector)
            steps = steps + ((p[0], q[0], p[1], q[1]),)
        else:
            b = ()
            for i in gl.static_range(2):
                b = b + (ptx.select_word(low[4 * j + 2 * i], low[4 * j + 2 * i + 1], odd),)
                b = b + (ptx.select_word(high[4 * j + 2 * i], high[4 * j + 2 * i + 1], odd),)
            steps = steps + (b,)
    return steps


@gluon.jit
def dense_x(slot, g, t, BYTES: gl.constexpr):
    """B registers of the eight mma steps of a block for the token tile at `slot`."""
    steps = ()
    for i in gl.static_range(2 * BYTES):
        w = ptx.load_shared(_piece(slot, g, i * 4 + t, False, BYTES))
        if BYTES == 1:
            for j in gl.static_range(4):
                steps = steps + (ptx.pair_f16(w[j]),)
        else:
            steps = steps + ((w[0], w[1]), (w[2], w[3]))
    return steps


@gluon.jit
def _values(slot, lane, BYTES: gl.constexpr):
    """A lane's words of row g and of row g+8: chunk p(t) of the block's kept values."""
    low = ()
    high = ()
    chunk = lane % 2 * 2 + lane % 4 // 2
    for i in gl.static_range(BYTES):
        piece = chunk * BYTES + i
        at = slot + piece // 4 * 1024 + (lane // 4 * 4 + piece % 4) * 16
        low = low + ptx.load_shared(at)
        high = high + ptx.load_shared(at + 512)
    return low, high


@gluon.jit
def _weights(slot, lane, BYTES: gl.constexpr):
    """A lane's words of row g and of row g+8 of a dense block."""
    low = ()
    high = ()
    for i in gl.static_range(2 * BYTES):
        low = low + ptx.load_shared(slot + lane * 16 + i * 1024)
        high = high + ptx.load_shared(slot + lane * 16 + i * 1024 + 512)
    return low, high


@gluon.jit
def _a_registers(low, high, J: gl.constexpr, BYTES: gl.constexpr):
    """A registers of step J from the words of row g and row g+8, for mma.sp and for mma."""
    if BYTES == 1:
        return ptx.rows_f16(low[J], high[J])
    else:
        return low[2 * J], high[2 * J], low[2 * J + 1], high[2 * J + 1]


@gluon.jit
def _replace(values, I: gl.constexpr, value):
    """The tuple with entry I replaced."""
    return values[:I] + (value,) + values[I + 1 :]


@gluon.jit
def sparse_tile(acc, slot, meta, lane, b, RT: gl.constexpr, R: gl.constexpr, NT: gl.constexpr,
                BYTES: gl.constexpr, TYPE: gl.constexpr):  # fmt: skip
    """acc[n·R + RT] += the block at `slot`, `meta` (row tile RT) times token tiles `b`."""
    low, high = _values(slot, lane, BYTES)
    e = _metadata(meta, lane, BYTES)
    for j in gl.static_range(4):
        a = _a_registers(low, high, j, BYTES)
        for n in gl.static_range(NT):
            c = ptx.mma_sp(a, b[n][j], acc[n * R + RT], e[j % 2], j // 2, TYPE)
            acc = _replace(acc, n * R + RT, c)
    return acc


@gluon.jit
def dense_tile(acc, slot, lane, b, RT: gl.constexpr, R: gl.constexpr, NT: gl.constexpr,
               BYTES: gl.constexpr, TYPE: gl.constexpr):  # fmt: skip
    """acc[n·R + RT] += the block at `slot` (row tile RT) times token tiles `b`."""
    low, high = _weights(slot, lane, BYTES)
    for j in gl.static_range(8):
        a = _a_registers(low, high, j, BYTES)
        for n in gl.static_range(NT):
            c = ptx.mma(a, b[n][j], acc[n * R + RT], TYPE)
            acc = _replace(acc, n * R + RT, c)
    return acc
