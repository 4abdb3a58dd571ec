"""The `baton` command: Baton on one machine.

- `cli`: the command line.
- `up`: `baton up`, a local cluster around one LLMService. `demo_checkpoint` has its demo model.
- `serve`: `baton serve`, one engine and its gateway without Kubernetes.
- `plan`: `baton plan`, the steps of a rollout.
- `preview`: the simulated cluster behind `baton plan`.
- `service_status`: the state of a service, read from the API server and the service's pods.
- `kv_bytes`: the KV bytes that each engine moved.
- `status_tables`: the tables of `baton status` and `baton up`.
- `cluster_api`: a client of a local cluster's API server.
- `manifest_file`: the YAML files that users write.
- `state_dir`: the state folder and its lock.
"""
