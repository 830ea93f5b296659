"""Prune a dense model to a spense checkpoint.

python scripts/prune.py MODEL OUT --method spensegpt+ --dense-share 0.25
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from vllm_spense.pruning.pipeline import prune
from vllm_spense.pruning.report import PruneReport
from vllm_spense.pruning.settings import ATTENTION_MODES, DTYPES, METHODS, PruneSettings

Method = Enum("Method", {name: name for name in METHODS}, type=str)
Attention = Enum("Attention", {name: name for name in ATTENTION_MODES}, type=str)
Dtype = Enum("Dtype", {name: name for name in DTYPES}, type=str)

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
STAGES = {"calibrate": "writing text", "prune": "pruning blocks", "write": "writing checkpoint"}
EXAMPLES = """
[bold]Examples[/bold]

A quarter of every MLP dense, the rest 2:4, FP8; the model writes its own calibration text:

  python scripts/prune.py Qwen/Qwen3-0.6B qwen3-0.6b-spense

Plain 2:4 in BF16, attention too, calibrated on a file:

  python scripts/prune.py MODEL OUT --method sparsegpt --dense-share 0 --attention 2:4 --dtype bf16 --calibration text.txt

Half of the tiles of 64 rows and 128 columns removed:

  python scripts/prune.py MODEL OUT --method blocks --tile 64x128 --sparsity 0.5

From a GGUF file, and continued after an interruption:

  python scripts/prune.py FOLDER OUT --gguf-file model.Q4_1.gguf --resume
"""  # noqa: E501


@contextmanager
def progress_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """One bar per stage, with the time left."""
    bars = Progress(
        TextColumn("{task.description:>18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    tasks = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(STAGES[stage])
        bars.update(tasks[stage], completed=done, total=total)

    with bars:
        yield show


def summary(report: PruneReport) -> Table:
    """Relative output error by projection."""
    table = Table("projection", "layers", "least", "median", "largest", title="Relative error")
    for kind, errors in report.errors_by_kind().items():
        ordered = sorted(errors)
        figures = (ordered[0], ordered[len(ordered) // 2], ordered[-1])
        table.add_row(kind, str(len(errors)), *(f"{figure:.4f}" for figure in figures))
    return table


@app.command(epilog=EXAMPLES)
def main(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a dense model.")],
    out: Annotated[Path, typer.Argument(help="Checkpoint folder; must not exist.")],
    method: Annotated[
        Method,
        typer.Option(
            help="How weights are chosen. With a dense share above 0 all methods but spensegpt+ "
            "keep the last channels of the MLP dense; spensegpt+ chooses the channels by score. "
            "blocks removes whole tiles instead."
        ),
    ] = Method["spensegpt+"],
    dense_share: Annotated[
        float | None,
        typer.Option(
            help="Dense part of the intermediate dimension: 0 all 2:4, 1 only quantised "
            "(0.25; blocks has none)."
        ),
    ] = None,
    tile: Annotated[
        str | None, typer.Option(help="Rows x columns of a tile, with blocks (64x128).")
    ] = None,
    sparsity: Annotated[
        float | None, typer.Option(help="Share of tiles that are removed, with blocks (0.5).")
    ] = None,
    attention: Annotated[
        Attention,
        typer.Option(
            help="Attention projections: dense (quantised with --dtype fp8, else as they are), "
            "2:4, or keep (as they are)."
        ),
    ] = Attention["dense"],
    dtype: Annotated[Dtype, typer.Option(help="Weight dtype.")] = Dtype["fp8"],
    calibration: Annotated[
        str,
        typer.Option(
            help="A text file, a .jsonl file (key 'text' or 'messages'), a data set "
            "(NAME[:CONFIG[:SPLIT]]), or self: the model writes its own text."
        ),
    ] = "self",
    samples: Annotated[
        int | None, typer.Option(help="Calibration samples (64 on a CPU, 128 on a GPU).")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens per sample (CPU: 512, or 256 for self; GPU: 2048)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of self-written text and the choice of samples.")] = 0,
    dampening: Annotated[
        float, typer.Option(help="Added to the Hessian's diagonal, as a share of its mean.")
    ] = 0.01,
    batch_size: Annotated[
        int, typer.Option(help="Samples per forward pass (0: about 4096 tokens).")
    ] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if any.")] = None,
    gguf_file: Annotated[
        str | None, typer.Option(help="GGUF file inside MODEL to start from.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run from OUT.work.")
    ] = False,
) -> None:
    """Prune a dense model to 2:4, hybrid or block sparsity, in one shot, layer by layer."""
    console = Console()
    tiled = method.value == "blocks"
    if dense_share is None:
        dense_share = 0.0 if tiled else 0.25
    try:
        settings = PruneSettings(
            method=method.value,
            dense_share=dense_share,
            tile=(tile or "64x128") if tiled else tile,
            sparsity=0.5 if tiled and sparsity is None else sparsity,
            attention=attention.value,
            dtype=dtype.value,
            calibration=calibration,
            seed=seed,
            dampening=dampening,
            batch_size=batch_size,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        ).with_device_defaults(samples, length)
        with progress_bars(console) as progress:
            report = prune(model, out, settings, gguf_file, resume, progress)
    except ValueError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    console.print(summary(report))
    for warning in report.warnings:
        typer.secho(f"warning: {warning}", fg="yellow")
    if report.resumed_blocks:
        typer.echo(f"{report.resumed_blocks} blocks were taken over from the interrupted run")
    typer.echo(
        f"{out}: {report.bytes / 2**20:.1f} MiB (dense {report.dense_bytes / 2**20:.1f} MiB), "
        f"{sum(report.seconds.values()):.0f} s. Report: {out / 'spense' / 'report.md'}"
    )


if __name__ == "__main__":
    app()
