"""Who has to go when too many are connected."""

from hypothesis import given
from hypothesis import strategies as st

from forestage.crowd import FRESH_S, SPARE, Crowd

MOST = 4


class Guest:
    """A connection that notes that it was dismissed."""

    gone = False

    def dismiss(self) -> None:
        self.gone = True


def test_the_longest_waiting_goes_first_and_nobody_who_is_served() -> None:
    crowd = Crowd(MOST)
    guests = [Guest() for _ in range(MOST)]
    for second, guest in enumerate(guests):
        crowd.enter(guest, second)
    crowd.serve(guests[0])
    late = [Guest() for _ in range(2)]
    for guest in late:
        crowd.enter(guest, 10)
    assert [guest.gone for guest in guests] == [False, True, True, False]
    crowd.wait(guests[0], 11)
    crowd.enter(Guest(), 12)
    assert [guest.gone for guest in guests] == [False, True, True, True]
    assert not any(guest.gone for guest in late)
    crowd.check_integrity()


def test_who_has_just_come_is_let_ask() -> None:
    crowd = Crowd(MOST)
    guests = [Guest() for _ in range(MOST + SPARE)]
    for guest in guests:
        crowd.enter(guest, 0)
    assert not any(guest.gone for guest in guests)
    assert not crowd.has_room(FRESH_S / 2)
    crowd.enter(Guest(), FRESH_S / 2)
    assert [guest.gone for guest in guests] == [True, *[False] * (MOST + SPARE - 1)]
    assert crowd.has_room(FRESH_S)
    assert len(crowd) == MOST


def test_with_everybody_served_the_last_to_come_goes() -> None:
    crowd = Crowd(MOST)
    for _ in range(MOST + SPARE):
        guest = Guest()
        crowd.enter(guest, 0)
        crowd.serve(guest)
    last = Guest()
    crowd.enter(last, 100)
    assert last.gone
    assert not crowd.has_room(1000)
    crowd.check_integrity()


@given(
    st.lists(st.tuples(st.sampled_from(["enter", "serve", "wait", "leave", "look"]), st.integers(0, 200)), max_size=400)
)
def test_whatever_happens_the_law_holds(steps: list[tuple[str, int]]) -> None:
    crowd, guests, now = Crowd(MOST), [Guest()], 0.0
    crowd.enter(guests[0], now)
    for what, number in steps:
        guest = guests[number % len(guests)]
        now += number / 1000
        if what == "enter":
            guests.append(Guest())
            crowd.enter(guests[-1], now)
        elif what == "serve":
            crowd.serve(guest)
        elif what == "wait":
            crowd.wait(guest, now)
        elif what == "leave":
            crowd.leave(guest)
        else:
            crowd.has_room(now)
        crowd.check_integrity()
