"""The regression runs: their cases work, and their comparison finds changes."""

import json

import pytest

NAMES = [
    "encode",
    "envelope to frame",
    "parse and unmask",
    "fan-out tick",
    "signature check",
    "fast publish",
    "request head",
    "hold call",
    "session subscribe",
]


@pytest.fixture(scope="module")
def cases(regression):
    return regression("cases")


@pytest.fixture(scope="module")
def baseline(regression):
    return regression("baseline")


@pytest.fixture(scope="module")
def counting(regression):
    return regression("counting")


def counts(**instructions: float) -> dict:
    return {
        name: {"instructions": count, "functions": {"inner": count - 10, "outer": 10}}
        for name, count in {"calibration": 1000, **instructions}.items()
    }


def test_every_case_is_measured(cases):
    assert list(cases.CASES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_case_runs_and_can_be_repeated(cases, name):
    case = cases.CASES[name]()
    assert case.name == name
    for _ in range(3):
        case.run(2)
        case.reset()


def test_fan_out_case_writes_to_every_connection(cases, monkeypatch):
    drained = []
    monkeypatch.setattr(cases, "_drain", lambda clients: drained.extend(client.recv(1 << 16) for client in clients))
    case = cases.fan_out_tick()
    drained.clear()
    case.run(1)
    case.reset()
    assert len(drained) == 100
    assert set(drained) == {drained[0]}
    assert drained[0].count(b"new-message") == 3


def test_ten_percent_more_is_slower_and_half_a_percent_is_not(baseline):
    (slower,) = baseline.compare(counts(encode=1100), counts(encode=1000))
    assert slower.slower
    (noise,) = baseline.compare(counts(encode=1005), counts(encode=1000))
    assert not noise.slower
    (faster,) = baseline.compare(counts(encode=500), counts(encode=1000))
    assert not faster.slower


def test_report_names_the_case_its_figures_and_the_function_that_grew(baseline):
    (finding,) = baseline.compare(counts(encode=1100), counts(encode=1000))
    assert str(finding) == "encode: 1,000 -> 1,100 instructions (+10.0%)\n    inner: 990 -> 1,090"


def test_cases_without_a_baseline_and_the_calibration_are_not_compared(baseline):
    found = baseline.compare(counts(encode=1100, added=5), counts(encode=1000, removed=7))
    assert [finding.case for finding in found] == ["encode"]


def test_baseline_of_this_environment_counts_only_where_the_calibration_agrees(baseline, monkeypatch, tmp_path):
    monkeypatch.setattr(baseline, "FILE", tmp_path / "baseline.json")
    now = counts(encode=1000)
    assert baseline.recorded_counts(now) is None
    baseline.write({"environments": {baseline.environment(): now}, "times": {}})
    assert baseline.recorded_counts(now) == now
    now["calibration"] = {"instructions": 1100, "functions": {}}
    assert baseline.recorded_counts(now) is None
    baseline.write({"environments": {"another": now}, "times": {}})
    assert baseline.recorded_counts(now) is None


DUMP = """# callgrind format
desc: Trigger: Client Request: encode
fn=outer
0 100
cfn=malloc
calls=2 0
0 700
cfn=inner
calls=1 0
0 50
fn=inner
0 50
fn=malloc
0 40
cfn=_int_malloc
calls=2 0
0 660
fn=_int_malloc
0 660
"""


def test_allocator_counts_by_its_calls(counting, tmp_path):
    path = tmp_path / "callgrind.out.1"
    path.write_text(DUMP)
    title, (total, functions) = counting._read_dump(path)
    assert title == "encode"
    # 100 of outer, 50 of inner, two calls of malloc, which count as 100 each.
    assert total == 350
    assert functions == {"outer": 100, "inner": 50, "allocator calls": 200}


def test_recorded_baseline_has_every_case(baseline):
    recorded = json.loads(baseline.FILE.read_text())
    for python, times in recorded["times"].items():
        assert set(times) == set(NAMES), python
    for environment, found in recorded["environments"].items():
        assert set(found) == {"calibration", *NAMES}, environment
