"""Build the Kubernetes objects of a service, with pure functions of a `ResolvedService`.

Most objects have a file of their own, with the function `build`.

- `resolved_service`: one LLMService and all other values from which objects are built.
- `restrictions`: what an LLMService may request from an operator for several tenants.
- `absent`: an object that must not exist, which a builder returns in place of the object.
- `member_pods`, `headless_service`: member pods of prefill and decode, and the Service that names
  them.
- `gateway`: the gateway's objects.
- `coordinator_deployment`, `coordinator_service`: the coordinator's Deployment and Service.
- `config_maps`: ConfigMaps with the configuration of engines and gateway.
- `engine_settings`: the options of `baton-engine` that fields of the spec set.
- `service_key_secret`: the Secret with the key that all processes of a service share.
- `network_policy`, `disruption_budget`: the objects of those kinds.
- `engine_account`: the ServiceAccount of engines and coordinator.
- `pod_template`: the parts that member pods and gateway pods share, and the user's changes.
- `model_volume`: the volume of the model, and the init container that fetches the model.
"""
