"""What the images contain, and commands that run in them."""
