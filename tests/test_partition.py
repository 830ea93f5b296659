import pytest

from vllm_spense.format.partition import Partition, RegionKind, Segment, hybrid_segments

SPARSE, DENSE = RegionKind.SPARSE_24, RegionKind.DENSE


@pytest.mark.parametrize(
    ("size", "share", "sparse", "dense"),
    [
        pytest.param(25600, 0.25, 19200, 6400, id="qwen3-32b"),
        pytest.param(14336, 0.25, 10752, 3584, id="llama-8b"),
        pytest.param(1536, 0.25, 1152, 384, id="smollm2"),
        pytest.param(1536, 0.5, 768, 768, id="smollm2-half"),
        pytest.param(1536, 0.0, 1536, 0, id="all-sparse"),
        pytest.param(1000, 0.0, 1000, 0, id="all-sparse, no multiple of 32"),
        pytest.param(1001, 0.0, 992, 9, id="odd and all-sparse: a dense remainder"),
        pytest.param(1536, 1.0, 0, 1536, id="all-dense"),
        pytest.param(1001, 0.5, 496, 505, id="odd: the dense part takes the remainder"),
    ],
)
def test_hybrid_segments(size, share, sparse, dense):
    partition = Partition("output", hybrid_segments(size, share))
    assert partition.size_of(SPARSE) == sparse
    assert partition.size_of(DENSE) == dense
    assert partition.total == size
    assert abs(partition.dense_share - share) <= 0.01


def test_sparse_comes_first():
    kinds = [segment.kind for segment in hybrid_segments(1536, 0.25)]
    assert kinds == [SPARSE, DENSE]


@pytest.mark.parametrize("share", [-0.01, 1.01, float("nan")])
def test_share_outside_range(share):
    with pytest.raises(ValueError, match="outside 0 … 1"):
        hybrid_segments(1536, share)


def test_size_that_cannot_be_sparse():
    with pytest.raises(ValueError, match="4 channels cannot be divided"):
        hybrid_segments(4, 0.0)


@pytest.mark.parametrize(
    ("split", "segments", "match"),
    [
        ("diagonal", (Segment(DENSE, 8),), "split is 'diagonal'"),
        ("output", (), "at least one segment"),
        ("output", (Segment(DENSE, 0),), "size 0"),
        ("output", (Segment(DENSE, 8), Segment(DENSE, 8)), "one segment per kind"),
    ],
)
def test_impossible_partitions(split, segments, match):
    with pytest.raises(ValueError, match=match):
        Partition(split, segments)


def test_spans():
    partition = Partition("input", (Segment(SPARSE, 24), Segment(DENSE, 8)))
    assert partition.spans() == {SPARSE: (0, 24), DENSE: (24, 8)}
