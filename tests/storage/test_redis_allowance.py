"""Leave for large replies."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from forestage.storage.redis.allowance import Allowance


@given(st.lists(st.integers(1, 12), max_size=60), st.data())
def test_the_limit_holds_but_for_two(sizes: list[int], data: st.DataObject) -> None:
    allowance = Allowance(20)
    due: list[int] = []
    for size in sizes:
        given = allowance.take(size)
        assert given == (len(due) < 2 or sum(due) + size <= 20)
        if given:
            due.append(size)
        elif data.draw(st.booleans()):
            allowance.give_back(due.pop(data.draw(st.integers(0, len(due) - 1))))
        assert allowance.due_bytes == sum(due)
        allowance.check_integrity()


def test_waiting_ends_when_something_is_given_back() -> None:
    allowance = Allowance(10)
    for _ in range(2):
        assert allowance.take(8)
    assert not allowance.take(8)
    waiter = threading.Thread(target=allowance.wait, args=(60.0,))
    waiter.start()
    while waiter.is_alive():
        allowance.give_back(8)
        waiter.join(0.01)
        allowance.take(8)
    allowance.give_back(8)
    allowance.give_back(8)
    allowance.wait(60.0)  # nothing is due: there is nothing to wait for
    allowance.check_integrity()
