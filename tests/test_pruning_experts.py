"""Pruning mixtures of experts: unpacked without a change, each expert by its own tokens."""

import json

import pytest
import torch
from pruning_helpers import save_tiny, tiny_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from vllm_spense.format.checkpoint import INTERMEDIATE_ORDER, Checkpoint
from vllm_spense.format.planes import decode
from vllm_spense.pruning import experts as unpacked
from vllm_spense.pruning.architecture import UnsupportedModelError, find_decoder
from vllm_spense.pruning.calibration import TextSource, text_tokens
from vllm_spense.pruning.hessian import inverse_factor
from vllm_spense.pruning.loading import load_model, load_pruned
from vllm_spense.pruning.pipeline import prune, prune_blocks
from vllm_spense.pruning.plan import make_plan
from vllm_spense.pruning.random_model import load_shape, write_random_model
from vllm_spense.pruning.settings import PruneSettings
from vllm_spense.pruning.source import load_source
from vllm_spense.pruning.sparsegpt import prune_24

KINDS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 64, "num_experts_per_tok": 2},
}
PREFIX = {"qwen3_moe": "mlp.experts", "mixtral": "block_sparse_moe.experts"}
NAMES = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
IDS = torch.arange(60).view(2, 30) * 5 % 320


def moe(kind, **changes):
    return tiny_model(kind, **(KINDS[kind] | changes))


def settings(**changes):
    return PruneSettings(
        **({"samples": 8, "length": 64, "dense_share": 0.25, "dtype": "fp8"} | changes)
    )


@pytest.fixture
def text(tmp_path):
    from pruning_helpers import TEXT

    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_unpacking_changes_names_and_nothing_else(kind):
    packed, model = moe(kind), moe(kind)
    before = [p.data_ptr() for p in model.parameters() if p.ndim == 3]
    unpacked.unpack_experts(model)
    assert torch.allclose(model(IDS).logits, packed(IDS).logits, atol=1e-5)
    first = model.model.layers[0].mlp.experts[0]
    assert first.gate_proj.weight.data_ptr() in before and not first.gate_proj.bias
    stored = {unpacked.stored_name(name, kind) for name in model.state_dict()}
    assert f"model.layers.1.{PREFIX[kind]}.3.{NAMES[kind][2]}.weight" in stored
    assert not any(p.ndim == 3 for p in model.parameters())


def test_stored_names_are_those_that_transformers_writes(tmp_path):
    for kind in KINDS:
        model = moe(kind)
        model.save_pretrained(tmp_path / kind)
        unpacked.unpack_experts(model)
        names = {unpacked.stored_name(name, kind) for name in model.state_dict()}
        assert names == set(load_file(tmp_path / kind / "model.safetensors"))


def test_models_of_which_only_some_layers_have_experts_are_refused():
    model = moe("qwen3_moe", mlp_only_layers=[1])
    unpacked.unpack_experts(model)
    with pytest.raises(UnsupportedModelError, match=r"only some layers have experts.*\[1, 4\]"):
        find_decoder(model)


def test_shared_experts_are_refused_by_name():
    model = moe("qwen3_moe")
    unpacked.unpack_experts(model)
    model.model.layers[1].mlp.shared_expert = nn.Linear(8, 8)
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.1 has further weights.*shared_expert"
    ):
        find_decoder(model)


class Router(nn.Module):
    """Sends a token to the experts of its two largest channels."""

    def forward(self, x):
        return x, *x.topk(2, -1)


def test_every_expert_sees_its_tokens():
    batches = [torch.randn(9, 3), torch.randn(4, 3)]
    routing = unpacked.route(Router(), batches, "cpu", needed=1)
    assert routing.total == 13 and not routing.nearest
    for expert in range(3):
        for batch, rows in zip(batches, routing.rows(expert), strict=True):
            expected = [i for i, x in enumerate(batch) if expert in x.topk(2).indices]
            assert rows.tolist() == expected
    assert routing.counts.sum() == 26


def test_an_expert_with_few_tokens_gets_the_nearest():
    """Expert 2 is chosen once; of the others, the two with its highest score are added."""
    batches = [
        torch.tensor([[3.0, 2.0, 1.9], [3.0, 2.0, -9.0]]),
        torch.tensor([[1.0, 3.0, 2.0], [3.0, 2.0, 1.5], [3.0, 2.0, -5.0]]),
    ]
    routing = unpacked.route(Router(), batches, "cpu", needed=3)
    assert routing.counts.tolist() == [4, 5, 1]
    assert [rows.tolist() for rows in routing.rows(2)] == [[0], [0, 1]]
    assert list(routing.nearest) == [2]
    unused = unpacked.route(Router(), [torch.tensor([[3.0, 2.0, 1.0]])], "cpu", needed=3)
    assert [rows.tolist() for rows in unused.rows(2)] == [[0]]  # all tokens there are


