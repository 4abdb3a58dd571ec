"""The URIs of models."""

from __future__ import annotations

import pytest

from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.sources.uri import HubModel, StoredModel, is_hub_name, parse


@pytest.mark.parametrize(
    ("uri", "model", "name"),
    [
        ("hf://org/m", HubModel("org/m", "main"), "org/m"),
        ("hf://org/m@refs/pr/1", HubModel("org/m", "refs/pr/1"), "org/m"),
        ("s3://bucket/models/m/", StoredModel("s3", "bucket", "models/m"), "m"),
        ("gs://my.bucket//m", StoredModel("gs", "my.bucket", "m"), "m"),
    ],
)
def test_a_uri_is_parsed_and_built_again(
    uri: str, model: HubModel | StoredModel, name: str
) -> None:
    assert parse(uri) == model
    assert parse(model.uri) == model
    assert model.name == name


@pytest.mark.parametrize(
    "uri",
    [
        "hf://m",
        "hf://org/m@",
        "hf://../m",
        "hf://org/m@../x",
        "hf://org/m\n",
        "s3://bucket/",
        "s3://bucket/a/../b",
        "s3://Bucket/m",
        "https://host/m",
        "",
    ],
)
def test_other_uris_are_refused_with_the_forms(uri: str) -> None:
    with pytest.raises(FetchError, match="is none of hf://") as refused:
        parse(uri)
    assert refused.value.reason == "ModelUriInvalid"


def test_a_hub_name_has_an_organisation() -> None:
    assert is_hub_name("org/m@v1")
    assert not is_hub_name("m")
    assert not is_hub_name("./org/m")
