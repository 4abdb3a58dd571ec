"""The operator: keeps every LLMService in the state of its spec.

One reconcile, in `reconcile.py`, is the sentence "observe, plan, apply, report". Its words are the
packages:

- `api`: the LLMService resource, its CRD and its validation rules.
- `observe`: what exists in the cluster, and what engines and coordinators reply.
- `builders`: the object of each kind that a service needs. `desired.py` collects them.
- `plan`: the next step of a group of member pods.
- `autoscale`: the sizes of groups that have `autoscaling`.
- `status`: conditions, counts and Events of the service.
- `kube`: the operator's use of the Kubernetes API: kinds, Events and the Lease.

Other modules:

- `handlers`: kopf's handlers, which make services due.
- `kopf_settings`: turns off everything in kopf but the watches.
- `controller`: runs `reconcile` for services that are due.
- `apply`: writes the differences.
- `revisions`: the revision history.
- `cli`, `process`, `runtime`: the process, its Lease and its parts.
- `metrics`, `logs`: what the process reports about itself.
- `names`, `reconcile_problems`: names and errors that all parts share.
- `manifests`: writes the generated manifests.
"""
