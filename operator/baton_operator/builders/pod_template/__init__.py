"""The pod template of a role, and the user's changes to it.

- `pod`: what the pods of all roles have in common.
- `overlay`: merges the user's `template` into a pod template.
- `free_form_fields`: checks `resources` and `template`, for which the CRD has no schema.
- `restricted_profile`: refuses what the restricted Pod Security profile refuses.
"""
