"""Convert a spense checkpoint into its dense twin, which stock vLLM serves.

    python scripts/convert.py CHECKPOINT TWIN --dense-fp8

The twin holds the same numbers, stored densely: FP8 as compressed-tensors' float-quantized, BF16
and FP16 as an ordinary model folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from vllm_spense.format.checkpoint import Checkpoint
from vllm_spense.format.export import export_dense


def main(
    checkpoint: Annotated[Path, typer.Argument(help="A spense checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    dense_fp8: Annotated[bool, typer.Option("--dense-fp8", help="Write the dense twin.")] = False,
) -> None:
    """Convert a spense checkpoint into its dense twin, which stock vLLM serves."""
    if not dense_fp8:
        raise typer.BadParameter("nothing to do; add --dense-fp8 to write the dense twin")
    try:
        total = len(Checkpoint.open(checkpoint).modules)
        with Progress() as progress:
            task = progress.add_task("expanding", total=total)
            written = export_dense(checkpoint, out, lambda module: progress.advance(task))
    except ValueError as error:
        raise SystemExit(f"convert: {error}") from None
    print(f"wrote {written}")


if __name__ == "__main__":
    typer.run(main)
