"""The decode kernel: Y = X·Wᵀ for a whole hybrid layer in one launch, M ≤ 32.

    Y[m, y0 + r] = Σ_k X[m, xs + k] · S[r, k]  +  Σ_k X[m, xd + k] · D[r, k]

    X  [M, ldx]        e4m3 or bf16, row-major, as the quantiser wrote it
    S  rows × cols     2:4: a `Blob24` (values row-major, then metadata), one pointer per region
    D  rows × cols     dense, row-major, one pointer per region
    Y  [M, N]          bf16 or f16; or f32 partial sums [split, M, N] when k is split over programs

At these M the bytes of W decide: 0.625 B a weight for 2:4, 1 B for dense FP8. A program owns
groups of row tiles (16 rows each); its warps divide k in blocks of 128 and add up through shared
memory at the end of a group, in fixed order. Each warp has its own ring of slots in shared memory
and keeps it full with cp.async, across the ends of groups and across kinds: many bytes under way,
no registers for them, and no barriers but those of the sums. The first programs take the 2:4 rows,
the rest the dense rows; a layer whose rows have both (input-split) adds both into one accumulator.
From M = 17 on X counts as well: every program reads it through L2.

Limits: M ≤ 8·token_tiles, rows of W and X in steps of 16 bytes. What lies outside is zero in shared
memory, which is addressed from its start and so must stay one allocation (held by a test): X if it
is kept [warp, step], then the rings [warp, slot], then the sums. What a kernel is compiled for is
one frozen `decode_plan.Cut`.
"""

# Device code has no Python types, and its tuples grow by `+` alone.
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm_spense.kernels import fragments, ptx
from vllm_spense.kernels.decode_sums import store_sums

__all__ = ["decode_kernel"]


@gluon.jit
def _lanes(C: gl.constexpr):
    tid = gl.arange(0, C.warps * 32, layout=ptx.threads(C.warps))
    return tid // 32, tid % 32


@gluon.jit
def _locate(side, group, R: gl.constexpr, REGIONS: gl.constexpr):
    """Group number over all regions of a kind -> (address, first row, rows, first channel of Y)."""
    pointers, rows, starts = side
    address = pointers[0].to(gl.int64)
    count = rows[0]
    start = starts[0]
    first = 0
    seen = gl.cdiv(rows[0], 16 * R)
    for i in gl.static_range(1, REGIONS):
        here = group >= seen
        address = gl.where(here, pointers[i].to(gl.int64), address)
        count = gl.where(here, rows[i], count)
        start = gl.where(here, starts[i], start)
        first = gl.where(here, seen, first)
        seen += gl.cdiv(rows[i], 16 * R)
    return address, (group - first) * (16 * R), count, start


@gluon.jit
def _x_slot(index, step, C: gl.constexpr):
    """Where this warp has X for a step: byte in shared memory."""
    warp, _ = _lanes(C)
    if C.keep_x:
        steps: gl.constexpr = _turn_steps(C)
        return (warp * steps + step) * (C.token_tiles * 1024 * C.itemsize)
    else:
        return _slot(index, C)


@gluon.jit
def _slot(index, C: gl.constexpr):
    """The ring slot of step `index`, counted over all groups: byte in shared memory."""
    warp, _ = _lanes(C)
    return C.ring_start + (warp * C.depth + index % C.depth) * C.slot


@gluon.constexpr_function
def _turn_steps(C):
    """Steps of a warp in one group, at most."""
    steps = C.sparse.steps, C.dense.steps
    return sum(steps) if C.mixed else max(steps)


@gluon.constexpr_function
def _x_in_slot(C):
    """Bytes of X at the start of a ring slot."""
    return 0 if C.keep_x else C.token_tiles * 1024 * C.itemsize


