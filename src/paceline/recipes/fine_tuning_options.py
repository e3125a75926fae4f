"""Options of fine-tuning, checked without torch."""

from __future__ import annotations

from paceline.recipes.options import Options
from paceline.spec.errors import SettingError


def check_fine_tuning(own: bool, options: Options) -> None:
    """Refuses combinations of --model, --weights, --from-scratch and --freeze without a sense.

    Args:
        own: Whether the model is one of the recipe's own.
        options: With these fields.
    """
    weights, scratch = getattr(options, "weights", ""), getattr(options, "from_scratch", False)
    freeze, stages = getattr(options, "freeze", False), getattr(options, "unfreeze_every", 0)
    if weights and not own:
        raise SettingError(
            f"--weights {weights} cannot be used with --model {options.model}",
            found="that model brings its own weights",
            remedy="--model FOLDER with the weights in it",
        )
    if freeze and (scratch or (own and not weights)):
        raise SettingError(
            "--freeze would keep random weights",
            found=f"--model {options.model} starts from scratch here",
            remedy="--weights RUN, or a Hugging Face model with its weights",
        )
    if stages and not freeze:
        raise SettingError(
            f"--unfreeze-every {stages} needs something frozen", remedy="--freeze, or leave it out"
        )
