"""cuSPARSELt's C API by ctypes: library, handles, plans.

    Y[M, N] = alpha · X[M, K] · W[N, K]ᵀ + beta · Y        W compressed 2:4, row-major
    X may be a slice of a wider matrix (leading dimension ldx), Y too (ldy)

torch's wrapper rebuilds its plan at every call, allocates its output and knows no beta; the C API
does not have these limits. A handle belongs to one thread and one device, a plan to its handle.

Source: NVIDIA's cuSPARSELt documentation (0.8 to 0.10), `cusparseLt.h`. Constants are those of the
header. Structures are opaque there (512 to 1024 bytes in 0.8); we give each 4096 aligned bytes.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["CusparseLtError", "Handle", "Plan", "library", "missing"]

_TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}  # cudaDataType
_COLUMN, _ROW = 1, 2  # cusparseOrder_t
_NON_TRANSPOSE, _TRANSPOSE = 0, 1
_COMPUTE_32F = 2
_HALF_SPARSE = 0
_ALIGNMENT = 16  # bytes that every pointer and leading dimension keeps
_ALG_ATTRIBUTES = {"alg": 0, "split_k": 3, "split_k_mode": 4, "split_k_buffers": 5}
_STRUCT_BYTES = 4096

_P = c_void_p
_SIGNATURES = {
    "cusparseLtInit": (_P,),
    "cusparseLtGetVersion": (_P, _P),
    "cusparseLtStructuredDescriptorInit": (
        *(_P, _P, c_int64, c_int64, c_int64),
        *(c_uint32, c_int, c_int, c_int),
    ),
    "cusparseLtDenseDescriptorInit": (
        *(_P, _P, c_int64, c_int64, c_int64),
        *(c_uint32, c_int, c_int),
    ),
    "cusparseLtMatDescriptorDestroy": (_P,),
    "cusparseLtMatmulDescriptorInit": (_P, _P, c_int, c_int, _P, _P, _P, _P, c_int),
    "cusparseLtMatmulAlgSelectionInit": (_P, _P, _P, c_int),
    "cusparseLtMatmulAlgSetAttribute": (_P, _P, c_int, _P, c_size_t),
    "cusparseLtMatmulAlgGetAttribute": (_P, _P, c_int, _P, c_size_t),
    "cusparseLtMatmulPlanInit": (_P, _P, _P, _P),
    "cusparseLtMatmulPlanDestroy": (_P,),
    "cusparseLtMatmulGetWorkspace": (_P, _P, _P),
    "cusparseLtMatmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, c_int),
    "cusparseLtSpMMACompressedSize2": (_P, _P, _P, _P),
    "cusparseLtSpMMACompress2": (_P, _P, c_int, c_int, _P, _P, _P, _P),
}


class CusparseLtError(RuntimeError):
    """A cuSPARSELt call that did not return success."""


def _open() -> ctypes.CDLL:
    """The library that torch has loaded, else that of the NVIDIA wheel."""
    try:
        return ctypes.CDLL("libcusparseLt.so.0")
    except OSError:
        import nvidia

        for folder in nvidia.__path__:
            for found in sorted(Path(folder).glob("cusparselt/lib/libcusparseLt.so*")):
                return ctypes.CDLL(str(found))
        raise


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library with typed functions, or None and why."""
    try:
        lib = _open()
        for name, arguments in _SIGNATURES.items():
            getattr(lib, name).argtypes = arguments
        lib.cusparseLtGetErrorString.restype = c_char_p
    except (ImportError, OSError, AttributeError) as error:
        return None, f"cuSPARSELt cannot be loaded: {error}"
    return lib, ""


def missing() -> str:
    """Why the library cannot be used; empty if it can."""
    return _load()[1]


def library() -> ctypes.CDLL:
    """The library.

    Raises:
        CusparseLtError: it cannot be loaded.
    """
    lib, reason = _load()
    if lib is None:
        raise CusparseLtError(reason)
    return lib


def _call(name: str, *args: object) -> None:
    lib = library()
    status = getattr(lib, name)(*args)
    if status:
        raise CusparseLtError(f"{name}: {lib.cusparseLtGetErrorString(status).decode()}")


class _Struct:
    """Zeroed memory for an opaque structure; `at` is its aligned address."""

    def __init__(self) -> None:
        self._raw = ctypes.create_string_buffer(_STRUCT_BYTES + 64)
        self.at = (ctypes.addressof(self._raw) + 63) // 64 * 64


def current_stream(device: torch.device) -> int:
    """The raw stream that torch would launch on (what Triton's launcher asks as well)."""
    return torch._C._cuda_getCurrentRawStream(device.index)


