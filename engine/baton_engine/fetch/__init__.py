"""Downloads a model into a folder: `baton-model fetch`, `LLM` and `baton serve`. Without torch.

command.py         the command line of `baton-model`
cached_model.py    names of models, and their folders in the cache of this machine
fetch.py           one download: lock, listing, files, commit
sources/           the sources of models: hf://, s3:// and gs://
selection.py       selects the files to download, and checks their names
download.py        downloads files: resumed, verified, retried
verify.py          compares a downloaded file with the listed size and digest
folder.py          the folders on disk: partial, complete
lock.py            the lock between fetchers that share a cache
fetch_progress.py  progress, in the log and over HTTP
fetch_errors.py    errors, each with the reason of a Kubernetes condition
"""
