"""The environment variables that tacit reads, each in one place and with its type; read anew at every call."""

from __future__ import annotations

import os


def run_secret() -> str:
    """TACIT_SECRET: the run's, the same for all its ranks and `tacit store`; "" where there is none."""
    return os.environ.get("TACIT_SECRET", "")


def store_address() -> str:
    """TACIT_STORE: host:port of a `tacit store`; "" where there is none."""
    return os.environ.get("TACIT_STORE", "")


def own_host() -> str:
    """TACIT_HOST: the address at which other ranks reach this one; "" where it is to be found out."""
    return os.environ.get("TACIT_HOST", "")


def aggregator_address() -> str:
    """TACIT_AGGREGATOR: host:port of the aggregator's control; "" where there is none."""
    return os.environ.get("TACIT_AGGREGATOR", "")


def aggregator_secret() -> str:
    """TACIT_AGGREGATOR_SECRET; "" where there is none."""
    return os.environ.get("TACIT_AGGREGATOR_SECRET", "")


def plan_cache() -> str:
    """TACIT_PLAN_CACHE: a folder in which `auto` keeps its plans; "" where there is none."""
    return os.environ.get("TACIT_PLAN_CACHE", "")


def debug() -> bool:
    """TACIT_DEBUG: whether a bug ends in its traceback."""
    return bool(os.environ.get("TACIT_DEBUG"))


def missing_of_a_job() -> list[str]:
    """Those of torchrun's variables that a process needs to join a job, and does not have."""
    return [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]


def rank() -> int:
    """RANK, as torchrun sets it; 0 where it is not set."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """LOCAL_RANK, as torchrun sets it; 0 where it is not set."""
    return int(os.environ.get("LOCAL_RANK", 0))


def plan() -> str:
    """TACIT_PLAN: `record`, or `record:FILE`, to record the steps of a script for `tacit plan`; "" for nothing."""
    return os.environ.get("TACIT_PLAN", "")


def world_size_text() -> str:
    """WORLD_SIZE as it was set, whatever it holds; "" where it is not set."""
    return os.environ.get("WORLD_SIZE", "")


def world_size() -> int:
    """WORLD_SIZE, as torchrun sets it; 1 where it is not set."""
    return int(os.environ.get("WORLD_SIZE", 1))


def all_ranks_here() -> bool:
    """Whether torchrun has started all ranks on this machine: LOCAL_WORLD_SIZE is WORLD_SIZE."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "-")


def several_hosts() -> bool:
    """Whether torchrun has started ranks on other machines too: LOCAL_WORLD_SIZE is set, and is not WORLD_SIZE."""
    return bool(os.environ.get("LOCAL_WORLD_SIZE")) and not all_ranks_here()


def master() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, with torch's defaults."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))


def restart_count() -> str:
    """TORCHELASTIC_RESTART_COUNT: how often torchrun has restarted its workers; "" without torchrun."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


def uses_agent_store() -> bool:
    """TORCHELASTIC_USE_AGENT_STORE: whether torchrun's agent serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"


def runtime_folder() -> str:
    """XDG_RUNTIME_DIR: the folder of this user's session; "" where there is none."""
    return os.environ.get("XDG_RUNTIME_DIR", "")


def inherited() -> dict[str, str]:
    """All variables, to pass on to a child process: it sees what the user set."""
    return dict(os.environ)


def shell() -> str:
    """SHELL: this user's; /bin/sh where it is not set."""
    return os.environ.get("SHELL", "/bin/sh")
