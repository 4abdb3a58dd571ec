"""Random input for the servers of Baton, and checks that the servers survive it.

fuzz_target      the loop over the cases, and the checks of a server's process
mutations        random changes of values and bytes
http_cases       HTTP requests
http_client      sends these requests and reads the responses
zmq_client       sends messages to ZMQ servers
raw_client       sends bytes to stream sockets; bytes for ZMQ ports
kv_server        runs a KV connector without an engine
link_server      runs the link of a rank without an engine
store_server     runs a rendezvous store without an engine
"""
