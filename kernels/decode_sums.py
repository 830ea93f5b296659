"""Where the decode kernel's partial sums meet: the warps of a program, and split programs.

Both add in fixed order, so the same input gives the same bits, whatever else runs.
"""

# Device code has no Python types, and its tuples grow by `+` alone.
# ruff: noqa: ANN001, ANN201, ANN202, RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm_spense.kernels import ptx

__all__ = ["reduce_kernel", "store_sums"]


@gluon.jit
def _stack(values, N: gl.constexpr):
    """Join N (a power of two) tensors [T] into [T, N]."""
    if N == 2:
        return gl.join(values[0], values[1])
    else:
        even = ()
        odd = ()
        for i in gl.static_range(N // 2):
            even = even + (values[2 * i],)
            odd = odd + (values[2 * i + 1],)
        a = _stack(even, N // 2)
        b = _stack(odd, N // 2)
        return gl.join(a, b).reshape([a.shape[0], N])


@gluon.jit
def _entry(acc, n: gl.constexpr, I: gl.constexpr, R: gl.constexpr):
    return acc[n * R + I // 4][I % 4]


@gluon.jit
def store_sums(acc, shared, y, M, N, first, count, start, R: gl.constexpr, C: gl.constexpr):
    """Add the warps' sums of a group and write them: Y[0 : M, start + first … ].

    Per token tile: as many sums as there are warps go to a row of shared memory as [sum, thread];
    warp i then adds up sum i over the warps, in order.
    """
    W: gl.constexpr = C.warps
    NT: gl.constexpr = C.token_tiles
    COUNT: gl.constexpr = R * 4
    BUFFERS: gl.constexpr = (COUNT + W - 1) // W
    FIRST: gl.constexpr = C.sums_row
    SUM: gl.constexpr = gl.BlockedLayout([1, W, 1], [1, 1, 32], [W, 1, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(1, SUM)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, OUT))[None, :]
    sums = gl.arange(0, W, layout=gl.SliceLayout(1, OUT))[:, None]
    for n in gl.static_range(NT):
        for i in gl.static_range(BUFFERS):
            flat = ()
            for j in gl.static_range(W):
                # past the end repeat the last one; it is not stored
                flat = flat + (_entry(acc, n, min(i * W + j, COUNT - 1), R),)
            shared.index(FIRST + i).reshape([W, W * 32]).store(_stack(flat, W).permute([1, 0]))
        for i in gl.static_range(BUFFERS):
            parts = shared.index(FIRST + i).reshape([W, W, 32]).load(SUM)
            v = gl.sum(parts, axis=1) * C.alpha
            at = sums + i * W  # 4·tile + 2·row half + column
            row = first + at // 4 * 16 + at % 4 // 2 * 8 + lane // 4
            token = n * 8 + lane % 4 * 2 + at % 2
            live = (at < COUNT) & (token < M) & (row < count)
            gl.store(y + token * N + start + row, v.to(y.dtype.element_ty), live)


@gluon.jit(do_not_specialize=["count"])
def reduce_kernel(parts, y, count, SPLIT: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr):
    """y[i] = Σ_s parts[s, i], s ascending; parts f32 [SPLIT, count], y bf16 or f16 [count]."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [W], [0])
    at = gl.program_id(0) * (W * 128) + gl.arange(0, W * 128, layout=layout)
    if PDL:
        ptx.wait_for_previous_kernel()
    total = gl.load(parts + at, mask=at < count, other=0.0)
    for s in gl.static_range(1, SPLIT):
        part = parts + gl.cast(s, gl.int64) * count
        total += gl.load(part + at, mask=at < count, other=0.0)
    gl.store(y + at, total.to(y.dtype.element_ty), mask=at < count)
