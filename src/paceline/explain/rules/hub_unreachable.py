"""A model or data hub cannot be reached.

Meaning: A download failed because the host has no way to the internet, or the hub refused.
Cause: Compute nodes without internet, a proxy that is not set for the job, an offline switch,
    or a rate limit.
Confirm: curl -sI https://huggingface.co on that host, with the job's environment.
Remedy: Download once where there is internet and give a path: --model PATH --data PATH; set
    the proxy with --env https_proxy=…; or copy the cache and set HF_HUB_OFFLINE=1.
Source: trl 7223; huggingface_hub's and urllib3's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "hub-unreachable",
    __doc__,
    [
        r"HTTPS?ConnectionPool\(host='(?P<name>[^']{1,300})'",
        "(?P<name>LocalEntryNotFoundError|OfflineModeIsEnabled)",
        "HTTP Error (?P<name>403|407|429|503)",
        r"(?P<name>\d{3} Client Error: Too Many Requests)",
        "urlopen error (?P<name>[^>]+)",
    ],
    "{where}: a download failed ({name})",
    confidence=0.9,
)
