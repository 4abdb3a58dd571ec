"""The served kinds and the fields of their objects.

- `catalog`: the kinds that are served now.
- `apiextensions`: custom resource definitions and their served versions.
- `structural`: pruning, defaults and validation by a CRD's schema.
- `cel`: validation rules of a CRD's schema.
- `decoding`: field names and types of built-in kinds.
- `defaults`: defaults of built-in kinds.
- `validation`: validation of built-in kinds.
- `merge_strategy`: how patches and server-side apply merge lists and maps.
"""
