"""Write the numbers of README.md anew from the files in benchmarks/ and kernels/tables/.

    python scripts/readme_tables.py          rewrite what stands between the markers
    python scripts/readme_tables.py --check  only say whether README.md is up to date

A marker is `<!-- table: NAME -->`, closed by `<!-- end -->`. Nothing else in the README holds a
measured number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from vllm_spense.kernels.measurements import layer_key
from vllm_spense.layer_layouts import share_layouts
from vllm_spense.pruning.random_model import load_shape

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MISSING = "Not measured yet.\n"
Row = dict[str, Any]


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def percent(share: float) -> str:
    return f"{share:.0%}"


def provenance(result: Row, name: str, folder: str) -> str:
    """Where the numbers of one file come from."""
    keys = ("device", "driver", "vllm", "torch", "triton")
    versions = [f"{key} {result[key]}" for key in keys[1:] if result.get(key)]
    place = ", ".join(filter(None, [result.get("device"), *versions, result["date"]]))
    return f"[{name}]({folder}/{name}): {place}; `{result['command']}`\n\n"


def quality(result: Row) -> str:
    """Perplexity, KL and size of every method, one table per model."""
    parts = []
    for model in unique(result["rows"], "model"):
        rows = [row for row in result["rows"] if row["model"] == model]
        first = rows[0]
        parts.append(
            f"{model}, calibrated on {first['calibration']}, tested on {first['text']}; "
            f"the dense model has PPL {first['dense_ppl']:.2f}.\n\n"
        )
        head = ("method", "dense share", "dtype", "PPL", "KL to dense", "same top-1", "MiB")
        parts.append(markdown(head, map(_quality_row, rows)))
    return "\n".join(parts)


def _quality_row(row: Row) -> tuple[str, ...]:
    return (
        row["method"] if row["dense_share"] < 1 else "only quantised",
        percent(row["dense_share"]),
        row["dtype"],
        f"{row['ppl']:.2f}",
        f"{row['kl']:.3f}",
        f"{row['top1']:.1%}",
        f"{row['bytes'] / 2**20:.0f}",
    )


def gemm(result: Row) -> str:
    """Speed of all linear layers of a block against dense: sum of dense µs over sum of ours."""
    parts = []
    for model, dtype, kind in unique(result["rows"], "model", "dtype", "kind"):
        rows = [
            r for r in result["rows"] if (r["model"], r["dtype"], r["kind"]) == (model, dtype, kind)
        ]
        shares = sorted({row["dense_share"] for row in rows})
        head = ["M", *(f"{percent(share)} dense" for share in shares), "slowest layer"]
        lines = []
        for m in sorted({row["M"] for row in rows}):
            of_m = [row for row in rows if row["M"] == m]
            figures = [_speed([r for r in of_m if r["dense_share"] == share]) for share in shares]
            worst = min(of_m, key=lambda row: row["ratio"])
            last = f"{worst['ratio']:.2f} ({worst['layer']}, {percent(worst['dense_share'])} dense)"
            lines.append([str(m), *figures, last])
        layers = ", ".join(unique(rows, "layer"))
        parts.append(f"{model}, {dtype}, {kind}; layers {layers}.\n\n{markdown(head, lines)}")
    return "\n".join(parts)


def _speed(rows: list[Row]) -> str:
    if not rows:
        return "–"
    return f"{sum(row['dense_us'] for row in rows) / sum(row['us'] for row in rows):.2f} ×"


def tuned(result: Row) -> str:
    """The dispatcher's own table: best plan against best dense GEMM, summed over a block's layers.

    Dense copies are left out: they are what a layer falls back on where 2:4 does not pay.
    """
    config = load_shape("qwen3-32b")
    times = {(row["layer"], row["m"]): row["us"] for row in result["layers"]}
    shares = (0.0, 0.25, 0.5)
    layouts = {share: share_layouts(config, share, torch.float8_e4m3fn) for share in shares}
    head = ["M", *(f"{percent(share)} dense" for share in shares), "slowest layer"]
    lines = []
    for m in (1, 16, 64, 128, 256, 512, 1024, 4096, 16384):
        found = [
            {
                "layer": name,
                "dense_share": share,
                "dense_us": (us := times[layer_key(layout), m])["dense"],
                "us": min(value for plan, value in us.items() if plan != "dense"),
            }
            for share in shares
            for name, layout in layouts[share].items()
        ]
        figures = [_speed([row for row in found if row["dense_share"] == s]) for s in shares]
        worst = min(found, key=lambda row: row["dense_us"] / row["us"])
        ratio = worst["dense_us"] / worst["us"]
        last = f"{ratio:.2f} ({worst['layer']}, {percent(worst['dense_share'])} dense)"
        lines.append([str(m), *figures, last])
    return f"Qwen3-32B, fp8; layers {', '.join(layouts[0.0])}.\n\n{markdown(head, lines)}"


def serve(result: Row) -> str:
    """A served model against its dense twin."""
    head = ("model", "dense share", "metric", "batch", "prompt", "ours", "dense", "ratio")
    return markdown(head, map(_serve_row, result["rows"]))


def _serve_row(row: Row) -> tuple[str, ...]:
    figures = [f"{row[key]:.4g}" for key in ("value", "dense_value")]
    place = [str(row[key]) for key in ("batch", "prompt_tokens")]
    share = percent(row["dense_share"])
    return (row["model"], share, row["metric"], *place, *figures, f"{row['ratio']:.2f}")


def equality(result: Row) -> str:
    """How far served logits are from those of the dense twin, in its worst workload."""
    head = ("checkpoint", "KL to the twin", "KL of vLLM's two dense kernels", "ratio", "same top-1")
    lines = []
    for name in unique(result["rows"], "checkpoint"):
        rows = [row for row in result["rows"] if row["checkpoint"] == name]
        row = max(rows, key=lambda row: (row.get("ratio") or 0, row["kl"]))
        kernels, ratio = row.get("kernels_kl"), row.get("ratio")
        lines.append(
            [
                name,
                f"{row['kl']:.2e}",
                "–" if kernels is None else f"{kernels:.2e}",
                "–" if ratio is None else f"{ratio:.2f}",
                f"{row['top1']:.1%}",
            ]
        )
    return markdown(head, lines)


TABLES: dict[str, tuple[str, Callable[[Row], str]]] = {
    "quality": ("quality*.json", quality),
    "gemm": ("gemm-*.json", gemm),
    "tuned": ("../kernels/tables/*.json", tuned),
    "serve": ("serve-*.json", serve),
    "equality": ("equality-*.json", equality),
}


def unique(rows: Iterable[Row], *keys: str) -> list[Any]:
    """Values of one key, or tuples of several, in order of appearance."""
    return list(dict.fromkeys(tuple(r[k] for k in keys) if keys[1:] else r[keys[0]] for r in rows))


def table(name: str, benchmarks: Path) -> str:
    """One generated block.

    Raises:
        ValueError: an unknown name.
    """
    if name not in TABLES:
        raise ValueError(f"README.md asks for table {name!r}; known: {sorted(TABLES)}")
    pattern, write = TABLES[name]
    parts = []
    for path in sorted(benchmarks.glob(pattern)):
        result = json.loads(path.read_text(encoding="utf-8"))
        folder = path.resolve().relative_to(benchmarks.resolve().parent).parent
        parts.append(provenance(result, path.name, str(folder)) + write(result))
    return "\n".join(parts) or MISSING


def render(readme: str, benchmarks: Path) -> str:
    """The README with every marked block written anew."""
    return MARKED.sub(lambda m: f"{m[1]}{table(m[2], benchmarks)}{m[3]}", readme)


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False,
) -> None:
    """Write the numbers of README.md anew from the result files in benchmarks/."""
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = render(before, ROOT / "benchmarks")
    if check and after != before:
        raise SystemExit("README.md is out of date: run python scripts/readme_tables.py")
    if not check:
        path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
