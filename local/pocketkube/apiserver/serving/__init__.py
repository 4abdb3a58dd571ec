"""Serve the Kubernetes API over HTTP.

- `api_server`: the HTTPS server.
- `request_parsing`: path, verb, body and query parameters of a request.
- `selectors`: label and field selectors.
- `watch`: streams of changes.
- `api_discovery`: API groups, versions and OpenAPI documents.
- `tables`: rows and columns for kubectl.
- `kubelet_lookup`: the kubelet and the container of a request about a pod.
- `resource_metrics`: the usage that kubelets measure, for `kubectl top`.
- `pod_logs`: logs, forwarded from the kubelet.
- `pod_streams`: exec, attach and port-forward, connected with the kubelet.
"""
