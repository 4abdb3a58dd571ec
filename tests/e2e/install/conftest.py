"""Helm releases on the real control plane: Helm needs protobuf, which the embedded one lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import helm_python as helm
import pytest
from kubernetes.client.exceptions import NotFoundException

from pocketkube.control_plane.real import RealControlPlane
from support.install.release_cluster import CRD, RELEASE, Cluster
from support.waiting import eventually


@pytest.fixture
def cluster(real_plane: RealControlPlane, tmp_path: Path) -> Cluster:
    return Cluster(real_plane.kubeconfig, tmp_path)


@pytest.fixture
def releases(cluster: Cluster) -> Iterator[helm.Config]:
    """Helm in the cluster's namespace. The release and the CRD are removed afterwards."""
    with helm.Config(kubeconfig_path=cluster.kubeconfig, namespace=cluster.namespace) as releases:
        try:
            yield releases
        finally:
            releases.uninstall(RELEASE, ignore_not_found=True)
            with contextlib.suppress(NotFoundException):  # it may already be gone
                cluster.definitions.delete_custom_resource_definition(CRD)
            eventually(lambda: cluster.crd() is None, timeout_s=30, what="the CRD to be gone")
