"""Walking block by block is the model's own forward pass; unsupported models are refused."""

import pytest
import torch
from pruning_helpers import SIZES, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_spense.pruning.architecture import UnsupportedModelError, find_decoder
from vllm_spense.pruning.plan import make_plan, output_bytes
from vllm_spense.pruning.settings import PruneSettings
from vllm_spense.pruning.walk import capture_inputs, on_inputs, run_block

TOKENS = torch.randint(0, 320, (5, 12), generator=torch.Generator().manual_seed(0))
WINDOWED = dict(
    use_sliding_window=True,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    max_window_layers=1,
)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("llama", {}),
        ("llama", {"attn_implementation": "eager"}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {}),
        ("qwen2", WINDOWED),
        ("qwen3", WINDOWED),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_the_walk_is_the_forward_pass(kind, changes):
    model = tiny_model(kind, **changes)
    decoder = find_decoder(model)
    layers = list(decoder.layers)
    inputs = capture_inputs(decoder, TOKENS, 2)
    assert list(decoder.layers) == layers
    assert [len(batch) for batch in inputs.hidden] == [2, 2, 1]
    hidden = inputs.hidden
    for layer, kwargs in zip(layers, inputs.kwargs, strict=True):
        hidden = list(run_block(layer, hidden, kwargs, "cpu"))
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
        logits = model.lm_head(decoder.body.norm(torch.cat(hidden)))
    torch.testing.assert_close(logits, expected)


def test_what_a_hook_returns_does_not_become_the_input():
    linear = nn.Linear(3, 2)
    x = torch.ones(1, 3)
    with on_inputs([(linear, lambda x: x * 100)]):
        hooked = linear(x)
    assert torch.equal(hooked, linear(x))
    assert not linear._forward_pre_hooks


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_supported_models(kind):
    decoder = find_decoder(tiny_model(kind))
    assert decoder.layer_name(1) == "model.layers.1"
    assert decoder.intermediate_size == 128


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("gpt2", {"n_embd": 64, "n_layer": 1, "n_head": 4}, "GPT2LMHeadModel .* no list of decod"),
        (
            "phi3",
            {},
            r"Phi3ForCausalLM .*: model\.layers\.0 has no self_attn\.q_proj of nn\.Linear",
        ),
        ("phi", {}, r"PhiForCausalLM .*: model\.layers\.0 has no self_attn\.o_proj"),
        (
            "qwen3_moe",
            {"num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
            r"Qwen3MoeForCausalLM .*: model\.layers\.0 has no mlp\.gate_proj of nn\.Linear",
        ),
    ],
)
def test_other_models_are_refused_with_what_is_missing(kind, changes, message):
    sizes = {} if kind == "gpt2" else SIZES
    config = AutoConfig.for_model(kind, **(sizes | changes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=message):
        find_decoder(model)


def test_weights_inside_the_mlp_that_would_not_be_permuted_are_refused():
    model = tiny_model()
    model.model.layers[1].mlp.inner_norm = nn.LayerNorm(128)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1 has further weights.*inner_norm"):
        find_decoder(model)


def test_sizes_that_are_no_multiple_of_eight_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"mlp\.down_proj has 130 columns"):
        find_decoder(tiny_model(intermediate_size=130))


def test_a_rounded_share_is_told():
    decoder = find_decoder(tiny_model(intermediate_size=1000))
    plan = make_plan(decoder, PruneSettings(dense_share=0.3333))
    assert plan.mlp_dense % 8 == 0
    assert plan.warnings[0].startswith(f"dense share 0.3333 became {plan.dense_share:.6g}: ")
    assert not make_plan(decoder, PruneSettings(dense_share=0.0)).warnings


@pytest.mark.parametrize("attention", ["dense", "2:4", "keep"])
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_attention_modes(attention, dtype):
    decoder = find_decoder(tiny_model())
    plan = make_plan(decoder, PruneSettings(attention=attention, dtype=dtype))
    planned = attention == "2:4" or (attention == "dense" and dtype == "fp8")
    assert ("self_attn.k_proj" in plan.partitions) == planned
    assert (r"re:.*\.self_attn\..*" in plan.ignored(decoder)) != planned


def test_bytes_count_tied_tensors_once():
    sizes = {}
    for tied in (False, True):
        model = tiny_model(tie_word_embeddings=tied, dtype=torch.bfloat16)
        decoder = find_decoder(model)
        settings = PruneSettings(dense_share=0.0)
        sizes[tied] = output_bytes(
            model, decoder, make_plan(decoder, settings), settings.weight_dtype
        )
    assert sizes[False] - sizes[True] == 320 * 64 * 2
