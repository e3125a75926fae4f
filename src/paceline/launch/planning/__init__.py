"""Plans from a job and facts about hosts. Pure."""
