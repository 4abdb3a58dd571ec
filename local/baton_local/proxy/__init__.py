"""What reaches pods from outside of them on one machine: Services (TCP, any clusterIP) and Ingresses (HTTP by host and path)."""
