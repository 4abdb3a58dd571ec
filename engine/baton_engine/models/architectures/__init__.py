"""One file per architecture; `registry` imports them all, so that adding a model is adding a file."""
