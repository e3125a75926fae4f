"""PBS: the file that ``$PBS_NODEFILE`` names, in which each line is one slot."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from paceline.hosts.dialect import Dialect, FileReference, Parsed, Reading
from paceline.hosts.lines import parse_lines, try_read_mentions
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster

FILE_VARIABLE = "PBS_NODEFILE"


def detect(reading: Reading) -> bool:
    """Whether the variable is set, or the text repeats bare host names."""
    if not reading.text:
        return bool(reading.environ.get(FILE_VARIABLE))
    mentions = try_read_mentions(reading)
    repeats = max(Counter(mention.address for mention in mentions).values(), default=0) > 1
    return repeats and all(m.slots is None and m.number is None for m in mentions)


def parse(reading: Reading) -> Parsed:
    """Returns the node file's hosts; without text, the path of the node file."""
    if reading.text:
        parsed = parse_lines(reading)
        return replace(parsed, hosts=tuple(replace(h, slots=h.slots or 1) for h in parsed.hosts))
    path = reading.environ.get(FILE_VARIABLE)
    if not path:
        raise HostsError(
            "the hosts of a PBS job were asked for, and this is not a PBS job",
            found=f"${FILE_VARIABLE} is not set",
            remedy="run this inside the job (`qsub -I` for a shell in one), or name a host file",
        )
    return Parsed(reference=FileReference(path, "pbs"))


def write(cluster: Cluster) -> str:
    """Writes each address once for each slot."""
    return "".join(f"{host.address}\n" * (host.slots or 1) for host in cluster.hosts)


DIALECT = Dialect(
    name="pbs",
    title="PBS node file",
    detect=detect,
    parse=parse,
    write=write,
    preserved_fields=frozenset({"address", "slots"}),
    is_environment=True,
)
