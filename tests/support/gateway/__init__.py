"""What the gateway's tests share: scripted engines and a gateway in front of them."""
