import copy
import json

import pytest
import torch

from vllm_spense.format.partition import Partition, RegionKind, Segment, hybrid_segments
from vllm_spense.format.schema import SpenseQuantization, make_quantization
from vllm_spense.format.tiles import Tiles

FP8 = torch.float8_e4m3fn
MLP = "model.layers.0.mlp"
PARTITIONS = {
    f"{MLP}.gate_proj": Partition("output", hybrid_segments(1536, 0.25)),
    f"{MLP}.up_proj": Partition("output", hybrid_segments(1536, 0.25)),
    f"{MLP}.down_proj": Partition("input", hybrid_segments(1536, 0.25)),
    "model.layers.0.self_attn.q_proj": Partition.whole(RegionKind.DENSE, 576),
}


def example():
    return make_quantization(FP8, PARTITIONS, ["lm_head", "re:visual\\..*"], {"recipe": "x"})


def test_json_round_trip():
    text = json.dumps(example().to_dict())
    assert SpenseQuantization.parse(json.loads(text)) == example()


def test_partition_of():
    config = example()
    for module, partition in PARTITIONS.items():
        assert config.partition_of(module) == partition
    assert config.partition_of("lm_head") is None
    assert config.partition_of("visual.blocks.3.mlp.gate_proj") is None
    with pytest.raises(
        ValueError, match=r"layers.1.mlp.up_proj is in no group and not in 'ignore'"
    ):
        config.partition_of("model.layers.1.mlp.up_proj")


def test_ambiguous_modules_are_refused():
    config = example()
    config.groups["again"] = copy.deepcopy(config.groups["group_0"])
    with pytest.raises(ValueError, match=r"is in groups \['group_0', 'again'\]"):
        config.partition_of(f"{MLP}.gate_proj")
    config = example()
    config.ignore.append(f"{MLP}.gate_proj")
    with pytest.raises(ValueError, match="both ignored and in group 'group_0'"):
        config.partition_of(f"{MLP}.gate_proj")


def test_bf16_has_no_quantization_arguments():
    config = make_quantization(torch.bfloat16, PARTITIONS, [], {})
    assert config.weights is None and config.activations is None
    assert SpenseQuantization.parse(config.to_dict()) == config


def test_tiles_are_stored_with_their_segment_and_nowhere_else():
    tiles = Tiles(**TILES)
    down = Partition("input", (Segment(RegionKind.ZERO_TILES, 512, tiles),))
    stored = make_quantization(FP8, {"a.down_proj": down}, [], {}).to_dict()
    assert stored["groups"]["group_0"]["segments"] == [
        {"kind": "zero_tiles", "size": 512, "tiles": TILES}
    ]
    assert SpenseQuantization.parse(stored).partition_of("a.down_proj") == down
    for group in example().to_dict()["groups"].values():
        assert all(set(segment) == {"kind", "size"} for segment in group["segments"])


def set_at(config, path, value):
    *parents, last = path
    for key in parents:
        config = config[key]
    config[last] = value


SEGMENTS = ("groups", "group_0", "segments")
TILES = {"rows": 64, "cols": 64, "kept": 4, "total": 8, "k_shards": 2}


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("format_version",), 2, "format_version: .*version 2 is not readable"),
        (("quant_method",), "fp8", "quant_method"),
        (("features",), ["zero_tiles"], "unknown features \\['zero_tiles'\\]"),
        (("colour",), "red", "colour: Extra inputs"),
        (("groups", "group_0", "colour"), "red", "groups.group_0.colour: Extra inputs"),
        (("weight_dtype",), "int8", "weight_dtype: .*'int8'; needed: one of"),
        (("weight_dtype",), "bfloat16", "'weights' must be null for bfloat16"),
        (("weights",), None, "'weights' must be given"),
        (("activations",), None, "'activations' must be given"),
        (("weights", "strategy"), "tensor", "8-bit float by tensor; version 1 has"),
        (("weights", "num_bits"), 4, "weights: 4-bit float by channel"),
        (("activations", "strategy"), "tensor", "activations: strategy tensor with dynamic=True"),
        (("kv_cache_scheme",), {"num_bits": 8, "type": "float"}, "kv_cache_scheme is reserved"),
        ((*SEGMENTS, 0, "kind"), "sparse_48", "segments.0.kind"),
        ((*SEGMENTS, 0, "kind"), "zero_tiles", "group_0: .*kind zero_tiles has no 'tiles'"),
        ((*SEGMENTS, 0, "tiles"), TILES, "group_0: .*kind sparse_24 has 'tiles'"),
        ((*SEGMENTS, 0, "tiles"), {"rows": 64}, "tiles.cols: Field required"),
        ((*SEGMENTS, 0, "tiles"), TILES | {"depth": 1}, "tiles.depth: Extra inputs"),
        ((*SEGMENTS, 0, "tiles"), TILES | {"cols": 96}, "tiles: .*tiles of 64x96; known"),
        ((*SEGMENTS, 0, "size"), 0, "segments.0.size"),
        ((*SEGMENTS, 0, "size"), -8, "segments.0.size"),
        (SEGMENTS, [], "segments: List should have at least 1"),
        (("groups", "group_0", "split"), "both", "group_0.split"),
        (("groups", "group_0", "targets"), [], "group_0.targets"),
        (("groups",), [], "groups"),
    ],
)
def test_refusals_name_the_key(path, value, match):
    config = example().to_dict()
    set_at(config, path, value)
    with pytest.raises(ValueError, match=match):
        SpenseQuantization.parse(config)


def test_too_many_partitions():
    partitions = {
        f"model.layers.{i}.mlp.up_proj": Partition(
            "output", (Segment(RegionKind.SPARSE_24, 64 * i), Segment(RegionKind.DENSE, 64))
        )
        for i in range(1, 6)
    }
    with pytest.raises(ValueError, match="5 distinct hybrid partitions; at most 4"):
        make_quantization(FP8, partitions, [], {})
