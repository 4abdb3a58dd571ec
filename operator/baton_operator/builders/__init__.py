"""Builders of Kubernetes objects: pure functions of a `ResolvedService`, one for each kind.

- `resolved_service`: the LLMService with all values that objects are built from.
- `member`: member pods of prefill and decode, and their headless Service.
- `gateway`, `coordinator`: Deployment and Service of each.
- `ingress`, `http_route`: access to the gateway from outside the cluster.
- `config`: ConfigMaps with the configuration of engines and gateway.
- `service_key`: the Secret that all processes of a service share.
- `network_policy`, `disruption_budget`: the objects of those kinds.
- `accounts`: ServiceAccounts, and the gateway's Role and RoleBinding.
- `pod`: the parts that member pods and gateway pods share.
- `model`: the model's volume, and the init container that fetches it.
- `overlay`, `free_form_fields`: `template` and `resources` of the user.
"""
