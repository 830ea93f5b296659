"""Compare pruned checkpoints with their dense original: perplexity, KL, top-1 agreement, tasks.

python scripts/evaluate.py DENSE CHECKPOINT… --text text.txt
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_spense.pruning.calibration import PYTHON_DOCS, TextSource, text_tokens
from vllm_spense.pruning.evaluation import DenseReference, Scores, lm_eval_tasks
from vllm_spense.pruning.loading import folder_bytes, load_model

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
EXAMPLES = """
[bold]Examples[/bold]

Two pruned checkpoints against the dense model, on a text of yours:

  python scripts/evaluate.py Qwen/Qwen3-0.6B qwen3-spense qwen3-sparsegpt --text text.txt

On English text that comes with Python, with lm-eval tasks, and as JSON:

  python scripts/evaluate.py DENSE PRUNED --tasks arc_easy,piqa --limit 200 --json scores.json
"""


def evaluate(
    dense: str,
    checkpoints: list[str],
    text: TextSource,
    samples: int,
    length: int,
    seed: int,
    device: str,
    tasks: list[str],
    limit: int | None,
) -> list[dict[str, Any]]:
    """One row per model, the dense one first."""
    model, tokenizer = load_model(dense)
    windows = text_tokens(text, tokenizer, samples, length, seed)
    reference = DenseReference(model.to(device), windows)
    rows = [_row(dense, reference.scores, lm_eval_tasks(model, tokenizer, tasks, limit))]
    for folder in track(checkpoints, "scoring", console=Console(stderr=True)):
        del model
        model, tokenizer = load_model(folder)
        scores = reference.compare(model.to(device))
        rows.append(_row(folder, scores, lm_eval_tasks(model, tokenizer, tasks, limit)))
    return rows


def _row(name: str, scores: Scores, tasks: dict[str, dict[str, float]]) -> dict[str, Any]:
    return {
        "model": name,
        "ppl": scores.ppl,
        "kl": scores.kl,
        "top1": scores.top1,
        "tokens": scores.tokens,
        "bytes": folder_bytes(Path(name)),
        "tasks": tasks,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Rows for people."""
    shown = Table("model", "PPL", "KL to dense", "top-1 agreement", "MiB", title="Quality")
    tasks = [(task, metric) for task, metrics in rows[0]["tasks"].items() for metric in metrics]
    for task, metric in tasks:
        shown.add_column(f"{task} {metric}")
    for row in rows:
        size = "–" if row["bytes"] is None else f"{row['bytes'] / 2**20:.1f}"
        figures = [f"{row['ppl']:.3f}", f"{row['kl']:.4f}", f"{row['top1']:.2%}", size]
        scores = [f"{row['tasks'][task][metric]:.4f}" for task, metric in tasks]
        shown.add_row(Path(row["model"]).name, *figures, *scores)
    return shown


@app.command(epilog=EXAMPLES)
def main(
    dense: Annotated[str, typer.Argument(help="The dense original: folder or hub name.")],
    checkpoints: Annotated[
        list[str] | None, typer.Argument(help="Checkpoint folders, spense or dense.")
    ] = None,
    text: Annotated[
        str,
        typer.Option(
            help="Text to score: a text or .jsonl file, a data set (NAME[:CONFIG[:SPLIT]]), or "
            "python-docs[:0|:1], help topics that come with Python."
        ),
    ] = f"{PYTHON_DOCS}:1",
    samples: Annotated[int, typer.Option(help="Windows of text.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    seed: Annotated[int, typer.Option(help="Chooses the windows.")] = 0,
    tasks: Annotated[str, typer.Option(help="lm-eval tasks, separated by commas.")] = "",
    limit: Annotated[int | None, typer.Option(help="Examples per lm-eval task.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if any.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows here as JSON.")
    ] = None,
) -> None:
    """Perplexity, mean KL to the dense model and top-1 agreement, teacher-forced on one text."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = [task for task in tasks.split(",") if task]
    try:
        rows = evaluate(
            dense, checkpoints or [], TextSource(text), samples, length, seed, device, names, limit
        )
    except (ValueError, OSError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    Console().print(table(rows))
    print(f"{rows[0]['tokens']} predicted tokens of {text}; KL in nats per token")
    if json_file:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    app()
