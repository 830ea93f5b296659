"""Measuring at load: once per shape, inside a budget, remembered on disk."""

from contextlib import nullcontext

import pytest
import torch
from fake_gpu import fake_gpu
from layers import FP8, input_split, output_split

from vllm_spense.kernels import load_time, table_files
from vllm_spense.kernels.measurements import Table
from vllm_spense.kernels.problem import Layout, Problem

__all__ = ["fake_gpu"]  # a fixture

BF16 = torch.bfloat16
LAYOUT = Layout(64, 64, output_split(64, 64, 32), FP8)
OTHER = Layout(64, 128, input_split(64, 128, 64), FP8)


@pytest.fixture
def table(fake_gpu, monkeypatch, tmp_path):
    known = Table()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(table_files, "table_for", lambda index: known)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Fake GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(load_time, "_SIZES", (16, 64))
    monkeypatch.setattr(load_time, "_budget", load_time._Budget(60.0))
    return known


def measured(table, layout):
    problem = Problem.whole(layout, 1, BF16, (9, 0))
    return all(table.knows(problem.only(i)) for i in problem.indices)


def measure(layout):
    load_time.ensure_measured(layout, BF16, torch.device("cpu"))


def test_an_unknown_shape_is_measured_and_remembered(table):
    measure(LAYOUT)
    assert measured(table, LAYOUT)
    head, stored = table_files.read(table_files.cache_path("Fake GPU"))
    assert head.command == "at load" and measured(stored, LAYOUT)
    measure(OTHER)
    _, stored = table_files.read(table_files.cache_path("Fake GPU"))
    assert measured(stored, LAYOUT) and measured(stored, OTHER)


def test_a_known_shape_costs_nothing(table, monkeypatch):
    measure(LAYOUT)
    monkeypatch.setattr(load_time, "Tuner", None)
    measure(LAYOUT)


def test_nothing_is_measured_without_budget(table, monkeypatch):
    monkeypatch.setattr(load_time, "_budget", load_time._Budget(0.0))
    measure(LAYOUT)
    assert not measured(table, LAYOUT)


def test_a_disk_that_cannot_be_written_is_a_warning(table, monkeypatch, caplog):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(table_files, "write", full)
    measure(LAYOUT)
    assert measured(table, LAYOUT)
    assert "measurements are not kept: No space left on device" in caplog.text
