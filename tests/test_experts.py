"""A real vLLM layer of experts with faked ranks: loading, sharding, refusals, on the CPU."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from test_linear import describe, rows
from test_linear import ranks as linear_ranks
from test_sparse24 import random_24

fused_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe")

from vllm.config import ParallelConfig  # noqa: E402

from vllm_spense import experts as ours  # noqa: E402
from vllm_spense.format.partition import Partition, RegionKind, Segment, hybrid_segments  # noqa: E402
from vllm_spense.format.planes import decode, encode  # noqa: E402
from vllm_spense.format.tiles import Tiles  # noqa: E402

FP8 = torch.float8_e4m3fn
HIDDEN, INNER, COUNT = 64, 128, 5
LAYER = "model.layers.0.mlp.experts"
NAMES = {"qwen": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
SHAPES = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))


def hybrid(share):
    segments = hybrid_segments(INNER, share)
    gate = Partition("output", segments)
    return gate, gate, Partition("input", segments)


def tiled():
    """Half of the tiles of gate and up; of down in two K-shards."""
    narrow, wide = Tiles(64, 64, 1, 1), Tiles(64, 64, 2, 2, k_shards=2)
    gate = Partition("output", (Segment(RegionKind.ZERO_TILES, INNER, narrow),))
    return gate, gate, Partition("input", (Segment(RegionKind.ZERO_TILES, INNER, wide),))


def whole_experts(partitions, names, dtype=FP8):
    """Module → (planes, decoded weight) of the whole checkpoint."""
    found = {}
    for index in range(COUNT):
        for i, (name, partition, shape) in enumerate(zip(names, partitions, SHAPES, strict=True)):
            planes = encode(random_24(*shape, seed=10 * index + i), partition, dtype)
            found[f"{index}.{name}"] = planes, decode(planes, partition)
    return found


@pytest.fixture
def build(monkeypatch):
    """A layer as one rank of vLLM builds it; `ep` gives every rank whole experts."""
    stack = []

    def make(partitions, names=NAMES["qwen"], rank=0, size=1, ep=False, dtype=FP8, **changes):
        import vllm.model_executor.layers.fused_moe.config as moe_config

        monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda: rank)
        parallel = ParallelConfig()
        parallel.enable_expert_parallel = ep
        context = linear_ranks(monkeypatch, rank, size, parallel_config=parallel)
        context.__enter__()
        stack.append(context)
        described = {
            f"{LAYER}.{i}.{name}": partition
            for i in range(COUNT)
            for name, partition in zip(names, partitions, strict=True)
        }
        factory = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
        gate, up, down = names
        arguments = {
            "num_experts": COUNT, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": INNER,
            "params_dtype": torch.float32, "quant_config": describe(described, dtype),
            "tp_size": size, "dp_size": 1, "pcp_size": 1, "prefix": LAYER,
            "ckpt_names": (gate, down, up),
        }  # fmt: skip
        return factory(**(arguments | changes)).routed_experts

    yield make
    for context in stack:
        context.__exit__(None, None, None)


def load(layer, experts):
    weights = [(f"{m}.{n}", t) for m, (planes, _) in experts.items() for n, t in planes.items()]
    return list(layer.load_weights(weights))


def columns(weight, partition, rank, size):
    spans = partition.spans().values()
    return torch.cat([weight.narrow(1, s, n).chunk(size, 1)[rank] for s, n in spans], 1)


def local_weights(layer):
    """(w13, w2) as handed to vLLM's kernel, before it repacks them."""
    kept = {}

    def keep(self, layer):
        kept.update(w13=layer.w13_weight.data.clone(), w2=layer.w2_weight.data.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.UnquantizedFusedMoEMethod, "process_weights_after_loading", keep)
        layer.quant_method.process_weights_after_loading(layer)
    return kept["w13"], kept["w2"]


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(
    "partitions", [hybrid(0.0), hybrid(0.25), hybrid(0.5), hybrid(1.0), tiled()],
    ids=["0", "0.25", "0.5", "1", "tiles"],
)  # fmt: skip
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_every_rank_gets_its_part_of_every_expert(build, family, partitions, rank, size):
    names = NAMES[family]
    experts = whole_experts(partitions, names)
    layer = build(partitions, names, rank, size)
    load(layer, experts)
    w13, w2 = local_weights(layer)
    for index in range(COUNT):
        gate, up, down = (experts[f"{index}.{name}"][1] for name in names)
        expected = [rows(w, p, rank, size) for w, p in zip((gate, up), partitions, strict=False)]
        assert torch.equal(w13[index], torch.cat(expected))
        assert torch.equal(w2[index], columns(down, partitions[2], rank, size))


