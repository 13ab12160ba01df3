"""A log that fails, blocks or is flooded loses sentences, which are counted; who writes to it notices nothing."""

import threading
from contextlib import closing

from tacit.aggregator.control.notices import MOST_WAITING, Notices


def test_sentences_arrive_in_order_on_one_line_and_close_waits_for_the_last():
    written: list[str] = []
    with closing(Notices(written.append)) as notices:
        for number in range(100):
            notices.add(f"sentence {number}")
        notices.add("a\nb\x1b[2J\x9b\u202ec\r\x00\ud800")
    assert written[:100] == [f"sentence {number}" for number in range(100)]
    assert written[100] == r"a b\x1b[2J\x9b\u202ec\r\x00\ud800" and notices.lost == 0


def test_a_log_that_raises_is_counted_and_tried_again():
    written: list[str] = []

    def write(sentence: str) -> None:
        if sentence != "the disk has room again":
            raise OSError(28, "No space left on device")
        written.append(sentence)

    with closing(Notices(write)) as notices:
        for _ in range(5):
            notices.add("lost")
        notices.add("the disk has room again")
    assert notices.lost == 5 and written == ["the disk has room again"]


def test_a_log_that_blocks_holds_up_nobody():
    blocked = threading.Event()

    def write(sentence: str) -> None:
        blocked.wait(60)

    notices = Notices(write)
    for _ in range(MOST_WAITING + 100):
        notices.add("nobody reads this")
    assert 99 <= notices.lost <= 100  # one may be on its way
    notices.close()  # does not wait for ever
    blocked.set()
