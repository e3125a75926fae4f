"""From a job and facts about hosts to a plan. Pure."""
