"""The loops of docs/rows.md run as they stand, on ranks, alone, and beside a row server."""

import json
import re
import socket
from pathlib import Path
from typing import Any

from ranks import printed

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


def test_the_loop_with_row_servers_trains_on_two_ranks_and_the_command(ranks: Any, tmp_path: Path) -> None:
    code = next(
        each for each in re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL) if "SERVERS" in each
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nfrom tacit.cli import main\n"
        "if os.environ['RANK'] == '2':\n    assert main(['serve-rows', '--servers', '1', '--json']) == 0\n"
        "else:\n" + "".join(f"    {line}\n" for line in code.splitlines()) + "    print(tables.stats.pulls)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first, second, server = ranks.run(3, printed, str(script), [], port)
    assert first == second == "3\n"
    found = json.loads(server)
    assert found["pulls"] == found["pushes"] == 3 and found["looked_up"] == 0 < found["row_nbytes"]
