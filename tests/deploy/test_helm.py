"""The Helm chart: Helm itself lints and renders it, and the objects agree with Kubernetes' schemas."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from redpoll import __version__
from redpoll.cli import main as commands
from redpoll.config.setting_table import TABLE
from redpoll.config.settings import Settings

helm = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "redpoll"
# The oldest that Chart.yaml admits, and a recent one.
VERSIONS = ("1.25.0", "1.34.0")
STORES = {"redis": {"url": "redis://:secret@cache"}, "database": {"url": "postgresql://redpoll:secret@db/redpoll"}}
EVERYTHING = {
    **STORES,
    "replicas": 3,
    "settings": {"workers": 2, "trusted_proxies": ["10.0.0.0/8", "10.1.0.0/16"], "event_log_calls": 5_000_000},
    "secretSettings": {"app_secret": "s"},
    "existingSecret": "mine",
    "ingress": {"enabled": True, "host": "ws.example.com", "tlsSecret": "ws-tls", "className": "nginx"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local"},
    "imagePullSecrets": [{"name": "registry"}],
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "apps": [{"id": "shop", "key": "k", "secret": "env:SHOP_SECRET", "settings": {"max_connections": 5_000_000}}],
    "pruneApps": True,
    "tls": {"secret": "ws-tls", "clientCaSecret": "operators"},
}


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The chart's objects by kind; the control port's Service is `Control`, the Secret with the apps is `Apps`."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name="demo", namespace="prod")
    objects = {}
    for path, text in texts.items():
        if path.endswith(".yaml"):
            for found in filter(None, yaml.safe_load_all(text)):
                kind = found["kind"]
                if found.get("spec", {}).get("clusterIP") == "None":
                    kind = "Control"
                elif found["metadata"]["name"].endswith("-apps"):
                    kind = "Apps"
                objects[kind] = found
    return objects


def container_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = objects["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    return container


def test_helm_finds_no_fault():
    findings = helm.lint(str(CHART))
    assert not findings["errors"]
    assert [found["error"] for found in findings["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "values",
    [{}, {"persistence": {"enabled": False}}, EVERYTHING, {**STORES, "autoscaling": {"enabled": True}}],
    ids=["one pod", "no volume", "everything", "autoscaling"],
)
def test_kubernetes_accepts_the_objects(values, version):
    for kind, found in rendered(values).items():
        # The Prometheus operator defines it.
        if kind != "ServiceMonitor":
            kubernetes_validate.validate(found, version, strict=True)


def test_one_pod_has_its_own_redis_and_neither_disruption_budget_nor_drain():
    objects = rendered({})
    assert not {"Secret", "PodDisruptionBudget", "HorizontalPodAutoscaler"} & set(objects)
    assert container_of(objects)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]


def test_values_of_the_page_are_accepted():
    page = (ROOT / "deploy" / "docs" / "kubernetes.md").read_text()
    values = yaml.safe_load(
        re.search(r'^```yaml title="values-cluster.yaml"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)[1]
    )
    objects = rendered(values)
    assert {"StatefulSet", "Ingress", "PodDisruptionBudget", "ServiceMonitor"} <= set(objects)
    assert container_of(objects)["lifecycle"]["preStop"]["exec"]["command"][0] == "sh"


def test_several_pods_drain_before_they_stop():
    objects = rendered({**STORES, "replicas": 3, "drain": {"settleSeconds": 7, "seconds": 90, "graceSeconds": 20}})
    (*_, script) = container_of(objects)["lifecycle"]["preStop"]["exec"]["command"]
    assert script == 'sleep 7; redpoll node drain "$REDPOLL_NODE_NAME" --within 90 && sleep 90'
    spec = objects["StatefulSet"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 7 + 90 + 20 + 25
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert {"REDPOLL_REDIS_URL", "REDPOLL_DATABASE_URL"} == set(objects["Secret"]["data"])


def test_one_pod_with_an_external_redis_stops_without_a_drain():
    """There is no other pod for its clients, so a drain would only make a roll-out longer."""
    objects = rendered({**STORES, "replicas": 1})
    assert container_of(objects)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert objects["StatefulSet"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 5 + 10 + 25


@pytest.mark.parametrize(("values", "command"), [({}, "first-login"), (EVERYTHING, "user reset admin")])
def test_notes_say_how_to_log_in(values, command):
    """Any of several pods may have created `admin`."""
    with helm.Chart.load(str(CHART)) as chart:
        (notes,) = [
            text for path, text in chart.render(values, name="demo", namespace="prod").items() if "NOTES" in path
        ]
    _, _, login = notes.partition("log in" if command == "first-login" else "first login")
    assert login.splitlines()[1] == f"  kubectl exec -n prod demo-redpoll-0 -- redpoll {command}"


def test_scaling_follows_connections():
    objects = rendered({**STORES, "autoscaling": {"enabled": True, "connections": 30000}})
    assert "replicas" not in objects["StatefulSet"]["spec"]
    (metric,) = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"] == {
        "metric": {"name": "redpoll_connections"},
        "target": {"type": "AverageValue", "averageValue": "30000"},
    }


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["one pod", "everything"])
def test_no_pod_gets_the_variables_of_services(values):
    """The chart's Service may be named redpoll, and REDPOLL_PORT would be one of them."""
    templates = [
        found["spec"]["template"] for found in rendered(values).values() if "template" in found.get("spec", {})
    ]
    assert [template["spec"]["enableServiceLinks"] for template in templates] == [False]


