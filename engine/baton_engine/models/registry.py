"""Registry of the model classes, by architecture name in config.json."""

from __future__ import annotations

from baton_engine.models.layers import Model

MODEL_CLASSES: dict[str, type[Model]] = {}


def register(model_class: type[Model]) -> type[Model]:
    """Register the decorated class for the architecture of the same name."""
    MODEL_CLASSES[model_class.__name__] = model_class
    return model_class
