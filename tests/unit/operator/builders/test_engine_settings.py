"""The fields that set options of engines, per role, and extra arguments."""

from __future__ import annotations

import functools
from operator import attrgetter, getitem
from typing import Any

import msgspec
import pytest

from baton_kube.client import Object
from baton_operator.api.llmservice import KVTransfer
from baton_operator.api.spec_engine import Engine, Storage, merged
from baton_operator.builders import config_maps
from baton_operator.builders.engine_settings import COMPUTED
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.names import MEMBER_ROLES, MemberRole
from baton_protocol.options.config import EngineConfig, KVRole
from baton_protocol.options.engine_options import OPTIONS
from baton_protocol.options.option import Option
from support.operator.services import decoded_config, resolved

CACHE, DIAGNOSTICS = "/var/cache/baton", "/var/log/baton"

EXPERT: dict[str, Any] = {"decode": {"parallelism": {"expert": True}}}

#: Field -> (value, the options that it sets).
ENGINE: dict[str, tuple[Any, dict[str, Any]]] = {
    "device": ("cpu", {"device": "cpu"}),
    "blockSize": (32, {"cache.block_size": 32}),
    "numBlocks": (7, {"cache.num_blocks": 7}),
    "kvCacheMemory": ("3Mi", {"cache.memory_bytes": 3 * 2**20}),
    "gpuMemoryUtilizationPercent": (57, {"cache.gpu_memory_utilization": 0.57}),
    "offloadMemory": ("3Mi", {"cache.offload_memory_bytes": 3 * 2**20}),
    "swapMemory": ("3Mi", {"cache.swap_memory_bytes": 3 * 2**20}),
    "enablePrefixCaching": (False, {"cache.enable_prefix_caching": False}),
    "maxNumBatchedTokens": (7, {"scheduler.max_num_batched_tokens": 7}),
    "longPrefillTokenThreshold": (7, {"scheduler.long_prefill_token_threshold": 7}),
    "targetItlMilliseconds": (7, {"scheduler.target_itl_s": 0.007}),
    "maxNumSeqs": (7, {"scheduler.max_num_seqs": 7}),
    "maxQueue": (7, {"scheduler.max_queue": 7}),
    "schedulingPolicy": ("fcfs", {"scheduler.policy": "fcfs"}),
    "preemptionMode": ("swap", {"scheduler.preemption_mode": "swap"}),
    "asyncScheduling": (True, {"scheduler.async_scheduling": True}),
    "numThreads": (7, {"num_threads": 7}),
    "stepTimeoutSeconds": (7, {"parallel.step_timeout_s": 7.0}),
    "enforceEager": (True, {"compilation.enforce_eager": True}),
    "compilationMode": ("none", {"compilation.mode": "none"}),
    "cudagraphMode": ("full", {"compilation.cudagraph_mode": "full"}),
    "compileCache": ({"claim": "c"}, {"compilation.cache_dir": CACHE}),
    "diagnostics": (
        {"claim": "c"},
        {
            "observability.profiler_dir": DIAGNOSTICS,
            "observability.crash_dump_dir": DIAGNOSTICS,
        },
    ),
    "logIterations": (True, {"observability.log_iterations": True}),
    "countNansInLogits": (True, {"observability.count_nans_in_logits": True}),
    "extraArgs": (["--watermark", "0.5"], {"cache.watermark": 0.5}),
}
#: Field -> (value, the option that it sets, the option's value, the roles that read it).
KV_TRANSFER: dict[str, tuple[Any, str, Any, set[MemberRole]]] = {
    "transport": ("tcp", "transport", "tcp", {"prefill", "decode"}),
    "rdma": (True, "rdma", True, {"prefill", "decode"}),
    "mode": ("push", "mode", "push", {"prefill", "decode"}),
    "loadFailurePolicy": ("fail", "load_failure_policy", "fail", {"prefill", "decode"}),
    "leaseSeconds": (7, "lease_s", 7.0, {"prefill"}),
    "loadTimeoutSeconds": (7, "load_timeout_s", 7.0, {"decode"}),
    "maxInflightMemory": ("3Mi", "max_inflight_bytes", 3 * 2**20, {"prefill", "decode"}),
    "stagingMemory": ("3Mi", "staging_bytes", 3 * 2**20, {"prefill", "decode"}),
}
#: Option that the operator computes -> (spec, role -> value of the option).
COMPUTED_OPTIONS: dict[str, tuple[dict[str, Any], dict[MemberRole, Any]]] = {
    **{
        f"model.{option}": (
            {"model": {"uri": "file:///m", field: value}},
            {"prefill": expected, "decode": expected},
        )
        for option, field, value, expected in (
            ("path", "uri", "file:///n", "/n"),
            ("served_name", "servedName", "n", "n"),
            ("runner", "runner", "generate", "generate"),
            ("dtype", "dtype", "float32", "float32"),
            ("quantization", "quantization", "int8", "int8"),
            ("max_model_len", "maxModelLen", 7, 7),
        )
    },
    "kv_transfer.role": (
        {"prefill": {"replicas": 1}},
        {"prefill": KVRole.PRODUCER, "decode": KVRole.CONSUMER},
    ),
    "parallel.tensor_parallel_size": (
        {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"parallelism": {"tensor": 3}}},
        {"prefill": 2, "decode": 3},
    ),
    "parallel.pipeline_parallel_size": (
        {"decode": {"parallelism": {"pipeline": 3}}},
        {"decode": 3},
    ),
    "parallel.enable_expert_parallel": (EXPERT, {"decode": True}),
    "parallel.coordinator": (EXPERT, {"decode": "10.0.0.1:5560"}),
    "parallel.num_redundant_experts": (
        {"decode": {"parallelism": {"expert": True, "redundantExperts": 3}}},
        {"decode": 3},
    ),
    "drain_timeout_s": ({"drainTimeoutSeconds": 7}, {"prefill": 7.0, "decode": 7.0}),
}


