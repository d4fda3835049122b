"""A timer wheel: one deadline for each of many connections, at 24 bytes and O(1) each.

It knows ticks only. How long a tick lasts, and what happens when a deadline is due, is the caller's decision.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport uint32_t
from libc.string cimport memset

__all__ = ["Timed", "Wheel"]


cdef class Timed:
    """Base class of objects with one deadline. The links of the wheel lie in the object itself.

    `heard_tick` is for the owner: the tick at which bytes last came.
    """

    @property
    def due_tick(self):
        """The tick at which the wheel will give this back, or None while it is in no wheel."""
        return self.due or None


cdef class Wheel:
    """Has deadlines at any distance. Those further away than `slots` ticks are checked once per turn of the wheel.

    The wheel owns a reference to each Timed in it. A Timed is in one wheel at most.
    """

    def __cinit__(self, uint32_t slots):
        if slots == 0:
            raise ValueError("a wheel has at least one slot")
        self.slots = <PyObject**> PyMem_Malloc(slots * sizeof(PyObject*))
        if self.slots == NULL:
            raise MemoryError()
        memset(self.slots, 0, slots * sizeof(PyObject*))
        self.count = slots

    def __dealloc__(self):
        cdef uint32_t i
        if self.slots != NULL:
            for i in range(self.count):
                while self.slots[i] != NULL:
                    self.unlink(self.slots[i])
            PyMem_Free(self.slots)

    def __len__(self):
        return self.linked

    def put(self, Timed timed not None, uint32_t due_tick):
        """Return `timed` from advance() at `due_tick`; replaces its deadline. A past tick means the next one."""
        if timed.due:
            self.unlink(<PyObject*> timed)
        self.link(<PyObject*> timed, due_tick if due_tick > self.now else self.now + 1)

    def drop(self, Timed timed not None):
        """Forget the deadline of `timed`, if it has one."""
        if timed.due:
            self.unlink(<PyObject*> timed)

    def advance(self, uint32_t now_tick):
        """Take out and return everything that is due at or before `now_tick`. Ticks only grow."""
        cdef:
            list due = []
            uint32_t steps, tick
            PyObject* item
            PyObject* after
        if now_tick <= self.now:
            return due
        # One turn sees every slot, however late the call.
        steps = min(now_tick - self.now, self.count)
        tick = now_tick - steps
        self.now = now_tick
        while tick < now_tick:
            tick += 1
            item = self.slots[tick % self.count]
            while item != NULL:
                after = (<Timed> item).next
                if (<Timed> item).due <= now_tick:
                    due.append(<Timed> item)
                    self.unlink(item)
                item = after
        return due

    cdef void link(self, PyObject* item, uint32_t due) noexcept:
        # noexcept: nothing here can fail, and dealloc must not.
        cdef PyObject** slot = &self.slots[due % self.count]
        (<Timed> item).due = due
        (<Timed> item).prev = NULL
        (<Timed> item).next = slot[0]
        if slot[0] != NULL:
            (<Timed> slot[0]).prev = item
        slot[0] = item
        self.linked += 1
        Py_INCREF(<Timed> item)

    cdef void unlink(self, PyObject* item) noexcept:
        cdef:
            PyObject* prev = (<Timed> item).prev
            PyObject* after = (<Timed> item).next
        if prev != NULL:
            (<Timed> prev).next = after
        else:
            self.slots[(<Timed> item).due % self.count] = after
        if after != NULL:
            (<Timed> after).prev = prev
        (<Timed> item).due = 0
        (<Timed> item).prev = NULL
        (<Timed> item).next = NULL
        self.linked -= 1
        Py_DECREF(<Timed> item)
