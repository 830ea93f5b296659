"""The block-sparse kernel compiled without a GPU: what the machine code holds.

The wheel of Triton brings ptxas and cuobjdump. Run with every Triton that matters:
    PYTHONPATH=SITE_PACKAGES_WITH_ANOTHER_TRITON pytest tests/test_block_sparse_compile.py
"""

import re
import subprocess
from pathlib import Path

import pytest
from tile_cases import QWEN_DOWN, QWEN_GATE_UP, problem_of

from vllm_spense.kernels import block_sparse
from vllm_spense.kernels.block_sparse import Config

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.compiler")

FP8, BF16 = "fp8e4nv", "bf16"
ALIGNED = ("x", "values", "index", "y", "x_stride", "y_stride")
# tile, dtype, configuration, accumulate, capability, instruction
CASES = [
    ((64, 128), FP8, Config(16, 4, 6, 2, split=4), False, 90, r"QGMMA\.64x16x32"),
    ((64, 128), FP8, Config(64, 4, 6, 2), False, 90, r"QGMMA\.64x64x32"),
    ((64, 128), FP8, Config(256, 4, 4, 1, group=8), False, 90, r"QGMMA\.64x256x32"),
    ((128, 128), FP8, Config(16, 4, 6, 2, split=8), False, 90, r"QGMMA\.64x16x32"),
    ((128, 128), FP8, Config(256, 8, 4, 1, group=8), True, 90, r"QGMMA\.64x256x32"),
    ((64, 64), FP8, Config(32, 4, 6, 2), False, 90, r"QGMMA\.64x32x32"),
    ((64, 128), BF16, Config(128, 4, 3, 1), False, 90, r"HGMMA\.64x128x16"),
    ((128, 128), BF16, Config(256, 8, 2, 1), False, 90, r"HGMMA\.64x256x16"),
    ((128, 128), FP8, Config(256, 8, 4, 1, group=8), False, 100, "UTCQMMA"),
    ((64, 128), FP8, Config(64, 4, 4, 2), True, 100, "UTCQMMA"),
    ((128, 128), BF16, Config(128, 8, 3, 1), False, 100, "UTCHMMA"),
]


def compiled(kernel, types, constants, aligned, capability, warps):
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    at = kernel.arg_names.index
    source = compiler.ASTSource(
        kernel,
        signature,
        {(at(name),): value for name, value in constants.items()},
        {(at(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


def machine_code(kernel, name, folder):
    """(machine code, {REG, STACK, …})."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])

    def run(what):
        command = [tool, what, cubin]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    listed = run("--dump-resource-usage").split(name)[-1]
    return run("--dump-sass"), {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", listed)}


@pytest.mark.parametrize(("tile", "dtype", "config", "accumulate", "capability", "mma"), CASES)
def test_machine_code(tile, dtype, config, accumulate, capability, mma, tmp_path):
    from vllm_spense.kernels.block_sparse_kernel import block_sparse_kernel

    types = {"x": f"*{dtype}", "values": f"*{dtype}", "index": "*i32", "alpha": "fp32"}
    types["y"] = "*fp32" if config.split > 1 else "*bf16"
    constants = {
        "KEPT": 20, "SPLIT": config.split, "TILE_ROWS": tile[0], "TILE_COLS": tile[1],
        "BLOCK_M": config.block_m, "GROUP": config.group, "STAGES": config.stages,
        "ACCUMULATE": accumulate,
    }  # fmt: skip
    kernel = compiled(block_sparse_kernel, types, constants, ALIGNED, capability, config.warps)
    sass, usage = machine_code(kernel, "block_sparse_kernel", tmp_path)
    assert re.search(mma, sass)
    assert usage["STACK"] == 0 and not re.search(r"\b(LDL|STL)\b", sass)
    assert usage["REG"] * 32 * config.warps * config.per_sm <= 65536
    assert config.per_sm * kernel.metadata.shared <= block_sparse.SHARED_BYTES
    # W and X come in pieces of 16 bytes past the registers, Y leaves in such pieces
    assert re.search(r"LDGSTS\.E\.BYPASS\.[\w.]*128", sass)
    assert not re.search(r"LDGSTS\.E(?!\.BYPASS\.[\w.]*128)", sass)
    assert re.search(r"STG\.E\.128", sass)


@pytest.mark.parametrize("layout", [QWEN_GATE_UP, QWEN_DOWN], ids=["gate_up", "down"])
@pytest.mark.parametrize("m", [1, 64, 256, 8192])
def test_first_candidates_compile_without_spills(layout, m, tmp_path):
    from vllm_spense.kernels.block_sparse_kernel import block_sparse_kernel

    tiles = layout.regions[0].tiles
    config = Config(**dict(block_sparse.candidates(problem_of(layout, m))[0]))
    types = {"x": "*fp8e4nv", "values": "*fp8e4nv", "index": "*i32", "alpha": "fp32"}
    types["y"] = "*fp32" if config.split > 1 else "*bf16"
    constants = {
        "KEPT": tiles.kept, "SPLIT": config.split, "TILE_ROWS": tiles.rows,
        "TILE_COLS": tiles.cols, "BLOCK_M": config.block_m, "GROUP": config.group,
        "STAGES": config.stages, "ACCUMULATE": False,
    }  # fmt: skip
    kernel = compiled(block_sparse_kernel, types, constants, ALIGNED, 90, config.warps)
    _, usage = machine_code(kernel, "block_sparse_kernel", tmp_path)
    assert usage["STACK"] == 0
    assert usage["REG"] * 32 * config.warps * config.per_sm <= 65536
    assert config.per_sm * kernel.metadata.shared <= block_sparse.SHARED_BYTES


@pytest.mark.parametrize("accumulate", [False, True])
def test_sum_of_parts_compiles(accumulate, tmp_path):
    from vllm_spense.kernels.block_sparse_kernel import sum_parts_kernel

    constants = {"SPLIT": 4, "ACCUMULATE": accumulate, "BLOCK": 512}
    types = {"parts": "*fp32", "y": "*bf16"}
    aligned = ("parts", "y", "rows", "y_stride")
    kernel = compiled(sum_parts_kernel, types, constants, aligned, 90, 4)
    sass, usage = machine_code(kernel, "sum_parts_kernel", tmp_path)
    assert usage["STACK"] == 0 and re.search(r"LDG\.E\.128", sass)
