from redpoll.worker.ingress.socket_ids import SocketIds


def test_ids_are_unique_and_neither_half_is_zero():
    ids = SocketIds()
    made = [ids.next() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(0 < half <= 2**40 for pair in made for half in pair)
