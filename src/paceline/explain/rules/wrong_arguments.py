"""The script does not know an argument.

Meaning: The script's own argument parser refused its command line.
Cause: A misspelt option, a missing value, or an option for the launcher that was typed after
    the script's name.
Confirm: PYTHON SCRIPT --help
Remedy: Correct the spelling; options for paceline stand before the script's name, those of
    the script after it.
Source: argparse's and click's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "wrong-arguments",
    __doc__,
    [
        "error: (?P<words>unrecognized arguments: .+)",
        "error: (?P<words>the following arguments are required: .+)",
        r"error: (?P<words>argument \S{1,300}: .+)",
        "Error: (?P<words>No such option.*)",
    ],
    "{where}: {words}",
    confidence=0.95,
)
