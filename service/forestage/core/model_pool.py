"""The host pool of one model: slots, resident pages and loads of each component, moved together.

Law, per component: free + reserved + filling + resident == capacity; the resident slots are those of the index, the
reserved and filling ones those of the loads and those lent to engines. Everything that changes one of them changes the
others here. A dirty page is resident and held: once by whoever sees to it that L3 gets it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from forestage.core.index import PageIndex
from forestage.core.job import Job
from forestage.core.layout import ModelLayout
from forestage.core.loads import Load
from forestage.core.plan import Plan, make_plan
from forestage.core.prefix import PageStatus, PrefixMap
from forestage.core.shared_index import SharedIndex
from forestage.core.slots import SlotEvents, Slots, SlotState
from forestage.core.tenants import TenantShare
from forestage.core.wants import Wants

__all__ = ["Found", "ModelPool"]

#: By component: the slot of each page of a prefix, None where it is not resident.
Found = Sequence[list[int | None]]

#: What queued jobs and hints will ask for is kept in at most this part of the pool: there must be room to serve others.
_WANTED_FRACTION = 0.8

# Plain numbers: these are written once a page.
_LOADING, _IDLE, _HELD = int(PageStatus.LOADING), int(PageStatus.IDLE), int(PageStatus.HELD)


class ModelPool:
    """All slots of one model.

    `pinned_fraction` bounds what may be reserved, filling or held at once, per component; `write_reserve` is the part
    that grants leave to writes.
    `shares` are those of the tenants, by number; without any, all pages are in one order of eviction.
    """

    def __init__(
        self,
        layout: ModelLayout,
        capacities: Sequence[int],
        events: Sequence[SlotEvents],
        pinned_fraction: float = 1.0,
        write_reserve: float = 0.0,
        shares: Sequence[TenantShare] = (),
    ) -> None:
        self.layout = layout
        self.slots = [Slots(capacity) for capacity in capacities]
        self._pinnable = [max(1, int(capacity * pinned_fraction)) for capacity in capacities]
        bounds = zip(capacities, self._pinnable, strict=True)
        self._shared = [SharedIndex(capacity, shares, pinnable) for capacity, pinnable in bounds] if shares else []
        self.index: Sequence[PageIndex] = self._shared or [PageIndex(capacity) for capacity in capacities]
        self._inherited = len(shares)
        whole = layout.every_page[0]
        marks = [self.index[whole], *(index for c, index in enumerate(self.index) if c != whole)]
        smallest = min(capacities[c] for c in layout.every_page)
        self.wants = Wants(marks, max(1, int(smallest * _WANTED_FRACTION)))
        self.loads: list[dict[bytes, Load]] = [{} for _ in capacities]
        self._stalled: list[set[Load]] = [set() for _ in capacities]
        self._lent: list[set[int]] = [set() for _ in capacities]
        self._dirty: list[set[int]] = [set() for _ in capacities]
        self._events = events
        self._write_reserve = [
            min(int(capacity * write_reserve), pinnable - 1)
            for capacity, pinnable in zip(capacities, self._pinnable, strict=True)
        ]

    def tell(self, events: Sequence[SlotEvents]) -> Sequence[SlotEvents]:
        """Have others mirror the slots from now on, one a component; returns who did before."""
        before, self._events = self._events, events
        return before

    def room(self, component: int, tenant: int = 0) -> int:
        """Slots that a grant may take now: as a write, and what is kept for writes is out of its reach."""
        return self._room(component, tenant, max(0, self._write_reserve[component] - self.unsettled(component)))

    def write_room(self, component: int, tenant: int = 0) -> int:
        """Slots that a write may take now: free or evictable, within what may still be pinned and within the shares."""
        return self._room(component, tenant, 0)

    def _room(self, component: int, tenant: int, kept: int) -> int:
        free = self.slots[component].free
        available = free + self.index[component].evictable
        pinned = self.slots[component].capacity - available
        room = min(available, self._pinnable[component] - pinned) - kept
        if self._shared:
            room = min(room, self._shared[component].room(tenant, free, kept))
        return max(0, room)

    def unsettled(self, component: int) -> int:
        """Slots that writes use now: lent to engines, or with a page that L3 does not have yet."""
        return len(self._lent[component]) + len(self._dirty[component])

    def dirty(self, component: int) -> int:
        """Resident pages that L3 does not have yet."""
        return len(self._dirty[component])

    def count_states(self, component: int, slots: range) -> tuple[int, ...]:
        """Count some slots: free, resident, held, on their way, dirty; a dirty one counts only as that."""
        free, reserved, filling, resident = self.slots[component].count_states(slots)
        held = self.index[component].count_held(slots)
        dirty = len(self._dirty[component].intersection(slots)) if self._dirty[component] else 0
        return free, resident - held, held - dirty, reserved + filling, dirty

    def look_up(self, keys: Sequence[bytes]) -> Found:
        """Return where each page is, by component: its slot, None where it is not resident.

        Valid until anything becomes resident or is evicted. Looking at thousands of keys takes longer than anything
        that is done with the answer, so a step that needs it more than once passes it on.
        """
        return [index.look_up(keys) for index in self.index]

    def host_run(self, found: Found, device_pages: int) -> int:
        """Return how far a prefix is resident without a gap, all components that every page needs, as a length."""
        runs = []
        for c in self.layout.every_page:
            slots = found[c]
            runs.append(slots.index(None, device_pages) if None in slots[device_pages:] else len(slots))
        return min(runs)

    def survey(
        self,
        keys: Sequence[bytes],
        device_pages: int,
        masks: Sequence[bytes | bytearray] | None,
        loading: bool = True,
        found: Found | None = None,
    ) -> PrefixMap:
        """Say what every page of a prefix is now; `masks[c][i]` is 1 where L3 has it, None when it was not asked.

        With `loading` false, pages that are only on their way count as not there. `found` is what `look_up` says.
        """
        found = self.look_up(keys) if found is None else found
        status = []
        for c, index in enumerate(self.index):
            # STORED and ABSENT are 1 and 0, so the mask is the starting point
            of_component = bytearray(masks[c]) if masks is not None else bytearray(len(keys))
            of_component[:device_pages] = bytes(min(device_pages, len(keys)))
            if loading and self.loads[c]:
                loads = self.loads[c]
                for page in range(device_pages, len(keys)):
                    if keys[page] in loads:
                        of_component[page] = _LOADING
            index.mark_resident(found[c], device_pages, of_component, _IDLE, _HELD)
            status.append(of_component)
        return PrefixMap(self.layout, device_pages, status)

    def plan(self, prefix: PrefixMap, tenant: int = 0) -> Plan:
        """Say how much of a prefix could be granted to a tenant now."""
        return make_plan(prefix, [self.room(c, tenant) for c in range(len(self.slots))])

    def fits(self, prefix: PrefixMap, length: int, kept: int, tenant: int = 0) -> bool:
        """Say whether the tail windows of `length` and of `kept` beside it fit into the room there is now."""
        return all(prefix.joint_cost(c, length, kept) <= self.room(c, tenant) for c in self.layout.tails)

    def missing_bytes(self, keys: Sequence[bytes], device_pages: int, found: Found | None = None) -> int:
        """Return the most that a prefetch of this prefix could have to reserve, in bytes of slots."""
        found = self.look_up(keys) if found is None else found
        total = 0
        for c, component in enumerate(self.layout.components):
            first = max(device_pages, len(keys) - component.window) if component.is_tail else device_pages
            missing, loads = found[c][first:].count(None), self.loads[c]
            if missing and loads:  # no page is both resident and on its way
                missing -= sum(map(loads.__contains__, keys[first:]))
            total += min(missing, self.slots[c].capacity) * component.slot_bytes
        return total

    def holdable(self, keys: Sequence[bytes], first: int, length: int, tenant: int = 0) -> int:
        """Return how far a prefix that is resident from page `first` to `length` may be held now, as a length."""
        for c in self.layout.every_page:
            room, index = self.room(c, tenant), self.index[c]
            if room >= length - first:
                continue  # enough, whoever holds them already
            for page in range(first, length):
                room -= not index.is_held(index.find(keys[page]))
                if room < 0:
                    length = page
                    break
        return length

    def reserve(self, component: int, pages: Sequence[int], job: Job) -> None:
        """Take slots for pages of a job that are neither resident nor loading, evicting what is needed beyond the free
        ones; there must be room."""
        loads, keys = self.loads[component], job.keys
        for page, slot in zip(pages, self._take(component, len(pages), job.tenant), strict=True):
            key = keys[page]
            loads[key] = Load(component, key, page, slot, job, [job])

    def _take(self, component: int, count: int, tenant: int) -> list[int]:
        slots = self.slots[component]
        if self._shared:
            return [self._take_shared(component, tenant) for _ in range(count)]
        missing = count - slots.free
        if missing > 0:
            evicted = self.index[component].evict(missing)
            clear = self._events[component].clear
            for slot in evicted:
                clear(slot)
            slots.give_back(*evicted)
        return slots.take(count)

    def _take_shared(self, component: int, tenant: int) -> int:
        slots = self.slots[component]
        if not slots.free:
            self._evict_for(component, tenant)
        slot = slots.take(1)[0]
        self._charge(component, slot, tenant)
        return slot

    def _evict_for(self, component: int, tenant: int) -> None:
        evicted = self._shared[component].evict_for(tenant)
        self._events[component].clear(evicted)
        self.slots[component].give_back(evicted)

    def _charge(self, component: int, slot: int, tenant: int) -> None:
        """Put a slot on a tenant's account, and take its oldest pages away as long as it has more than it may."""
        shared = self._shared[component]
        shared.charge(slot, tenant)
        while shared.above_maximum(tenant):
            self._evict_for(component, tenant)

    def begin(self, load: Load) -> None:
        """A read into the slot starts: readers of the pool must not trust it from now on."""
        self._events[load.component].begin_fill(load.slot)
        self.slots[load.component].begin(load.slot)
        load.filling = True
        load.reader = load.owner

    def unbegin(self, load: Load) -> None:
        """The read was stopped before it was whole, and somebody still wants the page: it will be read anew."""
        self._events[load.component].clear(load.slot)
        self.slots[load.component].unbegin(load.slot)
        load.filling = False
        load.read = None

    def publish(self, load: Load) -> None:
        """The page is whole and verified: resident, held once by each subscriber."""
        c = load.component
        del self.loads[c][load.key]
        self._events[c].publish(load.slot, load.key, load.page)
        self.slots[c].publish(load.slot)
        self.index[c].insert(load.slot, load.key, len(load.subscribers))
        self._arrived(c, load.key)

    def _arrived(self, component: int, key: bytes) -> None:
        if component == self.layout.every_page[0]:
            self.wants.arrived(key)

    def discard(self, load: Load) -> None:
        """Give the slot of a load back; its read has ended or never begun."""
        c = load.component
        if load.stalled:
            self._stalled[c].discard(load)
        else:
            del self.loads[c][load.key]
        if load.filling:
            self._events[c].clear(load.slot)
        if self._shared:
            self._shared[c].uncharge(load.slot)
        self.slots[c].give_back(load.slot)

    def set_stalled(self, load: Load) -> None:
        """Take a filling load out of sight: its key may come elsewhere, its slot stays in use. Idempotent."""
        if load.stalled:
            return
        del self.loads[load.component][load.key]
        self._stalled[load.component].add(load)
        load.stalled = True

    def unsubscribe(self, load: Load, job: Job, *, stop: bool = True) -> None:
        """A job does not want the page any more; the last one to go stops the read.

        With `stop` false the caller calls `stop_unwanted` once it knows that nobody comes back to it.
        """
        load.subscribers.remove(job)
        if not load.subscribers and not load.filling:
            self.discard(load)
        elif stop:
            self.stop_unwanted(load)

    def stop_unwanted(self, load: Load) -> None:
        """Stop the read of a page that nobody wants any more."""
        if not load.subscribers and load.read is not None:
            load.read.stopped = True

    def subscribe(self, load: Load, job: Job) -> None:
        """One more job wants the page of a load."""
        if not load.subscribers:
            load.owner = job
        load.subscribers.append(job)
        if load.read is not None:
            load.read.stopped = False

    def begin_writes(self, component: int, count: int, tenant: int = 0) -> list[int]:
        """Lend slots to an engine, evicting if too few are free; there must be room.

        Each comes back by `commit_writes` or `drop_writes`.
        """
        slots = self._take(component, count, tenant)
        begin_fill = self._events[component].begin_fill
        for slot in slots:
            begin_fill(slot, True)
        self.slots[component].begin_all(slots)
        self._lent[component].update(slots)
        return slots

    def commit_writes(
        self, component: int, slots: Mapping[int, int], keys: Sequence[bytes]
    ) -> list[tuple[Load, list[Job], int]]:
        """Make pages that an engine put into lent slots (by page) resident and dirty; none may be resident yet.

        Returns the loads that wanted one of these pages, who waited for each, and its slot: from now on nobody waits,
        and each of them has a hold on the slot instead. One more hold on each page is the caller's, until it has called
        `set_clean` and released it.
        """
        arrived = []
        loads = self.loads[component]
        for page in filter(lambda page: keys[page] in loads, slots) if loads else ():
            load = loads[keys[page]]
            jobs, load.subscribers = load.subscribers, []
            if load.filling:
                self.set_stalled(load)
                self.stop_unwanted(load)
            else:
                self.discard(load)
            arrived.append((load, jobs, slots[page]))
        index, publish = self.index[component], self._events[component].publish
        lent = slots.values()
        self._lent[component].difference_update(lent)
        for page, slot in slots.items():
            key = keys[page]
            publish(slot, key, page, True)
            index.insert(slot, key, 1, fresh=False)
            self._arrived(component, key)
        self.slots[component].publish_all(lent)
        self._dirty[component].update(lent)
        for _, jobs, slot in arrived:
            index.hold([slot] * len(jobs))
        return arrived

    def drop_writes(self, component: int, slots: Collection[int]) -> None:
        """Take lent slots back; nobody writes to them any more."""
        self._lent[component].difference_update(slots)
        clear = self._events[component].clear
        for slot in slots:
            clear(slot)
        if self._shared:
            for slot in slots:
                self._shared[component].uncharge(slot)
        self.slots[component].give_back(*slots)

    def set_clean(self, component: int, slot: int) -> None:
        """Unmark a dirty page: L3 has it, or it was given up. Whoever holds it holds it still."""
        self._dirty[component].remove(slot)
        self._events[component].set_clean(slot)

    def adopt_dirty(self, component: int, slots: Collection[int]) -> None:
        """Mark adopted pages as dirty, and hold each once for the caller; readers of the pool see the mark already."""
        self.index[component].hold(slots, self._inherited)
        self._dirty[component].update(slots)

    def adopt_lent(self, component: int, slots: Sequence[int]) -> None:
        """Take slots out of use that were lent to engines before the start; `drop_writes` brings them back."""
        self.slots[component].lend(slots)
        for slot in slots if self._shared else ():
            self._shared[component].charge(slot, self._inherited)
        self._lent[component].update(slots)

    def adopt(self, component: int, pages: Sequence[tuple[int, bytes]]) -> None:
        """Make pages (slot, key) resident that lay in free slots at the start; the first is evicted first.

        Nobody holds them, readers of the pool see them already, and they count neither as used nor as unused.
        """
        self.slots[component].adopt(slot for slot, _ in pages)
        for slot, key in pages:
            self.index[component].insert(slot, key, 0, fresh=False)

    def drop(self, component: int, slots: Iterable[int]) -> None:
        """Release one hold each and free those that nobody else holds."""
        index = self.index[component]
        for slot in slots:
            last = index.held_once(slot)
            index.release((slot,))
            if last:
                self._free_resident(component, slot)

    def drop_unheld(self, component: int, keys: Iterable[bytes]) -> None:
        """Free those of some pages that are resident and that nobody holds."""
        index = self.index[component]
        for slot in map(index.find, keys):
            if slot >= 0 and not index.is_held(slot):
                self._free_resident(component, slot)

    def demote(self, keys: Sequence[bytes], device_pages: int) -> tuple[int, int]:
        """Let the resident pages of a prefix go first, the deepest before all; what is held stays as it is.

        Returns how many pages were demoted, and of how many somebody holds a payload.
        """
        demoted: set[int] = set()
        held: set[int] = set()
        for index in self.index:
            idle = []
            for page in range(device_pages, len(keys)):
                slot = index.find(keys[page])
                if slot < 0:
                    continue
                if index.is_held(slot):
                    held.add(page)
                else:
                    demoted.add(page)
                    idle.append(slot)
            index.demote(idle)
        return len(demoted - held), len(held)

    def _free_resident(self, component: int, slot: int) -> None:
        self._events[component].clear(slot)
        self.index[component].drop(slot)
        self.slots[component].give_back(slot)

    def check_writes(self, component: int, lent: Sequence[int], dirty: Sequence[int]) -> None:
        """Compare what is lent and dirty with what is known of writes, by slot; raise if they differ."""
        if sorted(lent) != sorted(self._lent[component]) or sorted(dirty) != sorted(self._dirty[component]):
            raise RuntimeError(
                f"lent {self._lent[component]} and dirty {self._dirty[component]}, writes say {lent} and {dirty}"
            )

    def check_integrity(self) -> None:
        """Compare slots, index and loads; raise with the numbers if the law is broken. O(capacity)."""
        self.wants.check_integrity()
        for c, slots in enumerate(self.slots):
            slots.check_integrity()
            self.index[c].check_integrity()
            loads = [*self.loads[c].values(), *self._stalled[c]]
            states = [slots.state(load.slot) for load in loads]
            expected = [SlotState.FILLING if load.filling else SlotState.RESERVED for load in loads]
            if states != expected or len({load.slot for load in loads}) != len(loads):
                raise RuntimeError(f"loads in states {states}, slots say {expected}")
            lent, dirty = self._lent[c], self._dirty[c]
            if len(loads) + len(lent) != slots.reserved + slots.filling or len(self.index[c]) != slots.resident:
                raise RuntimeError(
                    f"{len(loads)} loads and {len(lent)} lent for {slots.reserved} + {slots.filling} slots, "
                    f"{len(self.index[c])} pages in {slots.resident} resident slots"
                )
            if any(slots.state(slot) is not SlotState.FILLING for slot in lent) or lent & {load.slot for load in loads}:
                raise RuntimeError(f"lent slots {lent} are not filling, or a load has one of them")
            if not all(self.index[c].is_held(slot) for slot in dirty):
                raise RuntimeError(f"of the dirty slots {dirty} one is not held")
            if any(not load.subscribers and not load.filling for load in loads):
                raise RuntimeError("a reserved slot that nobody wants")
