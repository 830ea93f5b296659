"""Zero tiles in real vLLM layers with faked ranks, and through the op on the CPU."""

import pytest
import torch
from test_tiles import random_tiles

vllm_linear = pytest.importorskip("vllm.model_executor.layers.linear")

from test_linear import (  # noqa: E402
    MLP,
    columns,
    describe,
    load,
    local_weight,
    ranks,
    rows,
)
from torch import nn  # noqa: E402
from vllm.config import LoadConfig  # noqa: E402

from vllm_spense import backends  # noqa: E402
from vllm_spense.format.checkpoint import Checkpoint, CheckpointWriter  # noqa: E402
from vllm_spense.format.export import export_dense  # noqa: E402
from vllm_spense.format.partition import Partition, RegionKind, Segment  # noqa: E402
from vllm_spense.format.planes import decode, encode  # noqa: E402
from vllm_spense.format.schema import make_quantization  # noqa: E402
from vllm_spense.format.tiles import Tiles  # noqa: E402
from vllm_spense.fused import FusedLayer  # noqa: E402

ZERO, DENSE = RegionKind.ZERO_TILES, RegionKind.DENSE
FP8 = torch.float8_e4m3fn
HIDDEN, INNER = 256, 512
GATE, UP, DOWN = (f"{MLP}.{name}_proj" for name in ("gate", "up", "down"))
NARROW = Tiles(64, 64, kept=2, total=4)  # along the hidden size
WIDE = Tiles(64, 64, kept=4, total=8, k_shards=4)  # along the intermediate size


def mlp(dense: int = 0) -> tuple[dict[str, Partition], dict[str, torch.Tensor]]:
    """Partitions and float weights of gate, up and down; the last `dense` channels are dense."""
    tail = (Segment(DENSE, dense),) if dense else ()
    by_rows = Partition("output", (Segment(ZERO, INNER, NARROW), *tail))
    partitions = {
        GATE: by_rows,
        UP: by_rows,
        DOWN: Partition("input", (Segment(ZERO, INNER, WIDE), *tail)),
    }
    weights = {}
    for seed, name in enumerate((GATE, UP)):
        weights[name] = torch.randn(INNER + dense, HIDDEN)
        weights[name][:INNER] = random_tiles(INNER, NARROW, seed)
    weights[DOWN] = torch.randn(HIDDEN, INNER + dense)
    weights[DOWN][:, :INNER] = random_tiles(HIDDEN, WIDE, 9)
    return partitions, weights


def make_gate_up(config, inner, dtype=torch.float32):
    return vllm_linear.MergedColumnParallelLinear(
        HIDDEN, [inner] * 2, bias=False, quant_config=config, prefix=f"{MLP}.gate_up_proj",
        params_dtype=dtype,
    )  # fmt: skip


def make_down(config, inner, dtype=torch.float32):
    return vllm_linear.RowParallelLinear(
        inner, HIDDEN, bias=False, quant_config=config, prefix=DOWN, reduce_results=False,
        params_dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dense", [0, 128])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4)])
def test_mlp(monkeypatch, dense, rank, size):
    partitions, weights = mlp(dense)
    planes = {name: encode(weights[name], partitions[name], FP8) for name in weights}
    whole = {name: decode(planes[name], partitions[name]) for name in planes}
    with ranks(monkeypatch, rank, size):
        config = describe(partitions)
        gate_up = make_gate_up(config, INNER + dense)
        load(gate_up, planes[GATE], 0)
        load(gate_up, planes[UP], 1)
        expected = [rows(whole[name], partitions[name], rank, size) for name in (GATE, UP)]
        assert torch.equal(local_weight(gate_up), torch.cat(expected))
        down = make_down(config, INNER + dense)
        load(down, planes[DOWN])
        expected = columns(whole[DOWN], partitions[DOWN], rank, size)
        assert torch.equal(local_weight(down), expected)
        x = torch.randn(3, (INNER + dense) // size)
        down.quant_method.process_weights_after_loading(down)
        assert torch.allclose(down(x)[0], x @ expected.t(), atol=1e-4)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4)])
