"""The cost of rows: the table that was computed before this code (docs/rows-cost.md has it), sampled steps, ceilings, headers."""

import json
import sys

import numpy as np
import pytest

from tacit import sim
from tacit.errors import ConfigError, PairingError
from tacit.sim.popularity import criteo, of_counts, zipf
from tacit.sim.row_packets import HEADER_NBYTES, MOST_PAYLOAD_NBYTES, UDP_NBYTES, RowFraming, switch_need
from tacit.sim.rows import MOST_WORLD, PAYS_FROM, RowsJob, ceiling, gain_on_ranks, gains
from tacit.sim.traces import parse_popularity

# ms a step at 200 Mbit, batch 4096 x 26, d = 16, payload alone, S = W / 4. In the order of COLUMNS.
TABLE = {
    ("zipf(s=0.7)", 8): (1898, 507, 731, 424, 448, 443, 2049, 1784, 1019),
    ("zipf(s=0.9)", 8): (1339, 507, 471, 274, 316, 306, 1446, 1122, 630),
    ("zipf(s=1.05)", 4): (324, 435, 121, 81, 153, 148, 816, 531, 264),
    ("zipf(s=1.05)", 8): (756, 507, 248, 145, 179, 169, 816, 531, 332),
    ("zipf(s=1.2)", 4): (144, 435, 51, 34, 68, 64, 363, 170, 106),
    ("zipf(s=1.2)", 8): (337, 507, 101, 59, 79, 73, 363, 170, 136),
    ("criteo(s=1.05)", 8): (529, 507, 153, 89, 125, 114, 571, 288, 206),
}
COLUMNS = ("ddp", "looked_up", "replicated", "star", "on_ranks.plain", "on_ranks.best", "on_servers.plain", "on_servers.given",
           "on_servers.best")  # fmt: skip
BEST = {
    ("zipf(s=0.7)", 8): 1 << 20,
    ("zipf(s=0.9)", 8): 1 << 19,
    ("zipf(s=1.05)", 4): 1 << 19,
    ("zipf(s=1.05)", 8): 1 << 18,
    ("zipf(s=1.2)", 4): 1 << 17,
    ("zipf(s=1.2)", 8): 1 << 16,
    ("criteo(s=1.05)", 8): 1 << 17,
}


def cells(found):
    return {name: 1e3 * _of(found, name).time_s for name in COLUMNS}


def _of(found, name):
    for part in name.split("."):
        found = getattr(found, part)
    return found


def payload(popularity, world=8, **options):
    return sim.rows_cost(popularity, world=world, headers=False, **options)


# ---- the table ----


@pytest.mark.parametrize(("popularity", "world"), TABLE)
def test_every_cell_of_the_table_is_within_one_percent(popularity, world):
    """Or 0.6 ms: the table is in whole milliseconds."""
    found = payload(popularity, world)
    for (name, ours), ms in zip(cells(found).items(), TABLE[popularity, world], strict=True):
        assert ours == pytest.approx(ms, rel=0.01, abs=0.6), name
    assert found.on_servers.best.hot == BEST[popularity, world]


@pytest.mark.parametrize(("popularity", "world"), TABLE)
def test_with_headers_every_time_is_4_to_6_percent_longer_and_every_gain_within_3_percent(popularity, world):
    bare, real = payload(popularity, world), sim.rows_cost(popularity, world=world)
    for name, ms in cells(bare).items():
        assert 1.04 < 1e3 * _of(real, name).time_s / ms < 1.06, name
    assert real.on_servers.gain == pytest.approx(bare.on_servers.gain, rel=0.03)
    assert real.on_servers.given_gain == pytest.approx(bare.on_servers.given_gain, rel=0.03)


@pytest.mark.parametrize(("skew", "gain"), [(0.7, 3.26), (0.9, 3.45), (1.05, 3.67), (1.2, 4.39)])
def test_one_server_for_8_ranks(skew, gain):
    assert payload(f"zipf(s={skew})", servers=1).on_servers.gain == pytest.approx(gain, abs=0.006)


@pytest.mark.parametrize(("skew", "gain"), [(1.05, 2.73), (1.2, 3.29)])
def test_rows_of_one_number(skew, gain):
    assert payload(f"zipf(s={skew})", width=1).on_servers.gain == pytest.approx(gain, abs=0.006)


def test_ps_lite_was_measured_at_142_ms_where_this_computes_145():
    found = payload("zipf(s=1.05)", 4, servers=1, batch=512, key_nbytes=8)
    assert 1e3 * found.on_servers.plain.time_s == pytest.approx(145, abs=0.5)


