"""A checkpoint holds more than weights.

Meaning: torch refused to load a file that would run code.
Cause: The file holds pickled objects of other classes than tensors.
Confirm: Where does the file come from? Only load foreign code on purpose.
Remedy: Save weights only (state_dict, or safetensors); for your own classes
    torch.serialization.add_safe_globals([...]).
Source: CVE-2025-32434 is why torch refuses; torch's message.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "unsafe-checkpoint",
    __doc__,
    ["Weights only load failed"],
    "{where}: a checkpoint holds more than weights, torch refuses to load it",
    confidence=0.96,
)
