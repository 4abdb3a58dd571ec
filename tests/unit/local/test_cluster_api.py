"""Objects that the commands apply to a cluster."""

from collections.abc import Iterator

import pytest

from baton_kube.client import KubeError
from baton_local.cluster_api import ClusterApi, UnknownKindError
from pocketkube.control_plane.embedded import EmbeddedControlPlane


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedControlPlane]:
    plane = EmbeddedControlPlane(tmp_path_factory.mktemp("plane"), event_window=20)
    plane.start(90)
    yield plane
    plane.stop()


async def test_apply_names_unknown_kinds_and_unknown_fields(plane) -> None:
    metadata = {"name": "x"}
    async with ClusterApi.connect(plane.kubeconfig) as api:
        for version, kind in (("v1", "Nonsense"), ("none.example/v1", "ConfigMap")):
            with pytest.raises(UnknownKindError, match=f"no {kind} in {version}"):
                await api.apply([{"apiVersion": version, "kind": kind, "metadata": metadata}])
        with pytest.raises(KubeError, match="dta"):
            await api.apply(
                [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "dta": {}}]
            )
        await api.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}])
        await api.apply(
            [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "namespace": "x"}}]
        )
