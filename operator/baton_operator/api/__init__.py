"""The LLMService resource: typed structs, validation rules and the CRD.

- `llmservice`: the structs of the resource, its spec and its status.
- `spec_model`, `spec_engine`, `spec_groups`, `spec_access`: the structs of parts of the spec.
- `field_types`: types that several structs use.
- `rules`: validation rules between fields, in CEL and in Python.
- `crd`: generates the CustomResourceDefinition from the structs and the rules.
"""