def api_names(struct: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(struct)]


def changes(role: MemberRole, spec: Object) -> dict[str, Any]:
    """Return the options that `spec` changes in the configuration that `role` reads."""
    before: EngineConfig = decoded_config(role, EngineConfig, prefill={})
    after: EngineConfig = decoded_config(role, EngineConfig, **{"prefill": {}, **spec})
    return {
        option.path: value
        for option in OPTIONS
        if (value := attrgetter(option.path)(after)) != attrgetter(option.path)(before)
    }


def error(role: MemberRole = "decode", **spec: Any) -> str:
    """Return the message with which the spec is refused. Empty: it is accepted."""
    try:
        config_maps.engine_config(resolved(**spec), role)
    except ValueError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("field", api_names(Engine))
def test_each_field_reaches_the_engines_of_its_roles(field: str) -> None:
    value, options = ENGINE[field]
    for role in MEMBER_ROLES:
        assert changes(role, {"engine": {field: value}}) == options
        assert changes(role, {role: {"engine": {field: value}}}) == options
        (other,) = set(MEMBER_ROLES) - {role}
        assert changes(other, {"prefill": {}, role: {"engine": {field: value}}}) == {}


@pytest.mark.parametrize("field", api_names(KVTransfer))
def test_each_field_of_the_kv_transfer_reaches_the_engines_that_read_it(field: str) -> None:
    value, option, expected, roles = KV_TRANSFER[field]
    for role in MEMBER_ROLES:
        assert changes(role, {"kvTransfer": {field: value}}) == (
            {f"kv_transfer.{option}": expected} if role in roles else {}
        )


@pytest.mark.parametrize("option", COMPUTED)
def test_each_computed_option_is_set_by_its_field(option: str) -> None:
    spec, expected = COMPUTED_OPTIONS[option]
    read = attrgetter(option)
    for role in MEMBER_ROLES:
        unset = read(decoded_config(role, EngineConfig))
        assert expected.get(role, unset) == read(
            decoded_config(role, EngineConfig, coordinator="10.0.0.1", **spec)
        )
    assert set(expected.values()) != {unset}
    for role in expected:
        assert functools.reduce(getitem, COMPUTED[option].format(role=role).split("."), spec)


