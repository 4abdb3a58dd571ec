"""The message of a fatal line."""

from __future__ import annotations

from baton_operator.status.diagnose import diagnose
from support.operator.reported_groups import BACK_OFF
from support.operator.services import pod


def test_a_message_of_an_engine_names_the_fields_of_its_options() -> None:
    text = (
        "model.max_model_len is 9 tokens: lower model.max_model_len, or raise cache.memory_bytes "
        "or cache.gpu_memory_utilization, not cache.watermark, model.dtype or a.memory_bytes"
    )
    last = {"exitCode": 78, "message": f"FATAL KVMemoryTooSmall: {text}"}
    found = diagnose([pod("demo-decode-a", state=BACK_OFF, last=last)])
    assert found is not None
    assert found.message == (
        "model.max_model_len (model.maxModelLen) is 9 tokens: lower model.max_model_len "
        "(model.maxModelLen), or raise cache.memory_bytes (engine.kvCacheMemory) or "
        "cache.gpu_memory_utilization (engine.gpuMemoryUtilizationPercent), not cache.watermark, "
        "model.dtype or a.memory_bytes (pod demo-decode-a)"
    )
