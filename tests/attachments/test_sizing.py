"""bucket="auto": measured, agreed, and kept over a resumption."""

import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, own_state, train

import tacit
from tacit.attachments import sizing
from tacit.attachments.sizing import best_nbytes


def test_the_best_size_is_where_one_more_latency_costs_what_a_longer_tail_does():
    probes = 4 * 2**16, 4 * 2**20

    def best(nbytes, latency_s, bytes_per_s):
        return best_nbytes(nbytes, *(latency_s + probe / bytes_per_s for probe in probes))

    assert best(400e6, 1e-3, 100e6) == 2**23  # sqrt(4e8 * 1e-3 * 1e8) = 6.3e6
    assert best(400e6, 4e-3, 100e6) == 2**24  # four times the latency: buckets twice as long
    assert best(4e6, 1e-3, 10e6) == 2**18  # no smaller ones
    assert best(400e9, 1e-2, 10e9) == 2**26  # nor longer ones
    assert best_nbytes(400e6, 0.0, 0.0) == 2**24  # a clock too coarse


def _sized(rank, world, wrap, states, measured):
    sizing.best_nbytes = lambda *figures: measured or best_nbytes(*figures)
    model = DDP(deep()) if wrap else deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = tacit.attach(model, optimizer, "ef(int8)", bucket="auto")
    try:
        if states:
            handle.load_state_dict(states)
        train(model, optimizer, rank, range(2))
        return handle.bucket_nbytes, own_state(handle), handle.stats.as_dict()["steps"]
    except tacit.TacitError as error:
        return str(error)
    finally:
        handle.close()


@pytest.mark.parametrize("wrap", [True, False])
def test_all_ranks_take_the_size_that_was_measured_and_a_checkpoint_names_it(ranks, wrap):
    found = ranks.run(2, _sized, wrap, None, None)
    sizes = {nbytes for nbytes, _, _ in found}
    assert len(sizes) == 1 and sizes <= {2**power for power in range(18, 27)}
    assert all(state["bucket"] == nbytes and steps == 2 for nbytes, state, steps in found)


def test_a_run_that_measures_another_size_does_not_resume_with_other_bits(ranks):
    states = [state for _, state, _ in ranks.run(2, _sized, True, None, 2**20)]
    assert [steps for _, _, steps in ranks.run(2, _sized, True, states, 2**20)] == [2, 2]
    for text in ranks.run(2, _sized, True, states, 2**19):
        assert "buckets of 1048576 bytes" in text and "attach with bucket=1048576" in text


def _refused(rank, world):
    found = []
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for text in ("local(4) / none", "adaptive / none / gossip"):
        try:
            tacit.attach(model, optimizer, text, bucket="auto")
        except tacit.TacitError as error:
            found.append(str(error))
    return found


def test_rules_that_merge_models_take_a_size(ranks):
    for found in ranks.run(2, _refused):
        assert len(found) == 2 and all("bucket='auto' is for DDP and plain modules" in text for text in found)


def _wide(rank, world, cap):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tacit.attach(DDP(deep(), bucket_cap_mb=cap), None, "int8", bucket="20kB").close()
    return [str(one.message) for one in seen if "bucket_cap_mb" in str(one.message)]


def test_buckets_of_ddp_that_leave_nothing_to_overlap_are_named_with_the_line_to_write(ranks):
    for (text,) in ranks.run(2, _wide, 25):
        assert (
            "in buckets of 26.2 MB, so tacit's of 20 kB leave when the backward pass is almost over" in text
        )
        assert text.endswith("write DistributedDataParallel(..., bucket_cap_mb=0.0190735)")
    assert ranks.run(2, _wide, 0.02) == [[], []]
