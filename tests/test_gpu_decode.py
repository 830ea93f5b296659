"""The decode kernel on a GPU: every case against float64, special values, bit identity.

pytest -m gpu tests/test_gpu_decode.py
compute-sanitizer --tool memcheck python -m pytest -m gpu tests/test_gpu_decode.py -k float64
"""

import pytest
import torch
from decode_cases import BF16, CASES, FP8, FP16, problem_of
from gpu_cases import CUDA, poisoned_memory
from layers import (
    gate_up,
    input_split,
    make_layer,
    output_split,
    random_input,
    relative_error,
)

from vllm_spense.kernels import decode
from vllm_spense.kernels.cusparselt_api import missing
from vllm_spense.kernels.problem import Problem

__all__ = ["poisoned_memory"]  # a fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(bool(missing()), reason="cuSPARSELt compresses the weights"),
]

MAX_NORM_ERROR = 2e-3
LAYERS = {
    "all_sparse": (1280, 1024, output_split(1280, 1024, 0)),
    "output_split": (1024, 512, output_split(1024, 512, 256)),
    "gate_up": (2048, 640, gate_up(2048, 640, 512)),
    "input_split": (512, 2048, input_split(512, 2048, 512)),
    "all_dense": (720, 1040, output_split(720, 1040, 720)),
    "smollm_gate_up": (3072, 576, gate_up(3072, 576, 768)),
    "smollm_down": (576, 1536, input_split(576, 1536, 384)),
}
ROWS = (1, 3, 7, 8, 16, 17, 24, 31, 32)


def run(layer, weights, x, config, out_dtype=BF16, alpha=1.0):
    problem = Problem.whole(layer.layout, x.shape[0], out_dtype, torch.cuda.get_device_capability())
    assert decode.can_implement(problem) == (True, "")
    y = torch.full((x.shape[0], layer.layout.n), float("nan"), dtype=out_dtype, device=CUDA)
    decode.run(problem, x, weights, y, alpha=alpha, accumulate=False, config=config)
    return y


@pytest.mark.parametrize("dtype", [FP8, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name, dtype):
    n, k, regions = LAYERS[name]
    layer = make_layer(n, k, regions, dtype, CUDA)
    weights = layer.kernel_tensors()
    for m in ROWS:
        x = random_input(m, k, dtype, CUDA, seed=m)
        for config in decode.candidates(problem_of(layer.layout, m))[:: 3 if m > 1 else 1]:
            y = run(layer, weights, x, config)
            assert relative_error(y.double(), layer.product(x)) <= MAX_NORM_ERROR, (m, config)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_of_the_emulator(case):
    layer = make_layer(case.n, case.k, case.regions, case.dtype, CUDA)
    x = random_input(case.m, case.k, case.dtype, CUDA)
    config = tuple(vars(case.config).items())
    y = run(layer, layer.kernel_tensors(), x, config)
    assert relative_error(y.double(), layer.product(x)) <= MAX_NORM_ERROR


def test_special_values():
    layer = make_layer(256, 512, output_split(256, 512, 64), FP8, CUDA)
    weights = layer.kernel_tensors()
    config = decode.candidates(problem_of(layer.layout, 8))[0]
    bits = torch.tensor([0x80, 0x01, 0x87, 0x7E, 0xFE, 0x00], dtype=torch.uint8, device=CUDA)
    picks = torch.randint(6, (8, 512), device=CUDA)
    x = bits[picks].view(FP8)  # -0.0, subnormals, ±448
    y = run(layer, weights, x, config)
    assert relative_error(y.double(), layer.product(x)) <= MAX_NORM_ERROR


def test_alpha_keeps_fp16_finite():
    layer = make_layer(256, 4096, output_split(256, 4096, 64), FP8, CUDA)
    x = torch.full((4, 4096), 448.0, device=CUDA).to(FP8)
    config = decode.candidates(problem_of(layer.layout, 4))[0]
    y = run(layer, layer.kernel_tensors(), x, config, FP16, 2.0**-12)
    assert y.isfinite().all()
    assert relative_error(y.double() * 2**12, layer.product(x)) <= MAX_NORM_ERROR


@pytest.mark.parametrize("split", [1, 4])
def test_same_bits_from_replay_to_replay_beside_other_work(split):
    layer = make_layer(2560, 2560, gate_up(2560, 2560, 512), FP8, CUDA)
    weights = layer.kernel_tensors()
    x = random_input(16, 2560, FP8, CUDA)
    problem = problem_of(layer.layout, 16)
    config = next(c for c in decode.candidates(problem) if dict(c)["split"] == split)
    first = run(layer, weights, x, config)
    y = torch.empty_like(first)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        decode.run(problem, x, weights, y, alpha=1.0, accumulate=False, config=config)
    noise = torch.randn(2048, 2048, device=CUDA)
    for _ in range(100):
        y.fill_(float("nan"))
        with torch.cuda.stream(other):
            noise = (noise @ noise).clamp(-1, 1)
            beside = run(layer, weights, x, config)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, first) and torch.equal(beside, first)
