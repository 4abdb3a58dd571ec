"""Read the YAML files that users write: one LLMService, and other Kubernetes objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from baton_kube.client import Object
from baton_operator import names

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def load_documents(path: Path) -> list[Object]:
    """Return the documents of a YAML file, each of which is a Kubernetes object.

    Raises:
        ValueError: the file cannot be read, or a document is not a Kubernetes object.
    """
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    for document in documents:
        if complaint := _complaint(document):
            raise ValueError(f"{path}: {complaint}")
    return documents


def load_service(path: Path) -> tuple[list[Object], Object]:
    """Return all objects of a YAML file, and the only LLMService among them.

    Raises:
        ValueError: the file cannot be read, or does not contain exactly one LLMService.
    """
    documents = load_documents(path)
    services = [document for document in documents if document["kind"] == names.KIND]
    if len(services) != 1:
        raise ValueError(f"{path} must hold exactly one {names.KIND}, it holds {len(services)}")
    return documents, services[0]


def _complaint(document: Any) -> str:
    """Return why `document` is not a Kubernetes object; empty if it is a Kubernetes object."""
    if not isinstance(document, dict) or not {"apiVersion", "kind", "metadata"} <= document.keys():
        return "every document needs apiVersion, kind and metadata"
    try:
        json.dumps(document, allow_nan=False)
    except TypeError as error:  # for example a date
        return f"{error}; write it in quotes"
    except RecursionError:
        return "nested too deeply"
    except ValueError as error:
        return "an alias refers to itself" if "Circular" in str(error) else f"not JSON: {error}"
    metadata = document["metadata"]
    if not isinstance(metadata, dict) or "name" not in metadata:
        return f"metadata must be an object with a name, got {metadata!r}"
    texts = {
        "apiVersion": document["apiVersion"],
        "kind": document["kind"],
        "metadata.name": metadata["name"],
    }
    for field, value in {**texts, "metadata.namespace": metadata.get("namespace", "")}.items():
        if not isinstance(value, str):
            return f"{field} must be a string, got {value!r}"
    if not isinstance(annotations := metadata.get("annotations") or {}, dict):
        return f"metadata.annotations must be an object, got {annotations!r}"
    return ""


def as_kubectl_applies(document: Object) -> Object:
    """Return `document` with the last-applied annotation that `kubectl apply` writes.

    With this annotation, a later `kubectl apply` removes the fields that the user has deleted from
    the file.
    """
    metadata = {"annotations": {}, **document["metadata"]}
    applied = {**document, "metadata": metadata}
    text = json.dumps(applied, sort_keys=True, separators=(",", ":")) + "\n"
    annotations = {**(metadata["annotations"] or {}), LAST_APPLIED: text}
    return {**document, "metadata": {**metadata, "annotations": annotations}}
