"""A scripted API server for the tests of `baton_kube`."""
