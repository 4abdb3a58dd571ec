"""`baton-model fetch`: downloads a model into a folder for pods to load. Needs no torch.

command.py       the command line
fetch.py         one download: lock, listing, files, commit
open_source.py   the source for a URI
uri.py           parsing of a URI
source.py        the interface of a source, and the digests of files
hub.py           the source for hf://
object_store.py  the source for s3:// and gs://
selection.py     the files to download, and their names
download.py      download of the files: resumed, verified, retried
folder.py        the folder: partial, verified, committed
lock.py          the lock of fetchers that share a cache
progress.py      progress, in the log and over HTTP
fetch_errors.py  errors with the reason of a condition
"""
