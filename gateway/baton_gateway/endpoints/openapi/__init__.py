"""The description of the API that `/openapi.json` returns.

Modules:
    document: the document, and its endpoint.
    operations: the operations of all paths, and their errors.
    schemas: the JSON schemas of bodies.
"""
