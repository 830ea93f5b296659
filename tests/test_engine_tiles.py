"""A model of zero tiles in a real vLLM engine on the CPU: the tokens of its dense twin."""

import json
from pathlib import Path

import pytest
import torch
from models import tiny_qwen3
from safetensors.torch import load_file
from test_engine import assert_same_tokens, pytestmark, serve, transformers_twin
from test_tiles import random_mask

from vllm_spense.format.checkpoint import CheckpointWriter
from vllm_spense.format.partition import Partition, RegionKind, Segment
from vllm_spense.format.planes import encode
from vllm_spense.format.schema import make_quantization
from vllm_spense.format.tiles import Tiles

__all__ = ["pytestmark"]
FP8 = torch.float8_e4m3fn
ZERO = RegionKind.ZERO_TILES
NARROW, WIDE = Tiles(64, 64, 1, 2), Tiles(64, 64, 4, 8, k_shards=4)
PARTITIONS = {
    "gate_proj": Partition("output", (Segment(ZERO, 512, NARROW),)),
    "up_proj": Partition("output", (Segment(ZERO, 512, NARROW),)),
    "down_proj": Partition("input", (Segment(ZERO, 512, WIDE),)),
    "o_proj": Partition.whole(ZERO, 128, Tiles(64, 64, 2, 4, k_shards=2)),
}


def cut(model: Path, out: Path) -> Path:
    """Random tiles of the MLP and of o are set to zero."""
    writer, partitions, ignore = CheckpointWriter(out), {}, ["lm_head", r"re:.*\.[qkv]_proj"]
    for seed, (name, tensor) in enumerate(load_file(model / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        partition = PARTITIONS.get(module.rpartition(".")[2])
        if partition is None:
            writer.add({name: tensor})
            continue
        tiles = partition.tiles
        mask = random_mask(tensor.shape[0] // tiles.rows, tiles, seed)
        mask = mask.repeat_interleave(tiles.rows, 0).repeat_interleave(tiles.cols, 1)
        partitions[module] = partition
        planes = encode(tensor.float() * mask, partition, FP8, module)
        writer.add({f"{module}.{plane}": part for plane, part in planes.items()})
    config = json.loads((model / "config.json").read_text())
    return writer.finish(config, make_quantization(FP8, partitions, ignore, {}), copy_from=model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("tiles")
    return cut(tiny_qwen3(base / "dense"), base / "cut")


def test_two_ranks_write_what_the_twin_writes(folder, tmp_path):
    prompts = [[(7 * i + j * j) % 512 for j in range(4 + i)] for i in range(8)]
    answers = serve(
        tmp_path, prompts, 24, model=str(folder), quantization="spense", dtype="float32",
        tensor_parallel_size=2, bind="0|1",
    )  # fmt: skip
    assert [len(answer) for answer in answers] == [24] * 8
    assert_same_tokens(transformers_twin(folder), prompts, answers)
