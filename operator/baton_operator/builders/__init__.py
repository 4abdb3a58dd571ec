"""Build the Kubernetes objects of a service, with pure functions of a `ResolvedService`.

- `resolved_service`: one LLMService and all other values from which objects are built.
- `restrictions`: what an LLMService may request from an operator for several tenants.
- `member_pods`: member pods of prefill and decode, and their headless Service.
- `gateway_objects`, `coordinator_objects`: the Deployment and the Service of each.
- `ingress`, `http_route`: access to the gateway from outside the cluster.
- `config_maps`: ConfigMaps with the configuration of engines and gateway.
- `engine_settings`: the options of `baton-engine` that fields of the spec set.
- `service_key_secret`: the Secret with the key that all processes of a service share.
- `network_policy`, `disruption_budget`: the objects of those kinds.
- `service_accounts`: ServiceAccounts, and the gateway's Role and RoleBinding.
- `pod_template`: the parts that member pods and gateway pods share, and the user's changes.
- `model_volume`: the volume of the model, and the init container that fetches the model.
"""
