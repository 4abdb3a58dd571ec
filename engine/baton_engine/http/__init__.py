"""The HTTP server of engines, coordinators and fetchers (`bounded_server`)."""