def test_one_region_along_both_axes(monkeypatch, rank, size):
    """q, k, v by heads, with replicated KV heads; o, a whole region, along K."""
    head, heads, kv_heads = 64, 4, 2
    tiles = Tiles(64, 64, kept=2, total=4, k_shards=2 if size < 4 else 1)
    sizes = (heads * head, kv_heads * head, kv_heads * head)
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    partitions = {
        n: Partition.whole(ZERO, s, tiles) for n, s in zip(names, (*sizes, HIDDEN), strict=True)
    }
    planes, whole = {}, {}
    for seed, (name, partition) in enumerate(partitions.items()):
        planes[name] = encode(random_tiles(partition.total, tiles, seed), partition, FP8)
        whole[name] = decode(planes[name], partition)
    with ranks(monkeypatch, rank, size):
        config = describe(partitions)
        qkv = vllm_linear.QKVParallelLinear(
            HIDDEN, head, heads, kv_heads, bias=False, quant_config=config,
            prefix="model.layers.0.self_attn.qkv_proj", params_dtype=torch.float32,
        )  # fmt: skip
        for shard, name in zip("qkv", names, strict=False):
            load(qkv, planes[name], shard)
        parts = min(size, kv_heads)
        expected = [whole[names[0]].chunk(size)[rank]]
        expected += [whole[name].chunk(parts)[rank * parts // size] for name in names[1:3]]
        assert torch.equal(local_weight(qkv), torch.cat(expected))

        def make_o():
            return vllm_linear.RowParallelLinear(
                HIDDEN, HIDDEN, bias=False, quant_config=config, prefix=names[3],
                reduce_results=False, params_dtype=torch.float32,
            )  # fmt: skip

        if size == 4:
            with pytest.raises(ValueError, match="o_proj: 1 K-shards do not divide over 4 ranks"):
                make_o()
            return
        o = make_o()
        load(o, planes[names[3]])
        assert torch.equal(local_weight(o), whole[names[3]].chunk(size, 1)[rank])


@pytest.mark.parametrize(
    ("plane", "match"),
    [
        ("weight_tiles", "down_proj.weight_tiles: not a finite number"),
        ("weight_tile_index", "down_proj.weight_tile_index: index -1 at row block 0, slot 0"),
        ("weight_scale", "down_proj.weight_scale: not a finite number"),
    ],
)
def test_a_plane_that_was_not_loaded(monkeypatch, plane, match):
    partitions, weights = mlp()
    planes = encode(weights[DOWN], partitions[DOWN], FP8)
    with ranks(monkeypatch, 0, 1):
        layer = make_down(describe(partitions), INNER)
        load(layer, {name: tensor for name, tensor in planes.items() if name != plane})
        with pytest.raises(ValueError, match=match):
            layer.quant_method.process_weights_after_loading(layer)


def test_tensor_parallel_sizes_that_do_not_divide(monkeypatch):
    partitions, _ = mlp()
    match = r"down_proj: 512 channels of kind zero_tiles .* 8 ranks .* work here: 1, 2, 4$"
    with ranks(monkeypatch, 0, 8), pytest.raises(ValueError, match=match):
        make_down(describe(partitions), INNER)
    gate = {name: Partition.whole(ZERO, 192, NARROW) for name in (GATE, UP)}
    match = r"gate_proj: 192 channels .* 2 ranks in steps of 64; .* here: 1, 3$"
    with ranks(monkeypatch, 0, 2), pytest.raises(ValueError, match=match):
        make_gate_up(describe(gate), 192)


def test_modules_of_a_fused_layer_are_cut_alike():
    other = Tiles(64, 64, kept=1, total=4)
    partitions = tuple(Partition.whole(ZERO, 64, tiles) for tiles in (NARROW, other))
    with pytest.raises(ValueError, match="one cut into tiles; found: a: 64x64 2/4/1, b: 64x64 1/4"):
        FusedLayer.divide(("a", "b"), partitions, (64, 64), HIDDEN, FP8)


def test_dummy_weights_are_valid(monkeypatch):
    partitions, _ = mlp()
    with ranks(monkeypatch, 0, 2, load_config=LoadConfig(load_format="dummy")):
        layer = make_down(describe(partitions), INNER, torch.bfloat16)
        layer.quant_method.process_weights_after_loading(layer)
        y = layer(torch.randn(64, INNER // 2).bfloat16())[0].float()
    assert torch.isfinite(y).all()
    assert 0.1 < y.std() < 0.4  # √(K · kept) · 0.02 = 0.23


@pytest.mark.parametrize("dense", [0, 128])
@pytest.mark.parametrize("planned", ["as stored", "expanded"])
def test_the_op(monkeypatch, dense, planned):
    """Zero tiles as a kernel takes them, and expanded where no kernel does: the same product."""
    partitions, weights = mlp(dense)
    partitions = (partitions[GATE], partitions[UP])
    per_module = [encode(weights[n], p, FP8) for n, p in zip((GATE, UP), partitions, strict=True)]
    planes = {name: torch.cat([part[name] for part in per_module]) for name in per_module[0]}
    inner = INNER + dense
    fused = FusedLayer.divide((GATE, UP), partitions, (inner, inner), HIDDEN, FP8)
    layout = fused.layout()
    kinds = [region.kind for region in layout.regions]
    assert kinds == ([ZERO, DENSE] if dense else [ZERO])  # gate and up in one call of each kind
    if planned == "expanded":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        layout, reasons = backends._plan_regions(layout, torch.bfloat16, torch.device("cuda:0"))
        assert {region.kind for region in layout.regions} == {DENSE}
        assert "expanded to a dense region" in reasons[0]
    layer, x = nn.Module(), torch.randn(5, HIDDEN).bfloat16()
    with ranks(monkeypatch, 0, 1):
        backend = backends.SparseOp(layout, fused.slices(), torch.bfloat16)
        backend.load(layer, fused, planes)
        y = backend.apply(layer, x, None).double()
    expected = x.double() @ fused.decode(planes, torch.float64).t()
    assert (y - expected).norm() / expected.norm() < 4e-2  # X is rounded to FP8


def test_checkpoint_and_its_dense_twin(tmp_path):
    partitions, weights = mlp(128)
    writer = CheckpointWriter(tmp_path / "model")
    for name, weight in weights.items():
        planes = encode(weight, partitions[name], FP8)
        writer.add({f"{name}.{plane}": tensor for plane, tensor in planes.items()})
    writer.finish({}, make_quantization(FP8, partitions, ["lm_head"], {}))
    checkpoint = Checkpoint.open(tmp_path / "model")
    checkpoint.verify()
    assert {m: s for m, (_, s) in checkpoint.modules.items()} == {
        name: tuple(weight.shape) for name, weight in weights.items()
    }
    twin = export_dense(tmp_path / "model", tmp_path / "twin")
    from safetensors.torch import load_file

    dense = load_file(twin / "model.safetensors")
    for name, partition in partitions.items():
        numbers = dense[f"{name}.weight"].float() * dense[f"{name}.weight_scale"]
        assert torch.equal(numbers, decode(checkpoint.planes(name), partition))
