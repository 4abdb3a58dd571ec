"""`LLM` and `AsyncLLM` download a model that is not a local folder, and use it again later."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_engine import LLM, AsyncLLM, SamplingParams
from baton_engine.llm import model_fetch
from baton_protocol.process.fatal import ConfigurationError
from support.fetch.fake_hub import FakeHub, fake_hub, folder_files
from support.fetch.fake_store import ACCESS_KEY, fake_store

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_blocks": 16,
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 128,
}
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def tokens(checkpoint: Path) -> list[int]:
    """The tokens that the checkpoint generates."""
    return generated(checkpoint)


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with fake_hub(folder_files(checkpoint)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def generated(model: str | Path, **args: Any) -> list[int]:
    with LLM(model, **OPTIONS, **args) as llm:
        [output] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def test_a_model_of_the_hub_is_downloaded_once(
    hub: FakeHub, tmp_path: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generated("org/model", download_dir=tmp_path) == tokens
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    assert generated("hf://org/model", download_dir=tmp_path, revision="main") == tokens


def test_a_revision_is_downloaded(hub: FakeHub, tmp_path: Path, tokens: list[int]) -> None:
    hub.branch = "v1"
    assert generated("org/model", download_dir=tmp_path, revision="v1") == tokens
    with pytest.raises(ConfigurationError, match=r"the hub has no hf://org/model@v2"):
        generated("org/model", download_dir=tmp_path, revision="v2")


def test_a_local_folder_of_the_name_is_loaded_without_a_download(
    hub: FakeHub,
    checkpoint: Path,
    tmp_path: Path,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(checkpoint, tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert generated("org/model") == tokens
    assert hub.downloads.total() == 0


async def test_an_async_llm_loads_a_model_of_an_object_store(
    checkpoint: Path, tmp_path: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = {f"models/m/{name}": content for name, content in folder_files(checkpoint).items()}
    with fake_store("bucket", objects) as store:
        settings = {
            "AWS_ENDPOINT_URL": store.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        llm = AsyncLLM("s3://bucket/models/m", download_dir=tmp_path, **OPTIONS)
    async with llm:
        outputs = [output async for output in llm.generate([1, 2, 3], GREEDY)]
        names = {metric.labels.get("model_name") for metric in await llm.get_metrics()}
    assert outputs[-1].outputs[0].token_ids == tokens
    assert "m" in names


def test_one_progress_bar_is_shown_for_all_files(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # huggingface_hub also shows bars without a terminal
    with LLM("org/model", download_dir=tmp_path, **OPTIONS):
        shown = capfd.readouterr().err
    assert "Downloading org/model: 100%" in shown
    assert ".safetensors:" not in shown
    with LLM("org/model", download_dir=tmp_path, **OPTIONS):
        assert "Downloading" not in capfd.readouterr().err


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_missing_model_without_a_network_is_an_error_that_says_what_to_do(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    if is_offline:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        reason = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids its download"
    else:
        monkeypatch.setenv("HF_ENDPOINT", NOBODY)
        monkeypatch.setattr(model_fetch, "GIVE_UP_AFTER_S", 0.1)
        reason = "nothing was received for 0.1 s"
    with pytest.raises(ConfigurationError) as failed:
        LLM("org/model", download_dir=tmp_path, **OPTIONS)
    assert failed.value.reason == "ModelSourceUnavailable"
    message = failed.value.message
    assert reason in message
    assert "there is no local folder org/model" in message
    assert f"{tmp_path}/org-model-main-" in message
    assert "copy this folder of the cache" in message


def test_wrong_arguments_are_refused_before_the_download(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM("org/model", download_dir=tmp_path, max_num_seqs=0)
    assert hub.downloads.total() == 0
