"""Which certificates files and folders have, what is refused and noted, and which certificate a name gets."""

import os
import shutil
import stat
from dataclasses import replace

import pytest
from cryptography.x509.ocsp import OCSPCertStatus

from helpers.certs import authority, issued, ocsp_response, self_signed
from redpoll.config.certificate import PairError
from redpoll.config.certificate_files import bundle, find, select, unbundle
from redpoll.config.settings import Settings


def found(certs, keys=(), ocsp=()):
    certs, keys, ocsp = (tuple(map(str, paths)) for paths in (certs, keys, ocsp))
    return find(Settings(tls_cert=certs, tls_key=keys, tls_ocsp=ocsp))


def faults_of(*paths, **more):
    with pytest.raises(PairError) as caught:
        found(*paths, **more)
    return caught.value.faults


def names(result):
    return [certificate.facts.names for certificate in result.certificates]


def made(folder, name, **options):
    folder.mkdir(exist_ok=True)
    return self_signed(folder, name, hosts=(f"{name}.example.com",), **options)


def certbot(folder, name):
    """As certbot keeps a lineage: its other files aren't used."""
    cert, key = made(folder, name)
    lineage = folder / name
    lineage.mkdir()
    shutil.copy(cert, lineage / "cert.pem")
    os.replace(cert, lineage / "fullchain.pem")
    os.replace(key, lineage / "privkey.pem")
    (folder / "README").write_text("text")
    return lineage


# -- finding ---------------------------------------------------------------------------------------------------


def test_files_and_their_keys_in_order(tmp_path):
    one, two = made(tmp_path, "one"), made(tmp_path, "two")
    result = found([one[0], two[0]], [one[1], two[1]])
    assert names(result) == [("one.example.com",), ("two.example.com",)]
    assert result.notes == []


def test_a_folder_has_pairs_of_one_name_and_those_of_certbot(tmp_path):
    live = tmp_path / "live"
    made(live, "b")
    cert, _ = made(live, "a")
    os.replace(cert, cert.with_suffix(".pem"))
    certbot(live, "c")
    # Kubernetes' own folder in a mounted Secret.
    (live / "..data").mkdir()
    assert names(found([live])) == [("a.example.com",), ("b.example.com",), ("c.example.com",)]
    assert names(found([live / "c"])) == [("c.example.com",)]


def test_a_pem_file_in_a_folder_may_have_both(tmp_path):
    cert, key = made(tmp_path, "one")
    (tmp_path / "one.pem").write_bytes(cert.read_bytes() + key.read_bytes())
    cert.unlink()
    key.unlink()
    assert names(found([tmp_path])) == [("one.example.com",)]


@pytest.mark.parametrize("name", ["cert", "chain", "fullchain"])
def test_a_file_with_a_name_of_certbots_counts_if_its_key_has_the_same_name(tmp_path, name):
    cert, key = made(tmp_path, name)
    pem = tmp_path / f"{name}.pem"
    os.replace(cert, pem)
    made(tmp_path, "ca")
    assert names(found([tmp_path])) == [(f"{name}.example.com",)]
    pem.write_bytes(pem.read_bytes() + key.read_bytes())
    key.unlink()
    assert names(found([tmp_path])) == [(f"{name}.example.com",)]


def test_keys_may_be_in_a_folder_of_their_own(tmp_path):
    _, key = made(tmp_path / "certs", "one")
    keys = tmp_path / "private"
    keys.mkdir()
    os.replace(key, keys / key.name)
    single = made(tmp_path, "single")
    result = found([tmp_path / "certs", single[0]], [keys, single[1]])
    assert names(result) == [("one.example.com",), ("single.example.com",)]


def test_a_certificate_without_a_key_in_a_folder_is_noted(tmp_path):
    made(tmp_path, "one")
    for name in ("ca", "two"):
        made(tmp_path, name)[1].unlink()
    result = found([tmp_path])
    assert names(result) == [("one.example.com",)]
    assert result.notes == [f"{str(tmp_path / 'two.crt')!r} has no key 'two.key' and isn't used"]
    assert found([certbot(tmp_path / "live", "three")]).notes == []


def test_a_folder_without_a_pair_is_refused(tmp_path):
    assert "contains no certificate with its key" in faults_of([tmp_path])["cert"]


