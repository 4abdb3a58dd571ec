"""Installation, upgrade and removal by Helm, and installation by kubectl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from support.install.release_cluster import CHART, RELEASE, ROOT, Cluster
from support.waiting import eventually

CRD_SPEC = yaml.safe_load((ROOT / "manifests/crd/llmservices.yaml").read_text())["spec"]


def install(
    releases: helm.Config, values: dict[str, Any] | None = None, chart: Path = CHART
) -> None:
    assert (
        releases.install(chart, RELEASE, values, create_namespace=True, timeout=60)["status"]
        == "deployed"
    )


def columns(spec: dict[str, Any]) -> list[str]:
    return [column["name"] for column in spec["versions"][0]["additionalPrinterColumns"]]


def test_with_watch_namespaces_the_operator_serves_only_these(
    releases: helm.Config, cluster: Cluster
) -> None:
    team, other = cluster.new_namespace(), cluster.new_namespace()
    install(releases, {"watchNamespaces": [team]})
    assert not [
        role
        for role in cluster.rbac.list_cluster_role().items
        if role.metadata.name == "baton-operator"
    ]
    eventually(cluster.crd, timeout_s=30, what="the CRD to be served")
    with cluster.operator() as log:
        cluster.create_service(other, "theirs")
        cluster.create_service(team, "ours")
        cluster.wait_for_members(team, "ours", log)
    assert cluster.pods(other) == []
    assert cluster.conditions(other, "theirs") == []
    assert "forbidden" not in log.read_text().lower(), log.read_text()


def test_values_that_the_schema_refuses_install_nothing(
    releases: helm.Config, cluster: Cluster
) -> None:
    with pytest.raises(helm.HelmReleaseError, match="replicas"):
        install(releases, {"replicas": 0})
    assert cluster.crd() is None
    assert releases.list(all_states=True) == []


def test_every_option_that_needs_no_other_crd_is_accepted(
    releases: helm.Config, cluster: Cluster
) -> None:
    options = ("podDisruptionBudget", "networkPolicy", "dashboard")
    values: dict[str, Any] = {name: {"enabled": True} for name in options}
    toleration = {"key": "pool", "operator": "Exists", "effect": "NoSchedule"}
    install(
        releases, {**values, "tolerations": [toleration], "image": {"digest": "sha256:" + "0" * 64}}
    )
    pod = cluster.apps.read_namespaced_deployment(
        "baton-operator", cluster.namespace
    ).spec.template.spec
    assert pod.containers[0].image == "baton-operator@sha256:" + "0" * 64
    assert pod.tolerations[0].key == "pool"
    dashboard = cluster.core.read_namespaced_config_map(
        "baton-operator-dashboard", cluster.namespace
    )
    assert dashboard.data["baton.json"] == (CHART / "files/dashboard.json").read_text().rstrip("\n")


def test_an_upgrade_brings_the_new_crd_and_keeps_services(
    releases: helm.Config, cluster: Cluster, tmp_path: Path
) -> None:
    old = tmp_path / "baton"
    shutil.copytree(CHART, old)
    spec = yaml.safe_load((old / "files/crd-spec.yaml").read_text())
    gone = spec["versions"][0]["additionalPrinterColumns"].pop()
    (old / "files/crd-spec.yaml").write_text(yaml.safe_dump(spec))
    install(releases, chart=old)
    installed = eventually(cluster.crd, timeout_s=30, what="the old CRD to be served")
    assert installed
    assert gone["name"] not in columns(installed)
    cluster.create_service("default", "kept")

    assert releases.upgrade(CHART, RELEASE, {"logLevel": "debug"})["revision"] == 2
    crd = cluster.crd()
    assert crd
    assert columns(crd) == columns(CRD_SPEC)
    assert "kept" in cluster.services()
    args = cluster.apps.read_namespaced_deployment(
        "baton-operator", cluster.namespace
    ).spec.template.spec.containers[0]
    assert "--log-level=debug" in args.args


def test_uninstalling_keeps_the_crd_and_the_services_and_a_new_release_takes_over(
    releases: helm.Config, cluster: Cluster
) -> None:
    install(releases)
    cluster.create_service("default", "kept")
    assert "customresourcedefinition" in releases.uninstall(RELEASE)["info"].lower()
    assert cluster.crd()
    assert "kept" in cluster.services()
    left = cluster.apps.list_namespaced_deployment(cluster.namespace).items
    roles = [role.metadata.name for role in cluster.rbac.list_cluster_role().items]
    assert (left, "baton-operator" in roles) == ([], False)
    install(releases)
    assert "kept" in cluster.services()


def test_uninstalling_with_crds_keep_false_deletes_the_crd(
    releases: helm.Config, cluster: Cluster
) -> None:
    install(releases, {"crds": {"keep": False}})
    releases.uninstall(RELEASE)
    eventually(lambda: cluster.crd() is None, timeout_s=30, what="the CRD to be gone")


@pytest.mark.usefixtures("releases")
def test_kubectl_applies_the_plain_manifests(cluster: Cluster) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on this machine: install 1.32 or newer")
    # The order of README.md: the namespace must be created before the operator.
    files = [
        argument
        for path in ("crd", "rbac", "operator.yaml")
        for argument in ("-f", f"manifests/{path}")
    ]
    # Servers before 1.25 refuse rules in schemas, in validation and in server-side apply.
    how = "--server-side" if cluster.minor >= 25 else "--validate=false"
    command = [kubectl, "--kubeconfig", str(cluster.kubeconfig), "apply", how, *files]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        eventually(cluster.crd, timeout_s=30, what="the CRD to be served")
        pod = cluster.apps.read_namespaced_deployment(
            "baton-operator", "baton-system"
        ).spec.template.spec
        assert pod.containers[0].image == "baton-operator:0.1.0"
    finally:
        command = [*command[:3], "delete", "--wait=false", "--ignore-not-found", *files]
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
