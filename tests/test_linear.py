"""Real vLLM layers with a faked tensor-parallel rank: loading, sharding, refusals, on the CPU."""

import contextlib

import pytest
import torch
from test_sparse24 import random_24

vllm_linear = pytest.importorskip("vllm.model_executor.layers.linear")

from vllm.config import DeviceConfig, LoadConfig, VllmConfig, set_current_vllm_config  # noqa: E402

from vllm_spense.config import SpenseConfig  # noqa: E402
from vllm_spense.format.partition import Partition, RegionKind, hybrid_segments  # noqa: E402
from vllm_spense.format.planes import decode, encode  # noqa: E402
from vllm_spense.format.schema import make_quantization  # noqa: E402

FP8 = torch.float8_e4m3fn
HIDDEN, INTERMEDIATE, HEAD = 64, 256, 16
MLP, ATTENTION = "model.layers.0.mlp", "model.layers.0.self_attn"
PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


@contextlib.contextmanager
def ranks(monkeypatch, rank, size, **config):
    """vLLM's idea of the tensor-parallel group, without processes."""
    for module in ("model_executor.layers.linear", "model_executor.parameter"):
        for name, value in (("rank", rank), ("world_size", size)):
            monkeypatch.setattr(
                f"vllm.{module}.get_tensor_model_parallel_{name}", lambda value=value: value
            )
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), **config)
    config.compilation_config.mode = 0
    with set_current_vllm_config(config):
        yield


def describe(partitions, dtype=FP8):
    config = SpenseConfig(make_quantization(dtype, partitions, ["lm_head"], {}))
    config.packed_modules_mapping = PACKED
    return config


def modules(partitions, shapes, dtype=FP8, seed=0):
    """Module → planes of the whole module."""
    return {
        name: encode(random_24(*shapes[name], seed=seed + i), partition, dtype)
        for i, (name, partition) in enumerate(partitions.items())
    }


def load(layer, planes, shard=None):
    for name, tensor in planes.items():
        parameter = getattr(layer, name)
        arguments = (parameter, tensor) if shard is None else (parameter, tensor, shard)
        parameter.weight_loader(*arguments)


def local_weight(layer):
    method = layer.quant_method
    planes = {name: getattr(layer, name).data for name in method._fused.planes()}
    return method._fused.decode(planes, torch.float32)


def columns(weight, partition, rank, size):
    """This rank's input channels: its share of every segment."""
    parts = [
        weight.narrow(1, start, n).chunk(size, 1)[rank] for start, n in partition.spans().values()
    ]
    return torch.cat(parts, 1)


def rows(weight, partition, rank, size):
    parts = [
        weight.narrow(0, start, n).chunk(size, 0)[rank] for start, n in partition.spans().values()
    ]
    return torch.cat(parts, 0)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4), (5, 8)])
def test_mlp(monkeypatch, share, rank, size):
    segments = hybrid_segments(INTERMEDIATE, share)
    gate, up, down = (f"{MLP}.{name}_proj" for name in ("gate", "up", "down"))
    partitions = {
        gate: Partition("output", segments),
        up: Partition("output", segments),
        down: Partition("input", segments),
    }
    shapes = {n: (INTERMEDIATE, HIDDEN) for n in (gate, up)} | {down: (HIDDEN, INTERMEDIATE)}
    planes = modules(partitions, shapes)
    whole = {name: decode(planes[name], partitions[name]) for name in planes}
    with ranks(monkeypatch, rank, size):
        config = describe(partitions)
        gate_up = vllm_linear.MergedColumnParallelLinear(
            HIDDEN, [INTERMEDIATE] * 2, bias=False, quant_config=config,
            prefix=f"{MLP}.gate_up_proj", params_dtype=torch.float32,
        )  # fmt: skip
        load(gate_up, planes[gate], 0)
        load(gate_up, planes[up], 1)
        expected = [rows(whole[name], partitions[name], rank, size) for name in (gate, up)]
        assert torch.equal(local_weight(gate_up), torch.cat(expected))
        row = vllm_linear.RowParallelLinear(
            INTERMEDIATE, HIDDEN, bias=False, quant_config=config, prefix=down,
            reduce_results=False, params_dtype=torch.float32,
        )  # fmt: skip
        load(row, planes[down])
        expected = columns(whole[down], partitions[down], rank, size)
        assert torch.equal(local_weight(row), expected)


