"""Zero tiles: costs, corrections and the least-squares optimum from the definition; whole runs."""

import pytest
import torch
from pruning_helpers import TEXT, save_tiny, tiny_model
from test_pruning_methods import output_error, random_hessian, random_weight

from vllm_spense.format.checkpoint import Checkpoint
from vllm_spense.format.partition import Partition, RegionKind, Segment
from vllm_spense.format.tiles import Tiles, choose_tiles, nonzero_tiles
from vllm_spense.pruning.architecture import find_decoder
from vllm_spense.pruning.blocks import (
    prune_tiles,
    prune_tiles_by_magnitude,
    refit,
    spread_order,
    tile_costs,
)
from vllm_spense.pruning.hessian import inverse_factor
from vllm_spense.pruning.loading import load_model
from vllm_spense.pruning.pipeline import prune
from vllm_spense.pruning.plan import make_plan
from vllm_spense.pruning.random_model import write_random_model
from vllm_spense.pruning.settings import PruneSettings

HALF = Tiles(64, 64, kept=2, total=4, k_shards=2)


def kept(pruned: torch.Tensor, tiles: Tiles = HALF) -> torch.Tensor:
    return nonzero_tiles(pruned[:, : tiles.columns], tiles)


def test_cost_is_the_loss_of_the_best_correction():
    """Remove columns 64–127, minimise over the columns right of them by least squares."""
    weight, hessian = random_weight(64, 192), random_hessian(192)
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())  # float32 needs the conditioning
    upper = inverse_factor(hessian, 0.0, "layer").upper
    gone, right = slice(64, 128), slice(128, 192)
    h, w = hessian.double(), weight.double()
    step = w[:, gone] @ h[gone, right] @ torch.linalg.inv(h[right, right])
    best = w.clone()
    best[:, gone], best[:, right] = 0, w[:, right] + step
    cost = tile_costs(weight, upper, Tiles(64, 64, 1, 3))[0, 1].item()
    assert cost == pytest.approx(output_error(w, best, h), rel=1e-3)
    # uncorrelated inputs: the energy of the removed outputs, nothing to correct
    energy = torch.rand(192) + 0.1
    upper = inverse_factor(torch.diag(energy), 0.0, "layer").upper
    cost = tile_costs(weight, upper, Tiles(64, 64, 1, 3))[0, 1].item()
    assert cost == pytest.approx((weight.square() * energy)[:, gone].sum().item(), rel=1e-4)


def test_uncorrelated_inputs_lose_the_cheapest_tiles_and_nothing_moves():
    weight = random_weight(128, 256)
    weight[:64, :64] *= 0.1
    weight[64:, 64:128] *= 0.1
    weight[:, 192:] *= 10
    pruned = prune_tiles(weight, torch.eye(256), HALF)
    assert kept(pruned).tolist() == [[False, True, False, True], [True, False, False, True]]
    assert torch.equal(pruned[pruned != 0], weight[pruned != 0])


def test_correction_of_one_row_block_by_hand():
    """Every column of tile 1 repeats one of tile 0 at half its size: tile 1 takes tile 0 over."""
    mix = torch.eye(64)
    hessian = torch.cat(
        [torch.cat([4 * mix, 2 * mix], 1), torch.cat([2 * mix, mix + 1e-4 * mix], 1)]
    )
    weight = torch.cat([torch.full((64, 64), 0.1), torch.full((64, 64), 1.0)], 1)
    pruned = prune_tiles(weight, inverse_factor(hessian, 0.0, "l").upper, Tiles(64, 64, 1, 2))
    torch.testing.assert_close(pruned[:, :64], torch.zeros(64, 64))
    torch.testing.assert_close(pruned[:, 64:], torch.full((64, 64), 1.2), atol=1e-3, rtol=0)


@pytest.mark.parametrize("tail", [0, 32])
def test_equal_counts_and_the_error_of_each_step(tail):
    weight, hessian = random_weight(192, 256 + tail), random_hessian(256 + tail)
    factor = inverse_factor(hessian, 0.01, "layer")
    pruned = prune_tiles(weight, factor.upper, HALF)
    counts = kept(pruned).view(3, 2, 2).sum(-1)
    assert (counts == 1).all()  # each row block, each K-shard
    masked = torch.where(pruned != 0, weight, torch.zeros(()))
    fitted = refit(weight, pruned, hessian, factor.dampening, 64)
    assert torch.equal(fitted != 0, pruned != 0)
    plain, corrected, best = (output_error(weight, w, hessian) for w in (masked, pruned, fitted))
    assert best < corrected < plain
    # stationary: no kept weight has a gradient
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(256 + tail)
    gradient = ((fitted - weight) @ damped)[fitted != 0]
    assert gradient.abs().max() < 1e-2 * ((weight @ damped)[fitted != 0]).abs().mean()