@pytest.mark.parametrize(
    ("skew", "look_ups", "unique"), [(0.7, 0.21, 0.13), (1.05, 0.77, 0.35), (1.2, 0.93, 0.53)]
)
def test_coverage_of_look_ups_is_not_coverage_of_bytes(skew, look_ups, unique):
    touched = zipf(skew).touched(4096 * 26, 8)
    share, of_rank, _ = touched.of_hottest(32_768)
    assert share == pytest.approx(look_ups, abs=0.005)
    assert of_rank / touched.unique[-1] == pytest.approx(unique, abs=0.005)


def test_the_union_is_3_15_times_a_rank_at_4_ranks_and_5_5_times_at_8():
    for world, ratio in ((4, 3.15), (8, 5.5)):
        touched = zipf(1.05).touched(4096 * 26, world)
        assert touched.union[-1] / touched.unique[-1] == pytest.approx(ratio, abs=0.005)


# ---- ceilings and the rule ----


def test_the_ceiling_of_32768_rows():
    found = payload("zipf(s=1.05)", 4, servers=1)
    assert found.on_servers.given_ceiling_in_rows == pytest.approx(1.54, abs=0.005)
    assert found.on_ranks.given_ceiling_in_rows == pytest.approx(
        1.01, abs=0.005
    )  # 1.04 in the source: see the docs
    assert found.on_ranks.given_ceiling == pytest.approx(
        1.04, rel=0.01
    )  # with keys, which only cold rows send
    assert found.on_ranks.gain == pytest.approx(1.04, abs=0.005)


def test_the_ceiling_is_the_formula():
    touched = zipf(1.05).touched(4096 * 26, 8)
    _, hot, union = touched.of_hottest(1000)
    total = touched.unique[-1]
    cold = total - hot
    assert ceiling(touched, 4, 1000) == min(1 / (1 - hot / total), 2 * 4 * total / (union + 2 * cold))


