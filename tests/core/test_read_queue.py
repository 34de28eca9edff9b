"""Whose page is read next: fair by bytes, strict by priority, never twice."""

from collections import Counter

from forestage.core.job import Job
from forestage.core.read_queue import ReadQueue
from support.engine_driver import job_of, kv_model, load_of

PAGE = kv_model().components[0].slot_bytes


def _lined_up(queue: ReadQueue, name: str, pages: int, *, priority: int = 0) -> Job:
    job = job_of(name, pages, priority=priority)
    queue.add(job, [load_of(job, page) for page in range(pages)])
    return job


def _next(queue: ReadQueue, pages: int = 1) -> list[str]:
    """Hand out one batch; return the keys."""
    batch = queue.next_batch(pages * PAGE)
    if batch is None:
        return []
    for load in batch[1]:
        assert not load.filling
        load.filling = True
    return [load.key.rstrip(b".").decode() for load in batch[1]]


def test_prefix_order_in_batches_of_the_wanted_size() -> None:
    queue = ReadQueue()
    _lined_up(queue, "a", 5)
    assert [_next(queue, 2) for _ in range(4)] == [["a00000", "a00001"], ["a00002", "a00003"], ["a00004"], []]


def test_at_least_one_page_whatever_its_size() -> None:
    queue = ReadQueue()
    job = _lined_up(queue, "a", 3)
    queue.add_in_front(job, [load_of(job, 2)])
    for batch_bytes in (0, 1, 0, 1):
        batch = queue.next_batch(batch_bytes)
        assert batch is not None
        assert len(batch[1]) == 1


def test_a_small_job_passes_a_huge_one_after_one_batch() -> None:
    queue = ReadQueue()
    _lined_up(queue, "huge", 1000)
    for _ in range(40):
        _next(queue, 4)
    _lined_up(queue, "small", 2)
    handed_out = _next(queue, 4) + _next(queue, 4)
    assert {"small00000", "small00001"} <= set(handed_out)


def test_equal_jobs_get_equal_bytes() -> None:
    queue = ReadQueue()
    for name in "abc":
        _lined_up(queue, name, 60)
    served = Counter(_next(queue, 3)[0][0] for _ in range(30))
    assert served == {"a": 10, "b": 10, "c": 10}


def test_a_newcomer_does_not_catch_up_on_what_was_read_before_it_came() -> None:
    queue = ReadQueue()
    _lined_up(queue, "old", 300)
    for _ in range(50):
        _next(queue)
    _lined_up(queue, "new", 300)
    served = Counter(_next(queue)[0][:3] for _ in range(40))
    assert abs(served["old"] - served["new"]) <= 1


def test_higher_priority_goes_first() -> None:
    queue = ReadQueue()
    _lined_up(queue, "low", 2, priority=-1)
    _lined_up(queue, "mid", 2)
    _lined_up(queue, "top", 2, priority=7)
    names = [_next(queue)[0][:3] for _ in range(6)]
    assert names == ["top", "top", "mid", "mid", "low", "low"]


def test_what_one_priority_was_served_is_no_debt_in_another() -> None:
    queue = ReadQueue()
    _lined_up(queue, "waiting", 100, priority=-1)
    _lined_up(queue, "urgent", 500, priority=1)
    while _next(queue, 10)[0].startswith("urgent"):
        pass
    _lined_up(queue, "small", 2, priority=-1)
    assert any(key.startswith("small") for key in _next(queue, 10) + _next(queue, 10))


def test_what_is_in_front_goes_before_everything_and_gives_its_job_no_more_turns() -> None:
    queue = ReadQueue()
    first = _lined_up(queue, "a", 200)
    _lined_up(queue, "b", 200, priority=0)
    for _ in range(100):
        _next(queue)
    again = load_of(job_of("x", 1), 0)
    again.subscribers = [first]
    queue.add_in_front(first, [again])
    assert _next(queue) == ["x00000"]
    served = Counter(_next(queue)[0][0] for _ in range(40))
    assert abs(served["a"] - served["b"]) <= 1


def test_what_is_in_front_goes_out_together() -> None:
    queue = ReadQueue()
    job = job_of("a", 4)
    queue.add_in_front(job, [load_of(job, page) for page in range(3)])
    assert _next(queue, 2) == ["a00000", "a00001"]
    assert _next(queue, 2) == ["a00002"]
    assert _next(queue, 2) == []


def test_what_is_in_front_is_not_kept_for_jobs_that_end_while_all_readers_hang() -> None:
    queue = ReadQueue()
    for number in range(3000):
        job = job_of(f"j{number}", 1)
        queue.add_in_front(job, [load_of(job, 0)])
        queue.remove(job)
    assert (len(queue), len(queue._front)) == (0, 0)


def test_a_batch_is_of_one_model_even_from_the_front() -> None:
    queue = ReadQueue()
    jobs = [job_of(f"j{number}", 1) for number in range(2000)]
    for number, job in enumerate(jobs):
        if number % 2:
            job.layout = kv_model(name="other")
        queue.add_in_front(job, [load_of(job, 0)])
    for job in jobs[:-2]:
        queue._front[job][0].subscribers.clear()
    assert _next(queue, 9) == ["j199800000"]
    assert _next(queue, 9) == ["j199900000"]
    assert _next(queue, 9) == []


def test_a_load_in_two_lines_or_twice_in_one_is_handed_out_once() -> None:
    queue = ReadQueue()
    one, two = job_of("a", 3), job_of("b", 3)
    shared = load_of(one, 0)
    shared.subscribers.append(two)
    queue.add(one, [shared, shared])
    queue.add(two, [shared])
    queue.add_in_front(two, [shared, shared])
    assert _next(queue, 9) == ["a00000"]
    assert _next(queue, 9) == []
    shared.filling = False  # its read ended before it began
    queue.add(one, [shared, shared])
    assert _next(queue, 9) == ["a00000"]
    assert _next(queue, 9) == []


def test_who_left_is_passed_over() -> None:
    queue = ReadQueue()
    gone = _lined_up(queue, "gone", 5)
    left_one = job_of("part", 3)
    loads = [load_of(left_one, page) for page in range(3)]
    queue.add(left_one, loads)
    loads[1].subscribers.clear()
    queue.remove(gone)
    queue.remove(gone)
    assert _next(queue, 9) == ["part00000", "part00002"]
    assert _next(queue) == []


def test_nothing_is_kept_of_those_that_left() -> None:
    queue = ReadQueue()
    _lined_up(queue, "busy", 5000)
    for number in range(500):
        queue.remove(_lined_up(queue, f"j{number}", 1, priority=-number))
    assert len(queue._turns) <= 20
    assert (len(queue._lines), len(queue._ranks), len(queue)) == (1, 1, 5000)
