"""How many bytes of large replies may be due from one server at once, over all its connections.

A server copies a reply into memory of its own before it sends it: what is due costs it memory.

Law: `due_bytes` is the sum over all replies that were asked for with leave and not given back; it exceeds the limit
only while fewer than three replies are due.
"""

import threading

__all__ = ["Allowance"]

# With two large replies due, one is made while the other is sent.
_ALWAYS = 2


class Allowance:
    """Shared by the lanes of one node; from any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._num_due = 0
        self.due_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Ask leave for one more reply; say whether it was given."""
        with self._changed:
            if self._num_due >= _ALWAYS and self.due_bytes + num_bytes > self._limit_bytes:
                return False
            self._num_due += 1
            self.due_bytes += num_bytes
            return True

    def wait(self, timeout_s: float) -> None:
        """Wait until some reply is given back, but not for long."""
        with self._changed:
            if self._num_due:
                self._changed.wait(timeout_s)

    def give_back(self, num_bytes: int) -> None:
        """Take note that one such reply came, or will not come."""
        with self._changed:
            self._num_due -= 1
            self.due_bytes -= num_bytes
            self._changed.notify()

    def check_integrity(self) -> None:
        """Raise AssertionError when the law does not hold."""
        with self._changed:
            if self.due_bytes < 0 or (self.due_bytes > self._limit_bytes and self._num_due > _ALWAYS):
                raise AssertionError(
                    f"{self._num_due} replies of {self.due_bytes} bytes due, limit {self._limit_bytes}"
                )