@pytest.mark.parametrize("kinds", ["sss", "sdd", "ddd"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (2, 4), (7, 8)])
def test_qkv_and_o(monkeypatch, kinds, rank, size):
    """8 query heads, 2 KV heads: from 4 ranks on, KV heads are replicated."""
    heads, kv_heads = 8, 2
    names = [f"{ATTENTION}.{name}_proj" for name in "qkvo"]
    sizes = (heads * HEAD, kv_heads * HEAD, kv_heads * HEAD)
    of = {"s": RegionKind.SPARSE_24, "d": RegionKind.DENSE}
    partitions = {
        n: Partition.whole(of[k], s) for n, k, s in zip(names, kinds, sizes, strict=False)
    }
    partitions[names[3]] = Partition.whole(of[kinds[0]], HIDDEN)
    shapes = {name: (s, HIDDEN) for name, s in zip(names, sizes, strict=False)}
    shapes[names[3]] = (HIDDEN, heads * HEAD)
    planes = modules(partitions, shapes)
    whole = {name: decode(planes[name], partitions[name]) for name in planes}
    with ranks(monkeypatch, rank, size):
        config = describe(partitions)
        qkv = vllm_linear.QKVParallelLinear(
            HIDDEN, HEAD, heads, kv_heads, bias=False, quant_config=config,
            prefix=f"{ATTENTION}.qkv_proj", params_dtype=torch.float32,
        )  # fmt: skip
        for shard, name in zip("qkv", names, strict=False):
            load(qkv, planes[name], shard)
        kv_parts = min(size, kv_heads)
        kv_rank = rank * kv_parts // size
        expected = [
            whole[names[0]].chunk(size)[rank],
            whole[names[1]].chunk(kv_parts)[kv_rank],
            whole[names[2]].chunk(kv_parts)[kv_rank],
        ]
        assert torch.equal(local_weight(qkv), torch.cat(expected))
        o = vllm_linear.RowParallelLinear(
            heads * HEAD, HIDDEN, bias=False, quant_config=config, prefix=names[3],
            reduce_results=False, params_dtype=torch.float32,
        )  # fmt: skip
        load(o, planes[names[3]])
        assert torch.equal(local_weight(o), whole[names[3]].chunk(size, 1)[rank])


def make_down(config, params_dtype=torch.float32, bias=False):
    return vllm_linear.RowParallelLinear(
        INTERMEDIATE, HIDDEN, bias=bias, quant_config=config, prefix=f"{MLP}.down_proj",
        reduce_results=bias, params_dtype=params_dtype,
    )  # fmt: skip


DOWN = {f"{MLP}.down_proj": Partition("input", hybrid_segments(INTERMEDIATE, 0.25))}
SHAPE = {f"{MLP}.down_proj": (HIDDEN, INTERMEDIATE)}


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("leading", [(5,), (2, 3), (0,)])
def test_apply_on_the_cpu(monkeypatch, dtype, leading):
    """Expanded at load: the dense product, exactly, for 2-D and 3-D inputs, with a bias."""
    planes = modules(DOWN, SHAPE, dtype)[f"{MLP}.down_proj"]
    weight = decode(planes, DOWN[f"{MLP}.down_proj"])
    with ranks(monkeypatch, 0, 1):
        layer = make_down(describe(DOWN, dtype), bias=True)
        load(layer, planes)
        bias = torch.randn(HIDDEN)
        layer.bias.data.copy_(bias)
        layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(*leading, INTERMEDIATE)
        y = layer(x)[0]
    assert torch.allclose(y, torch.nn.functional.linear(x, weight, bias), atol=1e-5)


@pytest.mark.parametrize(
    ("plane", "match"),
    [
        ("weight_values", "down_proj.weight_values: not a finite number"),
        ("weight_dense", "down_proj.weight_dense: not a finite number"),
        ("weight_meta", "down_proj.weight_meta: byte 0x00"),
        ("weight_scale", "down_proj.weight_scale: not a finite number"),
    ],
)
def test_a_plane_that_was_not_loaded(monkeypatch, plane, match):
    planes = modules(DOWN, SHAPE)[f"{MLP}.down_proj"]
    with ranks(monkeypatch, 0, 1):
        layer = make_down(describe(DOWN))
        load(layer, {name: tensor for name, tensor in planes.items() if name != plane})
        with pytest.raises(ValueError, match=match):
            layer.quant_method.process_weights_after_loading(layer)


