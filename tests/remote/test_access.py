"""Who may connect to a server: addresses, tokens and certificates."""

import re

import pytest

from jmarl.remote.access import Access, Tls, check, is_loopback, is_token, read_token


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("s3cret-token\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def certificate(tmp_path):
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path in paths:
        path.write_text("-----BEGIN-----")
    return paths


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_neither_token_nor_tls(host):
    assert is_loopback(host)
    check(host, None, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.3", "example.org", "localhost.example.org", "127.0.0.1.nip.io"])
def test_other_addresses_are_refused_without_tls_and_a_token(host, certificate):
    tls = Tls(*certificate)
    for token, given, missing in ((None, None, "--tls-cert and --tls-key and --token-file"), (None, tls, "--token-file")):
        with pytest.raises(ValueError, match=f"--host {re.escape(host)} is not allowed without {missing}: others reach"):
            check(host, token, given)
    with pytest.raises(ValueError, match="not allowed without --tls-cert and --tls-key: others reach"):
        check(host, "token", None)
    check(host, "token", tls)


def test_flags_become_an_access(token_file, certificate):
    access = Access.of("0.0.0.0", 0, token_file, *certificate)
    assert access == Access("0.0.0.0", 0, "s3cret-token", Tls(*certificate))
    assert "s3cret" not in repr(access)
    assert Access.of("127.0.0.1", 8000, None, None, None) == Access(port=8000)


def test_flags_that_do_not_fit_are_refused(token_file, certificate, tmp_path):
    with pytest.raises(ValueError, match="--tls-cert and --tls-key belong together"):
        Access.of("127.0.0.1", 0, None, certificate[0], None)
    with pytest.raises(ValueError, match="--tls-client-ca needs --tls-cert"):
        Access.of("127.0.0.1", 0, None, None, None, certificate[0])
    with pytest.raises(ValueError, match="port"):
        Access.of("127.0.0.1", 1 << 16, None, None, None)
    with pytest.raises(FileNotFoundError):
        Access.of("127.0.0.1", 0, None, tmp_path / "none.pem", certificate[1])
    with pytest.raises(ValueError, match="without --tls-cert"):
        Access.of("0.0.0.0", 0, token_file, None, None)


def test_a_token_file_holds_one_token(token_file):
    assert read_token(token_file) == "s3cret-token"
    for content, wrong in (("", "is empty"), (" \n", "is empty"), ("two words", "has characters"), ("schön", "has characters")):
        token_file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=wrong) as error:
            read_token(token_file)
        assert not content.strip() or content not in str(error.value)  # the message may be logged


def test_a_token_that_others_may_read_is_warned_of(token_file):
    token_file.chmod(0o644)
    lines = []
    assert read_token(token_file, lines.append) == "s3cret-token"
    assert "chmod 600" in lines[0]


@pytest.mark.parametrize(
    ("authorization", "allowed"),
    [("Bearer s3cret", True), ("bearer s3cret", True), ("Bearer s3cre", False), ("Bearer s3crét", False)]
    + [("s3cret", False), ("Basic s3cret", False), ("Bearer ", False), ("", False), (None, False)],
)
def test_only_the_token_opens(authorization, allowed):
    assert Access(token="s3cret").allows(authorization) is allowed
    assert Access().allows(authorization)


def test_tokens_are_compared_whole():
    assert is_token("abc", "abc") and not is_token("ab", "abc") and not is_token("abcd", "abc") and not is_token("", "abc")
