"""Real namespaces: what stands while a lab is up, and that nothing stands after it, however it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tacit import lab, launch
from tacit.lab.errors import LabError
from tacit.lab.network import exec_in_host, lab_list
from tacit.topology import Link, Network, leaf_spine, ring, star

PYTHON = sys.executable
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
link, _ = server.accept()
got = 0
while piece := link.recv(1 << 16):
    got += len(piece)
print(got)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as link:
    link.sendall(bytes(int(sys.argv[2])))
"""


def until(true: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"{what} within {within_s:g} s"
        time.sleep(0.02)


def send(hosts: lab.Lab, src: str, dst: str, nbytes: int) -> int:
    """The bytes that `dst` received of the `nbytes` that `src` sent over TCP."""
    words = [*exec_in_host.prefix(hosts.init, dst), PYTHON, "-c", LISTEN, hosts[dst].address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout and listener.stdout.readline() == "up\n"
        done = hosts.command(src, [PYTHON, "-c", SEND, hosts[dst].address, str(nbytes)])
        assert done.returncode == 0
        return int(listener.stdout.readline())


def test_bytes_arrive_and_are_counted_at_both_ends_and_by_the_shaper(folder: Path) -> None:
    nbytes = 2_000_000
    with lab.up(star(3, 1e9), folder=folder) as hosts:
        before = hosts.counters()
        assert send(hosts, "h0", "h2", nbytes) == nbytes
        after = hosts.counters()

        def change(node: str, device: str, name: str) -> int:
            return after[node][device][name] - before[node][device][name]

        sent, packets = change("h0", "eth0", "tx_nbytes"), change("h0", "eth0", "tx_packets")
        # a header a packet, and it counts them
        assert sent == pytest.approx(nbytes + 66 * packets, rel=0.001)
        assert change("h2", "eth0", "rx_nbytes") == sent
        shaped = change("h0", "eth0", "qdisc_nbytes")  # a header a segment
        assert shaped == pytest.approx(nbytes * 1514 / 1448, rel=0.002)
        assert change("switch", "port2", "qdisc_nbytes") == shaped
        assert change("h1", "eth0", "tx_nbytes") == 0 and change("h1", "eth0", "rx_nbytes") == 0
        assert change("h0", "eth0", "qdisc_drops") == 0


@pytest.mark.parametrize("network", [ring(4, 1e9), leaf_spine(2, 1, 2, 1e9)], ids=str)
def test_hosts_reach_each_other_through_hosts_and_through_switches_with_loops(
    network: Network, folder: Path
) -> None:
    with lab.up(network, folder=folder) as hosts:
        for dst in network.hosts[1:]:
            assert send(hosts, "h0", dst, 10_000) == 10_000


def test_a_switch_can_be_talked_to_by_the_hosts_at_its_ports(folder: Path) -> None:
    with lab.up(star(3, 1e9), folder=folder) as hosts:
        assert send(hosts, "h0", "switch", 100_000) == 100_000
        assert send(hosts, "switch", "h2", 100_000) == 100_000


def test_a_small_mtu_in_the_middle_lets_everything_through(folder: Path) -> None:
    links = [Link("a", "s", 1e9, mtu=9000), Link("s", "t", 1e9, mtu=1500), Link("t", "b", 1e9, mtu=9000)]
    with lab.up(Network.of(["a", "b"], ["s", "t"], links), folder=folder) as hosts:
        assert send(hosts, "a", "b", 200_000) == 200_000


def test_links_have_their_mtu_and_cubic_and_lose_packets_where_asked(
    kernel: dict[str, str], folder: Path
) -> None:
    if kernel["nft"]:
        pytest.skip(f"no nft numgen in this kernel: {kernel['nft']}")
    links = [Link("a", "s", 1e9, mtu=9000), Link("b", "s", 1e9, mtu=9000, loss=0.5)]
    with lab.up(Network.of(["a", "b"], ["s"], links), folder=folder) as hosts:
        code = (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            f"for i in range(1000): s.sendto(b'x' * 8000, ('{hosts['b'].address}', 9))\n"
            f"t = socket.socket(); t.setblocking(False); t.connect_ex(('{hosts['b'].address}', 9))\n"
            "print(t.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())"
        )
        said = hosts.command("a", [PYTHON, "-c", code], capture_output=True, text=True)
        assert said.stdout == "cubic\n"
        sent = hosts.counters()["a"]["eth0"]
        assert sent["tx_nbytes"] >= 1000 * 8042 and sent["tx_packets"] < 1010  # whole: the MTU is 9000
        words = ["sh", "-c", "cat /proc/net/snmp"]
        table = hosts.command("b", words, capture_output=True, text=True).stdout.splitlines()
        names, values = (line.split() for line in table if line.startswith("Ip:"))
        arrived = int(values[names.index("InReceives")])
        assert 350 < arrived < 650  # of 1000, each lost with one half: 9 standard deviations


def test_rates_change_while_everything_stands_and_nothing_else_may(folder: Path) -> None:
    with lab.up(star(2, 1e8), folder=folder) as hosts:
        hosts.set_rate(2e8)
        assert hosts.rate_bps == 2e8 and str(hosts.network).endswith("at 200Mbit")
        hosts.set_rate(5e8)
        assert str(hosts.network) == f"{star(2, 1e8)} at 500Mbit"
        assert {link["rate_bps"] for link in hosts.facts()["links"]} == {5e8}
        assert send(hosts, "h0", "h1", 1000) == 1000
        hosts.set_rate(None)
        assert hosts.rate_bps == 1e8 and str(hosts.network) == str(star(2, 1e8))
        with pytest.raises(LabError, match="differs from .* in more than rates"):
            hosts.reshape(star(3, 1e8))


def test_what_the_kernel_cannot_do_is_one_sentence_before_anything_is_built(
    kernel: dict[str, str], folder: Path
) -> None:
    if not kernel["netem"]:
        pytest.skip("this kernel has netem")
    with (
        pytest.raises(
            LabError, match=r"delay of 3 ms, and this kernel has no netem.*set latency below 100 us"
        ),
        lab.up(star(2, 1e8, 3e-3), folder=folder),
    ):
        pass
    assert list(folder.glob("*")) == []


def test_everything_in_a_lab_goes_before_ordinary_processes_where_that_is_allowed(folder: Path) -> None:
    with (
        lab.up(star(2, 1e8), folder=folder) as hosts,
        subprocess.Popen([*exec_in_host.prefix(hosts.init, "h0"), "sleep", "600"]) as entered,
    ):
        until(lambda: len(inside(hosts.init)) == 2, "sleep starts")
        (sleeping,) = set(inside(hosts.init)) - {hosts.init}
        allowed = hosts.raise_priority()
        found = [os.sched_getscheduler(process) for process in (sleeping, entered.pid)]
        entered.terminate()
        assert entered.wait() == -signal.SIGTERM  # passed on, and told as it was
        assert found == [os.SCHED_RR if allowed else os.SCHED_OTHER, os.SCHED_OTHER]  # entered is outside


def test_an_unknown_host_is_named(folder: Path) -> None:
    with (
        lab.up(star(2, 1e8), folder=folder) as hosts,
        pytest.raises(LabError, match="no host 'h5'; its hosts are h0, h1"),
    ):
        hosts.command("h5", ["true"])


def test_ranks_run_on_their_hosts_in_torchruns_environment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranked.py").write_text(
        "import json, os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'GLOO_SOCKET_IFNAME')\n"
        "with open('/proc/self/net/dev') as file: devices = [line.split(':')[0].strip() for line in file if ':' in line]\n"
        "print(json.dumps({k: os.environ[k] for k in names} | {'net': os.readlink('/proc/self/ns/net'), 'devices': devices}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    heard: dict[int, launch.Message] = {}
    with lab.up(star(2, 1e9), folder=folder) as hosts:
        launch.run(
            "ranked", [], ranks=4, on_message=heard.__setitem__, log_dir=tmp_path / "logs", rank_specs=hosts.rank_specs(2)
        )  # fmt: skip
    assert [heard[rank]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert {m["MASTER_ADDR"] for m in heard.values()} == {"10.77.0.1"}
    assert {m["GLOO_SOCKET_IFNAME"] for m in heard.values()} == {"eth0"}
    assert all(m["WORLD_SIZE"] == "4" and m["LOCAL_WORLD_SIZE"] == "2" for m in heard.values())
    assert heard[0]["net"] == heard[1]["net"] != heard[2]["net"] == heard[3]["net"]
    assert set(heard[0]["devices"]) == {"lo", "eth0"}


def test_a_rank_that_fails_shows_its_traceback_and_all_are_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('what went wrong')\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with lab.up(star(2, 1e9), folder=folder) as hosts:
        with pytest.raises(
            launch.LaunchError, match="(?s)rank 1 failed with exit code 1.*ValueError: what went wrong"
        ):
            launch.run(
                "failing", [], ranks=2, on_message=print, log_dir=tmp_path / "logs", rank_specs=hosts.rank_specs()
            )  # fmt: skip
        until(lambda: inside(hosts.init) == [hosts.init], "no rank is left")


def test_ranks_that_take_too_long_are_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with lab.up(star(2, 1e9), folder=folder) as hosts:
        with pytest.raises(launch.LaunchError, match="did not finish within 1 s"):
            launch.run(
                "endless", [], ranks=2, on_message=print, log_dir=tmp_path / "logs", rank_specs=hosts.rank_specs(), limit_s=1.0
            )  # fmt: skip
        until(lambda: inside(hosts.init) == [hosts.init], "no rank is left")


@pytest.mark.parametrize(
    "words", [["sh", "-c", "exit 7"], ["sh", "-c", "kill -TERM $$"], ["no-such-command"]]
)
def test_a_commands_end_is_told_as_it_was(words: list[str], folder: Path) -> None:
    told = {"exit 7": 7, "kill -TERM $$": -signal.SIGTERM, "no-such-command": 127}[words[-1]]
    with lab.up(star(2, 1e9), folder=folder) as hosts:
        assert hosts.command("h0", words, stderr=subprocess.DEVNULL).returncode == told


# ---- nothing is left ----

OWNER = """
import subprocess, sys, time
from pathlib import Path
from tacit import lab
from tacit.lab.network import exec_in_host
from tacit.topology import star
with lab.up(star(2, 1e8), folder=Path(sys.argv[1])) as hosts:
    # a process that the owner started, and two that it does not know of
    subprocess.Popen([*exec_in_host.prefix(hosts.init, "h0"), "sh", "-c", "sleep 600 & sleep 600; true"])
    print(hosts.init, flush=True)
    time.sleep(600)
"""


def inside(init: int) -> list[int]:
    """The processes in the PID namespace of which `init` is process 1."""
    found, space = [], Path(f"/proc/{init}/ns/pid").readlink()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns/pid").readlink() == space:
                found.append(int(process.name))
        except OSError:
            continue
    return sorted(found)


def marked(folder: Path) -> list[int]:
    """The processes whose command line names `folder`: keepers of this test's labs, and those who started them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(int(process.name))
    return found


def surroundings() -> tuple[list[str], list[str]]:
    """Named namespaces, and links, outside of labs."""
    names = sorted(path.name for path in Path("/run/netns").glob("*"))
    links = [
        line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line
    ]
    return names, links


def test_twenty_labs_in_a_row_three_of_them_killed_leave_nothing(folder: Path) -> None:
    before = surroundings()
    for number in range(20):
        if number in (4, 9, 14):
            _kill_one(folder, victim={4: "owner", 9: "watcher", 14: "init"}[number])
            continue
        with lab.up(star(2, 1e8), folder=folder) as hosts:
            assert len(inside(hosts.init)) == 1
            (note,) = lab_list.all_running(folder)
            assert note.init == hosts.init and note.hosts == ("h0", "h1") and note.parent == os.getpid()
        assert not Path(f"/proc/{hosts.init}").exists()  # at once: no waiting
    assert marked(folder) == [] and lab_list.all_running(folder) == []
    assert surroundings() == before


def _kill_one(folder: Path, victim: str) -> None:
    """Kills one process of a lab with SIGKILL while others run in it, and waits until all of the lab has gone."""
    words = [PYTHON, "-c", OWNER, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout
            init = int(owner.stdout.readline())
            (note,) = lab_list.all_running(folder)
            assert note.init == init
            until(lambda: len(inside(init)) == 4, "a shell and two sleeps start")
            processes = inside(init)
            os.kill({"owner": owner.pid, "watcher": note.pid, "init": init}[victim], signal.SIGKILL)
            gone = [Path(f"/proc/{process}/ns/pid") for process in processes]
            until(lambda: not any(path.exists() for path in gone), "the processes inside end")
        finally:
            owner.kill()
    until(lambda: marked(folder) == [], "the watcher ends")
    assert lab_list.all_running(folder) == []  # forgets the note that a killed watcher could not remove


def test_a_caller_killed_while_the_lab_is_being_built_leaves_nothing(folder: Path) -> None:
    words = [PYTHON, "-c", OWNER, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as owner:
        until(lambda: len(marked(folder)) >= 2, "the keeper starts")
        owner.kill()
    until(lambda: marked(folder) == [], "the keeper ends")


def test_an_error_in_the_block_takes_the_lab_down_and_comes_out(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), lab.up(star(2, 1e8), folder=folder):
        _ = 1 / 0
    assert marked(folder) == [] and lab_list.all_running(folder) == []


def test_a_lab_ended_from_outside_is_said(folder: Path) -> None:
    with lab.up(star(2, 1e8), folder=folder) as hosts:
        (note,) = lab_list.all_running(folder)
        lab_list.end(note)
        assert not Path(f"/proc/{hosts.init}").exists()
        with pytest.raises(LabError, match="the lab has gone"):
            hosts.counters()


def test_a_note_of_a_dead_lab_or_of_another_process_is_forgotten(tmp_path: Path) -> None:
    folder = lab_list.prepare(tmp_path / "labs")
    me = lab_list.LabEntry(os.getpid(), 1, 1, "root", "net", ("a",))
    path = lab_list.add(me, folder)
    assert [entry.pid for entry in lab_list.all_running(folder)] == [os.getpid()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": 5}))  # the same id, another time
    (folder / "1.json").write_text("half a no")
    assert lab_list.all_running(folder) == [] and list(folder.iterdir()) == []
    lab_list.end(
        lab_list.LabEntry(os.getpid(), 1, 1, "root", "net", (), started=5)
    )  # not this process: nothing ends


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "labs").symlink_to("/proc")
    with pytest.raises(LabError, match="is not this user's alone"):
        lab_list.prepare(tmp_path / "labs")
    with pytest.raises(LabError, match="is not this user's alone"):
        lab_list.all_running(tmp_path / "labs")
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)  # anybody could name a process there, for us to end
    with pytest.raises(LabError, match="is not this user's alone"):
        lab_list.all_running(tmp_path / "open")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LabError, match="remove what is there"):
        lab_list.prepare(tmp_path / "file")
    assert lab_list.all_running(tmp_path / "none") == []


def test_cores_are_shared_out_only_if_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.lab.network.lab import cores_of

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert [cores_of(rank, 2) for rank in range(2)] == [(0, 1), (2, 3)]
    assert cores_of(0, 8) == ()
