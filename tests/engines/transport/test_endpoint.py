"""Where a center is found and how it is known: what users give, and what they are told where it is of no use."""

from __future__ import annotations

import datetime
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paragrad as pg
from paragrad.engines.transport import endpoint
from paragrad.engines.transport.endpoint import Endpoint, make_token, read_token, split_address
from paragrad.engines.transport.message import TransportError
from paragrad.errors import UsageError

LONG = "0123456789abcdef"


def test_a_token_is_made_once_and_for_its_owner_alone(tmp_path):
    token = make_token(tmp_path)
    assert len(token) >= 32
    assert stat.S_IMODE((tmp_path / endpoint.TOKEN).stat().st_mode) == 0o600
    assert make_token(tmp_path) == read_token(tmp_path / endpoint.TOKEN) == token


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601], ids=oct)
def test_a_token_that_others_can_read_is_not_taken(mode, tmp_path):
    path = tmp_path / "token"
    path.write_text(LONG)
    path.chmod(mode)
    with pytest.raises(UsageError, match=r"can be read by others: chmod 600"):
        read_token(path)


def test_a_short_token_is_not_taken(tmp_path):
    path = tmp_path / "token"
    path.write_text("short\n")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="has 5 characters, but at least 16 are needed"):
        read_token(path)
    with pytest.raises(UsageError, match="has 5 characters, but at least 16 are needed"):
        pg.Network(token="short")


@pytest.mark.parametrize("content", [b"\xff" * 40, None], ids=["bytes", "missing"])
def test_a_token_file_that_is_none_is_said_to_be(content, tmp_path):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(path)


@given(st.sampled_from(["127.0.0.1", "localhost", "node-7.cluster", "[::1]", "[fe80::1]"]), st.integers(0, 65_535))
def test_an_address_is_a_host_and_a_port(host, port):
    assert split_address(f"{host}:{port}") == (host.strip("[]"), port)


@pytest.mark.parametrize(
    "text", ["", "host", ":7000", "host:", "host:x", "host:-1", "host:65536", "host:7000x", "host: 7", "host:²"]
)
def test_what_is_no_address_is_said_to_be_none(text):
    with pytest.raises(UsageError, match=r"is not an address\. Give HOST:PORT"):
        split_address(text)


@given(st.text())
def test_any_text_is_an_address_or_bad_usage(text):
    try:
        host, port = split_address(text)
    except UsageError:
        return
    assert host
    assert 0 <= port < 65_536


def test_an_endpoint_is_read_as_it_was_written(tmp_path):
    written = Endpoint("127.0.0.1:7", "PEM", "paragrad")
    written.write(tmp_path)
    assert Endpoint.read(tmp_path) == written
    assert [name for name in os.listdir(tmp_path) if "endpoint" in name] == [endpoint.FILE]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"address": "a:1", "more": 1}', "{}", "null", '{"address": 7}'])
def test_an_endpoint_that_says_nothing_of_use_is_bad_usage(content, tmp_path):
    (tmp_path / endpoint.FILE).write_text(content)
    with pytest.raises(UsageError, match="does not contain the address of a center"):
        Endpoint.read(tmp_path)


def test_an_endpoint_that_is_not_there_may_be_there_soon(tmp_path):
    with pytest.raises(TransportError, match=r"endpoint.json' cannot be read now"):
        Endpoint.read(tmp_path)


def test_a_certificate_is_made_once_its_key_for_its_owner_alone(tmp_path):
    from cryptography import x509

    certificate, key = endpoint.self_signed(tmp_path)
    assert (certificate, key) == endpoint.self_signed(tmp_path)
    assert stat.S_IMODE((tmp_path / endpoint.KEY).stat().st_mode) == 0o600
    made = x509.load_pem_x509_certificate(certificate)
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["paragrad"]
    now = datetime.datetime.now(datetime.UTC)
    assert made.not_valid_before_utc < now < made.not_valid_after_utc


@pytest.mark.parametrize("missing", ["certificate", "key"])
def test_half_of_a_certificate_made_by_a_center_that_was_killed_is_made_again(missing, tmp_path):
    endpoint.self_signed(tmp_path)
    (tmp_path / (endpoint.CERTIFICATE if missing == "certificate" else endpoint.KEY)).unlink()
    certificate, key = endpoint.self_signed(tmp_path)
    assert (certificate, key) == ((tmp_path / endpoint.CERTIFICATE).read_bytes(), (tmp_path / endpoint.KEY).read_bytes())


def test_a_certificate_and_its_key_belong_together(tmp_path):
    with pytest.raises(UsageError, match="belong together"):
        pg.Network(certificate="a.pem")
    with pytest.raises(UsageError, match="cannot be read"):
        endpoint.read_pair(str(tmp_path / "a.pem"), str(tmp_path / "a.key"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workers": 0}, "at least 1 is needed"),
        ({"workers": 2, "min_workers": 3}, "min_workers=3, but it must be 1 to 2"),
        ({"workers": 2, "min_workers": 0}, "min_workers=0, but it must be 1 to 2"),
        ({"workers": 2, "here": 3}, "here=3, but it must be 0 to 2"),
        ({"address": "nowhere"}, "is not an address"),
        ({"replace_after": 0}, "above 0"),
        ({"on_failure": "ignore"}, "'raise' or 'replace'"),
        ({"tls": "maybe"}, "auto, on or off"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be_is_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        pg.Network(**fields)
