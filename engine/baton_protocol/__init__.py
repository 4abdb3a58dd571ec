"""Code that all components share: wire structs, configuration, block hashes, the engine client.

Every component may import this package. The package imports no other component, and no torch.

options/          configuration, and the flags and bounds of its fields
process/          limits, health, metrics and labels of a process
engine_client/    the gateway's client of one engine
engine_messages   messages between an engine and its clients
topology          messages between ranks and their coordinator
sampling_params   sampling parameters of one sequence
pooling_params    parameters of a prompt for a pooling model
block_hash        chained hashes of KV blocks
kv_compatibility  values that must be equal on engines that exchange KV blocks
checkpoint_files  reads the files of a checkpoint, which is untrusted
service_key       the key that all processes of a service share
zap               authentication of ZMQ clients by their CURVE key
"""
