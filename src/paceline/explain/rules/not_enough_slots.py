"""More processes than slots were asked for.

Meaning: mpirun has fewer slots than processes.
Cause: The host file says fewer slots than -np, or none at all (which means 1 in Open MPI).
Confirm: paceline hosts FILE shows how many slots each line means.
Remedy: Write slots=N on the host lines, or lower -np; paceline run -p N checks it before it
    starts.
Source: DeepSpeed 3669, ompi 12574.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "not-enough-slots",
    __doc__,
    [r"There are not enough slots available in the system to satisfy the (?P<words>\d+)"],
    "more processes were asked for than there are slots ({words})",
    confidence=0.97,
)
