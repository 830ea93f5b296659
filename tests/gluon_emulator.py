"""Run our Gluon kernels on the CPU, PTX and all: numpy for the language, an interpreter for asm.

`load()` executes `kernels/{ptx,fragments,decode_sums,decode_kernel}.py` with a stand-in for
`triton.experimental.gluon`, so index arithmetic, shared memory layouts, rings and the very text of
the inline PTX are what is tested. Fragments of mma and mma.sp follow the PTX manual and what was
seen on a device. cp.async lands either at once or not before it is waited for (`Machine.lazy`), so
that a ring slot that is written too early or read too early shows. Bytes of shared memory that
nobody wrote, and global reads outside a buffer, raise.

Limits: all warps run in step; timing, bank conflicts and barriers between warps are not modelled.
"""

import builtins
import re
import types
from pathlib import Path

import numpy as np
import torch

KERNELS = Path(__file__).parent.parent / "kernels"
_SPACING = 1 << 32  # address space of one buffer
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().numpy()


class V:
    """A value of the language: numpy array or scalar, or a global pointer with offsets."""

    def __init__(self, data, pointer=None):
        self.data, self.pointer = np.asarray(data), pointer

    @property
    def shape(self):
        return list(self.data.shape)

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.pointer.type)

    def to(self, dtype):
        if self.pointer is not None:
            return V(self.data * self.pointer.size + self.pointer.base)
        return V(self.data.astype(np.int64) if dtype in ("int32", "int64") else self.data)

    def __bool__(self):
        return bool(self.data)

    def __index__(self):
        return int(self.data)

    def __getitem__(self, index):
        return V(self.data[index])

    def reshape(self, shape):
        return V(self.data.reshape([int(s) for s in shape]))

    def permute(self, order):
        return V(self.data.transpose(order))


def _data(value):
    return value.data if isinstance(value, V) else value


def _operator(name):
    def apply(self, other):
        return V(getattr(self.data, name)(_data(other)), self.pointer)

    return apply


for _name in "add sub mul floordiv mod xor and or lt le gt ge eq ne".split():
    for _prefix in ("", "r") if _name not in ("lt", "le", "gt", "ge", "eq", "ne") else ("",):
        setattr(V, f"__{_prefix}{_name}__", _operator(f"__{_prefix}{_name}__"))


class Pointer:
    """A global buffer: uint8 to read, or float32 to write (rounded to `type` when stored)."""

    def __init__(self, machine, array, type="u8"):
        self.array, self.type, self.size = array, type, 1 if type == "u8" else array.itemsize
        machine.buffers.append(self)
        self.base = len(machine.buffers) * _SPACING

    def value(self):
        return V(0, self)


class Shared:
    """A descriptor of a part of shared memory."""

    def __init__(self, machine, start, shape):
        self.machine, self.start, self.shape = machine, start, [int(s) for s in shape]

    def index(self, i):
        size = int(np.prod(self.shape[1:])) * 4
        return Shared(self.machine, self.start + int(i) * size, self.shape[1:])

    def reshape(self, shape):
        return Shared(self.machine, self.start, shape)

    def _slice(self):
        return slice(self.start, self.start + int(np.prod(self.shape)) * 4)

    def store(self, value):
        raw = np.ascontiguousarray(value.data.astype(np.float32)).view(np.uint8).reshape(-1)
        self.machine.shared[self._slice()] = raw
        self.machine.written[self._slice()] = True

    def load(self, layout):
        raw = self.machine.shared[self._slice()]
        return V(raw.view(np.float32).reshape(self.shape).copy())


class Machine:
    """Memory, pending copies and the current program of one launch."""

    def __init__(self, lazy):
        self.lazy, self.buffers = lazy, []

    def start(self, program, split, shared_bytes):
        self.ids = (program, split)
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.written = np.zeros(shared_bytes, bool)
        self.groups, self.open = [], []

    def read(self, address, size):
        buffer = self.buffers[int(address) // _SPACING - 1]
        at = int(address) % _SPACING
        raw = buffer.array.reshape(-1)
        assert at + size <= raw.size, f"read of {at} … {at + size} in a buffer of {raw.size}"
        assert at % size == 0, f"misaligned read at {at}"
        return raw[at : at + size]

    def copy(self, to, address, size):
        for t, a, s in zip(to, address, size, strict=True):
            self.open.append((int(t), self.read(a, 16) if s else np.zeros(16, np.uint8)))
        if not self.lazy:
            self._land(self.open[-len(to) :])

    def _land(self, copies):
        for to, raw in copies:
            assert to % 16 == 0
            self.shared[to : to + 16] = raw
            self.written[to : to + 16] = True

    def commit(self):
        self.groups.append(self.open)
        self.open = []

    def wait(self, pending):
        while len(self.groups) > pending:
            self._land(self.groups.pop(0))

    def load(self, at, words):
        index = at[:, None] + np.arange(4 * words)
        assert (at % (4 * words) == 0).all() and self.written[index].all(), (
            "unwritten or misaligned"
        )
        found = np.ascontiguousarray(self.shared[index]).view(np.uint32)
        return [found[:, i] for i in range(words)]


def _prmt(a, b, selector):
    raw = np.stack([(v >> (8 * i)) & 0xFF for v in (a, b) for i in range(4)])
    out = np.zeros_like(a)
    for i in range(4):
        pick = (selector >> (4 * i)) & 7
        out |= np.take_along_axis(raw, (pick + np.zeros_like(a))[None].astype(np.int64), 0)[0] << (
            8 * i
        )
    return out


def _lop3(a, b, c, table):
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            parts = [v if i >> (2 - j) & 1 else ~v for j, v in enumerate((a, b, c))]
            out |= parts[0] & parts[1] & parts[2]
    return out


def _halves(word, kind):
    """Words [lanes] -> two float32 values each [lanes, 2]."""
    raw = np.stack([word & 0xFFFF, word >> 16], -1).astype(np.uint16)
    if kind == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16).astype(np.float32)


