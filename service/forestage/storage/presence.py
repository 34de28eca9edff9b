"""How a store that is asked key by key answers a probe: walk the prefix, stop at its first gap."""

from collections.abc import Callable

from forestage.core.layout import ModelLayout
from forestage.storage.base import Presence, Probe

__all__ = ["walk"]


def walk(model: ModelLayout, probe: Probe, holds: Callable[[int, bytes], bool]) -> Presence:
    """Ask `holds(component_index, key)` (are all shards there?) only for what the answer needs, in prefix order."""
    masks = tuple(bytearray(len(probe.keys)) for _ in model.components)
    every_page, tails = model.every_page, model.tails
    for page in range(min(probe.first_page, probe.first_tail), len(probe.keys)):
        key = probe.keys[page]
        if page >= probe.first_page:
            found = [component for component in every_page if holds(component, key)]
            if len(found) < len(every_page) and not probe.known[page]:
                break
            for component in found:
                masks[component][page] = 1
        if page >= probe.first_tail:
            for component in tails:
                masks[component][page] = holds(component, key)
    return Presence(masks)
