"""Tiny random models with a tokenizer of their own, for the pruning tests."""

from __future__ import annotations

import functools
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEXT = "\n\n".join(topics[key] for key in sorted(topics)[:40])
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
)
SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=320,
    max_position_embeddings=256,
    head_dim=16,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
)


@functools.cache
def tiny_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 tokens, trained on a little English."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT[:20000]], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|start|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def tiny_model(kind: str = "llama", seed: int = 0, dtype=torch.float32, **changes):
    """A random model of a transformers model type; weights large enough to matter."""
    config = AutoConfig.for_model(kind, **(SIZES | {"initializer_range": 0.1} | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def save_tiny(folder: Path, kind: str = "llama", **changes) -> Path:
    """Model and tokenizer as a folder."""
    tiny_model(kind, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
