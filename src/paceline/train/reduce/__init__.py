"""How the gradients of all ranks are averaged: one method a file, beside what they share."""
