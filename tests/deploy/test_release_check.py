"""What `deploy/release-check` refuses to publish, the licence in everything that is published, and the issue forms."""

import json
import re
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import yaml

from redpoll import __version__

ROOT = Path(__file__).parents[2]
DATED = f"# Changelog\n\n## {__version__} - 2027-01-31\n"


def unpublishable(security: str, changelog: str) -> list[str]:
    # It has no suffix, so that operators can call it.
    loader = SourceFileLoader("release_check", str(ROOT / "deploy" / "release-check"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module.unpublishable(security, changelog, __version__)


def test_placeholders_are_not_published():
    (fault,) = unpublishable((ROOT / ".github/SECURITY.md").read_text(), DATED)
    assert fault.startswith(".github/")
    assert unpublishable("Write to nobody.", DATED) == [fault]
    assert unpublishable("Write to <security@example.com>.", DATED) == [fault]
    (fault,) = unpublishable("Write to **security@redpoll.net**.", (ROOT / "CHANGELOG.md").read_text())
    assert fault.startswith("CHANGELOG.md")
    assert unpublishable("Write to **security@redpoll.net**.", DATED) == []


def test_licence_is_the_same_everywhere():
    assert (ROOT / "LICENSE").read_text().startswith("MIT License\n\nCopyright (c) 2026 the redpoll authors\n")
    for package in (ROOT, ROOT / "src" / "redpoll_client"):
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        assert (project["license"], project["license-files"]) == ("MIT", ["LICENSE"])
    for package in ("redpoll_client", "redpoll_js"):
        assert (ROOT / "src" / package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert json.loads((ROOT / "src" / "redpoll_js" / "package.json").read_text())["license"] == "MIT"
    assert 'org.opencontainers.image.licenses="MIT"' in (ROOT / "Dockerfile").read_text()
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "redpoll" / "Chart.yaml").read_text())
    assert chart["annotations"]["artifacthub.io/license"] == "MIT"


def test_forms_ask_for_version_and_doctor():
    for form in ("bug", "question"):
        text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text()
        assert "redpoll version" in text
        assert "redpoll doctor --json" in text
        ids = [part["id"] for part in yaml.safe_load(text)["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids))


def test_workflow_only_runs_the_gate():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "gate.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step][-1] == "bash .ci/run"
    assert not re.search("pytest|ruff|mypy", str(job))
