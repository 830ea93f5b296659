"""Legacy 2:4 checkpoints in vLLM: claimed, loaded, divided over ranks, refused; and a real engine.

The reference is the dense weight that `legacy.expanded` reads with numpy.
"""

import legacy
import pytest
import torch
from test_checkpoint import change_json, change_tensors

vllm_linear = pytest.importorskip("vllm.model_executor.layers.linear")

from test_engine import assert_same_tokens, refused, serve  # noqa: E402
from test_linear import PACKED, ranks  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from vllm.config import LoadConfig  # noqa: E402

import vllm_spense  # noqa: E402
from vllm_spense.config import SpenseConfig  # noqa: E402

BLOCK = "model.layers.0"
ATTENTION, MLP = f"{BLOCK}.self_attn", f"{BLOCK}.mlp"
HIDDEN, INTERMEDIATE, HEAD = 64, 96, 32


def on_the_cpu(test):
    """For vLLM's CPU engine, or its whole configuration."""
    skip = pytest.mark.skipif(torch.cuda.is_available(), reason="for vLLM's CPU engine")
    return pytest.mark.engine(skip(test))


def described(name, **changes):
    config = SpenseConfig.from_config(legacy.config(name)["quantization_config"] | changes)
    config.packed_modules_mapping = PACKED
    return config


def make(kind, config, **changes):
    """A layer of the fixtures' model, in float32 as vLLM makes it."""
    arguments = {"bias": False, "quant_config": config, "params_dtype": torch.float32} | changes
    if kind == "gate_up":
        return vllm_linear.MergedColumnParallelLinear(
            HIDDEN, [INTERMEDIATE] * 2, prefix=f"{MLP}.gate_up_proj", **arguments
        )
    if kind == "qkv":
        return vllm_linear.QKVParallelLinear(
            HIDDEN, HEAD, 2, 1, prefix=f"{ATTENTION}.qkv_proj", **arguments
        )
    if kind == "up":
        return vllm_linear.ReplicatedLinear(
            HIDDEN, INTERMEDIATE, prefix=f"{MLP}.up_proj", **arguments
        )
    return vllm_linear.RowParallelLinear(
        INTERMEDIATE, HIDDEN, prefix=f"{MLP}.down_proj", reduce_results=False, **arguments
    )


SHARDS = {
    "gate_up": {f"{MLP}.gate_proj": (0,), f"{MLP}.up_proj": (1,)},
    "qkv": {f"{ATTENTION}.{shard}_proj": (shard,) for shard in "qkv"},
    "down": {f"{MLP}.down_proj": ()},
    "up": {f"{MLP}.up_proj": ()},
}


def load(layer, kind, stored, leave_out=()):
    """Give every tensor of the layer's modules to vLLM's loader, as its models do."""
    for module, shard in SHARDS[kind].items():
        for name, tensor in stored.items():
            if name.startswith(f"{module}.") and name not in leave_out:
                parameter = getattr(layer, name.rpartition(".")[2])
                parameter.weight_loader(parameter, tensor, *shard)


def weight_of(layer):
    """The weight that a layer multiplies with: its product with the unit matrix."""
    columns = layer.quant_method._fused.cols
    return layer(torch.eye(columns, dtype=layer.params_dtype))[0].t()


def loaded(kind, name, **changes):
    layer = make(kind, described(name), **changes)
    load(layer, kind, legacy.tensors(name))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("name", legacy.NAMES)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_every_rank_gets_its_part(monkeypatch, name, rank, size):
    """On the CPU the weight is expanded at load: it must be that part of the dense one, exactly."""
    dense = legacy.expanded(legacy.tensors(name))
    with ranks(monkeypatch, rank, size):
        for kind in ("gate_up", "down", *(["qkv"] if size < 3 else [])):
            weights = [dense[f"{module}.weight"] for module in SHARDS[kind]]
            if kind == "down":
                parts = [weights[0].chunk(size, 1)[rank]]
            else:
                replicated = ("k_proj", "v_proj") if kind == "qkv" else ()
                parts = [
                    weight if module.endswith(replicated or ("-",)) else weight.chunk(size)[rank]
                    for module, weight in zip(SHARDS[kind], weights, strict=True)
                ]
            assert torch.equal(weight_of(loaded(kind, name)), torch.cat(parts)), kind


@pytest.mark.parametrize("name", ["fp8-static-bitmask", "fp16-dense"])
def test_layers_that_are_not_divided(monkeypatch, name):
    with ranks(monkeypatch, 1, 2):
        weight = weight_of(loaded("up", name))
    assert torch.equal(weight, legacy.expanded(legacy.tensors(name))[f"{MLP}.up_proj.weight"])


