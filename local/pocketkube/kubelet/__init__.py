"""A kubelet that runs the pods of one node as processes.

- `kubelet`: watches pods, and runs one worker per pod.
- `pod_worker`: one pod from its arrival on the node to its deletion.
- `pod_status`: the status of a pod from the states of its containers.
- `addresses`: the addresses of pods.
- `node`: the Node object and its lease.
- `kubelet_server`: the HTTPS server for logs.

The README lists the differences from a kubelet with a container runtime.
"""