def test_a_plane_of_which_only_one_shard_was_loaded(monkeypatch):
    segments = hybrid_segments(INTERMEDIATE, 0.25)
    partitions = {f"{MLP}.{n}_proj": Partition("output", segments) for n in ("gate", "up")}
    planes = modules(partitions, dict.fromkeys(partitions, (INTERMEDIATE, HIDDEN)))
    with ranks(monkeypatch, 0, 1):
        layer = vllm_linear.MergedColumnParallelLinear(
            HIDDEN, [INTERMEDIATE] * 2, bias=False, quant_config=describe(partitions),
            prefix=f"{MLP}.gate_up_proj", params_dtype=torch.float32,
        )  # fmt: skip
        load(layer, planes[f"{MLP}.gate_proj"], 0)
        with pytest.raises(ValueError, match=r"up_proj\.weight_values: not a finite number"):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("plane", "change", "match"),
    [
        ("weight_values", lambda t: t[:, :-1], r"needed: \[64, 96\] torch.float8_e4m3fn"),
        ("weight_values", lambda t: t.repeat(2, 1), r"holds \[128, 96\]"),
        ("weight_values", lambda t: t.float(), "torch.float32; needed"),
        ("weight_meta", lambda t: t.int(), "torch.int32; needed: .* torch.uint8"),
        ("weight_scale", lambda t: t.squeeze(), r"holds \[64\]"),
    ],
)
def test_planes_of_the_wrong_shape_or_dtype(monkeypatch, plane, change, match):
    planes = modules(DOWN, SHAPE)[f"{MLP}.down_proj"]
    with ranks(monkeypatch, 0, 1):
        layer = make_down(describe(DOWN))
        with pytest.raises(ValueError, match=match):
            load(layer, {plane: change(planes[plane])})


def test_tensor_parallel_size_that_does_not_divide(monkeypatch):
    partitions = {f"{MLP}.down_proj": Partition("input", hybrid_segments(48, 0.5))}
    with (
        ranks(monkeypatch, 0, 2),
        pytest.raises(ValueError, match=r"24 channels .* 2 ranks .*: 1, 3$"),
    ):
        vllm_linear.RowParallelLinear(
            48, HIDDEN, bias=False, quant_config=describe(partitions), prefix=f"{MLP}.down_proj"
        )


def test_bias_on_an_output_split_module(monkeypatch):
    partitions = {f"{MLP}.up_proj": Partition("output", hybrid_segments(INTERMEDIATE, 0.25))}

    def make():
        return vllm_linear.ColumnParallelLinear(
            HIDDEN, INTERMEDIATE, bias=True, quant_config=describe(partitions),
            prefix=f"{MLP}.up_proj",
        )  # fmt: skip

    with ranks(monkeypatch, 0, 1):
        make()
    with ranks(monkeypatch, 0, 2), pytest.raises(ValueError, match="up_proj: a bias on an output"):
        make()


def test_dummy_weights_are_valid(monkeypatch):
    with ranks(monkeypatch, 0, 1, load_config=LoadConfig(load_format="dummy")):
        layer = make_down(describe(DOWN), params_dtype=torch.bfloat16)
        layer.quant_method.process_weights_after_loading(layer)
        y = layer(torch.randn(4, INTERMEDIATE).bfloat16())[0].float()
    assert torch.isfinite(y).all()
    assert 0.1 < y.std() < 1.0  # √(K · kept) · 0.02 = 0.25


def test_ignored_layers_are_vllms_own(monkeypatch):
    with ranks(monkeypatch, 0, 1):
        method = describe(DOWN).get_quant_method(
            vllm_linear.ReplicatedLinear(8, 8, bias=False), "lm_head"
        )
    assert type(method).__name__ == "UnquantizedLinearMethod"


def test_layers_that_the_checkpoint_does_not_describe(monkeypatch):
    with (
        ranks(monkeypatch, 0, 1),
        pytest.raises(ValueError, match=r"gate_proj is in no group and not in 'ignore'"),
    ):
        vllm_linear.MergedColumnParallelLinear(
            HIDDEN, [INTERMEDIATE] * 2, bias=False, quant_config=describe(DOWN),
            prefix=f"{MLP}.gate_up_proj",
        )  # fmt: skip


def test_a_fused_layer_that_is_partly_ignored(monkeypatch):
    partitions = {f"{MLP}.gate_proj": Partition("output", hybrid_segments(INTERMEDIATE, 0.25))}
    config = describe(partitions)
    config._quantization.ignore.append(f"{MLP}.up_proj")
    with (
        ranks(monkeypatch, 0, 1),
        pytest.raises(ValueError, match="up_proj'] are ignored but the rest"),
    ):
        vllm_linear.MergedColumnParallelLinear(
            HIDDEN, [INTERMEDIATE] * 2, bias=False, quant_config=config,
            prefix=f"{MLP}.gate_up_proj",
        )  # fmt: skip
