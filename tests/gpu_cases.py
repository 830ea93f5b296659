"""What the GPU tests of the library paths share: layers, bounds, poisoned memory."""

import pytest
import torch
from layers import FP8, gate_up, input_split, output_split, relative_error

from vllm_spense.kernels import ops

CUDA = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
MAX_NORM_ERROR = 3e-3  # ‖y − ref‖ / ‖ref‖
MAX_POINT_ERROR = 2e-2  # largest |y − ref| past two BF16 roundings, over rms(ref)

LAYERS = {
    "all_sparse": (768, 1024, output_split(768, 1024, 0)),
    "output_split_25": (1024, 512, output_split(1024, 512, 256)),
    "output_split_50": (1024, 512, output_split(1024, 512, 512)),
    "input_split_25": (512, 2048, input_split(512, 2048, 512)),
    "input_split_50": (512, 2048, input_split(512, 2048, 1024)),
    "gate_up_25": (2048, 512, gate_up(2048, 512, 512)),
    "all_dense": (768, 1024, output_split(768, 1024, 768)),
    # SmolLM2-135M: 576 is no multiple of 128, so the library compresses
    "smollm_gate_up": (3072, 576, gate_up(3072, 576, 768)),
    "smollm_down": (576, 1536, input_split(576, 1536, 384)),
}
DTYPES = ((FP8, BF16), (FP8, FP16), (BF16, BF16), (FP16, FP16))
ROWS = (1, 7, 16, 33, 128, 300)


def raw(layer, weights, x, out_dtype):
    alpha = ops.alpha_for(layer.layout.weight_dtype, out_dtype)
    y = ops.linear_raw(x, weights, layer.layout.encode(), layer.layout.n, out_dtype, alpha)
    return y.double() / alpha


def check(y, reference):
    assert y.shape == reference.shape
    error = relative_error(y, reference)
    beyond_rounding = (y - reference).abs() - reference.abs() * 2**-7
    point = (beyond_rounding.max() / reference.pow(2).mean().sqrt()).item()
    assert error <= MAX_NORM_ERROR, f"norm error {error:.2e}"
    assert point <= MAX_POINT_ERROR, f"point error {point:.2e}"
    return error


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """`torch.empty` returns NaN, so that an output that nobody wrote cannot pass."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.dtype in (BF16, FP16) else out

    monkeypatch.setattr(torch, "empty", poisoned)
