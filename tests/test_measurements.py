"""Tables of measurements: names, files, broken files."""

import json

import pytest
import torch
from layers import FP8, gate_up

from vllm_spense.kernels import table_files
from vllm_spense.kernels.machine import Head
from vllm_spense.kernels.measurements import (
    LayerRow,
    RegionRow,
    Table,
    candidate,
    layer_key,
    parse_candidate,
)
from vllm_spense.kernels.problem import Layout

HEAD = Head("NVIDIA H200", "580", "2.11", "3.6", None, "800", "2026-12-01", "tune.py")
REGION = RegionRow("fp8", "bf16", 64, {"cusparselt alg=7": 3.25}, "sparse_24", 768, 512, True)
LAYER = LayerRow("fp8", "bf16", 64, {"regions": 9.0, "dense": 8.0}, "2048x512 dense 2048x512")


@pytest.mark.parametrize(
    ("path", "config", "name"),
    [
        ("cusparselt", (), "cusparselt"),
        ("cusparselt", (("alg", 7),), "cusparselt alg=7"),
        ("scaled_mm", (("gemm", "cutlass"),), "scaled_mm gemm=cutlass"),
        ("decode", (("warps", 8), ("shift", -1)), "decode warps=8,shift=-1"),
    ],
)
def test_candidate_names(path, config, name):
    assert candidate(path, config) == name
    assert parse_candidate(name) == (path, config)


def test_layer_key_names_sizes_and_kinds():
    layout = Layout(128, 64, gate_up(128, 64, 32), FP8)
    assert layer_key(layout) == (
        "128x64 sparse_24 48x64 + dense 16x64 + sparse_24 48x64 + dense 16x64"
    )


def test_file_round_trip(tmp_path):
    path = tmp_path / "sub" / "NVIDIA_H200.json"
    table_files.write(path, HEAD, Table([REGION], [LAYER]))
    head, table = table_files.read(path)
    assert head == HEAD and table.rows() == ([REGION], [LAYER])
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert sum('"m": 64' in line for line in path.read_text().splitlines()) == 2  # a row a line


def test_later_rows_replace_earlier_ones():
    table = Table([REGION])
    newer = RegionRow("fp8", "bf16", 64, {"cusparselt": 1.0}, "sparse_24", 768, 512, True)
    table.add([newer])
    assert table.rows()[0] == [newer]


def broken(change):
    file = {**vars(HEAD), "regions": [vars(REGION)], "layers": [vars(LAYER)]}
    return change(json.loads(json.dumps(file)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: {k: v for k, v in f.items() if k != "regions"}, "regions"),
        (lambda f: {**f, "colour": "red"}, "colour"),
        (lambda f: {**f, "regions": [{**f["regions"][0], "m": 0}]}, "m = 0"),
        (lambda f: {**f, "regions": [{**f["regions"][0], "us": {"a": -1.0}}]}, "positive"),
        (lambda f: {**f, "layers": [{**f["layers"][0], "dtype": "int4"}]}, "int4"),
        (lambda f: [f], "not a table"),
    ],
)
def test_broken_files_are_named(tmp_path, change, message):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(broken(change)))
    with pytest.raises(
        ValueError, match=rf"table.json: not a table of measurements: .*{message}|{message}"
    ):
        table_files.read(path)


def test_truncated_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"device": "NVIDIA')
    with pytest.raises(ValueError, match="table.json: not a table of measurements"):
        table_files.read(path)


def test_shipped_tables_can_be_read():
    for path in table_files.shipped_path("x").parent.glob("*.json"):
        head, table = table_files.read(path)
        assert path == table_files.shipped_path(head.device)
        assert table.rows()[0]


def test_cache_has_the_library_versions_in_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = table_files.cache_path("NVIDIA H200")
    assert path.is_relative_to(tmp_path) and torch.__version__ in path.name