@pytest.mark.parametrize("headers", [True, False])
@pytest.mark.parametrize("width", [1, 16, 64])
@pytest.mark.parametrize("world", [2, 8, 32])
def test_no_gain_is_above_its_ceiling(world, width, headers):
    for skew in (0, 0.7, 1.0, 1.3):
        for servers in {1, max(1, world // 4), world, 1000, 10**6}:
            found = sim.rows_cost(
                zipf(skew), world=world, servers=servers, width=width, headers=headers, hot_steps=4
            )
            for choice in (found.on_ranks, found.on_servers):
                assert 1 <= choice.gain <= 1.0001 * choice.ceiling, choice.verdict
                assert choice.given_gain <= 1.0001 * choice.given_ceiling


def test_with_a_shard_on_every_rank_the_rule_for_one_row_is_the_best_choice():
    """One link: each row that is cheaper hot makes the step shorter. The link keeps 1 - 1/W of what is cold."""
    found = payload("zipf(s=1.05)", 8, hot_steps=32)
    job, rule = found.job, found.on_ranks.rule_rows
    best = found.on_ranks.best.hot
    assert 0.7 * rule < best < 1.3 * rule
    assert job.cold_nbytes == 68 and job.hot_nbytes == 64


def test_where_servers_are_few_the_rule_for_one_row_is_only_a_limit():
    found = payload("zipf(s=1.05)", 8)
    assert found.on_servers.rule_rows == 5_000_000 > found.on_servers.best.hot


# ---- whether it pays ----


@pytest.mark.parametrize("skew", [0.7, 0.9, 1.05, 1.2])
def test_with_a_shard_on_every_rank_hot_rows_do_not_pay(skew):
    choice = sim.rows_cost(f"zipf(s={skew})").on_ranks
    assert not choice.pays and choice.chosen is choice.plain and choice.chosen.hot == 0
    assert "do not pay (H = 0)" in choice.verdict and "\n" not in choice.verdict
    assert 1.0 <= choice.gain < PAYS_FROM


@pytest.mark.parametrize("skew", [0.7, 0.9, 1.05, 1.2])
def test_with_a_server_for_4_ranks_they_take_2_to_3_4_times(skew):
    for world in (4, 8):
        choice = sim.rows_cost(f"zipf(s={skew})", world=world).on_servers
        assert choice.pays and choice.chosen is choice.best
        assert 2.0 <= choice.gain <= 3.5


def test_where_all_rows_are_alike_and_few_nothing_is_hot_on_every_rank():
    choice = sim.rows_cost(zipf(0, 10**9)).on_ranks
    assert choice.best.hot == 0 and choice.gain == 1.0 and "no number gains" in choice.verdict


def test_gains_grow_with_skew_and_fall_with_servers():
    job = RowsJob(framing=RowFraming(headers=False))
    found = np.array([gains(zipf(skew), job, [1, 2, 4, 8], 8) for skew in (0.6, 0.8, 1.0, 1.2)])
    assert (np.diff(found, axis=0) > 0).all() and (np.diff(found, axis=1) < 0).all()
    assert gains(zipf(1.2), job, [8], 8)[0] >= gain_on_ranks(zipf(1.2), job, 8)


def test_a_faster_server_is_as_good_as_more_servers():
    one = sim.rows_cost("zipf(s=1.05)", world=8, servers=1, server_rate="800Mbit")
    four = sim.rows_cost("zipf(s=1.05)", world=8, servers=4)
    assert one.job.ratio == four.job.ratio == 2
    assert one.on_servers.gain == pytest.approx(four.on_servers.gain, rel=0.01)


# ---- expected values against samples ----


@pytest.mark.parametrize("skew", [0.7, 1.05, 1.2])
def test_expected_unique_rows_and_union_are_those_of_a_sampled_step(skew):
    world, look_ups, rows = 4, 20_000, 200_000
    law, rng = zipf(skew, rows), np.random.default_rng(7)
    chance = np.arange(1, rows + 1) ** -skew
    edges = np.cumsum(chance) / chance.sum()
    unique, union, hot = [], [], []
    for _ in range(5):
        drawn = [np.unique(np.searchsorted(edges, rng.random(look_ups))) for _ in range(world)]
        every = np.unique(np.concatenate(drawn))
        unique += [len(each) for each in drawn]
        union.append(len(every))
        hot.append((every < 1000).sum())
    touched = law.touched(look_ups, world)
    assert np.mean(unique) == pytest.approx(touched.unique[-1], rel=0.01)
    assert np.mean(union) == pytest.approx(touched.union[-1], rel=0.01)
    assert np.mean(hot) == pytest.approx(touched.of_hottest(1000)[2], rel=0.01)


@pytest.mark.parametrize("skew", [0, 0.7, 1.0, 1.05, 2])
def test_runs_of_rows_are_as_good_as_rows_one_by_one(skew):
    rows = 1_000_003
    chance = np.arange(1, rows + 1) ** -float(skew)
    chance /= chance.sum()
    with np.errstate(divide="ignore"):
        q = -np.expm1(106_496 * np.log1p(-chance))
        u = -np.expm1(8 * np.log1p(-q))
    touched = zipf(skew, rows).touched(106_496, 8)
    for hot in (1, 1000, 70_000, 1 << 18, 700_001, rows):
        exact = chance[:hot].sum(), q[:hot].sum(), u[:hot].sum()
        assert touched.of_hottest(hot) == pytest.approx(exact, rel=1e-6)
    assert zipf(skew, rows).row_count == rows


def test_criteo_has_26_tables_and_33762577_rows():
    law = criteo(1.05)
    assert (law.tables, law.row_count) == (26, 33_762_577)
    assert (law.rows * law.chance * law.share).sum() == pytest.approx(1)


def test_a_trillion_rows_take_no_longer():
    assert len(zipf(1.05, 10**12).rows) < 200_000
    assert sim.rows_cost(zipf(1.05, 10**12)).ddp.time_s > sim.rows_cost(zipf(1.05)).ddp.time_s


# ---- traces ----


def test_a_trace_is_a_law_by_its_counts(tmp_path):
    keys = np.repeat(np.array([7, 3, 2**40, 5]), [50, 30, 15, 5])
    np.save(tmp_path / "keys.npy", keys.reshape(10, 10))
    (tmp_path / "keys.txt").write_text("\n".join(map(str, keys)) + "\n")
    (tmp_path / "words.txt").write_text(" ".join(f"user{key}\tx" for key in keys)[:-2])
    numbers, text = (parse_popularity(str(tmp_path / name)) for name in ("keys.npy", "keys.txt"))
    assert numbers.chance.tolist() == text.chance.tolist() == [0.5, 0.3, 0.15, 0.05]
    assert numbers.look_ups == 100 and numbers.row_count == 4 and numbers.skew is None
    words = parse_popularity(str(tmp_path / "words.txt"))
    assert words.row_count == 5 and words.look_ups == 199
    assert sim.rows_cost(tmp_path / "keys.npy").touched.unique[-1] == pytest.approx(4)


def test_a_text_is_read_in_parts_without_breaking_a_key(tmp_path):
    keys = np.random.default_rng(1).integers(0, 10**9, 200_000)
    keys[::2] = keys[0]
    (tmp_path / "keys.txt").write_text("\n".join(map(str, keys)))
    assert (tmp_path / "keys.txt").stat().st_size > 1 << 20
    found = parse_popularity(str(tmp_path / "keys.txt"))
    assert found.look_ups == len(keys) and found.row_count == len(np.unique(keys))


def test_counts_give_the_skew_of_a_zipf_law():
    counts = (1e9 * np.arange(1, 200_001) ** -0.9).astype(np.int64)
    assert of_counts("counts", counts).skew == pytest.approx(0.9, abs=0.01)


def test_ngrams_of_a_small_library(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("ab = ab + 1\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "b.py").write_text("not_read = 1")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    calls = []
    found = parse_popularity("ngrams(rows=1000000)", lambda done, total: calls.append((done, total)))
    assert found.look_ups == 5 + 4 + 3  # ab = ab + 1
    assert found.row_count == 4 + 4 + 3  # ab twice
    assert calls == [(0, 1)]
    (tmp_path / "a.py").unlink()
    with pytest.raises(ConfigError, match=r"not as \.py files"):
        parse_popularity("ngrams")


def test_a_trace_that_is_none_gets_one_sentence(tmp_path):
    np.save(tmp_path / "floats.npy", np.ones(3))
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "none.npy", np.zeros(0, np.int64))
    (tmp_path / "empty.npy").touch()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "one.txt").write_bytes(b"x" * 3_000_000)
    (tmp_path / "folder.txt").mkdir()
    for name in (
        "floats.npy",
        "pickled.npy",
        "none.npy",
        "empty.npy",
        "empty.txt",
        "one.txt",
        "folder.txt",
        "absent.npy",
    ):
        with pytest.raises(ConfigError) as refused:
            parse_popularity(str(tmp_path / name))
        assert "; " in str(refused.value), refused.value


# ---- packets ----


def test_the_headers_are_those_of_the_wire():
    from tacit._core import WIRE_MOST_PAYLOAD, wire_elements
    from tacit.aggregator import wire

    assert wire.HEADER.size == HEADER_NBYTES and WIRE_MOST_PAYLOAD == MOST_PAYLOAD_NBYTES

    for mtu in (1500, 3500, 9000, 20_000):
        assert RowFraming(mtu).lanes_in_packet() == wire_elements(3, mtu)


def test_22_rows_of_16_numbers_fit_into_a_packet_at_mtu_1500():
    framing = RowFraming(1500)
    assert framing.lanes_in_packet() == 360 and framing.rows_nbytes == 1434
    head = UDP_NBYTES + HEADER_NBYTES
    assert framing.lanes(22 * 16, unit=16) == 22 * 64 + head
    assert framing.lanes(22 * 16 + 1, unit=16) == 22 * 64 + 4 + 2 * head
    assert framing.rows(21, 68, 1) == 21 * 68 + head + 16
    assert framing.rows(22, 68, 1) == 22 * 68 + 2 * (head + 16)
    assert framing.rows(22, 68, 2) == 22 * 68 + 2 * (head + 16)  # 11 to each of two
    assert framing.rows(3, 68, 100) == 3 * (68 + head + 16)  # 97 flows have none
    assert framing.stream(1448) == 1448 + 66 and framing.stream(1449) == 1449 + 2 * 66
    assert RowFraming(1500, headers=False).rows(22, 68, 2) == 22 * 68


def test_passes_of_a_packet_on_a_switch():
    framing = RowFraming(1500)
    need = switch_need(framing, 16, 64)
    assert (need.rows_in_packet, need.passes, need.rows_in_one_pass) == (22, 6, 4)  # ceil(352 / 64), 64 / 16
    assert need.one_pass_nbytes_ratio == pytest.approx((64 + 64 / 4) / (64 + 64 / 22))
    wide = switch_need(framing, 128, 64)
    assert (wide.rows_in_one_pass, wide.passes_of_one_row, wide.one_pass_nbytes_ratio) == (0, 2, None)
    assert switch_need(framing, 16, 352).passes == 1
    assert switch_need(framing, 1, 10**6).one_pass_nbytes_ratio == 1


# ---- bytes by direction, codecs, records ----


def test_what_ranks_send_servers_receive():
    found = sim.rows_cost("zipf(s=1.05)", world=8, servers=2)
    for time in (found.on_servers.plain, found.on_servers.best):
        cold = [leg for leg in time.legs if leg.name in ("pull keys", "values", "push")]
        assert len(cold) == 3
        for leg in cold:
            assert 8 * leg.rank_out_nbytes == pytest.approx(2 * leg.server_in_nbytes)
            assert 8 * leg.rank_in_nbytes == pytest.approx(2 * leg.server_out_nbytes)


@pytest.mark.parametrize("codec", ["int8", "bf16", "none"])
def test_what_is_known_of_a_codec_is_what_the_codec_says(codec):
    from tacit.strategy import parse_codec

    numel = 1 << 20
    nbytes = 4 * numel if codec == "none" else parse_codec(codec).nbytes(numel)
    from tacit.sim.rows import _CODECS

    assert _CODECS[codec] * numel == nbytes


def test_any_codec_that_adds_can_be_costed():
    four = sim.rows_cost(codec="int4")
    assert four.replicated.time_s < sim.rows_cost().replicated.time_s
    assert "int4" in four.replicated.scheme
    with pytest.raises(PairingError):
        sim.rows_cost(codec="topk(0.01)")


def test_thc_takes_8_bits_down_as_far_as_its_table_allows():
    eight, nine = (sim.rows_cost(world=world, headers=False).star for world in (8, 9))
    assert eight.legs[1].rank_in_nbytes == 2 * eight.legs[1].rank_out_nbytes
    assert nine.legs[1].rank_in_nbytes == 4 * nine.legs[1].rank_out_nbytes


def test_a_record_is_json():
    record = json.loads(json.dumps(sim.rows_cost().as_record(), allow_nan=False))
    assert record["hot_on_servers"]["best_hot"] == 1 << 18
    assert len(record["schemes"]) == 10 and record["schemes"][0]["legs"][0]["rank_out_nbytes"] > 0


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"world": 1}, "from 2 to"),
        ({"world": MOST_WORLD + 1}, "from 2 to 2,184"),
        ({"servers": 0}, "from 1 to"),
        ({"width": 358}, "from 1 to 357"),
        ({"width": 2.0}, "whole number"),
        ({"mtu": 100}, "from 576"),
        ({"key_nbytes": 5}, "4 or 8"),
        ({"rate": float("nan")}, "1bit or more"),
        ({"rate": "0bit"}, "1bit or more"),
        ({"union_key_nbytes": 0}, "above 0"),
        ({"hot": -1}, "from 0"),
        ({"popularity": "zipf(s=11)"}, "between 0"),
        ({"popularity": "zipf(s=nan)"}, "not a number"),
        ({"popularity": "zipf(rows=1.5)"}, "whole number"),
        ({"popularity": "zipf(skew=1)"}, "no option"),
        ({"popularity": "zipf(1.05)"}, "without its option"),
        ({"popularity": "zip"}, "did you mean 'zipf'"),
        ({"popularity": "keys.csv"}, r"\.txt or \.npy"),
    ],
    ids=str,
)
def test_a_value_outside_of_its_limits_gets_one_sentence(options, way):
    with pytest.raises(ConfigError, match=way):
        sim.rows_cost(**options)


def test_a_wide_row_needs_a_large_mtu():
    assert sim.rows_cost(width=512, mtu=9000).on_servers.plain.time_s > 0


def test_no_torch_is_imported():
    import subprocess

    code = "import sys; from tacit import sim; sim.rows_cost(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_ngrams_of_the_library_that_the_table_was_computed_with():
    law = parse_popularity("ngrams")
    if law.look_ups != 21_886_029:
        pytest.skip(
            f"this Python has another library: {law.look_ups:,} look-ups, not those of 3.11.7 with its tests"
        )
    assert law.row_count == pytest.approx(1.98e6, rel=0.001) and law.skew == pytest.approx(0.99, abs=0.005)
    table = (937, 507, 291, 170, 221, 210, 1011, 674, 405)
    assert list(cells(payload(law)).values()) == pytest.approx(table, rel=0.01)
    share, unique, _ = payload(law).touched.of_hottest(32_768)
    assert share == pytest.approx(0.70, abs=0.005)
    assert unique / payload(law).touched.unique[-1] == pytest.approx(0.33, abs=0.005)
