"""Write a random-weight model of real shapes as a spense checkpoint: speeds without a download.

    python scripts/make_model.py qwen3-32b /tmp/qwen --layers 4 --dense-share 0.25
    python scripts/make_model.py qwen3-32b /tmp/qwen --layers 4 --tile 128x128 --sparsity 0.5
    python scripts/make_model.py path/to/model /tmp/out --attention 2:4 --dtype bf16 --device cuda

It has no tokenizer: serve it with --skip-tokenizer-init and token ids, or copy a tokenizer into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_spense.pruning.random_model import SHAPES, load_shape, write_random_model
from vllm_spense.pruning.settings import PruneSettings


def main(
    config: Annotated[str, typer.Argument(help=f"Model folder, or one of {', '.join(SHAPES)}.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    layers: Annotated[int | None, typer.Option(help="Decoder layers; default: all.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens; default: the model's.")] = None,
    dense_share: Annotated[float, typer.Option(help="Dense part of every MLP, 0 … 1.")] = 0.25,
    tile: Annotated[str | None, typer.Option(help="Zero tiles instead, such as 64x128.")] = None,
    sparsity: Annotated[float, typer.Option(help="Share of zero tiles.")] = 0.5,
    attention: Annotated[str, typer.Option(help="dense, 2:4 or keep.")] = "dense",
    dtype: Annotated[str, typer.Option(help="fp8, bf16 or fp16.")] = "fp8",
    device: Annotated[str, typer.Option(help="Where tensors are made: cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
) -> None:
    """Write a random-weight model of real shapes as a spense checkpoint."""
    console = Console()
    cut = {"method": "magnitude", "dense_share": dense_share}
    if tile:
        cut = {"method": "blocks", "dense_share": 0.0, "tile": tile, "sparsity": sparsity}
    settings = PruneSettings(**cut, attention=attention, dtype=dtype, device=device)
    with console.status("") as status:
        written = write_random_model(
            load_shape(config, layers, vocabulary),
            out,
            settings,
            seed,
            lambda name: status.update(name),
        )
    console.print(f"wrote {written}")


if __name__ == "__main__":
    typer.run(main)
