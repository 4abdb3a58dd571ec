"""One builder per kind of object: pure functions from a typed LLMService to the object the operator applies."""
