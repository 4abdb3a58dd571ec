"""The LLMService resource: typed structs, the CRD made from them, and validation rules.

- `llmservice`: the resource, its spec and its status.
- `spec_model`, `spec_groups`, `spec_access`: parts of the spec.
- `field_types`: types that several structs use.
- `rules`: what the API server refuses beyond types, as CEL and as Python.
- `crd`: the CustomResourceDefinition.
"""
