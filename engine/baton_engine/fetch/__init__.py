"""`baton-model fetch`: a model's files from a hub or an object store into a folder, for pods to load. Torch-free.

uri.py        what a URI names
selection.py  which files are taken, and under which names
source.py     where files come from: hub.py (Hugging Face), object_store.py (fsspec)
lock.py       of several fetchers that share a cache one works
folder.py     the folder: partial, verified, renamed into place, marked
download.py   one file at a time: resumed, verified, tried again
progress.py   how far it is, over HTTP
fetch.py      all of it together
command.py    the command line
"""
