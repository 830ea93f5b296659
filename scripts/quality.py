"""Make benchmarks/quality.json: all methods, on text that they were not calibrated on.

python scripts/quality.py MODEL --out benchmarks/quality.json
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_spense.pruning.calibration import PYTHON_DOCS, TextSource, text_tokens
from vllm_spense.pruning.evaluation import DenseReference
from vllm_spense.pruning.pipeline import calibrate
from vllm_spense.pruning.quality import Variant, quality_rows, standard_variants
from vllm_spense.pruning.settings import DTYPES, PruneSettings
from vllm_spense.pruning.source import load_source

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
EXAMPLES = """
[bold]Examples[/bold]

The whole table for a small model, calibrated on one half of Python's help topics, tested on the other:

  python scripts/quality.py FOLDER --samples 64 --length 256 --out benchmarks/quality.json

FP8 only, calibrated on text that the model writes itself, tested on a file:

  python scripts/quality.py MODEL --calibration self --text test.txt --dtypes fp8
"""  # noqa: E501


def table(rows: list[dict[str, Any]]) -> Table:
    """Rows for people."""
    shown = Table("method", "dense share", "dtype", "PPL", "KL", "top-1", "MiB", title="Quality")
    for row in rows:
        shown.add_row(
            row["method"],
            f"{row['dense_share']:g}",
            row["dtype"],
            f"{row['ppl']:.3f}",
            f"{row['kl']:.4f}",
            f"{row['top1']:.2%}",
            f"{row['bytes'] / 2**20:.1f}",
        )
    return shown


def measure(
    model: str, settings: PruneSettings, text: str, test: tuple[int, int], dtypes: list[str]
) -> list[dict[str, Any]]:
    """All rows for a model; `test` is (windows, tokens per window)."""
    source = load_source(model, None, None)
    tokens = calibrate(source, settings, None, lambda stage, done, total: None)
    windows = text_tokens(TextSource(text), source.tokenizer, *test, settings.seed)
    reference = DenseReference(source.model, windows)
    with Progress(console=Console(stderr=True)) as bars:
        variants = standard_variants(dtypes)
        whole = bars.add_task("all", total=len(variants))
        blocks = bars.add_task("blocks")

        def show(variant: Variant, done: int, total: int) -> None:
            name = f"{variant.method} {variant.dense_share:g} {variant.dtype}"
            bars.update(blocks, description=name, completed=done, total=total)
            bars.update(whole, completed=variants.index(variant) + done / total)

        rows = []
        for row in quality_rows(source, tokens, reference, text, settings, variants, show):
            bars.console.print(*(row[key] for key in ("method", "dense_share", "dtype", "kl")))
            rows.append(row)
    return rows


@app.command(epilog=EXAMPLES)
def main(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a dense model.")],
    calibration: Annotated[
        str, typer.Option(help="Calibration text, as for scripts/prune.py.")
    ] = f"{PYTHON_DOCS}:0",
    text: Annotated[str, typer.Option(help="Text to score.")] = f"{PYTHON_DOCS}:1",
    samples: Annotated[int, typer.Option(help="Calibration samples.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens per calibration sample.")] = 256,
    test_samples: Annotated[int, typer.Option(help="Windows of the scored text.")] = 12,
    test_length: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    dtypes: Annotated[str, typer.Option(help="Weight dtypes, separated by commas.")] = "bf16,fp8",
    seed: Annotated[int, typer.Option(help="Chooses windows; of self-written text.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the rows here as JSON.")] = None,
) -> None:
    """Prune with every method, compare with the dense model, print and store the table."""
    names = [name for name in dtypes.split(",") if name]
    try:
        if unknown := set(names) - DTYPES.keys():
            raise ValueError(f"dtypes {sorted(unknown)} are not known; needed: {list(DTYPES)}")
        settings = PruneSettings(
            calibration=calibration,
            samples=samples,
            length=length,
            seed=seed,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        rows = measure(model, settings, text, (test_samples, test_length), names)
    except ValueError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    Console().print(table(rows))
    print(f"dense PPL {rows[0]['dense_ppl']}")
    if out:
        command = shlex.join(["python", "scripts/quality.py", Path(model).name, *sys.argv[2:]])
        content = {"date": datetime.date.today().isoformat(), "command": command, "rows": rows}
        out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    app()
