"""An API client and a custom resource for the conformance tests of control planes."""
