from redpoll.cluster.redis.values import MemberEntry, WorkerId


def test_name_of_a_worker_is_read_as_it_was_written():
    worker = WorkerId("0123456789ab", 3, 12)
    assert str(worker) == "0123456789ab.3.12"
    assert WorkerId.parse(str(worker)) == worker
    assert worker.process_name == "0123456789ab.3"


def test_user_info_of_a_member_may_contain_anything():
    assert MemberEntry.parse(b'a.1.0 b.2.1\n{"x":"1\n2"}') == ([b"a.1.0", b"b.2.1"], b'{"x":"1\n2"}')
    assert MemberEntry.parse(b"a.1.0\n") == ([b"a.1.0"], b"")
    assert MemberEntry.parse(b"") == ([], b"")
