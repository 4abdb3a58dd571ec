"""The salts of prefix caches: each client's requests have their own, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton_gateway.requests.cache_salts import CacheSalts
from baton_protocol.engine_messages import CLIENT_CHARS, EngineCoreRequest, ErrorCode
from baton_protocol.options.config import AccessConfig
from baton_protocol.service_key import ServiceKey
from support.gateway.fake_engine import FakeEngine
from support.gateway.gateway_rig import GatewayRig, MakeRig

KEY = ServiceKey(b"k" * 32)
CLIENTS = ("team-a", "team-b")


class RememberingEngine(FakeEngine):
    """Reports the prompt tokens of earlier requests with the same salt as cached."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prompts: dict[str, list[list[int]]] = {}
        self.cached_tokens = self._cached

    def _cached(self, request: EngineCoreRequest) -> int:
        known = self._prompts.setdefault(request.cache_salt, [])
        is_cached = request.prompt_token_ids in known
        known.append(request.prompt_token_ids)
        return len(request.prompt_token_ids) if is_cached else 0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    for client in CLIENTS:
        (folder / client).write_text(f"the-secret-key-of-{client}")
    return folder


async def start(rig: GatewayRig) -> None:
    engine = RememberingEngine("d", "decode", rig.tokenizer.encode("hello"))
    rig.engines.append(engine)
    await rig.start(engine)


async def cached_tokens(rig: GatewayRig, client: str | None, **fields: Any) -> int:
    headers = {} if client is None else {"Authorization": f"Bearer the-secret-key-of-{client}"}
    body = {"prompt": "a secret prompt", "max_tokens": 1, **fields}
    status, answer, _ = await rig.post("/v1/completions", body, headers=headers)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_client_finds_no_prompt_of_another_client_in_the_cache(
    make_rig: MakeRig, keys: Path
) -> None:
    rig = make_rig(access=AccessConfig(api_keys_dir=str(keys)))
    await start(rig)
    assert await cached_tokens(rig, "team-a") == 0
    salt_of_a = rig.engines[0].adds[0].cache_salt
    assert await cached_tokens(rig, "team-a") > 0, "the client's own prompt is cached"
    for guess in ("", "team-a", "team-a/", salt_of_a):
        assert await cached_tokens(rig, "team-b", cache_salt=guess) == 0, guess
    assert await cached_tokens(rig, "team-a", cache_salt="own") == 0
    assert await cached_tokens(rig, "team-a", cache_salt="own") > 0


async def test_a_declared_salt_is_shared_by_all_clients(make_rig: MakeRig, keys: Path) -> None:
    access = AccessConfig(api_keys_dir=str(keys), shared_cache_salts=("system",))
    rig = make_rig(access=access)
    await start(rig)
    assert await cached_tokens(rig, "team-a", cache_salt="system") == 0
    assert await cached_tokens(rig, "team-b", cache_salt="system") > 0
    assert await cached_tokens(rig, "team-b", cache_salt="systems") == 0


@pytest.mark.parametrize("with_keys", [True, False])
async def test_the_cache_is_shared_in_the_whole_service_if_configured_or_without_keys(
    make_rig: MakeRig, keys: Path, with_keys: bool
) -> None:
    access = (
        AccessConfig(api_keys_dir=str(keys), cache_sharing="service")
        if with_keys
        else AccessConfig()
    )
    a, b = CLIENTS if with_keys else (None, None)
    rig = make_rig(access=access)
    await start(rig)
    assert await cached_tokens(rig, a) == 0
    assert await cached_tokens(rig, b) > 0
    assert await cached_tokens(rig, a, cache_salt="own") == 0
    assert await cached_tokens(rig, b, cache_salt="own") > 0


async def test_all_engines_of_a_request_get_the_same_salt(make_rig: MakeRig, keys: Path) -> None:
    """Prefill, decode, and another decode engine after a failure."""
    rig = make_rig(access=AccessConfig(api_keys_dir=str(keys)))
    prefill = rig.engine("p", "prefill")
    first, second = rig.engine("d1", "decode"), rig.engine("d2", "decode")
    first.planned_errors.append((2, ErrorCode.INTERNAL))
    second.planned_errors = first.planned_errors
    await rig.start(prefill, first, second)
    await cached_tokens(rig, "team-a", max_tokens=3, n=2)
    adds = [request for engine in rig.engines for request in engine.adds]
    assert all(engine.adds for engine in rig.engines)
    assert {request.cache_salt for request in adds} == {
        CacheSalts(AccessConfig(), None).salt("team-a", "")
    }


def test_gateways_with_one_service_key_compute_the_same_salts() -> None:
    salts = [CacheSalts(AccessConfig(), key) for key in (KEY, KEY, ServiceKey(b"o" * 32), None)]
    of_a = [each.salt("team-a", "s") for each in salts]
    assert of_a[0] == of_a[1]
    assert len(set(of_a)) == 3
    assert not any("team-a" in salt for salt in of_a)


def test_pairs_of_client_and_salt_have_different_salts() -> None:
    salts = CacheSalts(AccessConfig(), KEY)
    pairs = [("a", "b/c"), ("a", "b"), ("ab", ""), ("a", ""), ("b", ""), ("a", "/b")]
    assert len({salts.salt(*pair) for pair in pairs}) == len(pairs)


def test_all_salts_of_a_client_begin_with_the_same_characters() -> None:
    salts = CacheSalts(AccessConfig(), KEY)
    starts = {
        client: {salts.salt(client, requested)[:CLIENT_CHARS] for requested in ("", "s", "t")}
        for client in CLIENTS
    }
    assert all(len(each) == 1 for each in starts.values())
    assert starts["team-a"].isdisjoint(starts["team-b"])
