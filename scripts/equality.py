"""Compare a served checkpoint with its dense twin, in real engines, by the KL of their logits.

    python scripts/convert.py CHECKPOINT TWIN --dense-fp8
    python scripts/equality.py compare CHECKPOINT TWIN
    python scripts/equality.py compare CHECKPOINT TWIN --batches 1 --batches 64 --json out.json

The twin runs twice on a GPU: with vLLM's first choice of FP8 kernel and with the next one. The KL
between the two is what FP8 kernels differ by; the checkpoint's KL to the twin is quoted against it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from vllm_spense.equality import collect, divergence
from vllm_spense.kernels.machine import this_machine

FIRST_CHOICE = "CutlassFP8ScaledMMLinearKernel,FlashInferFP8ScaledMMLinearKernel"
KV_BYTES = 1 << 30
app = typer.Typer(help=__doc__, rich_markup_mode=None, add_completion=False)


@app.command("collect", hidden=True)
def collect_one(folder: Path, out: Path, arguments: str) -> None:
    """One engine, in a process of its own."""
    save_file(collect(folder, **json.loads(arguments)), out)


@app.command("compare")
def compare(
    checkpoint: Annotated[Path, typer.Argument(help="A spense checkpoint.")],
    twin: Annotated[Path, typer.Argument(help="Its dense twin (scripts/convert.py --dense-fp8).")],
    batches: Annotated[list[int], typer.Option(help="Decode steps.")] = [1, 7, 64, 300],  # noqa: B006
    prompt: Annotated[int, typer.Option(help="Length of the long prompt.")] = 2000,
    dtype: Annotated[str, typer.Option(help="Of activations.")] = "bfloat16",
    memory: Annotated[float, typer.Option(help="GPU memory share of each of 3 engines.")] = 0.2,
    eager: Annotated[bool, typer.Option("--eager", help="No torch.compile, no graphs.")] = False,
    label: Annotated[str, typer.Option(help="Name in the JSON rows.")] = "",
    json_out: Annotated[Path | None, typer.Option("--json", help="Append rows here.")] = None,
) -> None:
    """Run the engines side by side and print KL and greedy agreement."""
    gpu = torch.cuda.is_available()
    engine = {"dtype": dtype, "enforce_eager": eager}
    if gpu:
        engine |= {"gpu_memory_utilization": memory, "kv_cache_memory_bytes": KV_BYTES}
    arguments = json.dumps({"batches": batches, "prompt": prompt, **engine})
    runs = {"checkpoint": (checkpoint, {}), "twin": (twin, {})}
    if gpu and "quantization_config" in json.loads((twin / "config.json").read_text()):
        runs["second kernel"] = (twin, {"VLLM_DISABLED_KERNELS": FIRST_CHOICE})
    with tempfile.TemporaryDirectory() as scratch:
        logits = _collect_all(runs, arguments, Path(scratch))
    rows = [
        _row(label or checkpoint.name, name, {run: found[name] for run, found in logits.items()})
        for name in logits["twin"]
    ]
    _print(rows)
    if json_out:
        before = json.loads(json_out.read_text()) if json_out.exists() else []
        json_out.write_text(json.dumps([*before, *rows], indent=1) + "\n")


@app.command("merge")
def merge(
    out: Annotated[Path, typer.Argument(help="Result file to write.")],
    parts: Annotated[list[Path], typer.Argument(help="Files that compare wrote.")],
) -> None:
    """Join rows of several comparisons and add what they ran on."""
    rows = [row for part in parts for row in json.loads(part.read_text())]
    result = {**asdict(this_machine("scripts/check_equality.sh")), "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")
    _print(rows)


def _collect_all(
    runs: dict[str, tuple[Path, dict[str, str]]], arguments: str, scratch: Path
) -> dict[str, dict[str, torch.Tensor]]:
    shared = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    processes = {}
    for name, (folder, variables) in runs.items():
        out = scratch / f"{name}.safetensors"
        command = [sys.executable, __file__, "collect", str(folder), str(out), arguments]
        processes[name] = subprocess.Popen(command, env=os.environ | shared | variables)
    failed = [name for name, process in processes.items() if process.wait() != 0]
    if failed:
        raise typer.Exit(f"engines that failed: {', '.join(failed)} (their errors are above)")
    return {name: load_file(scratch / f"{name}.safetensors") for name in runs}


def _row(label: str, workload: str, logits: dict[str, torch.Tensor]) -> dict[str, object]:
    row: dict[str, object] = {"checkpoint": label, "workload": workload}
    row |= divergence(logits["twin"], logits["checkpoint"])
    if "second kernel" in logits:
        kernels = divergence(logits["twin"], logits["second kernel"])
        row |= {"kernels_kl": kernels["kl"], "kernels_top1": kernels["top1"]}
        row["ratio"] = row["kl"] / kernels["kl"] if kernels["kl"] else None
    return row


def _print(rows: list[dict[str, object]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    app()
