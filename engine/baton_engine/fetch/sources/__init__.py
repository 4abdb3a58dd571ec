"""Where models come from.

uri.py            parses a URI
source.py         the interface of a source
hub.py            the source for hf://
object_store.py   the source for s3:// and gs://
create_source.py  creates the source for a URI
"""
