"""The scale kernel in Triton's interpreter against float64, every number within one ulp.

Not half of one: the interpreter cuts BF16 off where a GPU rounds.
"""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import itertools, torch
torch.manual_seed(0)
from vllm_spense.kernels.scale import scale_in_place

for (m, n), bias_dtype, static, dtype in itertools.product(
    [(1, 64), (3, 1500), (2, 2048), (0, 64)],
    [None, torch.bfloat16, torch.float32],
    [False, True],
    [torch.bfloat16, torch.float16],
):
    y = torch.randn(m + 2, n + 8).to(dtype)
    view = y[1 : m + 1, :n]
    around = y.clone()
    x_scale = torch.rand(1 if static else m, 1) + 0.5
    w_scale = torch.rand(n, 1) + 0.5
    bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
    expected = view.double() * x_scale * w_scale.t() + (0 if bias is None else bias.double())
    found = scale_in_place(view, x_scale, w_scale, bias)
    assert found.data_ptr() == view.data_ptr()
    ulp = torch.finfo(dtype).eps * expected.abs() + 1e-6  # sums in float32 may cancel
    worst = ((found.double() - expected).abs() / ulp).amax() if m else 0.0
    assert worst <= 1, (m, n, bias_dtype, static, dtype, worst)
    around[1 : m + 1, :n] = view
    assert torch.equal(around, y), "something outside was written"
print("scaled")
"""


def test_scale_in_place():
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "scaled" in done.stdout
