"""Keys and certificates for a federation: an authority, the superlink's certificate, and a key pair for each node.

The same files as from openssl and ssh-keygen; `cryptography` is installed with Flower.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 365


class ServerFiles(NamedTuple):
    """The superlink's certificate and key, and the authority by which nodes verify it."""

    authority: Path
    certificate: Path
    key: Path


class NodeKeys(NamedTuple):
    """A node's key pair. The public one is registered with the superlink."""

    private: Path
    public: Path


def make_server_files(folder: Path, hosts: Sequence[str]) -> ServerFiles:
    """Create an authority, and a certificate for a superlink with these names or addresses."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority = (
        _begin(_name("fedlalr authority"), authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    certificate = (
        _begin(_name(hosts[0]), server_key)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    files = ServerFiles(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_secret(folder / "ca.key", _private(authority_key, serialization.PrivateFormat.PKCS8))
    _write_secret(files.key, _private(server_key, serialization.PrivateFormat.PKCS8))
    return files


def make_node_keys(folder: Path, name: str) -> NodeKeys:
    """Create a key pair with which a node authenticates itself."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    keys = NodeKeys(folder / name, folder / f"{name}.pub")
    _write_secret(keys.private, _private(key, serialization.PrivateFormat.OpenSSH))
    keys.public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    )
    return keys


def _begin(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    """A certificate that the authority will sign."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_name("fedlalr authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=VALID_DAYS))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey, format: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, format, serialization.NoEncryption())


def _write_secret(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)
