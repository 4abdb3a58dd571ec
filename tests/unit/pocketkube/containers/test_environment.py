"""Environment and command line of a container."""

import pytest

from baton_kube.client import KubeError
from pocketkube.containers.environment import (
    ConfigError,
    command_line,
    container_environment,
    expand,
    field_value,
)
from pocketkube.kubelet.kubelet import _lookup
from support.pocketkube.sample_pod import ADDRESSES, POD


def test_expansion_resolves_escapes_and_keeps_unknown_names() -> None:
    variables = {"A": "1", "B_2": "two"}
    assert expand("$(A)-$(B_2)-$(C)-$$(A)-$A-$", variables) == "1-two-$(C)-$(A)-$A-$"


async def test_environment_entries_refer_to_earlier_ones_and_missing_keys_are_errors() -> None:
    objects = {("ConfigMap", "c"): {"data": {"k": "v"}}, ("Secret", "s"): {"data": {"t": "aGk="}}}

    async def lookup(kind: str, namespace: str, name: str) -> dict[str, object] | None:
        return objects.get((kind, name))

    container = {
        "name": "main",
        "envFrom": [
            {"prefix": "P_", "configMapRef": {"name": "c"}},
            {"secretRef": {"name": "absent", "optional": True}},
        ],
        "env": [
            {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "t"}}},
            {"name": "BOTH", "value": "$(P_k)/$(SECRET)"},
        ],
    }
    result = await container_environment(POD, container, {}, ADDRESSES, lookup)
    assert result == {"P_k": "v", "SECRET": "hi", "BOTH": "v/hi"}
    container["env"] = [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "no"}}}]
    with pytest.raises(ConfigError, match="couldn't find key no in ConfigMap ns/c"):
        await container_environment(POD, container, {}, ADDRESSES, lookup)
    container["env"] = [
        {"name": "X", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}
    ]
    with pytest.raises(ConfigError, match="valueFrom resourceFieldRef is not supported here"):
        await container_environment(POD, container, {}, ADDRESSES, lookup)


def test_a_container_without_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="images are ignored"):
        command_line({"name": "main", "args": ["x"]}, {})


def test_fields_of_the_downward_api() -> None:
    assert field_value("metadata.labels['b']", POD, ADDRESSES) == "2"
    assert field_value("metadata.labels", POD, ADDRESSES) == 'a="1\\""\nb="2"'
    assert field_value("status.podIP", POD, ADDRESSES) == "127.77.0.2"
    with pytest.raises(ConfigError, match="is not supported here"):
        field_value("spec.nothing", POD, ADDRESSES)


async def test_an_object_that_cannot_be_read_is_a_config_error() -> None:
    """The container then waits with the reason CreateContainerConfigError."""

    class Failing:
        def __init__(self, error: Exception) -> None:
            self.error = error

        async def get(self, path: str) -> dict[str, object]:
            raise self.error

    for error in (KubeError(403, "Forbidden", "not allowed"), ConnectionError("refused")):
        with pytest.raises(ConfigError, match=f"configmaps ns/m: {error}"):
            await _lookup(Failing(error))("ConfigMap", "ns", "m")
    assert await _lookup(Failing(KubeError(404, "NotFound", "")))("ConfigMap", "ns", "m") is None
