"""What keeps a million connections small: objects that the garbage collector doesn't see, and a mapping for owners that
have one entry each."""

cimport cython

__all__ = ["SmallMap", "untrack", "untracked"]

cdef extern from *:
    """
    /* Since Python 3.9 the collector tracks instances of every class made by a class statement, even without references
       to follow. This removes the flag from a class that adds no field to a base without it. The interpreter's dealloc
       of such classes handles types without the flag. */
    static int redpoll_untrack_type(PyTypeObject *type) {
        PyTypeObject *base = type->tp_base;
        if (base == NULL || (base->tp_flags & Py_TPFLAGS_HAVE_GC) || type->tp_basicsize != base->tp_basicsize
            || type->tp_itemsize || type->tp_dictoffset || type->tp_weaklistoffset) {
            return 0;
        }
        type->tp_flags &= ~Py_TPFLAGS_HAVE_GC;
        type->tp_traverse = NULL;
        type->tp_clear = NULL;
        type->tp_free = PyObject_Free;
        PyType_Modified(type);
        return 1;
    }
    """
    bint redpoll_untrack_type(type cls)

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(object thing)
    bint PyObject_GC_IsTracked(object thing)


def untracked(cls: type) -> type:
    """A class decorator: the garbage collector never visits instances, and each takes 16 bytes less.

    For a subclass of WebSocket with `__slots__ = ()` whose instances are in no cycle that outlives the connection.
    Subclasses of it are tracked, unless they are decorated, too.
    """
    if not redpoll_untrack_type(cls):
        raise TypeError(f"{cls.__name__} has fields that the garbage collector must see: use __slots__ = ()")
    return cls


def untrack(thing) -> None:
    """Have the garbage collector not visit `thing`, which must be in no cycle."""
    if PyObject_GC_IsTracked(thing):
        PyObject_GC_UnTrack(thing)


cdef object _MISSING = object()


@cython.final
@cython.no_gc
cdef class SmallMap:
    """A mutable mapping from str to objects: 48 bytes with one entry, where a dict takes 250. The first entry lies in the
    object itself; from the second on, all are in a dict. What is in it must not refer back to it, because the garbage
    collector doesn't visit it."""

    # The only entry, or None for no entry. Unused while there is `many`.
    cdef str key
    cdef object value
    # All entries, when there were two at a time; None before.
    cdef dict many

    def __len__(self) -> int:
        if self.many is not None:
            return len(self.many)
        return self.key is not None

    def __contains__(self, str key) -> bool:
        if self.many is not None:
            return key in self.many
        return self.key is not None and self.key == key

    def __getitem__(self, str key not None):
        if self.many is not None:
            return self.many[key]
        if self.key is None or self.key != key:
            raise KeyError(key)
        return self.value

    def __setitem__(self, str key not None, value):
        if self.many is None:
            if self.key is None or self.key == key:
                self.key = key
                self.value = value
                return
            self.many = {self.key: self.value}
            self.key = None
            self.value = None
        self.many[key] = value

    def __delitem__(self, str key not None):
        if self.many is not None:
            del self.many[key]
        elif self.key is None or self.key != key:
            raise KeyError(key)
        else:
            self.key = None
            self.value = None

    def __iter__(self):
        return iter(self.keys())

    def get(self, str key not None, default=None):
        if self.many is not None:
            return self.many.get(key, default)
        return self.value if self.key is not None and self.key == key else default

    def pop(self, str key not None, default=_MISSING):
        value = self.get(key, default)
        if value is not default or key in self:
            del self[key]
        elif default is _MISSING:
            raise KeyError(key)
        return value

    def keys(self):
        if self.many is not None:
            return self.many.keys()
        return () if self.key is None else (self.key,)

    def values(self):
        if self.many is not None:
            return self.many.values()
        return () if self.key is None else (self.value,)

    def items(self):
        if self.many is not None:
            return self.many.items()
        return () if self.key is None else ((self.key, self.value),)

    def clear(self):
        self.key = None
        self.value = None
        self.many = None

    def __repr__(self):
        return f"SmallMap({dict(self.items())!r})"
