"""Recovery in place: a rank is lost, or a new one comes, and the others continue."""
