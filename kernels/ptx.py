"""One wrapper per PTX instruction, for Gluon kernels written one thread at a time.

A tensor of 32 · num_warps elements in layout `threads(num_warps)` holds one element per thread, so
`gl.inline_asm_elementwise` is plain SIMT code and a warp-wide instruction (mma, mma.sp) sees its
fragments as they are. Addresses are int64. Limit: a warp-wide instruction must not stand under a
branch that splits a warp.
"""

# Device code has no Python types, and its tuples grow by `+` alone.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "await_copies",
    "commit_copies",
    "copy_shared",
    "let_next_kernel_start",
    "load_shared",
    "load_shared_pair",
    "metadata_word",
    "metadata_word_16bit",
    "mma",
    "mma_sp",
    "pair_f16",
    "pairs_f16",
    "rows_f16",
    "select_word",
    "sync_warp",
    "threads",
    "wait_for_previous_kernel",
]


@gluon.constexpr_function
def str_(value):
    return str(value)


@gluon.constexpr_function
def threads(warps):
    """One element per thread, in thread order."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def wait_for_previous_kernel():
    """griddepcontrol.wait: what earlier launches wrote is visible from here on."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_kernel_start():
    """griddepcontrol.launch_dependents: the next launch may take SMs as they fall free."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copy_shared(to, address, size, STREAM: gl.constexpr):
    """cp.async: 16 bytes into shared memory past L1 and registers; `size` 0 writes zeros instead.

    `to` counts bytes from the start of the kernel's shared memory. STREAM lets L2 fetch 256 bytes,
    the rest of which other lanes and warps ask for next.
    """
    gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, global_smem; add.u32 a, a, $1; cp.async.cg.shared.global"
        + (".L2::256B" if STREAM else "")
        + " [a], [$2], 16, $3; mov.u32 $0, a; }",
        "=r,r,l,r",
        [to, address, size],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def commit_copies():
    """cp.async.commit_group: the copies since the last one are a group."""
    gl.inline_asm_elementwise(
        "cp.async.commit_group; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_copies(PENDING: gl.constexpr):
    """cp.async.wait_group: all but the last PENDING groups are there, for all lanes of the warp."""
    gl.inline_asm_elementwise(
        "cp.async.wait_group " + str_(PENDING) + "; bar.warp.sync 0xffffffff; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def sync_warp():
    """bar.warp.sync: the lanes' earlier reads and writes of shared memory are done."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_shared(at):
    """ld.shared, 16 bytes; `at` counts bytes from the start of the kernel's shared memory."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, global_smem; add.u32 a, a, $4;"
        " ld.shared.v4.b32 {$0,$1,$2,$3}, [a]; }",
        "=r,=r,=r,=r,r",
        [at],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_shared_pair(at):
    """ld.shared, 8 bytes."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, global_smem; add.u32 a, a, $2; ld.shared.v2.b32 {$0,$1}, [a]; }",
        "=r,=r,r",
        [at],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def rows_f16(low, high):
    """cvt.rn.f16x2.e4m3x2 (exact): FP8 of two words -> (low 01, high 01, low 23, high 23)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a,b,c,d; mov.b32 {a,b}, $4; mov.b32 {c,d}, $5;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, c;"
        " cvt.rn.f16x2.e4m3x2 $2, b; cvt.rn.f16x2.e4m3x2 $3, d; }",
        "=r,=r,=r,=r,r,r",
        [low, high],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pairs_f16(w0, w1, selector):
    """prmt picks one FP8 pair of each word (selector 0x5410: the low ones, 0x7632: the high ones),
    cvt makes each a word of two f16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 p; .reg .b16 a,b; prmt.b32 p, $2, $3, $4; mov.b32 {a,b}, p;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r,r,r",
        [w0, w1, selector],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pair_f16(w):
    """cvt.rn.f16x2.e4m3x2 (exact): the four FP8 of a word -> (pair 01, pair 23)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a,b; mov.b32 {a,b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r",
        [w],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def select_word(w0, w1, odd):
    """selp: the second word where `odd`, else the first."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; selp.b32 $0, $2, $1, p; }",
        "=r,r,r,r",
        [w0, w1, odd],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def metadata_word(wa, wb, shift):
    """Words of the two k64 halves -> the operand of mma.sp (layouts.py has the picture).

    `shift` 0 takes the even groups (low nibbles), 4 the odd ones. lop3 0xE4 is `c ? a : b`.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a,b,n; sub.u32 n, 4, $3; shr.u32 a, $1, $3; shl.b32 b, $2, n;"
        " lop3.b32 a, a, b, 0x0F0F0F0F, 0xE4; prmt.b32 $0, a, a, 0x3120; }",
        "=r,r,r,r",
        [wa, wb, shift],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def metadata_word_16bit(w0, w1, w2, w3, byte):
    """Words of the four k32 tiles of a block (16-bit types) -> the operand of mma.sp.

    Byte `byte` of each word has one group of row g (low nibble) and of row g+8 (high nibble):
    pick it from tiles 0, 2, 1, 3, then move the low nibbles into the low half.

        h3l3 h2l2 h1l1 h0l0   ->   h3h2h1h0 l3l2l1l0        (a letter and digit is a nibble)
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 s,a,b,e,o; mad.lo.u32 s, $5, 0x11, 0x40;"
        " prmt.b32 a, $1, $3, s; prmt.b32 b, $2, $4, s; prmt.b32 a, a, b, 0x5410;"
        " and.b32 e, a, 0x0F0F0F0F; shr.u32 b, e, 4; or.b32 e, e, b;"
        " shr.u32 o, a, 4; and.b32 o, o, 0x0F0F0F0F; shr.u32 b, o, 4; or.b32 o, o, b;"
        " prmt.b32 $0, e, o, 0x6420; }",
        "=r,r,r,r,r,r",
        [w0, w1, w2, w3, byte],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def mma_sp(a, b, c, e, SELECTOR: gl.constexpr, TYPE: gl.constexpr):
    """mma.sp m16n8k32: C[16, 8] += A[16, 32] (2:4) · B[32, 8], f32 sums.

    Selector 0 reads the metadata of lanes t = 0, 1 of each quad, selector 1 that of t = 2, 3.
    """
    return gl.inline_asm_elementwise(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32."
        + TYPE
        + "."
        + TYPE
        + ".f32 {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9,$10,$11},{$12,$13,$14,$15},$16,"
        + ("0x1;" if SELECTOR else "0x0;"),
        "=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f,r",
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], e],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def mma(a, b, c, TYPE: gl.constexpr):
    """mma m16n8k16: C[16, 8] += A[16, 16] · B[16, 8], f32 sums."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32."
        + TYPE
        + "."
        + TYPE
        + ".f32 {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
