"""Programs of other clients, and a gateway with a scripted engine that they connect to."""
