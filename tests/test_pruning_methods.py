"""Scores, masks, Hessians and SparseGPT against closed forms and an independent reference."""

import pytest
import torch

from vllm_spense.format.partition import Partition, RegionKind, hybrid_segments
from vllm_spense.pruning.hessian import Hessian, HessianError, diagonal_energy, inverse_factor
from vllm_spense.pruning.method import InputStatistics, prune_weight
from vllm_spense.pruning.scoring import magnitude_scores, mask_24, prune_by_score, wanda_scores
from vllm_spense.pruning.settings import PruneSettings
from vllm_spense.pruning.sparsegpt import prune_24


def random_hessian(columns: int, seed: int = 0) -> torch.Tensor:
    """Strongly correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(8 * columns, columns, generator=generator) @ (mix + 0.3)
    return x.T @ x / len(x)


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def output_error(weight, pruned, hessian) -> float:
    difference = (weight - pruned).double()
    return ((difference @ hessian.double()) * difference).sum().item()


def obs_reference(weight, hessian, sparse_columns):
    """SparseGPT from the definition, float64: invert the Hessian of the columns that are left."""
    pruned, hessian = weight.double().clone(), hessian.double()
    cost = torch.stack(
        [torch.linalg.inv(hessian[j:, j:])[0, 0] for j in range(sparse_columns)]
    )  # [H_F⁻¹]_jj with the free columns F = j, j + 1, …
    for first in range(0, sparse_columns, 4):
        loss = pruned[:, first : first + 4].square() / cost[first : first + 4]
        for row in range(len(pruned)):
            for j in sorted(loss[row].argsort()[:2].tolist()):
                column = first + j
                inverse = torch.linalg.inv(hessian[column:, column:])
                step = pruned[row, column] / inverse[0, 0]
                pruned[row, column:] -= step * inverse[0]
    return pruned


def test_mask_keeps_the_two_highest_of_four_and_the_lower_of_equals():
    scores = torch.tensor([[1.0, 4, 3, 2, 5, 5, 5, 5], [0, 0, 0, 1, 9, 1, 8, 1]])
    expected = [[0, 1, 1, 0, 1, 1, 0, 0], [1, 0, 0, 1, 1, 0, 1, 0]]
    assert mask_24(scores).int().tolist() == expected


def test_wanda_and_magnitude_differ_where_inputs_do():
    weight, energy = torch.tensor([[1.0, -2, 3, -4]]), torch.tensor([100.0, 100, 1, 1])
    assert prune_by_score(weight, magnitude_scores(weight), 4).tolist() == [[0, 0, 3, -4]]
    assert prune_by_score(weight, wanda_scores(weight, energy), 4).tolist() == [[1, -2, 0, 0]]


def test_columns_outside_the_region_stay():
    weight = random_weight(3, 12)
    pruned = prune_by_score(weight, magnitude_scores(weight), 8)
    assert torch.equal(pruned[:, 8:], weight[:, 8:])
    assert (pruned[:, :8] != 0).sum() == 3 * 4


def test_sparsegpt_with_uncorrelated_inputs_is_wanda():
    weight, energy = random_weight(16, 64), torch.rand(64) + 0.1
    factor = inverse_factor(torch.diag(energy), 0.0, "layer")
    expected = prune_by_score(weight, wanda_scores(weight, energy), 64)
    assert torch.equal(prune_24(weight, factor.upper, 64), expected)


def test_sparsegpt_with_identity_hessian_is_magnitude():
    weight = random_weight(16, 32)
    expected = prune_by_score(weight, magnitude_scores(weight), 32)
    assert torch.equal(prune_24(weight, torch.eye(32), 32), expected)


def test_two_correlated_columns_by_hand():
    """Column 3 goes; column 4 (dense, correlation c) takes c · w₃ over: least squares."""
    c = 0.6
    hessian = torch.eye(5)
    hessian[3, 4] = hessian[4, 3] = c
    weight = torch.tensor([[3.0, 2.0, 0.1, 0.5, 1.0]])
    pruned = prune_24(weight, inverse_factor(hessian, 0.0, "layer").upper, 4)
    torch.testing.assert_close(pruned, torch.tensor([[3.0, 2.0, 0.0, 0.0, 1.0 + c * 0.5]]))


@pytest.mark.parametrize("columns, sparse", [(8, 8), (24, 24), (24, 16), (40, 20)])
def test_sparsegpt_equals_the_definition(columns, sparse):
    weight, hessian = random_weight(5, columns), random_hessian(columns)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns)
    upper = inverse_factor(hessian, 0.01, "layer").upper
    expected = obs_reference(weight, damped, sparse).float()
    torch.testing.assert_close(prune_24(weight, upper, sparse), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("block_size", [4, 12, 64, 256])
def test_block_size_changes_only_rounding(block_size):
    weight, upper = random_weight(8, 96), inverse_factor(random_hessian(96), 0.01, "layer").upper
    expected = prune_24(weight, upper, 96, 96)
    torch.testing.assert_close(prune_24(weight, upper, 96, block_size), expected)


def test_error_feedback_beats_wanda_beats_magnitude():
    weight, hessian = random_weight(64, 128), random_hessian(128)
    hessian *= torch.outer(*[torch.linspace(0.2, 3, 128)[torch.randperm(128)]] * 2)
    upper = inverse_factor(hessian, 0.01, "layer").upper
    errors = [
        output_error(weight, pruned, hessian)
        for pruned in (
            prune_24(weight, upper, 128),
            prune_by_score(weight, wanda_scores(weight, hessian.diagonal()), 128),
            prune_by_score(weight, magnitude_scores(weight), 128),
        )
    ]
    assert errors[0] < 0.8 * errors[1]
    assert errors[1] < errors[2]


def test_dense_columns_on_the_right_absorb_error_and_are_never_masked():
    weight, hessian = random_weight(32, 64), random_hessian(64)
    pruned = prune_24(weight, inverse_factor(hessian, 0.01, "layer").upper, 32)
    assert ((pruned[:, :32].reshape(32, 8, 4) != 0).sum(-1) == 2).all()
    assert (pruned[:, 32:] != 0).all()
    assert (pruned[:, 32:] != weight[:, 32:]).all()
    frozen = torch.cat([pruned[:, :32], weight[:, 32:]], 1)
    assert output_error(weight, pruned, hessian) < 0.7 * output_error(weight, frozen, hessian)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt", "spensegpt", "spensegpt+"])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_every_method_respects_the_partition(method, share):
    settings = PruneSettings(method=method, dense_share=share)
    statistics = InputStatistics(random_hessian(32), 0.01, "layer")
    segments = hybrid_segments(32, share)
    output, input_ = Partition("output", segments), Partition("input", segments)
    sparse = output.size_of(RegionKind.SPARSE_24)
    weight = random_weight(32, 32)
    gate = prune_weight(weight, output, statistics, settings)
    assert torch.equal(gate[sparse:], weight[sparse:])
    assert ((gate[:sparse].reshape(sparse, 8, 4) != 0).sum(-1) == 2).all()
    down = prune_weight(weight, input_, statistics, settings)
    assert ((down[:, :sparse].reshape(32, -1, 4) != 0).sum(-1) == 2).all()
    absorbs = method not in ("magnitude", "wanda") and 0 < share < 1
    assert torch.equal(down[:, sparse:], weight[:, sparse:]) != absorbs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hessian_sums_exactly(dtype):
    x = torch.randn(3, 50, 16).to(dtype)
    hessian = Hessian(16)
    for batch in x:
        hessian.add(batch)
    rows = x.reshape(-1, 16).double()
    torch.testing.assert_close(hessian.mean("layer").double(), rows.T @ rows / 150)
    energy = torch.stack([diagonal_energy(batch) for batch in x]).sum(0)
    torch.testing.assert_close(energy / 150, hessian.mean("layer").diagonal())


@pytest.mark.parametrize("damp", [0.0, 0.01, 0.5])
def test_inverse_factor_is_the_cholesky_factor_of_the_inverse(damp):
    hessian = random_hessian(24).double()
    factor = inverse_factor(hessian, damp, "layer")
    damped = hessian + damp * hessian.diagonal().mean() * torch.eye(24, dtype=torch.float64)
    expected = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    torch.testing.assert_close(factor.upper, expected)
    assert factor.dampening == damp


def test_dampening_grows_and_is_returned_where_the_factorisation_fails():
    indefinite = torch.tensor([[1.0, 1.05], [1.05, 1.0]])
    assert inverse_factor(indefinite, 0.01, "layer").dampening == pytest.approx(0.1)


def test_a_hessian_without_a_factor_names_the_layer():
    hopeless = torch.tensor([[1.0, 9.0], [9.0, 1.0]])
    with pytest.raises(HessianError, match=r"layers\.3\.mlp.*no Cholesky factor.*dampening 1"):
        inverse_factor(hopeless, 0.01, "layers.3.mlp")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_hessian_that_is_not_finite_names_the_layer(bad):
    hessian = Hessian(4)
    hessian.add(torch.tensor([[1.0, bad, 0.0, 2.0]]))
    with pytest.raises(HessianError, match=r"layers\.7\.down: .* not finite .*1 of 4 channels"):
        hessian.mean("layers.7.down")


def test_a_hessian_without_inputs_names_the_layer():
    with pytest.raises(HessianError, match=r"down: no calibration token"):
        Hessian(4).mean("down")
    silent = Hessian(4)
    silent.add(torch.zeros(3, 4))
    with pytest.raises(HessianError, match=r"down: all of its calibration inputs are zero"):
        silent.mean("down")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"method": "best"}, r"method 'best' is not known.*spensegpt\+"),
        ({"dtype": "int4"}, r"dtype 'int4' is not known.*fp8"),
        ({"attention": "sparse"}, r"attention 'sparse' is not known.*2:4"),
        ({"dense_share": 1.5}, r"dense share 1\.5 is outside 0 … 1"),
        ({"dense_share": -0.1}, r"dense share -0\.1 is outside"),
        ({"samples": 0}, r"0 samples of 512 tokens"),
        ({"dampening": float("nan")}, r"dampening nan"),
        ({"block_size": 6}, r"block size 6"),
        ({"batch_size": -1}, r"batch size -1"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        PruneSettings(**change)
