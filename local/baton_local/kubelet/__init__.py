"""A kubelet of processes: every container of a pod is a process group on this machine.

Differences from a kubelet with a container runtime: `image` is ignored (the command must exist on this machine; the folder of
this Python comes first in PATH), mounts appear below `$BATON_POD_ROOT` instead of `/`, resources are not enforced, and
nothing outlives the kubelet.
"""
