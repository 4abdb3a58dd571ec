"""A kubelet that runs the pods of one node as processes.

- `kubelet`: watches pods, and runs one worker per pod.
- `pod_worker`: one pod from its arrival on the node to its deletion.
- `pod_status`: the status of a pod from the states of its containers.
- `pod_addresses`: the addresses of pods.
- `node`: the Node object and its lease.
- `kubelet_server`: the HTTPS server for logs, exec, attach and port-forward.
- `stats_summary`: the usage of the node and its containers.
- `remote_command`: the channels of exec and attach in a WebSocket.
- `port_forward`: the channels and streams of port-forward in a WebSocket.
- `spdy`: the frames of SPDY/3.1, which kubectl uses for port-forward.

The README lists the differences from a kubelet with a container runtime.
"""
