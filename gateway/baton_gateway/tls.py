"""The gateway's certificate, from a folder (a mounted Secret of type kubernetes.io/tls), renewed while it serves."""

from __future__ import annotations

import hashlib
import logging
import ssl
from pathlib import Path

logger = logging.getLogger(__name__)

CERTIFICATE = "tls.crt"
PRIVATE_KEY = "tls.key"


class ServerCertificate:
    """A TLS context that follows the folder: new connections get the newest certificate that is whole.

    Raises:
        OSError, ssl.SSLError: there is none, or the key is not the certificate's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded = self._fingerprint()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(self.context)
        self._failure = ""

    def refresh(self) -> None:
        """Takes up a new certificate. One that cannot be used leaves the old one in place."""
        try:
            found = self._fingerprint()
            if found == self._loaded:
                self._failure = ""
                return
            # Tried elsewhere first: half a pair, loaded into the context that serves, would end all handshakes.
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
            self._load(self.context)
            self._loaded, self._failure = found, ""
            logger.info("the certificate in %s is new: new connections get it", self._folder)
        except OSError as error:  # ssl.SSLError is one
            if str(error) != self._failure:  # once, not at every look
                logger.error(
                    "the certificate in %s cannot be used, the one before stays: %s",
                    self._folder,
                    error,
                )
            self._failure = str(error)

    def _paths(self) -> tuple[Path, Path]:
        """Of one version of the Secret: the kubelet swaps the folder that its links lead to."""
        certificate = (self._folder / CERTIFICATE).resolve(strict=True)
        key = certificate.with_name(PRIVATE_KEY)
        return certificate, key if key.exists() else self._folder / PRIVATE_KEY

    def _load(self, context: ssl.SSLContext) -> None:
        # An empty password: an encrypted key is an error instead of a question on a terminal.
        context.load_cert_chain(*self._paths(), password="")

    def _fingerprint(self) -> bytes:
        return hashlib.sha256(b"\0".join(path.read_bytes() for path in self._paths())).digest()
