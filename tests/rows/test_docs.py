"""The loop of docs/rows.md runs as it stands, on ranks and alone."""

import re
from pathlib import Path
from typing import Any

DOC = Path(__file__).parents[2] / "docs" / "rows.md"


def test_the_first_loop_of_the_page_trains_on_two_ranks(ranks: Any) -> None:
    pulls, owned = zip(*ranks.run(2, train), strict=True)
    assert pulls == (3, 3)
    assert 300 < sum(owned) <= 384  # 2 ranks, 3 steps, 64 users: as good as all of them different


def train(rank: int, world: int) -> Any:
    code = re.search(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"__name__": "page"}
    exec(code[1].replace("for step in", f"torch.manual_seed({rank})\nfor step in"), names)
    return names["tables"].stats.pulls, names["tables"].owned("user")
