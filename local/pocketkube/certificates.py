"""Create the keys and certificates of a local control plane and its certificate authority."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pocketkube.private_files import write_private

_VALIDITY = datetime.timedelta(days=365)
_AUTHORITY_USAGE = x509.KeyUsage(
    digital_signature=True,
    key_cert_sign=True,
    crl_sign=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: a CA certificate, and server and client certificates with their keys."""

    authority: Path
    certificate: Path
    key: Path
    #: The API server identifies itself to kubelets and to etcd with this certificate.
    client_certificate: Path
    client_key: Path


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def create_certificates(directory: Path, addresses: list[str]) -> Certificates:
    """Create an authority, and a server and a client certificate that the authority signed.

    The server certificate is valid for `addresses`, 127.0.0.1, `localhost` and
    `kubernetes.default.svc`. The authority's key is not written to a file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = (
        _builder("pocketkube-ca", authority_key.public_key(), authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_AUTHORITY_USAGE, critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.DNSName("kubernetes.default.svc"),
    ]
    names += [
        x509.IPAddress(ipaddress.ip_address(address))
        for address in dict.fromkeys([*addresses, "127.0.0.1"])
    ]
    files = Certificates(
        directory / "ca.crt",
        directory / "apiserver.crt",
        directory / "apiserver.key",
        directory / "apiserver-client.crt",
        directory / "apiserver-client.key",
    )
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    for common_name, usage, certificate_file, key_file in (
        ("pocketkube-apiserver", ExtendedKeyUsageOID.SERVER_AUTH, files.certificate, files.key),
        (
            "pocketkube-apiserver-client",
            ExtendedKeyUsageOID.CLIENT_AUTH,
            files.client_certificate,
            files.client_key,
        ),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(common_name, key.public_key(), authority_key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        write_private(key_file, _pem(key))
    return files


def _builder(
    subject: str, public: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("pocketkube-ca"))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + _VALIDITY)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(issuer, critical=False)
    )


def create_signing_key(path: Path) -> Path:
    """Write a new RSA key for signing service account tokens to `path`, and return `path`."""
    write_private(path, _pem(rsa.generate_private_key(public_exponent=65537, key_size=2048)))
    return path
