"""What every dialect of host descriptions must do, over the registry and recorded cases."""

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

GOOD = [path for path in CASES if not path.name.startswith("error")]
BAD = [path for path in CASES if path.name.startswith("error")]
WRITABLE = [name for name in DIALECTS if DIALECTS[name].write]
READ_BACK = [name for name in WRITABLE if DIALECTS[name].is_complete]
NAMES = list(DIALECTS)
CHARACTERS = st.characters(max_codepoint=0x17F) | st.sampled_from("[]=:,@-\"'\n#{}19")

FULL = Host(
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
    "everything": Cluster((Host("n1"), FULL, Host("n3.example.org", slots=2))),
    "one": Cluster((Host("n1"),)),
    "order": Cluster((Host("n3"), Host("n1"), Host("n2"), Host("n02"), Host("m2"))),
}


def written(dialect: Dialect, cluster: Cluster) -> str:
    assert dialect.write is not None
    return dialect.write(cluster)


@each_case("name", NAMES)
def test_is_what_it_is_called(name: str) -> None:
    assert DIALECTS[name].name == name
    assert DIALECTS[name].title


@each_case("name", NAMES)
def test_has_recorded_cases(name: str) -> None:
    assert [path for path in GOOD if path.parent.name == name]


def test_aliases_and_environments_are_known() -> None:
    assert set(ALIASES.values()) <= set(DIALECTS)
    assert {name for name in DIALECTS if DIALECTS[name].is_environment} == set(ENVIRONMENTS)
    assert not set(ALIASES) & set(DIALECTS)


@each_case("path", GOOD, ids=case_id)
def test_understands(path: Path) -> None:
    parsed = DIALECTS[path.parent.name].parse(reading_of(path))
    assert outcome(parsed) == expected_of(path)


@each_case("path", GOOD, ids=case_id)
def test_is_detected(path: Path) -> None:
    reading = reading_of(path)
    assert next(name for name in DIALECTS if DIALECTS[name].detect(reading)) == path.parent.name


@each_case("path", BAD, ids=case_id)
def test_refuses_with_the_line(path: Path) -> None:
    with pytest.raises(HostsError) as caught:
        DIALECTS[path.parent.name].parse(reading_of(path))
    expected = expected_of(path)
    assert {key: refusal(caught.value)[key] for key in expected} == expected
    assert caught.value.exit_code == 2
    assert caught.value.found
    assert caught.value.remedy


@each_case("case", CLUSTERS)
@each_case("name", WRITABLE)
def test_writes_whole_lines(name: str, case: str) -> None:
    assert written(DIALECTS[name], CLUSTERS[case]).endswith("\n")


@each_case("case", CLUSTERS)
@each_case("name", READ_BACK)
def test_reads_back_what_it_writes(name: str, case: str) -> None:
    dialect, cluster = DIALECTS[name], CLUSTERS[case]
    text = written(dialect, cluster)
    parsed = dialect.parse(Reading(text=text, label=LABEL, colon=dialect.colon, hostname=HERE))
    assert [kept(h, dialect) for h in parsed.hosts] == [kept(h, dialect) for h in cluster.hosts]


@each_case("case", CLUSTERS)
@each_case("name", [n for n in READ_BACK if not DIALECTS[n].written_fields])
def test_writing_again_changes_nothing(name: str, case: str) -> None:
    dialect = DIALECTS[name]
    text = written(dialect, CLUSTERS[case])
    parsed = dialect.parse(Reading(text=text, colon=dialect.colon))
    assert written(dialect, Cluster(parsed.hosts)) == text


@each_case("name", NAMES)
@each_case(
    "text",
    ["", "\n", "#\n", "\0", "[", "]", "=", ":", ",", "@", "a=[\n", "[" * 9999, "a: 2026-99-99"],
)
def test_never_fails_otherwise_than_with_a_hosts_error(name: str, text: str) -> None:
    reading = Reading(text=text, label=LABEL)
    DIALECTS[name].detect(reading)
    with suppress(HostsError):
        DIALECTS[name].parse(reading)


@each_case("name", NAMES)
def test_deep_nesting_does_no_harm(name: str) -> None:
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
def test_any_text_is_understood_or_refused(name: str, text: str) -> None:
    reading = Reading(text=text or " ", label=LABEL)
    DIALECTS[name].detect(reading)
    with suppress(HostsError):
        hosts = DIALECTS[name].parse(reading).hosts
        assert len({host.name for host in hosts}) == len(hosts)
        assert not [host for host in hosts if host.address.startswith("-")]


@pytest.mark.parametrize("name", NAMES)
def test_looks_at_nothing_but_the_reading(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_args: object) -> None:
        raise AssertionError("a dialect asked the machine")

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "uname", touched)
    dialect = DIALECTS[name]
    for path in (p for p in GOOD if p.parent.name == name):
        reading = reading_of(path)
        monkeypatch.setattr(Path, "open", touched)
        dialect.parse(reading)
        monkeypatch.undo()


def kept(host: Host, dialect: Dialect) -> dict[str, object]:
    """What of a host the dialect keeps; a PBS node file has no host without slots."""
    said = replace(host, slots=host.slots or 1) if dialect.name == "pbs" else host
    return {field: getattr(said, field) for field in sorted(dialect.preserved_fields)}
