# Many deadlines, O(1) each: layout and ownership. Behaviour is in _wheel.pyx.

from cpython.ref cimport PyObject
from libc.stdint cimport uint32_t


cdef class Timed:
    # Neighbours in the slot. Borrowed: the wheel owns one reference to each thing that is linked.
    cdef PyObject* prev
    cdef PyObject* next
    # The tick at which the wheel gives this back; 0 while it is in no wheel.
    cdef uint32_t due
    # The tick at which bytes last came. It is here because it fills the padding after `due`.
    cdef public uint32_t heard_tick


cdef class Wheel:
    # First thing of each slot; things of slot i are due at ticks that are i modulo `count`.
    cdef PyObject** slots
    cdef uint32_t count
    # The last tick that was advanced to.
    cdef uint32_t now
    cdef Py_ssize_t linked

    cdef void link(self, PyObject* item, uint32_t due) noexcept
    cdef void unlink(self, PyObject* item) noexcept
