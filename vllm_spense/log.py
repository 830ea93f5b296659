"""Log lines that say which path runs. `VLLM_SPENSE_LOG=DEBUG` shows every layer.

Lines go to vLLM's own handlers (the logger is its child); a fact that holds for many layers is said
once.
"""

from __future__ import annotations

import logging
import os

__all__ = ["debug", "info_once", "logger", "warn_once"]

logger = logging.getLogger("vllm.spense")
logger.setLevel(os.environ.get("VLLM_SPENSE_LOG", "INFO").upper())
_said: set[str] = set()


def info_once(message: str) -> None:
    """Say a fact the first time."""
    if message not in _said:
        _said.add(message)
        logger.info(message)


def warn_once(message: str) -> None:
    """Warn the first time."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)


def debug(message: str) -> None:
    """Per layer, shown with `VLLM_SPENSE_LOG=DEBUG`."""
    logger.debug(message)
