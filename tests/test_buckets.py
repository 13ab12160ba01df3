from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tacit.buckets import (
    DdpSizes,
    digest_of,
    flat_view,
    group_names,
    has_sparse_tables,
    outer_names,
    parameter_names,
    plan,
    sparse_names,
)
from tacit.errors import ConfigError


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(1, 2000))
def test_buckets_cover_every_parameter_once_in_backward_order_within_the_limit(numels, limit):
    parameters = {f"p{i}": nn.Parameter(torch.zeros(n)) for i, n in enumerate(numels)}
    buckets = plan(parameters, dict.fromkeys(parameters, "0"), limit)
    assert [name for b in buckets for name in b.names] == list(reversed(parameters))
    for bucket in buckets:
        assert bucket.layout.numel * 4 <= limit or len(bucket.names) == 1


def test_as_large_as_ddps_buckets_are_cut_where_ddp_cuts_and_smaller_ones_are_not():
    numels = {"a": 100, "b": 300, "c": 50, "d": 10, "e": 20, "f": 200}
    parameters = {name: nn.Parameter(torch.zeros(n)) for name, n in numels.items()}
    groups = dict.fromkeys(parameters, "0")
    sizes = DdpSizes(first_nbytes=400, nbytes=300)
    assert [b.names for b in plan(parameters, groups, 300, ddp=sizes)] == [
        ("f",),
        ("e", "d", "c"),
        ("b",),
        ("a",),
    ]
    assert plan(parameters, groups, 10**6, ddp=sizes) == plan(parameters, groups, 300, ddp=sizes)
    assert plan(parameters, groups, 299, ddp=sizes) == plan(parameters, groups, 299)
    apart = plan(parameters, {**groups, "d": "1"}, 300, ddp=sizes)
    assert [b.names for b in apart] == [("f",), ("e", "c"), ("d",), ("b",), ("a",)]


def test_dtypes_and_optimizer_groups_do_not_share_a_bucket():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, dtype=torch.bfloat16)})
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.SGD([{"params": matrices}, {"params": vectors, "name": "biases"}], lr=1)
    parameters = parameter_names(model)
    groups = group_names(parameters, optimizer)
    assert groups == {"a.weight": "0", "a.bias": "biases", "b.weight": "0", "b.bias": "biases"}
    assert len(plan(parameters, groups, 10**6)) == 4


def test_names_are_the_owners_own():
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2)))
    assert list(parameter_names(compiled)) == ["0.weight", "0.bias"]


def test_neighbours_in_memory_are_one_vector_without_a_copy():
    buffer = torch.arange(10.0)
    joined = flat_view([buffer[2:5], buffer[5:5], buffer[5:9]])
    assert joined is not None and joined.tolist() == [2, 3, 4, 5, 6, 7, 8]
    joined[0] = 100
    assert buffer[2] == 100
    assert flat_view([buffer[2:4], buffer[5:9]]) is None
    assert flat_view([buffer[:2], torch.zeros(2)]) is None


def test_embeddings_and_a_language_models_head_are_outer_and_a_classifiers_head_is_not():
    class Language(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.table, self.place = nn.Embedding(50, 8), nn.Embedding(16, 8)
            self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
            if tied:
                self.head.weight = self.table.weight

    for model, expected in (
        (Language(tied=False), {"table.weight", "place.weight", "head.weight"}),
        (Language(tied=True), {"table.weight", "place.weight"}),
        (nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), set()),
        (nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 5)), {"0.weight"}),
    ):
        parameters = parameter_names(model)
        outer = outer_names(model, parameters)
        assert outer == expected
        (bucket,) = plan(parameters, dict.fromkeys(parameters, "0"), 10**6, outer)
        assert {span.name for span in bucket.layout.spans if span.outer} == expected


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.users = nn.EmbeddingBag(9, 4, sparse=True), nn.Embedding(5, 2, sparse=True)
        self.again, self.dense = nn.Embedding(5, 2, sparse=True), nn.Embedding(3, 2)
        self.again.weight = self.users.weight
        self.half, self.head = nn.Embedding(6, 2, sparse=True, dtype=torch.bfloat16), nn.Linear(4, 1)


def test_sparse_tables_of_a_dtype_share_a_bucket_behind_all_others():
    model = Tables()
    parameters = parameter_names(model)
    sparse = sparse_names(model, parameters)
    assert sparse == {"words.weight", "users.weight", "half.weight"}
    buckets = plan(parameters, dict.fromkeys(parameters, "0"), 1, sparse=sparse)
    assert [(b.names, b.sparse) for b in buckets] == [
        (("head.bias",), False),
        (("head.weight",), False),
        (("dense.weight",), False),
        (("half.weight",), True),
        (("users.weight", "words.weight"), True),
    ]
    assert digest_of(buckets) != digest_of([replace(bucket, sparse=False) for bucket in buckets])
    assert has_sparse_tables(model) and not has_sparse_tables(model.head)


def test_a_sparse_table_that_another_kind_of_module_uses_is_refused():
    model = Tables()
    model.dense.weight = model.users.weight
    with pytest.raises(
        ConfigError, match=r"'users.weight' has sparse .* shared with Embedding.*sparse=False"
    ):
        sparse_names(model, parameter_names(model))
