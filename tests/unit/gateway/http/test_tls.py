"""The certificate of the gateway is read again while it serves."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import aiohttp
import openai
import pytest
from cryptography import x509

from baton_gateway import server
from baton_gateway.http.tls import ServerCertificate
from baton_protocol.options.config import AccessConfig
from support.gateway.certificates import write_certificate
from support.gateway.gateway_rig import MakeRig, http_session
from support.waiting import until

COMPLETION = {"model": "m", "prompt": "hello", "max_tokens": 2}


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECRETS_POLL_S", 0.02)


async def served_certificate(port: int) -> str:
    """Return the subject of the certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(der).subject.rfc4514_string()


async def test_a_renewed_certificate_is_used_for_new_connections(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    folder = tmp_path / "tls"
    write_certificate(folder, "first")
    rig = make_rig(access=AccessConfig(tls_dir=str(folder)))
    await rig.start(engine := rig.engine("d", "decode"))
    port = int(rig.url.rsplit(":", 1)[1])
    trusted = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    async with openai.DefaultAsyncHttpxClient(verify=trusted, trust_env=False) as http:
        client = openai.AsyncOpenAI(
            base_url=f"https://127.0.0.1:{port}/v1", api_key="x", http_client=http, max_retries=0
        )
        engine.hold_after = 1
        stream = await client.completions.create(**COMPLETION, stream=True)
        write_certificate(folder, "second")

        async def is_renewed() -> bool:
            return await served_certificate(port) == "CN=second"

        await until(is_renewed, "the new certificate on new connections")
        engine.released.set()
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length", "the change ended the stream"
    assert not await answers_plain_http(port)


async def test_no_handshake_fails_while_certificates_are_renewed(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that was loaded in another thread reset one of 80 connections."""
    monkeypatch.setattr(server, "SECRETS_POLL_S", 0.001)
    folder = tmp_path / "tls"
    write_certificate(folder, "0")
    rig = make_rig(access=AccessConfig(tls_dir=str(folder)))
    await rig.start(rig.engine("d", "decode"))
    port = int(rig.url.rsplit(":", 1)[1])
    last = 30

    async def connect() -> None:
        while await served_certificate(port) != f"CN={last}":
            pass

    async with asyncio.TaskGroup() as clients:
        for _ in range(4):
            clients.create_task(connect())
        for number in range(1, last + 1):
            await asyncio.to_thread(write_certificate, folder, str(number))
            await asyncio.sleep(0.01)


async def answers_plain_http(port: int) -> bool:
    try:
        async with http_session() as session, session.get(f"http://127.0.0.1:{port}/health"):
            return True
    except aiohttp.ClientError:
        return False


def test_a_certificate_without_its_key_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_certificate(tmp_path / "new", "new")
    write_certificate(tmp_path / "tls", "old")
    served = ServerCertificate(tmp_path / "tls")

    def subject() -> str:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = served.context.wrap_bio(incoming, outgoing, server_side=True)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        theirs = context.wrap_bio(outgoing, incoming)
        for side in (theirs, ours, theirs, ours):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
        der = theirs.getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der).subject.rfc4514_string()

    assert subject() == "CN=old"
    os.replace(tmp_path / "new/tls.crt", tmp_path / "tls/tls.crt")
    served.refresh()
    served.refresh()
    assert subject() == "CN=old"
    assert caplog.text.count("is not usable, so the old one stays in use") == 1
    os.replace(tmp_path / "new/tls.key", tmp_path / "tls/tls.key")
    served.refresh()
    assert subject() == "CN=new"
    (tmp_path / "tls/tls.crt").unlink()
    served.refresh()
    assert subject() == "CN=new"
