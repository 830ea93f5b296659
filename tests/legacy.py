"""The miniature legacy checkpoints, and what they hold, read without any of our code.

`expanded` is written from the format's definition with numpy; `digests` are those that
compressed-tensors 0.12 left of its own expansion (`fixtures/make_legacy.py`).
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent / "fixtures" / "legacy"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
DIGESTS = json.loads((FOLDER / "expected.json").read_text())


def config(name):
    return json.loads((FOLDER / name / "config.json").read_text())


def tensors(name):
    return load_file(FOLDER / name / "model.safetensors")


def digest(weight):
    return hashlib.sha256((weight.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def expanded(stored):
    """All tensors of a checkpoint as an ordinary dense model has them, float32."""
    dense = {}
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        scale = stored.get(f"{module}.weight_scale", torch.ones(1)).float()
        if kind == "compressed":
            rows, cols = stored[f"{module}.shape"].flatten().tolist()
            bits = stored[f"{module}.bitmask"].numpy()
            mask = np.unpackbits(bits, axis=1, count=cols, bitorder="little").astype(bool)
            weight = np.zeros((rows, cols), np.float32)
            weight[mask] = tensor.float().numpy().ravel()
            dense[f"{module}.weight"] = torch.from_numpy(weight) * scale
        elif kind == "weight":
            dense[name] = tensor.float() * scale if tensor.dim() == 2 else tensor.float()
    return dense


def dense_model(name, out):
    """The checkpoint as an ordinary folder in float32."""
    out.mkdir(parents=True)
    save_file(expanded(tensors(name)), out / "model.safetensors", metadata={"format": "pt"})
    plain = {k: v for k, v in config(name).items() if k != "quantization_config"}
    (out / "config.json").write_text(json.dumps(plain | {"dtype": "float32"}))
    return out


def copy(name, out):
    """A checkpoint of a test's own, to be broken."""
    return Path(shutil.copytree(FOLDER / name, out))
