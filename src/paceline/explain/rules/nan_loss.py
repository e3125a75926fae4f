"""The loss is not a number.

Meaning: Training diverged: the loss became NaN or infinite.
Cause: Learning rate too high (often after scaling it with the world size), fp16 overflow, a
    bad sample or division by zero.
Confirm: Which step first? Rerun from the last checkpoint before it with --dtype float32 and
    torch.autograd.set_detect_anomaly(True).
Remedy: Lower --lr or lengthen warm-up, use bf16 instead of fp16, clip gradients (--clip-norm 1.0),
    check the samples of that step.
Source: accelerate 2773 and 2926 for learning rates that scale by themselves.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "nan-loss",
    __doc__,
    [
        (
            r"(?i:\b(?:train_|val_|eval_)?loss\b['\x22]?\s{0,20}(?:[:=]|is"
            r"|became)?\s{0,20}(?P<words>nan|-?inf)\b)"
        ),
        r"(?i:(?P<words>non-finite|not finite|nonfinite)\W{1,20}(?:\w{1,30}\W{1,20}){0,2}loss)",
        r"(?i:loss\W{1,20}(?:\w{1,30}\W{1,20}){0,3}(?P<words>non-finite|not finite))",
        "returned (?P<words>nan) values in its 0th output",
    ],
    "{where}: the loss became {words}",
    confidence=0.85,
)