@pytest.mark.parametrize("rank", [0, 1])
def test_expert_parallel(build, rank):
    """Five experts on two ranks: three whole ones on the first, two on the second."""
    partitions = hybrid(0.25)
    experts = whole_experts(partitions, NAMES["qwen"])
    layer = build(partitions, rank=rank, size=2, ep=True)
    load(layer, experts)
    w13, w2 = local_weights(layer)
    held = [[0, 1, 2], [3, 4]][rank]
    assert len(w13) == len(w2) == len(held)
    for local, index in enumerate(held):
        gate, up, down = (experts[f"{index}.{name}"][1] for name in NAMES["qwen"])
        assert torch.equal(w13[local], torch.cat([gate, up]))
        assert torch.equal(w2[local], down)


def reference(x, experts, weights, ids):
    """Every token through its experts, in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, index in zip(weights[token], ids[token], strict=True):
            gate, up, down = (experts[f"{index}.{n}"][1].double() for n in NAMES["qwen"])
            xt = x[token].double()
            y[token] += weight * (down @ (torch.nn.functional.silu(gate @ xt) * (up @ xt)))
    return y


def test_product_on_the_cpu(build):
    """Expert parallel ranks add up to the whole: each counts its own experts only."""
    partitions, total = hybrid(0.25), 0
    experts = whole_experts(partitions, NAMES["qwen"])
    x, weights = torch.randn(7, HIDDEN), torch.rand(7, 2)
    ids = torch.stack([torch.randperm(COUNT)[:2] for _ in range(7)])
    for rank in (0, 1):
        layer = build(partitions, rank=rank, size=2, ep=True)
        load(layer, experts)
        layer.quant_method.process_weights_after_loading(layer)
        total += layer.quant_method.apply(layer, x, weights, ids.int(), None, None).clone()
    expected = reference(x, experts, weights.double(), ids.tolist())
    assert (total - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("plane", "match"),
    [
        ("3.up_proj.weight_values", r"experts\.3\.up_proj\.weight_values: not a finite number"),
        ("0.gate_proj.weight_meta", r"experts\.0\.gate_proj\.weight_meta: byte 0x00"),
        ("4.up_proj.weight_dense", r"experts\.4\.up_proj\.weight_dense: not a finite"),
        ("4.up_proj.weight_dense_scale", r"experts\.4\.up_proj\.weight_dense_scale: not a finite"),
        ("2.down_proj.weight_scale", r"experts\.2\.down_proj\.weight_scale: not a finite number"),
    ],
)
def test_a_plane_that_was_not_loaded(build, plane, match):
    partitions = hybrid(0.25)
    experts = whole_experts(partitions, NAMES["qwen"])
    module, _, name = plane.rpartition(".")
    del experts[module][0][name]
    layer = build(partitions)
    load(layer, experts)
    with pytest.raises(ValueError, match=match):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("plane", "change", "match"),
    [
        ("up_proj.weight_values", lambda t: t.repeat(2, 1), r"experts\.1\.w3: w13_weight_values"),
        ("up_proj.weight_values", lambda t: t.float(), r"torch\.float32; needed"),
        ("down_proj.weight_meta", lambda t: t.repeat(1, 2), r"w2_weight_meta: .*holds \[64, 24\]"),
        ("down_proj.weight_scale", lambda t: t.squeeze(), r"holds \[64\]"),
        ("gate_proj.weight_meta", lambda t: t.int(), r"torch\.int32; needed: .* torch\.uint8"),
    ],
)
def test_planes_of_the_wrong_shape_or_dtype(build, plane, change, match):
    """vLLM's own loader would narrow the first and cast the second without a word."""
    partitions = hybrid(0.25)
    experts = whole_experts(partitions, NAMES["qwen"])
    name, _, leaf = plane.rpartition(".")
    planes = experts[f"1.{name}"][0]
    planes[leaf] = change(planes[leaf])
    with pytest.raises(ValueError, match=match):
        load(build(partitions), experts)


def test_ranks_that_cannot_share(build):
    """96 channels of 2:4 in bytes of 8 columns: not over 16 ranks."""
    with pytest.raises(ValueError, match=r"experts\.N\.down_proj: 96 channels .* over 16 ranks"):
        build(hybrid(0.25), size=16)


def test_a_model_of_other_size(build):
    message = r"divides 128 intermediate channels, config\.json states 96"
    with pytest.raises(ValueError, match=message):
        build(hybrid(0.25), intermediate_size=96)


def test_experts_with_a_bias(build):
    with pytest.raises(ValueError, match="experts with a bias cannot be served sparse"):
        build(hybrid(0.25), has_bias=True)


