"""One machine as a cluster: the `baton` command, an embedded control plane, a kubelet of processes."""