def test_one_bad_pair_of_a_folder_is_named(tmp_path):
    made(tmp_path, "one")
    _, key = made(tmp_path, "two")
    os.replace(made(tmp_path, "other")[1], key)
    (tmp_path / "other.crt").unlink()
    assert "two.key' is not the key of the certificate" in faults_of([tmp_path])["key"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_refused(tmp_path):
    certbot(tmp_path / "live", "one")
    (tmp_path / "live").chmod(0)
    try:
        assert "can't be read: Permission denied" in faults_of([tmp_path / "live"])["cert"]
    finally:
        (tmp_path / "live").chmod(stat.S_IRWXU)


def test_missing_and_superfluous_keys_are_refused(tmp_path):
    one, two = made(tmp_path, "one"), made(tmp_path, "two")
    assert "names no file for the certificate" in faults_of([one[0], two[0]], [one[1]])["key"]
    assert "belongs to no certificate" in faults_of([one[0]], [one[1], two[1]])["key"]


# -- OCSP ------------------------------------------------------------------------------------------------------


def test_a_response_beside_its_certificate_or_named_by_the_setting_is_used(tmp_path):
    ca = authority(tmp_path)
    cert, key = issued(tmp_path, ca)
    response = ocsp_response(ca, cert)
    assert found([cert], [key]).certificates[0].staple == b""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/any.ocsp").write_bytes(response)
    for place in (tmp_path / "elsewhere", tmp_path / "elsewhere/any.ocsp"):
        assert found([cert], [key], [place]).certificates[0].staple == response
    for name in ("server.ocsp", "server.crt.ocsp"):
        (tmp_path / name).write_bytes(response)
        result = found([cert], [key])
        assert result.certificates[0].staple == response
        assert result.notes == []
        (tmp_path / name).unlink()


def test_the_response_that_counts_longest_is_used(tmp_path):
    ca = authority(tmp_path)
    cert, key = issued(tmp_path, ca)
    responses = [ocsp_response(ca, cert, days=days) for days in (1, 3, 2)]
    for number, response in enumerate(responses):
        (tmp_path / f"{number}.ocsp").write_bytes(response)
    assert found([cert], [key], [tmp_path]).certificates[0].staple == responses[1]


def test_a_response_that_does_no_good_is_noted_and_refuses_nothing(tmp_path):
    ca = authority(tmp_path)
    cert, key = issued(tmp_path, ca)
    other, _ = issued(tmp_path, ca, "other")
    path = tmp_path / "server.ocsp"
    for content, reason in (
        (b"<html>", "it is not DER"),
        (b"x" * 20_000, "more than 16384 bytes"),
        (ocsp_response(ca, cert, days=-1), "it has expired"),
        (ocsp_response(ca, cert, status=OCSPCertStatus.REVOKED), "is revoked"),
        (ocsp_response(ca, other), "about none of the certificates"),
    ):
        path.write_bytes(content)
        result = found([cert], [key])
        assert result.certificates[0].staple == b""
        (note,) = result.notes
        assert str(path) in note
        assert reason in note
    path.unlink()
    (note,) = found([cert], [key], [path]).notes
    assert "can't be read: No such file" in note


# -- the workers' file -----------------------------------------------------------------------------------------


def test_workers_read_what_was_written(tmp_path):
    ca = authority(tmp_path)
    cert, key = issued(tmp_path, ca, "chained")
    chain = tmp_path / "chain.crt"
    chain.write_bytes(cert.read_bytes() + ca[0].read_bytes())
    cert.with_suffix(".ocsp").write_bytes(ocsp_response(ca, cert))
    plain = made(tmp_path, "plain", kind="RSA")
    result = found([chain, plain[0]], [key, plain[1]], [cert.with_suffix(".ocsp")])
    read = unbundle(bundle(result.certificates), "tls.pem")
    assert [(one.pem, one.facts, one.staple, one.staple_until_s) for one in read] == [
        (one.pem, one.facts, one.staple, one.staple_until_s) for one in result.certificates
    ]
    assert read[0].pem.count(b"BEGIN CERTIFICATE") == 2


@pytest.mark.parametrize("text", [b"", b"hello", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_another_file_is_refused(text):
    with pytest.raises(PairError):
        unbundle(text, "tls.pem")


# -- choosing --------------------------------------------------------------------------------------------------


def test_each_name_has_its_certificates_and_unknown_ones_the_first(tmp_path):
    certificates = found(
        *zip(
            self_signed(tmp_path, "a", hosts=("a.example.com", "www.example.com")),
            self_signed(tmp_path, "b", hosts=("*.example.com",), kind="RSA"),
            self_signed(tmp_path, "c", hosts=("c.example.org",)),
            strict=True,
        )
    ).certificates
    selection = select(certificates)
    assert {name: selection.groups[group] for name, group in selection.names.items()} == {
        "a.example.com": (0, 1),
        "www.example.com": (0, 1),
        "*.example.com": (1,),
        "c.example.org": (2,),
    }
    assert selection.groups[0] == (0, 1)


def test_of_two_of_one_kind_the_one_that_is_valid_longer_is_used_but_the_default_stays_the_first(tmp_path):
    certificates = found(
        *zip(
            self_signed(tmp_path, "old", hosts=("a.example.com",), days=2),
            self_signed(tmp_path, "new", hosts=("a.example.com",), days=30),
            self_signed(tmp_path, "wild", hosts=("*.example.com",), days=60),
            strict=True,
        )
    ).certificates
    selection = select(certificates)
    assert selection.groups[selection.names["a.example.com"]] == (1,)
    assert selection.groups[0] == (0,)


def test_a_certificate_without_names_is_for_all_who_ask_for_none(tmp_path):
    certificates = found(*zip(self_signed(tmp_path, hosts=()), made(tmp_path, "a"), strict=True)).certificates
    selection = select(certificates)
    assert selection.groups[0] == (0,)
    assert selection.groups[selection.names["a.example.com"]] == (1,)


def test_names_of_as_many_certificates_as_there_may_be(tmp_path):
    (one,) = found(*zip(made(tmp_path, "a"), strict=True)).certificates
    # Workers choose at each reload, and serve nobody meanwhile: one name must not look at all certificates.
    certificates = [
        replace(
            one, facts=one.facts._replace(names=(*(f"{at}.{n}.example.com" for at in range(100)), "all.example.com"))
        )
        for n in range(256)
    ]
    selection = select(certificates)
    assert len(selection.names) == 25_601
    assert all(selection.groups[selection.names[f"99.{n}.example.com"]] == (n,) for n in range(256))
    assert selection.groups[selection.names["all.example.com"]] == (0,)