def test_regions_that_the_kernels_get(monkeypatch):
    """q and v 2:4, k dense: three regions, before the CPU expands them."""
    with ranks(monkeypatch, 0, 1):
        layer = loaded("qkv", "bf16-partial-bitmask")
        regions = layer.quant_method._fused.layout().regions
        assert [(r.kind.value, r.rows) for r in regions] == [
            ("sparse_24", 64), ("dense", 32), ("sparse_24", 32)
        ]  # fmt: skip
        method = loaded("gate_up", "fp8-dense").quant_method
    assert [p.single.value for p in method._fused.partitions] == ["sparse_24", "dense"]
    assert method._fused.weight_dtype == torch.float8_e4m3fn


def test_apply(monkeypatch):
    x = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    with ranks(monkeypatch, 0, 1):
        y = loaded("gate_up", "fp8-bitmask")(x)[0]
    dense = legacy.expanded(legacy.tensors("fp8-bitmask"))
    weight = torch.cat([dense[f"{module}.weight"] for module in SHARDS["gate_up"]])
    assert torch.allclose(y, x @ weight.t(), atol=1e-5)


def test_bfloat16_weights_served_in_float16_are_cast(monkeypatch):
    """As vLLM casts dense weights when `--dtype` says so."""
    with ranks(monkeypatch, 0, 1):
        weight = weight_of(loaded("down", "bf16-partial-bitmask", params_dtype=torch.float16))
    dense = legacy.expanded(legacy.tensors("bf16-partial-bitmask"))[f"{MLP}.down_proj.weight"]
    assert torch.equal(weight, dense.half())


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("fp8-bitmask", "bitmask", r"up_proj\.bitmask: byte 0x00 at row 0"),
        ("fp8-bitmask", "compressed", r"up_proj\.weight_values: not a finite number"),
        ("fp8-bitmask", "weight_scale", r"up_proj\.weight_scale: not a finite number"),
        ("fp8-dense", "weight", r"up_proj\.weight: not a finite number"),
    ],
)
def test_a_tensor_that_was_not_loaded(monkeypatch, name, tensor, match):
    with ranks(monkeypatch, 0, 1):
        layer = make("gate_up", described(name))
        load(layer, "gate_up", legacy.tensors(name), leave_out=[f"{MLP}.up_proj.{tensor}"])
        with pytest.raises(ValueError, match=match):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "match"),
    [
        ("fp8-bitmask", "bitmask", lambda t: t[:, 1:], r"\[64, 11\] torch.uint8; needed: \[64, 12"),
        ("fp8-bitmask", "compressed", lambda t: t.float(), "float32; needed: .* torch.float8"),
        ("fp8-bitmask", "weight_scale", lambda t: t[:1], r"holds \[1, 1\]"),
        ("fp16-dense", "weight", lambda t: t.to(torch.float8_e4m3fn), "float8_e4m3fn; needed"),
        ("fp8-static-bitmask", "weight_scale", lambda t: t.repeat(2), r"holds \[2\]"),
    ],
)
def test_tensors_of_the_wrong_shape_or_dtype(monkeypatch, name, tensor, change, match):
    stored = legacy.tensors(name)
    stored[f"{MLP}.down_proj.{tensor}"] = change(stored[f"{MLP}.down_proj.{tensor}"])
    with ranks(monkeypatch, 0, 1):
        layer = make("down", described(name))
        with pytest.raises(ValueError, match=match):
            load(layer, "down", stored)


def test_a_bitmask_that_does_not_divide(monkeypatch):
    with ranks(monkeypatch, 0, 8), pytest.raises(ValueError, match=r"96 columns .* 1, 2, 3, 4, 6,"):
        make("down", described("fp8-bitmask"))


def test_fused_layers_that_are_stored_in_two_ways(monkeypatch):
    config = described("fp8-bitmask", ignore=[f"{MLP}.up_proj"])
    with ranks(monkeypatch, 0, 1), pytest.raises(ValueError, match="up_proj'] are not quantised"):
        make("gate_up", config)


def test_layers_that_are_not_described_are_vllms_own(monkeypatch):
    ignored = [f"{MLP}.gate_proj", f"{MLP}.up_proj"]
    sparsity = legacy.config("fp16-dense")["quantization_config"]["sparsity_config"]
    config = described("fp16-dense", sparsity_config=sparsity | {"ignore": ignored})
    with ranks(monkeypatch, 0, 1):
        layer = make("gate_up", config)
    assert type(layer.quant_method).__name__ == "UnquantizedLinearMethod"


@pytest.mark.parametrize(("name", "expected"), [("fp8-dense", "dense"), ("fp16-dense", None)])
def test_announced_targets_that_are_not_2_of_4(monkeypatch, name, expected):
    """Harmless, but vLLM refuses it: FP8 is served as dense regions, the rest as it is."""
    sparsity = {"format": "dense", "sparsity_structure": "unstructured", "targets": ["Linear"]}
    with ranks(monkeypatch, 0, 1):
        layer = make("gate_up", described(name, sparsity_config=sparsity))
        if expected is None:
            assert type(layer.quant_method).__name__ == "UnquantizedLinearMethod"
            return
        load(layer, "gate_up", legacy.tensors(name))
        layer.quant_method.process_weights_after_loading(layer)
    assert {p.single.value for p in layer.quant_method._fused.partitions} == {expected}


