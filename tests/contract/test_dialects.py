"""Tests what every format of host descriptions must do, for all formats and recorded cases."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from dialect_cases import (
    CASES,
    HERE,
    LABEL,
    case_id,
    expected_of,
    outcome,
    reading_of,
    refusal,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from each_case import each_case
from paceline.hosts import DIALECTS
from paceline.hosts.dialect import Dialect, Reading
from paceline.hosts.dialects import ALIASES, ENVIRONMENTS
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host

VALID_CASES = [path for path in CASES if not path.name.startswith("error")]
INVALID_CASES = [path for path in CASES if path.name.startswith("error")]
WRITABLE = [name for name in DIALECTS if DIALECTS[name].write]
ROUND_TRIP = [name for name in WRITABLE if DIALECTS[name].is_complete]
NAMES = list(DIALECTS)
CHARACTERS = st.characters(max_codepoint=0x17F) | st.sampled_from("[]=:,@-\"'\n#{}19")

FULL_HOST = Host(
    "n2",
    address="10.0.0.2",
    slots=4,
    user="ml",
    port=2222,
    identity_file="/home/m l/key",
    interface="ens3",
    job_address="10.1.0.2",
    python='/opt/"odd"/bin/python',
    workdir="/scratch",
    env={"CUDA_VISIBLE_DEVICES": "0,1", "ODD": 'a "b" # c'},
)
CLUSTERS = {
    "names": Cluster((Host("n1"), Host("n2"), Host("n10"))),
    "slots": Cluster((Host("n1", slots=1), Host("n2", slots=4), Host("n3"))),
    "addresses": Cluster((Host("10.0.0.9"), Host("10.0.0.10"), Host("fd00::1", slots=2))),
    "ports": Cluster((Host("a", port=22), Host("b", port=50022, user="ml"), Host("c", slots=2))),
    "first port": Cluster((Host("a", port=50022), Host("b"))),
    "everything": Cluster((Host("n1"), FULL_HOST, Host("n3.example.org", slots=2))),
    "one": Cluster((Host("n1"),)),
    "order": Cluster((Host("n3"), Host("n1"), Host("n2"), Host("n02"), Host("m2"))),
}


def write_cluster(dialect: Dialect, cluster: Cluster) -> str:
    assert dialect.write is not None
    return dialect.write(cluster)


@each_case("name", NAMES)
def test_has_name_and_title(name: str) -> None:
    assert DIALECTS[name].name == name
    assert DIALECTS[name].title


@each_case("name", NAMES)
def test_has_recorded_cases(name: str) -> None:
    assert [path for path in VALID_CASES if path.parent.name == name]


def test_aliases_and_environments_are_registered() -> None:
    assert set(ALIASES.values()) <= set(DIALECTS)
    assert {name for name in DIALECTS if DIALECTS[name].is_environment} == set(ENVIRONMENTS)
    assert not set(ALIASES) & set(DIALECTS)


@each_case("path", VALID_CASES, ids=case_id)
def test_parses_recorded_cases(path: Path) -> None:
    parsed = DIALECTS[path.parent.name].parse(reading_of(path))
    assert outcome(parsed) == expected_of(path)


@each_case("path", VALID_CASES, ids=case_id)
def test_detects_dialect(path: Path) -> None:
    reading = reading_of(path)
    assert next(name for name in DIALECTS if DIALECTS[name].detect(reading)) == path.parent.name


@each_case("path", INVALID_CASES, ids=case_id)
def test_error_names_line(path: Path) -> None:
    with pytest.raises(HostsError) as caught:
        DIALECTS[path.parent.name].parse(reading_of(path))
    expected = expected_of(path)
    assert {key: refusal(caught.value)[key] for key in expected} == expected
    assert caught.value.exit_code == 2
    assert caught.value.found
    assert caught.value.remedy


@each_case("case", CLUSTERS)
@each_case("name", WRITABLE)
def test_output_ends_with_newline(name: str, case: str) -> None:
    assert write_cluster(DIALECTS[name], CLUSTERS[case]).endswith("\n")


@each_case("case", CLUSTERS)
@each_case("name", ROUND_TRIP)
def test_write_parse_round_trip(name: str, case: str) -> None:
    dialect, cluster = DIALECTS[name], CLUSTERS[case]
    text = write_cluster(dialect, cluster)
    parsed = dialect.parse(Reading(text=text, label=LABEL, colon=dialect.colon, hostname=HERE))
    assert [preserved(h, dialect) for h in parsed.hosts] == [
        preserved(h, dialect) for h in cluster.hosts
    ]


@each_case("case", CLUSTERS)
@each_case("name", [n for n in ROUND_TRIP if not DIALECTS[n].written_fields])
def test_rewriting_is_stable(name: str, case: str) -> None:
    dialect = DIALECTS[name]
    text = write_cluster(dialect, CLUSTERS[case])
    parsed = dialect.parse(Reading(text=text, colon=dialect.colon))
    assert write_cluster(dialect, Cluster(parsed.hosts)) == text


@each_case("name", NAMES)
@each_case(
    "text",
    ["", "\n", "#\n", "\0", "[", "]", "=", ":", ",", "@", "a=[\n", "[" * 9999, "a: 2026-99-99"],
)
def test_invalid_text_raises_only_hosts_error(name: str, text: str) -> None:
    reading = Reading(text=text, label=LABEL)
    DIALECTS[name].detect(reading)
    with suppress(HostsError):
        DIALECTS[name].parse(reading)


@each_case("name", NAMES)
def test_survives_deep_nesting(name: str) -> None:
    reading = Reading(text="a = " + "[" * 9999, label=LABEL)
    with suppress(HostsError):
        assert not DIALECTS[name].parse(reading).hosts


@pytest.mark.parametrize("name", NAMES)
@given(
    text=st.text(
        st.characters(max_codepoint=0x17F) | st.sampled_from("[]=:,@-\"'\n#{}"), max_size=60
    )
)
@settings(max_examples=60)
def test_random_text_is_parsed_or_rejected(name: str, text: str) -> None:
    reading = Reading(text=text or " ", label=LABEL)
    DIALECTS[name].detect(reading)
    with suppress(HostsError):
        hosts = DIALECTS[name].parse(reading).hosts
        assert len({host.name for host in hosts}) == len(hosts)
        assert not [host for host in hosts if host.address.startswith("-")]


@pytest.mark.parametrize("name", NAMES)
def test_parsing_accesses_no_environment_or_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_on_access(*_args: object) -> None:
        raise AssertionError("a dialect asked the machine")

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "uname", fail_on_access)
    dialect = DIALECTS[name]
    for path in (p for p in VALID_CASES if p.parent.name == name):
        reading = reading_of(path)
        monkeypatch.setattr(Path, "open", fail_on_access)
        dialect.parse(reading)
        monkeypatch.undo()


def preserved(host: Host, dialect: Dialect) -> dict[str, object]:
    """Returns the fields that the format can store; every host in a PBS node file has slots."""
    expected_host = replace(host, slots=host.slots or 1) if dialect.name == "pbs" else host
    return {field: getattr(expected_host, field) for field in sorted(dialect.preserved_fields)}