class Handle:
    """A library handle of the current device and thread."""

    def __init__(self) -> None:
        self._struct = _Struct()
        self.at = self._struct.at
        _call("cusparseLtInit", self.at)

    def version(self) -> str:
        number = c_int()
        _call("cusparseLtGetVersion", self.at, ctypes.addressof(number))
        return str(number.value)

    def _structured(self, rows: int, cols: int, dtype: torch.dtype) -> _Struct:
        out = _Struct()
        kind = (_ALIGNMENT, _TYPES[dtype], _ROW, _HALF_SPARSE)
        _call("cusparseLtStructuredDescriptorInit", self.at, out.at, rows, cols, cols, *kind)
        return out

    def _dense(self, rows: int, cols: int, ld: int, dtype: torch.dtype, order: int) -> _Struct:
        out = _Struct()
        kind = (_ALIGNMENT, _TYPES[dtype], order)
        _call("cusparseLtDenseDescriptorInit", self.at, out.at, rows, cols, ld, *kind)
        return out

    def compress(self, weight: Tensor) -> Tensor:
        """Dense 2:4 weight [rows, cols], contiguous, on the GPU → compressed buffer, flat uint8."""
        matrix = self._structured(*weight.shape, weight.dtype)
        size, scratch_size = c_size_t(), c_size_t()
        sizes = ctypes.addressof(size), ctypes.addressof(scratch_size)
        _call("cusparseLtSpMMACompressedSize2", self.at, matrix.at, *sizes)
        # Zeroed: padding inside must not differ from run to run.
        blob = torch.zeros(size.value, dtype=torch.uint8, device=weight.device)
        scratch = torch.empty(max(scratch_size.value, 16), dtype=torch.uint8, device=weight.device)
        pointers = weight.data_ptr(), blob.data_ptr(), scratch.data_ptr()
        stream = current_stream(weight.device)
        _call("cusparseLtSpMMACompress2", self.at, matrix.at, 1, _NON_TRANSPOSE, *pointers, stream)
        _call("cusparseLtMatDescriptorDestroy", matrix.at)
        return blob


class Plan:
    """One planned GEMM at an exact M (a multiple of 16); the call itself only passes pointers."""

    def __init__(
        self,
        handle: Handle,
        shape: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        leading: tuple[int, int],
        factors: tuple[float, float],
        algorithm: dict[str, int],
    ) -> None:
        """`shape` (M, N, K), `dtypes` of W and Y, `leading` (ldx, ldy), `factors` (alpha, beta)."""
        (m, n, k), (dtype, out_dtype), (ldx, ldy) = shape, dtypes, leading
        self.captured = False  # a CUDA graph holds launches of this plan
        self._handle = handle
        self._w = handle._structured(n, k, dtype)
        self._x = handle._dense(m, k, ldx, dtype, _ROW)
        self._y = handle._dense(n, m, ldy, out_dtype, _COLUMN)
        self._matmul, self._selection, self._plan = _Struct(), _Struct(), _Struct()
        matrices = self._w.at, self._x.at, self._y.at, self._y.at
        operations = _NON_TRANSPOSE, _TRANSPOSE, *matrices, _COMPUTE_32F
        _call("cusparseLtMatmulDescriptorInit", handle.at, self._matmul.at, *operations)
        selection = self._selection.at
        _call("cusparseLtMatmulAlgSelectionInit", handle.at, selection, self._matmul.at, 0)
        for name, value in algorithm.items():
            number = c_int(value)
            data = _ALG_ATTRIBUTES[name], ctypes.addressof(number), ctypes.sizeof(number)
            _call("cusparseLtMatmulAlgSetAttribute", handle.at, selection, *data)
        _call("cusparseLtMatmulPlanInit", handle.at, self._plan.at, self._matmul.at, selection)
        size = c_size_t()
        _call("cusparseLtMatmulGetWorkspace", handle.at, self._plan.at, ctypes.addressof(size))
        self.workspace_bytes = size.value
        self._prepare_call(*factors)

    def _prepare_call(self, alpha: float, beta: float) -> None:
        self._factors = c_float(alpha), c_float(beta)
        self._alpha, self._beta = (ctypes.addressof(factor) for factor in self._factors)
        self._streams = (c_void_p * 1)()
        self._function = library().cusparseLtMatmul

    def __call__(self, blob: int, x: int, y: int, device: torch.device) -> None:
        """Launch on the current stream; the arguments are device addresses."""
        workspace = 0
        if self.workspace_bytes:
            # Per call: a workspace of the plan would be shared by all streams that use it.
            scratch = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
            workspace = scratch.data_ptr()
        self._streams[0] = current_stream(device)
        status = self._function(
            *(self._handle.at, self._plan.at, self._alpha, blob, x),
            *(self._beta, y, y, workspace, self._streams, 1),
        )
        if status:
            text = library().cusparseLtGetErrorString(status).decode()
            raise CusparseLtError(f"cusparseLtMatmul: {text}")

    def close(self) -> None:
        """Give the library's memory back; the plan is of no use after that."""
        _call("cusparseLtMatmulPlanDestroy", self._plan.at)
        for matrix in (self._w, self._x, self._y):
            _call("cusparseLtMatDescriptorDestroy", matrix.at)
