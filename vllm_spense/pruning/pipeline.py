"""The whole run: load, calibrate, prune block by block, write the checkpoint."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vllm_spense import __version__
from vllm_spense.format.checkpoint import CheckpointWriter
from vllm_spense.format.schema import FORMAT_VERSION, make_quantization
from vllm_spense.pruning.architecture import Decoder, find_decoder
from vllm_spense.pruning.block import BlockPruner, BlockResult, load_block
from vllm_spense.pruning.calibration import SELF, TextSource, text_tokens, token_digest
from vllm_spense.pruning.moe_block import MoeBlockPruner
from vllm_spense.pruning.plan import PrunePlan, make_plan, output_bytes
from vllm_spense.pruning.report import PruneReport
from vllm_spense.pruning.resume import WorkFolder
from vllm_spense.pruning.self_text import self_tokens
from vllm_spense.pruning.settings import PruneSettings
from vllm_spense.pruning.source import Source, load_source, model_digest
from vllm_spense.pruning.walk import capture_inputs, run_block

__all__ = ["Progress", "prune", "prune_blocks"]

Progress = Callable[[str, int, int], None]
_SPACE_MARGIN = 64 << 20


def silent(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def prune(
    model: str,
    out: Path | str,
    settings: PruneSettings,
    gguf_file: str | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> PruneReport:
    """Prune a model into a new checkpoint folder.

    Args:
        model: folder or hub name of a dense model.
        out: must not exist.
        progress: called with (stage, done, total); stages are `calibrate`, `prune` and `write`.

    Raises:
        ValueError: naming what is wrong with the model, the settings, the text or the folders.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists; choose another output folder or remove it")
    began = perf_counter()
    dtype = None if settings.dtype == "fp8" else settings.weight_dtype
    source = load_source(model, gguf_file, dtype)
    decoder = find_decoder(source.model)
    plan = make_plan(decoder, settings)
    size = output_bytes(source.model, decoder, plan, settings.weight_dtype)
    work = WorkFolder(out, fingerprint(source, settings), resume)
    require_space(out, size, work)
    report = PruneReport(settings.to_dict(), versions(), plan.dense_share, {})
    report.warnings += plan.warnings
    report.bytes, report.dense_bytes = size, sum(t.nbytes for t in unshared(source.model).values())
    report.seconds["load"] = perf_counter() - began
    tokens = calibrate(source, settings, work, progress, report)
    run = _Run(source, decoder, plan, settings, work, report)
    run.prune(tokens, progress)
    run.write(out, progress)
    work.remove()
    return report


def fingerprint(source: Source, settings: PruneSettings) -> dict[str, Any]:
    """What a continued run must share with the interrupted one."""
    calibration = settings.calibration
    return {
        "model": model_digest(source.model),
        "format_version": FORMAT_VERSION,
        **settings.to_dict(),
        "calibration_digest": SELF if calibration == SELF else TextSource(calibration).digest(),
        **{f"version of {name}": version for name, version in versions().items()},
    }


def versions() -> dict[str, str]:
    """Of this package and the libraries that decide the numbers."""
    libraries = ("torch", "transformers", "safetensors")
    return {
        "vllm-spense": __version__,
        **{name: importlib.metadata.version(name) for name in libraries},
    }


def require_space(out: Path, size: int, work: WorkFolder) -> None:
    """Refuse to start without room for the blocks and the checkpoint.

    Raises:
        ValueError: with both numbers.
    """
    needed = 2 * size + _SPACE_MARGIN - work.bytes
    folder = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{folder} has {free / 2**30:.2f} GiB free; needed: {needed / 2**30:.2f} GiB "
            f"(a checkpoint of {size / 2**30:.2f} GiB, and as much again for finished blocks until "
            "it is written)"
        )


def calibrate(
    source: Source,
    settings: PruneSettings,
    work: WorkFolder | None,
    progress: Progress,
    report: PruneReport | None = None,
) -> Tensor:
    """Calibration tokens [samples, length], from the work folder if they are there."""
    began = perf_counter()
    tokens = work.load_tokens() if work else None
    if tokens is None:
        tokens = _make_tokens(source, settings, progress)
        if work:
            work.save_tokens(tokens)
    if report:
        report.calibration = {
            "source": settings.calibration,
            "tokens": tokens.numel(),
            "digest": token_digest(tokens),
        }
        report.seconds["calibrate"] = perf_counter() - began
    return tokens


