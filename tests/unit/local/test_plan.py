"""`baton plan`: its output and its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton_local.cli import main

SAMPLES = Path(__file__).parents[3] / "manifests" / "samples"
DEMO = SAMPLES / "demo.yaml"


@pytest.fixture
def plan(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command. It returns the exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return run


@pytest.fixture
def edited(tmp_path) -> Callable[..., Path]:
    """Return a function that writes a sample with replaced texts."""

    def write(name: str = "demo", **replaced: str) -> Path:
        text = (SAMPLES / f"{name}.yaml").read_text()
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text)
        return path

    return write


def test_a_rollout_is_printed_step_by_step(plan, edited) -> None:
    code, out, err = plan(
        DEMO, edited(**{"  prefill:": "  image: b:2\n  prefill:", "replicas: 2": "replicas: 3"})
    )
    assert (code, err) == (0, "")
    assert 'spec.image            "baton:0.1.0" -> "b:2"' in out
    assert "changes Deployment demo-gateway" in out
    assert "Step 1 at 0 s\n  > create demo-prefill-1 (rollout: 1 exist, at most 2 may)" in out
    assert "  - demo-prefill-1, demo-decode-2, demo-decode-3: ready\n" in out
    assert "  > drain demo-decode-1 (it is of the earlier revision)" in out
    assert "(earlier)  draining" in out
    assert out.endswith(
        "Settled after 7 steps, 72 s simulated.\n"
        "  prefill: never fewer than 1 of 1 members served, at most 2 existed\n"
        "  decode: never fewer than 2 of 3 members served, at most 4 existed\n"
    )
    assert "\x1b" not in out, "colours without a terminal"


def test_a_single_file_is_planned_as_a_creation(plan) -> None:
    code, out, _ = plan(SAMPLES / "experts.yaml", "--ready-after", "10")
    assert code == 0
    assert out.startswith("LLMService experts, created from nothing\n")
    assert "Step 2 at 10 s, topology generation 0" in out
    assert "rank 1\n" in out
    assert "Settled after 4 steps, 16 s simulated." in out


def test_no_line_is_wrapped(plan) -> None:
    _, out, _ = plan(SAMPLES / "many-nodes.yaml")
    assert max(map(len, out.splitlines())) > 200


def test_a_rollout_that_stops_is_reported_with_the_reason(plan, edited) -> None:
    new = edited(**{"  prefill:": "  image: b:2\n  prefill:"})
    code, out, _ = plan(DEMO, new, "--never-ready")
    assert code == 2
    assert "Not settled after 1 step, 600 s simulated." in out
    assert (
        "  demo-prefill-1, demo-decode-2: not ready within progressDeadlineSeconds (600 s)\n" in out
    )
    code, out, _ = plan(DEMO, new, "--steps", 2)
    assert code == 2
    assert "Waits for:\n  the limit of 2 steps (--steps) is reached\n" in out


def test_a_full_cluster_is_simulated(plan, edited) -> None:
    code, out, _ = plan(DEMO, edited(**{"replicas: 2": "replicas: 4"}), "--capacity", 4)
    assert code == 2
    assert "demo-decode-3: no node has room" in out


def test_json_is_a_list_of_steps(plan, edited) -> None:
    code, out, err = plan(
        DEMO, edited(**{"replicas: 2": "replicas: 3"}), "-o", "json", "--never-ready"
    )
    (step,) = json.loads(out)
    assert code == 2
    assert err == "baton plan: not settled: demo-decode-2: never becomes ready\n"
    assert step["actions"] == [
        {
            "action": "create",
            "role": "decode",
            "members": ["demo-decode-2"],
            "reason": "2 of 3 exist",
        }
    ]
    assert [(row["name"], row["state"]) for row in step["members"]][-1] == (
        "demo-decode-2",
        "starting",
    )
    assert plan(DEMO, DEMO, "-o", "json") == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("replaced", "complaint"),
    [
        ({"replicas: 2": "replicas: -1"}, r"spec.decode.replicas: Invalid value: -1"),
        ({"replicas: 2": "replica: 2"}, "spec.decode.replica: unknown field"),
        ({"replicas: 2": "parallelism: {redundantExperts: 1}"}, "redundantExperts needs expert"),
        ({"replicas: 2": "template: {spec: {containers: x}}"}, "decode.template.spec.containers"),
        ({"kind: LLMService": "kind: Service"}, "must hold exactly one LLMService, it holds 0"),
        (
            {"v1alpha1": "v2"},
            "apiVersion must be serving.baton.dev/v1alpha1, got serving.baton.dev/v2",
        ),
        ({"spec:": "---\napiVersion: v1\nkind: Secret\nspec:"}, "metadata"),
        ({"name: demo\n": "name: other\n"}, "the names differ: demo and other"),
        ({"spec:": "spec: ["}, "is not valid YAML"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_field_and_the_reason(
    plan, edited, replaced, complaint
) -> None:
    code, out, err = plan(DEMO, edited(**replaced))
    assert (code, out) == (1, "")
    assert err.startswith("baton plan: ")
    assert complaint in err


def test_an_unreadable_file_is_refused_with_its_path(plan, tmp_path) -> None:
    code, _, err = plan(tmp_path / "nowhere.yaml")
    assert (code, err) == (
        1,
        f"baton plan: cannot read {tmp_path}/nowhere.yaml: No such file or directory\n",
    )


def test_a_file_with_two_services_is_refused(plan, tmp_path) -> None:
    both = tmp_path / "both.yaml"
    both.write_text("\n---\n".join(path.read_text() for path in (DEMO, SAMPLES / "experts.yaml")))
    assert "it holds 2" in plan(both)[2]