def test_fields_of_a_role_override_those_of_the_service() -> None:
    service = Engine(
        max_num_seqs=1,
        max_queue=2,
        enable_prefix_caching=True,
        compile_cache=Storage(claim="a"),
        extra_args=["--watermark=0"],
    )
    role = Engine(
        max_num_seqs=3,
        enable_prefix_caching=False,
        long_prefill_token_threshold=0,
        compile_cache=Storage(host_path="/b"),
        extra_args=["--watermark=0.5"],
    )
    assert merged(service, role) == Engine(
        max_num_seqs=3,
        max_queue=2,
        enable_prefix_caching=False,
        long_prefill_token_threshold=0,
        compile_cache=Storage(host_path="/b"),
        extra_args=["--watermark=0", "--watermark=0.5"],
    )
    assert merged(service, None) == merged(service, Engine()) == service
    assert merged(Engine(), role) == role


def test_threads_and_device_of_a_role_reach_its_pods() -> None:
    spec = {
        "engine": {"numThreads": 2},
        "prefill": {"engine": {"numThreads": 3}},
        "decode": {"parallelism": {"expert": True}},
    }
    made = resolved(coordinator="10.0.0.1", **spec)
    for role, threads in (("prefill", "3"), ("decode", "2")):
        env = MemberTemplate(made, role).pod(0)["spec"]["containers"][0]["env"]
        assert {"name": "OMP_NUM_THREADS", "value": threads} in env
    spec["decode"]["engine"] = {"device": "cpu"}
    assert resolved(**spec).expert_group("decode") != resolved(
        **spec | {"decode": {"parallelism": {"expert": True}}}
    ).expert_group("decode"), "ranks of two devices would share a topology"


# Volumes


@pytest.mark.parametrize(
    ("storage", "source"),
    [
        ({"claim": "c"}, {"persistentVolumeClaim": {"claimName": "c"}}),
        ({"hostPath": "/d"}, {"hostPath": {"path": "/d", "type": "DirectoryOrCreate"}}),
    ],
)
@pytest.mark.parametrize(
    ("field", "name", "path"),
    [("compileCache", "compile-cache", CACHE), ("diagnostics", "diagnostics", DIAGNOSTICS)],
)
def test_volumes_that_outlive_the_pods(
    field: str, name: str, path: str, storage: Object, source: Object
) -> None:
    made = resolved(prefill={}, decode={"engine": {field: storage}})
    spec = MemberTemplate(made, "decode").pod(0)["spec"]
    assert {"name": name, **source} in spec["volumes"]
    assert {"name": name, "mountPath": path} in spec["containers"][0]["volumeMounts"]
    assert {path} == set(changes("decode", {"engine": {field: storage}}).values())
    assert name not in str(MemberTemplate(made, "prefill").pod(0))


# Extra arguments


def sample(option: Option) -> str:
    if option.type is bool:
        return option.flag
    return f"{option.flag}={'1' if option.type is int or 'int' in str(option.type) else '0.5'}"


def test_extra_arguments_set_options_without_a_field_except_those_of_the_operator() -> None:
    accepted = {
        option.flag for option in OPTIONS if not error(engine={"extraArgs": [sample(option)]})
    }
    assert accepted == {
        "--bind-threads",
        "--capture-sizes",
        "--collective-timeout-s",
        "--compile-sizes",
        "--enable-chunked-prefill",
        "--enable-kv-events",
        "--watermark",
    }


@pytest.mark.parametrize("flag", ["--executor", "--scheduler-class", "--worker-class"])
def test_an_extra_argument_cannot_name_code_that_the_engine_imports(flag: str) -> None:
    service = {"extraArgs": ["--watermark=0.1"]}
    hostile = {"engine": {"extraArgs": [f"{flag}=attacker.module.Class"]}}
    for level, spec in (
        ("engine", hostile),
        ("decode.engine", {"engine": service, "decode": hostile}),
    ):
        assert error(**spec) == (
            f"{level}.extraArgs[0]: {flag} names code that the engine would execute; remove it, or "
            "add it to the command of the container in decode.template"
        )


def test_the_extra_arguments_of_a_role_follow_those_of_the_service() -> None:
    spec = {
        "engine": {"extraArgs": ["--watermark=0.25", "--no-bind-threads"]},
        "decode": {"engine": {"extraArgs": ["--watermark", "0.5", "--capture-sizes=1,2"]}},
    }
    assert changes("prefill", spec) == {"cache.watermark": 0.25, "bind_threads": False}
    assert changes("decode", spec) == {
        "cache.watermark": 0.5,
        "bind_threads": False,
        "compilation.capture_sizes": (1, 2),
    }