@gluon.jit
def _copy_kind(side, x, M, group, index, step, x_step, fresh, C: gl.constexpr,
               SPARSE: gl.constexpr):  # fmt: skip
    """Start the copies of one step: R blocks of W, and X unless it is there already."""
    K: gl.constexpr = C.sparse if SPARSE else C.dense
    R: gl.constexpr = K.tiles
    B: gl.constexpr = C.itemsize
    REGIONS: gl.constexpr = K.regions
    row_bytes: gl.constexpr = (K.cols // 2 if SPARSE else K.cols) * B
    META_TILES: gl.constexpr = (K.cols * B + 63) // 64  # of 64 rows × 64 k (FP8) or 32 k (16 bits)
    META_ROW: gl.constexpr = META_TILES * (512 // B)
    warp, lane = _lanes(C)
    g = lane // 4
    t = lane % 4
    kb = step * C.warps + warp
    if fresh:
        at = x.to(gl.int64) + (K.x_start + kb * 128) * B
        fragments.copy_x(
            _x_slot(index, x_step, C), at, lane, M, K.cols - kb * 128, C.ldx, C.token_tiles,
            SPARSE, B,
        )  # fmt: skip
    base, first, count, _ = _locate(side, group, R, REGIONS)
    BLOCK: gl.constexpr = (64 if SPARSE else 128) * B  # bytes of a row in a block
    k = kb * BLOCK + t * 16
    left = row_bytes - k
    at = base + first.to(gl.int64) * row_bytes + (g * row_bytes + k)
    slot = _slot(index, C) + _x_in_slot(C)
    for r in gl.static_range(R):
        row = first + r * 16
        live = gl.where(row < count, 16, 0)
        live8 = live
        if not C.even_rows:
            live = gl.where(row + g < count, 16, 0)
            live8 = gl.where(row + g + 8 < count, 16, 0)
        w = at + r * (16 * row_bytes)
        to = slot + r * (BLOCK * 16)
        fragments.copy_rows(to, w, lane, left, live, live8, row_bytes, BLOCK // 64)
    if SPARSE:
        metas = base + count.to(gl.int64) * row_bytes + kb * 1024
        for pair in gl.static_range((R + 1) // 2):
            mine = pair * 2 + lane // 16
            tile = first // 16 + mine
            m = metas + (tile // 4).to(gl.int64) * META_ROW + tile % 4 * (128 // B)
            live = gl.where((mine < R) & (tile * 16 < count), 16, 0)
            to = slot + R * (1024 * B) + pair * 512
            fragments.copy_metadata(to, m, lane, META_TILES - kb * (2 * B), live, B)


@gluon.jit
def _copy(sparse, dense, x, M, program, programs, rounds, split, index, C: gl.constexpr,
          S: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Start the copies of step `index`, counted over all groups of this program, as one group."""
    SSTEPS: gl.constexpr = C.sparse.steps if S else 0
    DSTEPS: gl.constexpr = C.dense.steps if D else 0
    turn = index // (SSTEPS + DSTEPS)
    i = index % (SSTEPS + DSTEPS)
    group = program + turn * programs
    fresh = turn == 0 if C.keep_x else True
    if turn < rounds:
        if S and D:
            if i < SSTEPS:
                _copy_kind(
                    sparse, x, M, group, index, split * SSTEPS + i, i, fresh, C, True
                )  # fmt: skip
            else:
                _copy_kind(
                    dense, x, M, group, index, split * DSTEPS + i - SSTEPS, i, fresh, C, False
                )  # fmt: skip
        elif S:
            _copy_kind(sparse, x, M, group, index, split * SSTEPS + i, i, fresh, C, True)
        else:
            _copy_kind(dense, x, M, group, index, split * DSTEPS + i, i, fresh, C, False)
    ptx.commit_copies()


@gluon.jit
def _multiply(acc, index, step, C: gl.constexpr, SPARSE: gl.constexpr):
    """Add the products of step `index`."""
    K: gl.constexpr = C.sparse if SPARSE else C.dense
    R: gl.constexpr = K.tiles
    NT: gl.constexpr = C.token_tiles
    B: gl.constexpr = C.itemsize
    TYPE: gl.constexpr = C.operand
    _, lane = _lanes(C)
    x = _x_slot(index, step, C)
    b = ()
    for n in gl.static_range(NT):
        if SPARSE:
            b = b + (fragments.sparse_x(x + n * (1024 * B), lane // 4, lane % 4, B),)
        else:
            b = b + (fragments.dense_x(x + n * (1024 * B), lane // 4, lane % 4, B),)
    slot = _slot(index, C) + _x_in_slot(C)
    for r in gl.static_range(R):
        if SPARSE:
            meta = slot + R * (1024 * B) + r * 256
            acc = fragments.sparse_tile(
                acc, slot + r * (1024 * B), meta, lane, b, r, R, NT, B, TYPE
            )  # fmt: skip
        else:
            w = slot + r * (2048 * B)
            acc = fragments.dense_tile(acc, w, lane, b, r, R, NT, B, TYPE)
    return acc


@gluon.jit
def _groups(x, y, shared, sparse, dense, M, N, program, programs, groups, split,
            C: gl.constexpr, S: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Groups program, program + programs, …, of the 2:4 kind if S, of the dense kind if D."""
    SSTEPS: gl.constexpr = C.sparse.steps if S else 0
    DSTEPS: gl.constexpr = C.dense.steps if D else 0
    DEPTH: gl.constexpr = C.depth
    R: gl.constexpr = C.sparse.tiles if S else C.dense.tiles
    REGIONS: gl.constexpr = C.sparse.regions if S else C.dense.regions
    rounds = gl.cdiv(groups - program, programs)
    if C.pdl:
        ptx.wait_for_previous_kernel()
    for d in gl.static_range(DEPTH):
        _copy(sparse, dense, x, M, program, programs, rounds, split, d, C, S, D)
    for turn in range(rounds):
        z = gl.zeros([C.warps * 32], gl.float32, layout=ptx.threads(C.warps))
        acc = ((z, z, z, z),) * (C.token_tiles * R)
        here = turn * (SSTEPS + DSTEPS)
        if S:
            for i in range(SSTEPS):
                ptx.await_copies(DEPTH - 1)
                acc = _multiply(acc, here + i, i, C, True)
                ptx.sync_warp()
                ahead = here + i + DEPTH
                _copy(sparse, dense, x, M, program, programs, rounds, split, ahead, C, S, D)
        if D:
            here += SSTEPS
            for j in range(DSTEPS):
                ptx.await_copies(DEPTH - 1)
                acc = _multiply(acc, here + j, SSTEPS + j, C, False)
                ptx.sync_warp()
                ahead = here + j + DEPTH
                _copy(sparse, dense, x, M, program, programs, rounds, split, ahead, C, S, D)
        _, first, count, start = _locate(
            sparse if S else dense, program + turn * programs, R, REGIONS
        )  # fmt: skip
        store_sums(acc, shared, y, M, N, first, count, start, R, C)


@gluon.jit(do_not_specialize=["M"])
def decode_kernel(x, y, sparse, dense, M, N, sparse_programs, dense_programs, sparse_groups,
                  dense_groups, SHARED_ROWS: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """See the head of the module. `sparse` and `dense` are (pointers, rows, first channels)."""
    if C.pdl:
        ptx.let_next_kernel_start()
    program = gl.program_id(0)
    split = gl.program_id(1)
    if C.split > 1:
        y += split.to(gl.int64) * M * N
    shared = gl.allocate_shared_memory(
        gl.float32, [SHARED_ROWS, C.warps * C.warps * 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    if C.mixed:
        _groups(
            x, y, shared, sparse, dense, M, N, program, sparse_programs, sparse_groups, split,
            C, True, True,
        )  # fmt: skip
    elif program < sparse_programs:
        if C.sparse.regions > 0:
            _groups(
                x, y, shared, sparse, dense, M, N, program, sparse_programs, sparse_groups, split,
                C, True, False,
            )  # fmt: skip
    elif C.dense.regions > 0:
        _groups(
            x, y, shared, sparse, dense, M, N, program - sparse_programs, dense_programs,
            dense_groups, split, C, False, True,
        )  # fmt: skip