def test_pods_have_no_rights():
    objects = rendered({})
    spec = objects["StatefulSet"]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    security = container_of(objects)["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
    assert security["capabilities"] == {"drop": ["ALL"]}
    # The user of the image.
    assert f"USER {spec['securityContext']['runAsUser']}\n" in (ROOT / "Dockerfile").read_text()


def test_settings_are_environment_variables_that_exist():
    container = container_of(rendered(EVERYTHING))
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert values["REDPOLL_TRUSTED_PROXIES"] == "10.0.0.0/8,10.1.0.0/16"
    assert values["REDPOLL_EVENT_LOG_CALLS"] == "5000000"
    assert {name for name in values if name.startswith("REDPOLL_")} <= {setting.variable for setting in TABLE}
    assert [entry["secretRef"]["name"] for entry in container["envFrom"]] == ["demo-redpoll", "mine"]


def test_ports_probes_and_versions_are_those_of_redpoll():
    objects = rendered({"serviceMonitor": {"enabled": True}})
    container = container_of(objects)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"public": Settings().port, "control": Settings().control_port}
    assert container["image"] == f"redpoll:{__version__}"
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "control"}
    # The Prometheus operator finds the control port by the label of its Service.
    wanted = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= objects["Control"]["metadata"]["labels"].items()
    assert not wanted.items() <= objects["Service"]["metadata"]["labels"].items()


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["one pod", "everything"])
def test_pods_are_restarted_only_if_no_worker_answers(values):
    """The control plane doesn't answer while it waits for PostgreSQL at its start."""
    container = container_of(rendered(values))
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "public"}


@pytest.mark.parametrize("value", [True, "true", 1])
def test_probes_only_connect_to_a_port_that_expects_proxy_headers(value):
    proxied = {"settings": {"proxy_protocol": value}}
    objects = rendered(proxied)
    container = container_of(objects)
    assert container["startupProbe"]["tcpSocket"] == container["livenessProbe"]["tcpSocket"] == {"port": "public"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "control"}
    kubernetes_validate.validate(objects["StatefulSet"], VERSIONS[0], strict=True)
    authorities = {"tls": {"secret": "ws-tls", "clientCaSecret": "operators"}}
    assert container_of(rendered(proxied | authorities))["readinessProbe"]["tcpSocket"] == {"port": "public"}
    assert "httpGet" in container_of(rendered({"settings": {"proxy_protocol": False}}))["livenessProbe"]


@pytest.mark.parametrize(("values", "seconds"), [({}, 3600), ({"startupSeconds": 91}, 92)])
def test_a_pod_has_the_configured_time_to_start(values, seconds):
    probe = container_of(rendered(values))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == seconds


def test_certificates_are_mounted_and_what_has_none_asks_the_public_port():
    objects = rendered({**EVERYTHING, "serviceMonitor": {"enabled": True, "tlsConfig": {"serverName": "redpoll"}}})
    container = container_of(objects)
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert values["REDPOLL_TLS_CERT"] == mounts["tls"]
    assert values["REDPOLL_TLS_CLIENT_CA"] == mounts["client-ca"] + "/ca.crt"
    assert int(values["REDPOLL_TLS_PORT"]) == ports["tls"]
    assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} == {"public", "tls"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "public"}
    (endpoint,) = objects["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "redpoll"})
    (rule, *_) = objects["NetworkPolicy"]["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == {"public", "tls"}


def test_a_control_port_with_tls_needs_a_certificate():
    with pytest.raises(helm.HelmError, match=r"tls\.secret"):
        rendered({"tls": {"clientCaSecret": "operators"}})


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 2},
        {"autoscaling": {"enabled": True}},
        {"replicas": 2, "redis": {"url": "redis://cache"}},
        {"replicas": 2, "cluster": True},
        {"replicas": 2, "cluster": True, "database": STORES["database"]},
        {"replicas": 2, "cluster": True, "secretSettings": {"redis_url": "redis://cache"}},
    ],
)
def test_several_pods_without_common_stores_are_refused(values):
    with pytest.raises(helm.HelmError, match=r"redis\.url|database\.url"):
        rendered(values)


