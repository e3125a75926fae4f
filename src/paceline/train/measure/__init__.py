"""What a training measures of itself: where the time goes, and which batch and rate fit."""