@pytest.mark.parametrize(
    ("columns", "shape", "sparsity", "most", "kept_", "shards"),
    [
        (5120, (64, 128), 0.5, 1, 20, 1),
        (25600, (128, 128), 0.5, 8, 104, 8),  # 25 tiles a shard: 13 are kept
        (25600, (64, 128), 0.75, 8, 48, 8),
        (14336, (64, 128), 0.5, 8, 56, 8),
        (1536, (64, 128), 0.5, 8, 6, 6),  # 12 tiles; with 4 shards it would be a third
        (576, (64, 64), 0.5, 1, 5, 1),
        (128, (64, 128), 0.9, 8, 1, 1),
    ],
)
def test_choice_of_tiles(columns, shape, sparsity, most, kept_, shards):
    tiles = choose_tiles(shape, columns, sparsity, most)
    assert (tiles.kept, tiles.k_shards, tiles.columns) == (kept_, shards, columns)


def test_columns_that_tiles_do_not_divide():
    with pytest.raises(ValueError, match="576 columns are no multiple of 128"):
        choose_tiles((64, 128), 576, 0.5)


def test_channels_of_similar_score_share_tiles_in_every_shard():
    tiles = Tiles(64, 64, kept=2, total=4, k_shards=2)
    scores = torch.rand(256, generator=torch.Generator().manual_seed(0))
    order = spread_order(scores, tiles)
    assert order.sort().values.tolist() == list(range(256))
    ranks = scores.argsort(descending=True).argsort()[order].view(4, 64) // 64
    assert ranks.tolist() == [[tile] * 64 for tile in (0, 2, 1, 3)]  # shards (0, 2) and (1, 3)
    assert (order.view(4, 64).diff() > 0).all()


BLOCKS = {"method": "blocks", "dense_share": 0.0, "tile": "64x64", "sparsity": 0.5}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tile": "32x32"}, "tile '32x32' is not known; needed: one of .*'64x128'"),
        ({"tile": None}, "tile None is not known"),
        ({"sparsity": 1.0}, "sparsity 1.0; needed: a share between 0 and 1"),
        ({"sparsity": None}, "sparsity None; needed"),
        ({"dense_share": 0.25}, "dense share 0.25: method 'blocks' has none"),
        ({"method": "sparsegpt"}, "tile 64x64: only method 'blocks' has it"),
        ({"method": "sparsegpt", "tile": None}, "sparsity 0.5: only method 'blocks' has it"),
    ],
)
def test_settings_that_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        PruneSettings(**BLOCKS | changes)


def test_plan_says_what_was_rounded_and_what_does_not_fit():
    decoder = find_decoder(tiny_model(hidden_size=192, head_dim=48, intermediate_size=512))
    plan = make_plan(decoder, PruneSettings(**BLOCKS, attention="keep"))
    assert plan.partitions["mlp.down_proj"] == Partition(
        "input", (Segment(RegionKind.ZERO_TILES, 512, Tiles(64, 64, 4, 8, 4)),)
    )
    assert plan.partitions["mlp.up_proj"].tiles == Tiles(64, 64, 2, 3)
    assert "mlp.gate_proj: sparsity 0.5 became 0.3333: 2 of 3 tiles" in plan.warnings[0]
    with pytest.raises(ValueError, match=r"mlp.gate_proj: 192 columns .*; other tiles: \(\(64"):
        make_plan(decoder, PruneSettings(**BLOCKS | {"tile": "64x128"}))


def test_magnitude_is_the_choice_of_uncorrelated_inputs():
    weight = random_weight(192, 256) * torch.rand(3, 1, 4, 1).repeat(1, 64, 1, 64).view(192, 256)
    by_magnitude = prune_tiles_by_magnitude(weight, HALF)
    assert torch.equal(by_magnitude, prune_tiles(weight, torch.eye(256), HALF))


def test_random_model(tmp_path):
    config = tiny_model(hidden_size=128, head_dim=32, intermediate_size=512).config
    settings = PruneSettings(**BLOCKS, attention="keep")
    checkpoint = Checkpoint.open(write_random_model(config, tmp_path / "out", settings))
    checkpoint.verify()
    assert {p.tiles.kept for p, _ in checkpoint.modules.values()} == {1, 4}


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_whole_run(tmp_path, dtype):
    """What was written is zero tiles that decode to the model that transformers loads."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
    dense, out, text = tmp_path / "dense", tmp_path / "out", tmp_path / "text.txt"
    save_tiny(dense, "llama", **sizes)
    text.write_text(TEXT)
    settings = PruneSettings(
        **BLOCKS, dtype=dtype, calibration=str(text), samples=8, length=32, attention="keep"
    )
    report = prune(str(dense), out, settings)
    assert report.bytes < report.dense_bytes
    checkpoint = Checkpoint.open(out)
    checkpoint.verify()
    assert checkpoint.quantization.provenance["recipe"]["tile"] == "64x64"
    served, _ = load_model(out)
    for name, (partition, _) in checkpoint.modules.items():
        weight = served.get_submodule(name).weight
        assert (nonzero_tiles(weight, partition.tiles).sum(1) == partition.tiles.kept).all()
        errors = [module.relative_error for module in report.modules if module.name == name]
        assert 0 < errors[0] < 0.9