def test_several_pods_may_have_their_stores_from_elsewhere():
    variables = [{"name": name, "value": "…"} for name in ("REDPOLL_REDIS_URL", "REDPOLL_DATABASE_URL")]
    for place in (
        {"existingSecret": "mine"},
        {"extraEnv": variables},
        {"extraEnv": variables[1:], "secretSettings": {"redis_url": "redis://cache"}},
    ):
        assert rendered({"replicas": 2, "cluster": True, **place})["StatefulSet"]["spec"]["replicas"] == 2


def test_apps_are_applied_before_the_server_starts(tmp_path, monkeypatch):
    page = (ROOT / "deploy" / "docs" / "kubernetes.md").read_text()
    values = yaml.safe_load(
        re.search(r'^```yaml title="values-apps.yaml"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)[1]
    )
    objects = rendered(values)
    spec = objects["StatefulSet"]["spec"]["template"]["spec"]
    (apply,), container = spec["initContainers"], container_of(objects)
    assert apply["args"] == ["apply", "/etc/redpoll/apps.json"]
    assert (apply["env"], apply["envFrom"]) == (container["env"], container["envFrom"])
    (volume,) = [one for one in spec["volumes"] if one["name"] == "apps"]
    assert volume["secret"]["secretName"] == objects["Apps"]["metadata"]["name"] == "demo-redpoll-apps"
    assert list(objects["Apps"]["data"]) == ["apps.json"]
    (tmp_path / "apps.json").write_bytes(base64.b64decode(objects["Apps"]["data"]["apps.json"]))

    monkeypatch.setenv("REDPOLL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SHOP_SECRET", "shop-secret")
    monkeypatch.setenv("SHOP_HOOK_SECRET", "hook-secret")
    command = ["apply", str(tmp_path / "apps.json"), "--json"]
    for outcome in ("created", "unchanged"):
        result = CliRunner().invoke(commands, command)
        applied = json.loads(result.stdout)
        # Nothing is made, so the pod's log has no secret.
        assert ([app["outcome"] for app in applied["apps"]], applied["made"]) == ([outcome], [])
    exported = json.loads(CliRunner().invoke(commands, ["export", "--json"]).stdout)["apps"]
    assert (exported[0]["secret"], exported[0]["settings"]["max_connections"]) == ("shop-secret", 5_000)


def test_other_apps_change_only_with_prune():
    (apply,) = rendered(EVERYTHING)["StatefulSet"]["spec"]["template"]["spec"]["initContainers"]
    assert apply["args"] == ["apply", "/etc/redpoll/apps.json", "--prune"]
    assert "initContainers" not in rendered({})["StatefulSet"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "app",
    [
        {"id": "shop"},
        {"id": "shop", "key": "k"},
        {"id": "shop", "keys": [{"key": "k"}]},
        {"id": "shop", "key": "k", "secret": "s", "webhooks": [{"url": "https://a.example/"}]},
        {"id": "shop", "key": "k", "secret": "s", "tokens": [{"name": "ci", "scopes": ["all"]}]},
        {"key": "k", "secret": "s"},
    ],
)
def test_apps_whose_secrets_would_be_printed_into_the_log_are_refused(app):
    with pytest.raises(helm.HelmError):
        rendered({"apps": [app]})


@pytest.mark.parametrize("values", [{"replica": 2}, {"redis": {"url": "cache:6379"}}, {"settings": {"Workers": 1}}])
def test_misspelled_values_are_refused(values):
    with pytest.raises(helm.HelmError):
        rendered(values)


@pytest.mark.parametrize(
    "values",
    [
        {"secretSettings": {"app_secret": 20261128}},
        {"apps": [{"id": 1234567890123456789, "key": "k", "secret": "s"}]},
        {"apps": [{"id": "shop", "key": 12345678901234567890, "secret": "s"}]},
        {"apps": [{"id": "shop", "key": "k", "secret": 20261128}]},
        {"apps": [{"id": "shop", "keys": [{"key": 12345678901234567890, "secret": "s"}]}]},
        {"apps": [{"id": "shop", "keys": [{"key": "k", "secret": 20261128}]}]},
        {
            "apps": [
                {
                    "id": "shop",
                    "key": "k",
                    "secret": "s",
                    "webhooks": [{"url": "https://a.example/", "secret": 20261128}],
                }
            ]
        },
    ],
)
def test_numbers_that_helm_would_write_in_another_form_are_refused(values):
    with pytest.raises(helm.HelmError, match="string"):
        rendered(values)


def test_quoted_numbers_keep_their_digits():
    app = {"id": "1234567890123456789", "key": "12345678901234567890", "secret": "20261128"}
    objects = rendered({"secretSettings": {"app_secret": "20261128"}, "apps": [app]})
    assert base64.b64decode(objects["Secret"]["data"]["REDPOLL_APP_SECRET"]) == b"20261128"
    assert json.loads(base64.b64decode(objects["Apps"]["data"]["apps.json"]))["apps"] == [app]


def test_settings_that_the_chart_sets_are_refused_with_what_to_use_instead():
    container = container_of(rendered({**EVERYTHING, "settings": {}}))
    own = {entry["name"] for entry in container["env"] if entry["name"].startswith("REDPOLL_")} - {"REDPOLL_WORKERS"}
    names = {setting.name for setting in TABLE if setting.variable in own} | {"port", "control_port", "tls_key"}
    page = (ROOT / "deploy" / "docs" / "kubernetes.md").read_text()
    _, _, table = page.partition("refuses `settings` that it sets itself")
    documented = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table.partition("\n\nValues")[0], re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert documented == names
    for name in sorted(names):
        for place in ("settings", "secretSettings"):
            with pytest.raises(helm.HelmError, match=rf"{place}\.{name} is set by the chart: \w+"):
                rendered({place: {name: "1"}})


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
@pytest.mark.parametrize("name", ["host", "control_host"])
def test_addresses_that_no_probe_reaches_are_refused(name, address):
    for place in ("settings", "secretSettings"):
        with pytest.raises(helm.HelmError, match=rf"{place}\.{name} is a loopback address"):
            rendered({place: {name: address}})
    values = {entry["name"]: entry.get("value") for entry in container_of(rendered({"settings": {name: "::"}}))["env"]}
    assert values[f"REDPOLL_{name.upper()}"] == "::"


def test_a_secret_of_the_user_has_another_name_than_those_of_the_chart():
    app = {"id": "shop", "key": "k", "secret": "s"}
    for values in (
        {"existingSecret": "demo-redpoll", "secretSettings": {"app_secret": "s"}},
        {"existingSecret": "demo-redpoll", "redis": STORES["redis"]},
        {"existingSecret": "demo-redpoll-apps", "apps": [app]},
    ):
        with pytest.raises(helm.HelmError, match="existingSecret is demo-redpoll"):
            rendered(values)
    (source,) = container_of(rendered({"existingSecret": "demo-redpoll"}))["envFrom"]
    assert source == {"secretRef": {"name": "demo-redpoll"}}
    page = (ROOT / "deploy" / "docs" / "kubernetes.md").read_text()
    assert set(re.findall(r"^existingSecret: (\S+)", page, re.MULTILINE)) == {"redpoll-secrets"}


def test_the_default_has_workers_for_its_memory_limit():
    """A worker for each CPU of a large machine would exceed it."""
    container = container_of(rendered({"settings": {"log_format": "json"}}))
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (values["REDPOLL_WORKERS"], container["resources"]["limits"]) == ("2", {"memory": "1Gi"})


def test_every_value_is_in_the_schema_and_explained():
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    assert set(values) <= set(schema)
    page = (ROOT / "deploy" / "docs" / "kubernetes.md").read_text()
    assert {name for name in values if f"`{name}" not in page} == set()
    assert re.search(r"^appVersion: (\S+)$", (CHART / "Chart.yaml").read_text(), re.MULTILINE)[1] == __version__


def test_secret_settings_are_refused_where_they_would_be_plain_text():
    secret = {setting.name for setting in TABLE if setting.is_secret} | {"redis_url"}
    for name in sorted(secret):
        with pytest.raises(helm.HelmError, match=f"invalid propertyName '{name}'"):
            rendered({"settings": {name: "s3cret"}})


def test_pods_cant_reach_the_metadata_services_that_webhooks_cant_reach():
    (rule,) = [
        rule
        for rule in rendered({"networkPolicy": {"enabled": True}})["NetworkPolicy"]["spec"]["egress"]
        if "to" in rule
    ]
    excepted = {network for peer in rule["to"] if "ipBlock" in peer for network in peer["ipBlock"]["except"]}
    assert excepted == {"169.254.169.254/32", "168.63.129.16/32", "fd00:ec2::254/128"}


def test_pods_can_reach_the_pods_of_the_cluster_where_networks_dont_match_pods():
    """With Cilium, ipBlock matches only addresses outside the cluster."""
    (rule,) = [rule for rule in rendered({})["NetworkPolicy"]["spec"]["egress"] if "to" in rule]
    assert {"namespaceSelector": {}} in rule["to"]
