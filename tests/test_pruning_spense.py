"""Which channels stay dense, and that moving them changes nothing."""

import pytest
import torch
from pruning_helpers import tiny_model

from vllm_spense.pruning.block import permute_mlp
from vllm_spense.pruning.spense import channel_scores, dense_last_order, mean_normalise


def test_scores_follow_the_equations():
    torch.manual_seed(0)
    gate, up, down = torch.randn(6, 3), torch.randn(6, 3), torch.randn(5, 6)
    mlp_energy, down_energy = torch.rand(3), torch.rand(6)
    vectors = {"gate": [], "up": [], "down": []}
    for i in range(6):
        for name, weight in (("gate", gate), ("up", up)):
            parts = [abs(weight[i, j].item()) * mlp_energy[j].item() ** 0.5 for j in range(3)]
            vectors[name].append(sum(parts) / 3)
        parts = [abs(down[r, i].item()) * down_energy[i].item() ** 0.5 for r in range(5)]
        vectors["down"].append(sum(parts) / 5)
    expected = [sum(vector[i] / (sum(vector) / 6) for vector in vectors.values()) for i in range(6)]
    scores = channel_scores(gate, up, down, mlp_energy, down_energy)
    torch.testing.assert_close(scores, torch.tensor(expected))


def test_each_projection_counts_alike_whatever_its_scale():
    assert mean_normalise(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([0.5, 1.5])
    gate, down = torch.rand(4, 2), torch.rand(3, 4)
    energies = torch.ones(2), torch.ones(4)
    scores = channel_scores(gate, gate, down, *energies)
    torch.testing.assert_close(channel_scores(1000 * gate, gate, down, *energies), scores)


def test_the_highest_scores_go_last_and_order_is_kept():
    scores = torch.tensor([5.0, 1.0, 4.0, 1.0, 9.0, 0.0])
    assert dense_last_order(scores, 2).tolist() == [1, 2, 3, 5, 0, 4]
    assert dense_last_order(scores, 0).tolist() == list(range(6))
    assert dense_last_order(torch.zeros(4), 1).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_does_not_notice_the_permutation(bias):
    mlp = tiny_model("llama", mlp_bias=bias, dtype=torch.float64).model.layers[0].mlp
    x = torch.randn(7, 64, dtype=torch.float64)
    with torch.no_grad():
        before = mlp(x)
        permute_mlp(mlp, torch.randperm(128))
        torch.testing.assert_close(mlp(x), before)
