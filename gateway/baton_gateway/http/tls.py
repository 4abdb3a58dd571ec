"""The gateway's certificate, read from a folder and read again when the folder changes.

The folder is a mounted Secret of type kubernetes.io/tls.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
from pathlib import Path

logger = logging.getLogger(__name__)

CERTIFICATE = "tls.crt"
PRIVATE_KEY = "tls.key"


class ServerCertificate:
    """A TLS context with the certificate in a folder. `refresh` loads a changed certificate.

    Args:
        folder: the folder of the files tls.crt and tls.key, in PEM format.

    Raises:
        OSError: the folder has no certificate.
        ssl.SSLError: a file is invalid, or the private key does not belong to the certificate.
            SSLError is a subclass of OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded = self._fingerprint()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(self.context)
        self._failure = ""

    def refresh(self) -> None:
        """Load the folder's certificate if it has changed. New connections then use it.

        If the new certificate is invalid, the previous certificate stays in use.
        """
        try:
            found = self._fingerprint()
            if found == self._loaded:
                self._failure = ""
                return
            # First load the certificate into another context. In the serving context, a certificate
            # with the wrong key would make all handshakes fail.
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
            self._load(self.context)
            self._loaded, self._failure = found, ""
            logger.info("the new certificate in %s is used for new connections", self._folder)
        except OSError as error:
            if str(error) != self._failure:  # log each failure once, not at every poll
                logger.error(
                    "the new certificate in %s is not usable, so the old one stays in use: %s; "
                    "correct tls.crt and tls.key",
                    self._folder,
                    error,
                )
            self._failure = str(error)

    def _paths(self) -> tuple[Path, Path]:
        """Return the paths of the certificate and its private key, from one version of the Secret.

        The kubelet updates a Secret by pointing a symbolic link to a new folder. Therefore the key
        is taken from the folder to which the certificate's link points.
        """
        certificate = (self._folder / CERTIFICATE).resolve(strict=True)
        key = certificate.with_name(PRIVATE_KEY)
        return certificate, key if key.exists() else self._folder / PRIVATE_KEY

    def _load(self, context: ssl.SSLContext) -> None:
        # With an empty password, an encrypted key is an error. Without a password, OpenSSL would
        # prompt on the terminal.
        context.load_cert_chain(*self._paths(), password="")

    def _fingerprint(self) -> bytes:
        return hashlib.sha256(b"\0".join(path.read_bytes() for path in self._paths())).digest()
