"""The protocol: wire structs, configuration, block hashes and the client of an engine.

Every component may import it. It imports no other component, and no torch.

client            the client of one engine, for the gateway and the offline API
request_stream    the outputs of one request, as the client yields them
heartbeat         the silence of an engine, and the load that it reported
messages          messages between an engine and its clients
topology          messages between ranks and their coordinator
sampling          sampling parameters of one sequence
block_hash        chained hashes of KV blocks
kv_compatibility  the values that two engines must share to exchange KV blocks
config            configuration of one engine and of one gateway
options           fields of a configuration, with their flags and bounds
arguments         types of command-line arguments
fatal             the end of a process whose configuration cannot work
progress          the body of GET /health of a pod
pod_labels        labels and annotations of pods
service_key       the key that all processes of a service share
zap               admission of clients that have the key
"""
