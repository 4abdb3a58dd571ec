"""One file per architecture. `factory` imports all of them, so a new model is a new file."""
