"""Bridge to the kernels, which live beside this package in a checkout and inside it once installed.

`kernels/` must never be importable as plain `kernels` (Hugging Face's package has that name), so it
has no `__init__.py`, and this module turns itself into a package by setting `__path__`.
"""

from pathlib import Path

_INSTALLED = Path(__file__).with_name("kernels")
_CHECKOUT = Path(__file__).parent.parent / "kernels"

__path__ = [str(_INSTALLED if _INSTALLED.is_dir() else _CHECKOUT)]
