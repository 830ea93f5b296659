"""Pruned experts in a real vLLM engine on the CPU: the tokens of their dense twin."""

import pytest
from moe_models import prune_moe, tiny_moe
from test_engine import assert_same_tokens, pytestmark, serve, transformers_twin

__all__ = ["pytestmark"]
PROMPTS = [[(7 * i + j * j) % 512 for j in range(4 + i)] for i in range(8)]


def check(tmp_path, kind, **engine):
    folder = prune_moe(tiny_moe(tmp_path / "dense", kind), tmp_path / "pruned")
    answers = serve(tmp_path, PROMPTS, 24, model=str(folder), dtype="float32", **engine)
    assert [len(answer) for answer in answers] == [24] * len(PROMPTS)
    assert_same_tokens(transformers_twin(folder), PROMPTS, answers)


def test_two_ranks_write_what_the_twin_writes(tmp_path):
    """Every expert is divided over both ranks."""
    check(tmp_path, "qwen3_moe", tensor_parallel_size=2, bind="0|1")


@pytest.mark.slow
def test_mixtral(tmp_path):
    check(tmp_path, "mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_expert_parallel(tmp_path, kind):
    """Every rank holds half of the experts."""
    check(tmp_path, kind, tensor_parallel_size=2, enable_expert_parallel=True, bind="0|1")
