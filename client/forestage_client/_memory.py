"""Addresses and copies of memory that Python only lends: ctypes over the buffer protocol, without the GIL."""

import ctypes

__all__ = ["address_of", "copy"]


class _PyBuffer(ctypes.Structure):
    # Py_buffer of the stable ABI: the only way to the address of memory that is mapped read-only.
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(memory: memoryview) -> int:
    """Return where contiguous memory begins; valid as long as somebody holds it."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy all of `source` over `target`, while other threads run. Both are contiguous, of bytes and of one size."""
    if target.readonly or len(target) != len(source):
        raise ValueError(f"{len(source)} bytes do not go into {len(target)}, or those are read-only")
    ctypes.memmove(address_of(target), address_of(source), len(source))
