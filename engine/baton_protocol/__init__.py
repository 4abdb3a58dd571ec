"""Code that all components share: wire structs, configuration, block hashes, the engine client.

Every component may import this package. The package imports no other component, and no torch.

engine_client     the gateway's client of one engine
messages          messages between an engine and its clients
topology          messages between ranks and their coordinator
sampling          sampling parameters of one sequence
pooling           parameters of a prompt for a pooling model
block_hash        chained hashes of KV blocks
kv_compatibility  values that must be equal on engines that exchange KV blocks
config            configuration of one engine and of one gateway
options           command-line flags and bounds of configuration fields
engine_options    the options of `baton-engine`, and the checks of their values
arguments         types of command-line arguments
field_comments    comments of the fields of a struct
fatal             error and exit code for a configuration that cannot work
checkpoint_files  reads the files of a checkpoint, which is untrusted
control_groups    the limits of this process's control groups
progress          body of a pod's GET /health response
metrics_text      a process's metrics as text
pod_labels        labels and annotations of pods
service_key       the key that all processes of a service share
zap               authentication of ZMQ clients by their CURVE key
"""
