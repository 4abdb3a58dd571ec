"""Watches: resume, selectors, bookmarks and expiry."""

from support.waiting import eventually

#: Maximum delay of past events from a busy server, in seconds.
WATCH_S = "4"


def _names(events) -> list[tuple[str, str]]:
    return [
        (event["type"], event["object"]["metadata"]["name"])
        for event in events
        if event["type"] != "BOOKMARK"
    ]


def test_a_watch_resumes_after_the_version_it_names(api, core) -> None:
    path = f"{core}/secrets"
    start = api.get(path).json()["metadata"]["resourceVersion"]
    labels = {"watched": "yes"}
    first = api.post(path, {"metadata": {"name": "a", "labels": labels}}).json()["metadata"][
        "resourceVersion"
    ]
    api.patch(f"{path}/a", {"data": {"k": "dg=="}})
    api.delete(f"{path}/a")
    query = {"labelSelector": "watched=yes", "timeoutSeconds": WATCH_S}
    assert _names(api.watch(path, resourceVersion=start, **query)) == [
        ("ADDED", "a"),
        ("MODIFIED", "a"),
        ("DELETED", "a"),
    ]
    assert _names(api.watch(path, resourceVersion=first, **query)) == [
        ("MODIFIED", "a"),
        ("DELETED", "a"),
    ]


def test_a_deletion_event_carries_a_version_after_the_creation(api, core) -> None:
    path = f"{core}/secrets"
    created = api.post(path, {"metadata": {"name": "a"}}).json()["metadata"]["resourceVersion"]
    api.delete(f"{path}/a")
    events = api.watch(
        path, resourceVersion=created, timeoutSeconds=WATCH_S, fieldSelector="metadata.name=a"
    )
    assert [event["type"] for event in events] == ["DELETED"]
    assert int(events[0]["object"]["metadata"]["resourceVersion"]) > int(created)


def test_a_watch_from_zero_begins_with_existing_objects(api, core) -> None:
    path = f"{core}/secrets"
    api.post(path, {"metadata": {"name": "old", "labels": {"w": "y"}}})
    eventually(
        lambda: (
            _names(api.watch(path, resourceVersion="0", timeoutSeconds="1", labelSelector="w=y"))
            == [("ADDED", "old")]
        ),
        "the object in the watch's first events",
    )


def test_objects_enter_and_leave_a_selector(api, core) -> None:
    path = f"{core}/secrets"
    start = api.post(path, {"metadata": {"name": "a"}}).json()["metadata"]["resourceVersion"]
    api.patch(f"{path}/a", {"metadata": {"labels": {"in": "yes"}}})
    left = api.patch(f"{path}/a", {"metadata": {"labels": {"in": "no"}}}).json()["metadata"][
        "resourceVersion"
    ]
    events = api.watch(path, resourceVersion=start, labelSelector="in=yes", timeoutSeconds=WATCH_S)
    assert _names(events) == [("ADDED", "a"), ("DELETED", "a")]
    last = events[-1]["object"]["metadata"]
    assert (last["labels"], last["resourceVersion"]) == ({"in": "yes"}, left), (
        "the last state that matched"
    )


def test_a_version_from_before_the_history_is_gone(api, relays) -> None:
    api.post(relays.path, relays.body("w"))
    events = api.watch(relays.path, resourceVersion="1", timeoutSeconds="2")
    assert events[-1]["type"] == "ERROR"
    assert events[-1]["object"]["code"] == 410
    assert events[-1]["object"]["reason"] in ("Expired", "Gone")


def test_custom_resources_can_be_watched(api, relays) -> None:
    created = api.post(relays.path, relays.body("w")).json()["metadata"]["resourceVersion"]
    api.patch(relays.at("w", "status"), {"status": {"replicas": 1}})
    events = api.watch(relays.path, resourceVersion=created, timeoutSeconds=WATCH_S)
    assert _names(events) == [("MODIFIED", "w")]
    assert events[0]["object"]["kind"] == "Relay"
    assert events[0]["object"]["apiVersion"] == relays.api_version
