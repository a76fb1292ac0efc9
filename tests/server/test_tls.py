from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError

from minedraft_core.config import ConfigError
from server.lifecycle import check_tls
from server.settings import Settings
from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("shows", [False, True], ids=["no certificate", "a certificate"])
async def test_https(fake: FakeEngine, start: Start, pair: tuple[Path, Path], shows: bool) -> None:
    certificate, key = pair
    running = await start(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=certificate if shows else None)
    context = ssl.create_default_context(cafile=str(certificate))
    if shows:
        context.load_cert_chain(certificate, key)
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{running.port}", verify=context) as client:
        response = await client.post("/v1/completions", json={"prompt": "say hello", "stream": True})
        assert response.status_code == 200
        assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_client_without_a_certificate_is_turned_away(fake: FakeEngine, start: Start, pair: tuple[Path, Path]) -> None:
    certificate, key = pair
    running = await start(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=certificate)
    context = ssl.create_default_context(cafile=str(certificate))
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{running.port}", verify=context) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health")


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_ca_certs"])
def test_a_key_needs_its_certificate(name: str) -> None:
    with pytest.raises(ValidationError, match="needs --ssl-certfile"):
        Settings(**{name: "x.pem"})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"ssl_certfile": "nothing"}, "--ssl-certfile.*cannot be read"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "nothing"}, "--ssl-keyfile.*cannot be read"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "ssl_ca_certs": "."}, "--ssl-ca-certs.*cannot be read"),
        ({"ssl_certfile": "cert.pem"}, "private key"),
        ({"ssl_certfile": "key.pem"}, "private key"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "locked.pem"}, "without a password"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "ssl_ca_certs": "key.pem"}, "--ssl-ca-certs.*no certificate"),
    ],
)
def test_files_that_do_not_fit_are_named(pair: tuple[Path, Path], names: dict[str, str], message: str) -> None:
    folder = pair[0].parent
    key = serialization.load_pem_private_key(pair[1].read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    (folder / "locked.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    with pytest.raises(ConfigError, match=message):
        check_tls(Settings.model_validate({name: folder / file for name, file in names.items()}))


def test_files_that_fit(pair: tuple[Path, Path]) -> None:
    check_tls(Settings())
    check_tls(Settings(ssl_certfile=pair[0], ssl_keyfile=pair[1], ssl_ca_certs=pair[0]))
