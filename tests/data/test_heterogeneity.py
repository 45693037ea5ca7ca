"""The summary of a partition, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedlalr.data.heterogeneity import count_labels, draw, summarise
from fedlalr.data.partition import Partition, partition


def test_counts_are_samples_by_client_and_class():
    parts = Partition.from_lists([[0, 3], [], [1, 2, 4]])
    assert count_labels([2, 0, 0, 2, 1], parts).tolist() == [[0, 0, 2], [0, 0, 0], [2, 1, 0]]
    assert count_labels([0, 0, 0, 0, 0], parts, classes=2).tolist() == [[2, 0], [0, 0], [3, 0]]


def test_disjoint_clients_have_no_entropy_and_distance_one_half():
    summary = summarise(np.array([[6, 0], [0, 6]]))
    assert (summary.classes_per_client, summary.entropy, summary.global_entropy) == (1.0, 0.0, 1.0)
    assert summary.total_variation == 0.5


def test_a_summary_worked_out_by_hand():
    summary = summarise(np.array([[4, 4, 0], [0, 1, 1], [0, 0, 0], [2, 0, 0]]))
    assert (summary.clients, summary.classes, summary.samples) == (4, 3, 12)
    assert (summary.smallest, summary.median, summary.largest) == (0, 2.0, 8)
    assert (summary.fewest_classes, summary.most_classes) == (1, 2)
    assert summary.classes_per_client == pytest.approx(5 / 3)
    assert summary.entropy == pytest.approx(2 / 3)
    # The global mix is (6, 5, 1) / 12, so the distances are 1/12, 6/12 and 6/12.
    assert summary.total_variation == pytest.approx(13 / 36)
    assert "12 samples, 3 classes, 4 clients" in summary.lines()[0]


def test_equal_clients_have_distance_zero():
    summary = summarise(np.tile([3, 5, 2], (7, 1)))
    assert summary.total_variation == pytest.approx(0, abs=1e-12)
    assert summary.entropy == pytest.approx(summary.global_entropy)


@settings(deadline=None, max_examples=60)
@given(arrays(np.int64, st.tuples(st.integers(1, 8), st.integers(1, 6)), elements=st.integers(0, 30)))
def test_a_summary_stays_within_its_bounds(counts):
    counts[0, 0] += 1
    summary = summarise(counts)
    assert 0 <= summary.total_variation < 1
    assert 0 <= summary.entropy <= np.log2(counts.shape[1]) + 1e-12
    assert summary.fewest_classes <= summary.classes_per_client <= summary.most_classes <= summary.classes


def test_counts_of_other_data_are_refused():
    parts = partition(np.arange(20) % 2, 4)
    with pytest.raises(ValueError, match="labels must lie in 0 to 1"):
        count_labels(np.arange(20) % 3, parts, classes=2)


@pytest.mark.parametrize(("clients", "classes"), [(12, 3), (5, 30), (300, 15)])
def test_the_drawing_is_written_where_asked(tmp_path, clients, classes):
    labels = np.arange(3000) % classes
    counts = count_labels(labels, partition(labels, clients, alpha=0.3))
    for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        draw(counts, tmp_path / f"labels.{kind}", "a title")
        assert (tmp_path / f"labels.{kind}").read_bytes().startswith(start)
