"""From what hiredis has parsed to those who wait for it: a message to a function, a reply to the oldest call without one.

Each publish has a reply, and a worker gets each event as a push. This loop isn't Python's, because the reply to a
publish costs a third less so (bench/parts/replies.py). cluster/redis/connection.py says what waits.
"""

import hiredis

__all__ = ["Taker", "hand_out"]

cdef object push_type = hiredis.PushNotification
cdef object error_type = hiredis.ReplyError


cdef class Taker:
    """Base class of compiled code that takes replies. A Taker among the calls gets its replies without a Python call."""

    cdef int take_reply(self, object reply) except -1:
        raise NotImplementedError

    def __call__(self, reply):
        self.take_reply(reply)


def hand_out(connection, gets, nothing, pending not None, on_message, int most):
    """Hand out at most `most` of the items that `gets()` returns, until it returns `nothing` or `connection.lost` is
    true. Return whether there may be more.

    A message goes to `on_message(topic, payload)`, any other push to `connection.pushed(push)`, and a reply to the
    first of the deque `pending`. An error, or a reply without a call, goes to `connection.failed(reply)`. What one of
    them raises is passed on, and the next call begins after that item.
    """
    cdef object popleft = pending.popleft
    cdef object item, kind, done
    cdef list push
    cdef int i
    for i in range(most):
        item = gets()
        kind = type(item)
        if kind is push_type:
            push = <list> item
            if len(push) == 3 and (push[0] == b"message" or push[0] == b"smessage"):
                on_message(push[1], push[2])
            else:
                connection.pushed(push)
        elif item is nothing:
            return False
        elif kind is error_type or not pending:
            connection.failed(item)
        else:
            done = popleft()
            if isinstance(done, Taker):
                (<Taker> done).take_reply(item)
            else:
                done(item)
        if connection.lost:
            return False
    return True
