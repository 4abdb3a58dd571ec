"""One file per architecture; `factory` imports them all, so that adding a model is adding a file."""
