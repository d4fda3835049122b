"""Whether a machine carries the connections that it is meant to carry."""

import pytest

from redpoll.config import config
from redpoll.doctor import capacity
from redpoll.doctor.capacity import Machine
from redpoll.doctor.report import Verdict

BIG = Machine(
    files=2_000_000,
    nr_open=2_000_000,
    file_max=10_000_000,
    somaxconn=4_096,
    ports=(1_024, 65_535),
    tcp_pages=(1_000_000, 1_500_000, 2_000_000),
    table_entries=524_288,
    memory_bytes=24 << 30,
    cpus=4,
)


def settings(**changes):
    return config.load({name: str(value) for name, value in changes.items()}, {}, None, read_files=False)[0]


def shortages(machine: Machine, **changes) -> dict[str, str]:
    """By check, the remedy of what isn't good enough."""
    options = settings(**{"expected_connections": 1_000_000, "workers": 4, **changes})
    findings = capacity.examine(options, machine)
    assert all(finding.cause for finding in findings if finding.verdict is not Verdict.OK)
    return {finding.check: "\n".join(finding.remedy) for finding in findings if finding.verdict is not Verdict.OK}


def test_a_machine_that_is_large_enough_has_no_shortage():
    assert shortages(BIG) == {}


@pytest.mark.parametrize(
    ("short", "check", "remedy"),
    [
        ({"files": 20_000}, "Descriptors", "LimitNOFILE=289543"),
        ({"files": 20_000, "nr_open": 20_000}, "Descriptors", "fs.nr_open = 289543"),
        ({"file_max": 500_000}, "Descriptors", "fs.file-max = 1100000"),
        ({"somaxconn": 128}, "Backlog", "net.core.somaxconn = 4096"),
        ({"tcp_pages": (90_000, 120_000, 180_000)}, "TCP memory", "net.ipv4.tcp_mem = 1000000 1500000 2000000"),
        ({"table_entries": 262_144}, "TCP table", "thash_entries=1048576"),
        ({"memory_bytes": 4 << 30}, "Memory", "7.6 GiB"),
        ({"cpus": 1}, "CPUs", "2 CPUs"),
    ],
)
def test_each_shortage_says_what_to_write_where(short, check, remedy):
    found = shortages(BIG._replace(**short))
    assert list(found) == [check]
    assert remedy in found[check]
    places = ("/etc/sysctl.d", "systemd", "/etc/default/grub")
    assert check in ("Memory", "CPUs") or any(place in found[check] for place in places)


def test_ports_matter_only_behind_proxies_with_few_addresses():
    narrow = BIG._replace(ports=(32_768, 60_999))
    assert shortages(narrow) == {}
    assert shortages(narrow, trusted_proxies="10.0.0.0/8") == {}
    assert "ip_local_port_range" in shortages(narrow, trusted_proxies="10.0.0.1,10.0.0.2")["Ports"]
    assert "ip_local_port_range" in shortages(narrow, host="127.0.0.1")["Ports"]
    assert shortages(narrow, trusted_proxies="10.0.0.1", expected_connections=20_000) == {}


def test_a_table_of_unknown_size_is_no_shortage():
    assert shortages(BIG._replace(table_entries=0)) == {}


def test_without_an_expectation_the_room_is_named_and_nothing_is_short():
    (finding,) = capacity.examine(settings(workers=4), BIG._replace(files=20_000))
    assert finding.verdict is Verdict.SKIPPED
    assert f"{4 * (19_000 - 64):,} connections" in finding.seen


@pytest.mark.parametrize(
    "machine", [BIG._replace(cpus=2), BIG._replace(files=30_000), BIG._replace(memory_bytes=2 << 30)]
)
def test_the_room_that_is_named_has_no_shortage(machine):
    count = int(capacity.capacity(machine, 2) * 0.9)
    assert shortages(machine, expected_connections=count, workers=2) == {}


def test_this_machine_is_read_as_it_is():
    machine = capacity.this_machine()
    assert machine.files > 0
    assert machine.somaxconn > 0
    assert machine.memory_bytes > 1 << 20
    assert machine.cpus > 0
    assert 0 < machine.ports[0] < machine.ports[1]


def test_serve_logs_what_is_short(monkeypatch):
    logged = []
    monkeypatch.setattr(capacity.log, "warning", lambda event, **fields: logged.append((event, fields)))
    monkeypatch.setattr(capacity, "this_machine", lambda: BIG._replace(somaxconn=128))
    capacity.log_shortages(settings(expected_connections=1_000_000, workers=4))
    ((event, fields),) = logged
    assert event == "machine too small"
    assert "net.core.somaxconn = 4096" in fields["remedy"]
    capacity.log_shortages(settings())
    assert len(logged) == 1
