"""Kinds and the fields of their objects.

- `catalog`: the kinds that are served now.
- `crd`: custom resource definitions and the versions that they serve.
- `structural`: pruning, defaults and validation by a CRD's schema.
- `cel`: validation rules of a CRD's schema.
- `decoding`: field names and types of built-in kinds.
- `defaults`: defaults of built-in kinds.
- `validation`: values of built-in kinds.
- `field_types`: how lists and maps merge, for patches and server-side apply.
"""
