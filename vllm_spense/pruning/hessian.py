"""Second-order statistics of a layer's input: H = XᵀX / tokens, and the factor SparseGPT needs.

X [tokens, K] may be BF16: products of two BF16 numbers are exact in FP32, and sums are FP32. On
CUDA the tensor cores do that directly (`out_dtype`); on the CPU X is widened first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Hessian", "HessianError", "InverseFactor", "diagonal_energy", "inverse_factor"]

MAX_DAMPENING = 1.0
_GROWTH = 10.0


class HessianError(ValueError):
    """Statistics that cannot guide pruning; the message names the layer."""


class Hessian:
    """Accumulates XᵀX over batches, in float32.

    Attributes:
        sum: [K, K] float32, XᵀX over all rows seen.
        tokens: rows seen.
    """

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self.sum = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add inputs x [..., K] of any float dtype."""
        x = x.detach().reshape(-1, x.shape[-1])
        if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
            self.sum += torch.mm(x.T, x, out_dtype=torch.float32)
        else:
            x = x.float()
            self.sum.addmm_(x.T, x)
        self.tokens += x.shape[0]

    def mean(self, name: str) -> Tensor:
        """H [K, K] float32.

        Raises:
            HessianError: naming `name`: nothing seen, NaN or infinity, or all inputs zero.
        """
        if not self.tokens:
            raise HessianError(f"{name}: no calibration token reached this layer")
        mean = self.sum / self.tokens
        diagonal = mean.diagonal()
        if not torch.isfinite(mean).all():
            bad = int((~torch.isfinite(diagonal)).sum())
            raise HessianError(
                f"{name}: the Hessian of its inputs is not finite ({bad} of {len(diagonal)} "
                "channels hold NaN or infinity); the model overflows on the calibration text"
            )
        if not (diagonal > 0).any():
            raise HessianError(f"{name}: all of its calibration inputs are zero")
        return mean


def diagonal_energy(x: Tensor) -> Tensor:
    """Σ over rows of x² for inputs [..., K]: float32 [K], the diagonal of XᵀX alone."""
    return x.detach().reshape(-1, x.shape[-1]).float().square().sum(0)


@dataclass(frozen=True)
class InverseFactor:
    """Upper U [K, K] with UᵀU = (H + damp·I)⁻¹, and the share of mean(diag H) that was added."""

    upper: Tensor
    dampening: float


def inverse_factor(hessian: Tensor, dampening_frac: float, name: str) -> InverseFactor:
    """Upper Cholesky factor of the inverse of the damped Hessian.

    With J the reversal of the order of channels, J(H + damp·I)J = LLᵀ gives U = (JLJ)⁻¹: one
    factorisation and one triangular solve, instead of invert-then-factor.
    Where the factorisation fails the dampening grows tenfold up to 1; the value used is returned,
    and callers report it.

    Raises:
        HessianError: naming `name`, when no dampening up to 1 makes it positive definite.
    """
    scale = hessian.diagonal().mean()
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    dampening = dampening_frac
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(dampening * scale)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed and torch.isfinite(lower).all():
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            if torch.isfinite(upper).all():
                return InverseFactor(upper, dampening)
        if dampening >= MAX_DAMPENING:
            raise HessianError(
                f"{name}: the Hessian has no Cholesky factor, even with dampening {dampening:g}; "
                "use more calibration text or another method"
            )
        dampening = min(max(dampening, 1e-3) * _GROWTH, MAX_DAMPENING)
