"""Measure every way to run a model's layers on this GPU and write the table that chooses by it.

    python scripts/tune.py path/to/spense-checkpoint
    python scripts/tune.py qwen3-32b --dense-share 0 --dense-share 0.25 --dense-share 0.5
    python scripts/tune.py MODEL --tp 2 --dtype bf16 --out my_table.json

Results go to this machine's cache (they are used from the next start on); `--out` names another
file, `--shipped` the table of this device inside the package. Rows that are there already and are
not measured again are kept.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from vllm_spense.format.planes import WEIGHT_DTYPES
from vllm_spense.format.schema import SpenseQuantization
from vllm_spense.kernels import table_files
from vllm_spense.kernels.machine import this_machine
from vllm_spense.kernels.tuning import GRID, ODD, Tuner
from vllm_spense.layer_layouts import checkpoint_layouts, share_layouts
from vllm_spense.pruning.random_model import load_shape

DTYPES = {"fp8": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16"}


def main(
    model: Annotated[str, typer.Argument(help="Model folder, or a name such as qwen3-32b.")],
    dense_share: Annotated[
        list[float] | None, typer.Option(help="Of a model that is not pruned yet; repeatable.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="fp8, bf16 or fp16, if the model is not pruned.")
    ] = "fp8",
    out_dtype: Annotated[
        str, typer.Option(help="bf16 or fp16: what the model computes in.")
    ] = "bf16",
    tp: Annotated[int, typer.Option(help="Tensor parallel size.")] = 1,
    seconds: Annotated[float, typer.Option(help="Start nothing after so long.")] = float("inf"),
    out: Annotated[Path | None, typer.Option(help="File to write or extend.")] = None,
    shipped: Annotated[bool, typer.Option(help="Write the package's own table.")] = False,
    vllm_version: Annotated[
        str | None, typer.Option(help="Of the extension given by --load; default: the installed.")
    ] = None,
    libraries: Annotated[
        list[Path] | None, typer.Option("--load", help="Extension with _C::cutlass_scaled_mm.")
    ] = None,
) -> None:
    """Measure every way to run a model's layers and write the table that chooses by it."""
    console = Console(soft_wrap=True)
    for library in libraries or ():
        torch.ops.load_library(library)
    device = torch.cuda.get_device_name()
    path = out or (table_files.shipped_path if shipped else table_files.cache_path)(device)
    tuner = Tuner(
        torch.float16 if out_dtype == "fp16" else torch.bfloat16,
        lambda line: console.print(line, highlight=False, markup=False),
        time.monotonic() + seconds,
    )
    config = load_shape(model)
    stored = getattr(config, "quantization_config", None)
    if stored and stored.get("quant_method") == "spense":
        found = list(checkpoint_layouts(config, SpenseQuantization.parse(stored), tp))
    else:
        weight_dtype = WEIGHT_DTYPES[DTYPES[dtype]]
        found = [
            item
            for share in dense_share or [0.0, 0.25, 0.5]
            for item in share_layouts(config, share, weight_dtype, tp).items()
        ]
    found.sort(key=lambda item: item[0] in ("qkv", "o"))  # most weights first, if time runs out
    for name, layout in found:
        console.rule(f"{name} {layout.n}x{layout.k}")
        tuner.layer(layout, (*GRID, *ODD))
    table = table_files.read(path)[1] if path.exists() else table_files.Table()
    table.add(*tuner.table.rows())
    shares = [f"--dense-share {share:g}" for share in dense_share or ()]
    command = " ".join(["python scripts/tune.py", model, *shares, f"--dtype {dtype}", f"--tp {tp}"])
    table_files.write(path, this_machine(command, vllm_version), table)
    console.print(f"wrote {path}" + (" (not everything: out of time)" if tuner.late else ""))


if __name__ == "__main__":
    typer.run(main)