def test_a_reload_that_would_change_the_regions(monkeypatch):
    stored = legacy.tensors("fp8-dense")
    with ranks(monkeypatch, 0, 1):
        layer = make("gate_up", described("fp8-dense"))
        method, parameters = layer.quant_method, dict(layer._parameters)
        load(layer, "gate_up", stored)
        method.process_weights_after_loading(layer)
        first = weight_of(layer)
        for pruned in (False, True):
            layer._parameters.clear()
            layer._parameters.update(parameters)
            if pruned:
                stored[f"{MLP}.up_proj.weight"] = stored[f"{MLP}.gate_proj.weight"]
            load(layer, "gate_up", stored)
            if pruned:
                with pytest.raises(ValueError, match="which a running engine cannot change to"):
                    method.process_weights_after_loading(layer)
            else:
                method.process_weights_after_loading(layer)
                assert torch.equal(weight_of(layer), first)


@pytest.mark.parametrize("name", ["fp8-bitmask", "fp16-dense"])
def test_dummy_weights_are_valid(monkeypatch, name):
    with ranks(monkeypatch, 0, 1, load_config=LoadConfig(load_format="dummy")):
        layer = make("gate_up", described(name), params_dtype=torch.bfloat16)
        layer.quant_method.process_weights_after_loading(layer)
        weight = weight_of(layer)
    assert torch.isfinite(weight).all()
    assert (weight.reshape(-1, 4) != 0).sum(1).max() == 2


def test_names_follow_vllms_mapper():
    from vllm.model_executor.models.utils import WeightsMapper

    config = described("bf16-partial-bitmask")
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language.model."}))
    stored_as = config._legacy.stored_as
    assert not stored_as(f"language.{MLP}.up_proj").sparse
    assert stored_as(f"language.{MLP}.gate_proj").bitmask


class TestClaims:
    @staticmethod
    def method(folder, quantization=None):
        from vllm.config import ModelConfig

        vllm_spense.register()
        return ModelConfig(
            model=str(folder), quantization=quantization, skip_tokenizer_init=True
        ).quantization

    @pytest.mark.parametrize("flag", [None, "spense", "compressed-tensors"])
    def test_legacy_checkpoints_are_ours(self, flag):
        assert self.method(legacy.FOLDER / "fp8-bitmask", flag) == "spense"

    def test_another_flag_is_refused(self):
        with pytest.raises(ValueError, match="does not match"):
            self.method(legacy.FOLDER / "fp8-bitmask", "fp8")

    @pytest.mark.parametrize("sparsity", [None, {}, {"format": "dense"}])
    def test_dense_checkpoints_stay_vllms(self, tmp_path, sparsity):
        folder = legacy.copy("fp8-dense", tmp_path / "copy")
        change_json(
            folder / "config.json",
            lambda c: c["quantization_config"].update(sparsity_config=sparsity),
        )
        assert self.method(folder) == "compressed-tensors"
        with pytest.raises(ValueError, match="does not match"):
            self.method(folder, "spense")

    @on_the_cpu
    def test_marlin_is_refused_with_the_reason(self, tmp_path):
        folder = legacy.copy("fp16-dense", tmp_path / "copy")
        change_json(
            folder / "config.json",
            lambda c: c.update(quantization_config={"quant_method": "gptq_marlin_24", "bits": 4}),
        )
        assert "Marlin's 2:4 layout" in refused(folder)


@on_the_cpu
def test_broken_folders_are_refused_before_loading(tmp_path):
    folder = legacy.copy("fp8-bitmask", tmp_path / "copy")
    change_tensors(folder, lambda t: t.pop(f"{MLP}.up_proj.bitmask"))
    assert "up_proj.bitmask is missing" in refused(folder)


KINDS = {
    "fp8-bitmask": {},
    "bf16-partial-bitmask": {"quantization": "compressed-tensors", "tensor_parallel_size": 2},
    "fp8-static-bitmask": {"quantization": "spense"},
    "fp8-dense": {},
    "fp16-dense": {"quantization": "spense"},
}


@on_the_cpu
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if i > 1 else []) for i, n in enumerate(KINDS)],
)
def test_float32_tokens_equal_the_dense_models(tmp_path, name):
    """A real engine against transformers running what `legacy.expanded` read."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 96, (6, 10), generator=generator).tolist()
    engine = {"model": str(legacy.FOLDER / name), "dtype": "float32", "max_model_len": 128}
    bind = "0|1" if "tensor_parallel_size" in KINDS[name] else None
    answers = serve(tmp_path, prompts, 24, bind=bind, **engine, **KINDS[name])
    assert len({token for answer in answers for token in answer}) > 10
    dense = legacy.dense_model(name, tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    assert_same_tokens(model, prompts, answers)
