"""The plain-torch twin against the definition, written out."""

import torch
from layers import FP8, gate_up, input_split, make_layer, random_input

from vllm_spense.kernels import reference


def test_expand_puts_every_region_in_its_place():
    for n, k, regions in (
        (128, 64, gate_up(128, 64, 32)),
        (48, 192, input_split(48, 192, 64)),
    ):
        layer = make_layer(n, k, regions, FP8, "cpu")
        expected = layer.weight.double()
        assert torch.equal(
            reference.expand_planes(layer.layout, layer.planes, torch.float64), expected
        )
        assert torch.equal(
            reference.expand(layer.layout, layer.kernel_tensors(), torch.float64), expected
        )


def test_products_are_sums_of_products():
    layer = make_layer(32, 64, input_split(32, 64, 32), FP8, "cpu")
    x = random_input(2, 64, FP8, "cpu")
    weight = reference.expand_planes(layer.layout, layer.planes, torch.float64)
    y = reference.linear_raw(x, weight, torch.float64, alpha=0.25)
    by_hand = sum(float(x[1, k]) * float(layer.weight[3, k]) for k in range(64)) * 0.25
    assert abs(y[1, 3].item() - by_hand) < 1e-9 * abs(by_hand) + 1e-12


def test_scales_and_bias_are_rounded_once():
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    x_scale, w_scale = torch.tensor([[2.0], [0.5]]), torch.tensor([[1.0], [10.0]])
    bias = torch.tensor([0.25, -1.0], dtype=torch.bfloat16)
    scaled = reference.apply_scales(y, x_scale, w_scale, bias)
    assert scaled.dtype == torch.bfloat16
    assert torch.equal(scaled, torch.tensor([[2.25, 39.0], [1.75, 19.0]], dtype=torch.bfloat16))
