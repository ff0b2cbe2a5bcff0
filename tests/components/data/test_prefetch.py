from __future__ import annotations

import gc
import threading
import traceback

import pytest

from hyper_parallel.components.data.prefetch import BackgroundPrefetcher


def broken_source():
    yield 1
    yield 2
    raise ValueError("document 3 is broken")


def test_items_come_in_order_and_end():
    assert list(BackgroundPrefetcher(iter(range(100)), depth=3)) == list(range(100))


def test_an_error_comes_after_the_items_before_it_with_its_own_traceback():
    prefetcher = BackgroundPrefetcher(broken_source(), depth=4)
    assert [next(prefetcher), next(prefetcher)] == [1, 2]
    for _ in range(2):  # asked again, it answers again instead of waiting
        with pytest.raises(ValueError, match="document 3 is broken") as caught:
            next(prefetcher)
        assert "broken_source" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    prefetcher.close()


def test_no_more_than_depth_items_are_taken_ahead():
    taken = []
    third = threading.Event()

    def source():
        for i in range(100):
            taken.append(i)
            if i == 3:
                third.set()
            yield i

    prefetcher = BackgroundPrefetcher(source(), depth=2)
    assert next(prefetcher) == 0
    assert third.wait(20)
    threading.Event().wait(0.05)
    # One handed out, two in the queue and one in the thread's hand.
    assert taken == [0, 1, 2, 3]
    prefetcher.close()


@pytest.mark.parametrize("consumed", [0, 1])
def test_close_stops_a_thread_that_waits_for_room(consumed):
    threads = set(threading.enumerate())
    prefetcher = BackgroundPrefetcher(iter(range(10**9)), depth=1)
    for _ in range(consumed):
        next(prefetcher)
    prefetcher.close()
    assert set(threading.enumerate()) <= threads
    with pytest.raises(RuntimeError, match="the prefetcher is closed"):
        next(prefetcher)


def test_a_forgotten_prefetcher_leaves_no_thread():
    threads = set(threading.enumerate())
    prefetcher = BackgroundPrefetcher(iter(range(10**9)), depth=1)
    assert next(prefetcher) == 0
    del prefetcher
    gc.collect()
    assert set(threading.enumerate()) <= threads


def test_a_thread_that_cannot_be_stopped_is_reported(monkeypatch, caplog):
    monkeypatch.setattr("hyper_parallel.components.data.prefetch._JOIN_SECONDS", 0.05)
    release = threading.Event()

    def stuck():
        release.wait()
        yield 0

    prefetcher = BackgroundPrefetcher(stuck(), depth=1)
    prefetcher.close()
    assert "did not stop within 0.05 s" in caplog.text
    release.set()
