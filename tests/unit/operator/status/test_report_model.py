"""The condition ModelAvailable, and the probes of pods that fetch or load the model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from baton_kube.client import Object
from baton_operator.reconcile_errors import Problem, ReconcileError
from baton_operator.status.report import report
from baton_operator.status.report_events import new_failures
from baton_operator.status.report_group import ReportedGroup
from baton_operator.status.status_probes import StatusProbes, is_progress_expected
from baton_protocol.process.health import Health, LoadProgress
from support.http_server import serving
from support.operator.services import NOW, observed, pod, resolved, service

HUB = {"uri": "hf://org/some.model@v1.0"}
GIB = 2**30


def fetching_pod(fetcher: Object, last: Object | None = None, **more: Any) -> Object:
    result = pod(ready=False, **more)
    status = {"name": "model", "state": fetcher, **({"lastState": last} if last else {})}
    result["status"]["initContainerStatuses"] = [status]
    return result


RUNNING = {"running": {"startedAt": NOW.isoformat()}}
DONE = {"terminated": {"exitCode": 0, "message": '{"revision":"c0ffee"}'}}
ON_THE_WAY = {
    "demo-decode-0": Health(
        "Fetching", "fetching hf://org/m at c0ffee", LoadProgress(3 * GIB, 14 * GIB)
    )
}


def failed(line: str, code: int = 78) -> Object:
    return {"terminated": {"exitCode": code, "message": f"something before\n{line}"}}


def status_of(
    pods: list[Object],
    loading: dict[str, Health] | None = None,
    problem: Problem | None = None,
    **spec: Any,
) -> Any:
    group = ReportedGroup(
        role="decode", desired=1, pods=pods, revision="new", loading=loading or {}
    )
    wanted = resolved(model=spec or HUB)
    return report(observed(), wanted, {"decode": group}, problem=problem, now=NOW)


def condition(status: Any, type_: str = "ModelAvailable") -> Any:
    (found,) = [each for each in status.conditions if each.type == type_]
    return found


def verdict(*args: Any, **kwargs: Any) -> tuple[str, str, str]:
    found = condition(status_of(*args, **kwargs))
    return found.status, found.reason, found.message


def test_the_condition_is_unknown_without_pods() -> None:
    assert verdict([])[:2] == ("Unknown", "NotObserved")
    assert verdict([fetching_pod({"waiting": {"reason": "PodInitializing"}})])[:2] == (
        "Unknown",
        "Starting",
    )


def test_a_pod_whose_engine_is_paused_has_the_model() -> None:
    pods = [pod(f"demo-decode-{ordinal}", ready=ordinal == 0) for ordinal in range(3)]
    paused = {"demo-decode-1": Health("Paused", "")}
    group = ReportedGroup(role="decode", desired=3, pods=pods, revision="new", suspended=paused)
    wanted = resolved(model={"uri": "file:///models/x"})
    status = report(observed(), wanted, {"decode": group}, problem=None, now=NOW)
    assert condition(status).message.startswith("2 of 3 pods have the model")


def test_the_condition_reports_the_progress_of_the_first_pod() -> None:
    status = status_of([fetching_pod(RUNNING)], ON_THE_WAY)
    for type_ in ("ModelAvailable", "DecodeReady", "Ready"):
        found = condition(status, type_)
        if type_ == "Ready":
            continue
        assert (found.status, found.reason) == ("False", "Fetching")
        assert "21 % of 14.0 GiB" in found.message
    assert not [found for found in new_failures(service(), status) if found.reason == "Fetching"], (
        "progress counts as a failure"
    )


def test_an_unreachable_source_takes_precedence_over_progress() -> None:
    asking = "listing the files of hf://org/m"
    refused = Health("Fetching", asking, error="ConnectError: Connection refused")
    waits = Health(
        "Fetching", "waiting for another pod that fetches hf://org/m into the same cache"
    )
    pods = [fetching_pod(RUNNING, name=f"demo-decode-{ordinal}") for ordinal in range(2)]
    status = status_of(pods, {"demo-decode-0": waits, "demo-decode-1": refused})
    for type_ in ("ModelAvailable", "DecodeReady"):
        found = condition(status, type_)
        assert (found.status, found.reason) == ("False", "Fetching")
        expected = (
            f"pod demo-decode-1: {asking}: ConnectError: Connection refused; the pod tries again"
        )
        assert found.message.startswith(expected)


def test_the_model_is_available_after_the_first_fetch_with_its_revision() -> None:
    status = status_of([fetching_pod(DONE)])
    assert condition(status).status == "True"
    assert (status.model.uri, status.model.revision) == (HUB["uri"], "c0ffee")
    later = report(
        observed({**service(), "status": {"model": {"uri": HUB["uri"], "revision": "c0ffee"}}}),
        resolved(model=HUB),
        {"decode": ReportedGroup(role="decode", desired=1, pods=[], revision="new")},
        problem=None,
        now=NOW,
    )
    assert later.model.revision == "c0ffee"
    assert (
        report(
            observed(
                {**service(), "status": {"model": {"uri": "hf://org/other", "revision": "c0ffee"}}}
            ),
            resolved(model=HUB),
            {},
            problem=None,
            now=NOW,
        ).model
        is None
    )


def after(
    before: Any, pods: list[Object], loading: dict[str, Health] | None = None, **model: Any
) -> tuple[str, str]:
    """Return ModelAvailable of a service with the status `before`."""
    stored = {**service(), "status": msgspec.to_builtins(before)}
    group = ReportedGroup(
        role="decode", desired=0, pods=pods, revision="new", loading=loading or {}
    )
    status = report(
        observed(stored), resolved(model=model), {"decode": group}, problem=None, now=NOW
    )
    found = condition(status)
    return found.status, found.message


FILE = {"uri": "file:///models/x"}


def test_a_service_at_zero_keeps_its_available_model() -> None:
    awake = status_of([pod(ready=True)], **FILE)
    assert (awake.model.uri, awake.model.revision) == (FILE["uri"], None)
    assert after(awake, [], **FILE) == ("True", "earlier pods had the model; no pod runs now")
    assert after(awake, [], uri="file:///models/other")[0] == "Unknown", (
        "the new model must be unknown"
    )
    fetched = status_of([fetching_pod(DONE)])
    assert after(fetched, [], **HUB) == (
        "True",
        "earlier pods had the model; no pod runs now; the next pod downloads it again",
    )
    kept = {**HUB, "cache": {"claim": "models"}}
    assert (
        after(status_of([fetching_pod(DONE)], **kept), [], **kept)[1]
        == "earlier pods had the model; no pod runs now"
    )


def test_a_service_at_zero_does_not_report_a_model_that_it_never_had() -> None:
    missing = pod(ready=False)
    missing["status"]["containerStatuses"] = [
        {
            "name": "engine",
            "state": failed("FATAL ModelNotFound: /models/x does not exist"),
            "restartCount": 1,
        }
    ]
    had = {"conditions": [], "model": {"uri": FILE["uri"]}}
    lost = report(
        observed({**service(), "status": had}),
        resolved(model=FILE),
        {"decode": ReportedGroup(role="decode", desired=1, pods=[missing], revision="new")},
        problem=None,
        now=NOW,
    )
    assert condition(lost).reason == "ModelNotFound"
    assert after(lost, [], **FILE)[0] == "Unknown"
    assert after(status_of([], **FILE), [], **FILE)[0] == "Unknown"


def test_a_service_that_scales_up_keeps_a_model_that_is_not_fetched_again() -> None:
    loading = {"demo-decode-0": Health("Loading", "loading /models/x")}
    awake = status_of([pod(ready=True)], **FILE)
    assert after(awake, [pod()], **FILE) == ("True", "earlier pods had the model; new pods load it")
    assert after(awake, [pod()], loading, **FILE) == (
        "True",
        "pod demo-decode-0: loading /models/x",
    )
    assert (
        after(status_of([fetching_pod(DONE)]), [fetching_pod(RUNNING)], ON_THE_WAY, **HUB)[0]
        == "False"
    )


@pytest.mark.parametrize(
    "reason", ["ModelMissing", "ModelAccessDenied", "NoSpace", "ModelCacheInvalid"]
)
def test_the_last_line_of_the_fetcher_is_the_reason(reason: str) -> None:
    ended = failed(f"FATAL {reason}: the words of the fetcher")
    back_off = {"waiting": {"reason": "CrashLoopBackOff"}}
    for state, last in ((ended, None), (back_off, ended)):
        status, found, message = verdict([fetching_pod(state, last)])
        assert (status, found) == ("False", reason)
        assert "the words of the fetcher" in message


def test_a_restarted_fetcher_reports_its_last_error_and_progress() -> None:
    again = {"running": {"startedAt": (NOW - timedelta(minutes=1)).isoformat()}}
    pods = [fetching_pod(again, failed("FATAL ModelSourceUnavailable: no network", 1))]
    status, reason, message = verdict(pods, ON_THE_WAY)
    assert (status, reason) == ("False", "ModelSourceUnavailable")
    assert "no network" in message
    assert "21 % of 14.0 GiB" in message


def test_a_fatal_line_of_an_engine_about_its_model_is_the_reason() -> None:
    crashed = pod(ready=False)
    crashed["status"]["containerStatuses"] = [
        {
            "name": "engine",
            "state": failed("FATAL ModelNotFound: /models/x does not exist"),
            "restartCount": 1,
        }
    ]
    assert verdict([crashed], uri="file:///models/x")[:2] == ("False", "ModelNotFound")


def test_other_configuration_errors_do_not_affect_the_model_condition() -> None:
    crashed = fetching_pod(DONE)
    crashed["status"]["containerStatuses"] = [
        {"name": "engine", "state": failed("FATAL InvalidConfig: no"), "restartCount": 1}
    ]
    assert verdict([crashed])[:2] == ("True", "Available")


def test_a_cluster_without_image_volumes_has_its_own_reason() -> None:
    refused = ReconcileError(
        'Pod "x" is invalid: spec.volumes[1]: Required value: must specify a volume type'
    )
    assert verdict([], problem=refused, uri="image://reg/a:b")[:2] == (
        "False",
        "ImageVolumeUnsupported",
    )
    assert verdict([], problem=refused, **HUB)[:2] == ("Unknown", "NotObserved")


def test_a_missing_claim_is_reported() -> None:
    text = 'persistentvolumeclaim "models" not found'
    waiting = pod(ready=False)
    waiting["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
    ]
    status, reason, message = verdict([waiting], uri="pvc://models/x")
    assert (status, reason) == ("False", "ModelMissing")
    assert text in message
    assert verdict([waiting], **HUB, cache={"claim": "models"})[1] == "ModelMissing"
    # The claim of engine.compileCache, for example.
    assert verdict([waiting], uri="pvc://other/x")[1] == "Starting"
    assert verdict([waiting], uri="file:///x")[1] == "Starting"


async def test_unready_pods_are_probed_and_invalid_responses_are_ignored() -> None:
    answers = {
        "127.0.0.1": '{"reason":"Fetching","message":"m",'
        '"progress":{"done_bytes":1,"total_bytes":4}}',
        "127.0.0.2": "<html>",
    }

    async def health(request: web.Request) -> web.Response:
        return web.Response(text=answers[request.host.partition(":")[0]])

    pods = [pod(f"demo-decode-{i}", ready=i == 3) for i in range(4)]
    for i, each in enumerate(pods):
        each["status"]["podIP"] = f"127.0.0.{min(i + 1, 2) if i < 2 else 1}"
    pods[2]["metadata"]["deletionTimestamp"] = NOW.isoformat()
    async with (
        serving(web.get("/health", health), host="0.0.0.0") as port,
        aiohttp.ClientSession() as session,
    ):
        answers = await StatusProbes(session, port).loading(pods)
        assert await StatusProbes(session, 1).loading(pods) == {}
    assert answers == {"demo-decode-0": Health("Fetching", "m", LoadProgress(1, 4))}


@pytest.mark.parametrize(
    ("state", "started", "expected"),
    [
        (RUNNING, False, True),
        (RUNNING, True, False),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, False, False),
        (failed("FATAL InvalidConfig: no"), False, False),
    ],
    ids=["it starts", "it answered its startup probe", "it waits", "it ended"],
)
def test_a_pod_that_starts_is_probed_again_soon(
    state: Object, started: bool, expected: bool
) -> None:
    member = pod(state=state, status={"podIP": "10.0.0.1"})
    member["status"]["containerStatuses"][0]["started"] = started
    assert is_progress_expected([member], {}) is expected
    assert is_progress_expected([member], ON_THE_WAY), "the next probe is too late"
    ready = pod(ready=True, state=RUNNING, status={"podIP": "10.0.0.1"})
    assert not is_progress_expected([ready], {})


def test_a_fetcher_without_a_report_is_probed_again_soon() -> None:
    """Otherwise its first progress would be reported twenty seconds later."""
    waiting = {"waiting": {"reason": "PodInitializing"}}
    assert is_progress_expected(
        [fetching_pod(RUNNING, state=waiting, status={"podIP": "10.0.0.1"})], {}
    )
    assert not is_progress_expected(
        [fetching_pod(waiting, state=waiting, status={"podIP": "10.0.0.1"})], {}
    )