def _mma(ops, sparse, selector, kind):
    """One warp-wide product; ops: registers as [lanes] arrays in PTX order."""
    ops = [np.asarray(o).reshape(-1, 32) for o in ops]
    lanes = np.arange(32)
    g, t = lanes // 4, lanes % 4
    nb = 4 if sparse else 2
    out = [o.astype(np.float32).copy() for o in ops[4 + nb : 8 + nb]]
    for w in range(ops[0].shape[0]):
        a = np.zeros((16, 16), np.float32)
        for r in range(4):
            for i in range(2):
                a[g + r % 2 * 8, r // 2 * 8 + 2 * t + i] = _halves(ops[r][w], kind)[:, i]
        if sparse:
            a = _expand(a, ops[8 + nb][w], selector)
        b = np.zeros((a.shape[1], 8), np.float32)
        for r in range(nb):
            for i in range(2):
                b[8 * r + 2 * t + i, g] = _halves(ops[4 + r][w], kind)[:, i]
        c = a @ b
        for r in range(4):
            out[r][w] += c[g + r // 2 * 8, 2 * t + r % 2]
    return [o.reshape(-1) for o in out]


def _expand(kept, metadata, selector):
    """Kept columns [16, 16] -> [16, 32], by the words of lanes 2·selector and 2·selector + 1."""
    full = np.zeros((16, 32), np.float32)
    for row in range(16):
        for group in range(8):
            lane = row % 8 * 4 + 2 * selector + group // 4
            nibble = int(metadata[lane]) >> (row // 8 * 16 + group % 4 * 4) & 15
            full[row, 4 * group + (nibble & 3)] += kept[row, 2 * group]
            full[row, 4 * group + (nibble >> 2)] += kept[row, 2 * group + 1]
    return full


class Asm:
    """One block of inline PTX, run for all threads at once."""

    def __init__(self, machine, arguments, outputs, threads):
        self.machine, self.threads = machine, threads
        self.registers = {f"${outputs + i}": a for i, a in enumerate(arguments)}

    def get(self, name):
        name = name.strip()
        if name in self.registers:
            return self.registers[name]
        if name == "global_smem":
            return np.zeros(self.threads, np.uint32)
        return np.full(self.threads, int(name, 0) & 0xFFFFFFFF, np.uint32)

    def put(self, name, value):
        self.registers[name.strip()] = value

    def run(self, text):
        text = re.sub(r"//.*", "", text).strip()
        if text.startswith("mma"):
            return self._product(text)
        for statement in text.strip("{} ").split(";") if "{ .reg" in text else text.split(";"):
            statement = statement.strip()
            if statement and not statement.startswith((".reg", "bar.warp", "griddepcontrol")):
                self._statement(*statement.split(None, 1))
        return None

    def _product(self, text):
        name, rest = text.split(None, 1)
        names = re.findall(r"\$\d+", rest)
        selector = 1 if rest.rstrip("; ").endswith("0x1") else 0
        kind = "bf16" if "bf16" in name else "f16"
        ops = [self.get(n) for n in names[4:]]
        for n, value in zip(names[:4], _mma(ops, ".sp" in name, selector, kind), strict=True):
            self.put(n, value)

    def _statement(self, op, rest=""):
        vector = re.findall(r"\{([^}]*)\}", rest)
        plain = [p.strip(" []") for p in re.sub(r"\{[^}]*\}", "", rest).split(",") if p.strip()]
        kind = op.split(".")[0]
        if op == "cp.async.commit_group":
            self.machine.commit()
        elif op == "cp.async.wait_group":
            self.machine.wait(int(rest))
        elif op.startswith("cp.async"):
            assert plain[2] == "16"
            self.machine.copy(*(self.get(plain[i]) for i in (0, 1, 3)))
        elif kind == "ld":
            names = vector[0].split(",")
            loaded = self.machine.load(self.get(plain[0]).astype(np.int64), len(names))
            for n, v in zip(names, loaded, strict=True):
                self.put(n, v)
        elif kind == "mov" and vector:
            low, high = vector[0].split(",")
            self.put(low, self.get(plain[0]) & 0xFFFF)
            self.put(high, self.get(plain[0]) >> 16)
        else:
            self.put(plain[0], self._compute(op, kind, [self.get(p) for p in plain[1:]]))

    def _compute(self, op, kind, v):
        if kind == "cvt":
            assert op == "cvt.rn.f16x2.e4m3x2"
            bits = _E4M3.view(np.uint16).astype(np.uint32)
            return bits[v[0] & 0xFF] | bits[v[0] >> 8 & 0xFF] << 16
        simple = {
            "mov": lambda a: a,
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mad": lambda a, b, c: a * b + c,
            "shr": lambda a, b: a >> b,
            "shl": lambda a, b: a << b,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "prmt": _prmt,
            "lop3": lambda a, b, c, t: _lop3(a, b, c, int(t[0])),
            "setp": lambda a, b: a != b,
            "selp": lambda a, b, p: np.where(p, a, b),
        }
        return simple[kind](*v)


class Language(types.SimpleNamespace):
    """The names of `gluon.language` that the kernels use."""

    def __init__(self, machine):
        super().__init__(
            constexpr=lambda value: value,
            int32="int32",
            int64="int64",
            float32="float32",
            static_range=range,
            BlockedLayout=lambda *a: a,
            SliceLayout=lambda *a: a,
            SwizzledSharedLayout=lambda *a: a,
            arange=lambda a, b, layout: V(np.arange(a, b)),
            zeros=lambda shape, dtype, layout: V(np.zeros(shape, np.float32)),
            where=lambda c, a, b: V(np.where(_data(c), _data(a), _data(b))),
            minimum=lambda a, b: V(np.minimum(_data(a), _data(b))),
            cdiv=lambda a, b: V(-(-_data(a) // _data(b))),
            join=lambda a, b: V(np.stack([a.data, b.data], -1)),
            sum=lambda v, axis: V(v.data.sum(axis)),
            program_id=lambda axis: V(machine.ids[axis]),
            allocate_shared_memory=lambda dtype, shape, layout: Shared(machine, 0, shape),
        )
        self.machine = machine

    def store(self, pointer, value, mask):
        buffer, at = pointer.pointer, np.broadcast_to(pointer.data, mask.data.shape)
        assert np.unique(at[mask.data]).size == mask.data.sum(), "two threads write one element"
        buffer.array.reshape(-1)[at[mask.data]] = value.data[mask.data]

    def inline_asm_elementwise(self, asm, constraints, args, dtype, is_pure, pack):
        arrays = [np.asarray(_data(a)) for a in args]
        threads = max([a.size for a in arrays], default=1)
        wide = [c for c in constraints.split(",") if not c.startswith("=")]
        values = []
        for a, c in zip(arrays, wide, strict=True):
            a = np.broadcast_to(a, (threads,))
            kind = {"f": np.float32, "l": np.int64, "r": np.uint32}[c.strip("&")]
            values.append(a.astype(np.int64).astype(kind) if kind is np.uint32 else a.astype(kind))
        outputs = constraints.count("=")
        run = Asm(self.machine, values, outputs, threads)
        run.run(asm)
        found = [V(run.registers.get(f"${i}", np.zeros(threads))) for i in range(outputs)]
        return found[0] if len(found) == 1 else tuple(found)


def load(lazy):
    """The machine and the emulated modules `decode_kernel` and `ptx`."""
    machine = Machine(lazy)
    language = Language(machine)

    def jit(function=None, **options):
        return function if function else lambda f: f

    gluon = types.SimpleNamespace(jit=jit, constexpr_function=lambda f: f, language=language)
    loaded = {}

    def fake_import(name, namespace=None, local=None, names=(), level=0):
        if name == "triton.experimental":
            return types.SimpleNamespace(gluon=gluon)
        if name == "triton.experimental.gluon":
            return gluon
        if name == "vllm_spense.kernels":
            return types.SimpleNamespace(**{n: module(n) for n in names})
        if name.startswith("vllm_spense.kernels."):
            return module(name.rsplit(".", 1)[1])
        return builtins.__import__(name, namespace, local, names, level)

    def module(name):
        if name not in loaded:
            made = loaded[name] = types.ModuleType(f"emulated_{name}")
            made.__dict__["__builtins__"] = {**vars(builtins), "__import__": fake_import}
            source = (KERNELS / f"{name}.py").read_text()
            exec(compile(source, str(KERNELS / f"{name}.py"), "exec"), made.__dict__)
        return loaded[name]

    return machine, module("decode_kernel"), module("ptx")