def test_experts_that_are_not_stored_alike(build):
    """One of them is ignored."""
    from test_linear import SpenseConfig, make_quantization

    described = {f"{LAYER}.{i}.{n}": p for i in range(1, COUNT)
                 for n, p in zip(NAMES["qwen"], hybrid(0.25), strict=True)}  # fmt: skip
    quantization = make_quantization(FP8, described, [], {})
    for group in quantization.groups.values():
        group.targets = [name for name in described if group.partition == described[name]]
    quantization.ignore = [rf"re:{LAYER}\.0\."]
    with pytest.raises(ValueError, match="its experts are not stored alike"):
        build(hybrid(0.25), quant_config=SpenseConfig(quantization))


def test_ignored_experts_stay_as_they_were(build):
    from test_linear import SpenseConfig, make_quantization

    config = SpenseConfig(make_quantization(FP8, {}, [r"re:.*\.experts\."], {}))
    method = build(hybrid(0.25), quant_config=config).quant_method
    assert type(method) is ours.UnquantizedFusedMoEMethod


def test_load_balancing_is_refused():
    parallel = SimpleNamespace(enable_eplb=True)
    layer = SimpleNamespace(moe_config=SimpleNamespace(moe_parallel_config=parallel))
    with pytest.raises(ValueError, match="--enable-eplb"):
        ours.experts_method(SimpleNamespace(layer=LAYER), layer)


def test_dummy_weights(build, monkeypatch):
    monkeypatch.setattr("vllm_spense.compat.dummy_weights", lambda: True)
    w13, w2 = local_weights(build(hybrid(0.25)))
    assert torch.isfinite(w13).all() and 0.005 < w2.std() < 0.05
    assert not torch.equal(w2[0], w2[1])


def test_padded_sizes(build):
    """A kernel may want more channels than there are: zeros, and up begins where it is asked to."""
    partitions = hybrid(0.25)
    experts = whole_experts(partitions, NAMES["qwen"])
    layer = build(partitions)
    load(layer, experts)
    layer.quant_method._padded = {"w13": ((160, 160), 96), "w2": ((96,), 160)}
    w13, w2 = local_weights(layer)
    gate, up, down = (experts[f"2.{name}"][1] for name in NAMES["qwen"])
    assert torch.equal(w13[2, :128, :64], gate) and torch.equal(w13[2, 160:288, :64], up)
    assert torch.equal(w2[2, :64, :128], down)
    assert w13.abs().sum() == w13[:, :, :64].abs().sum() and w2[:, 64:].abs().sum() == 0


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Our choice for a GPU; vLLM's method for FP8 experts takes its weights and stops there."""
    stock = ours.compat.DenseFp8Experts
    module = importlib.import_module(stock.__module__)
    gpu = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False, device_type="cuda")
    monkeypatch.setattr(ours, "current_platform", gpu)
    monkeypatch.setattr(module, "select_fp8_moe_backend", lambda **_: (None, None))
    monkeypatch.setattr(stock, "process_weights_after_loading", lambda self, layer: None)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_fp8_experts_keep_their_numbers(build, as_on_a_gpu, rank, size):
    """Nothing is expanded to more than FP8: vLLM's kernel gets the bytes of the twin."""
    partitions = hybrid(0.25)
    experts = whole_experts(partitions, NAMES["qwen"])
    layer = build(partitions, rank=rank, size=size, params_dtype=torch.bfloat16)
    load(layer, experts)
    layer.quant_method.process_weights_after_loading(layer)
    received = dict(layer.named_parameters())
    assert set(received) == {"w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"}
    assert all(received[f"{n}_weight"].dtype == FP8 for n in ("w13", "w2"))
    w13 = received["w13_weight"].float() * received["w13_weight_scale"]
    w2 = received["w2_weight"].float() * received["w2_weight_scale"]
    for index in range(COUNT):
        gate, up, down = (experts[f"{index}.{name}"][1] for name in NAMES["qwen"])
        parts = [rows(w, p, rank, size) for w, p in zip((gate, up), partitions, strict=False)]
        assert torch.equal(w13[index], torch.cat(parts))
        assert torch.equal(w2[index], columns(down, partitions[2], rank, size))
    assert layer.w13_input_scale is None and layer.weight_block_size is None


def test_dtypes_that_a_gpu_cannot_serve(build, as_on_a_gpu):
    with pytest.raises(ValueError, match="float32 activations on a GPU; use --dtype bfloat16"):
        build(hybrid(0.25))
    with pytest.raises(
        ValueError, match=r"torch\.float16 weights with torch\.bfloat16 activations"
    ):
        build(hybrid(0.25), dtype=torch.float16, params_dtype=torch.bfloat16)


def test_experts_of_a_legacy_checkpoint():
    from vllm_spense.legacy_config import LegacyConfig

    with pytest.raises(
        ValueError, match=r"mlp\.experts: .* convert it: python scripts/convert\.py"
    ):
        LegacyConfig._experts_method(object(), torch.nn.Module(), LAYER)
