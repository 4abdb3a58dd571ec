"""Schemas of the embedded control plane, beyond the conformance tests (tests/e2e)."""

import pytest

from pocketkube.apiserver.schema.cel import RuleSyntaxError
from pocketkube.apiserver.schema.structural import StructuralSchema


def _schema(spec: dict) -> StructuralSchema:
    return StructuralSchema({"type": "object", "properties": {"spec": {"type": "object", **spec}}})


def _errors(schema: StructuralSchema, spec: dict, old: dict | None = None) -> dict[str, str]:
    found = schema.validate({"spec": spec}, None if old is None else {"spec": old})
    return {error.field: error.message for error in found}


def test_int_or_string_accepts_integers_and_strings_only() -> None:
    schema = _schema({"properties": {"timeout": {"x-kubernetes-int-or-string": True}}})
    assert not _errors(schema, {"timeout": 5})
    assert not _errors(schema, {"timeout": "5s"})
    assert "spec.timeout" in _errors(schema, {"timeout": True})


def test_defaults_are_set_in_items_and_replace_nulls_of_fields_that_are_not_nullable() -> None:
    item = {"type": "object", "properties": {"port": {"type": "integer", "default": 80}}}
    fields = {
        "ports": {"type": "array", "items": item},
        "size": {"type": "integer", "default": 1},
        "note": {"type": "string", "nullable": True},
        "gone": {"type": "string"},
    }
    filled = _schema({"properties": fields}).default(
        {"spec": {"ports": [{}], "size": None, "note": None, "gone": None}}
    )
    assert filled == {"spec": {"ports": [{"port": 80}], "size": 1, "note": None}}


def test_defaulting_does_not_change_its_argument() -> None:
    given = {"spec": {}}
    _schema({"properties": {"size": {"type": "integer", "default": 1}}}).default(given)
    assert given == {"spec": {}}


def test_a_rule_names_its_field_and_message() -> None:
    rule = {"rule": "self.low <= self.high", "message": "low exceeds high"}
    fields = {"low": {"type": "integer"}, "high": {"type": "integer"}}
    schema = _schema(
        {
            "properties": {
                "range": {
                    "type": "object",
                    "properties": fields,
                    "x-kubernetes-validations": [rule],
                }
            }
        }
    )
    assert not _errors(schema, {"range": {"low": 1, "high": 2}})
    assert _errors(schema, {"range": {"low": 3, "high": 2}}) == {
        "spec.range": 'Invalid value: "object": low exceeds high'
    }
    assert not _errors(schema, {}), "a rule of an absent value is not evaluated"


def test_a_message_expression_is_computed() -> None:
    rule = {"rule": "self.n < 3", "messageExpression": "'n is ' + string(self.n)"}
    schema = _schema({"properties": {"n": {"type": "integer"}}, "x-kubernetes-validations": [rule]})
    assert _errors(schema, {"n": 7})["spec"].endswith("n is 7")


def test_transition_rules_need_an_old_value() -> None:
    rule = {"rule": "self == oldSelf", "message": "immutable"}
    schema = _schema(
        {"properties": {"uri": {"type": "string", "x-kubernetes-validations": [rule]}}}
    )
    assert not _errors(schema, {"uri": "a"})
    assert not _errors(schema, {"uri": "a"}, {})
    assert not _errors(schema, {"uri": "a"}, {"uri": "a"})
    assert "immutable" in _errors(schema, {"uri": "b"}, {"uri": "a"})["spec.uri"]


def test_an_unchanged_value_is_not_checked_again_except_by_transition_rules() -> None:
    small = {"rule": "self.n < 3", "message": "too large"}
    grows = {"rule": "self.n > oldSelf.n", "message": "must grow"}
    part = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "x-kubernetes-validations": [small],
    }
    schema = _schema({"properties": {"part": part, "other": {"type": "integer"}}})
    old = {"part": {"n": 7}, "other": 1}  # stored before the rule existed
    assert not _errors(schema, {"part": {"n": 7}, "other": 2}, old)
    assert "too large" in _errors(schema, {"part": {"n": 8}, "other": 1}, old)["spec.part"]
    schema = _schema({"properties": {"part": {**part, "x-kubernetes-validations": [grows]}}})
    assert "must grow" in _errors(schema, {"part": {"n": 7}}, {"part": {"n": 7}})["spec.part"]


def test_items_of_keyed_lists_are_compared_with_the_old_item_of_the_same_key() -> None:
    rule = {"rule": "self.port >= oldSelf.port", "message": "ports only grow"}
    fields = {"name": {"type": "string"}, "port": {"type": "integer"}}
    items = {"type": "object", "properties": fields, "x-kubernetes-validations": [rule]}
    ports = {
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
        "items": items,
    }
    schema = _schema({"properties": {"ports": ports}})
    old = {"ports": [{"name": "a", "port": 1}, {"name": "b", "port": 5}]}
    assert not _errors(schema, {"ports": [{"name": "b", "port": 5}, {"name": "a", "port": 2}]}, old)
    assert "spec.ports[0]" in _errors(schema, {"ports": [{"name": "b", "port": 4}]}, old)


def test_a_rule_that_does_not_compile_is_refused_with_its_path() -> None:
    with pytest.raises(RuleSyntaxError, match=r"openAPIV3Schema\.spec"):
        _schema({"x-kubernetes-validations": [{"rule": "self.x <"}]})
