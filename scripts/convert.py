"""Convert checkpoints between formats.

    python scripts/convert.py LEGACY OUT
    python scripts/convert.py CHECKPOINT TWIN --dense-fp8

The first reads a 2:4 checkpoint of compressed-tensors (`sparse-24-bitmask`, or `dense` with the
zeros inside; FP8, BF16 or FP16) and writes a spense checkpoint with the same numbers. The second
writes the dense twin of a spense checkpoint, which stock vLLM serves: FP8 as compressed-tensors'
float-quantized, BF16 and FP16 as an ordinary model folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_spense.format.checkpoint import Checkpoint
from vllm_spense.format.export import export_dense
from vllm_spense.format.legacy_checkpoint import Conversion, LegacyCheckpoint, convert_legacy
from vllm_spense.format.schema import METHOD


def write_twin(checkpoint: Path, out: Path) -> None:
    """Expand a spense checkpoint."""
    total = len(Checkpoint.open(checkpoint).modules)
    with Progress() as progress:
        task = progress.add_task("expanding", total=total)
        written = export_dense(checkpoint, out, lambda module: progress.advance(task))
    print(f"wrote {written}")


def convert(checkpoint: Path, out: Path) -> None:
    """Turn a legacy checkpoint into a spense one and report what was in it."""
    total = len(LegacyCheckpoint.open(checkpoint).modules)
    with Progress() as progress:
        task = progress.add_task("converting", total=total)
        done = convert_legacy(checkpoint, out, lambda module: progress.advance(task))
    console = Console()
    console.print(summary(done))
    for warning in done.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True)
    console.print(f"wrote {done.out}", soft_wrap=True, highlight=False)


def summary(done: Conversion) -> Table:
    """How many modules became what."""
    table = Table("stored as", "modules")
    table.add_row("2:4", str(len(done.sparse)))
    table.add_row("dense regions", str(len(done.dense)))
    table.add_row("as they were", str(len(done.kept)))
    return table


def main(
    checkpoint: Annotated[Path, typer.Argument(help="A legacy 2:4 or a spense checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    dense_fp8: Annotated[
        bool, typer.Option("--dense-fp8", help="Write the dense twin of a spense checkpoint.")
    ] = False,
) -> None:
    """Convert a legacy 2:4 checkpoint to spense, or a spense checkpoint into its dense twin."""
    try:
        if dense_fp8:
            write_twin(checkpoint, out)
        elif is_spense(checkpoint):
            raise typer.BadParameter("nothing to do; add --dense-fp8 to write the dense twin")
        else:
            convert(checkpoint, out)
    except ValueError as error:
        raise SystemExit(f"convert: {error}") from None


def is_spense(folder: Path) -> bool:
    """Whether a folder is in our format already (valid or not)."""
    try:
        return Checkpoint.open(folder).quantization.quant_method == METHOD
    except ValueError:
        return False


if __name__ == "__main__":
    typer.run(main)
