"""A mapping for a million owners that have one entry each: 48 bytes with one entry, where a dict takes 250.

The first entry lies in the object itself; from the second on, all are in a dict.
"""

cimport cython

__all__ = ["SmallMap"]

cdef object _MISSING = object()


@cython.final
@cython.no_gc
cdef class SmallMap:
    """A mutable mapping from str to objects. They must not refer back to it, because the garbage collector doesn't
    visit it."""

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
