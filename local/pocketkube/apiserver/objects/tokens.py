"""Authenticate requests by bearer token, and issue service account tokens (TokenRequest)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from datetime import UTC, datetime

from pocketkube.apiserver import errors
from pocketkube.apiserver.objects.object_registry import Registry
from pocketkube.apiserver.resources import Object, RequestInfo
from pocketkube.timestamps import timestamp

_DEFAULT_TOKEN_S = 3600
_MIN_TOKEN_S = 600


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class ServiceAccountTokens:
    """Checks the administrator's token, and issues and checks service account tokens (JWT, HS256).

    The signing key is in memory only, so tokens become invalid when the server ends.
    """

    def __init__(self, registry: Registry, admin_token: str) -> None:
        self._registry = registry
        self._admin = admin_token
        self._key = secrets.token_bytes(32)

    def request(self, info: RequestInfo, body: Object) -> Object:
        """Issue a token for the service account that `info` names.

        Args:
            body: the TokenRequest that the client sent.

        Returns:
            The TokenRequest with the new token in its status.

        Raises:
            ApiError: 404, there is no such account; 422, the requested duration is too short.
        """
        account = self._registry.stored(info)
        spec = body.get("spec") or {}
        seconds = spec.get("expirationSeconds") or _DEFAULT_TOKEN_S
        if type(seconds) is not int or seconds < _MIN_TOKEN_S:
            detail = f"may not specify a duration less than {_MIN_TOKEN_S // 60} minutes"
            raise errors.invalid(
                info.resource,
                info.name,
                [errors.invalid_value("spec.expirationSeconds", seconds, detail)],
            )
        expires = int(time.time()) + seconds
        claims = {
            "iss": "https://kubernetes.default.svc",
            "sub": f"system:serviceaccount:{info.namespace}:{info.name}",
            "aud": spec.get("audiences") or ["https://kubernetes.default.svc"],
            "exp": expires,
            "iat": int(time.time()),
            "kubernetes.io": {
                "namespace": info.namespace,
                "serviceaccount": {"name": info.name, "uid": account["metadata"]["uid"]},
            },
        }
        header = {"alg": "HS256", "typ": "JWT"}
        signed = ".".join(_encode(json.dumps(part).encode()) for part in (header, claims))
        return {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "metadata": {"name": info.name, "namespace": info.namespace},
            "spec": {**spec, "expirationSeconds": seconds, "audiences": claims["aud"]},
            "status": {
                "token": f"{signed}.{self._signature(signed)}",
                "expirationTimestamp": timestamp(datetime.fromtimestamp(expires, UTC)),
            },
        }

    def _signature(self, signed: str) -> str:
        return _encode(hmac.digest(self._key, signed.encode(), hashlib.sha256))

    def authenticate(self, token: str) -> None:
        """Check that a bearer token is valid.

        Raises:
            ApiError: 401, the token is unknown, has expired or belongs to a deleted account.
        """
        if not token.isascii():  # a header can hold any bytes
            raise errors.unauthorized()
        if hmac.compare_digest(token.encode(), self._admin.encode()):
            return
        signed, _, signature = token.rpartition(".")
        if not signed or not hmac.compare_digest(
            signature.encode(), self._signature(signed).encode()
        ):
            raise errors.unauthorized()
        payload = signed.partition(".")[2]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        private = claims["kubernetes.io"]
        account = self._registry.store.get(
            "serviceaccounts", private["namespace"], private["serviceaccount"]["name"]
        )
        if claims["exp"] < time.time() or account is None:
            raise errors.unauthorized()
        if account["metadata"]["uid"] != private["serviceaccount"]["uid"]:
            raise errors.unauthorized()
