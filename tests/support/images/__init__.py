"""The contents of the images, and commands that run in them."""