def _make_tokens(source: Source, settings: PruneSettings, progress: Progress) -> Tensor:
    samples, length = settings.samples, settings.length
    if settings.calibration != SELF:
        text = TextSource(settings.calibration)
        return text_tokens(text, source.tokenizer, samples, length, settings.seed)
    device = torch.device(settings.device)
    if not _fits(source.model, device):
        device = torch.device("cpu")
    source.model.to(device)
    tokens = self_tokens(
        source.model,
        source.tokenizer,
        samples,
        length,
        settings.seed,
        progress=lambda done, total: progress("calibrate", done, total),
    )
    source.model.to("cpu")
    return tokens


def _fits(model: torch.nn.Module, device: torch.device) -> bool:
    """Whether a whole model and its KV cache can be on a device at once (a rough bound)."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return 1.3 * sum(p.nbytes for p in model.parameters()) < free


def unshared(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict without second names of tied tensors."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    return tensors


def prune_blocks(
    decoder: Decoder,
    tokens: Tensor,
    plan: PrunePlan,
    settings: PruneSettings,
    work: WorkFolder | None = None,
) -> Iterator[tuple[int, BlockResult]]:
    """Prune layer after layer, in place; yields (index, result) as each is finished.

    Layers that the work folder has are loaded instead of pruned.
    """
    inputs = capture_inputs(decoder, tokens, settings.windows_per_batch)
    for index, layer in enumerate(decoder.layers):
        name, kwargs = decoder.layer_name(index), inputs.kwargs[index]
        layer.to(settings.device)
        if work and work.has_block(index):
            result = work.load_block(index)
            load_block(layer, name, result.tensors, plan, settings.weight_dtype)
        else:
            kind = MoeBlockPruner if len(decoder.mlps) > 1 else BlockPruner
            result = kind(layer, name, inputs.hidden, kwargs, plan, settings).prune()
            if work:
                work.save_block(index, result)
        if index + 1 < len(decoder.layers):
            outputs = run_block(layer, inputs.hidden, kwargs, settings.device)
            inputs.hidden = [batch.cpu() for batch in outputs]
        layer.to("cpu")
        yield index, result


@dataclass
class _Run:
    """The parts of a run that both of its halves need."""

    source: Source
    decoder: Decoder
    plan: PrunePlan
    settings: PruneSettings
    work: WorkFolder
    report: PruneReport

    def prune(self, tokens: Tensor, progress: Progress) -> None:
        """First half: until every block is in the work folder."""
        began, total = perf_counter(), len(self.decoder.layers)
        self.report.resumed_blocks = sum(self.work.has_block(i) for i in range(total))
        progress("prune", 0, total)
        for index, result in prune_blocks(
            self.decoder, tokens, self.plan, self.settings, self.work
        ):
            self.report.modules += result.reports
            self.report.warnings += result.warnings
            progress("prune", index + 1, total)
        self.report.seconds["prune"] = perf_counter() - began

    def write(self, out: Path, progress: Progress) -> None:
        """Second half: from the work folder to the checkpoint."""
        decoder, total = self.decoder, len(self.decoder.layers)
        writer, orders = CheckpointWriter(out), {}
        inside, stored = f"{decoder.prefix}.", self.source.stored_name
        writer.add(
            {k: t for k, t in unshared(self.source.model).items() if not k.startswith(inside)}
        )
        for index in range(total):
            result = self.work.load_block(index)
            writer.add({stored(name): tensor for name, tensor in result.tensors.items()})
            layer = decoder.layer_name(index)
            orders |= {stored(f"{layer}.{mlp}"): order for mlp, order in result.orders.items()}
            progress("write", index + 1, total)
        partitions = {
            stored(f"{decoder.layer_name(index)}.{child}"): partition
            for index in range(total)
            for child, partition in self.plan.partitions.items()
        }
        quantization = make_quantization(
            self.settings.weight_dtype, partitions, self.plan.ignored(decoder), self.provenance()
        )
        writer.finish(
            self.source.config,
            quantization,
            copy_from=self.source.write_side_files(self.work.path / "side_files"),
            intermediate_order=orders or None,
            extra_files={
                "spense/report.json": self.report.to_json(),
                "spense/report.md": self.report.to_markdown(),
            },
        )

    def provenance(self) -> dict[str, Any]:
        """What made the checkpoint."""
        calibration = self.report.calibration
        if Path(calibration["source"]).is_file():
            calibration = {**calibration, "source": Path(calibration["source"]).name}
        recipe = self.settings.to_dict()
        recipe.pop("calibration")
        return {
            "base_model": self.source.name,
            "revision": getattr(self.source.model.config, "_commit_hash", None),
            "recipe": recipe,
            "calibration": calibration,
            "versions": versions(),
        }
