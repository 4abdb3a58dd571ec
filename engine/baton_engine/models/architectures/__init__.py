"""Model architectures, one file each. `factory.py` imports every file in this folder."""
