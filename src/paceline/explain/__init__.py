"""What went wrong, from what a run left behind: evidence, rules, one conclusion."""
