"""Member pods."""

from __future__ import annotations

from baton_operator.builders import config_maps
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.names import GROUP
from support.operator.services import resolved


def test_a_member_pod() -> None:
    pod = MemberTemplate(resolved(engine={"numThreads": 2}), "decode").pod(3)
    assert pod["metadata"]["name"] == "demo-decode-3"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    labels = pod["metadata"]["labels"]
    assert (labels[f"{GROUP}/service"], labels[f"{GROUP}/role"]) == ("demo", "decode")
    (engine,) = pod["spec"]["containers"]
    assert engine["command"] == ["baton-engine", "--config", "/etc/baton/decode.json"]
    env = {item["name"]: item for item in engine["env"]}
    assert env["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["OMP_NUM_THREADS"]["value"] == "2"
    writable = [mount["mountPath"] for mount in engine["volumeMounts"] if not mount.get("readOnly")]
    for cache in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        assert any(env[cache]["value"].startswith(f"{path}/") for path in writable), (
            "the cache is on the read-only root file system"
        )
    assert {port["name"]: port["containerPort"] for port in engine["ports"]} == {
        "engine": 5557,
        "kv": 5558,
        "http": 8000,
    }
    assert engine["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert engine["securityContext"]["readOnlyRootFilesystem"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > resolved().spec.drain_timeout_seconds
    mounted = [
        volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume
    ]
    assert mounted == [
        config_maps.build(resolved(engine={"numThreads": 2}), "decode")["metadata"]["name"]
    ]
