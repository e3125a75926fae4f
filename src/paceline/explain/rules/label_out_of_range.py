"""A label is outside the classes.

Meaning: A target index is not below the number of classes.
Cause: The model's number of classes does not fit the data, labels start at 1, or an ignored
    value is not declared.
Confirm: Print min and max of the labels and the size of the last layer; run on CPU for a
    readable message.
Remedy: Set the number of classes from the data, subtract 1 from labels that start at 1, or
    pass ignore_index.
Source: torch's message; CUDA shows it as a device-side assert.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "label-out-of-range",
    __doc__,
    [
        r"IndexError: Target (?P<words>-?\d+) is out of bounds",
        "Assertion `t >= 0 && t < n_classes` failed",
        "(?P<words>device-side assert) triggered",
    ],
    "{where}: a label is outside the classes ({words})",
    confidence=0.85,
)
