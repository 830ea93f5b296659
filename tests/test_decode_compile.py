"""The decode kernel compiled without a GPU: what the machine code holds.

The wheel of Triton brings ptxas and cuobjdump. Run with every Triton that matters:
    PYTHONPATH=SITE_PACKAGES_WITH_ANOTHER_TRITON pytest tests/test_decode_compile.py
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from decode_cases import BF16, FP8, problem_of
from layers import gate_up, input_split, output_split

from vllm_spense.kernels.decode_plan import Config, kinds_of, plan
from vllm_spense.kernels.problem import Layout

triton = pytest.importorskip("triton")
gluon_runtime = pytest.importorskip("triton.experimental.gluon._runtime")

FULL = Layout(51200, 5120, output_split(51200, 5120, 0), FP8)
HALF = Layout(51200, 5120, gate_up(51200, 5120, 25600), FP8)
DOWN = Layout(5120, 25600, input_split(5120, 25600, 6400), FP8)
ODD = Layout(576, 1536, input_split(576, 1536, 144), FP8)
BF16_DOWN = Layout(4096, 14336, input_split(4096, 14336, 3584), BF16)
OLD = Config(8, 2, 2, pdl=0)  # before sm_90 there is no programmatic launch, and less memory
SPILL_BYTES = 128

CASES = [
    pytest.param(FULL, 1, Config(), 90, id="full-m1-sm90"),
    pytest.param(FULL, 32, Config(), 90, id="full-m32-sm90"),
    pytest.param(HALF, 16, Config(), 90, id="gate_up_50-m16-sm90"),
    pytest.param(DOWN, 8, Config(stages=4, sparse_tiles=3), 90, id="down_25-m8-sm90"),
    pytest.param(DOWN, 32, Config(4, 3, split=8), 90, id="down_25-m32-split8-sm90"),
    pytest.param(ODD, 17, Config(4, 2, 2), 90, id="odd-m17-sm90"),
    pytest.param(BF16_DOWN, 8, Config(8, 2, 2), 90, id="bf16-m8-sm90"),
    pytest.param(FULL, 16, Config(), 100, id="full-m16-sm100"),
    pytest.param(FULL, 8, OLD, 89, id="full-m8-sm89"),
    pytest.param(BF16_DOWN, 8, OLD, 80, id="bf16-m8-sm80"),
]


def compiled(layout, m, config, capability):
    """(compiled kernel, launch) of a plan."""
    from vllm_spense.kernels.decode_kernel import decode_kernel

    problem = problem_of(layout, m)
    launch = plan(problem, config, 132)
    signature = {name: "i32" for name in decode_kernel.arg_names}
    signature |= {"x": "*u8", "y": "*bf16" if config.split == 1 else "*fp32"}
    for name, regions in zip(("sparse", "dense"), kinds_of(problem), strict=True):
        count = max(1, len(regions))
        signature[name] = (("*u8",) * count, ("i32",) * count, ("i32",) * count)
    constants = {"SHARED_ROWS": launch.shared_rows, "C": launch.cut}
    signature |= dict.fromkeys(constants, "constexpr")
    at = decode_kernel.arg_names.index
    source = gluon_runtime.GluonASTSource(
        decode_kernel, signature, {(at(name),): value for name, value in constants.items()}, {}
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    options = {"num_warps": config.warps}
    return triton.compile(source, target=target, options=options), launch


def disassembled(kernel, folder):
    """(machine code, {REG, STACK, …})."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])

    def run(what):
        command = [tool, what, cubin]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    listed = run("--dump-resource-usage").split("decode_kernel")[-1]
    usage = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", listed)}
    return run("--dump-sass"), usage


@pytest.mark.parametrize(("layout", "m", "config", "capability"), CASES)
def test_machine_code(layout, m, config, capability, tmp_path):
    kernel, launch = compiled(layout, m, config, capability)
    sass, usage = disassembled(kernel, tmp_path)
    sparse, dense = kinds_of(problem_of(layout, m))
    assert bool(sparse) == ("HMMA.SP.16832" in sass)
    assert bool(dense) == bool(re.search(r"HMMA\.16816", sass))
    # Sums and fragments of X are 144 registers at M = 32: a few words may not fit there.
    assert usage["STACK"] <= (SPILL_BYTES if m > 16 else 0)
    assert m > 16 or not re.search(r"\b(LDL|STL)\b", sass)
    assert usage["REG"] * 32 * config.warps * config.programs_per_sm <= 65536
    # W and X come in pieces of 16 bytes past the registers, and nothing is loaded into them
    assert re.search(r"LDGSTS\.E\.BYPASS\.[\w.]*128", sass)
    assert not re.search(r"\bLDG\b", sass)
    # shared memory is one allocation from its start, as the addresses in the kernel assume
    assert kernel.metadata.shared == launch.shared_rows * config.warps**2 * 128
    assert ("ACQBULK" in sass) == bool(config.pdl)


def test_reduction_compiles(tmp_path):
    from vllm_spense.kernels.decode_sums import reduce_kernel

    signature = {"parts": "*fp32", "y": "*bf16", "count": "i32"}
    constants = {"SPLIT": 4, "W": 4, "PDL": True}
    signature |= dict.fromkeys(constants, "constexpr")
    at = reduce_kernel.arg_names.index
    source = gluon_runtime.GluonASTSource(
        reduce_kernel, signature, {(at(name),): value for name, value in constants.items()}, {}
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    kernel = triton.compile(source, target=target, options={"num_warps": 4})
    assert kernel.metadata.shared == 0


def test_dtype_without_kernel_is_refused():
    from vllm_spense.kernels import decode

    layout = Layout(64, 128, output_split(64, 128, 0), torch.float32)
    assert "no decode kernel" in decode.can_implement(problem_of(layout, 1))[1]
