"""Compare our GEMMs with the best dense one, layer by layer, and write the result file.

    python scripts/bench_gemm.py qwen3-32b --path decode
    python scripts/bench_gemm.py qwen3-32b llama-3.1-8b --dense-share 0 --m 1 --m 16
    python scripts/bench_gemm.py qwen3-32b --path block_sparse --tile 128x128 --sparsity 0.5
    python scripts/bench_gemm.py qwen3-32b --path decode --out benchmarks/gemm-NVIDIA_H200.json

The correctness gate comes first: a layer whose product is wrong ends the run. Ends with a table and
one line of JSON; rows of `--out` that are not measured again are kept.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from vllm_spense.format.planes import WEIGHT_DTYPES
from vllm_spense.kernels.gemm_bench import PATHS, GemmBench, Row, bytes_of, floor_us
from vllm_spense.kernels.machine import this_machine
from vllm_spense.kernels.problem import Layout
from vllm_spense.kernels.table_files import table_for
from vllm_spense.layer_layouts import share_layouts, tile_layouts
from vllm_spense.pruning.random_model import load_shape

DTYPES = {"fp8": "float8_e4m3fn", "bf16": "bfloat16"}
KEY = ("model", "layer", "N", "K", "M", "dtype", "kind", "dense_share", "zero_share", "tile")


def main(
    models: Annotated[list[str], typer.Argument(help="Names such as qwen3-32b, or folders.")],
    path: Annotated[
        str, typer.Option(help="decode, block_sparse, or dispatch: what it chooses.")
    ] = "dispatch",
    dense_share: Annotated[list[float] | None, typer.Option(help="Repeatable.")] = None,
    tile: Annotated[
        list[str] | None, typer.Option(help="Zero tiles instead, such as 64x128; repeatable.")
    ] = None,
    sparsity: Annotated[
        list[float] | None, typer.Option(help="Share of zero tiles (0.5); repeatable.")
    ] = None,
    m: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="qkv, o, gate_up, down.")] = None,
    dtype: Annotated[str, typer.Option(help="fp8 or bf16.")] = "fp8",
    repetitions: Annotated[int, typer.Option(help="Of dense and ours, alternating.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Result file to write or extend.")] = None,
) -> None:
    """Compare our GEMMs with the best dense one."""
    console = Console(soft_wrap=True)
    if path not in (*PATHS, "dispatch"):
        raise typer.BadParameter(f"--path is {path}; needed: {', '.join(PATHS)} or dispatch")
    known, rows = table_for(torch.cuda.current_device()), []
    for model in models:
        config, weight_dtype = load_shape(model), WEIGHT_DTYPES[DTYPES[dtype]]
        if tile:
            cuts = [(cut, share) for cut in tile for share in sparsity or [0.5]]
            found = [(0.0, tile_layouts(config, _sizes(c), s, weight_dtype)) for c, s in cuts]
        else:
            shares = dense_share or [0.0, 0.25, 0.5]
            found = [(share, share_layouts(config, share, weight_dtype)) for share in shares]
        for share, layouts in found:
            for name, layout in layouts.items():
                if layer and name not in layer:
                    continue
                bench = GemmBench(layout, known, path, repetitions)
                measured = [bench.row(model, name, share, size) for size in m or [1, 8, 16, 32]]
                console.print(_table(measured, layout))
                rows += measured
                del bench
    command = " ".join(["python scripts/bench_gemm.py", *models, f"--path {path}"])
    result = asdict(this_machine(command)) | {"rows": [asdict(row) for row in rows]}
    if out:
        _extend(out, result)
    console.print(json.dumps(result), highlight=False)


def _sizes(tile: str) -> tuple[int, int]:
    """Rows and columns of `64x128`."""
    rows, _, cols = tile.partition("x")
    if not (rows.isdigit() and cols.isdigit()):
        raise typer.BadParameter(f"--tile is {tile}; needed: such as 64x128")
    return int(rows), int(cols)


def _table(rows: list[Row], layout: Layout) -> Table:
    first = rows[0]
    title = f"{first.model} {first.layer} {first.N}x{first.K}, {first.dense_share:.0%} dense"
    if first.tile:
        title += f", {first.zero_share:.0%} of {first.tile} tiles zero"
    table = Table(title=title, title_justify="left")
    for head in ("M", "µs", "GB/s", "% of floor", "× dense", "× cuSPARSELt", "dense", "error"):
        table.add_column(head, justify="right")
    table.add_column("path")
    for row in rows:
        library = f"{row.cusparselt_us / row.us:.2f}" if row.cusparselt_us else ""
        table.add_row(
            *(str(row.M), f"{row.us:.2f}", f"{bytes_of(layout) / row.us / 1e3:.0f}"),
            *(f"{floor_us(layout) / row.us:.0%}", f"{row.ratio:.2f}", library),
            *(f"{row.dense_path} {row.dense_us:.2f}", f"{row.rel_err:.1e}", row.path),
        )
    return table


def _extend(out: Path, result: dict) -> None:
    """Write the result; keep older rows of other layers."""
    measured = {tuple(row[key] for key in KEY) for row in result["rows"]}
    older = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    kept = [row for row in older if tuple(row[key] for key in KEY) not in measured]
    text = json.dumps(result | {"rows": kept + result["rows"]}, indent=1)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
