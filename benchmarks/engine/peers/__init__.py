"""Other inference engines, each in its own virtual environment."""