@torch.no_grad()
def test_an_expert_is_pruned_by_the_tokens_that_reach_it(text):
    """gate of one expert against SparseGPT on the tokens that transformers' router sends there."""
    packed, model = moe("qwen3_moe", num_hidden_layers=1), moe("qwen3_moe", num_hidden_layers=1)
    unpacked.unpack_experts(model)
    decoder = find_decoder(model)
    recipe = settings(method="sparsegpt", dense_share=0.0, attention="keep", dtype="bf16")
    from pruning_helpers import tiny_tokenizer

    tokens = text_tokens(TextSource(text), tiny_tokenizer(), 8, 64, 0)
    inputs = []
    layer = packed.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    packed(tokens)
    x = torch.cat(inputs)
    _, _, indices = layer.mlp.gate(x)
    list(prune_blocks(decoder, tokens, make_plan(decoder, recipe), recipe))
    for index in range(4):
        seen = x[(indices == index).any(1)].double()
        assert len(seen) >= 64
        hessian = (seen.T @ seen / len(seen)).float()
        upper = inverse_factor(hessian, recipe.dampening, "reference").upper
        expected = prune_24(layer.mlp.experts.gate_up_proj[index, :64], upper, 64)
        found = model.model.layers[0].mlp.experts[index].gate_proj.weight
        assert ((found != 0) == (expected != 0)).float().mean() > 0.999
        assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_folder_to_a_checkpoint(kind, tmp_path, text):
    """SpenseGPT+: every expert has its own order; the checkpoint decodes to the model walked."""
    dense = save_tiny(tmp_path / "dense", kind, **KINDS[kind])
    report = prune(str(dense), tmp_path / "out", settings(calibration=text))
    checkpoint = Checkpoint.open(tmp_path / "out")
    checkpoint.verify()
    expert = f"model.layers.1.{PREFIX[kind]}.2"
    assert checkpoint.modules[f"{expert}.{NAMES[kind][2]}"][0].dense_share == 0.25
    orders = load_file(tmp_path / "out" / INTERMEDIATE_ORDER)
    assert len(orders) == 2 * 4 and sorted(orders[expert].tolist()) == list(range(64))
    assert len({tuple(order.tolist()) for order in orders.values()}) == 8
    assert len(report.modules) == 2 * (4 + 4 * 3)
    model = load_pruned(checkpoint, torch.float32)
    original = AutoModelForCausalLM.from_pretrained(dense)
    packed = original.model.layers[1].mlp.experts
    order = orders[expert].long()
    down = decode(checkpoint.planes(f"{expert}.{NAMES[kind][2]}"),
                  checkpoint.modules[f"{expert}.{NAMES[kind][2]}"][0])  # fmt: skip
    kept = down[:, 48:] - packed.down_proj[2][:, order][:, 48:]
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj[2], down)
    assert kept.abs().max() < 0.3 * down.abs().max()  # the order is the one that was applied
    with torch.no_grad():
        pruned, full = model(IDS).logits.log_softmax(-1), original(IDS).logits.log_softmax(-1)
    assert (full.exp() * (full - pruned)).sum(-1).mean() < 0.5
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert r"re:.*\.gate$" in config["quantization_config"]["ignore"]


def test_resume_gives_the_same_bytes(tmp_path, text, monkeypatch):
    dense = save_tiny(tmp_path / "dense", "mixtral", **KINDS["mixtral"])
    recipe = settings(calibration=text)
    prune(str(dense), tmp_path / "whole", recipe)

    def stop(stage, done, total):
        if (stage, done) == ("prune", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(str(dense), tmp_path / "resumed", recipe, progress=stop)
    report = prune(str(dense), tmp_path / "resumed", recipe, resume=True)
    assert report.resumed_blocks == 1
    for name in ("model.safetensors", INTERMEDIATE_ORDER):
        whole, resumed = (load_file(tmp_path / run / name) for run in ("whole", "resumed"))
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[k].view(torch.uint8), resumed[k].view(torch.uint8))
                   for k in whole if whole[k].dim())  # fmt: skip


def test_starved_experts_are_named(tmp_path, text):
    dense = save_tiny(tmp_path / "dense", "qwen3_moe", **KINDS["qwen3_moe"])
    report = prune(str(dense), tmp_path / "out", settings(calibration=text, samples=1, length=32))
    lines = [line for line in report.warnings if "model.layers.1.mlp.experts: too few" in line]
    assert len(lines) == 1 and "of 32 calibration tokens" in lines[0]
    assert "each was pruned with the 32 nearest" in lines[0]
    Checkpoint.open(tmp_path / "out").verify()


def test_source_keeps_the_tokens_it_writes(tmp_path):
    """The model writes calibration text with its unpacked experts."""
    dense = save_tiny(tmp_path / "dense", "mixtral", **KINDS["mixtral"])
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    ours = load_source(str(dense), None, None).model.generate(prompt, max_new_tokens=8)
    theirs = load_model(dense)[0].generate(prompt, max_new_tokens=8)
    assert torch.equal(ours, theirs)


def test_random_model_of_real_shapes(tmp_path):
    config = load_shape("qwen3-30b-a3b", layers=1, vocabulary=64)
    config.hidden_size, config.moe_intermediate_size, config.num_experts = 64, 64, 4
    out = write_random_model(config, tmp_path / "out", settings(method="magnitude"))
    checkpoint = Checkpoint.open(out)
    checkpoint.verify()
    assert "model.layers.0.mlp.experts.3.down_proj" in checkpoint.modules
