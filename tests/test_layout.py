"""Where parameters lie in a vector."""

import pytest
import torch

from tacit.layout import Layout, Span

MODEL = Layout.of({"w": (2, 3), "none": (0, 4), "b": (3,), "s": ()})
SHARD = Layout((Span("w", (1, 3), 0, 3, (5, 3), first=4), Span("b", (2,), 6, 8, (2,))), numel=9)


def test_spans_lie_one_behind_the_other():
    assert [(s.name, s.start, s.stop, s.numel) for s in MODEL.spans] == [
        ("w", 0, 6, 6),
        ("none", 6, 6, 0),
        ("b", 6, 9, 3),
        ("s", 9, 10, 1),
    ]
    assert MODEL.numel == 10 and MODEL.key == "w" and MODEL.numels == (6, 0, 3, 1)
    assert MODEL.span("b").shape == (3,)
    with pytest.raises(KeyError):
        MODEL.span("x")
    assert Layout.flat(4).spans[0].shape == (4,) and Layout.of({}).numel == 0


def test_a_part_is_named_by_its_rows():
    assert [span.part for span in SHARD.spans] == ["0:4:5", ""]
    assert Span("w", (5, 1), 0, 5, (5, 3), dim=1, first=2).part == "1:2:3"


@pytest.mark.parametrize("layout", [MODEL, SHARD])
def test_split_gives_views_in_their_shapes_and_join_puts_them_back(layout):
    flat = torch.arange(1.0, layout.numel + 1)
    parts = layout.split(flat)
    assert {n: tuple(p.shape) for n, p in parts.items()} == {s.name: s.shape for s in layout.spans}
    joined = layout.join(parts, like=flat.double())
    used = torch.zeros(layout.numel, dtype=torch.bool)
    for span in layout.spans:
        used[span.start : span.stop] = True
    assert joined.dtype == torch.float64
    assert torch.equal(joined[used], flat[used].double()) and not joined[~used].any()
    parts["w"].zero_()
    assert not flat[:3].any()
    assert not layout.join({}, like=flat).any()