@pytest.mark.parametrize(
    ("arguments", "index", "message"),
    [
        (["--bogus"], 0, "unrecognized arguments: --bogus"),
        (["--watermark", "0.5", "--bogus", "1"], 2, "unrecognized arguments: --bogus 1"),
        (["--watermark", "0.5", "junk"], 0, "unrecognized arguments: junk"),
        (["junk"], 0, "unrecognized arguments: junk"),
        (["--water=0.5"], 0, "unrecognized arguments: --water=0.5"),
        (["--help"], 0, "unrecognized arguments: --help"),
        (["--config=/f"], 0, "unrecognized arguments: --config=/f"),
        (["--watermark"], 0, "argument --watermark: expected one argument"),
        (["--watermark=x"], 0, "argument --watermark: invalid float value: 'x'"),
        (
            ["--no-bind-threads", "--watermark", "-1"],
            1,
            "--watermark must be in [0, 1), got -1.0",
        ),
        (
            ["--compile-sizes=600"],
            0,
            "--compile-sizes must be numbers of tokens of a step, 1 to "
            "max_num_batched_tokens=512, got (600,)",
        ),
        (["--model", "/m"], 0, "remove --model, and set the field model.uri"),
        (["--engine-port", "1"], 0, "the operator sets --engine-port"),
        (["--max-num-seqs=5"], 0, "remove --max-num-seqs, and set the field engine.maxNumSeqs"),
        (["--kv-lease-s=5"], 0, "remove --kv-lease-s, and set the field kvTransfer.leaseSeconds"),
    ],
)
def test_a_wrong_extra_argument_is_refused_with_its_field(
    arguments: list[str], index: int, message: str
) -> None:
    service = {"extraArgs": ["--watermark=0.1", "--no-enable-kv-events"]}
    for level, spec in (
        ("engine", {"engine": {"extraArgs": arguments}}),
        ("decode.engine", {"engine": service, "decode": {"engine": {"extraArgs": arguments}}}),
    ):
        assert error(**spec) == f"{level}.extraArgs[{index}]: {message}"


def test_an_extra_argument_without_a_flag_is_refused() -> None:
    # The rest of the message depends on the version of Python.
    assert error(engine={"extraArgs": ["--"]}).startswith("engine.extraArgs[0]: ")


def test_extra_arguments_of_prefill_do_not_affect_decode() -> None:
    spec = {"prefill": {"engine": {"extraArgs": ["--bogus"]}}}
    assert config_maps.engine_config(resolved(**spec), "decode").cache.watermark == 0.01
    assert error("prefill", **spec).startswith("prefill.engine.extraArgs[0]: ")


def test_values_that_cannot_work_together_are_refused_with_the_field() -> None:
    whole = {"extraArgs": ["--no-enable-chunked-prefill"]}
    model = {"uri": "file:///m", "maxModelLen": 1000}
    assert error(model=model, engine=whole).startswith(
        "engine.maxNumBatchedTokens is 512, but without chunked prefill"
    )
    assert error(
        model=model, engine=whole, decode={"engine": {"maxNumBatchedTokens": 7}}
    ).startswith("decode.engine.maxNumBatchedTokens is 7, but")
    assert (
        error(engine=whole | {"targetItlMilliseconds": 5})
        == "engine.targetItlMilliseconds needs scheduler.enable_chunked_prefill"
    )


def test_a_value_out_of_the_engines_bounds_is_refused_with_the_field() -> None:
    """The schema has bounds of its own, but an object may be older than them."""
    made = resolved()
    wrong = Engine(max_num_seqs=0)
    decode = msgspec.structs.replace(made.spec.decode, engine=wrong)
    for spec, field in (
        (msgspec.structs.replace(made.spec, engine=wrong), "engine.maxNumSeqs"),
        (msgspec.structs.replace(made.spec, decode=decode), "decode.engine.maxNumSeqs"),
    ):
        with pytest.raises(ValueError, match=rf"^{field} must be at least 1, got 0$"):
            config_maps.engine_config(msgspec.structs.replace(made, spec=spec), "decode")
