"""Random input for the servers of Baton, and checks that the servers survive it.

mutations      random changes of values and bytes
http_cases     HTTP requests
http_client    sends these requests and reads the responses
zmtp_cases     bytes for a ZeroMQ port
door           the loop over the cases, and the checks of a server's process
"""
